"""Deep ensembles (Lakshminarayanan et al. 2017): several networks, each trained from its own start."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leanbayes.bayesian import Draw, StochasticNetwork
from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.method import Method


@configurable
@dataclass(frozen=True)
class Ensemble(Method):
    """Several networks, each trained from its own start.

    The first keeps the weights that the network came with; the others start anew, each from a seed. Frozen parameters
    are the same in all of them.

    Attributes:
        members: how many networks.
        seed: number that the starts of all but the first follow from.
    """

    members: int = 5
    seed: int = 0
    bayesian_weights = False

    def __post_init__(self) -> None:
        if self.members < 1:
            raise LeanBayesError(f"members={self.members} must be at least 1.")

    def wrap(self, network: nn.Module) -> nn.Module:
        """Make the members."""
        others = [copy.deepcopy(network) for _ in range(self.members - 1)]
        for number, other in enumerate(others, start=1):
            _reset(other, self.seed + number)
        return Members([network, *others])


@torch.no_grad()
def _reset(network: nn.Module, seed: int) -> None:
    """Give every layer a fresh start, without touching the global random state."""
    devices = sorted({p.device.index for p in network.parameters() if p.is_cuda})
    before = [p.clone() for p in network.parameters()]
    with torch.random.fork_rng(devices=devices):
        for generator in [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]:
            generator.manual_seed(seed)
        for module in network.modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset) and next(module.parameters(), None) is not None:
                reset()
        # What no layer resets is shuffled: its values keep their distribution, and lose what they had learned.
        for parameter, old in zip(network.parameters(), before, strict=True):
            if not parameter.requires_grad:  # a frozen backbone is meant to stay
                parameter.copy_(old)
            elif torch.equal(parameter, old):
                order = torch.randperm(parameter.numel()).to(parameter.device)
                parameter.copy_(old.flatten()[order].view_as(old))


class Members(StochasticNetwork):
    """The networks of an ensemble; draw i is member i."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.members = len(networks)

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one member."""
        if draw is None:
            raise LeanBayesError("An ensemble has no mean network: predict with its members, or take one of them.")
        return self.networks[draw.number](*args, **kwargs)

    def plain(self) -> nn.Module:
        """Refuse: no single network stands for an ensemble."""
        raise LeanBayesError("An ensemble is not one network: take a member from bnn.network.networks.")
