"""Which parameters are Bayesian, and where each lies in the one flat vector."""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError

Select = (
    str | Sequence[str] | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Parameter], bool] | None
)


@dataclass(frozen=True)
class Slot:
    """One Bayesian parameter: every name it goes by (tied ones have several), its shape and memory order."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in memory: channels_last is kept
    dtype: torch.dtype
    fan_in: int

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """How many weights it holds."""
        return math.prod(self.shape)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Its shape as it lies in memory."""
        return tuple(self.shape[dim] for dim in self.order)

    def view(self, flat: Tensor) -> Tensor:
        """Give its part of the flat vector its shape, without a copy."""
        return flat.view(self.memory_shape).permute([self.order.index(dim) for dim in range(len(self.order))])


class Layout:
    """The slots of a network's Bayesian parameters, one after the other in a flat vector."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.sizes = [slot.numel for slot in self.slots]
        self.numel = sum(self.sizes)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat vector into one tensor per slot; no copy, and one concatenation in the backward pass."""
        parts = flat.split(self.sizes) if self.slots else ()
        return [slot.view(part) for slot, part in zip(self.slots, parts, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Lay one tensor per slot into a flat vector: the inverse of `split`."""
        return torch.cat([t.permute(slot.order).reshape(-1) for slot, t in zip(self.slots, tensors, strict=True)])

    def expand(self, per_slot: Tensor) -> Tensor:
        """Repeat one number per slot over the weights of that slot."""
        sizes = torch.tensor(self.sizes, device=per_slot.device)
        return torch.repeat_interleave(per_slot, sizes, output_size=self.numel)

    def slots_of(self, index: Tensor) -> Tensor:
        """Return the number of the slot that each position of the flat vector lies in."""
        ends = torch.tensor(self.sizes, device=index.device).cumsum(0).to(index.dtype)
        return torch.bucketize(index, ends, right=True)

    def to_json(self) -> list[dict[str, Any]]:
        """Describe the slots in plain values, for a file."""
        return [
            {
                "names": list(s.names),
                "shape": list(s.shape),
                "order": list(s.order),
                "dtype": str(s.dtype).removeprefix("torch."),
                "fan_in": s.fan_in,
            }
            for s in self.slots
        ]

    @classmethod
    def from_json(cls, slots: list[dict[str, Any]]) -> "Layout":
        """Rebuild what `to_json` described; raises ValueError or TypeError for what it could not have written."""
        layout = []
        for s in slots:
            dtype: Any = getattr(torch, s["dtype"], None)
            slot = Slot(tuple(s["names"]), tuple(s["shape"]), tuple(s["order"]), dtype, s["fan_in"])
            plausible = slot.names and isinstance(dtype, torch.dtype) and dtype.is_floating_point and slot.fan_in >= 1
            if not plausible or sorted(slot.order) != list(range(len(slot.shape))) or min(slot.shape, default=1) < 1:
                raise ValueError(f"impossible layout of {slot.names}: {s}")
            layout.append(slot)
        return cls(layout)


@dataclass(frozen=True)
class ReportRow:
    """What became of one parameter of the network."""

    name: str
    shape: tuple[int, ...]
    bayesian: bool
    reason: str


@dataclass(frozen=True)
class Report:
    """What became Bayesian, what did not, and why."""

    rows: tuple[ReportRow, ...]

    def __str__(self) -> str:
        bayesian = [row for row in self.rows if row.bayesian]
        weights = sum(math.prod(row.shape) for row in bayesian)
        total = sum(math.prod(row.shape) for row in self.rows)
        share = 100 * weights / total if total else 0.0
        lines = [
            f"{len(bayesian)} of {len(self.rows)} parameters are Bayesian "
            f"({weights:,} of {total:,} weights, {share:.1f} %)"
        ]
        width = max((len(row.name) for row in self.rows), default=0)
        shapes = ["x".join(map(str, row.shape)) or "1" for row in self.rows]
        shape_width = max(map(len, shapes), default=0)
        for row, shape in zip(self.rows, shapes, strict=True):
            kind = "Bayesian" if row.bayesian else "point"
            lines.append(f"  {kind:<8}  {row.name:<{width}}  {shape:<{shape_width}}  {row.reason}")
        return "\n".join(lines)


_WEIGHT_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def _default_weights(module: nn.Module) -> set[str]:
    """Names of the module's own parameters that become Bayesian by default."""
    own = {name: p for name, p in module.named_parameters(recurse=False, remove_duplicate=False)}
    if isinstance(module, nn.MultiheadAttention):
        return {name for name in _ATTENTION_WEIGHTS if name in own}
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return {name for name in own if name.startswith("weight_")}
    if isinstance(module, _WEIGHT_LAYERS):
        return {"weight"}
    # A layer of another library (such as transformers' Conv1D): its matrix called `weight`, unless it normalises.
    is_matrix = "weight" in own and own["weight"].dim() >= 2
    return {"weight"} if is_matrix and "norm" not in type(module).__name__.lower() else set()


def _fan_in(module: nn.Module, shape: Sequence[int]) -> int:
    """How many weighted inputs an output of this layer sums."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or len(shape) < 2:
        return 1
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return shape[0] // module.groups * math.prod(shape[2:])
    if type(module).__name__ == "Conv1D":  # transformers: a linear layer stored transposed
        return shape[0]
    return math.prod(shape[1:])


def _why_not(module: nn.Module, attribute: str) -> str:
    kind = type(module).__name__
    if "norm" in kind.lower():
        return f"normalisation ({kind})"
    if "bias" in attribute:
        return f"bias of {kind}"
    return f"not a weight matrix of a layer ({kind}.{attribute})"


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory, for a dense tensor."""
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    order = tuple(sorted(dims, key=lambda dim: (-tensor.stride()[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else tuple(dims)


def _chooser(model: nn.Module, select: Select) -> Callable[[str, nn.Parameter, bool], bool]:
    """Turn `select` into a test of (name, parameter, whether the default takes it)."""
    if select is None:
        return lambda name, parameter, default: default
    if isinstance(select, str):
        try:
            pattern = re.compile(select)
        except re.error as error:
            raise LeanBayesError(f"select={select!r} is not a regular expression ({error}): mend it.") from None
        return lambda name, parameter, default: pattern.search(name) is not None
    if isinstance(select, type) or (isinstance(select, tuple) and all(isinstance(s, type) for s in select)):
        inside = tuple(
            name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, select)
        )
        return lambda name, parameter, default: default and any(_is_under(name, module) for module in inside)
    if callable(select):
        return lambda name, parameter, default: bool(select(name, parameter))
    names = [str(name) for name in select]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in parameters and name not in modules:
            close = difflib.get_close_matches(name, [*parameters, *modules], n=3)
            hint = f"perhaps you mean {', '.join(close)}" if close else "see model.named_parameters()"
            raise LeanBayesError(f"select names {name!r}, which is no parameter or module of the network: {hint}.")
    return lambda name, parameter, default: (
        name in names or (default and any(module in modules and _is_under(name, module) for module in names))
    )


def _is_under(name: str, module: str) -> bool:
    return module == "" or name.startswith(module + ".")


def _parameter_places(model: nn.Module) -> list[list[tuple[str, nn.Module, str, nn.Parameter]]]:
    """Every parameter with all its places: (name, owner, attribute, parameter)."""
    places: dict[int, list[tuple[str, nn.Module, str, nn.Parameter]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if isinstance(parameter, nn.UninitializedParameter):
                raise LeanBayesError(f"{name} is not initialised yet: run the lazy network once on a batch first.")
            places.setdefault(id(parameter), []).append((name, module, attribute, parameter))
    if not places:
        raise LeanBayesError("The model has no parameters: pass a network with weights.")
    return list(places.values())


def report_points(model: nn.Module, reason: str) -> Report:
    """Report a network of which nothing becomes Bayesian."""
    groups = _parameter_places(model)
    return Report(tuple(ReportRow(group[0][0], tuple(group[0][3].shape), False, reason) for group in groups))


def choose(model: nn.Module, select: Select) -> tuple[Layout, Report]:
    """Choose the Bayesian parameters of a network and lay them out; the report has a reason for each."""
    chosen = _chooser(model, select)
    slots, rows = [], []
    for group in _parameter_places(model):
        name, module, attribute, parameter = group[0]
        names = tuple(place[0] for place in group)
        by_default = any(place[2] in _default_weights(place[1]) for place in group)
        wanted = any(chosen(place, parameter, by_default) for place in names)
        bayesian = wanted and parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 0
        if bayesian:
            reason = f"weight of {type(module).__name__}" if select is None else "selected"
            order = _memory_order(parameter)
            fan_in = _fan_in(module, parameter.shape)
            slots.append(Slot(names, tuple(parameter.shape), order, parameter.dtype, fan_in))
        elif wanted and not parameter.requires_grad:
            reason = "frozen (requires_grad=False)"
        elif wanted:
            reason = "empty" if parameter.is_floating_point() else f"not a floating-point tensor ({parameter.dtype})"
        else:
            reason = _why_not(module, attribute) if select is None else "not selected"
        if len(names) > 1:
            reason += f"; tied with {', '.join(names[1:])}"
        rows.append(ReportRow(name, tuple(parameter.shape), bayesian, reason))
    if not slots:
        frozen = any(row.reason.startswith("frozen") for row in rows)
        remedy = "unfreeze them (requires_grad=True)" if frozen else "widen select, or see model.named_parameters()"
        raise LeanBayesError(f"The selection leaves no Bayesian parameter: {remedy}.")
    return Layout(slots), Report(tuple(rows))
