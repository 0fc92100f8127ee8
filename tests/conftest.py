"""What every test starts from."""

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The networks are tiny: threads would cost more than they save, and each worker of pytest-xdist has one core.
torch.set_num_threads(1)

# A first call may load or compile something: a slow example is no failure. The same examples in every run.
settings.register_profile("leanbayes", deadline=None, derandomize=True)
settings.load_profile("leanbayes")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Give every test the same random numbers, whatever ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def imported() -> Iterator[None]:
    """Keep what a training imports out of the garbage collection that ends it: half of the time of a small one."""
    for name in ("torch._dynamo", "torch.utils.tensorboard"):
        importlib.import_module(name)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder of one's own, without a data folder, and with a pipe in place of a terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("LEANBAYES_DATA", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
