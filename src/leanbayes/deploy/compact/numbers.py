"""Tensors of numbers in a container, rounded to a precision: codebooks, outliers, biases, norms."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanbayes.core.quantization import Precision, dequantize, quantize
from leanbayes.deploy.compact import container
from leanbayes.deploy.compact.coding import Array, pack, unpack
from leanbayes.deploy.compact.container import Part, needed
from leanbayes.errors import LeanBayesError


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored(name: str, tensor: Tensor, precision: Precision) -> str:
    """Return the dtype in the file: integers keep theirs, and numbers too large for 16 bits have 32."""
    if not tensor.is_floating_point():
        if _name(tensor.dtype) not in container.DTYPES:
            raise LeanBayesError(
                f"{name} has the dtype {tensor.dtype}, which a compact file cannot store: convert it to another dtype."
            )
        return _name(tensor.dtype)
    # A variance near zero must not become zero.
    if precision == "int8" and tensor.dtype.itemsize >= 4 and not name.endswith("running_var"):
        return "int8"
    fits = torch.equal(tensor.half().isinf(), tensor.isinf())
    return "float16" if precision != "fp32" and fits else "float32"


class Numbers:
    """Tensors to write; `rows` has one [name, shape, dtype, part] for each."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._arrays: dict[str, list[Array]] = {}

    def add(self, name: str, tensor: Tensor, precision: Precision, part: str | None = None) -> None:
        """Round a tensor, and add it to the part `part`, or to one with its own name."""
        flat = tensor.detach().cpu().flatten()
        stored = _stored(name, flat, precision)
        if stored == "int8" and flat.is_floating_point():
            flat, scale = quantize(flat)
            self._arrays.setdefault("scales", []).append(np.array([scale]))
        kind = f"{part or name}:{stored}"
        self.rows.append([name, list(tensor.shape), _name(tensor.dtype), kind])
        self._arrays.setdefault(kind, []).append(flat.to(getattr(torch, stored)).numpy())

    def parts(self) -> dict[str, Part]:
        """Return the encoded parts."""
        joined = {name: np.concatenate(arrays) for name, arrays in self._arrays.items()}
        return {name: Part(str(a.dtype), a.shape, "planes", pack(a)) for name, a in joined.items() if len(a)}


def read_numbers(rows: Any, parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors of `Numbers`, and check that each occurs once and has its expected shape."""
    groups: dict[str, list[str]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError(f"its header describes a tensor as {row}")
        name, shape, dtype, kind = row
        fits = isinstance(name, str) and isinstance(kind, str) and shape == [*shapes.get(name, [-1])]
        known = dtype in (*container.DTYPES, "bfloat16") and kind.rpartition(":")[2] in container.DTYPES
        if not fits or not known or name in dtypes:
            raise ValueError(f"{name} does not fit the network, or occurs twice")
        groups.setdefault(kind, []).append(name)
        dtypes[name] = getattr(torch, dtype)
    found: dict[str, Tensor] = {}
    for kind, names in groups.items():
        sizes = [math.prod(shapes[name]) for name in names]
        flat = _planes(parts, kind, kind.rpartition(":")[2], sum(sizes))
        found |= zip(names, flat.split(sizes), strict=True)
    scaled = [name for name, dtype in dtypes.items() if found[name].dtype == torch.int8 and dtype.is_floating_point]
    scales = _planes(parts, "scales", "float64", len(scaled)) if scaled else torch.zeros(0)
    found |= {name: dequantize(found[name], scale) for name, scale in zip(scaled, scales.tolist(), strict=True)}
    return {name: found[name].to(dtype).view(shapes[name]) for name, dtype in dtypes.items()}


def _planes(parts: Mapping[str, Part], name: str, dtype: str, count: int) -> Tensor:
    if not count:
        return torch.zeros(0, dtype=getattr(torch, dtype))
    part = needed(parts, name, "planes", (count,))
    if part.dtype != dtype:
        raise ValueError(f"{name} does not fit the network")
    return torch.from_numpy(unpack(part.data, dtype, count).copy())
