"""Pruning agrees with sorted lists and masked deterministic networks, for every method and rule."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import CASES
from torch import Tensor, nn
from training_cases import expect

import leanbayes as lb
from leanbayes.core.layout import Layout
from leanbayes.core.noise import make_key, normal
from leanbayes.errors import UnsupportedOperation
from leanbayes.evaluation import evaluate
from leanbayes.evaluation.pruning import CRITERIA, Pruned, prune
from leanbayes.methods import METHODS as ALL_METHODS
from leanbayes.posteriors import Posterior

METHODS = {**ALL_METHODS, "pbn": lb.PBN(0.2, sensitivity="random")}  # its default sensitivity needs data
for fitted_to_data in ("laplace", "std-search"):
    METHODS.pop(fitted_to_data)
# The others have Bayesian norms, random features, a Bayesian last layer only, or members that are not collected yet.
OF_WEIGHTS = [name for name in METHODS if name not in ("abnn", "sngp", "swag", "vbll", "csgmcmc")]

RULES = ["sample", "flipout", "local", "mean"]
KEY = make_key(3, 5)


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mean_field(name: str = "mlp", **settings: Any) -> lb.BayesianModel:
    """A mean-field model whose stds are not in the order of its means."""
    bnn = lb.bayesianize(CASES[name].build(), lb.MeanField(**settings))
    rho: Any = bnn.posterior.rho
    rho.data.copy_(torch.randn(rho.shape, generator=generator()) - 2)
    return bnn


def of_weights(weights: list[float], stds: list[float] | None = None) -> lb.BayesianModel:
    """A linear network with one output, these weights, and these stds if there are any."""
    network = nn.Linear(len(weights), 1)
    network.weight.data.copy_(torch.tensor([weights]))
    method: lb.Method = lb.MeanField(init_std=0.1, relative=False) if stds else lb.Deterministic()
    bnn = lb.bayesianize(network, method, likelihood=lb.Gaussian())
    if stds:
        rho: Any = bnn.posterior.rho
        rho.data.copy_(torch.tensor(stds).expm1().log())
    return bnn


def zeros_of(bnn: lb.BayesianModel) -> list[int]:
    """Indices of the zero weights in a model of `of_weights`."""
    weight: Any = bnn.to_deterministic().weight
    return (weight[0] == 0).nonzero()[:, 0].tolist()


def weights_and_others(bnn: lb.BayesianModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All matrices of a network in one sample, and all its other parameters."""
    network: Any = bnn.network
    with bnn.using("sample"), bnn.drawn(bnn.next_draw(generator())):
        seen = {
            f"{prefix}.{name}": value.detach().clone()
            for prefix, module in network.named_modules()
            for name in ("weight", "bias")
            if isinstance(value := getattr(module, name, None), Tensor)
        }
    if isinstance(bnn.method, (lb.AEB, lb.MBNN)):  # the copies of the network have the same weights
        seen = {name: value for name, value in seen.items() if value.dim() == 1 or name.startswith("networks.0.")}
    stacked = isinstance(bnn.method, lb.PackedEnsemble)  # the first dimension is that of the members
    matrices = {name: value for name, value in seen.items() if value.dim() > 1 + stacked}
    return matrices, {name: value for name, value in seen.items() if name not in matrices}


# -- which weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", OF_WEIGHTS)
@pytest.mark.parametrize("percent", [0, 30, 77, 100])
def test_exactly_the_share_of_weights_is_pruned_for_every_method(method: str, percent: int) -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), METHODS[method])
    for norm in (m for m in bnn.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, -1e-6, 1e-6)  # smaller than any weight
    before, others = weights_and_others(bnn)
    after, others_after = weights_and_others(prune(bnn, percent / 100))
    total = sum(weight.numel() for weight in before.values())
    zeros = sum(int((weight == 0).sum()) for weight in before.values())  # the zeros of a sparse method are pruned first
    assert sum(int((weight == 0).sum()) for weight in after.values()) == max(zeros, percent * total // 100)
    assert zeros < total
    for name, weight in after.items():
        torch.testing.assert_close(weight, torch.where(weight == 0, 0.0, before[name]), rtol=0, atol=0)
    assert others_after.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in others_after.items())
    assert len(others) >= 5
    x = CASES["cnn"].example()
    with torch.no_grad():
        assert prune(bnn, percent / 100).predict(x).probs.isfinite().all()


@pytest.mark.parametrize("by", CRITERIA)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["mlp", "cnn", "vit_mha", "lstm"])
def test_the_least_important_weights_of_all_layers_are_pruned(name: str, share: float, by: str) -> None:
    bnn = mean_field(name)
    mean, std = bnn.posterior.mean().tolist(), bnn.posterior.variance().sqrt().tolist()
    ratio = [abs(m) / (s if by == "snr" else 1.0) for m, s in zip(mean, std, strict=True)]
    order = sorted(range(len(ratio)), key=lambda i: (ratio[i], i))
    expected = sorted(order[: math.floor(share * len(ratio))])
    posterior = prune(bnn, share, by).posterior
    assert isinstance(posterior, Pruned)
    assert posterior.dropped.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("method", ["deterministic", "mc-dropout", "ensemble"])
def test_a_networks_own_weights_are_ranked_together(method: str) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), METHODS[method])
    held = [p for p in bnn.network.parameters() if p.dim() > 1]
    ranked = sorted(abs(value) for p in held for value in p.flatten().tolist())
    limit = ranked[len(ranked) // 2]
    after = [p for p in prune(bnn, 0.5).network.parameters() if p.dim() > 1]
    assert len(held) == (15 if method == "ensemble" else 3)
    for weight, pruned in zip(held, after, strict=True):
        assert torch.equal(pruned, torch.where(weight.abs() < limit, 0.0, weight))


def test_signal_to_noise_and_magnitude_rank_differently() -> None:
    bnn = of_weights([1.0, 0.1, -2.0, 0.5], [2.0, 0.01, 0.5, 0.9])  # ratios 0.5, 10, 4, 0.56
    assert zeros_of(prune(bnn, 0.5, "magnitude")) == [1, 3]
    assert zeros_of(prune(bnn, 0.5, "snr")) == [0, 3]


@pytest.mark.parametrize("stds", [None, [0.1] * 6])
def test_the_first_of_equal_weights_are_pruned_first(stds: list[float] | None) -> None:
    bnn = of_weights([0.5, -0.5, 0.1, 0.5, -0.5, 0.5], stds)
    for count, gone in enumerate([[], [2], [0, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]):
        assert zeros_of(prune(bnn, count / 6 + 0.01)) == gone


@pytest.mark.parametrize(
    ("share", "total", "count"),
    [
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.58, 100, 58),
        (0.299, 100, 29),
        (1, 100, 100),
        (1 / 3, 3, 1),
        (2 / 3, 21, 14),
    ],
)
def test_shares_are_not_affected_by_float_rounding(share: float, total: int, count: int) -> None:
    assert zeros_of(prune(of_weights([1.0 + i for i in range(total)]), share)) == list(range(count))


def test_tied_weights_count_once_and_frozen_weights_are_kept() -> None:
    network: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    network[1].weight = network[0].weight
    network[2].weight.requires_grad_(False).fill_(1e-9)
    for method in (lb.Deterministic(), lb.MeanField()):
        pruned: Any = prune(lb.bayesianize(network, method), 0.5).to_deterministic()
        assert pruned[0].weight is pruned[1].weight
        assert (pruned[0].weight == 0).sum() == 8
        assert torch.equal(pruned[2].weight, network[2].weight)


@pytest.mark.parametrize("method", [lb.Deterministic(), lb.MeanField()])
def test_the_mask_follows_the_memory_order_of_the_weights(method: lb.Method) -> None:
    network = CASES["cnn"].build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = [p.detach() for p in network.parameters() if p.dim() > 1]
    ranked = torch.cat([w.flatten() for w in weights]).abs().sort().values
    limit = ranked[len(ranked) // 2]
    pruned = prune(lb.bayesianize(network, method), 0.5).to_deterministic()
    for weight, after in zip(weights, (p for p in pruned.parameters() if p.dim() > 1), strict=True):
        assert torch.equal(after, torch.where(weight.abs() < limit, 0.0, weight))


def test_bayesian_biases_and_norms_are_not_pruned() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField(), select=".*")
    before, others = bnn.to_deterministic().state_dict(), []
    for name, value in prune(bnn, 1.0).to_deterministic().state_dict().items():
        if value.dim() > 1:
            assert not value.any()
        else:
            assert torch.equal(value, before[name])
            others.append(name)
    assert len(others) == 12
    biases = lb.bayesianize(CASES["cnn"].build(), lb.MeanField(), select="bias")
    expect(lambda: prune(biases, 0.5), "biases", "select=")


class Mixed(nn.Module):
    """Parameters of every kind, all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4))
        self.position_bias = nn.Parameter(torch.ones(1, 4))
        self.matrix = nn.Parameter(torch.ones(4, 4))
        self.norm = nn.LayerNorm((2, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x @ self.matrix * self.gamma + self.position_bias)).sum(1)


def test_only_weight_matrices_are_pruned() -> None:
    pruned = prune(lb.bayesianize(Mixed(), lb.MeanField(), select=".*"), 1.0).to_deterministic()
    zero = [name for name, value in pruned.named_parameters() if not value.any()]
    assert zero == ["matrix", "norm.bias", "head.weight"]  # the bias of a norm is initialized to 0


def test_pruning_twice_equals_pruning_once() -> None:
    bnn = mean_field()
    for by in CRITERIA:
        twice, once = prune(prune(bnn, 0.5, by), 0.75, by), prune(bnn, 0.75, by)
        assert torch.equal(twice.posterior.mean(), once.posterior.mean())
        assert (twice.posterior.mean() == 0).float().mean() == 0.75


# -- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_the_same_zeros(rule: str) -> None:
    bnn = mean_field("cnn")
    pruned = prune(bnn, 0.6, "snr")
    posterior = pruned.posterior
    assert isinstance(posterior, Pruned)
    masks = pruned.layout.split(posterior.dropped)
    with pruned.using(rule), pruned.drawn():
        values: Any = pruned._values
        for value, mask in zip(values, masks, strict=True):
            for part in (value,) if isinstance(value, Tensor) else (value.loc, value.noise_part):
                assert torch.equal(part == 0, mask)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "vit_mha"])
def test_the_remaining_weights_are_those_of_the_original_posterior(name: str, rule: str) -> None:
    bnn = mean_field(name, rule=rule)
    x = CASES[name].example()
    whole = bnn.predict(x, 4, generator=generator(), keep_outputs=True)
    same = prune(bnn, 0.0, "snr").predict(x, 4, generator=generator(), keep_outputs=True)
    assert torch.equal(whole.outputs, same.outputs)
    other = prune(bnn, 0.5).predict(x, 4, generator=generator(), keep_outputs=True)
    assert not torch.allclose(whole.outputs, other.outputs)
    posterior = prune(bnn, 0.5).posterior
    assert isinstance(posterior, Pruned)
    kept = ~posterior.dropped
    for ours, theirs in (
        (posterior.sample(KEY), bnn.posterior.sample(KEY)),
        (posterior.perturbation(KEY), bnn.posterior.perturbation(KEY)),
        (posterior.mean(), bnn.posterior.mean()),
        (posterior.variance(), bnn.posterior.variance()),
    ):
        assert torch.equal(ours, theirs * kept)


@pytest.mark.parametrize("method", METHODS)
def test_share_0_keeps_predictions_bit_equal(method: str) -> None:
    bnn = lb.bayesianize(CASES["resnet"].build(), METHODS[method])
    x = CASES["resnet"].example()
    whole = bnn.predict(x, generator=generator(), keep_outputs=True)
    assert whole.outputs is not None
    assert whole.outputs.equal(prune(bnn, 0).predict(x, generator=generator(), keep_outputs=True).outputs)


@pytest.mark.parametrize("method", OF_WEIGHTS)
def test_share_1_leaves_only_the_biases(method: str) -> None:
    bnn = prune(lb.bayesianize(CASES["mlp"].build(), METHODS[method]), 1.0)
    outputs = bnn.predict(CASES["mlp"].example(), generator=generator(), keep_outputs=True).outputs
    heads = [p.detach() for p in bnn.network.parameters() if p.shape == (3,)]
    if isinstance(bnn.method, (lb.MIMO, lb.PackedEnsemble)):  # the last bias has the outputs of all members
        heads = list([*bnn.network.parameters()][-1].detach().reshape(-1, 3))
    if isinstance(bnn.method, (lb.AEB, lb.MBNN)):  # a chain without members is its last copy
        heads = heads[-1:]
    assert torch.equal(outputs, torch.stack(heads).repeat(len(outputs) // len(heads), 1)[:, None].expand_as(outputs))


def test_the_mean_network_is_the_masked_deterministic_network() -> None:
    plain = CASES["cnn"].build().eval()
    bnn = lb.bayesianize(plain, lb.MeanField())
    pruned = prune(bnn, 0.4)
    limit = torch.cat([p.flatten() for p in plain.parameters() if p.dim() > 1]).abs().sort().values
    with torch.no_grad():
        for weight in (p for p in plain.parameters() if p.dim() > 1):
            weight[weight.abs() < limit[math.floor(0.4 * len(limit))]] = 0
        x = CASES["cnn"].example()
        expected = plain(x)
        assert torch.equal(pruned.eval().to_deterministic()(x), expected)
    probs = pruned.predict(x, rule="mean").probs
    torch.testing.assert_close(probs, expected.softmax(1))


class Codebook(Posterior):
    """Weights that share a few means and stds, as an example of a posterior with another representation."""

    def __init__(self, layout: Layout, mean: Tensor) -> None:
        super().__init__(layout)
        self.centers = nn.Parameter(torch.tensor([-0.3, 0.01, 0.2]))
        self.stds = nn.Parameter(torch.tensor([0.5, 0.001, 0.1]))
        self.register_buffer("labels", torch.arange(mean.numel()) % 3)
        self.labels: Tensor

    def mean(self) -> Tensor:
        return self.centers[self.labels]

    def variance(self) -> Tensor:
        return self.stds[self.labels].square()

    def sample(self, key: Tensor) -> Tensor:
        return self.mean() + self.stds[self.labels] * normal(self.mean(), key)

    def kl(self, key: Tensor) -> Tensor:
        return torch.zeros(())


@dataclass(frozen=True)
class Shared(lb.Method):
    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        return Codebook(layout, mean)


@pytest.mark.parametrize(("by", "first"), [("magnitude", 1), ("snr", 0)])
def test_a_custom_posterior_is_pruned(by: str, first: int) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), Shared())
    pruned = prune(bnn, 1 / 3, by)
    labels: Any = bnn.posterior.labels
    assert isinstance(pruned.posterior, Pruned)
    dropped = labels[pruned.posterior.dropped]
    assert len(dropped) == bnn.layout.numel // 3
    assert (dropped == first).all()
    for rule in RULES:
        assert pruned.predict(CASES["mlp"].example(), 2, rule=rule).probs.isfinite().all()


# -- the pruned model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_original_model_is_not_changed(method: str) -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), METHODS[method])
    bnn.train()
    bnn.network.eval()
    modes = [module.training for module in bnn.modules()]
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    pruned = prune(bnn, 0.9)
    with torch.no_grad():
        for tensor in (*pruned.parameters(), *pruned.buffers()):
            tensor.fill_(1)
    assert [module.training for module in bnn.modules()] == modes
    assert bnn.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())


def test_a_pruned_posterior_cannot_be_trained_or_saved(tmp_path: Path) -> None:
    bnn = prune(mean_field(), 0.5)
    expect(bnn.kl, "KL", "pruned from", kind=UnsupportedOperation)
    x, y = CASES["mlp"].example(), torch.zeros(4, dtype=torch.long)
    for rule in RULES:
        with bnn.using(rule):
            expect(lambda: lb.elbo_loss(bnn, x, y, num_data=4), "KL", kind=UnsupportedOperation)
    expect(lambda: lb.save(bnn, tmp_path / "pruned.safetensors"), "cannot be saved", kind=UnsupportedOperation)
    assert not list(tmp_path.iterdir())
    assert list(bnn.posterior.scale_parameters()) == [bnn.posterior.get_submodule("inner").rho]


def test_a_pruned_deterministic_network_can_be_saved(tmp_path: Path) -> None:
    bnn = prune(lb.bayesianize(CASES["mlp"].build(), lb.Deterministic()), 0.5)
    lb.save(bnn, tmp_path / "pruned.safetensors")
    loaded = lb.load(tmp_path / "pruned.safetensors", CASES["mlp"].build())
    x = CASES["mlp"].example()
    assert torch.equal(loaded.predict(x).probs, bnn.predict(x).probs)


def test_a_pruned_model_keeps_its_training_mode() -> None:
    assert not any(module.training for module in prune(mean_field().eval(), 0.5).modules())
    assert all(module.training for module in prune(mean_field().train(), 0.5).modules())


def test_a_pruned_model_moves_to_another_precision() -> None:
    bnn = prune(mean_field(), 0.5).double()
    assert bnn.posterior.mean().dtype == torch.float64
    assert (bnn.posterior.mean() == 0).float().mean() == 0.5
    assert bnn.predict(CASES["mlp"].example().double(), 2).probs.dtype == torch.float64


def test_invalid_settings_raise_errors() -> None:
    bnn = mean_field()
    for share in (-0.1, 1.1, math.nan):
        expect(partial(prune, bnn, share), f"share={share}", "from 0 to 1")
    expect(lambda: prune(bnn, 0.5, "magnitud"), "did you mean magnitude?")
    expect(lambda: prune(bnn, 0.5, "l0"), "magnitude or snr")
    for method in ("deterministic", "mc-dropout", "ensemble"):
        held = lb.bayesianize(CASES["mlp"].build(), METHODS[method])
        expect(partial(prune, held, 0.5, "snr"), "no std", "magnitude")


# -- scores -----------------------------------------------------------------------------------------------------------


def planted() -> tuple[lb.BayesianModel, Tensor, Tensor]:
    """A classifier whose first 3 inputs decide, through large weights; the other 17 weights do little."""
    network = nn.Linear(20, 3)
    network.weight.data.copy_(0.01 * torch.randn(3, 20))
    network.weight.data[:, :3] = 5 * torch.eye(3)
    network.bias.data.copy_(torch.tensor([0.0, 0.2, 0.1]))
    y = torch.arange(30) % 3
    x = 0.1 * torch.randn(30, 20)
    x[:, :3] += torch.eye(3)[y]
    return lb.bayesianize(network, lb.MeanField(init_std=1e-3, relative=False)), x, y


def test_accuracy_stays_until_the_weights_that_matter_are_pruned() -> None:
    bnn, x, y = planted()
    # 57 of the 60 weights do nothing; without the last 3 the bias predicts class 1 for every example.
    found = [
        evaluate(prune(bnn, share), zip(x.split(11), y.split(11), strict=True), samples=3)
        for share in (0, 0.5, 0.95, 1)
    ]
    assert [scores["accuracy"] for scores in found] == pytest.approx([1, 1, 1, 1 / 3])
    assert found[3]["nll"] > 10 * found[2]["nll"]


def test_the_error_of_a_regression_rises_when_its_weights_are_pruned() -> None:
    bnn = of_weights([1.0, 2.0, 3.0])
    x = torch.randn(10, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    whole, pruned = (evaluate(prune(bnn, share), [(x, y)])["rmse"] for share in (0, 1))
    assert whole < pruned
