"""k-means on the plane: exact Lloyd steps with few distances per point, first on a sample, then on all points."""

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing.mixture import Mixture, regular
from leanbayes.methods.weight_sharing.tiles import Block, Bounds, Tiles, segment_sum

_MARGIN = 1 - 1e-5  # more than the rounding error of a bound in fp32
_LONG = 64  # with more candidates per tile, one large operation is faster than a loop over them


def kmeans(
    tiles: Tiles, count: int, sample_steps: int = 12, full_steps: int = 2, per_center: int = 128
) -> tuple[Tensor, Mixture]:
    """Cluster the points, and return the centers (K, 2) and the moments of their clusters.

    The first steps use a stratified sample of about `per_center` points per center, the last steps use all points.
    Empty clusters are left out.
    """
    if count < 1:
        raise LeanBayesError(f"components={count} must be at least 1.")
    centers = first_centers(tiles, count)
    step = max(1, min(tiles.size, tiles.count // (per_center * count)))
    sample = tiles if step == 1 else tiles.sample(step)
    for number in range(sample_steps):
        clusters = lloyd(sample, centers)
        settling = number >= 2 * sample_steps // 3
        centers = (clusters.mean if settling else relocated(clusters)).to(centers.dtype)
    for _ in range(full_steps):
        clusters = lloyd(tiles, centers)
        occupied = clusters.mass > 0
        centers = clusters.mean.to(centers.dtype)[occupied]
    return centers, clusters[occupied]


def first_centers(tiles: Tiles, count: int) -> Tensor:
    """Choose points as initial centers, with the asymptotically optimal density: the root of the points' (Zador).

    All tiles have the same number of points, so the number of centers in a tile is proportional to √area.
    """
    low, high = tiles.levels[-1]
    side = (high - low).double()
    longer, shorter = side.amax(1), side.amin(1)
    share = (longer * torch.maximum(shorter, 1e-3 * longer)).sqrt()
    share = share + 1e-9 * share.max() if share.max() > 0 else torch.ones_like(share)
    share = share * (tiles.weight.sum(1) > 0)
    # At most one center per 16 points, because tiles in the tails are large.
    for _ in range(8):
        share = torch.minimum(share, share.sum() * tiles.size / (16 * count))
    ends = share.cumsum(0)
    marks = (torch.arange(count, device=share.device, dtype=share.dtype) + 0.5) * (ends[-1] / count)
    tile = torch.searchsorted(ends, marks, right=True).clamp_max(len(share) - 1)
    inside = ((marks - (ends[tile] - share[tile])) / share[tile] * tiles.size).long().clamp(0, tiles.size - 1)
    return torch.stack([tiles.x[tile, inside], tiles.y[tile, inside]], 1)


def relocated(clusters: Mixture) -> Tensor:
    """Return the means as centers, after moving at most 5 % of them to where they reduce Σ d² more.

    Without its center, a cluster's points go to the next center: Σ d² grows by at most mass·(distance of the two)². A
    second center along the longer axis of a cluster saves ¾·mass·λ₁. A center moves if the latter is larger.
    """
    mean, mass = clusters.mean.clone(), clusters.mass
    number = len(mass) // 20
    if not number:
        return mean
    xx, xy, yy = clusters.covariance[:, 0, 0], clusters.covariance[:, 0, 1], clusters.covariance[:, 1, 1]
    longer = 0.5 * (xx + yy) + (0.25 * (xx - yy).square() + xy.square()).sqrt()
    light = (mass * (xx + yy)).argsort(stable=True)[: 3 * number]
    parts = [_next_neighbor(mean, part) for part in light.split(max(1, (1 << 21) // len(mass)))]
    apart, following = (torch.cat(both) for both in zip(*parts, strict=True))
    cost, by = (mass[light] * apart).sort(stable=True)
    light, cost, following = light[by[:number]], cost[:number], following[by[:number]]
    # If two centers would take each other's points, one of them stays.
    rank = torch.full_like(mass, torch.inf).index_copy(0, light, torch.arange(number).to(mass))
    cost = cost.masked_fill(rank[following] < rank[light], torch.inf)
    gain, heavy = (0.75 * mass * longer).index_fill(0, light, -1.0).sort(descending=True, stable=True)
    moves = gain[:number] > cost
    light, heavy = light[moves], heavy[:number][moves]
    angle = 0.5 * torch.atan2(2 * xy[heavy], xx[heavy] - yy[heavy])
    step = longer[heavy].sqrt()[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    mean[light] = mean[heavy] + step
    mean[heavy] -= step
    return mean


def _next_neighbor(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distance of some points to the nearest other point, and the index of that point."""
    squares = (points[which, None] - points).square().sum(2).scatter_(1, which[:, None], torch.inf)
    return squares.amin(1), squares.argmin(1)


def nearness(centers: Tensor) -> Bounds:
    """Return bounds of the negative squared distance between the points of a box and a center."""

    def bounds(low: Tensor, high: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        center = centers[items]
        nearest = torch.maximum(low - center, center - high).clamp_min(0).square().sum(1)
        farthest = torch.maximum((center - low).abs(), (center - high).abs()).square().sum(1)
        return nearest * -_MARGIN, -farthest

    return bounds


def nearest(tiles: Tiles, block: Block, centers: Tensor) -> Tensor:
    """Return the nearest candidate of each point of a block, the first one among equals."""
    x, y = tiles.x[block.tiles], tiles.y[block.tiles]
    near = torch.where(block.valid[..., None], centers[block.items], torch.inf)
    if block.items.shape[1] > _LONG:
        squares = (x[:, None] - near[..., :1]).square_().addcmul_(*2 * [y[:, None] - near[..., 1:]])
        return squares.argmin(1).int()
    best, place = torch.full_like(x, torch.inf), torch.zeros_like(x, dtype=torch.int32)
    for number in range(block.items.shape[1]):
        squares = (x - near[:, number, :1]).square_().addcmul_(*2 * [y - near[:, number, 1:]])
        place.masked_fill_(squares < best, number)
        best = torch.minimum(best, squares)
    return place


def assign(tiles: Tiles, centers: Tensor) -> Tensor:
    """Return the nearest center of each point, in the order of the points. The result is exact."""
    labels = torch.empty_like(tiles.order)
    for block in tiles.search(len(centers), nearness(centers)).blocks(tiles.size):
        labels[block.tiles] = block.items.gather(1, nearest(tiles, block, centers).long())
    return tiles.unsorted(labels)


def lloyd(tiles: Tiles, centers: Tensor) -> Mixture:
    """Take one step: return mass, mean and covariance of the points nearest to each center. Empty clusters stay."""
    found = tiles.search(len(centers), nearness(centers))
    sums = Sums(tiles, centers.double())
    for block in found.blocks(tiles.size):
        place = nearest(tiles, block, centers)
        number = torch.arange(block.items.shape[1], device=place.device, dtype=place.dtype)
        sums.add(block, (place[:, None] == number[:, None]).to(torch.float32))
    return sums.moments()


class Sums:
    """Sums over the points of each component: of 1, d and ddᵀ, with d the difference to a nearby mean."""

    def __init__(self, tiles: Tiles, means: Tensor) -> None:
        self.tiles, self.means = tiles, means
        self.total = means.new_zeros(len(means), 6)

    def add(self, block: Block, shares: Tensor) -> None:
        """Add the points of a block (t, P), with their fractions (t, W, P) of each candidate."""
        tiles, rows = self.tiles, block.tiles
        origin = tiles.origin[rows]
        x, y, weight = tiles.x[rows] - origin[:, :1], tiles.y[rows] - origin[:, 1:], tiles.weight[rows]
        terms = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], 2) * weight[..., None]
        with torch.autocast(shares.device.type, enabled=False):
            if shares.is_cuda:  # single precision can mean TF32 there, which has too few digits
                shares, terms = shares.double(), terms.double()
            local = (shares @ terms).double()[block.valid]
        one, sx, sy, sxx, sxy, syy = local.unbind(1)
        items = block.items[block.valid]
        # Convert sums around the tile's origin to sums around the component's mean.
        shift = origin.double()[:, None].expand(*block.items.shape, 2)[block.valid] - self.means[items]
        dx, dy = shift.unbind(1)
        around = [one, sx + one * dx, sy + one * dy, sxx + dx * (2 * sx + one * dx)]
        around += [sxy + dx * sy + dy * (sx + one * dx), syy + dy * (2 * sy + one * dy)]
        self.total += segment_sum(torch.stack(around, 1), items, len(self.means))

    def moments(self) -> Mixture:
        """Return mass, mean and regularized covariance."""
        mass = self.total[:, 0]
        dx, dy, xx, xy, yy = (self.total[:, 1:] / mass.clamp_min(1e-300)[:, None]).unbind(1)
        covariance = torch.stack([xx - dx * dx, xy - dx * dy, xy - dx * dy, yy - dy * dy], 1).view(-1, 2, 2)
        low, high = self.tiles.levels[0]
        floor = 1e-12 * float((high - low).double().square().sum())
        mean = self.means + torch.stack([dx, dy], 1)
        return Mixture(mean, regular(covariance, max(floor, 1e-300)), mass)
