"""A result that is computed again only if the tensors that it depends on have changed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from leanbayes.core import noise

T = TypeVar("T")
Check = Callable[[], Tensor]
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Cached(Generic[T]):
    """The last result of one function of some tensors. Copies of it, also by pickle, are empty.

    The tensors are compared by where they are, by autograd's counter of changes, and by two sums over their bits and
    values: writes through `tensor.data`, NumPy or a CUDA graph do not count as changes. Only such a write that moves
    elements without changing any is not seen.

    To read the sums means to wait for a GPU. Inside `trusting` a result is returned before that.
    """

    def __init__(self) -> None:
        self._found: tuple[Any, Tensor | None, T] | None = None  # with the key and the sums
        self._unread: list[Check] | None = None  # inside `trusting`: whether the sums are the same

    def get(self, key: Any, tensors: Iterable[Tensor], compute: Callable[[], T]) -> T:
        """Return `compute()`, or its last result if neither `key` nor the tensors have changed since then."""
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if not _can_be_compared(tensors):
            return compute()
        current = (key, *_places(tensors))
        if self._found is not None and self._found[0] == current and self._are_same(self._found[1], tensors):
            return self._found[2]
        self._found = None  # free the memory first
        self._found = (current, _sums(tensors), compute())
        return self._found[2]

    def _are_same(self, before: Tensor | None, tensors: list[Tensor]) -> bool:
        if before is None:  # there are no tensors
            return True

        def same() -> Tensor:
            return torch.eq(before, cast(Tensor, _sums(tensors))).all()

        if self._unread is None:
            return bool(same())
        self._unread.append(same)
        return True

    @contextlib.contextmanager
    def trusting(self) -> Iterator[list[Check]]:
        """Compare the tensors inside the block by what Python knows about them, and leave their sums for later.

        Yields:
            A list that gets, for each result that is returned again, a function that returns whether the sums are the
            same. If they are not, the result was outdated: call `clear`, and use it again. Call the functions when a
            GPU has work to do, so that it does not wait for theirs.
        """
        before, self._unread = self._unread, []
        try:
            yield self._unread
        finally:
            self._unread = before

    def clear(self) -> None:
        """Drop the result."""
        self._found = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cached[T]":
        return Cached()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, ()


def _can_be_compared(tensors: list[Tensor]) -> bool:
    """Whether the tensors have values that Python can read now, and no gradient goes through the result."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or noise.in_transform():
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type in ("cpu", "cuda") for t in tensors)


def _places(tensors: list[Tensor]) -> tuple[Any, ...]:
    versions = [None if t.is_inference() else t._version for t in tensors]
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return tuple(zip(versions, places, strict=True))


def _sums(tensors: list[Tensor]) -> Tensor | None:
    bits = [_sum_of_bits(t.detach()).long() for t in tensors]  # it wraps around, so for equal elements it may be 0
    sums = [t.detach().sum().double().view(torch.int64) for t in tensors]  # it rounds, so a small change may be lost
    return torch.stack([one.to(tensors[0].device) for one in (*bits, *sums)]) if tensors else None


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, whose bits are taken for integers. It changes if any single bit does."""
    whole = _WHOLE[tensor.dtype.itemsize]
    return tensor.view(whole).sum(dtype=torch.int64 if whole is torch.int64 else torch.int32)
