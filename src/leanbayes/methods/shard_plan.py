"""What a sharded model takes on each process, computed from the layout of a network, also on the meta device."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from leanbayes.core.layout import Select, choose
from leanbayes.core.network import places
from leanbayes.errors import UnsupportedOperation
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.pbn.pbn import PBN
from leanbayes.methods.sparse_training.densities import active_counts
from leanbayes.methods.ssvi.ssvi import SSVI
from leanbayes.model.fsdp import outermost_blocks, owners_of
from leanbayes.model.method import Method

_INDEX, _EXCHANGED_INDEX = 4, 2  # bytes of a position in memory, and of its lower half


@dataclass(frozen=True)
class ShardPlan:
    """Bytes of one training step on each process. Activations come on top of the memory.

    Attributes:
        processes: The number of processes that share the parts.
        weights: The number of weights of the network.
        gaussian: The number of Gaussian weights.
        parameters: Means, stds and positions, and deterministic weights.
        gradients: Their gradients.
        optimizer: The state of the optimizer.
        gathered: The weights of the largest block with their gradient, and of all weights outside of blocks.
        all_gather: What all-gathers return in a step.
        reduce_scatter: What reduce-scatters take in a step.
    """

    processes: int
    weights: int
    gaussian: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    all_gather: int
    reduce_scatter: int

    @property
    def memory(self) -> int:
        """All memory but activations."""
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def exchanged(self) -> int:
        """What a process sends, which is also what it receives, in rings of all processes."""
        return (self.all_gather + self.reduce_scatter) * (self.processes - 1) // self.processes


def shard_plan(
    network: nn.Module, method: Method, processes: int, dtype: torch.dtype = torch.float32, select: Select = None
) -> ShardPlan:
    """Compute what `lb.fully_shard` takes, with blocks by default, for training by AdamW or `lb.IVON`.

    Args:
        network: The network, also on the meta device.
        method: `lb.MeanField`, `lb.SSVI` or `lb.PBN`.
        processes: The number of processes.
        dtype: The dtype of gathered weights and reduced gradients.
        select: The parameters that become Bayesian, as for `lb.bayesianize`.
    """
    layout, _ = choose(network, select)
    if isinstance(method, SSVI):
        counts = active_counts(layout, method.density, method.densities)
    elif isinstance(method, PBN):
        counts = [round(method.rate * size) for size in layout.sizes]
    elif isinstance(method, MeanField):
        counts = layout.sizes
    else:
        raise UnsupportedOperation(f"{type(method).__name__} cannot be sharded: use MeanField, SSVI or PBN.")
    blocks = list(outermost_blocks(network))
    owners = owners_of((places(network, slot.names) for slot in layout), blocks)
    dense: dict[int | None, int] = defaultdict(int)  # numbers that a block gathers
    sent: dict[int | None, int] = defaultdict(int)  # bytes of an all-gather of them
    indices, exchanged = (0, 0) if isinstance(method, MeanField) else (_INDEX, _EXCHANGED_INDEX)
    for slot, count, owner in zip(layout, counts, owners, strict=True):
        values = count if isinstance(method, SSVI) else slot.numel
        dense[owner] += slot.numel
        sent[owner] += values * dtype.itemsize + count * exchanged
    bayesian = {name for slot in layout for name in slot.names}
    others = [(name, p) for name, p in network.named_parameters() if name not in bayesian]
    owners_of_others = owners_of((places(network, [name]) for name, _ in others), blocks)
    for (_, parameter), owner in zip(others, owners_of_others, strict=True):
        dense[owner] += parameter.numel()
        sent[owner] += parameter.numel() * dtype.itemsize
    gaussian, rest = sum(counts), sum(p.numel() for _, p in others)
    rest += layout.numel - gaussian if isinstance(method, PBN) else 0
    means, trained = gaussian + rest, 2 * gaussian + rest
    gathers = sum(size if owner is None else 2 * size for owner, size in sent.items())
    return ShardPlan(
        processes=processes,
        weights=sum(p.numel() for p in network.parameters()),
        gaussian=gaussian,
        parameters=(4 * trained + indices * gaussian) // processes,
        gradients=4 * trained // processes,
        optimizer=(4 * means if method.engine == "ivon" else 8 * trained) // processes,
        gathered=dtype.itemsize * (2 * max((n for o, n in dense.items() if o is not None), default=0) + dense[None]),
        all_gather=gathers,
        reduce_scatter=sum(sent.values()) - exchanged * gaussian,
    )
