"""Cyclical stochastic-gradient MCMC (Zhang et al. 2020): one chain that visits several modes; snapshots are members.

In each cycle the learning rate falls as a cosine. SGD explores in the first part of a cycle. In the rest, noise makes
it SGHMC: with the rate l, momentum β, N labels and temperature T, the momentum gets the noise N(0, 2(1-β)lT/N).
For small rates the weights then have the density exp(-N·loss/T), where the loss contains the weight decay as the prior.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Categorical
from leanbayes.methods.baselines.ensemble import Members
from leanbayes.model.draw import Draw
from leanbayes.model.method import Method, Stage, Training, register_method

_STREAM = 1 << 21  # the first stream of the noise of steps; those of layers and logits are below


@register_method("csgmcmc")
@dataclass(frozen=True)
class CyclicalSGMCMC(Method):
    """Cyclical SGMCMC: the weights at the ends of several cycles of one training, which vote as an ensemble does.

    It trains with SGD, whose weight decay is the prior. All members are in one file, and a prediction takes one pass of
    each.

    Paper: Zhang et al. (2020), "Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning".

    Attributes:
        cycles: number of cycles of the learning rate.
        per_cycle: number of members from each cycle, at equal distances in its last part.
        exploration: share of a cycle without noise.
        temperature: variance of the noise, relative to that of the Bayesian posterior. 0 adds none (a snapshot
            ensemble).

    Example:
        >>> bnn = lb.fit(network, lb.CyclicalSGMCMC(cycles=4, per_cycle=3), train_set, epochs=60, optimizer="sgd")
    """

    cycles: int = 4
    per_cycle: int = 3
    exploration: float = 0.8
    temperature: float = 1.0
    samples = 1  # of a chain that has not collected all members
    bayesian_weights = False
    counts_labels = True

    def __post_init__(self) -> None:
        if self.cycles < 1 or self.per_cycle < 1:
            raise LeanBayesError(f"cycles={self.cycles} and per_cycle={self.per_cycle} must be at least 1.")
        if not 0 <= self.exploration < 1:
            raise LeanBayesError(f"exploration={self.exploration} must be a share of a cycle, from 0 to less than 1.")
        if not 0 <= self.temperature < float("inf"):
            raise LeanBayesError(f"temperature={self.temperature} must be a finite number and not negative.")

    @property
    def members(self) -> int:
        """The number of members."""
        return self.cycles * self.per_cycle

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the chain, with places for its members."""
        return Chain(network, self.members)

    def stages(self) -> tuple[Stage, ...]:
        """Train by SGD in cycles, without a warmup."""
        return (Stage(self, settings={"optimizer": "sgd", "warmup": 0.0, "cycles": self.cycles}),)

    def start(self, training: Training) -> None:
        """Check that every member has a step of its own."""
        if len(self._due(training.steps)) < self.members:
            raise LeanBayesError(
                f"{training.steps} steps are too few for {self.members} members: train longer, or in smaller batches."
            )

    def _due(self, steps: int) -> set[int]:
        """Return after how many steps a member is collected."""
        ends = [self.exploration + (1 - self.exploration) * (n + 1) / self.per_cycle for n in range(self.per_cycle)]
        return {round(steps * (cycle + end) / self.cycles) for cycle in range(self.cycles) for end in ends} - {0}

    def after_step(self, training: Training) -> None:
        """Add noise in the last part of a cycle, and collect a member if it is due."""
        chain, done = training.model.network, training.step + 1
        assert isinstance(chain, Chain)
        if self.temperature and training.step * self.cycles / training.steps % 1.0 >= self.exploration:
            add_noise(training, self.temperature)
        if done in self._due(training.steps):
            chain.collect()
        if done * self.cycles // training.steps > training.step * self.cycles // training.steps:
            _stop(training.optimizers)


@torch.no_grad()
def add_noise(training: Training, temperature: float, only: Tensor | None = None) -> None:
    """Do what noise in the gradient of the last step would have done, to all parameters or to one of them."""
    seed = training.model.noise.state[0]  # equal in all processes, which must take the same step
    key, stream = torch.stack([seed, torch.full_like(seed, training.step)]), _STREAM
    found = [one for one in training.optimizers if isinstance(one, torch.optim.SGD)]
    if not found:
        name = type(training.model.method).__name__
        raise LeanBayesError(f"{name} adds its noise to SGD: train with torch.optim.SGD.")
    labels = number_of_labels(training)
    for optimizer in found:
        for group in optimizer.param_groups:
            beta, rate = group["momentum"], group["lr"]
            std = (2 * (1 - beta) * rate * temperature / labels) ** 0.5
            for parameter in group["params"]:
                if only is not None and parameter is not only:
                    continue
                change = noise.normal(parameter, key, stream) * std
                stream += 1
                momentum = optimizer.state[parameter].get("momentum_buffer")
                if momentum is not None:
                    momentum.sub_(change / rate)
                parameter.add_(change, alpha=1 + beta if group["nesterov"] else 1)


def number_of_labels(training: Training) -> float:
    """Return the number of labels of all training data, over which the loss is a mean."""
    labels, likelihood = training.labels_per_example, training.model.likelihood
    if labels is not None:
        if not 0 < labels < float("inf"):
            raise LeanBayesError(f"labels_per_example={labels} must be a positive number.")
        return training.num_data * labels
    if training.batch is not None and isinstance(likelihood, Categorical):
        y = training.batch[1]
        if y.numel() > len(y):
            raise LeanBayesError(
                "The loss is a mean over several labels per example, and the noise depends on their number: pass "
                "lb.Training(labels_per_example=...) the mean number of labeled tokens or pixels of an example."
            )
    return training.num_data


@torch.no_grad()
def _stop(optimizers: list[torch.optim.Optimizer]) -> None:
    """Set the momentum to zero at the end of a cycle.

    SGD multiplies it by the learning rate, so the noise of a step with the rate l is as 1/√l in it. The rate is nearly
    zero at the end of a cycle, and with the high rate of the next one this noise would be a large step.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()


class Chain(Members):
    """One network in training, and the members that it leaves behind. The last member is the network itself."""

    collected: Tensor

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__([*(copy.deepcopy(network) for _ in range(members - 1)), network])
        self.register_buffer("collected", torch.zeros((), dtype=torch.int64))
        self._count()

    def _count(self) -> None:
        """Read how many members there are, outside of compiled code. All of them together are a usual ensemble."""
        all_collected = bool(self.collected == len(self.networks))
        self.members = len(self.networks) if all_collected else None
        for member in self.networks[:-1]:
            for mine, last in zip(member.parameters(), self.networks[-1].parameters(), strict=True):
                mine.requires_grad_(all_collected and last.requires_grad)

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the current network to the next place. The last member stays where it is."""
        place = int(self.collected)
        if place == len(self.networks):
            raise LeanBayesError("The chain has all its members: make a new model to sample others.")
        target, source = self.networks[place].state_dict(), self.networks[-1].state_dict()
        for name, tensor in target.items():
            if tensor is not source[name]:
                tensor.copy_(source[name])
        self.collected += 1
        self._count()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._count()

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one member, or the network in training until there are all of them."""
        if self.members is None:
            return self.networks[-1](*args, **kwargs)
        return super().forward(draw, *args, **kwargs)

    def described_network(self) -> nn.Module:
        """Return the network in training."""
        return self.networks[-1]
