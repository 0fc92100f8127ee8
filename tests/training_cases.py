"""Small tasks, networks and methods for the tests of training, and separate processes to train in."""

import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network_cases import seeded
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset, TensorDataset

import leanbayes as lb
from leanbayes.core.config import configurable
from leanbayes.data import Augment, Batches, Data, from_datasets
from leanbayes.evaluation import evaluate
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.training import fit

# -- tasks ------------------------------------------------------------------------------------------------------------


def clusters(count: int = 160, noise: float = 0.6) -> TensorDataset:
    """Return three clusters in six dimensions, which any method can learn."""
    generator = torch.Generator().manual_seed(3)
    centers = 2 * torch.randn(3, 6, generator=generator)
    y = torch.arange(count) % 3
    return TensorDataset(centers[y] + noise * torch.randn(count, 6, generator=generator), y)


def stripes(count: int = 96) -> TensorDataset:
    """Return images of 1×8×8 with a bright row or column, in four classes."""
    generator = torch.Generator().manual_seed(4)
    x, y = 0.5 * torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 4
    for image, label in zip(x, y.tolist(), strict=True):
        place = 2 if label % 2 else 5
        (image[0, place] if label < 2 else image[0, :, place]).add_(2)
    return TensorDataset(x, y)


def task(dataset: Dataset[Any], held_out: int = 32, augment: bool = False, **settings: Any) -> Data:
    """Return a task from a data set in memory, whose last examples are held out."""
    x, y = dataset[:]
    made = TensorDataset(x[:-held_out], y[:-held_out]), TensorDataset(x[-held_out:], y[-held_out:])
    return from_datasets(*made, augment=Augment(crop=1, flip=False) if augment else None, **settings)


class Jittered(Dataset[Any]):
    """Examples that are read one by one, each with random noise from torch and numpy."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset, self.targets = dataset, dataset.tensors[1]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.dataset[index]
        return x + 0.1 * torch.randn(x.shape) + 0.1 * float(np.random.randn()), y


# -- networks ---------------------------------------------------------------------------------------------------------


@seeded
def mlp() -> nn.Module:
    """For `clusters`."""
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def mlp_for(method: lb.Method) -> nn.Module:
    """For `clusters`, with a normalization layer if the method needs one."""
    network = mlp()
    return network.insert(1, nn.LayerNorm(16)) if isinstance(method, lb.ABNN) else network  # type: ignore[operator]


@seeded
def conv() -> nn.Module:
    """For `stripes`, with batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 4),
    )


# -- methods with the hooks of papers ---------------------------------------------------------------------------------


@configurable
@dataclass(frozen=True)
class Staged(lb.MeanField):
    """First the plain network, then a Gaussian around it, whose std is computed from training data."""

    def stages(self) -> tuple[lb.Stage, ...]:
        return lb.Stage(lb.Deterministic(), 0.5), lb.Stage(self, 0.5, {"lr": 3e-4, "warmup": 0.0})

    def start(self, training: lb.Training) -> None:
        model = training.model
        size = torch.stack([x.abs().mean() for x, _ in training.batches()]).mean()
        mean = model.posterior.mean().detach().clone()
        std = (0.02 + 0.05 * mean.abs()) / (1 + training.average(size))
        model.posterior = MeanFieldPosterior(model.layout, mean, std, self.prior.bind(model.layout, mean))


@configurable
@dataclass(frozen=True)
class Swapping(lb.MeanField):
    """Every few steps the least important weights and their optimizer state are set to zero."""

    every: int = 3
    share: float = 0.2

    def after_step(self, training: lb.Training) -> None:
        if (training.step + 1) % self.every:
            return
        posterior, batch = training.model.posterior, training.batch
        assert isinstance(posterior, MeanFieldPosterior)
        assert batch is not None
        with training.model.frozen(training.step):
            loss = lb.elbo_loss(training.model, *batch, num_data=training.num_data)
        gradient = training.average(torch.autograd.grad(loss, posterior.mu)[0])
        with torch.no_grad():
            importance = posterior.mu.abs() / posterior.std() + gradient.abs()
            least = importance.argsort()[: int(self.share * len(importance))]
            posterior.mu[least] = 0
            for optimizer in training.optimizers:
                state = optimizer.state.get(posterior.mu, {})
                for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    if name in state:
                        state[name][least] = 0


@configurable
@dataclass(frozen=True)
class Watched(lb.MeanField):
    """Saves the loss of each process on the same examples, and its average over all processes."""

    folder: str = ""

    def after_step(self, training: lb.Training) -> None:
        x, y = clusters()[:20]
        with torch.no_grad():
            own = lb.elbo_loss(training.model, x, y, num_data=training.num_data)
        rank, size = int(os.environ.get("RANK", 0)), len(training.batch[1]) if training.batch else 0
        torch.save((own, training.average(own), size), f"{self.folder}/{rank}-{training.step}.pt")


# -- results of a training --------------------------------------------------------------------------------------------

CURVE = ("step", "epoch", "loss", "kl", "sigma", "temperature", "lr", "validation")


def curve(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the history of a run without times."""
    return [{name: without_nan(entry[name]) for name in CURVE if name in entry} for entry in record["history"]]


def without_nan(value: Any) -> Any:
    """Replace undefined scores by -1, since NaN is not equal to itself."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    return -1.0 if value != value else value


def assert_equal_models(first: nn.Module, second: nn.Module) -> None:
    """Check that two models hold the same numbers, bit by bit."""
    one, other = first.state_dict(), second.state_dict()
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def models_equal(first: nn.Module, second: nn.Module) -> bool:
    other = second.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in first.state_dict().items())


class Stopped(Exception):
    """Stands for anything that ends a process."""


@contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Stop the training in the block within a step, counted from 0 over all stages since it was started."""
    left = step

    def stop(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal left
        if type(optimizer) is torch.optim.Adam:  # that of the stds comes second
            return
        left -= 1
        if left < 0:
            raise Stopped

    handle = register_optimizer_step_pre_hook(stop)
    try:
        yield
    except Stopped:
        return
    finally:
        handle.remove()
    raise AssertionError("the training was not stopped")


def expect(call: Callable[[], Any], *words: str, kind: type[Exception] = lb.LeanBayesError) -> str:
    """Check that a call raises an error of one or two sentences that contain these words, and return the message."""
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    assert message.endswith((".", "?"))
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# -- separate processes -----------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
# Imports that a training makes when it first needs them, which take seconds.
PRELOADED = ["training_cases", "torch._dynamo", "torch.utils.tensorboard"]


@contextmanager
def _tests_on_path() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def start(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseProcess:
    """Call a function in a new process, which is forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _tests_on_path():
        process = context.Process(target=_run, args=(function, args, kwargs), daemon=False)
        process.start()
    return process


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in conftest.py
    code = 0
    try:
        function(*args, **kwargs)
    except lb.LeanBayesError as error:
        print(f"LeanBayesError: {error}", file=sys.stderr, flush=True)
        code = 3
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # torch's threads may abort while the interpreter shuts down


def finish(process: BaseProcess, seconds: float = 120) -> int:
    """Wait for a process and return its exit code."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"A training did not finish in {seconds} s.")
    return process.exitcode


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def together(function: Callable[..., Any], processes: int, *args: Any, **kwargs: Any) -> list[BaseProcess]:
    """Call a function in several processes that train together, as torchrun does."""
    port = free_port()
    return [start(_as_rank, rank, processes, port, function, args, kwargs) for rank in range(processes)]


def _as_rank(
    rank: int, world: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    function(*args, **kwargs)


# -- trainings for separate processes ---------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 16,
    "temperature": 0.01,
    "device": "cpu",
    "progress": False,
    "log_every": 5,
}


def run_conv(optimizer: str, out: Path, **settings: Any) -> lb.BayesianModel:
    """Mean-field inference on a network with batch norm and dropout."""
    data = task(stripes(), augment=True)
    return fit(conv(), lb.MeanField(), data, out=out, **{**SETTINGS, "optimizer": optimizer, **settings})


def run_until_killed(call: int, after: bool, *args: Any, **settings: Any) -> None:
    """Train, and be killed just before or after the n-th call that makes files or their names permanent."""
    count = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    run_mlp(*args, **settings)


def run_on_a_full_disk(limit: int, network: str, out: Path, **settings: Any) -> None:
    """Train with a limit on the size of a file in bytes, and write the error to error.txt."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run = {"mlp": lambda: run_mlp(lb.MeanField(), out, **settings), "wide": lambda: run_wide(out, **settings)}[network]
    try:
        run()
    except lb.LeanBayesError as error:
        (out / "error.txt").write_text(str(error))
        raise


def run_signaled(number: int, step: int, out: Path) -> None:
    """Train, receive a signal in the middle of a step (counted from 0), and write the message to error.txt."""
    left = step

    def ask(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal left
        left -= type(optimizer) is not torch.optim.Adam
        if left == -1:
            left -= 1
            signal.raise_signal(number)

    register_optimizer_step_pre_hook(ask)
    before = signal.getsignal(number)
    try:
        run_mlp(lb.MeanField(), out)
    except KeyboardInterrupt as error:
        assert signal.getsignal(number) is before
        (out / "error.txt").write_text(str(error))


@seeded
def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3000), nn.ReLU(), nn.Linear(3000, 3))


def run_wide(out: Path, **settings: Any) -> lb.BayesianModel:
    """Train a model of 0.25 MB, whose optimizers have a state of twice that."""
    return fit(wide(), lb.MeanField(), task(clusters()), out=out, **{**SETTINGS, "checkpoint_steps": 10, **settings})


def run_mlp(method: lb.Method, out: Path | None, **settings: Any) -> lb.BayesianModel:
    return fit(mlp_for(method), method, task(clusters()), out=out, **{**SETTINGS, **settings})


class WithUnused(nn.Module):
    """A network with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        return self.used(x)


def run_unused(out: Path, **settings: Any) -> lb.BayesianModel:
    network = seeded(WithUnused)()
    return fit(network, lb.Deterministic(), task(clusters()), out=out, **{**SETTINGS, **settings})


def score_share(model: Path, examples: int, folder: Path) -> None:
    """Score a model on this process's share of some held-out examples."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    held_out = TensorDataset(*clusters(examples)[:])
    batches = Batches(held_out, 7, shuffle=False, parts=world, mine=[rank])
    scores = evaluate(lb.load(model, mlp()), batches.epoch())
    (folder / f"{rank}.json").write_text(json.dumps(scores))
    torch.distributed.barrier()
