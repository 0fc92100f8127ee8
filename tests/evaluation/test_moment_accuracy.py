"""The accuracy of one-pass prediction per layer: known values, and the format of rows and table."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import seeded
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import layer_accuracy as moments
from leanbayes.evaluation.layer_accuracy import LayerAccuracy, accuracy_of, accuracy_table, moment_accuracy
from leanbayes.rules import MomentPropagation

SAMPLES = 1000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(**settings: Any) -> lb.BayesianModel:
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 40)))()
    return lb.bayesianize(network, lb.MeanField(init_std=0.3, relative=False), **settings)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(1))


def smooth_images(examples: int = 4) -> Tensor:
    """Smooth images, as from a camera: neighboring pixels are similar, so that noise of a filter affects all alike."""
    return 1 + F.interpolate(inputs(examples, 3, 2, 2), 8, mode="bilinear")


class Pooled(nn.Module):
    """Convolutions, then the mean over all positions, which is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.act = nn.ReLU()
        self.second = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x)))).mean((2, 3))


def pooled() -> lb.BayesianModel:
    return lb.bayesianize(seeded(Pooled)(), lb.MeanField(init_std=0.2))


def values_of(row: LayerAccuracy) -> list[float]:
    return [row.ratio, row.low, row.high, row.log_correlation, row.mean_error]


# -- values -----------------------------------------------------------------------------------------------------------


def test_moments_of_a_linear_layer_are_exact() -> None:
    rows = moment_accuracy(linear(), inputs(100, 6), SAMPLES, generator=generator())
    assert [row.name for row in rows] == ["0", "output"]
    for row in rows:
        error = 1 / math.sqrt(2 * SAMPLES)  # of one std by samples
        assert row.ratio == pytest.approx(1, abs=0.01)
        assert row.low == pytest.approx(1 - 1.645 * error, abs=0.01)
        assert row.high == pytest.approx(1 + 1.645 * error, abs=0.01)
        assert row.log_correlation > 0.98
        assert row.mean_error == pytest.approx(0.6745 / math.sqrt(SAMPLES), rel=0.2)  # median of |N(0, 1/n)|


def test_correlations_matter_after_pooling() -> None:
    bnn, x = pooled(), smooth_images()
    none = moment_accuracy(bnn, x, 500, MomentPropagation(correlation="none"), generator())
    common = moment_accuracy(bnn, x, 500, "moments", generator())
    assert none[0].ratio == pytest.approx(1, abs=0.03)  # before the pooling all is well
    assert none[-1].ratio < 0.5
    assert abs(math.log(common[-1].ratio)) < 0.3
    assert none[-1].high < common[-1].low


def test_calibration_shows_in_the_last_row_only() -> None:
    bnn, x = pooled(), smooth_images()
    before = moment_accuracy(bnn, x, 100, generator=generator())
    bnn.moment_scale = 1.0, 2.0
    after = moment_accuracy(bnn, x, 100, generator=generator())
    assert after[:-1] == before[:-1]
    assert after[-1].ratio == pytest.approx(2 * before[-1].ratio, rel=1e-5)
    assert after[-1].log_correlation == pytest.approx(before[-1].log_correlation, abs=1e-5)


def test_values_follow_their_definitions() -> None:
    true_mean, true_variance = torch.zeros(101), torch.full((101,), 4.0)
    std = torch.linspace(1, 3, 101)
    row = accuracy_of("a", "B", torch.full((101,), -1.0), std.square(), true_mean, true_variance)
    assert (row.name, row.kind) == ("a", "B")
    assert (row.low, row.ratio, row.high, row.mean_error) == pytest.approx((0.55, 1, 1.45, 0.5))
    assert math.isnan(row.log_correlation)  # one of them is constant
    exact = accuracy_of("a", "B", true_mean, std.square(), true_mean, std.square())
    assert exact.log_correlation == pytest.approx(1)
    reverse = accuracy_of("a", "B", true_mean, std.square(), true_mean, 1 / std.square())
    assert reverse.log_correlation == pytest.approx(-1)


def test_constant_elements_do_not_count() -> None:
    true_variance = torch.tensor([0.0, 1.0, 4.0, 1e-12, 9.0])
    variance = torch.tensor([1.0, 1.0, 4.0, 1.0, 0.0])
    row = accuracy_of("a", "B", torch.zeros(5), variance, torch.zeros(5), true_variance)
    assert row.ratio == 1
    assert row.log_correlation == pytest.approx(1)  # a variance of 0 has no logarithm
    none = accuracy_of("a", "B", torch.zeros(5), torch.zeros(5), torch.zeros(5), torch.zeros(5))
    assert all(math.isnan(figure) for figure in values_of(none))


def test_large_outputs_are_compared_on_a_subset_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "_ELEMENTS", 500)
    row = moment_accuracy(linear(), inputs(100, 6), 300, generator=generator())[-1]
    assert row.ratio == pytest.approx(1, abs=0.02)
    places = moments._subset(10_000, 500)
    assert len(places.unique()) == 500
    assert places.min() < 20
    assert places.max() >= 9980
    assert moments._subset(7, 500).tolist() == list(range(7))
    wide = torch.rand(2**24 + 10)  # more than torch.quantile accepts
    assert accuracy_of("a", "B", wide, 4 * wide, wide, wide).ratio == pytest.approx(2)


def test_many_examples_are_processed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = pooled(), smooth_images(5)
    whole = moment_accuracy(bnn, x, 20, generator=generator())
    monkeypatch.setattr(moments, "_ROWS", 2)
    parts = moment_accuracy(bnn, x, 20, generator=generator())
    for one, other in zip(whole, parts, strict=True):
        assert (one.name, one.kind) == (other.name, other.kind)
        assert values_of(one) == pytest.approx(values_of(other), rel=1e-3)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_follow_the_order_of_calls() -> None:
    rows = moment_accuracy(pooled(), smooth_images(2), 3)
    names = [("first", "Conv2d"), ("act", "ReLU"), ("second", "Conv2d"), ("act (call 2)", "ReLU"), ("output", "Pooled")]
    assert [(row.name, row.kind) for row in rows] == names


class Tagger(nn.Module):
    """Modules that return several tensors, integers, a dict, or nothing random, and one named `output`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.named, self.counts = Named(), Counts()
        self.output = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(tokens)
        hidden = self.attend(hidden, hidden, hidden)[0] + self.counts(mask)[..., None]
        return {"logits": self.output(self.named(hidden)["hidden"])}


class Named(nn.Module):
    def forward(self, hidden: Any) -> dict[str, Any]:
        return {"kind": "relu", "hidden": hidden.relu()}


class Counts(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return mask.long()


def test_modules_may_return_anything() -> None:
    bnn = lb.bayesianize(seeded(Tagger)(), lb.MeanField(init_std=0.2), select=(nn.MultiheadAttention, nn.Linear))
    batch = {"tokens": torch.arange(10).view(2, 5) % 7, "mask": torch.ones(2, 5, dtype=torch.bool)}
    rows = moment_accuracy(bnn, batch, 200, generator=generator())
    kinds = ["Embedding", "MultiheadAttention", "Named", "Linear", "Tagger"]
    assert [row.kind for row in rows] == kinds  # without modules that return no floats or are not called
    assert [row.name for row in rows] == ["embed", "attend", "named", "output", "output"]
    assert math.isnan(rows[0].ratio)  # it is not Bayesian here
    assert all(0.5 < row.ratio < 2 for row in rows[1:])


def test_parts_of_fused_transformer_layers_have_rows() -> None:
    layer = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))()
    rows = moment_accuracy(lb.bayesianize(layer, lb.MeanField()), inputs(2, 3, 8), 3)
    assert {"self_attn", "linear1", "norm2", "output"} <= {row.name for row in rows}
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_covariance_rule_is_checked_too() -> None:
    row = moment_accuracy(linear(), inputs(20, 6), 300, "covariance", generator())[-1]
    assert row.ratio == pytest.approx(1, abs=0.02)


def test_table_is_aligned() -> None:
    rows = [
        LayerAccuracy("embed", "Embedding", *[math.nan] * 5),
        LayerAccuracy("output", "Net", 0.9514, 0.5, 12.0, -0.25, 0.031),
    ]
    assert accuracy_table(rows).splitlines() == [
        "layer   type       std ratio    5 %    95 %  log corr.  mean error",
        "embed   Embedding          -      -       -          -           -",
        "output  Net            0.951  0.500  12.000     -0.250       0.031",
    ]


# -- side effects and errors ------------------------------------------------------------------------------------------


def test_the_model_is_not_changed() -> None:
    bnn = pooled().train()
    next(bnn.network.children()).eval()
    modes = [module.training for module in bnn.modules()]
    before, stream = torch.random.get_rng_state(), copy.deepcopy(bnn.noise.state_dict())
    first = moment_accuracy(bnn, smooth_images(2), 3, generator=generator())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, stream[name]) for name, value in bnn.noise.state_dict().items())
    assert [module.training for module in bnn.modules()] == modes
    assert bnn.rule == "sample"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bnn.modules())
    assert moment_accuracy(bnn, smooth_images(2), 3, generator=generator()) == first


def test_hooks_are_removed_if_the_network_fails() -> None:
    bnn = pooled()
    with pytest.raises(RuntimeError):
        moment_accuracy(bnn, inputs(2, 5), 3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bnn.modules())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lb.Deterministic(), "Deterministic has no Bayesian weights"),
        (lb.MCDropout(), "MCDropout has no Bayesian weights"),
        (lb.Ensemble(2), "an ensemble have no moments"),
    ],
)
def test_models_without_moments_raise_errors(method: lb.Method, message: str) -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    with pytest.raises(LeanBayesError, match=message):
        moment_accuracy(lb.bayesianize(network, method), inputs(3, 6))


def test_invalid_settings_raise_errors() -> None:
    with pytest.raises(LeanBayesError, match="samples=1 must be at least 2"):
        moment_accuracy(linear(), inputs(3, 6), samples=1)
    with pytest.raises(LeanBayesError, match="'mean' gives no variance"):
        moment_accuracy(linear(), inputs(3, 6), samples=2, rule="mean")
    nothings: list[Any] = [inputs(0, 6), {}, torch.tensor(1.0)]
    for nothing in nothings:
        with pytest.raises(LeanBayesError, match="no examples"):
            moment_accuracy(linear(), nothing)


def test_time_is_not_cut_as_if_it_were_the_batch() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][-1])

    bnn, x, shapes = lb.bayesianize(TimeFirst(), lb.MeanField()), inputs(80, 2, 3), []
    bnn.network.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    moment_accuracy(bnn, x, samples=2)
    lb.calibrate(bnn, [x], layers=True, samples=2, factors=False)
    assert set(shapes) == {x.shape}
