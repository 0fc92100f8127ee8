"""Batches of a data set that reads its examples one by one, each with its own random seed."""

import contextlib
import hashlib
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from leanbayes.core.network import tensors_of
from leanbayes.data.base import as_pair
from leanbayes.errors import LeanBayesError

_GRACE_SECONDS = 30.0  # between SIGTERM or SIGHUP and the end of a worker


@contextlib.contextmanager
def own_randomness() -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch on the CPU, NumPy and random; restore their states after the block."""
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
    """Return a hash of a data set's length and of a few of its examples, read with fixed random seeds.

    Args:
        dataset: map-style data set of (input, label) pairs.

    Returns:
        16 hexadecimal digits. Equal data sets have equal hashes.

    Raises:
        LeanBayesError: An example is not an (input, label) pair.

    Example:
        >>> import torch
        >>> from leanbayes.data import ArrayDataset, fingerprint
        >>> x, y = torch.arange(20.0), torch.arange(20)
        >>> fingerprint(ArrayDataset(x, y)) == fingerprint(ArrayDataset(x.clone(), y))
        True
    """
    count = len(dataset)  # type: ignore[arg-type]
    digest = hashlib.sha256(str(count).encode())
    with own_randomness() as seed:
        for index in sorted({number * (count - 1) // 7 for number in range(8)}):
            seed(index)
            for tensor in tensors_of(_collate([as_pair(dataset[index])])):
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class _SeededExamples(Dataset[Any]):
    """A data set indexed by (index, seed): random transforms of the user depend on the seed only."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, places: list[tuple[int, int]]) -> Any:
        """Read a batch; return an error, which the main process then raises without the traceback of a worker."""
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
    """Collate examples into a batch, or pass on an error."""
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
            f"Examples of shapes {one} and {other} cannot be in one batch: resize them to one size ({error})."
        )


def _delay_end(worker: int) -> None:
    """End a worker some time after SIGTERM or SIGHUP, because the main process needs its data to stop cleanly."""
    if hasattr(signal, "setitimer"):  # not on Windows
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                # The alarm ends the process.
                signal.signal(number, lambda *_: signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGHUP])


@contextlib.contextmanager
def _end_blocked() -> Iterator[None]:
    """Start worker processes with SIGTERM and SIGHUP blocked until they have installed their handlers."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stream(
    dataset: Dataset[Any], places: Iterable[list[tuple[int, int]]], workers: int, pin_memory: bool
) -> Iterator[tuple[Any, Any]]:
    """Yield one batch for each list of (index, seed)."""
    loader = DataLoader(
        _SeededExamples(dataset),
        batch_sampler=places,
        num_workers=workers,
        pin_memory=pin_memory,
        collate_fn=_collate,
        worker_init_fn=_delay_end,
        generator=torch.Generator(),  # otherwise each epoch would draw from the global generator
    )
    with _end_blocked():
        batches = iter(loader)
    for batch in batches:
        if isinstance(batch, LeanBayesError):
            raise batch
        yield batch[0], batch[1]
