"""A few parameters of a sharded posterior that are gathered together: a unit."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian, noise
from leanbayes.core.layout import Layout
from leanbayes.core.parts import local_part, overwrite, whole
from leanbayes.core.sharding import ShardGroup
from leanbayes.posteriors.base import Posterior
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
        if ctx.unit.watch is not None:
            ctx.unit.watch(grad)
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
    spans: Tensor | None
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
        self.register_buffer("index", None if index is None else group.cut(index))
        self.register_buffer("spans", None if index is None else self._counted(index))
        self.register_buffer("loc", None if terms.loc is None else group.cut(terms.loc))
        self.register_buffer("scales", group.cut(terms.scale) if isinstance(terms.scale, Tensor) else None)
        self._random = list(random)
        self.live: dict[int, Gathered] = {}  # by the address of their memory, while the unit's module runs
        self.watch: Callable[[Tensor], None] | None = None  # gets the gradient of all weights, also of inactive ones
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

    # -- the exchange of active weights -------------------------------------------------------------------------------

    @property
    def counts(self) -> list[int]:
        """The number of active weights of each slot."""
        return torch.bincount(self.layout.slots_of(whole(self.index)), minlength=len(self.layout)).tolist()

    def entries(self) -> list[nn.Parameter]:
        """Return the parameters with one value per active weight."""
        return [self.mu, self.rho]

    def move_to(self, index: Tensor) -> None:
        """Replace the active positions by others, given in increasing order."""
        assert self.index is not None
        assert self.spans is not None
        overwrite(self.index, index)
        self.spans.copy_(self._counted(index))

    def _counted(self, index: Tensor) -> Tensor:
        """Return how many positions each span of 2^16 has: processes exchange only the lower bits of positions."""
        return torch.bincount(index >> 16, minlength=-(-self.layout.numel >> 16))

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
        if self.index is None or self.spans is None:
            return None
        lower = (local_part(self.index) & 0xFFFF) - 0x8000
        gathered = self.group.gather(lower.to(torch.int16), len(self.rho)).long()
        starts = 0x8000 + (torch.arange(len(self.spans), device=gathered.device) << 16)
        return gathered.add_(starts.repeat_interleave(self.spans, output_size=len(gathered)))

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
