"""Batches of a data set that reads its examples one by one, each with random numbers of its own."""

import contextlib
import hashlib
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from leanbayes.data.base import as_pair
from leanbayes.errors import LeanBayesError
from leanbayes.network import tensors_of

_PATIENCE = 30.0  # seconds


@contextlib.contextmanager
def own_randomness() -> Iterator[Callable[[int], None]]:
    """Give a function that seeds torch on the CPU, numpy and random; their states are restored after the block."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)

    try:
        yield seed
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def fingerprint(dataset: Dataset[Any]) -> str:
    """Tell data sets apart by their length and a few examples, read with fixed random numbers."""
    count = len(dataset)  # type: ignore[arg-type]
    digest = hashlib.sha256(str(count).encode())
    with own_randomness() as seed:
        for index in sorted({number * (count - 1) // 7 for number in range(8)}):
            seed(index)
            for tensor in tensors_of(_collate([as_pair(dataset[index])])):
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class _SeededExamples(Dataset[Any]):
    """A data set by (index, seed): the user's random transforms depend on the seed alone."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, places: list[tuple[int, int]]) -> Any:
        """Read a batch; an error is returned, to be raised in the main process without the traceback of a worker."""
        examples = []
        with own_randomness() as seed:
            for index, number in places:
                seed(number)
                try:
                    examples.append(as_pair(self.dataset[index]))
                except LeanBayesError as error:
                    return error
        return examples


def _collate(examples: Any) -> Any:
    """Make a batch of examples, or hand on an error."""
    if isinstance(examples, LeanBayesError):
        return examples
    try:
        return default_collate(examples)
    except RuntimeError as error:
        shapes = {tuple(tuple(tensor.shape) for tensor in tensors_of(list(example))) for example in examples}
        if len(shapes) < 2:
            raise
        one, other = sorted(shapes)[:2]
        return LeanBayesError(
            f"Examples of the shapes {one} and {other} do not fit into one batch: bring them to one size ({error})."
        )


def _be_patient(worker: int) -> None:
    """Meet a SIGTERM later: one that is sent to all processes is met by the training, which still needs its data."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, _PATIENCE))  # which then ends it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


@contextlib.contextmanager
def _sigterm_later() -> Iterator[None]:
    """Start processes that meet no SIGTERM before they are patient."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stream(
    dataset: Dataset[Any], places: Iterable[list[tuple[int, int]]], workers: int, pin_memory: bool
) -> Iterator[tuple[Any, Any]]:
    """Yield a batch for each list of (index, seed)."""
    loader = DataLoader(
        _SeededExamples(dataset),
        batch_sampler=places,
        num_workers=workers,
        pin_memory=pin_memory,
        collate_fn=_collate,
        worker_init_fn=_be_patient,
        generator=torch.Generator(),  # else each epoch would take a number from the global one
    )
    with _sigterm_later():
        batches = iter(loader)
    for batch in batches:
        if isinstance(batch, LeanBayesError):
            raise batch
        yield batch[0], batch[1]
