"""Recurrent layers with random weights, inputs and states, against samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moment_cases import common_pass, gaussian, samples_of
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import leanbayes as lb
from leanbayes.rules import MomentPropagation
from leanbayes.rules.moments.context import Pass

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "tanh": torch.rnn_tanh,
    "relu": torch.rnn_relu,
}


def layer(kind: str, **options: Any) -> nn.RNNBase:
    options = {"num_layers": 1, **options}
    if kind in ("tanh", "relu"):
        return nn.RNN(3, 5, nonlinearity=kind, **options).double().requires_grad_(False)
    return getattr(nn, kind)(3, 5, **options).double().requires_grad_(False)


def call(kind: str, module: nn.RNNBase, x: Any, weights: list[Any], training: bool = False) -> Any:
    """Call the function that `forward` of the module calls."""
    rows = x.shape[0] if module.batch_first else x.shape[1]
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.zeros(count, rows, module.proj_size or module.hidden_size, dtype=x.dtype)
    hx = (h, torch.zeros(count, rows, module.hidden_size, dtype=x.dtype)) if kind == "LSTM" else h
    settings = module.bias, module.num_layers, module.dropout, training, module.bidirectional, module.batch_first
    return FUNCTIONS[kind](x, hx, weights, *settings)


def flat(module: nn.RNNBase) -> list[Any]:
    return list(module._flat_weights)


def random(module: nn.RNNBase, std: float, within: Pass) -> list[lb.Moments]:
    return [lb.Moments(w, torch.full_like(w, std**2), within=within) for w in flat(module)]


KINDS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("correlation", ["none", "common"])
def test_results_without_variance_equal_those_of_torch(kind: str, options: str, correlation: str) -> None:
    module, x = layer(kind, **KINDS[options]), torch.randn(4, 2, 3, dtype=torch.float64)
    within = common_pass(batch_first=module.batch_first) if correlation == "common" else Pass()
    results = call(kind, module, x, random(module, 0.0, within))
    expected = call(kind, module, x, flat(module))
    for result, plain in zip(results, expected, strict=True):
        assert torch.equal(result.loc, plain)
        assert not result.variance.any()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_without_variance() -> None:
    module, x = layer("LSTM", proj_size=2, bidirectional=True), torch.randn(4, 2, 3, dtype=torch.float64)
    results = call("LSTM", module, x, random(module, 0.0, Pass()))
    for result, plain in zip(results, call("LSTM", module, x, flat(module)), strict=True):
        assert torch.equal(result.loc, plain)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(("correlation", "low", "high"), [("none", 0.4, 1.3), ("common", 0.75, 1.5)])
def test_noise_of_weights(kind: str, correlation: str, low: float, high: float) -> None:
    module, x, std = layer(kind, num_layers=2), torch.randn(5, 2, 3, dtype=torch.float64), 0.05
    within = common_pass(batch_first=False) if correlation == "common" else Pass()
    output, *_ = call(kind, module, x, random(module, std, within))
    weights = flat(module)
    outcomes = torch.stack(
        [call(kind, module, x, [w + std * torch.randn_like(w) for w in weights])[0] for _ in range(1500)]
    )
    assert (output.variance >= 0).all()
    assert (output.loc - outcomes.mean(0)).abs().mean() < 0.1 * outcomes.std(0).mean()
    assert low < output.variance.mean() / outcomes.var(0).mean() < high
    if correlation == "common":  # the variance of the mean over time depends on the correlation over time
        assert output.common is not None
        own = output.common.mean(1).square().sum(0) + output.independent.mean(0) / 5
        assert 0.6 < own.mean() / outcomes.mean(1).var(0).mean() < 1.8


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_noise_of_inputs(kind: str) -> None:
    module, x = layer(kind), gaussian((5, 2, 3), std=0.05)
    output, *last = call(kind, module, x, flat(module))
    sample = samples_of(x, 2_000)
    outcomes = torch.stack([call(kind, module, one, flat(module))[0] for one in sample])
    assert 0.7 < output.variance.mean() / outcomes.var(0).mean() < 1.3
    torch.testing.assert_close(last[0].variance[0], output.variance[-1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "tanh", "relu"])
def test_cells(kind: str) -> None:
    x, h = gaussian((2, 3), std=0.05), gaussian((2, 5), 1, std=0.05)
    cells: dict[str, Callable[..., Any]] = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell}
    module = cells[kind](3, 5) if kind in cells else nn.RNNCell(3, 5, nonlinearity=kind)
    module = module.double().requires_grad_(False)
    c = torch.randn(2, 5, dtype=torch.float64)

    def run(x: Any, h: Any) -> Any:
        return module(x, (h, c))[0] if kind == "LSTM" else module(x, h)

    result, outcomes = (
        run(x, h),
        torch.stack([run(*one) for one in zip(samples_of(x, 4000), samples_of(h, 4000, 2), strict=True)]),
    )
    assert (result.loc - outcomes.mean(0)).abs().max() < 0.1 * outcomes.std(0).max()
    assert 0.7 < result.variance.mean() / outcomes.var(0).mean() < 1.4


def test_a_module_with_random_weights() -> None:
    module = layer("LSTM", batch_first=True)
    weights = random(module, 0.1, Pass())
    module._flat_weights = weights  # type: ignore[assignment]
    output, (h, _) = module(torch.randn(2, 4, 3, dtype=torch.float64))
    assert output.variance.all()
    assert torch.equal(output.loc[:, -1], h.loc[0])


def test_dropout_between_layers_in_training() -> None:
    module, x = layer("GRU", num_layers=2, dropout=0.5), torch.randn(4, 2, 3, dtype=torch.float64)
    results = [call("GRU", module, x, random(module, 0.1, Pass()), training=True)[0] for _ in range(2)]
    assert not torch.equal(results[0].loc, results[1].loc)
    still = [call("GRU", module, x, random(module, 0.1, Pass()))[0] for _ in range(2)]
    assert torch.equal(still[0].loc, still[1].loc)


LENGTHS = torch.tensor([3, 5, 2, 5])


class Packed(nn.Module):
    """A recurrent network on packed sequences, with a layer before it; it returns padded outputs and the last state."""

    def __init__(self, kind: str, batch_first: bool = True, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.recurrent = getattr(nn, kind)(4, 6, batch_first=batch_first, **settings)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        batch_first = self.recurrent.batch_first
        x = self.first(x)
        x = x if batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
        packed, state = self.recurrent(packed)
        outputs, found = pad_packed_sequence(packed, batch_first, padding_value=0.5, total_length=6)
        assert torch.equal(found, lengths)
        return outputs if batch_first else outputs.transpose(0, 1), state[0] if isinstance(state, tuple) else state


PACKED: dict[str, dict[str, Any]] = {
    "LSTM": {},
    "LSTM time first": {"batch_first": False},
    "LSTM with projection": {"proj_size": 2, "num_layers": 2},
    "GRU in both directions": {"bidirectional": True, "num_layers": 2},
    "RNN": {"bias": False},
}


def packed_model(name: str) -> tuple[lb.BayesianModel, Tensor]:
    network = Packed(name.split()[0], **PACKED[name]).double()
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.1, relative=False), seed=0).eval()
    return bnn, torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_have_the_moments_of_each_alone(name: str) -> None:
    bnn, x = packed_model(name)
    bnn.rule = MomentPropagation(correlation="none")
    with torch.no_grad():
        outputs, state = bnn(x, LENGTHS)
        for row, length in enumerate(LENGTHS.tolist()):
            alone, last = bnn(x[row : row + 1, :length], LENGTHS[row : row + 1])
            for part in ("loc", "variance"):
                torch.testing.assert_close(getattr(outputs, part)[row], getattr(alone, part)[0])
                torch.testing.assert_close(getattr(state, part)[:, row], getattr(last, part)[:, 0])
            assert torch.equal(outputs.loc[row, length:], torch.full_like(outputs.loc[row, length:], 0.5))
            assert not outputs.variance[row, length:].any()


def test_packed_sequences_have_the_moments_of_samples() -> None:
    bnn, x = packed_model("LSTM")
    with torch.no_grad():
        samples = torch.stack([bnn(x, LENGTHS)[0] for _ in range(2000)])
        with bnn.using("moments"):
            found = bnn(x, LENGTHS)[0]
    random = samples.std(0) > 1e-3
    assert ((found.loc - samples.mean(0)).abs() / samples.std(0))[random].max() < 0.3
    assert 0.85 < (found.stddev / samples.std(0))[random].median() < 1.35  # that of padded sequences is 1.20


def test_packed_sequences_of_one_length_have_the_moments_of_padded_ones() -> None:
    x, results = torch.randn(4, 2, 3, dtype=torch.float64), []
    for value in (x, pack_padded_sequence(x, torch.tensor([4, 4]))):
        torch.manual_seed(0)
        module = layer("GRU", num_layers=2)
        module._flat_weights = random(module, 0.1, common_pass(batch_first=False))  # type: ignore[assignment]
        output, state = module(value)
        results.append((pad_packed_sequence(output)[0] if isinstance(output, PackedSequence) else output, state))
    for padded, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed.loc, padded.loc)
        torch.testing.assert_close(packed.variance, padded.variance)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("std", [0.0, 0.1])
def test_gradients_are_finite(kind: str, std: float) -> None:
    module, x = layer(kind), torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = random(module, std, common_pass(batch_first=False))
    variances = [w.independent.requires_grad_() for w in weights]
    output, *_ = call(kind, module, x, list(weights))
    (output.loc.sum() + output.variance.sum()).backward()
    assert all(v.grad is not None and v.grad.isfinite().all() for v in (x, *variances))


def test_a_layer_compiles_into_one_graph() -> None:
    weights, x = flat(layer("GRU")), torch.randn(3, 2, 3, dtype=torch.float64)

    def function(x: Tensor, within: Pass) -> tuple[Tensor, Tensor]:
        values = [lb.Moments(w, 0.01 * w.square(), within=within) for w in weights]
        output, *_ = torch.gru(x, x.new_zeros(1, 2, 5), values, True, 1, 0.0, False, False, False)  # type: ignore
        return output.loc, output.variance  # type: ignore[attr-defined]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, Pass()), function(x, Pass()))
