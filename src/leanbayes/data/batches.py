"""Batches of a data set on a device, in an order that can be repeated, resumed and shared between processes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.core.arguments import checked
from leanbayes.core.names import shown
from leanbayes.core.network import map_tensors
from leanbayes.core.noise import mix
from leanbayes.data.base import check_map_style, in_memory
from leanbayes.data.streaming import stream
from leanbayes.data.transforms import Augment, Crops, Normalize
from leanbayes.data.trivial import augmented, check_images, moved
from leanbayes.errors import LeanBayesError

RESIDENT_BYTES = 4 * 2**30  # larger data sets, or those above a quarter of free GPU memory, are streamed


class Batches:
    """Batches of a data set on a device; the order and the augmentation depend on the seed and the epoch only.

    A batch of `batch_size` examples is one optimizer step. It is split into `parts` micro-batches, of which this
    process gets those with the numbers in `mine`. Data sets that are tensors in memory are copied to the device once;
    others are read example by example. A scalar float label becomes a vector with one target.

    Args:
        dataset: map-style data set of (input, label) pairs.
        batch_size: examples per optimizer step, over all processes.
        device: device of the batches.
        seed: seed of the order, of the augmentation and of random transforms inside the data set.
        shuffle: use a random order.
        augment: augmentation of images.
        normalize: normalization of images.
        parts: number of micro-batches per step.
        mine: numbers of the micro-batches of this process. None means all.
        workers: processes that read a data set which is not in memory.
        channels_last: return images in the memory format `torch.channels_last`.
        drop_last: leave out the last, smaller batch. None means that it is left out if `shuffle` is set.
        ignore_index: label of the padding of label maps.
        dtype: type of float inputs and labels. None leaves them unchanged.

    Raises:
        LeanBayesError: The data set cannot be indexed or is empty, a setting is invalid, or inputs are not images for
            TrivialAugment.

    Example:
        >>> import torch
        >>> from leanbayes.data import ArrayDataset, Batches
        >>> batches = Batches(ArrayDataset(torch.randn(20, 6), torch.arange(20) % 3), 8)
        >>> batches
        Batches(20 examples, 2 steps of 8, shuffle=True, device='cpu')
        >>> [tuple(x.shape) for x, y in batches.epoch(0)]
        [(8, 6), (8, 6)]
    """

    @checked()
    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        normalize: Normalize | None = None,
        parts: int = 1,
        mine: Sequence[int] | None = None,
        workers: int = 0,
        channels_last: bool = False,
        drop_last: bool | None = None,
        ignore_index: int = -100,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.dataset, self.device, self.seed, self.shuffle = dataset, _device(device), seed, shuffle
        self.augment, self.normalize, self.workers, self.ignore_index = augment, normalize, workers, ignore_index
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.examples = check_map_style(dataset)
        self.drop_last = shuffle if drop_last is None else drop_last
        self.parts, self.mine = parts, list(range(parts) if mine is None else mine)
        if parts < 1 or not self.mine or self.mine != sorted(set(self.mine) & set(range(parts))):
            raise LeanBayesError(f"mine={self.mine} must be increasing numbers from 0 to {parts - 1}.")
        self.batch_size = self._whole_batch(batch_size) if self.drop_last else batch_size
        if self.batch_size < 1:
            raise LeanBayesError(f"batch_size={batch_size} must be 1 or more.")
        self._resident = self._to_device()

    def _whole_batch(self, batch_size: int) -> int:
        """Return the batch size, at most the size of the data set; raise an error if it does not split equally."""
        if self.examples < self.parts:
            raise LeanBayesError(
                f"{self.examples} examples cannot be split into {self.parts} micro-batches: use fewer processes or "
                "accumulation steps."
            )
        if batch_size % self.parts:
            raise LeanBayesError(
                f"batch_size={batch_size} cannot be split into {self.parts} equal micro-batches: use a multiple."
            )
        return batch_size if batch_size <= self.examples else self.examples // self.parts * self.parts

    def __repr__(self) -> str:
        parts = f", parts={self.parts}, mine={self.mine}" if self.parts > 1 else ""
        settings = f"shuffle={self.shuffle}, device={str(self.device)!r}{parts}"
        return f"Batches({self.examples} examples, {len(self)} steps of {self.batch_size}, {settings})"

    def __len__(self) -> int:
        """Return the number of optimizer steps of an epoch."""
        return self.examples // self.batch_size if self.drop_last else -(-self.examples // self.batch_size)

    def epoch(self, number: int = 0, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over the micro-batches of this process in one epoch.

        Args:
            number: number of the epoch. It determines the order and the augmentation.
            start: optimizer step to start from.

        Returns:
            Iterator of (inputs, labels) on the device.

        Raises:
            LeanBayesError: `start` is not a step of the epoch.
        """
        if not 0 <= start <= len(self):
            raise LeanBayesError(f"start={start} must lie between 0 and the {len(self)} steps of an epoch.")
        return self._run(number, list(self._pieces(start)))

    def _pieces(self, start: int) -> Iterator[slice]:
        """Yield the positions in the epoch of each micro-batch that is not empty."""
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
        crops = self.augment.draw(self.examples, generator).to(self.device) if self.augment else None
        if self._resident:
            rows = order.to(self.device)
            for piece in pieces:
                yield self._batch(*self._resident, rows[piece], crops, piece)
            return
        indices = order.tolist()
        places = ([(i, mix(self.seed, number, i)) for i in indices[piece]] for piece in pieces)
        batches = stream(self.dataset, places, self.workers, self.device.type == "cuda")
        for piece, batch in zip(pieces, batches, strict=True):
            self._check_images(batch[0])  # before the copy, because it would wait for the device
            x, y = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
            yield self._batch(*self._padded(x, y), None, crops, piece)

    def _batch(self, x: Any, y: Tensor, rows: Tensor | None, crops: Crops | None, piece: slice) -> tuple[Any, Tensor]:
        """Return some rows (default: all) of padded examples, augmented and normalized."""
        images = _are_images(x)
        if images and self.augment and crops:
            part = crops.part(piece)
            x = self.augment.apply(x, rows, part)
            y = self.augment.apply(y, rows, part) if y.dim() > 2 else y if rows is None else y[rows]
            if part.operations is not None:
                x = augmented(x, part.operations)
                y = moved(y, part.operations, self.ignore_index) if y.dim() > 2 else y
        elif rows is not None:
            x, y = x[rows], y[rows]
        if images:
            x = x.contiguous(memory_format=self.memory_format)
            x = self._as_dtype(self.normalize(x)) if self.normalize else x
        return x, y

    def _check_images(self, x: Any) -> None:
        if self.augment and self.augment.trivial:
            check_images(x)

    def _as_dtype(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def _padded(self, x: Any, y: Any) -> tuple[Any, Tensor]:
        """Pad images and their label maps for random crops, and convert integer labels to int64."""
        if not isinstance(y, Tensor):
            raise LeanBayesError(f"Labels must be numbers or tensors, not {type(y).__name__}: convert them.")
        x, y = map_tensors(self._as_dtype, x), self._as_dtype(y)
        if not y.is_floating_point():
            y = y.long()
        elif y.dim() == 1:  # one target per example, with the shape of a network's only output
            y = y[:, None]
        if not (self.augment and _are_images(x)):
            return x, y
        if y.dim() > 2 and (self.augment.crop or self.augment.trivial) and y.is_floating_point():
            raise LeanBayesError(
                "Float label maps have no value for the padding of a crop or of TrivialAugment: use Augment(crop=0)."
            )
        if y.dim() > 2:
            if y.shape[-2:] != x.shape[-2:]:
                raise LeanBayesError(
                    f"Label maps of shape {tuple(y.shape[-2:])} cannot be cropped and flipped with images of shape "
                    f"{tuple(x.shape[-2:])}: resize them to one size, or use augment=None."
                )
            y = self.augment.pad(y, self.ignore_index)
        return self.augment.pad(x), y

    def _to_device(self) -> tuple[Tensor, Tensor] | None:
        """Return all examples on the device, padded for random crops, or None if they must be streamed."""
        tensors = in_memory(self.dataset)
        limit = RESIDENT_BYTES
        if self.device.type == "cuda":
            limit = min(limit, torch.cuda.mem_get_info(self.device)[0] // 4)
        if tensors is None or tensors.bytes() > limit:
            return None
        inputs = tensors.inputs()
        self._check_images(inputs)
        x, y = self._padded(inputs.to(self.device), tensors.labels().to(self.device))
        if _are_images(x):
            x = x.contiguous(memory_format=self.memory_format)
        return x, y


def _are_images(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise LeanBayesError(f"device={shown(device)} is unknown: use 'cpu' or 'cuda'.") from None
