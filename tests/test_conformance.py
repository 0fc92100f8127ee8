"""One table: every (method, rule) row passes the same battery. A new method or rule is one more row."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from networks import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.method import Method


@dataclass(frozen=True)
class Row:
    """A method as a user would make it, and the same with its noise turned down to nothing."""

    method: Method
    quiet: Method
    rule: str
    unsupported: tuple[str, ...] = ()  # networks with an operation that the rule cannot do, and says so
    compiled: tuple[str, ...] = ("cnn",)  # networks to compile


# What a rule's graph looks like is seen with MeanField and VDP; another posterior or prior adds the same to each.
GRAPHS = {
    "sample": ("cnn", "vit_mha", "language_model"),
    "flipout": ("cnn", "vit_mha", "language_model"),
    "local": ("cnn", "vit_mha", "language_model"),
    "mean": ("cnn", "language_model"),  # as sample, without noise
    "moments": (),  # as VDP
}
SMALL = ("mlp",)


def mean_field(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    quiet = lb.MeanField(init_std=1e-7, relative=False, rule=rule, **settings)
    compiled = ("cnn",) if settings else GRAPHS[rule]
    return Row(lb.MeanField(rule=rule, **settings), quiet, rule, unsupported, compiled)


def vdp(**settings: Any) -> Row:
    quiet = lb.VDP(init_std=1e-7, relative=False, **settings)
    return Row(lb.VDP(**settings), quiet, "moments", compiled=("cnn",) if settings else ("cnn", "language_model"))


def ssvi(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    quiet = lb.SSVI(1.0, init_std=1e-7, rule=rule, **settings)  # of the others most weights are zero
    return Row(lb.SSVI(0.4, init_std=0.02, rule=rule, **settings), quiet, rule, unsupported, SMALL)


def pbn(rule: str, unsupported: tuple[str, ...] = (), rate: float = 0.1, **settings: Any) -> Row:
    settings = {"sensitivity": "random", **settings}  # magnitude and random need no data
    quiet = lb.PBN(rate, init_std=1e-7, relative=False, rule=rule, **settings)
    return Row(lb.PBN(rate, rule=rule, init_std=0.5, **settings), quiet, rule, unsupported, SMALL)


def shared(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    settings = {"components": 16, "minimum": 4, **settings}
    quiet = lb.WeightSharing(**{**settings, "components": None}, init_std=1e-7, relative=False, rule=rule)
    return Row(lb.WeightSharing(**settings, rule=rule), quiet, rule, unsupported, SMALL)


ROWS: dict[str, Row] = {
    "MeanField sample": mean_field("sample"),
    "MeanField flipout": mean_field("flipout", ("lstm",)),
    "MeanField local": mean_field("local", ("lstm",)),
    "MeanField mean": mean_field("mean"),
    "MeanField sample, prior per layer": mean_field("sample", prior=lb.Normal("fan_in", center="pretrained")),
    "MeanField flipout, prior per layer": mean_field("flipout", ("lstm",), prior=lb.Normal("std", center="pretrained")),
    "MeanField sample, mixture prior": mean_field("sample", prior=lb.ScaleMixture()),
    "MeanField moments": mean_field("moments"),
    "VDP": vdp(),
    "VDP, the paper's": vdp(variance="row", correlation="none", activations="taylor", objective="gaussian"),
    "SSVI sample": ssvi("sample"),
    "SSVI moments": ssvi("moments"),
    "SSVI flipout, prior per layer": ssvi("flipout", ("lstm",), prior=lb.Normal("std")),
    "SSVI local, mixture prior": ssvi("local", ("lstm",), prior=lb.ScaleMixture()),
    "PBN sample, prior per layer": pbn("sample", prior=lb.Normal("fan_in"), per="row"),
    "PBN flipout, mixture prior": pbn("flipout", ("lstm",), prior=lb.ScaleMixture()),
    "PBN local": pbn("local", ("lstm",)),
    "PBN moments": pbn("moments"),
    "WeightSharing sample": shared("sample"),
    "WeightSharing local, blends": shared("local", ("lstm",), border=2.0, threshold=0.4),
    "WeightSharing moments": shared("moments", bit_price=0.1),
    "WeightSharing, hierarchical": shared("sample", sampling="hierarchical", scope="layer", border=2.0),
    "RigL": Row(lb.RigL(0.4), lb.RigL(1.0), "mean"),
    "Deterministic": Row(lb.Deterministic(), lb.Deterministic(), "mean"),
    "Ensemble": Row(lb.Ensemble(2), lb.Ensemble(1), "sample"),
    "MCDropout": Row(lb.MCDropout(0.2), lb.MCDropout(1e-9), "sample", compiled=("cnn", "vit_mha")),
}
# The networks of the battery that looks at one of a kind; the first test takes them all.
SOME = ("cnn", "vit_mha", "autoencoder", "lstm", "language_model")


def mean_of(output: Any) -> Tensor:
    """The output itself, or its mean where it has moments."""
    return output.loc if isinstance(output, lb.Moments) else output


def supported(row: Row, network: str, run: Callable[[], Any]) -> bool:
    """Run, or see the clear refusal of an operation that the rule cannot do."""
    if network in row.unsupported:
        with pytest.raises(lb.UnsupportedOperation, match=r"use bnn\.using"):
            run()
        return False
    run()
    return True


def build(row: Row, network: str, dtype: torch.dtype = torch.float32) -> tuple[lb.BayesianModel, Tensor, Tensor]:
    """A Bayesian model of a network, inputs, and labels that it could have."""
    bnn, x, y = _built(row, network, dtype)
    return copy.deepcopy(bnn), x, y


@functools.cache
def _built(row: Row, network: str, dtype: torch.dtype) -> tuple[lb.BayesianModel, Tensor, Tensor]:
    """The same for all tests: to let weights share takes long."""
    case = CASES[network]
    net = case.build().to(dtype)
    x = case.example()
    x = x.to(dtype) if x.is_floating_point() else x
    return lb.bayesianize(net, row.method), x, net(x).detach().argmax(1)


rows = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
some_networks = pytest.mark.parametrize("network", SOME)


@rows
@pytest.mark.parametrize("network", CASES)
def test_pretrained_outputs_are_kept_without_noise(row: Row, network: str) -> None:
    case = CASES[network]
    net, x = case.build().double().eval(), case.example()
    x = x.double() if x.is_floating_point() else x
    bnn = lb.bayesianize(net, row.quiet)
    assert not bnn.training
    if supported(row, network, lambda: bnn(x)):
        torch.testing.assert_close(mean_of(bnn(x)), net(x), rtol=1e-4, atol=1e-4)


@rows
@some_networks
def test_kl_is_that_of_torch_distributions(row: Row, network: str) -> None:
    bnn, _, _ = build(row, network, torch.float64)
    random = bnn.posterior.variance() > 0  # a weight that is surely zero has no part in it
    if not random.any():
        assert bnn.kl() == 0
        return
    q = torch.distributions.Normal(bnn.posterior.mean()[random], bnn.posterior.variance()[random].sqrt())
    if bnn.kl_kind == "monte-carlo":  # then it is the log ratio at one draw
        with bnn.frozen(0):
            weights = bnn.posterior.sample(bnn.next_draw().key)[random]
            mixture = torch.distributions.Categorical(torch.tensor([0.5, 0.5], dtype=torch.float64))
            p = torch.distributions.Normal(torch.zeros(2), torch.tensor([0.5, 0.01], dtype=torch.float64))
            prior = torch.distributions.MixtureSameFamily(mixture, p)
            torch.testing.assert_close(bnn.kl(), (q.log_prob(weights) - prior.log_prob(weights)).sum())
        return
    terms = bnn.posterior.prior.normal_terms()  # type: ignore[union-attr, operator]
    loc, scale = (torch.as_tensor(0.0 if t is None else t).expand(random.shape)[random] for t in terms)
    p = torch.distributions.Normal(loc, scale)
    torch.testing.assert_close(bnn.kl(), torch.distributions.kl_divergence(q, p).sum())


@rows
@pytest.mark.parametrize(("network", "samples"), [*((network, 2) for network in SOME), ("cnn", 1)])
def test_gradient_of_the_elbo_is_its_slope(row: Row, network: str, samples: int) -> None:
    """With frozen noise the ELBO is a function of the parameters: its gradient against central differences in fp64."""
    bnn, x, y = build(row, network, torch.float64)
    bnn.eval()  # batch statistics would make the slope of a ReLU network rough
    parameters = [p for p in bnn.parameters() if p.requires_grad]

    def loss() -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return lb.elbo(bnn, x, y, num_data=100, samples=samples, generator=generator)

    if not supported(row, network, loss):
        return
    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None)
    step = 1e-6

    @torch.no_grad()
    def moved(distance: float) -> Tensor:
        for p, d in zip(parameters, directions, strict=True):
            p.add_(d, alpha=distance)
        value = loss()
        for p, d in zip(parameters, directions, strict=True):
            p.sub_(d, alpha=distance)
        return value

    expected = (moved(step) - moved(-step)) / (2 * step)
    # Under moments the gradient of an expectation is estimated with less noise than its own few draws have.
    rtol = 1e-2 if row.rule == "moments" else 1e-4
    torch.testing.assert_close(torch.as_tensor(slope), expected, rtol=rtol, atol=1e-6)


@rows
@some_networks
def test_a_frozen_draw_repeats_and_others_differ(row: Row, network: str) -> None:
    bnn, x, _ = build(row, network)
    bnn.eval()
    if not supported(row, network, lambda: bnn(x)):
        return
    with bnn.frozen(3):
        assert torch.equal(mean_of(bnn(x)), mean_of(bnn(x)))
    differs = not torch.equal(mean_of(bnn(x)), mean_of(bnn(x)))
    assert differs == (row.rule not in ("mean", "moments"))


@rows
@some_networks
def test_training_lowers_the_loss(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)
    optimiser = torch.optim.Adam(bnn.parameters(), lr=2e-2)

    def step() -> float:
        optimiser.zero_grad()
        loss = lb.elbo(bnn, x, y, num_data=10_000)
        loss.backward()
        optimiser.step()
        return loss.item()

    if not supported(row, network, step):
        return
    losses = [step() for _ in range(20)]
    assert sum(losses[-5:]) < sum(losses[:5])
    moved = [p for p in bnn.scale_parameters() if p.grad is not None and p.grad.abs().max() > 0]
    assert len(moved) == len(bnn.scale_parameters())


@rows
@some_networks
def test_saved_and_loaded_is_bit_equal(row: Row, network: str, tmp_path: Any) -> None:
    bnn, x, _ = build(row, network)
    if not supported(row, network, lambda: bnn(x)):
        return
    bnn.save(tmp_path / "model.safetensors")
    other = lb.load(tmp_path / "model.safetensors", CASES[network].build())
    state, loaded = bnn.state_dict(), other.state_dict()
    assert state.keys() == loaded.keys()
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    assert torch.equal(bnn.predict(x, 2).probs, other.predict(x, 2).probs)


@rows
@some_networks
def test_a_deep_copy_is_equal_and_independent(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)
    if not supported(row, network, lambda: bnn(x)):
        return
    twin = copy.deepcopy(bnn)
    with bnn.frozen(0), twin.frozen(0):
        assert torch.equal(mean_of(bnn.eval()(x)), mean_of(twin.eval()(x)))
        lb.elbo(twin, x, y, num_data=100).backward()
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
        assert not torch.equal(mean_of(bnn(x)), mean_of(twin(x)))


@rows
@some_networks
def test_dtype_moves(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)
    if not supported(row, network, lambda: bnn(x)):
        return
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        bnn.to(dtype)
        inputs = x.to(dtype) if x.is_floating_point() else x
        assert bnn(inputs).dtype == dtype
        lb.elbo(bnn, inputs, y, num_data=100).backward()
        bnn.zero_grad()


@rows
@some_networks
def test_bf16_autocast(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)

    def loss(enabled: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), bnn.frozen(1):
            return lb.elbo(bnn, x, y, num_data=10_000)

    if supported(row, network, lambda: loss(False)):
        torch.testing.assert_close(loss(True), loss(False), rtol=5e-2, atol=5e-2)
        loss(True).backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in bnn.parameters())


@pytest.mark.parametrize(("name", "network"), [(name, network) for name in ROWS for network in ROWS[name].compiled])
def test_compiled_whole_graph_equals_eager(name: str, network: str) -> None:
    row = ROWS[name]
    torch.compiler.reset()
    bnn, x, y = build(row, network)
    bnn.eval()
    if isinstance(row.method, lb.Ensemble):  # several members, as several samples, are no whole graph: see below
        bnn = lb.bayesianize(CASES[network].build().eval(), lb.Ensemble(1))

    def results(bnn: lb.BayesianModel, compiled: bool) -> list[Tensor | None]:
        """Two losses, each with fresh noise, and their gradients."""

        def loss() -> Tensor:
            return lb.elbo(bnn, x, y, num_data=100)

        parameters = [p for p in bnn.parameters() if p.requires_grad]
        step = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        values = [step(), step()]
        return [*values, *torch.autograd.grad(values[0] + values[1], parameters, allow_unused=True)]

    for eager, graph in zip(results(copy.deepcopy(bnn), False), results(bnn, True), strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where it goes on after the break
@pytest.mark.parametrize(("method", "samples"), [(lb.MeanField(), 2), (lb.Ensemble(2), 1)])
def test_several_draws_compile_with_a_break_between_them(method: Method, samples: int) -> None:
    torch.compiler.reset()
    bnn, x = lb.bayesianize(CASES["mlp"].build(), method), CASES["mlp"].example()
    y = bnn(x).argmax(1)

    def loss() -> Tensor:
        return lb.elbo(bnn, x, y, num_data=100, samples=samples)

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        with bnn.frozen(2):
            value = function()
            results.append([value, *torch.autograd.grad(value, list(bnn.parameters()))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_inductor_takes_fresh_noise_without_compiling_again() -> None:
    torch.compiler.reset()
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), lb.MeanField())
    x, y = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    step = torch.compile(lambda: lb.elbo(bnn, x, y, num_data=100), fullgraph=True)
    first = step()
    with torch.compiler.set_stance("fail_on_recompile"):
        others = [step() for _ in range(3)]
    assert len({loss.item() for loss in [first, *others]}) == 4
