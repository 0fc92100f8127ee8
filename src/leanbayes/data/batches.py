"""Batches of a data set on a device, in an order that can be repeated, resumed and shared among processes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.data.base import check_map_style, in_memory
from leanbayes.data.streaming import stream
from leanbayes.data.transforms import Augment, Draws, Normalise
from leanbayes.errors import LeanBayesError
from leanbayes.network import map_tensors
from leanbayes.noise import mix

RESIDENT_BYTES = 4 * 2**30  # a data set up to this size, and up to a quarter of free GPU memory, lies on the device


class Batches:
    """Batches of a data set on a device; the order and the augmentation are functions of (seed, epoch) alone.

    A batch of `batch_size` examples is one optimiser step, cut into `parts` micro-batches, of which this process gets
    those numbered in `mine`. Tensors in memory are put on the device once; other data sets are read by `workers`.
    Floats become `dtype`, where it is given. A float label of one number is a vector of one target.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        normalise: Normalise | None = None,
        parts: int = 1,
        mine: Sequence[int] | None = None,
        workers: int = 0,
        channels_last: bool = False,
        drop_last: bool | None = None,
        ignore_index: int = -100,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.dataset, self.device, self.seed, self.shuffle = dataset, torch.device(device), seed, shuffle
        self.augment, self.normalise, self.workers, self.ignore_index = augment, normalise, workers, ignore_index
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.examples = check_map_style(dataset)
        self.drop_last = shuffle if drop_last is None else drop_last
        self.parts, self.mine = parts, list(range(parts) if mine is None else mine)
        if parts < 1 or not self.mine or self.mine != sorted(set(self.mine) & set(range(parts))):
            raise LeanBayesError(f"mine={self.mine} must be increasing numbers from 0 to {parts - 1}, below parts.")
        self.batch_size = self._whole_batch(batch_size) if self.drop_last else batch_size
        if self.batch_size < 1:
            raise LeanBayesError(f"batch_size={batch_size} must be 1 or more.")
        self._resident = self._to_device()

    def _whole_batch(self, batch_size: int) -> int:
        """Shrink the batch to a small data set, and check that it can be cut into equal parts."""
        if self.examples < self.parts:
            raise LeanBayesError(
                f"{self.examples} examples cannot be cut into {self.parts} micro-batches: use fewer processes or "
                "accumulation steps."
            )
        if batch_size % self.parts:
            raise LeanBayesError(
                f"batch_size={batch_size} cannot be cut into {self.parts} equal micro-batches: choose a multiple."
            )
        return batch_size if batch_size <= self.examples else self.examples // self.parts * self.parts

    def __len__(self) -> int:
        """Count the optimiser steps of an epoch."""
        return self.examples // self.batch_size if self.drop_last else -(-self.examples // self.batch_size)

    def epoch(self, number: int = 0, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """Yield the micro-batches of this process from step `start` on, in order."""
        if not 0 <= start <= len(self):
            raise LeanBayesError(f"start={start} must lie between 0 and the {len(self)} steps of an epoch.")
        return self._run(number, list(self._pieces(start)))

    def _pieces(self, start: int) -> Iterator[slice]:
        """Positions in the epoch of each micro-batch that is not empty."""
        for step in range(start, len(self)):
            first = step * self.batch_size
            size = min(self.batch_size, self.examples - first)
            for part in self.mine:
                piece = slice(first + part * size // self.parts, first + (part + 1) * size // self.parts)
                if piece.start < piece.stop:
                    yield piece

    def _run(self, number: int, pieces: list[slice]) -> Iterator[tuple[Any, Tensor]]:
        generator = torch.Generator().manual_seed(mix(self.seed, number))
        order = torch.arange(self.examples, device="cpu")
        if self.shuffle:
            order = torch.randperm(self.examples, device="cpu", generator=generator)
        draws = self.augment.draw(self.examples, generator).to(self.device) if self.augment else None
        if self._resident:
            rows = order.to(self.device)
            for piece in pieces:
                yield self._batch(*self._resident, rows[piece], draws, piece)
            return
        indices = order.tolist()
        places = ([(i, mix(self.seed, number, i)) for i in indices[piece]] for piece in pieces)
        batches = stream(self.dataset, places, self.workers, self.device.type == "cuda")
        for piece, batch in zip(pieces, batches, strict=True):
            x, y = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
            yield self._batch(*self._padded(x, y), None, draws, piece)

    def _batch(self, x: Any, y: Tensor, rows: Tensor | None, draws: Draws | None, piece: slice) -> tuple[Any, Tensor]:
        """Take rows (default: all) of padded examples, augment and normalise them."""
        images = _are_images(x)
        if images and self.augment and draws:
            own = draws.part(piece)
            x = self.augment.apply(x, rows, own)
            y = self.augment.apply(y, rows, own) if y.dim() > 2 else y if rows is None else y[rows]
        elif rows is not None:
            x, y = x[rows], y[rows]
        if images:
            x = x.contiguous(memory_format=self.memory_format)
            x = self._as_dtype(self.normalise(x)) if self.normalise else x
        return x, y

    def _as_dtype(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def _padded(self, x: Any, y: Any) -> tuple[Any, Tensor]:
        """Pad images for random crops, and maps of labels with them, whose integers become int64."""
        if not isinstance(y, Tensor):
            raise LeanBayesError(f"Labels must be numbers or tensors, but are {type(y).__name__}: convert them.")
        x, y = map_tensors(self._as_dtype, x), self._as_dtype(y)
        if not y.is_floating_point():
            y = y.long()
        elif y.dim() == 1:  # one target an example, as a network with one output gives it
            y = y[:, None]
        if not (self.augment and _are_images(x)):
            return x, y
        if y.dim() > 2 and self.augment.crop and y.is_floating_point():
            raise LeanBayesError("A map of floats has no label for the pixels that a crop adds: use Augment(crop=0).")
        if y.dim() > 2:
            if y.shape[-2:] != x.shape[-2:]:
                raise LeanBayesError(
                    f"Label maps of shape {tuple(y.shape[-2:])} cannot be cropped and mirrored with images of shape "
                    f"{tuple(x.shape[-2:])}: bring them to one size, or set augment to None."
                )
            y = self.augment.pad(y, self.ignore_index)
        return self.augment.pad(x), y

    def _to_device(self) -> tuple[Tensor, Tensor] | None:
        """Put all examples on the device, padded for random crops, if they are tensors in memory and not too many."""
        tensors = in_memory(self.dataset)
        limit = RESIDENT_BYTES
        if self.device.type == "cuda":
            limit = min(limit, torch.cuda.mem_get_info(self.device)[0] // 4)
        if tensors is None or tensors.bytes() > limit:
            return None
        x, y = self._padded(tensors.inputs().to(self.device), tensors.labels().to(self.device))
        if _are_images(x):
            x = x.contiguous(memory_format=self.memory_format)
        return x, y


def _are_images(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4
