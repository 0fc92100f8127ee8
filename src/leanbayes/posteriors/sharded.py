"""A diagonal Gaussian posterior whose parameters are sharded: each process holds, samples and trains its own part.

The layout is cut into units, which are runs of parameters of one block. The vectors of a unit (μ and ρ, and positions
if only some weights are Bayesian) are DTensors, cut into equal parts over a device mesh. A process samples its part
with noise by position, so all processes together have the sample that one process would have. A unit then gathers the
sampled values, in the compute dtype, and the backward pass reduces and scatters their gradient: what is communicated is
that of a plain network (for sparse posteriors only the active weights and their positions).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.layout import Layout
from leanbayes.core.parts import local_part, whole
from leanbayes.core.sharding import ShardGroup, total
from leanbayes.errors import UnsupportedOperation
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.posteriors.mean_field import MeanFieldPosterior
from leanbayes.posteriors.partial import PartialPosterior
from leanbayes.posteriors.sharded_unit import Unit, others
from leanbayes.posteriors.subspace.subspace import SubspacePosterior
from leanbayes.priors import BoundPrior


class _Stored(NamedTuple):
    """What a posterior stores, in the terms of a unit."""

    prior: BoundPrior
    mean: nn.Parameter
    rho: nn.Parameter
    entries: Tensor  # the means of the Gaussian weights
    active: Tensor | None = None
    dense: Tensor | None = None  # the means of all weights, if some are deterministic


def _stored(posterior: Posterior) -> _Stored:
    if type(posterior) is MeanFieldPosterior:
        return _Stored(posterior.prior, posterior.mu, posterior.rho, posterior.mu)
    if type(posterior) is SubspacePosterior:
        return _Stored(posterior.prior, posterior.mu, posterior.rho, posterior.mu, posterior.index)
    if type(posterior) is PartialPosterior and not posterior.kl_is_mean:
        mu, index = posterior.mu, posterior.index
        if not posterior.is_chosen:
            raise UnsupportedOperation(
                "The Bayesian weights are not chosen yet: pass lb.bayesianize(..., data=batches) before lb.fully_shard."
            )
        return _Stored(posterior.prior, mu, posterior.rho, mu[index], index, mu)
    raise UnsupportedOperation(
        f"lb.fully_shard supports lb.MeanField, lb.SSVI and lb.PBN (with kl='sum'), but not this "
        f"{type(posterior).__name__}: use DistributedDataParallel."
    )


def _between(index: Tensor | None, start: int, stop: int) -> tuple[int, Tensor | None]:
    """Return how many of the positions lie in a range, and these relative to its start; None means all positions."""
    if index is None:
        return stop - start, None
    inside = index[(index >= start) & (index < stop)] - start
    return len(inside), inside


class ShardedPosterior(Posterior):
    """Independent Gaussian weights in units that are sharded over the processes of a mesh.

    Args:
        posterior: The posterior to shard, the same in all processes.
        runs: The first and last slot (not included) of each unit, which together are all slots.
        dtypes: The dtype of each slot.
        group: The processes.
    """

    rules = ("sample", "flipout", "mean")

    def __init__(
        self, posterior: Posterior, runs: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype], group: ShardGroup
    ) -> None:
        layout = posterior.layout
        super().__init__(layout)
        self.group = group
        stored = _stored(posterior)
        self.prior = stored.prior
        terms = self.prior.normal_terms(stored.active)
        if terms is None:
            raise UnsupportedOperation("lb.fully_shard needs a Gaussian prior: use lb.Normal().")
        random = posterior.random_slots()
        self.units = nn.ModuleList()
        first = start = 0  # Gaussian weights and all weights before those of the unit
        for begin, end in runs:
            pairs = zip(layout.slots[begin:end], dtypes[begin:end], strict=True)
            part = Layout([replace(slot, dtype=dtype) for slot, dtype in pairs])
            count, index = _between(stored.active, start, start + part.numel)
            here = slice(first, first + count)
            rest = None
            if stored.dense is not None and index is not None:
                rest = group.parameter(stored.dense[start : start + part.numel][others(index, part.numel)], stored.mean)
            unit = Unit(
                part,
                len(self.units),
                first,
                group,
                group.parameter(stored.entries[here], stored.mean),
                group.parameter(stored.rho[here], stored.rho),
                index,
                rest,
                gaussian.NormalTerms(
                    None if terms.loc is None else terms.loc[here],
                    terms.scale[here] if isinstance(terms.scale, Tensor) else terms.scale,
                ),
                random[begin:end],
            )
            self.units.append(unit)
            first, start = first + count, start + part.numel
        for name in ("loc", "scales"):  # of each weight: the units have them now
            if getattr(self.prior, name, None) is not None:
                setattr(self.prior, name, None)

    def mean(self) -> Tensor:
        """Return μ of all weights, gathered from all processes."""
        return torch.cat([unit.mean() for unit in self._units()])

    def variance(self) -> Tensor:
        """Return σ² of all weights, gathered from all processes."""
        return torch.cat([unit.variance() for unit in self._units()])

    def sample(self, key: Tensor) -> Tensor:
        """Return one sample of all weights, gathered from all processes."""
        return torch.cat([unit.sample(key) for unit in self._units()])

    def mean_std(self) -> Tensor:
        """Return the mean σ of the Gaussian weights of all processes."""
        return total(self.stored()[1].sum(), self.group) / max(self.random_weights, 1)

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior) of the weights of all processes. Its gradient is that of the part of this process."""
        return total(torch.stack([unit.local_kl(self.prior) for unit in self._units()]).sum(), self.group)

    def random_slots(self) -> Sequence[bool]:
        """Return for each slot whether it has Gaussian weights."""
        return [random for unit in self._units() for random in unit.random_slots()]

    @property
    def random_weights(self) -> int:
        """The number of Gaussian weights in all processes."""
        return sum(unit.random_weights for unit in self._units())

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ of each unit."""
        for unit in self._units():
            yield unit.rho

    def diagonal_gaussians(self) -> list[DiagonalGaussian]:
        """Return μ, ρ and the prior of each unit; the prior is that of the part of this process."""
        return [DiagonalGaussian(unit.mu, unit.rho, unit.terms(self.prior)) for unit in self._units()]

    # -- the exchange of active weights -------------------------------------------------------------------------------

    def stored(self) -> tuple[Tensor, Tensor]:
        """Return μ and σ of the Gaussian weights that this process holds."""
        rho = torch.cat([local_part(unit.rho) for unit in self._units()])
        return torch.cat([local_part(unit.mu) for unit in self._units()]), F.softplus(rho)

    def at_index(self, values: Tensor) -> Tensor:
        """Return one value per Gaussian weight of this process, given its part of one value per weight of each unit."""
        found = zip(self._units(), self._dense_parts(values), strict=True)
        return torch.cat(
            [self.group.gather(part, u.layout.numel)[local_part(cast(Tensor, u.index))] for u, part in found]
        )

    def pieces(self, removal: Tensor, addition: Tensor) -> Iterator[tuple[Unit, Tensor, Tensor]]:
        """Yield each unit with the scores of all its active weights, and of all its weights, gathered."""
        removals = removal.split([len(local_part(unit.rho)) for unit in self._units()])
        for unit, lowest, highest in zip(self._units(), removals, self._dense_parts(addition), strict=True):
            yield unit, self.group.gather(lowest, len(unit.rho)), self.group.gather(highest, unit.layout.numel)

    def _dense_parts(self, values: Tensor) -> Sequence[Tensor]:
        bounds = [self.group.bounds(unit.layout.numel) for unit in self._units()]
        return values.split([stop - start for start, stop in bounds])

    @contextlib.contextmanager
    def watching(self, change: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that returns the gradient of the weights of all backward passes in the block.

        It is the mean over all processes, and of each unit the part of this process, one after the other.

        Args:
            change: Is applied to gradients before they are averaged.
        """
        found = {unit: torch.zeros((), device=unit.mu.device) for unit in self._units()}

        def watch(unit: Unit, gradient: Tensor) -> None:
            precise = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            found[unit] = found[unit] + self.group.mean_over_replicas(self.group.reduce(change(precise)))

        try:
            for unit in found:
                unit.watch = functools.partial(watch, unit)
            yield lambda: torch.cat([found[unit] for unit in found])
        finally:
            for unit in found:
                unit.watch = None

    def _units(self) -> Iterator[Unit]:
        for unit in self.units:
            assert isinstance(unit, Unit)
            yield unit

    # -- files --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def unsharded_state(self) -> dict[str, Tensor]:
        """Return the state of the posterior that was sharded, on the CPU. All processes must call it."""
        found: dict[str, list[Tensor]] = {}
        start = 0
        for unit in self._units():
            mu, rho = whole(unit.mu).cpu(), whole(unit.rho).cpu()
            if unit.index is not None:
                index = whole(unit.index).cpu()
                if unit.rest is not None:
                    mu = unit.placed([mu, whole(unit.rest).cpu()], index.long())
                found.setdefault("index", []).append(index + start)
            start += unit.layout.numel
            found.setdefault("mu", []).append(mu)
            found.setdefault("rho", []).append(rho)
            for name in ("loc", "scales"):
                if getattr(unit, name) is not None and name in self.prior._buffers:
                    found.setdefault(f"prior.{name}", []).append(whole(getattr(unit, name)).cpu())
        small = {f"prior.{name}": tensor.cpu() for name, tensor in self.prior.state_dict().items()}
        return {**{name: torch.cat(parts) for name, parts in found.items()}, **small}

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode positions by their gaps, as the posterior that was sharded does."""
        return {**tensors, **({"index": positions.encode(tensors["index"])} if "index" in tensors else {})}

    def extra_repr(self) -> str:
        """Add the number of units and processes, and the prior."""
        units = f"{len(self.units)} units over {self.group.size} processes"
        return f"{super().extra_repr()}, {units}, prior={self.prior}"
