"""SNGP: the Gaussian process against its exact formulas, bounded layers, and uncertainty far from the data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.method import Training


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def examples(count: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def fitted(method: lb.SNGP, steps: int = 3, lr: float = 0.1) -> tuple[BayesianModel, Tensor, Tensor]:
    """Train in one's own loop."""
    x, y = examples()
    bnn = lb.bayesianize(build(), method, seed=0)
    training = Training(bnn, steps=steps, num_data=len(x), batches=lambda: zip(x.split(20), y.split(20), strict=True))
    method.start(training)
    optimizer = torch.optim.SGD(bnn.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=len(x)).backward()
        optimizer.step()
        method.after_step(training)
        training.step += 1
    return bnn, x, y


def normalized(bnn: BayesianModel, x: Tensor) -> Tensor:
    """Return the features of the last layer with mean 0 and variance 1."""
    first: Any = bnn.network.get_submodule("inner.0")
    with torch.no_grad():
        h = first(x).tanh()
    return (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def kernel(a: Tensor, b: Tensor, length_scale: float) -> Tensor:
    return 4 * (-torch.cdist(a, b).square() / (2 * a.shape[1] * length_scale**2)).exp()


def test_the_variance_is_that_of_the_exact_gaussian_process() -> None:
    """With many random features, and k with the amplitude: k(x,x)/τ - k(x,X)/τ (k(X,X)/τ + I)⁻¹ k(X,x)/τ."""
    method = lb.SNGP(2500, length_scale=0.7, amplitude=2.0, ridge=0.5)
    bnn, x, _ = fitted(method)
    far = torch.cat([x[:10], 3 * x[:10] + 1])
    z, train = normalized(bnn, far), normalized(bnn, x)
    cross, inner = kernel(z, train, 0.7) / 0.5, kernel(train, train, 0.7) / 0.5
    inverse = (inner + torch.eye(len(x), dtype=torch.float64)).inverse()
    expected = 8.0 - (cross @ inverse * cross).sum(1)
    network: Any = bnn.network
    features = network.features(bnn.network.get_submodule("inner.0")(far).tanh())
    torch.testing.assert_close(features @ features.T, kernel(z, z, 0.7), rtol=0, atol=0.3)
    torch.testing.assert_close(network.variance(features)[:, 0], expected, rtol=0.15, atol=0.1)


def test_the_covariance_is_the_closed_form() -> None:
    bnn, x, _ = fitted(lb.SNGP(40, ridge=2.0))
    network: Any = bnn.network
    with torch.no_grad():
        features = network.features(bnn.network.get_submodule("inner.0")(x).tanh())
    expected = (2 * torch.eye(40, dtype=torch.float64) + features.T @ features).inverse()
    torch.testing.assert_close(network.covariance, expected)


def test_samples_have_the_variance_of_the_process() -> None:
    bnn, x, _ = fitted(lb.SNGP(40))
    outputs = bnn.predict(x[:8], 4000, keep_outputs=True, generator=torch.Generator().manual_seed(0)).outputs
    assert outputs is not None
    network: Any = bnn.network
    with torch.no_grad(), bnn.using("mean"):
        mean = bnn(x[:8])
        variance = network.variance(network.features(bnn.network.get_submodule("inner.0")(x[:8]).tanh()))
    assert ((outputs.mean(0) - mean).abs() < 5 * (variance / 4000).sqrt()).all()
    torch.testing.assert_close(outputs.var(0), variance.expand_as(mean), rtol=0.15, atol=0)
    torch.testing.assert_close(bnn.to_deterministic()(x[:8]), mean)


def test_layers_are_bounded() -> None:
    bnn, _, _ = fitted(lb.SNGP(40, norm_bound=0.5), steps=30, lr=0.5)
    first: Any = bnn.network.get_submodule("inner.0")
    largest = torch.linalg.svdvals(first.weight)[0].item()
    assert 0.3 < largest < 0.5 * 1.02
    free, _, _ = fitted(lb.SNGP(40, norm_bound=100.0), steps=30, lr=0.5)
    assert torch.linalg.svdvals(free.network.get_parameter("inner.0.weight"))[0] > 0.6


def test_convolutions_are_bounded_as_matrices() -> None:
    network = CASES["cnn"].build()
    bnn = lb.bayesianize(network, lb.SNGP(16))
    process: Any = bnn.network
    for _ in range(50):
        process.bound_layers(0.1)
    for name in ("0", "4"):
        weight = bnn.network.get_parameter(f"inner.{name}.weight").detach().flatten(1)
        assert torch.linalg.svdvals(weight)[0].item() == pytest.approx(0.1, rel=1e-3)
    assert network.get_parameter("0.weight").flatten(1).svd().S[0] > 0.3  # the user's network is not changed


def test_inputs_far_from_the_data_are_uncertain() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(100, 2, generator=generator) * 0.3 + shift for shift in (-1.0, 1.0)])
    y = torch.arange(200) // 100
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    data = torch.utils.data.TensorDataset(x, y)
    settings: dict[str, Any] = {"epochs": 15, "batch_size": 20, "lr": 1e-2, "progress": False, "seed": 0}
    bnn = lb.fit(network, lb.SNGP(256), data, **settings)
    away = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]) * 8
    near, far = (
        bnn.predict(one, 50, generator=torch.Generator().manual_seed(1)).mutual_information.mean() for one in (x, away)
    )
    assert (bnn.predict(x).label == y).float().mean() > 0.98
    assert far > 3 * near


def test_a_file_has_the_process_but_not_its_random_features(tmp_path: Path) -> None:
    sizes = [
        sum(tensor.numel() for tensor in lb.bayesianize(build(), method).state_dict().values())
        for method in (lb.Deterministic(), lb.SNGP(40))
    ]
    assert sizes[1] - sizes[0] == 40 * 40 + 2 * 40 + 16  # covariance, β, and the direction of power iteration
    bnn, x, _ = fitted(lb.SNGP(40, seed=3))
    lb.save(bnn, tmp_path / "model")
    generators = (torch.Generator().manual_seed(0) for _ in range(2))
    one, other = (
        m.predict(x, generator=g).probs
        for m, g in zip((bnn, lb.load(tmp_path / "model", build())), generators, strict=True)
    )
    assert one.equal(other)


def test_wrong_settings_and_networks_are_refused() -> None:
    bnn = lb.bayesianize(build(), lb.SNGP(8))
    training = Training(bnn, steps=1, num_data=60)
    calls: dict[str, Any] = {
        "features=0 must be": lambda: lb.SNGP(0),
        "length_scale=0.0 must be": lambda: lb.SNGP(length_scale=0.0),
        "amplitude=0.0 must be": lambda: lb.SNGP(amplitude=0.0),
        "norm_bound=-1.0 must be": lambda: lb.SNGP(norm_bound=-1.0),
        "ridge=0.0 must be": lambda: lb.SNGP(ridge=0.0),
        "samples=0 must be": lambda: lb.SNGP(samples=0),
        "ends in a linear layer": lambda: lb.bayesianize(CASES["autoencoder"].build(), lb.SNGP()),
        "set training.batches": lambda: bnn.method.after_step(training),
        "has no Bayesian weights": lambda: lb.bayesianize(build(), lb.SNGP(), select="weight"),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).endswith(".")
