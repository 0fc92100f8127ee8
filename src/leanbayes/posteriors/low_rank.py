"""The posterior of SWAG: a Gaussian of low rank plus diagonal, from the weights that a training passes through.

While it collects, it is the current weights. Then it is N(mean, ½(D + A·Aᵀ/(K - 1))), with the mean and the variances D
of all n collected weights, and the last K differences A between the weights and the mean so far (Maddox et al. 2019).
"""

import math

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors.base import Posterior


class LowRankPosterior(Posterior):
    """The current weights, or their Gaussian after `finish`.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights.
        rank: The largest number of differences to keep.
        scale: A factor of the covariance.
    """

    factorized = False
    sizes_vary = True
    average: Tensor
    squares: Tensor
    differences: Tensor
    count: Tensor

    def __init__(self, layout: Layout, mean: Tensor, rank: int, scale: float = 1.0) -> None:
        super().__init__(layout)
        self._rank, self._scale = rank, scale
        self.mu = nn.Parameter(mean)
        self.register_buffer("average", torch.zeros_like(mean))
        self.register_buffer("squares", torch.zeros_like(mean))  # summed squares of the distances to the average
        self.register_buffer("differences", mean.new_zeros(rank, mean.numel()))  # in any order
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def is_finished(self) -> bool:
        """Whether it is a Gaussian."""
        return self.average.numel() == 0 < self.layout.numel

    @torch.no_grad()
    def collect(self) -> None:
        """Add the current weights."""
        if self.is_finished:
            raise LeanBayesError("SWAG has its Gaussian already: make a new model to collect other weights.")
        self.count += 1
        distance = self.mu - self.average
        self.average.add_(distance / self.count)
        left = self.mu - self.average
        self.squares.addcmul_(distance, left)  # Welford's update, which does not cancel as squares of weights do
        if self._rank:
            self.differences[(int(self.count) - 1) % self._rank] = left

    @torch.no_grad()
    def finish(self) -> None:
        """Become the Gaussian of the collected weights."""
        if self.count < 2:
            raise LeanBayesError("SWAG needs the weights of at least two steps: train longer, or collect more often.")
        self.mu.copy_(self.average)
        self.squares /= self.count
        self.differences = self.differences[: int(self.count)].clone()
        self.average = self.average[:0].clone()

    def mean(self) -> Tensor:
        """Return the current weights, or their mean after `finish`."""
        return self.mu

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return the stds of the diagonal part, and the matrix of the other part."""
        kept = len(self.differences)
        share = 0.5 if kept > 1 else 1.0  # with a diagonal only, as the paper has it, that is the whole covariance
        diagonal = (self.squares * (share * self._scale)).sqrt()
        return diagonal, self.differences * math.sqrt(share * self._scale / max(kept - 1, 1))

    def variance(self) -> Tensor:
        """Return the diagonal of the covariance, 0 while it collects."""
        if not self.is_finished:
            return torch.zeros_like(self.mu)
        diagonal, matrix = self._factors()
        return diagonal.square() + (matrix.square().sum(0) if len(matrix) > 1 else 0.0)

    def sample(self, key: Tensor) -> Tensor:
        """Return mean + √(D/2)·ε + A·ε'/√(2(K - 1)), or the current weights."""
        if not self.is_finished:
            return self.mu
        diagonal, matrix = self._factors()
        sample = self.mu + diagonal * noise.normal(self.mu, key)
        if len(matrix) > 1:
            sample = sample + noise.normal(matrix.new_empty(len(matrix)), key, stream=1) @ matrix
        return sample

    def key_of_member(self, key: Tensor, number: int) -> Tensor:
        """Return the key of the sample with this number, which has its own statistics of BatchNorm."""
        return noise.of_member(key, number)

    def kl(self, key: Tensor) -> Tensor:
        """Return 0: there is no prior, and training leaves the KL out."""
        return torch.zeros((), device=key.device)

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check the shapes."""
        size = self.layout.numel
        known: dict[str, list[tuple[int, ...]]]
        known = {"mu": [(size,)], "squares": [(size,)], "average": [(size,), (0,)], "count": [()]}
        for name, shapes in known.items():
            if name in tensors and tuple(tensors[name].shape) not in shapes:
                raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}")
        found = tensors.get("differences")
        if found is not None and (found.dim() != 2 or found.shape[1] != size or len(found) > self._rank):
            raise ValueError(f"the differences have the shape {tuple(found.shape)}")
        return tensors

    def extra_repr(self) -> str:
        """Add the rank, or how many weights are collected."""
        state = f"rank {len(self.differences)}" if self.is_finished else f"{self.count.item()} collected, not finished"
        return f"{super().extra_repr()}, {state}"
