"""The moving average of the parameters: its formula, exchanged weights, stages, BatchNorm and resumption."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import (
    SETTINGS,
    Staged,
    assert_equal_models,
    conv,
    curve,
    finish,
    mlp,
    run_conv,
    run_mlp,
    stopped_at,
    stripes,
    task,
    together,
    without_nan,
)

import leanbayes as lb
from leanbayes.core.config import configurable
from leanbayes.evaluation import evaluate
from leanbayes.methods import METHODS
from leanbayes.methods.sparse_training.exchange import replace_weights
from leanbayes.posteriors import SparsePointPosterior
from leanbayes.training import fit, read_record
from leanbayes.training.averaging import MovingAverage

MODEL = "model.safetensors"
AVERAGE = 0.8
SPARSE = [lb.SSVI(density=0.3, interval=3), lb.RigL(density=0.3, interval=3)]


def own(tensor: Tensor) -> Tensor:
    """Return the mean over one process."""
    return tensor.clone()


def trainable(bnn: lb.BayesianModel) -> list[Tensor]:
    return [p.detach().clone() for p in bnn.parameters() if p.requires_grad]


def decay_of(step: int, largest: float = AVERAGE) -> float:
    return min(largest, (1 + step) / (10 + step))


@configurable
@dataclass(frozen=True)
class Recorded(lb.MeanField):
    """Appends the parameters after every step to a list."""

    def after_step(self, training: lb.Training) -> None:
        if training.step == 0:
            SEEN.clear()
        SEEN.append(trainable(training.model))


SEEN: list[list[Tensor]] = []


def test_the_model_is_the_average_of_the_parameters_of_all_steps() -> None:
    average = trainable(lb.bayesianize(mlp(), Recorded()))
    bnn = run_mlp(Recorded(), None, average=AVERAGE)
    assert len(SEEN) == 32
    for step, values in enumerate(SEEN):
        decay = decay_of(step)
        average = [decay * old + (1 - decay) * new for old, new in zip(average, values, strict=True)]
    for found, expected, last in zip(trainable(bnn), average, SEEN[-1], strict=True):
        torch.testing.assert_close(found, expected)
        assert not torch.equal(found, last)


def test_the_average_does_not_change_the_training(tmp_path: Path) -> None:
    run_mlp(lb.MeanField(), tmp_path / "plain")
    run_mlp(lb.MeanField(), tmp_path / "average", average=AVERAGE)
    plain, average = (curve(read_record(tmp_path / name)) for name in ("plain", "average"))
    for one, other in zip(plain, average, strict=True):
        assert {**one, "validation": None} == {**other, "validation": None}
    assert [entry.get("validation") for entry in plain] != [entry.get("validation") for entry in average]


def test_the_averaged_model_is_evaluated_during_training(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[list[Tensor]] = []

    def watched(bnn: lb.BayesianModel, *args: Any, **kwargs: Any) -> dict[str, float]:
        evaluated.append(trainable(bnn))
        return evaluate(bnn, *args, **kwargs)

    monkeypatch.setattr("leanbayes.training.run.evaluate", watched)
    average = trainable(lb.bayesianize(conv(), Recorded()))
    data = task(stripes(), augment=True)
    fit(conv(), Recorded(), data, **{**SETTINGS, "epochs": 2, "average": AVERAGE})
    assert (len(evaluated), len(SEEN)) == (2, 8)  # after the first epoch, and at the end
    for step, values in enumerate(SEEN):
        decay = decay_of(step)
        average = [decay * old + (1 - decay) * new for old, new in zip(average, values, strict=True)]
        if step in (3, 7):
            for found, expected in zip(evaluated.pop(0), average, strict=True):
                torch.testing.assert_close(found, expected)


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def norms(bnn: lb.BayesianModel) -> list[nn.BatchNorm2d]:
    return [module for module in bnn.modules() if isinstance(module, nn.BatchNorm2d)]


def statistics(bnn: lb.BayesianModel) -> list[Tensor]:
    return [norm.running_mean.clone() for norm in norms(bnn) if norm.running_mean is not None]


def test_the_statistics_of_batchnorm_are_averaged_with_the_parameters() -> None:
    bnn = lb.bayesianize(conv(), lb.MeanField())
    average = MovingAverage(bnn, AVERAGE, own)
    expected = statistics(bnn)
    for step in range(12):
        for norm in norms(bnn):
            assert norm.running_mean is not None
            norm.running_mean.fill_(float(step))
        average.update(step)
        decay = decay_of(step)
        expected = [decay * old + (1 - decay) * step for old in expected]
    with average.averaged():
        for norm, values in zip(norms(bnn), expected, strict=True):
            torch.testing.assert_close(norm.running_mean, values)
    assert all(norm.running_mean is not None and (norm.running_mean == 11).all() for norm in norms(bnn))


@pytest.mark.parametrize("average", [None, AVERAGE])
def test_the_statistics_are_refreshed_for_the_final_model_or_left(average: float | None, tmp_path: Path) -> None:
    refreshed = run_conv("sgd", tmp_path / "1", average=average)
    left = run_conv("sgd", tmp_path / "2", average=average, refresh_batchnorm=False)
    for one, other in zip(trainable(refreshed), trainable(left), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(statistics(refreshed), statistics(left), strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0.5, atol=0.3)  # both are statistics of the same network
    before = statistics(refreshed)
    refreshed.refresh_batchnorm([stripes()[:64][0]], torch.Generator().manual_seed(0))
    for one, other in zip(statistics(refreshed), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0.3, atol=0.2)


# -- exchanged weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SPARSE, ids=["ssvi", "rigl"])
def test_averages_move_with_exchanged_weights(method: lb.Method) -> None:
    bnn = lb.bayesianize(mlp(), method)
    posterior = bnn.posterior
    assert isinstance(posterior, SparsePointPosterior)
    average = MovingAverage(bnn, AVERAGE, own)
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, dict[int, float]] = {}  # by parameter and position

    def positions() -> list[int]:
        return posterior.index.tolist()

    def values() -> dict[str, dict[int, float]]:
        found = {name: getattr(posterior, name) for name in ("mu", "rho") if hasattr(posterior, name)}
        return {name: dict(zip(positions(), tensor.tolist(), strict=True)) for name, tensor in found.items()}

    expected = values()
    for step in range(9):
        with torch.no_grad():
            for parameter in posterior.entries():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        if step % 3 == 2:
            before = {*positions()}
            removal = torch.rand(len(posterior.index), generator=generator)
            replace_weights(posterior, [], 0.3, removal, torch.rand(posterior.layout.numel, generator=generator))
            assert {*positions()} != before
        average.update(step)
        decay = decay_of(step)
        for name, now in values().items():
            old = expected[name]  # a new weight starts from its current value
            expected[name] = {at: decay * old.get(at, value) + (1 - decay) * value for at, value in now.items()}
    with average.averaged():
        for name, now in values().items():
            assert now == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


def test_the_average_restarts_if_a_hook_replaces_parameters() -> None:
    bnn = lb.bayesianize(mlp(), lb.Deterministic())
    average = MovingAverage(bnn, AVERAGE, own)
    average.update(0)
    bnn.network[2] = nn.Linear(16, 3)  # type: ignore[operator]
    average.update(1)
    for value, parameter in zip(average.state(), trainable(bnn), strict=True):
        assert torch.equal(value, parameter)


def test_half_precision_parameters_have_an_average_in_single_precision() -> None:
    bnn = lb.bayesianize(mlp().bfloat16(), lb.Deterministic())
    average = MovingAverage(bnn, 0.999, own)
    average.update(0)
    assert {value.dtype for value in average.state()} == {torch.float32}
    with average.averaged():
        assert {p.dtype for p in bnn.parameters()} == {torch.bfloat16}


# -- stages, processes and resumption ---------------------------------------------------------------------------------

RESUMED: dict[str, Callable[[Path], lb.BayesianModel]] = {
    **{name: lambda out, m=method: run_mlp(m, out, **OFTEN) for name, method in METHODS.items()},  # type: ignore[misc]
    "csgmcmc": lambda out: run_mlp(lb.CyclicalSGMCMC(cycles=2, per_cycle=1), out, **OFTEN),
    "staged": lambda out: run_mlp(Staged(), out, **OFTEN),
    "exchanges": lambda out: run_mlp(SPARSE[0], out, **OFTEN),
    "batchnorm": lambda out: run_conv("sgd", out, **OFTEN),
    "statistics that are not refreshed": lambda out: run_conv("adamw", out, refresh_batchnorm=False, **OFTEN),
}
OFTEN: dict[str, Any] = {"average": AVERAGE, "checkpoint_steps": 2}


@pytest.mark.parametrize("case", RESUMED)
def test_a_stopped_run_is_resumed_bit_by_bit(case: str, tmp_path: Path) -> None:
    whole = RESUMED[case](tmp_path / "whole")
    for step in (5, 11):  # also in the second stage, and after exchanges
        with stopped_at(step):
            RESUMED[case](tmp_path / "stopped")
    assert_equal_models(RESUMED[case](tmp_path / "stopped"), whole)
    assert (tmp_path / "stopped" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    one, other = (read_record(tmp_path / name) for name in ("stopped", "whole"))
    assert curve(one) == curve(other)
    assert without_nan(one["scores"]) == without_nan(other["scores"])


@configurable
@dataclass(frozen=True)
class WithStarts(Staged):
    """Appends the means that its second stage starts from to a list."""

    def stages(self) -> tuple[lb.Stage, ...]:
        return lb.Stage(lb.Deterministic(), 0.5), lb.Stage(self, 0.5)

    def start(self, training: lb.Training) -> None:
        STARTS.append(training.model.posterior.mean().detach().clone())
        super().start(training)


STARTS: list[Tensor] = []


def test_each_stage_has_its_own_average_and_ends_with_it() -> None:
    STARTS.clear()
    for average in (AVERAGE, None):
        run_mlp(WithStarts(), None, average=average)
        alone = run_mlp(lb.Deterministic(), None, epochs=2, average=average).to_deterministic()
        weights = [p.detach().flatten() for name, p in alone.named_parameters() if "weight" in name]
        torch.testing.assert_close(STARTS[-1], torch.cat(weights))
    assert not torch.equal(*STARTS)


@pytest.mark.parametrize("case", ["mlp", "batchnorm"])
def test_two_processes_average_as_one_with_two_parts(case: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.05, "optimizer": "sgd", "average": AVERAGE}

    def run(out: Path, processes: int) -> dict[str, Tensor]:
        function: Any = run_conv if case == "batchnorm" else run_mlp
        first = settings["optimizer"] if case == "batchnorm" else lb.MeanField()
        given = {name: value for name, value in settings.items() if case == "mlp" or name != "optimizer"}
        if processes == 1:
            function(first, out, accumulate=2, **given)
        else:
            assert [finish(process) for process in together(function, 2, first, out, **given)] == [0, 0]
        return lb.load(out / MODEL, conv() if case == "batchnorm" else mlp()).state_dict()

    two, one = run(tmp_path / "two", 2), run(tmp_path / "one", 1)
    for name, tensor in two.items():
        if name != "noise.state":  # it counts the samples of one process
            torch.testing.assert_close(tensor, one[name], rtol=1e-3, atol=1e-3, msg=name)
