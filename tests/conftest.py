"""What every test starts from."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The networks are tiny: threads would cost more than they save, and each worker of pytest-xdist has one core.
torch.set_num_threads(1)

# A first call may load or compile something: a slow example is no failure. The same examples in every run.
settings.register_profile("leanbayes", deadline=None, derandomize=True)
settings.load_profile("leanbayes")


@pytest.fixture(scope="module", autouse=True)
def _collected() -> None:
    """Keep what was there before out of garbage collections: half of the time of a small training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Give every test the same random numbers, whatever ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
