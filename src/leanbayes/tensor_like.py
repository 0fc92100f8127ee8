"""What networks ask of a tensor beside calling functions on it, answered from the tensor that a value stands for."""

from typing import Any

from torch import Tensor


class TensorLike:
    """Base of the values that stand for tensors in a network; `loc` is their mean, or they themselves."""

    loc: Tensor

    shape = property(lambda self: self.loc.shape)
    dtype = property(lambda self: self.loc.dtype)
    device = property(lambda self: self.loc.device)
    ndim = property(lambda self: self.loc.ndim)
    is_cuda = property(lambda self: self.loc.is_cuda)
    requires_grad = property(lambda self: self.loc.requires_grad)

    def size(self, dim: int | None = None) -> Any:
        """Shape, as for a tensor."""
        return self.loc.shape if dim is None else self.loc.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.loc.dim()

    def numel(self) -> int:
        """Number of elements."""
        return self.loc.numel()

    def __len__(self) -> int:
        return len(self.loc)
