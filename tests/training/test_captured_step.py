"""Training steps as CUDA graphs: the same training as without, and a log line if a step cannot be captured.

Without a GPU, a stand-in for CUDA graphs repeats the recorded step in Python, so that everything around it is tested.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from network_cases import seeded
from torch import Tensor, nn
from training_cases import SETTINGS, Staged, Swapping, clusters, conv, curve, mlp, stripes, task

import leanbayes as lb
from leanbayes.core.config import configurable
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.training import captured_step, fit, read_record
from leanbayes.training.captured_step import PATIENCE, WARM_UP, obstacle
from leanbayes.training.learning_rates import LearningRates
from leanbayes.training.loop import Loop
from leanbayes.training.optimizer_step import OptimizerStep
from leanbayes.training.recipe import Recipe

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
MODEL = "model.safetensors"
CAPTURED = "not captured in a CUDA graph"


class Stopped(Exception):
    """Raised to stop a training."""


@contextlib.contextmanager
def stopped_before(step: int) -> Iterator[None]:
    """Stop the training in the block before a step, counted from 0 since it was started."""
    count, original = 0, Loop._step

    def counted(self: Loop, parts: Any) -> None:
        nonlocal count
        if count == step:
            raise Stopped
        count += 1
        original(self, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", counted)
        try:
            yield
        except Stopped:
            return
    raise AssertionError("the training was not stopped")


# -- networks and methods ---------------------------------------------------------------------------------------------


class HostNoise(nn.Module):
    """A network that draws random numbers on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        return self.inner(x) * (1 + 0.1 * random.random())


class Waiting(nn.Module):
    """A network that reads a number back from its device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        return self.inner(x) / max(1.0, x.abs().max().item())


@configurable
@dataclass(frozen=True)
class Replacing(lb.MeanField):
    """After some steps the tensor of the means is another one."""

    every: int = 40

    def after_step(self, training: lb.Training) -> None:
        posterior = training.model.posterior
        assert isinstance(posterior, MeanFieldPosterior)
        if (training.step + 1) % self.every == 0:
            posterior.mu.data = posterior.mu.data.clone().mul_(0.5)


SSVI = lb.SSVI(density=0.3, interval=6)
METHODS: dict[str, lb.Method] = {
    "mean-field": lb.MeanField(),
    "natural gradients": lb.MeanField(engine="ivon"),
    "deterministic": lb.Deterministic(),
    "exchanges": SSVI,
    "in-place hook": Swapping(),
    "staged": Staged(),
}

# -- without a GPU: the schedule as tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_learning_rates_as_tensors_give_the_same_steps(optimizer: str) -> None:
    def trained(tensors: bool) -> tuple[list[Tensor], list[dict[str, Any]], list[float]]:
        torch.manual_seed(0)
        network, (x, y) = mlp(), clusters()[:]
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
            "adamw": torch.optim.AdamW,
        }
        optimizers = [kinds[optimizer](network[0].parameters(), lr=0.1), torch.optim.Adam(network[2].parameters())]  # type: ignore[index]
        rates, recipe, firsts = LearningRates(optimizers), Recipe(), []
        if tensors:
            rates.to_tensors(torch.device("cpu"))
        for step in range(20):
            rates.set(recipe.lr_factor(step, 20))
            firsts.append(rates.first)
            nn.functional.cross_entropy(network(x), y).backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        return [p.detach() for p in network.parameters()], rates.optimizer_states(), firsts

    (numbers, states, firsts), (tensors, tensor_states, tensor_firsts) = trained(False), trained(True)
    for one, other in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert firsts == tensor_firsts
    for state, other_state in zip(states, tensor_states, strict=True):
        assert state["param_groups"] == other_state["param_groups"]  # numbers, in both cases


def test_learning_rates_become_numbers_again() -> None:
    optimizer = torch.optim.Adam(mlp().parameters(), lr=0.3)
    rates = LearningRates([optimizer])
    rates.to_tensors(torch.device("cpu"))
    rates.set(0.5)
    tensor = optimizer.param_groups[0]["lr"]
    assert tensor.item() == pytest.approx(0.15)
    rates.set(0.25)
    assert optimizer.param_groups[0]["lr"] is tensor  # a graph reads it
    with rates.capturable():
        assert optimizer.param_groups[0]["capturable"]
    assert not optimizer.param_groups[0]["capturable"]
    rates.to_numbers()
    assert optimizer.param_groups[0]["lr"] == 0.075


# -- without a GPU: what cannot be captured ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "settings", "words"),
    [
        ({"device": torch.device("cpu")}, {}, "the device is cpu"),
        ({"num_processes": 2}, {}, "several processes"),
        ({"scaler": object()}, {}, "fp16"),
        ({}, {"accumulate": 2}, "accumulate=2"),
        ({}, {}, None),
    ],
    ids=["cpu", "processes", "fp16", "accumulate", "none"],
)
def test_obstacles_are_named(changed: dict[str, Any], settings: dict[str, Any], words: str | None) -> None:
    usual = {"device": torch.device("cuda", 0), "num_processes": 1, "scaler": None}
    found = obstacle(Recipe(**settings), SimpleNamespace(**{**usual, **changed}))
    assert found is None if words is None else found is not None and words in found


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out torch.compile, which takes as long as many tests."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.usefixtures("uncompiled")
def test_a_run_on_a_cpu_prints_one_line_and_is_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = {**SETTINGS, "progress": True}
    fit(mlp(), lb.MeanField(), task(clusters()), out=tmp_path / "plain", **settings)
    assert CAPTURED not in capsys.readouterr().err
    fit(mlp(), lb.MeanField(), task(clusters()), out=tmp_path / "compiled", **settings, compile=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if CAPTURED in line]
    assert lines == ["The training step is not captured in a CUDA graph: the device is cpu."]
    assert (tmp_path / "plain" / MODEL).read_bytes() == (tmp_path / "compiled" / MODEL).read_bytes()


# -- without a GPU: a stand-in for CUDA graphs ------------------------------------------------------------------------


class Recording:
    """Repeats a step that was recorded, as `torch.cuda.CUDAGraph` does."""

    made: ClassVar[list["Recording"]] = []

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        for step in self.steps:
            step()
        self.replays += 1


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch, uncompiled: None) -> list[Recording]:
    """Let trainings on a CPU record their steps, and return all recordings."""
    Recording.made.clear()
    current: list[Recording] = []
    original = OptimizerStep.run

    @contextlib.contextmanager
    def recording(graph: Recording, *args: Any, **kwargs: Any) -> Iterator[None]:
        current.append(graph)
        try:
            yield
        finally:
            current.pop()

    def run(self: OptimizerStep, batch: Any) -> None:
        if current:  # recorded, and not executed
            current[-1].steps.append(lambda: original(self, batch))
        else:
            original(self, batch)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(captured_step, "obstacle", lambda recipe, accelerator: None)
    monkeypatch.setattr("leanbayes.training.loop.obstacle", lambda recipe, accelerator: None)
    monkeypatch.setattr(OptimizerStep, "run", run)
    for name, value in {
        "CUDAGraph": Recording,
        "graph": recording,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return Recording.made


def run_both(
    network: Callable[[], nn.Module], method: lb.Method, data: Any, folder: Path, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train without and with capture, check that the histories agree, and return the state of both models."""
    given = {**SETTINGS, "optimizer": "sgd", "lr": 0.05, **settings}
    states = []
    for name in ("plain", "captured"):
        fit(network(), method, data, out=folder / name, **{**given, "compile": name == "captured"})
        states.append(lb.load(folder / name / MODEL, network()).state_dict())
    plain, captured = (curve(read_record(folder / name)) for name in ("plain", "captured"))
    for one, other in zip(plain, captured, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    return states[0], states[1]


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-3) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", METHODS)
def test_recorded_steps_train_as_ordinary_ones(name: str, tmp_path: Path, recordings: list[Recording]) -> None:
    stages = len(METHODS[name].stages())
    assert_close(*run_both(mlp, METHODS[name], task(clusters()), tmp_path))
    assert len(recordings) == stages
    assert sum(recording.replays for recording in recordings) == 32 - WARM_UP * stages


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_recorded_steps_have_the_same_dropout_clipping_and_average(
    optimizer: str, tmp_path: Path, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_step, "_host_randomness", tuple)  # dropout on a CPU is random there
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "clip": 0.5, "average": 0.9}
    one, other = run_both(conv, lb.MeanField(), task(stripes(), augment=True), tmp_path, **settings)
    for name in ("network.5.bias", "network.6.running_mean"):
        del one[name], other[name]  # BatchNorm removes this bias, so its gradient is rounding noise for AdamW
    assert_close(one, other)
    assert [recording.replays for recording in recordings] == [16 - WARM_UP]


@pytest.mark.parametrize("step", [1, 3, 11])
def test_a_run_with_recorded_steps_is_resumed(step: int, tmp_path: Path, recordings: list[Recording]) -> None:
    settings: dict[str, Any] = {**SETTINGS, "optimizer": "sgd", "lr": 0.05, "compile": True, "checkpoint_steps": 1}
    whole = fit(mlp(), SSVI, task(clusters()), out=tmp_path / "whole", **settings)
    with stopped_before(step):
        fit(mlp(), SSVI, task(clusters()), out=tmp_path / "stopped", **settings)
    found = fit(mlp(), SSVI, task(clusters()), out=tmp_path / "stopped", **settings)
    assert_close(found.state_dict(), whole.state_dict(), 1e-6)
    assert len(recordings) == (3 if step > WARM_UP else 2)


def test_the_checkpoint_of_recorded_steps_is_that_of_ordinary_ones(tmp_path: Path, recordings: list[Recording]) -> None:
    run_both(mlp, lb.MeanField(), task(clusters()), tmp_path, checkpoint_steps=7)
    states = []
    for name in ("plain", "captured"):
        path = tmp_path / name / "checkpoints" / "step-000000028" / "training.pt"
        states.append(torch.load(path, weights_only=True)["optimizers"])
    for one, other in zip(*states, strict=True):
        assert one["param_groups"] == other["param_groups"]
        assert one["state"].keys() == other["state"].keys()


def test_replaced_tensors_are_captured_again(tmp_path: Path, recordings: list[Recording]) -> None:
    assert_close(*run_both(mlp, Replacing(), task(clusters()), tmp_path, epochs=12))
    # 96 steps, with new tensors after 40 and 80
    assert [recording.replays for recording in recordings] == [40 - WARM_UP, 40 - WARM_UP, 16 - WARM_UP]


def test_a_method_that_often_replaces_tensors_is_not_captured(
    tmp_path: Path, recordings: list[Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_close(*run_both(mlp, Replacing(every=5), task(clusters()), tmp_path, progress=True))
    assert len(recordings) == 1
    assert capsys.readouterr().err.count("often replaces tensors") == 1


def test_a_network_with_randomness_on_the_cpu_is_not_captured(
    recordings: list[Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    network = seeded(HostNoise)()
    fit(network, lb.MeanField(), task(clusters()), **{**SETTINGS, "compile": True, "progress": True})
    assert not recordings
    lines = [line for line in capsys.readouterr().err.splitlines() if CAPTURED in line]
    assert lines == ["The training step is not captured in a CUDA graph: the network draws random numbers on the CPU."]


def test_a_capture_that_fails_leaves_an_ordinary_training(
    tmp_path: Path, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    monkeypatch.setattr(captured_step, "recover", lambda *left_behind: None)
    one, other = run_both(mlp, lb.MeanField(), task(clusters()), tmp_path, progress=True)
    assert_close(one, other)
    error = capsys.readouterr().err
    assert error.count("RuntimeError: operation not permitted when stream is capturing.") == 1
    assert "more" not in error.partition(CAPTURED)[2].splitlines()[0]


def step_of(batches: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[captured_step.CapturedStep, list[str]]:
    """Take steps on given batches, and return what took them and what was said."""
    bnn = lb.bayesianize(mlp(), lb.MeanField())
    training = lb.Training(bnn, steps=100, num_data=160)
    training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=0.01)]
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), scaler=None, num_processes=1, autocast=contextlib.nullcontext
    )
    step = OptimizerStep(bnn, training, Recipe(), accelerator, print)
    said: list[str] = []
    made = captured_step.CapturedStep(step, LearningRates(training.optimizers), training, bnn.method, said.append)
    for number, batch in enumerate(batches):
        made.take(iter([batch]), [number])
        assert training.batch is batch
    return made, said


def test_a_smaller_batch_is_taken_without_the_graph(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = clusters()[:]
    batch, smaller = (x[:16], y[:16]), (x[:7], y[:7])
    _, said = step_of([*[batch] * 6, smaller, batch, smaller], monkeypatch)
    assert [recording.replays for recording in recordings] == [4]
    assert not said


def test_batches_of_many_shapes_are_not_captured(recordings: list[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clusters()[:]
    _, said = step_of([(x[: 3 + number], y[: 3 + number]) for number in range(PATIENCE + 5)], monkeypatch)
    assert not recordings
    assert [CAPTURED in line and "different shapes" in line for line in said] == [True]


# -- on a GPU ---------------------------------------------------------------------------------------------------------

ON_GPU: dict[str, Any] = {**SETTINGS, "device": "cuda", "optimizer": "sgd", "lr": 0.05, "epochs": 6}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the replays of each CUDA graph."""
    counts: dict[int, int] = {}
    found: list[int] = []
    original = torch.cuda.CUDAGraph.replay

    def counted(self: Any) -> None:
        if id(self) not in counts:
            counts[id(self)] = len(found)
            found.append(0)
        found[counts[id(self)]] += 1
        original(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in read_record(folder)["history"]]


def train_on_gpu(network: nn.Module, method: lb.Method, data: Any, out: Path, **settings: Any) -> lb.BayesianModel:
    return fit(network, method, data, out=out, **{**ON_GPU, "log_every": 1, **settings})


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("uncompiled")
def test_captured_steps_have_the_losses_of_ordinary_ones(
    name: str, precision: str, tmp_path: Path, replays: list[int]
) -> None:
    method, data = METHODS[name], task(clusters())
    for kind in ("plain", "captured"):
        train_on_gpu(mlp(), method, data, tmp_path / kind, precision=precision, compile=kind == "captured")
    stages = len(method.stages())
    assert sum(replays) == 48 - WARM_UP * stages
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "plain"), rel=tolerance, abs=tolerance)
    models = [lb.load(tmp_path / kind / MODEL, mlp()).state_dict() for kind in ("plain", "captured")]
    assert torch.equal(models[0]["noise.state"], models[1]["noise.state"])  # the same noise


@needs_gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.usefixtures("uncompiled")
def test_captured_dropout_batchnorm_and_clipping_are_those_of_ordinary_steps(
    optimizer: str, tmp_path: Path, replays: list[int]
) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "clip": 0.5, "average": 0.9, "channels_last": True}
    data = task(stripes(), augment=True)
    for kind in ("plain", "captured"):
        train_on_gpu(conv(), lb.MeanField(), data, tmp_path / kind, compile=kind == "captured", **settings)
    assert sum(replays) == 24 - WARM_UP
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3, abs=1e-3)


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's advice on faster settings
@pytest.mark.parametrize("method", [lb.MeanField(), lb.Deterministic(), SSVI], ids=["mean-field", "plain", "ssvi"])
def test_compiled_and_captured_steps_have_the_losses_of_ordinary_ones(
    method: lb.Method, tmp_path: Path, replays: list[int]
) -> None:
    for kind in ("plain", "captured"):
        train_on_gpu(conv(), method, task(stripes()), tmp_path / kind, precision="bf16", compile=kind == "captured")
    assert sum(replays) == 24 - WARM_UP
    # The compiler makes other dropout masks.
    assert losses(tmp_path / "captured")[-1] == pytest.approx(losses(tmp_path / "plain")[-1], abs=0.3)
    torch._dynamo.reset()


@needs_gpu
@pytest.mark.parametrize("step", [2, 7, 31])
@pytest.mark.usefixtures("uncompiled")
def test_a_captured_run_is_resumed(step: int, tmp_path: Path, replays: list[int]) -> None:
    settings: dict[str, Any] = {"compile": True, "checkpoint_steps": 1, "average": 0.9}
    train_on_gpu(mlp(), SSVI, task(clusters()), tmp_path / "whole", **settings)
    with stopped_before(step):
        train_on_gpu(mlp(), SSVI, task(clusters()), tmp_path / "stopped", **settings)
    train_on_gpu(mlp(), SSVI, task(clusters()), tmp_path / "stopped", **settings)
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5, abs=1e-6)
    assert sum(replays) > 48


@needs_gpu
@pytest.mark.usefixtures("uncompiled")
def test_a_captured_run_has_a_graph_for_each_set_of_tensors(tmp_path: Path, replays: list[int]) -> None:
    for kind in ("plain", "captured"):
        train_on_gpu(mlp(), Replacing(), task(clusters()), tmp_path / kind, epochs=12, compile=kind == "captured")
    assert sum(replays) == 96 - 3 * WARM_UP
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4, abs=1e-4)


@needs_gpu
@pytest.mark.usefixtures("uncompiled")
def test_a_smaller_batch_is_taken_without_the_graph_on_a_gpu(replays: list[int]) -> None:
    def trained(captured: bool) -> Tensor:
        bnn = lb.bayesianize(mlp(), lb.MeanField(), seed=0).cuda()
        training = lb.Training(bnn, steps=100, num_data=160)
        training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=0.01, momentum=0.9, fused=True)]
        accelerator: Any = SimpleNamespace(
            device=torch.device("cuda"), scaler=None, num_processes=1, autocast=contextlib.nullcontext
        )
        rates = LearningRates(training.optimizers)
        step: Any = OptimizerStep(bnn, training, Recipe(), accelerator, print)
        took = captured_step.CapturedStep(step, rates, training, bnn.method, print) if captured else step
        x, y = (tensor.cuda() for tensor in clusters()[:])
        for number in range(12):
            size = 7 if number in (6, 9) else 16
            rates.set(1 / (1 + number))
            step.temperature.fill_(0.01 * number)
            took.take(iter([(x[number : number + size], y[number : number + size])]), [number])
        return step.loss_sum.cpu()

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-5)
    assert replays == [12 - WARM_UP - 2]


@needs_gpu
@pytest.mark.parametrize(
    ("network", "settings", "words"),
    [
        (Waiting, {}, "it waits for the GPU"),
        (HostNoise, {}, "random numbers on the CPU"),
        (mlp, {"accumulate": 2}, "accumulate=2"),
        (mlp, {"precision": "fp16"}, "fp16"),
    ],
    ids=["waiting", "host noise", "accumulate", "fp16"],
)
@pytest.mark.usefixtures("uncompiled")
def test_what_cannot_be_captured_is_trained_with_one_log_line(
    network: Any, settings: dict[str, Any], words: str, replays: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**ON_GPU, "compile": True, "progress": True, **settings}
    fit(seeded(network)(), lb.MeanField(), task(clusters()), **given)
    lines = [line for line in capsys.readouterr().err.splitlines() if CAPTURED in line]
    assert len(lines) == 1
    assert words in lines[0]
    assert not replays


@needs_gpu
@pytest.mark.usefixtures("uncompiled")
def test_training_and_dropout_go_on_after_a_failed_capture(
    tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = task(stripes())
    train_on_gpu(conv(), lb.MeanField(), data, tmp_path / "plain")
    original = OptimizerStep.run

    def waiting(self: OptimizerStep, batch: Any) -> None:
        original(self, batch)
        if torch.cuda.is_current_stream_capturing():
            self.loss_sum.item()  # invalidates the capture

    monkeypatch.setattr(OptimizerStep, "run", waiting)
    train_on_gpu(conv(), lb.MeanField(), data, tmp_path / "failed", compile=True, progress=True)
    assert capsys.readouterr().err.count(CAPTURED) == 1
    assert not replays
    assert losses(tmp_path / "failed") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3, abs=1e-3)
    torch.cuda.empty_cache()  # the allocator knows that the capture has ended
    assert torch.randn(8, device="cuda").isfinite().all()
