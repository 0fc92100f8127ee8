"""Which parameters are Bayesian, and the position of each in one flat vector."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.names import suggestion
from leanbayes.errors import LeanBayesError

Select = (
    str | Sequence[str] | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Parameter], bool] | None
)

_SHOWN = 10  # parameters that the repr of a layout lists


@dataclass(frozen=True)
class Slot:
    """One Bayesian parameter: all its names (tied parameters have several), its shape and memory order.

    `input_dim` is the dimension that counts the inputs of a layer in its weight.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in memory, so channels_last is preserved
    dtype: torch.dtype
    fan_in: int
    input_dim: int = 1

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Its number of weights."""
        return math.prod(self.shape)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Its shape in memory order."""
        return tuple(self.shape[dim] for dim in self.order)

    def view(self, flat: Tensor) -> Tensor:
        """View its part of the flat vector as a tensor of its shape, without a copy."""
        if self.order == tuple(range(len(self.order))):
            return flat.view(self.shape)
        return flat.view(self.memory_shape).permute([self.order.index(dim) for dim in range(len(self.order))])


class Layout:
    """The Bayesian parameters of a network, one after the other in a flat vector."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.sizes = [slot.numel for slot in self.slots]
        self.numel = sum(self.sizes)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __repr__(self) -> str:
        parameters = "parameter" if len(self) == 1 else "parameters"
        weights = "weight" if self.numel == 1 else "weights"
        shown = self.slots[:_SHOWN]
        width = max((len(slot.name) for slot in shown), default=0)
        shapes = [_shape_text(slot.shape) for slot in shown]
        shape_width = max(map(len, shapes), default=0)
        lines = [f"Layout: {len(self):,} {parameters}, {self.numel:,} {weights}"]
        for slot, shape in zip(shown, shapes, strict=True):
            lines.append(f"  {slot.name:<{width}}  {shape:<{shape_width}}  {str(slot.dtype).removeprefix('torch.')}")
        if len(self) > _SHOWN:
            lines.append(f"  ... and {len(self) - _SHOWN:,} more")
        return "\n".join(lines)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Split a flat vector into one tensor per slot: no copy, and one concatenation in the backward pass."""
        parts = flat.split(self.sizes) if self.slots else ()
        return [slot.view(part) for slot, part in zip(self.slots, parts, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per slot to a flat vector: the inverse of `split`."""
        return torch.cat([t.permute(slot.order).reshape(-1) for slot, t in zip(self.slots, tensors, strict=True)])

    def expand(self, per_slot: Tensor) -> Tensor:
        """Repeat one number per slot over the weights of that slot."""
        sizes = torch.tensor(self.sizes, device=per_slot.device)
        return torch.repeat_interleave(per_slot, sizes, output_size=self.numel)

    def slots_of(self, index: Tensor) -> Tensor:
        """Return the number of the slot for each position in the flat vector."""
        ends = torch.tensor(self.sizes, device=index.device).cumsum(0).to(index.dtype)
        return torch.bucketize(index, ends, right=True)

    def to_json(self) -> list[dict[str, Any]]:
        """Convert the slots to JSON values."""
        return [
            {
                "names": list(s.names),
                "shape": list(s.shape),
                "order": list(s.order),
                "dtype": str(s.dtype).removeprefix("torch."),
                "fan_in": s.fan_in,
                **({} if s.input_dim == 1 else {"input_dim": s.input_dim}),
            }
            for s in self.slots
        ]

    @classmethod
    def from_json(cls, slots: list[dict[str, Any]]) -> "Layout":
        """Rebuild a layout that `to_json` converted.

        Raises:
            ValueError: The values cannot come from `to_json`. Some mistakes raise a `TypeError` or `KeyError`.
        """
        layout = []
        for s in slots:
            dtype: Any = getattr(torch, s["dtype"], None)
            inputs = s.get("input_dim", 1)
            slot = Slot(tuple(s["names"]), tuple(s["shape"]), tuple(s["order"]), dtype, s["fan_in"], inputs)
            plausible = slot.names and isinstance(dtype, torch.dtype) and dtype.is_floating_point and slot.fan_in >= 1
            plausible = plausible and (inputs == 1 or inputs in range(len(slot.shape)))
            if not plausible or sorted(slot.order) != list(range(len(slot.shape))) or min(slot.shape, default=1) < 1:
                raise ValueError(f"impossible layout of {slot.names}: {s}")
            layout.append(slot)
        return cls(layout)


@dataclass(frozen=True)
class ReportRow:
    """Whether one parameter of a network became Bayesian, and why."""

    name: str
    shape: tuple[int, ...]
    bayesian: bool
    reason: str


@dataclass(frozen=True)
class Report:
    """Which parameters of a network became Bayesian, which did not, and why."""

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
        shapes = [_shape_text(row.shape) for row in self.rows]
        shape_width = max(map(len, shapes), default=0)
        for row, shape in zip(self.rows, shapes, strict=True):
            kind = "Bayesian" if row.bayesian else "deterministic"
            lines.append(f"  {kind:<13}  {row.name:<{width}}  {shape:<{shape_width}}  {row.reason}")
        return "\n".join(lines)

    __repr__ = __str__


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"


_WEIGHT_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def _default_weights(module: nn.Module) -> set[str]:
    """Return the names of a module's own parameters that become Bayesian by default."""
    own = {name: p for name, p in module.named_parameters(recurse=False, remove_duplicate=False)}
    if isinstance(module, nn.MultiheadAttention):
        return {name for name in _ATTENTION_WEIGHTS if name in own}
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return {name for name in own if name.startswith("weight_")}
    if isinstance(module, _WEIGHT_LAYERS):
        return {"weight"}
    # A layer of another library, such as transformers' Conv1D or MixtralExperts: its matrices, also stacks of them.
    if "norm" in type(module).__name__.lower():
        return set()
    return {name for name, parameter in own.items() if parameter.dim() >= 2 and _names_a_weight(name)}


def _names_a_weight(attribute: str) -> bool:
    """Whether a name is that of a weight matrix, not that of a bias, a position, a token, a scale or a table."""
    others = r"bias|pos|token|embed|scale|gamma|table|norm"
    return bool(re.search(r"weight|proj(ection)?$|^w\d?$", attribute)) and not re.search(others, attribute)


def _fan_in(module: nn.Module, shape: Sequence[int]) -> int:
    """Return the number of weighted inputs that an output of a layer sums."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or len(shape) < 2:
        return 1
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return shape[0] // module.groups * math.prod(shape[2:])
    inputs = _input_dim(module, shape)
    return math.prod(shape[1:]) if inputs == 1 else shape[inputs]


def _input_dim(module: nn.Module, shape: Sequence[int]) -> int:
    """Return the dimension that counts the inputs of a layer in its weight; 1 for vectors too."""
    if len(shape) < 2:
        return 1
    # The second kind is a linear layer of transformers that is stored transposed.
    if isinstance(module, nn.modules.conv._ConvTransposeNd) or type(module).__name__ == "Conv1D":
        return 0
    known = isinstance(module, (*_WEIGHT_LAYERS, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
    stacked = len(shape) == 3 and not known  # matrices (outputs, inputs), such as the experts of a mixture
    return 2 if stacked else 1


def _why(module: nn.Module, attribute: str) -> str:
    kind = type(module).__name__
    return f"weight of {kind}" if "weight" in attribute else f"weight of {kind} ({attribute})"


def _why_not(module: nn.Module, attribute: str) -> str:
    kind = type(module).__name__
    if "norm" in kind.lower():
        return f"normalization ({kind})"
    if "bias" in attribute:
        return f"bias of {kind}"
    return f"not a weight matrix of a layer ({kind}.{attribute})"


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor from the slowest to the fastest in memory."""
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    order = tuple(sorted(dims, key=lambda dim: (-tensor.stride()[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else tuple(dims)


def _chooser(model: nn.Module, select: Select) -> Callable[[str, nn.Parameter, bool], bool]:
    """Convert `select` to a function of (name, parameter, whether it is Bayesian by default)."""
    if select is None:
        return lambda name, parameter, default: default
    if isinstance(select, str):
        try:
            pattern = re.compile(select)
        except re.error as error:
            raise LeanBayesError(f"select={select!r} is not a valid regular expression: {error}.") from None
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
            hint = suggestion(name, [*parameters, *modules], "see model.named_parameters().")
            raise LeanBayesError(
                f"select has {name!r}, which is neither a parameter nor a module of the network: {hint}"
            )
    return lambda name, parameter, default: (
        name in names or (default and any(module in modules and _is_under(name, module) for module in names))
    )


def _is_under(name: str, module: str) -> bool:
    return module == "" or name.startswith(module + ".")


def _parameter_places(model: nn.Module) -> list[list[tuple[str, nn.Module, str, nn.Parameter]]]:
    """Return every parameter with all its places: (name, owner, attribute, parameter)."""
    places: dict[int, list[tuple[str, nn.Module, str, nn.Parameter]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if isinstance(parameter, nn.UninitializedParameter):
                raise LeanBayesError(f"{name} is not initialized yet: run the lazy network once on a batch first.")
            places.setdefault(id(parameter), []).append((name, module, attribute, parameter))
    if not places:
        raise LeanBayesError("The model has no parameters: pass a network with weights.")
    return list(places.values())


def report_deterministic(model: nn.Module, reason: str) -> Report:
    """Return the report of a network without Bayesian parameters."""
    groups = _parameter_places(model)
    return Report(tuple(ReportRow(group[0][0], tuple(group[0][3].shape), False, reason) for group in groups))


def choose(model: nn.Module, select: Select) -> tuple[Layout, Report]:
    """Select the Bayesian parameters of a network, and return their layout and a report with a reason for each."""
    chosen = _chooser(model, select)
    slots, rows = [], []
    for group in _parameter_places(model):
        name, module, attribute, parameter = group[0]
        names = tuple(place[0] for place in group)
        by_default = any(place[2] in _default_weights(place[1]) for place in group)
        wanted = any(chosen(place, parameter, by_default) for place in names)
        bayesian = wanted and parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 0
        if bayesian:
            reason = "selected" if select is not None else _why(module, attribute)
            order = _memory_order(parameter)
            of_inputs = _fan_in(module, parameter.shape), _input_dim(module, parameter.shape)
            slots.append(Slot(names, tuple(parameter.shape), order, parameter.dtype, *of_inputs))
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
        remedy = "unfreeze some (requires_grad=True)" if frozen else "change select, or see model.named_parameters()"
        raise LeanBayesError(f"The selection has no Bayesian parameter: {remedy}.")
    return Layout(slots), Report(tuple(rows))
