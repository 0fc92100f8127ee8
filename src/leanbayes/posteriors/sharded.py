"""A diagonal Gaussian posterior whose parameters are sharded: each process holds, samples and trains its own part.

The layout is cut into units, which are runs of parameters of one block. The vectors of a unit (μ and ρ, and positions
if only some weights are Bayesian) are DTensors, cut into equal parts over a device mesh. A process samples its part
with noise by position, so all processes together have the sample that one process would have. A unit then gathers the
sampled values, in the compute dtype, and the backward pass reduces and scatters their gradient: what is communicated is
that of a plain network (for sparse posteriors only the active weights and their positions).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian, noise
from leanbayes.core.layout import Layout
from leanbayes.core.parts import local_part, whole
from leanbayes.core.sharding import ShardGroup, total
from leanbayes.errors import UnsupportedOperation
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.posteriors.mean_field import MeanFieldPosterior
from leanbayes.posteriors.partial import PartialPosterior
from leanbayes.posteriors.subspace.subspace import SubspacePosterior
from leanbayes.priors import BoundPrior

Kind = Literal["sample", "perturbation", "mean", "variance"]


class Gathered:
    """A gathered tensor that the backward pass needs again: it is gathered again then, and freed in between."""

    def __init__(self, again: Callable[[], Tensor]) -> None:
        self._again = again
        self._tensor: Tensor | None = None

    def get(self) -> Tensor:
        """Return the tensor, which is gathered if it is not there."""
        if self._tensor is None:
            with torch.no_grad():
                self._tensor = self._again()
        return self._tensor

    def free(self) -> None:
        """Free the memory."""
        self._tensor = None


class _Whole(torch.autograd.Function):
    """Gathers the values of a unit and puts them into the flat vector of its weights."""

    @staticmethod
    def forward(ctx: Any, unit: "Unit", kind: Kind, key: Tensor | None, *parts: Tensor) -> Tensor:
        index = unit.gathered_index()
        flat = unit.gathered(parts, index)
        positions = None if index is None else unit.remember(index, lambda: cast(Tensor, unit.gathered_index()))

        def again() -> Tensor:
            return unit.gathered(unit.parts(kind, key), None if positions is None else positions.get())

        ctx.unit, ctx.dtypes = unit, [part.dtype for part in parts]
        ctx.needed = [one for one in (unit.remember(flat, again), positions) if one is not None]
        ctx.save_for_backward(index)
        return flat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        group = ctx.unit.group
        grad = grad if group.reduce_dtype is None else grad.to(group.reduce_dtype)
        slopes = [group.reduce(ctx.unit.picked(grad, number, index)) for number in range(len(ctx.dtypes))]
        for gathered in ctx.needed:
            gathered.free()
        return None, None, None, *[slope.to(dtype) for slope, dtype in zip(slopes, ctx.dtypes, strict=True)]


class Unit(Posterior):
    """The posterior of a few parameters that are gathered together.

    Args:
        layout: The layout of these parameters.
        number: The number of the unit among those of the model.
        first: The number of Gaussian weights before those of the unit.
        group: The processes that share it.
        mean: μ of its Gaussian weights.
        rho: Their ρ.
        index: Their positions in the unit, or None for all.
        rest: The deterministic weights at all other positions, or None for zeros.
        terms: The prior of the Gaussian weights.
        random: For each parameter, whether it has Gaussian weights.
    """

    index: Tensor | None
    loc: Tensor | None
    scales: Tensor | None

    def __init__(
        self,
        layout: Layout,
        number: int,
        first: int,
        group: ShardGroup,
        mean: nn.Parameter,
        rho: nn.Parameter,
        index: Tensor | None,
        rest: nn.Parameter | None,
        terms: gaussian.NormalTerms,
        random: Sequence[bool],
    ) -> None:
        super().__init__(layout)
        self.number, self.group, self.keeps = number, group, False
        self.dtype = group.compute_dtype or layout.slots[0].dtype
        self.start = first + group.bounds(len(rho))[0]
        self.mu, self.rho, self.rest = mean, rho, rest
        self.register_buffer("index", index)
        self.register_buffer("loc", None if terms.loc is None else group.cut(terms.loc))
        self.register_buffer("scales", group.cut(terms.scale) if isinstance(terms.scale, Tensor) else None)
        self._random = list(random)
        self.live: dict[int, Gathered] = {}  # by the address of their memory, while the unit's module runs
        self.is_recomputed = False  # inside a function that activation checkpointing calls again

    # -- what a rule asks for -----------------------------------------------------------------------------------------

    def mean(self) -> Tensor:
        """Return μ of all weights of the unit."""
        return self._flat("mean")

    def variance(self) -> Tensor:
        """Return σ² of all weights of the unit."""
        return self._flat("variance")

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + σ·ε of all weights of the unit."""
        return self._flat("sample", key)

    def perturbation(self, key: Tensor) -> Tensor:
        """Return σ·ε of all weights of the unit."""
        return self._flat("perturbation", key)

    def example_key(self, key: Tensor) -> Tensor:
        """Return a key of its own for each process and unit: they have other examples, and other layers."""
        return noise.of_part(key, 1 + self.number * self.group.size + self.group.rank)

    def random_slots(self) -> Sequence[bool]:
        """Return for each slot whether it has Gaussian weights."""
        return self._random

    @property
    def random_weights(self) -> int:
        """The number of Gaussian weights in all processes."""
        return len(self.rho)

    # -- the part of this process -------------------------------------------------------------------------------------

    def local_kl(self, prior: BoundPrior) -> Tensor:
        """Return the KL of the Gaussian weights that this process holds."""
        return gaussian.normal_kl(local_part(self.mu), F.softplus(local_part(self.rho)), self.terms(prior))

    def terms(self, prior: BoundPrior) -> gaussian.NormalTerms:
        """Return the prior of the Gaussian weights that this process holds."""
        loc = None if self.loc is None else local_part(self.loc)
        if self.scales is not None:
            return gaussian.NormalTerms(loc, local_part(self.scales))
        common = prior.normal_terms()
        assert common is not None
        return gaussian.NormalTerms(loc, common.scale)

    def parts(self, kind: Kind, key: Tensor | None) -> list[Tensor]:
        """Return the values of the weights that this process holds: Gaussian ones, and deterministic ones."""
        mu, rho = self.group.trained(self.mu), self.group.trained(self.rho)
        if kind == "mean":
            values = mu
        elif kind == "variance":
            values = F.softplus(rho).square()
        elif not len(mu):
            values = mu + rho
        else:
            assert key is not None
            center = mu if kind == "sample" else torch.zeros_like(mu)
            values = gaussian.draw(center, rho, noise.at(key, self.start))
        if self.rest is None or kind not in ("mean", "sample"):
            return [values]
        return [values, self.group.trained(self.rest)]

    # -- gathering ----------------------------------------------------------------------------------------------------

    def _flat(self, kind: Kind, key: Tensor | None = None) -> Tensor:
        """Return one value per weight of the unit."""
        if self.is_recomputed:  # only what functions save is used, and these values are not among it
            with torch.no_grad():
                flat = self.gathered(self.parts(kind, key), self.gathered_index())
            return flat.requires_grad_()
        return _Whole.apply(self, kind, key, *self.parts(kind, key))

    def gathered(self, parts: Sequence[Tensor], index: Tensor | None) -> Tensor:
        """Return one value per weight, given the parts of this process and the positions of the Gaussian weights."""
        counts = (len(self.rho), self.layout.numel - len(self.rho))
        values = [self.group.gather(part.detach().to(self.dtype), n) for part, n in zip(parts, counts, strict=False)]
        return self.placed(values, index)

    def gathered_index(self) -> Tensor | None:
        """Return the positions of all Gaussian weights, or None if all weights are Gaussian."""
        return None if self.index is None else self.group.gather(local_part(self.index), len(self.rho)).long()

    def remember(self, tensor: Tensor, again: Callable[[], Tensor]) -> Gathered:
        """Let the backward pass gather a tensor again, instead of keeping it from the forward pass."""
        gathered = Gathered(again)
        if not self.keeps:
            self.live[tensor.untyped_storage().data_ptr()] = gathered
        return gathered

    def placed(self, values: Sequence[Tensor], index: Tensor | None) -> Tensor:
        """Return the flat vector with Gaussian values at their positions, and deterministic ones or zeros elsewhere."""
        if index is None:
            return values[0]
        flat = values[0].new_zeros(self.layout.numel)
        if len(values) > 1:
            flat.masked_scatter_(others(index, len(flat)), values[1])
        return flat.index_copy_(0, index, values[0])

    def picked(self, flat: Tensor, number: int, index: Tensor | None) -> Tensor:
        """Return the values of a flat vector at the positions of the Gaussian weights, or (1) at the others."""
        if index is None:
            return flat
        return flat[others(index, len(flat))] if number else flat.index_select(0, index)


def others(index: Tensor, numel: int) -> Tensor:
    """Return a mask of all positions but the given ones."""
    mask = torch.ones(numel, dtype=torch.bool, device=index.device)
    mask[index.long()] = False
    return mask


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
                None if index is None else group.cut(index),
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
