"""SWAG (Maddox et al. 2019): a Gaussian from the weights that SGD passes through with a constant learning rate."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.layout import Layout, Select
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.methods.baselines.ensemble import Members
from leanbayes.methods.baselines.swa import averaging_stage
from leanbayes.model.draw import Draw
from leanbayes.model.method import Method, Stage, Training, register_method
from leanbayes.posteriors import LowRankPosterior


@register_method("swag")
@dataclass(frozen=True)
class SWAG(Method):
    """SWAG: a Gaussian with a diagonal and a low-rank part, from the weights along the last part of a training.

    All parameters are Bayesian, norms and biases too. Its weights are correlated, so it predicts by samples of the
    weights. If the network has BatchNorm, each sample has statistics of its own, which are computed after training, so
    there are as many samples as `samples` says: a prediction uses them all, or the first ones.

    Paper: Maddox et al. (2019), "A Simple Baseline for Bayesian Uncertainty in Deep Learning".

    Attributes:
        rank: number of differences to the mean that are kept, each as large as the network. 0 keeps variances only.
        snapshots: number of weights that are collected, at equal distances.
        share: share of the epochs in which they are collected.
        lr_fraction: learning rate of that part, as a fraction of the highest one.
        cyclic: let the rate fall as a cosine before each of the collected weights, instead of a constant rate.
        scale: factor of the covariance.
        pretrain: train the plain network first, in the other epochs. Use False for a trained network.
        samples: number of Monte Carlo samples of a prediction. With BatchNorm, the number of all samples.

    Example:
        >>> bnn = lb.fit(network, lb.SWAG(), train_set, epochs=30, optimizer="sgd")
    """

    rank: int = 20
    snapshots: int = 40
    share: float = 0.25
    lr_fraction: float = 0.2
    cyclic: bool = False
    scale: float = 1.0
    pretrain: bool = True
    samples: int = 30
    has_kl = False

    def __post_init__(self) -> None:
        averaging_stage(self.share, self.lr_fraction)
        if self.rank < 0 or self.rank == 1:
            raise LeanBayesError(f"rank={self.rank} must be 0, for variances only, or at least 2.")
        if self.snapshots < 2 or self.samples < 1:
            raise LeanBayesError(f"snapshots={self.snapshots} must be at least 2, and samples={self.samples} 1.")
        if not 0 < self.scale < float("inf"):
            raise LeanBayesError(f"scale={self.scale} must be a positive number.")

    def selected(self, network: nn.Module) -> Select:
        """Return all parameters."""
        return lambda name, parameter: True

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> LowRankPosterior:
        """Start to collect from the given weights."""
        return LowRankPosterior(layout, mean, self.rank, self.scale)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Give each sample its own statistics of BatchNorm, if there are any."""
        return SampleStatistics(network, self.samples) if self.copies(network) else network

    def copies(self, network: nn.Module) -> int:
        """Return how many copies of a network a model has: of each sample and of the mean, or none."""
        return self.samples + 1 if _has_statistics(network) else 0

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, then collect weights."""
        before, during = averaging_stage(self.share, self.lr_fraction, self.snapshots if self.cyclic else 0)
        last = Stage(self, self.share, {**during, "average": None})  # it would replace the mean of the Gaussian
        return (Stage(Deterministic(), 1 - self.share, before), last) if self.pretrain and self.share < 1 else (last,)

    def start(self, training: Training) -> None:
        """Check that there are enough steps."""
        if training.steps < 2:
            raise LeanBayesError(
                "SWAG collects the weights of at least two steps: train longer, or in smaller batches."
            )

    def after_step(self, training: Training) -> None:
        """Collect the weights if they are due, and make the Gaussian after the last step."""
        posterior, done = training.model.posterior, training.step + 1
        assert isinstance(posterior, LowRankPosterior)
        parts = min(self.snapshots, training.steps)
        if done * parts // training.steps > training.step * parts // training.steps:
            posterior.collect()
        if done == training.steps:
            posterior.finish()
            if isinstance(training.model.network, SampleStatistics):
                training.model.network.finish()


class SampleStatistics(Members):
    """Copies of a network with the same parameters and their own buffers: one for each sample, and one for the mean.

    The last copy is the one in training. There are no members until `finish`, and then all copies have its buffers
    until `BayesianModel.refresh_batchnorm` computes those of each.
    """

    mean_apart = True
    finished: Tensor

    def __init__(self, network: nn.Module, samples: int) -> None:
        kept = {id(parameter): parameter for parameter in network.parameters()}
        super().__init__([*(copy.deepcopy(network, dict(kept)) for _ in range(samples)), network])
        self.register_buffer("finished", torch.zeros((), dtype=torch.bool))
        self._count()

    def _count(self) -> None:
        """Read whether there are members, outside of compiled code."""
        self.members = len(self.networks) - 1 if self.finished else None

    @torch.no_grad()
    def finish(self) -> None:
        """Count the members from now on."""
        self.finished.fill_(True)
        for member in self.networks[:-1]:
            for mine, last in zip(member.buffers(), self.networks[-1].buffers(), strict=True):
                mine.copy_(last)
        self._count()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._count()

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run the network of one sample, or that of the mean or in training."""
        place = -1 if draw is None or self.members is None else draw.number
        return self.networks[place](*args, **kwargs)

    def weight_names(self, name: str) -> list[str]:
        """Return the names of a weight in all copies, which use the same one in a pass."""
        return [f"networks.{number}.{name}" for number in range(len(self.networks))]

    def plain(self) -> nn.Module:
        """Return the network of the mean, or in training."""
        return self.networks[-1]

    def described_network(self) -> nn.Module:
        """Return the network of the mean."""
        return self.networks[-1]


def _has_statistics(network: nn.Module) -> bool:
    norms = (module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return any(norm.track_running_stats for norm in norms)
