"""Vectors that are cut into equal parts over the processes of a device mesh, as DTensors, and what they exchange."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from leanbayes.core.parts import local_part

# torch 2.13 has new names for both, and warns about the former ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ShardGroup:
    """The processes that share the parts of vectors: a mesh (shard), or (replicate, shard) for several replicas.

    Attributes:
        mesh: The mesh.
        compute_dtype: The dtype in which values are gathered, None for their own.
        reduce_dtype: The dtype in which gradients are added up, None for that of the gathered values.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """The number of parts."""
        return self.mesh.size(-1)

    @property
    def rank(self) -> int:
        """The number of the part that this process holds."""
        return self.mesh.get_local_rank(-1)

    @property
    def replica(self) -> tuple[int, int]:
        """The number of the replica that this process belongs to, and how many there are."""
        return (self.mesh.get_local_rank(0), self.mesh.size(0)) if self.mesh.ndim == 2 else (0, 1)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of the mesh."""
        return not any(self.mesh.get_coordinate() or [])

    def wait(self) -> None:
        """Wait for all processes of the mesh."""
        for dim in range(self.mesh.ndim):
            dist.barrier(self.mesh.get_group(dim))

    def bounds(self, numel: int) -> tuple[int, int]:
        """Return where the part of this process starts and stops, in a vector of `numel` elements."""
        step = -(-numel // self.size)
        return min(self.rank * step, numel), min((self.rank + 1) * step, numel)

    def cut(self, vector: Tensor) -> DTensor:
        """Return a vector, which all processes have, as a DTensor that copies the part of this process."""
        start, stop = self.bounds(len(vector))
        part = vector.detach()[start:stop].to(self.mesh.device_type, copy=True)
        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=vector.shape, stride=(1,))

    def parameter(self, vector: Tensor, like: nn.Parameter) -> nn.Parameter:
        """Return a vector as a parameter that is cut, and requires a gradient if `like` does."""
        return nn.Parameter(self.cut(vector), requires_grad=like.requires_grad)

    def gather(self, part: Tensor, numel: int) -> Tensor:
        """Return the whole vector, given the part of each process."""
        step = -(-numel // self.size)
        if self.size == 1 or not numel:
            return part.clone()
        padded = part if len(part) == step else torch.cat((part, part.new_zeros(step - len(part))))
        everything = part.new_empty(step * self.size)
        sent = torch.uint8 if part.dtype == torch.int16 else part.dtype  # gloo does not know int16
        _all_gather(everything.view(sent), padded.contiguous().view(sent), group=self.mesh.get_group(-1))
        return everything[:numel]

    def reduce(self, vector: Tensor) -> Tensor:
        """Return the part of this process of the mean of a vector over all parts."""
        start, stop = self.bounds(len(vector))
        step = -(-len(vector) // self.size)
        part = vector
        if self.size > 1 and len(vector):
            missing = step * self.size - len(vector)
            padded = torch.cat((vector, vector.new_zeros(missing))) if missing else vector.contiguous()
            part = vector.new_empty(step)
            _reduce_scatter(part, padded, group=self.mesh.get_group(-1))
            part = part[: stop - start]
        return part / self.size

    def mean_over_replicas(self, part: Tensor) -> Tensor:
        """Return the mean of the part that this process and its replicas hold."""
        if self.mesh.ndim == 1:
            return part
        mean = part.clone()
        dist.all_reduce(mean, group=self.mesh.get_group(0))
        return mean / self.mesh.size(0)

    def trained(self, parameter: Tensor) -> Tensor:
        """Return the part of this process. Its gradient is the mean over the replicas, which have their own noise."""
        part = local_part(parameter)
        return _MeanGradient.apply(part, self) if self.mesh.ndim == 2 else part


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ShardGroup) -> Tensor:
        ctx.group = group
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.mean_over_replicas(grad), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup) -> Tensor:
        total = value.clone()
        if group.size > 1:
            dist.all_reduce(total, group=group.mesh.get_group(-1))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def total(value: Tensor, group: ShardGroup) -> Tensor:
    """Return the sum over all parts of a term that each process computes of its own part, as its loss counts it.

    The gradient of a part is that of its own term: all processes have the same sum in their losses.
    """
    return _Total.apply(value, group)
