"""What a process holds of a tensor: all of it, or the local part of a DTensor. Importing DTensor takes seconds."""

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> Any:
    """Return what this process holds of a tensor, in the same memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values of the whole into a tensor: into a DTensor that is cut into equal parts, those of this process."""
    if is_sharded(tensor):
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        step = -(-len(values) // mesh.size(-1))
        values = values[mesh.get_local_rank(-1) * step :][:step]
    local_part(tensor).copy_(values)


def whole(tensor: Any) -> Any:
    """Return all of a tensor. All processes that share a DTensor must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
