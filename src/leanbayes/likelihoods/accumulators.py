"""Running sums that turn the outputs of several samples into one prediction."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from leanbayes.likelihoods.predictive import RegressionPrediction


class Accumulator(Protocol):
    """Takes the network's outputs sample by sample, so that memory does not grow with the number of samples."""

    def update(self, output: Tensor) -> None:
        """Take in the output of one sample for the whole batch."""
        ...

    def finish(self, samples: int, outputs: Tensor | None) -> Any:
        """Return the distribution over all samples."""
        ...


class ProbabilityAccumulator:
    """Sums of probabilities and of their entropies."""

    def __init__(self, probs: Callable[[Tensor], Tensor], entropy: Callable[[Tensor], Tensor], kind: Any) -> None:
        self._probs, self._entropy, self._kind = probs, entropy, kind
        self._sums: tuple[Tensor, Tensor] | None = None

    def update(self, output: Tensor) -> None:
        """Add one sample."""
        probs = self._probs(output)
        entropy = self._entropy(probs)
        if self._sums is None:
            self._sums = probs, entropy
        else:
            self._sums = self._sums[0].add_(probs), self._sums[1].add_(entropy)

    def finish(self, samples: int, outputs: Tensor | None) -> Any:
        """Divide by the number of samples."""
        assert self._sums is not None
        return self._kind(samples=samples, outputs=outputs, probs=self._sums[0] / samples,
                          expected_entropy=self._sums[1] / samples)  # fmt: skip


class Running:
    """Mean of the samples so far, and the sum of their squared distances from it (Welford 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros(())

    def update(self, values: Tensor) -> None:
        """Add one sample."""
        self.count += 1
        change = values - self.mean
        self.mean = self.mean + change / self.count
        self.squares = self.squares + change * (values - self.mean)


class MomentAccumulator:
    """Running mean and variance of the outputs, and the mean of the noise variance."""

    def __init__(self, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._split = split
        self._outputs, self._noise = Running(), torch.zeros(())

    def update(self, output: Tensor) -> None:
        """Add one sample."""
        mean, noise = self._split(output)
        self._outputs.update(mean)
        self._noise = self._noise + noise

    def finish(self, samples: int, outputs: Tensor | None) -> RegressionPrediction:
        """Return mean and both variances; the epistemic one divides by the number of samples, as a mixture does."""
        found = self._outputs
        noise = (self._noise / found.count).expand_as(found.mean).clone()
        return RegressionPrediction(samples, outputs, found.mean, noise, found.squares / found.count)
