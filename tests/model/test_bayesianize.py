"""What bayesianize changes in its copy of a network, and what stays the same."""

import copy
import gc
import itertools
import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.network import places


def bayesian_names(bnn: lb.BayesianModel) -> set[str]:
    return {row.name for row in bnn.report.rows if row.bayesian}


def train(bnn: lb.BayesianModel, x: Tensor, y: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in bnn.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=100).backward()
        optimizer.step()


def labels_for(name: str) -> Tensor:
    return CASES[name].build().eval()(CASES[name].example()).argmax(1)


# -- frozen and tied --------------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_frozen_and_deterministic() -> None:
    net = CASES["mlp"].build()
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    before = {n: p.clone() for n, p in net.named_parameters() if n.startswith("0.")}
    bnn = lb.bayesianize(net, lb.MeanField())
    train(bnn, CASES["mlp"].example(), labels_for("mlp"))
    kept = {n: p for n, p in bnn.network.named_parameters() if n.startswith("0.")}
    assert kept.keys() == before.keys()
    for name, parameter in kept.items():
        assert not parameter.requires_grad
        assert torch.equal(parameter, before[name])
    reasons = {row.name: row for row in bnn.report.rows}
    assert not reasons["0.weight"].bayesian
    assert "frozen" in reasons["0.weight"].reason
    assert reasons["2.weight"].bayesian


def test_all_frozen_says_to_unfreeze() -> None:
    with pytest.raises(lb.LeanBayesError, match="unfreeze"):
        lb.bayesianize(CASES["mlp"].build().requires_grad_(False), lb.MeanField())


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
def test_tied_parameters_are_one_slot_with_one_value_and_one_gradient(rule: str) -> None:
    case = CASES["language_model"]
    bnn = lb.bayesianize(case.build(), lb.MeanField(rule=rule))
    slot = next(slot for slot in bnn.layout if slot.name == "embed.weight")
    assert slot.names == ("embed.weight", "head.weight")
    row = next(row for row in bnn.report.rows if row.name == "embed.weight")
    assert "tied with head.weight" in row.reason
    assert "head.weight" not in {row.name for row in bnn.report.rows}
    with bnn.drawn():
        assert getattr(bnn.network.embed, "weight") is getattr(bnn.network.head, "weight") is not None  # noqa: B009
    if rule == "mean":  # the gradient is the sum over both uses, as in the plain network
        net, x = case.build(), case.example()
        y = x.roll(1, 1)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        lb.elbo_loss(bnn, x, y, num_data=100, temperature=0.0).backward()
        assert isinstance(bnn.posterior.mu, Tensor)
        assert bnn.posterior.mu.grad is not None
        grads = dict(zip((s.name for s in bnn.layout), bnn.layout.split(bnn.posterior.mu.grad), strict=True))
        expected = net.get_parameter("embed.weight").grad
        torch.testing.assert_close(grads["embed.weight"], expected)


# -- the user's network, and copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [lb.MeanField(), lb.Deterministic(), lb.Ensemble(2), lb.MCDropout(0.1)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "language_model"])
def test_the_network_itself_is_untouched(name: str, method: Any) -> None:
    net, x, y = CASES[name].build(), CASES[name].example(), labels_for(name)
    ids = [id(p) for p in net.parameters()]
    before = {n: t.clone() for n, t in net.state_dict().items()}
    bnn = lb.bayesianize(net, method)
    train(bnn, x, y)
    assert [id(p) for p in net.parameters()] == ids
    after = net.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], before[n]) for n in before)
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for n, p in bnn.named_parameters() if "weight" in n or "mu" in n)


@pytest.mark.parametrize("name", CASES)
def test_deepcopy_is_independent_and_equal(name: str) -> None:
    bnn, x, y = lb.bayesianize(CASES[name].build(), lb.MeanField()), CASES[name].example(), labels_for(name)
    bnn(x)
    twin, reference = copy.deepcopy(bnn), copy.deepcopy(bnn)
    train(twin, x, y)
    assert all(torch.equal(a, b) for a, b in zip(bnn.parameters(), reference.parameters(), strict=True))
    assert not torch.equal(bnn.posterior.mean(), twin.posterior.mean())
    with twin.drawn():
        assert all(getattr(*places(bnn.network, slot.names)[0]) is None for slot in bnn.layout)
    assert torch.equal(bnn.eval()(x), reference.eval()(x))


def test_report_has_one_line_with_a_reason_for_each_parameter() -> None:
    net = CASES["vit_mha"].build()
    lines = str(lb.bayesianize(net, lb.MeanField()).report).splitlines()
    assert re.match(r"10 of 32 parameters are Bayesian \(4,944 of 5,445 weights, 90.8 %\)$", lines[0])
    assert len(lines) == 1 + len(list(net.parameters()))
    for line, (name, p) in zip(lines[1:], net.named_parameters(), strict=True):
        kind, found, shape, *reason = line.split()
        assert (kind in ("Bayesian", "deterministic"), found, shape) == (True, name, "x".join(map(str, p.shape)))
        assert reason


# -- number formats ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Three layers, each with its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = layer(x.to(layer.bias.dtype)).tanh()
        return x


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, None])
def test_dtypes_are_kept(dtype: torch.dtype | None, rule: str) -> None:
    net = Mixed() if dtype is None else CASES["mlp"].build().to(dtype)
    x = torch.randn(4, 4 if dtype is None else 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    bnn = lb.bayesianize(net, lb.MeanField(rule=rule))
    assert bnn(x).dtype == net(x).dtype
    assert bnn.posterior.mean().dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
    lb.elbo_loss(bnn, x, torch.zeros(4, dtype=torch.long), num_data=10).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.mean_parameters())


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float64), lambda m: m.double(), lambda m: m.bfloat16()])
def test_dtype_can_change_later(convert: Callable[[Any], Any], rule: str) -> None:
    bnn = convert(lb.bayesianize(CASES["cnn"].build(), lb.MeanField(rule=rule)))
    x = convert(CASES["cnn"].example())
    assert bnn(x).dtype == x.dtype
    assert all(t.dtype == x.dtype for t in bnn.parameters())
    loss = lb.elbo_loss(bnn, x, labels_for("cnn"), num_data=10)
    loss.backward()
    assert math.isfinite(loss.item())


# -- nothing is left behind -------------------------------------------------------------------------------------------


def assert_empty(bnn: lb.BayesianModel) -> None:
    for slot in bnn.layout:
        for name in slot.names:
            ((module, attribute),) = places(bnn.network, [name])
            assert getattr(module, attribute) is None
            assert attribute not in module._parameters
    for module in bnn.network.modules():
        if isinstance(module, nn.RNNBase):
            pairs = zip(module._flat_weights_names, module._flat_weights, strict=True)
            assert all((weight is None) == name.startswith("weight") for name, weight in pairs)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *itertools.product(["mlp", "vit_mha", "language_model"], ["sample", "flipout", "local", "mean"]),
        *itertools.product(["lstm"], ["sample", "mean"]),
    ],
)
def test_no_weights_stay_in_the_network_after_a_pass(name: str, rule: str, fails: bool) -> None:
    bnn, x = lb.bayesianize(CASES[name].build(), lb.MeanField(rule=rule)), CASES[name].example()
    seen: list[Any] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.extend(weakref.ref(getattr(*places(bnn.network, slot.names)[0])) for slot in bnn.layout)
        if fails:
            raise RuntimeError("a fault of the network")

    bnn.network.register_forward_pre_hook(look)
    gc.disable()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="a fault"):
                bnn(x)
            with pytest.raises(RuntimeError, match="a fault"), bnn.drawn() as call:
                call(x)
        else:
            bnn(x).sum().backward()
            bnn.predict(x, 2)
        assert_empty(bnn)
        assert len(seen) >= 2 * len(bnn.layout)
        assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


# -- from one posterior to the next -----------------------------------------------------------------------------------


def test_a_bayesian_model_passes_on_its_means_and_variances() -> None:
    old = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=0.3), select=["0.weight", "2.weight"])
    train(old, CASES["mlp"].example(), labels_for("mlp"))
    method = lb.MeanField(init_std=0.07, relative=False, prior=lb.Normal(scale=1.0))
    for select, fresh in (
        (["0.weight", "2.weight"], set()),
        (["2.weight", "4.weight", "0.bias"], {"4.weight", "0.bias"}),
    ):
        new = lb.bayesianize(old, method, select=select)
        parameters, variances = dict(old.to_deterministic().named_parameters()), old.weight_variances()
        assert bayesian_names(new) == set(select)
        moments = zip(
            new.layout, new.layout.split(new.posterior.mean()), new.layout.split(new.posterior.variance()), strict=True
        )
        for slot, mean, variance in moments:
            assert torch.equal(mean, parameters[slot.name])
            expected = torch.full_like(mean, 0.07) if slot.name in fresh else variances[slot.name].sqrt()
            torch.testing.assert_close(variance.sqrt(), expected, rtol=1e-5, atol=0)
        for name, point in new.network.named_parameters():
            assert torch.equal(point, parameters[name])


class Checkpointed(nn.Module):
    """A network that runs its first layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))


def test_activation_checkpointing_works_inside_drawn() -> None:
    bnn, x = lb.bayesianize(Checkpointed(), lb.MeanField()), torch.randn(3, 4)
    gradients = []
    for checkpointed in (True, False):
        with bnn.frozen(1), bnn.drawn() as call:
            network = bnn.network
            assert isinstance(network, Checkpointed)
            output = call(x) if checkpointed else network.last(network.first(x))
            loss = output.square().sum() + bnn.kl() / 100
            gradients.append(torch.autograd.grad(loss, list(bnn.parameters())))
    torch.testing.assert_close(*gradients)


def test_no_warning_filter_is_installed_process_wide() -> None:
    before = list(warnings.filters)
    bnn = lb.bayesianize(CASES["lstm"].build(), lb.MeanField())
    bnn(CASES["lstm"].example())
    assert warnings.filters == before
