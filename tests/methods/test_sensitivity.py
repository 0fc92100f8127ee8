"""Sensitivities against exact per-example Jacobians, and the selection of the highest scores."""

import runpy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from network_cases import CASES
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from training_cases import expect, models_equal

import leanbayes as lb
from leanbayes.core.layout import Layout, Slot
from leanbayes.methods.pbn import estimators
from leanbayes.methods.pbn.estimators import DEFAULT, Kind
from leanbayes.methods.pbn.selection import count_of, top
from leanbayes.model import gradients

KINDS: Any = get_args(Kind)


# The exact sensitivities, and the networks and metrics to compare with them.
_SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "sensitivity.py"))
NETWORKS: Any = _SCRIPT["NETWORKS"]
agreement, build, digits, examples, squared_jacobian, trained = (
    _SCRIPT[name] for name in ("agreement", "build", "digits", "examples", "squared_jacobian", "trained")
)


# -- against exact Jacobians ------------------------------------------------------------------------------------------

# The minimum rank correlation and overlap of each kind, on the MLP and on the convolutional network.
LEAST: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "jacobian": ((0.98, 0.85), (0.97, 0.85)),
    "moment": ((0.93, 0.95), (0.70, 0.60)),
    "fisher": ((0.92, 0.50), (0.88, 0.65)),
    "paper": ((0.80, 0.20), (0.65, 0.35)),
    "magnitude": ((0.20, 0.05), (-0.4, 0.0)),
    "random": ((-0.1, 0.0), (-0.1, 0.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rank_correlation_and_overlap_of_each_kind(kind: Any) -> None:
    for name, (least_correlation, least_overlap) in zip(NETWORKS, LEAST[kind], strict=True):
        correlation, overlap = agreement(kind, name)
        assert correlation > least_correlation
        assert overlap >= least_overlap


def test_the_default_has_the_best_worst_case_overlap() -> None:
    overlaps = {kind: min(agreement(kind, name)[1] for name in NETWORKS) for kind in KINDS}
    assert max(overlaps, key=overlaps.__getitem__) == DEFAULT == lb.PBN().sensitivity
    assert overlaps["paper"] < 0.5 * overlaps[DEFAULT]


def test_more_signs_reduce_the_error() -> None:
    truth, bnn = squared_jacobian("mlp"), trained("mlp")

    def error(batches: Any) -> float:
        scores = lb.sensitivity(bnn, batches).scores
        return ((scores - truth).square().sum() / truth.square().sum()).sqrt().item()

    assert error(examples() * 32) < 0.6 * error(examples())
    assert error(examples() * 8) < 0.1


@pytest.mark.parametrize("examples_per_batch", [32, 512])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_finds_the_top_1_percent_on_few_batches(name: str, examples_per_batch: int) -> None:
    truth, (x, y) = squared_jacobian(name), digits()
    batches = list(zip(x[:512].split(examples_per_batch), y[:512].split(examples_per_batch), strict=True))
    found = lb.sensitivity(trained(name), batches)
    exact = lb.Sensitivity(found.layout, truth, "truth")
    for rate in (0.01, 0.05):
        overlap = torch.isin(exact.top(rate), found.top(rate)).double().mean().item()
        assert overlap >= 0.85
        assert found.overlap(rate) == pytest.approx(overlap, abs=0.07)


def test_the_overlap_is_estimated_also_if_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), truth, estimates, overlaps = digits(), squared_jacobian("mlp"), [], []
    for probes in (4, 64):
        monkeypatch.setattr(estimators, "PROBES", probes)
        found = [lb.sensitivity(trained("mlp"), [(x[:512], y[:512])], seed=seed) for seed in range(8)]
        exact = lb.Sensitivity(found[0].layout, truth, "truth").top(0.05)
        overlaps.append(sum(torch.isin(exact, one.top(0.05)).double().mean().item() for one in found) / 8)
        estimates.append(sum(one.overlap(0.05) or 0.0 for one in found) / 8)
    assert estimates == pytest.approx(overlaps, abs=0.1)
    assert overlaps[0] < 0.7 < 0.85 < overlaps[1]


def test_only_estimates_from_random_signs_have_an_overlap() -> None:
    for kind in KINDS:
        found = lb.sensitivity(trained("mlp"), examples()[:1], kind)
        assert (found.overlap(0.05) is None) == (kind != "jacobian")
    found = lb.sensitivity(trained("mlp"), examples()[:1])
    assert found.overlap(0.0) == found.overlap(1.0) == 1.0
    assert found.overlap(0.5, "layer") == 1.0
    assert found.halves is not None
    torch.testing.assert_close(found.halves.mean(0), found.scores)
    expect(lambda: found.overlap(2.0), "from 0 to 1")


def test_signs_do_not_depend_on_whether_the_number_of_batches_is_known() -> None:
    known = lb.sensitivity(trained("mlp"), examples()[:3]).scores
    assert torch.equal(lb.sensitivity(trained("mlp"), iter(examples()[:3])).scores, known)
    many = lb.sensitivity(trained("mlp"), examples() * 5).scores
    assert torch.equal(lb.sensitivity(trained("mlp"), iter(examples() * 5)).scores, many)


def test_one_layer_has_closed_form_sensitivities() -> None:
    network, (x, y) = nn.Linear(5, 3).double(), (torch.randn(40, 5).double(), torch.randint(3, (40,)))
    batches = [(x[:16], y[:16]), (x[16:], y[16:])]
    expected = x.square().mean(0).expand(3, 5).flatten()  # each output depends on its own row of weights
    torch.testing.assert_close(lb.sensitivity(network, batches, "moment").scores, expected)
    probs = network(x).detach().softmax(1) - nn.functional.one_hot(y, 3)
    per_example = probs[:, :, None] * x[:, None]
    torch.testing.assert_close(
        lb.sensitivity(network, batches, "fisher").scores, per_example.square().mean(0).flatten()
    )
    torch.testing.assert_close(lb.sensitivity(network, batches, "paper").scores, per_example.mean(0).abs().flatten())
    many = lb.sensitivity(network, batches * 200).scores
    torch.testing.assert_close(many, expected, rtol=0.15, atol=0)


@pytest.mark.parametrize("network", ["cnn", "lstm", "language_model"])
def test_squared_gradients_are_per_example(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several chunks of examples, and if torch.vmap fails, as for recurrent layers."""
    case = CASES[network]
    net, x = case.build().double().eval(), case.example()
    x = x.double() if x.is_floating_point() else x
    y = net(x).detach().argmax(1)
    bnn = lb.bayesianize(net, lb.MeanField())
    weights = bnn.posterior.mean().detach()

    def alone(row: int) -> Tensor:
        label = y[row : row + 1]
        return gradients.weight_gradient(bnn, weights, x[row : row + 1], label) * label.numel()

    expected = torch.stack([alone(row) for row in range(len(y))]).square().mean(0)
    for numbers in (2**26, 3 * weights.numel(), 1):
        monkeypatch.setattr(gradients, "_MOST_NUMBERS", numbers)
        torch.testing.assert_close(lb.sensitivity(net, [(x, y)], "fisher").scores, expected, rtol=1e-8, atol=1e-14)


def test_a_result_prints_the_share_of_each_layer() -> None:
    first, second = nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        first.weight.fill_(0.5)
        second.weight.fill_(3.0)
    net = nn.Sequential(first, second)
    lines = repr(lb.sensitivity(net, kind="magnitude")).splitlines()
    assert lines == [
        "Sensitivity: magnitude, 10 weights, share of each layer",
        "  1.weight   60.0%",
        "  0.weight   40.0%",
    ]
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    assert repr(lb.sensitivity(many, kind="magnitude")).endswith("... and 2 more")


def test_examples_are_vectorized() -> None:
    net, calls = nn.Sequential(nn.Linear(4, 3)), []
    net.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    lb.sensitivity(net, [(torch.randn(40, 4), torch.zeros(40, dtype=torch.int64))], "fisher")
    assert calls == [1]  # for all examples at once


class Weighted(nn.Module):
    """A mean over three tokens with factors that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        return (self.layer(x) * factors).sum(1)


def test_what_examples_share_is_not_cut_in_chunks_of_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = Weighted().double(), torch.randn(6, 3, 4).double(), torch.tensor([0, 1, 0, 1, 0, 1])
    factors = torch.tensor([[1.0], [-2.0], [3.0]]).double()
    expected = lb.sensitivity(net, [((x, factors), y)], "fisher").scores
    monkeypatch.setattr(gradients, "_MOST_NUMBERS", 31)  # three examples at once
    torch.testing.assert_close(lb.sensitivity(net, [((x, factors), y)], "fisher").scores, expected)


def test_single_examples_need_the_batch_first() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][-1]

    batch = torch.randn(5, 5, 4), torch.zeros(5, dtype=torch.int64)
    expect(lambda: lb.sensitivity(TimeFirst(), [batch], "fisher"), "batch_first=False")
    assert lb.sensitivity(TimeFirst(), [batch], "jacobian").scores.isfinite().all()


# -- side effects and reproducibility ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_reproducible_and_changes_nothing(kind: Any) -> None:
    case = CASES["cnn"]
    net, x = case.build().train(), case.example()
    bnn, y = lb.bayesianize(net, lb.MeanField()).train(), torch.arange(len(x)) % 5
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in (net, bnn)]
    state, buffers = torch.get_rng_state(), {name for name, _ in bnn.named_buffers()}
    first, again = (lb.sensitivity(bnn, [(x, y), (x, y)], kind).scores for _ in range(2))
    of_network = lb.sensitivity(net, [(x, y), (x, y)], kind).scores
    assert torch.equal(first, again)
    assert torch.equal(first, of_network)
    assert first.shape == (bnn.layout.numel,)
    assert not first.requires_grad
    assert (first >= 0).all()
    assert torch.equal(torch.get_rng_state(), state)
    for model, old in zip((net, bnn), before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
        assert all(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())
    assert {name for name, _ in bnn.named_buffers()} == buffers  # the moment graph registers none
    other = lb.sensitivity(bnn, [(x, y), (x, y)], kind, seed=1).scores
    assert torch.equal(first, other) == (kind not in ("jacobian", "random"))


@pytest.mark.parametrize("kind", ["moment", "fisher", "paper"])
def test_the_batch_size_does_not_matter(kind: Any) -> None:
    bnn, (x, y) = trained("mlp"), digits()
    whole = lb.sensitivity(bnn, [(x[:60], y[:60])], kind).scores
    parts = lb.sensitivity(bnn, iter([(x[:7], y[:7]), (x[7:60], y[7:60])]), kind).scores
    torch.testing.assert_close(whole, parts, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("network", ["vit_mha", "autoencoder", "lstm", "language_model", "conv1d"])
@pytest.mark.parametrize("kind", ["jacobian", "moment", "fisher"])
def test_every_network_is_supported(network: str, kind: Any) -> None:
    case = CASES[network]
    net, x = case.build().eval(), case.example()
    result = lb.sensitivity(net, [(x, net(x).detach().argmax(1))], kind)
    assert result.scores.isfinite().all()
    unused = {"lstm.weight_hh_l1_reverse"}  # the last output depends on one input in reverse order
    assert {name for name, share in result.per_layer().items() if share == 0} <= unused


def test_select_and_likelihood() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(6, 4)
    result = lb.sensitivity(net, [(x, torch.zeros(6, 1))], "fisher", likelihood=lb.Gaussian(), select="2.*weight")
    assert [slot.name for slot in result.layout] == ["2.weight"]
    assert result.scores.any()


def test_an_existing_posterior_is_scored_at_its_mean() -> None:
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.SSVI(0.3))
    plain = lb.sensitivity(bnn.to_deterministic(), [(x, y)], "fisher").scores
    torch.testing.assert_close(lb.sensitivity(bnn, [(x, y)], "fisher").scores, plain)


def test_the_cost_is_a_few_backward_passes() -> None:
    bnn, (x, y) = lb.bayesianize(build("mlp"), lb.MeanField()), (torch.randn(16, 64), torch.zeros(16, dtype=torch.long))

    def flops(kind: Any, batches: int = 1) -> int:
        with FlopCounterMode(display=False) as counter:
            lb.sensitivity(bnn, [(x, y)] * batches, kind)
        return counter.get_total_flops()

    # A step has 3 products per layer, and the inputs of the first layer need no gradient.
    assert flops("jacobian", 64) < 4 * flops("paper", 64)
    # Few batches have as many backward passes in all as 64 batches.
    assert flops("jacobian", 64) == pytest.approx(flops("jacobian", 1), rel=0.25)
    assert flops("magnitude") == flops("random") == 0


# -- selection --------------------------------------------------------------------------------------------------------

SHAPES = ((4, 3), (2, 3, 2, 2), (5,), ())
LAYOUT = Layout(
    [Slot((f"w{n}",), shape, tuple(range(len(shape))), torch.float64, n + 1) for n, shape in enumerate(SHAPES)]
)


def with_scores(scores: Tensor) -> lb.Sensitivity:
    return lb.Sensitivity(LAYOUT, scores, "own")


@given(st.lists(st.integers(0, 3), min_size=42, max_size=42), st.floats(0.03, 1))
def test_the_number_of_weights_is_exact_despite_ties(values: list[int], rate: float) -> None:
    scores = torch.tensor(values).double()
    index = with_scores(scores).top(rate)
    assert len(index) == count_of(rate, 42)
    assert (index[1:] > index[:-1]).all()
    rest = torch.ones(42, dtype=torch.bool).index_fill_(0, index, False)
    least = scores[index].min()
    assert not rest.any() or scores[rest].max() <= least
    equal_in, equal_out = index[scores[index] == least], (rest & (scores == least)).nonzero()[:, 0]
    assert not len(equal_out) or equal_in.max() < equal_out.min()  # ties go to the first


@given(st.floats(0.03, 1), st.floats(0.03, 1))
def test_a_smaller_rate_selects_a_subset(first: float, second: float) -> None:
    result = with_scores(torch.randn(42, generator=torch.Generator().manual_seed(0)).abs())
    small, large = (result.top(rate) for rate in sorted((first, second)))
    assert torch.isin(small, large).all()


def test_decimal_rates_are_exact() -> None:
    assert [count_of(rate, 100) for rate in (0.0, 0.29, 0.57, 0.58, 1.0)] == [0, 29, 57, 58, 100]
    assert len(with_scores(torch.ones(42)).top(0.0)) == 0
    assert torch.equal(with_scores(torch.ones(42)).top(1.0), torch.arange(42))


def test_whole_rows_and_layers_are_selected() -> None:
    scores = torch.zeros(42).double()
    scores[3:6], scores[36:41], scores[24:36], scores[41] = 4.0, 3.0, 2.0, 1.0
    scores[0] = 11.0  # row 0 has a mean of 11/3
    result = with_scores(scores)
    assert result.top(6 / 42, "row").tolist() == [0, 1, 2, 3, 4, 5]
    assert result.top(8 / 42, "row").tolist() == [0, 1, 2, 3, 4, 5, 36, 37]  # each entry of w2 is a row
    assert result.top(5 / 42, "layer").tolist() == [36, 37, 38, 39, 40]
    assert result.top(13 / 42, "layer").tolist() == [36, 37, 38, 39, 40, 41]  # then only the scalar fits
    assert result.top(17 / 42, "layer").tolist() == [*range(12), *range(36, 41)]
    assert result.chosen(17 / 42, "layer") == {"w0": 12, "w1": 0, "w2": 5, "w3": 0}
    for per in ("row", "layer"):
        assert torch.equal(result.top(1.0, per), torch.arange(42))


def test_rows_follow_the_memory_order_of_a_layer() -> None:
    layout = Layout([Slot(("w",), (2, 3), (1, 0), torch.float64, 3)])  # stored by columns
    assert top(layout, torch.tensor([0.0, 1, 0, 1, 0, 1]), 0.5, "row").tolist() == [1, 3, 5]


def test_shares_of_layers_add_up_to_1() -> None:
    shares = with_scores(torch.arange(42).double()).per_layer()
    assert list(shares) == ["w0", "w1", "w2", "w3"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["w3"] == pytest.approx(41 / 861)
    assert set(with_scores(torch.zeros(42)).per_layer().values()) == {0.0}


# -- errors -----------------------------------------------------------------------------------------------------------


def test_invalid_arguments_raise_an_error() -> None:
    net, batches = CASES["mlp"].build(), [(torch.randn(4, 6), torch.zeros(4, dtype=torch.long))]
    wrong: Any = "fischer"
    expect(lambda: lb.sensitivity(net, batches, wrong), "'fischer'", "did you mean fisher?")
    expect(lambda: lb.sensitivity(net), "'jacobian'", "training batches")
    for kind in ("jacobian", "moment", "fisher", "paper"):
        expect(lambda kind=kind: lb.sensitivity(net, [], kind), "pass training batches")  # type: ignore[misc]
        inputs: Any = [batches[0][0]]
        expect(lambda kind=kind, x=inputs: lb.sensitivity(net, x, kind), "pair (x, y)")  # type: ignore[misc]
    expect(lambda: lb.sensitivity(lb.bayesianize(net, lb.Deterministic()), batches), "plain network")
    expect(lambda: lb.sensitivity(lb.bayesianize(net, lb.MeanField()), batches, select="0"), "leave select")
    result = lb.sensitivity(net, kind="magnitude")
    for rate in (-0.1, 1.1, float("nan"), True, "half"):
        expect(lambda rate=rate: result.top(rate), "from 0 to 1")  # type: ignore[misc]
    expect(lambda: result.top(1e-4), "less than one weight")
    expect(lambda: result.top(0.01, "row"), "4 weights", "smallest row has 6")
    expect(lambda: result.top(0.1, wrong), "'weight', 'row' or 'layer'")
    expect(lambda: with_scores(torch.full((42,), torch.nan)).top(0.5), "NaN")
    assert models_equal(net, CASES["mlp"].build())
