"""Stepwise EM for the mixture on the plane (Cappé and Moulines 2009), with responsibilities of nearby components only.

A component is left out of a tile if its density at every point is below e^-SLACK times the best density. With the same
lists in each step, a step on all points never decreases Σ log Σ_{k in list} π_k N(θ | m_k, Σ_k), a lower bound of the
log-likelihood.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from leanbayes.methods.weight_sharing.clustering import Sums
from leanbayes.methods.weight_sharing.merging import combine
from leanbayes.methods.weight_sharing.mixture import Factors, Mixture
from leanbayes.methods.weight_sharing.tiles import Block, Bounds, Candidates, Tiles

SLACK = 8.0


def densities(mixture: Mixture) -> Bounds:
    """Return bounds of log π_k + log N(θ | m_k, Σ_k) over a box. D² is convex: maximal at corners, minimal at edges."""
    factors = Factors(*(part.float() for part in mixture.factors()))
    slope_back = (mixture.covariance[:, 0, 1] / mixture.covariance[:, 1, 1]).float()

    def bounds(low: Tensor, high: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        mean = mixture.mean[items]
        (x0, y0), (x1, y1) = (low.double() - mean).float().unbind(1), (high.double() - mean).float().unbind(1)
        first, second, slope, constant = (part[items] for part in factors)

        def squares(dx: Tensor, dy: Tensor) -> Tensor:
            return (dx * first).square() + ((dy - slope * dx) * second).square()

        farthest = torch.stack([squares(x, y) for x in (x0, x1) for y in (y0, y1)]).amax(0)
        # The minimum of D² is at y = slope·x for fixed x, and at x = slope_back·y for fixed y, clamped to the edge.
        edges = [squares(x, torch.clamp(slope * x, y0, y1)) for x in (x0, x1)]
        edges += [squares(torch.clamp(slope_back[items] * y, x0, x1), y) for y in (y0, y1)]
        inside = (x0 <= 0) & (x1 >= 0) & (y0 <= 0) & (y1 >= 0)
        nearest = torch.stack(edges).amin(0).masked_fill(inside, 0)
        return constant - 0.5 * nearest, constant - 0.5 * farthest

    return bounds


def candidates(tiles: Tiles, mixture: Mixture, slack: float = SLACK) -> Candidates:
    """Return the components that matter in each tile."""
    return tiles.search(len(mixture), densities(mixture), slack, all_wanted=False)


def log_joints(tiles: Tiles, found: Candidates, mixture: Mixture) -> Iterator[tuple[Block, Tensor]]:
    """Yield blocks of tiles with log π_k + log N(θ | m_k, Σ_k) of each candidate and point (t, W, P)."""
    factors = mixture.factors()
    for block in found.blocks(tiles.size):
        origin = tiles.origin[block.tiles]
        mean = (mixture.mean[block.items] - origin.double()[:, None]).float()
        first, second, slope, constant = (part[block.items].float()[..., None] for part in factors)
        dx = (tiles.x[block.tiles] - origin[:, :1])[:, None] - mean[..., :1]
        dy = (tiles.y[block.tiles] - origin[:, 1:])[:, None] - mean[..., 1:]
        dy.addcmul_(slope, dx, value=-1).mul_(second).square_()
        dx.mul_(first)
        dy.addcmul_(dx, dx)
        constant = constant.masked_fill(~block.valid[..., None], -torch.inf)
        yield block, torch.add(constant, dy, alpha=-0.5)


def expectation(tiles: Tiles, found: Candidates, mixture: Mixture) -> tuple[Mixture, float]:
    """Take one step: return the components by responsibilities, and the mean log-likelihood before the step."""
    sums, total = Sums(tiles, mixture.mean), mixture.mean.new_zeros(())
    for block, joint in log_joints(tiles, found, mixture):
        top = joint.amax(1, keepdim=True)
        shares = joint.sub_(top).exp_()
        norm = shares.sum(1, keepdim=True)
        total += ((norm.log() + top)[:, 0] * tiles.weight[block.tiles]).sum(dtype=torch.float64)
        sums.add(block, shares.div_(norm))
    return sums.moments(), float(total / tiles.weight.sum(dtype=torch.float64))


def fit(tiles: Tiles, mixture: Mixture, passes: int = 1, batches: int = 4, full_steps: int = 0) -> Mixture:
    """Take `passes` passes over all points in mini-batches: S ← (1-η_t)S + η_t Ŝ with η_t = (t+2)^-0.6.

    A mini-batch has every `batches`-th point of each tile. Statistics are stored as mass, mean and covariance, which
    avoids cancellation. Each pass searches the candidates again. `full_steps` steps on all points follow.
    """
    batches = max(1, min(batches, tiles.size // 8))
    step = 0
    for _ in range(passes):
        found = candidates(tiles, mixture)
        for start in range(batches):
            seen, _ = expectation(tiles.thinned(start, batches), found, mixture)
            rate = (step + 2) ** -0.6 if batches > 1 else 1.0
            mixture = _mixed(mixture, seen, rate)
            step += 1
    for _ in range(full_steps):
        mixture = _mixed(mixture, expectation(tiles, candidates(tiles, mixture), mixture)[0], 1.0)
    return mixture


def _mixed(old: Mixture, seen: Mixture, rate: float) -> Mixture:
    """Average the statistics of two mixtures. If one component has no mass, those of the other remain."""
    kept = (1 - rate) * old.mass / old.mass.sum()
    new = rate * seen.mass / seen.mass.sum()
    mass = (kept + new).clamp_min(1e-300)
    return combine(Mixture(old.mean, old.covariance, kept), Mixture(seen.mean, seen.covariance, new), mass)
