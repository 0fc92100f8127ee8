"""Values that take the place of tensors in a network."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class TensorLike:
    """Base class of values that take the place of tensors in a network; `loc` is the mean.

    It answers what networks ask a tensor besides calling functions on it, such as its shape.
    """

    loc: Tensor

    shape = property(lambda self: self.loc.shape)
    dtype = property(lambda self: self.loc.dtype)
    device = property(lambda self: self.loc.device)
    ndim = property(lambda self: self.loc.ndim)
    is_cuda = property(lambda self: self.loc.is_cuda)
    requires_grad = property(lambda self: self.loc.requires_grad)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dimension."""
        return self.loc.shape if dim is None else self.loc.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.loc.dim()

    def numel(self) -> int:
        """Return the number of elements."""
        return self.loc.numel()

    def __len__(self) -> int:
        return len(self.loc)


def one_line(value: TensorLike, deviation: Callable[[], Tensor], label: str = "mean_std", name: str = "") -> str:
    """Describe a value in one line: its name, shape, dtype, device, and the mean of a deviation such as the std."""
    parts = [repr(name)] if name else []
    parts += [f"shape={tuple(value.shape)}", f"dtype={value.dtype}", f"device={value.device}"]
    if not torch.compiler.is_compiling():
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # meta, fake and vmapped tensors have no numbers
            parts.append(f"{label}={deviation().mean().item():.3g}")
    return f"{type(value).__name__}({', '.join(parts)})"
