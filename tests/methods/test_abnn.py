"""ABNN: noise in normalization layers, from a trained network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES, hf_cases
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import noise


def test_a_sample_is_the_formula_of_the_paper() -> None:
    """(x - mean) / std · γ(1 + α·ε) + β in every normalization layer, with the ε of the key."""
    network = CASES["resnet"].build().double().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    x = CASES["resnet"].example().double()
    bnn = lb.bayesianize(network, lb.ABNN(noise_std=0.3))
    epsilon = noise.normal(bnn.posterior.mean(), noise.make_key(4))
    expected = copy.deepcopy(network)
    with torch.no_grad(), bnn.frozen(4):
        for slot, part in zip(bnn.layout, bnn.layout.split(epsilon), strict=True):
            expected.get_parameter(slot.name).mul_(1 + 0.3 * part)
        torch.testing.assert_close(bnn(x), expected(x))


def test_mean_and_variance_are_those_of_samples() -> None:
    bnn = lb.bayesianize(nn.LayerNorm(200).double(), lb.ABNN(noise_std=0.2), likelihood=lb.Gaussian())
    with torch.no_grad():
        bnn.posterior.mu.copy_(torch.linspace(-1, 2, 200))  # type: ignore[operator]
        samples = torch.stack([bnn.posterior.sample(noise.make_key(0, index)) for index in range(2000)])
        mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    assert (samples.mean(0) - mean).abs().max() < 5 * 0.4 / 2000**0.5
    torch.testing.assert_close(samples.var(0), variance, rtol=0.15, atol=1e-9)
    assert bnn.kl() == 0


def test_one_pass_has_the_variance_of_the_noise() -> None:
    """Of a norm and a linear layer the variance is exact: Σ_j W_ij² α²γ_j² z_j², with z the normalized input."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()
    norm, linear = network
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)  # type: ignore[arg-type]
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    bnn = lb.bayesianize(network, lb.ABNN(noise_std=0.3), likelihood=lb.Gaussian()).eval()
    with torch.no_grad(), bnn.using("moments"):
        output = bnn(x)
        z = F.layer_norm(x, (4,))
        expected = (0.3 * norm.weight * z).square() @ linear.weight.square().T  # type: ignore[operator]
        torch.testing.assert_close(output.variance, expected)
        torch.testing.assert_close(output.loc, network(x))


def test_only_normalization_layers_are_trained() -> None:
    network, x = CASES["vit_mha"].build(), CASES["vit_mha"].example()
    bnn = lb.bayesianize(network, lb.ABNN())
    norms = [name for name, module in network.named_modules() if isinstance(module, nn.LayerNorm)]
    assert [slot.name for slot in bnn.layout] == [f"{name}.weight" for name in norms]
    lb.elbo_loss(bnn, x, torch.zeros(4, dtype=torch.long), num_data=4).backward()
    trained = {name for name, p in bnn.named_parameters() if p.grad is not None}
    assert trained == {"posterior.mu", *(f"network.{name}.bias" for name in norms)}
    both = lb.bayesianize(network, lb.ABNN(train_all=True))
    assert all(p.requires_grad for p in both.parameters())


def test_norms_of_other_libraries_are_found() -> None:
    case = hf_cases()["hf_bert"]
    bnn = lb.bayesianize(case.build(), lb.ABNN())
    assert len(bnn.layout) == 5
    assert all("LayerNorm.weight" in slot.name for slot in bnn.layout)


def test_a_file_is_as_large_as_that_of_the_network(tmp_path: Path) -> None:
    network = CASES["resnet"].build()
    sizes = []
    for method in (lb.Deterministic(), lb.ABNN()):
        bnn = lb.bayesianize(network, method)
        lb.save(bnn, tmp_path / "model")
        sizes.append(sum(tensor.numel() for tensor in bnn.state_dict().values()))
        loaded = lb.load(tmp_path / "model", CASES["resnet"].build())
        assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in bnn.parameters()]
    assert sizes[0] == sizes[1]


def test_it_starts_from_a_plain_training(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 2, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    network = nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))
    data = torch.utils.data.TensorDataset(x, y)
    settings: dict[str, Any] = {"batch_size": 24, "lr": 1e-2, "progress": False, "seed": 0}
    bnn = lb.fit(network, lb.ABNN(pretrain=0.75), data, epochs=24, **settings)
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    assert bnn.predict(x).mutual_information.mean() > 1e-4
    frozen = bnn.network.get_parameter("0.weight").clone()
    again = lb.fit(bnn.to_deterministic(), lb.ABNN(pretrain=0.0), data, epochs=2, **settings)
    assert again.network.get_parameter("0.weight").equal(frozen)


def test_wrong_settings_and_networks_are_refused() -> None:
    class Outputs(nn.Module):
        """A network with a normalization layer that has no scale."""

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[1:])

    calls: dict[str, Any] = {
        "noise_std=0.0 must be": lambda: lb.ABNN(noise_std=0.0),
        "pretrain=1.0 must be": lambda: lb.ABNN(pretrain=1.0),
        "samples=0 must be": lambda: lb.ABNN(samples=0),
        "ABNN needs normalization layers": lambda: lb.bayesianize(nn.Sequential(nn.Linear(3, 3), Outputs()), lb.ABNN()),
        "leave select out": lambda: lb.bayesianize(CASES["cnn"].build(), lb.ABNN(), select="weight"),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).endswith(".")
