"""Settings and fixtures of all tests."""

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from leanbayes.model import conversion

# The networks are tiny, so threads cost more than they save, and each worker of pytest-xdist has one core.
torch.set_num_threads(1)

# No deadline, because a first call may load or compile something. The examples are the same in every run.
settings.register_profile("leanbayes", deadline=None, derandomize=True)
settings.load_profile("leanbayes")


@pytest.fixture(scope="module", autouse=True)
def _collected() -> None:
    """Exclude existing objects from garbage collection, which takes half the time of a small training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seed the global random state for every test."""
    conversion._SEEDS = itertools.count()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
