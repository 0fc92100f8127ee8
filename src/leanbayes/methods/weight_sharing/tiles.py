"""Points of the plane in tiles of equal size, so that a neighbor search runs once per tile instead of per point.

A tree sorts the points: each box is split along its longer side into 8 boxes with equal numbers of points, and the last
boxes are the tiles. A search descends the tree with a list of candidates per box, and drops those that cannot be the
best for any point of the box. The cost is that of a few candidates per point, and the result is exact.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FAN = 8
_PER_TILE = 256  # points per tile; approximate, since all tiles are at the same level of the tree
_PAIRS, _PER_BOX = 1 << 22, 64  # limits of candidates per level and per box, of which the larger one applies

Bounds = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Block:
    """Tiles with candidate lists of equal length. `items` is padding if `valid` is false."""

    tiles: Tensor
    items: Tensor
    valid: Tensor


class Tiles:
    """Points (n, 2) with weights, sorted into tiles.

    Attributes:
        x, y: Coordinates, with one row per tile. Rows are padded with copies of points that have weight 0.
        weight: Weight of each point.
        origin: A point inside each tile; coordinates relative to it have smaller rounding errors.
        order: Index of each point among the given points.
        real: False for padding.
        levels: Corners (low, high) of the boxes at each level of the tree, from the root to the tiles.
    """

    def __init__(self, points: Tensor, weights: Tensor | None = None) -> None:
        count, device = len(points), points.device
        depth = max(0, round(math.log(max(count, 1) / _PER_TILE, FAN)))
        rows = FAN**depth
        filled = rows * math.ceil(count / rows)
        order = torch.arange(filled, device=device)
        order[count:] = (order[count:] - count) * count // max(filled - count, 1)
        weight = torch.ones(count, device=device) if weights is None else weights.to(torch.float32)
        weight = torch.cat([weight, weight.new_zeros(filled - count)])
        place = order.clone()
        x, y = (points[:, axis].to(torch.float32)[place] for axis in (0, 1))
        place = torch.arange(filled, device=device)
        self.levels: list[tuple[Tensor, Tensor]] = []
        for level in range(depth + 1):
            shape = (FAN**level, -1)
            x, y, place = x.view(shape), y.view(shape), place.view(shape)
            low = torch.stack([x.amin(1), y.amin(1)], 1)
            high = torch.stack([x.amax(1), y.amax(1)], 1)
            self.levels.append((low, high))
            if level < depth:
                side = high - low
                key = torch.where((side[:, :1] >= side[:, 1:]), x, y)
                by = key.argsort(dim=1, stable=True)
                x, y, place = x.gather(1, by), y.gather(1, by), place.gather(1, by)
        self.count, self.x, self.y = count, x, y
        self.order, self.weight = order[place], weight[place]
        self.real = place < count
        low, high = self.levels[-1]
        self.origin = low + 0.5 * (high - low)

    @property
    def size(self) -> int:
        """The number of points per tile."""
        return self.x.shape[1]

    def thinned(self, start: int, step: int) -> "Tiles":
        """Keep every `step`-th point of each tile, a stratified sample. The boxes stay the same."""
        part = Tiles.__new__(Tiles)
        part.__dict__.update(self.__dict__)
        for name in ("x", "y", "order", "weight", "real"):
            setattr(part, name, getattr(self, name)[:, start::step].contiguous())
        return part

    def sample(self, step: int) -> "Tiles":
        """Sort every `step`-th point into new tiles of the usual size."""
        part = self.thinned(step // 2, step)
        return Tiles(torch.stack([part.x.flatten(), part.y.flatten()], 1), part.weight.flatten())

    def unsorted(self, values: Tensor) -> Tensor:
        """Reorder values, one per point, from tiles to the order of the given points."""
        real = self.real.flatten()
        out = values.new_empty((self.count, *values.shape[2:]))
        out[self.order.flatten()[real]] = values.flatten(0, 1)[real]
        return out

    def search(self, count: int, bounds: Bounds, slack: float = 0.0, all_wanted: bool = True) -> "Candidates":
        """Return the candidates of each tile among `count` items.

        Args:
            count: The number of items.
            bounds: bounds(low, high, items) returns an upper and a lower bound of each item's score in each box.
            slack: An item stays if its upper bound is at most this much below the highest lower bound.
            all_wanted: False to keep only the best candidates if all would take too much memory.
        """
        device = self.x.device
        item = torch.arange(count, device=device)
        box = torch.zeros_like(item)
        for level, (low, high) in enumerate(self.levels):
            if level:
                child = torch.arange(FAN, device=device)
                box, item = (box[:, None] * FAN + child).flatten(), item[:, None].expand(-1, FAN).flatten()
            upper, lower = bounds(low[box], high[box], item)
            best = lower.new_full((len(low),), -torch.inf).scatter_reduce_(0, box, lower, "amax")
            keep = (upper >= best[box] - slack).nonzero()[:, 0]
            box, item, upper = box[keep], item[keep], upper[keep]
            most = max(_PER_BOX, _PAIRS // len(low))
            if not all_wanted and len(box) > most * len(low):
                keep = _best(box, upper, most)
                box, item = box[keep], item[keep]
        by = box.argsort(stable=True)
        return Candidates(item[by], torch.bincount(box, minlength=len(low)))


def _best(box: Tensor, upper: Tensor, most: int) -> Tensor:
    """Return at most `most` pairs per box, those with the highest bounds, in the original order."""
    by = upper.argsort(descending=True, stable=True)
    by = by[box[by].argsort(stable=True)]
    sizes = torch.bincount(box)
    rank = torch.arange(len(by), device=by.device) - (sizes.cumsum(0) - sizes)[box[by]]
    return by[rank < most].sort().values


class Candidates:
    """One list of items per tile, in increasing order."""

    def __init__(self, items: Tensor, sizes: Tensor) -> None:
        self.items, self.sizes, self.starts = items, sizes, sizes.cumsum(0) - sizes

    def blocks(self, points_per_tile: int) -> Iterator[Block]:
        """Yield all tiles in blocks with lists of similar length, small enough for the memory of all candidates."""
        device = self.items.device
        limit = 1 << (19 if device.type == "cpu" else 25)  # values per block: fits into a cache, or keeps a GPU busy
        widths = torch.tensor(_widths(int(self.sizes.max())), device=device)
        which = torch.searchsorted(widths, self.sizes)
        tiles = which.argsort(stable=True)
        numbers = torch.bincount(which, minlength=len(widths)).tolist()
        for width, group in zip(widths.tolist(), tiles.split(numbers), strict=True):
            place = torch.arange(width, device=device)
            for part in group.split(max(1, limit // (width * points_per_tile))):
                valid = place < self.sizes[part, None]
                yield Block(part, self.items[torch.where(valid, self.starts[part, None] + place, 0)], valid)


def _widths(longest: int) -> list[int]:
    """Return the lengths that lists are padded to: all up to 8, then four per power of 2."""
    widths = list(range(1, 9))
    while widths[-1] < longest:
        widths.append(widths[-1] + (1 << (widths[-1].bit_length() - 3)))
    return widths


def segment_sum(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Sum rows of values by label, in a fixed order."""
    out = values.new_zeros((count, *values.shape[1:]))
    if values.is_cuda:  # the order of index_add_ is not fixed there; this one sorts
        return out.index_put_((labels,), values, accumulate=True)
    return out.index_add_(0, labels, values)
