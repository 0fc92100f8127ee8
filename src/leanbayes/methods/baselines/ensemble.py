"""Deep ensembles (Lakshminarayanan et al. 2017): several networks with different initial weights."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leanbayes.errors import LeanBayesError
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Method, register_method


@register_method("ensemble")
@dataclass(frozen=True)
class Ensemble(Method):
    """Deep ensemble: several networks that are trained from different initial weights.

    The first member keeps the weights of the given network; the others are initialized again, each with its own seed.
    Frozen parameters are the same in all members.

    Paper: Lakshminarayanan et al. (2017), "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles".

    Attributes:
        members: number of networks.
        seed: seed of the initial weights of all members but the first.

    Example:
        >>> bnn = lb.fit(network, lb.Ensemble(members=5), train_set, epochs=30)
    """

    members: int = 5
    seed: int = 0
    bayesian_weights = False

    def __post_init__(self) -> None:
        if self.members < 1:
            raise LeanBayesError(f"members={self.members} must be at least 1.")

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the members."""
        others = [copy.deepcopy(network) for _ in range(self.members - 1)]
        for number, other in enumerate(others, start=1):
            initialize_again(other, self.seed + number)
        return Members([network, *others])


@torch.no_grad()
def initialize_again(network: nn.Module, seed: int) -> None:
    """Initialize every layer again, without changing the global random state."""
    devices = sorted({p.device.index for p in network.parameters() if p.is_cuda})
    before = [p.clone() for p in network.parameters()]
    with torch.random.fork_rng(devices=devices):
        for generator in [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]:
            generator.manual_seed(seed)
        for module in network.modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset) and next(module.parameters(), None) is not None:
                reset()
        # Parameters that no layer resets are shuffled, which keeps their distribution.
        for parameter, old in zip(network.parameters(), before, strict=True):
            if not parameter.requires_grad:  # a frozen backbone would otherwise stay random
                parameter.copy_(old)
            elif torch.equal(parameter, old):
                order = torch.randperm(parameter.numel()).to(parameter.device)
                parameter.copy_(old.flatten()[order].view_as(old))


class Members(StochasticNetwork):
    """The networks of an ensemble. Draw i is member i."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.members = len(networks)

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one member."""
        if draw is None:
            raise LeanBayesError("An ensemble has no mean network: predict with its members, or use one of them.")
        return self.networks[draw.number](*args, **kwargs)

    def plain(self) -> nn.Module:
        """Raise an error: an ensemble is not a single network."""
        raise LeanBayesError("An ensemble is not a single network: use a member from bnn.network.networks.")

    def member(self, number: int) -> nn.Module:
        """Return a member, which is not copied."""
        return self.networks[number]

    def described_network(self) -> nn.Module:
        """Return the first member."""
        return self.networks[0]
