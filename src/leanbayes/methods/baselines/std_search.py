"""A posterior without training, as TFB (Shi et al. 2024) makes one for adapters: the largest std that the loss allows.

Every weight gets the std f·s, where s is 1 or the std of the weights of its layer. The factor f is the largest one
whose expected loss, E[-log p(y | x, w)] per observation, is at most a tolerance above the loss of the trained weights.
All factors see the same noise, in pairs ±ε, so the loss is a smooth function of f, and bisection finds where it crosses
the limit.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.core.network import call_with, evaluation_mode, output_tensor
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.after_training import AfterTraining
from leanbayes.methods.gaussian_settings import check_gaussian_settings, initial_posterior
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.curvature import labeled
from leanbayes.model.method import Training, register_method
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.priors import Normal

_SMALLEST, _START = 2.0**-24, 2.0**-7  # factors
_BISECTIONS = 6  # between factors f and 2f: the result is within 1.1 % of the crossing


@register_method("std-search")
@dataclass(frozen=True)
class StdSearch(AfterTraining):
    """Std search: the largest std of the weights of a trained network that raises the loss by at most a tolerance.

    It takes some twenty passes over a few batches, and no gradient, so it also fits quantized base models with adapters
    (`select="lora_A"`). The weights stay the means.

    Paper: Shi et al. (2024), "Training-Free Bayesianization for Low-Rank Adapters of Large Language Models".

    Attributes:
        tolerance: how much the expected loss may rise, in nats per observation.
        relative: whether the std of a weight is a fraction of the std of its layer's weights. If not, all weights have
            the same std.
        max_std: the largest std to try, in the same unit.
        draws: number of pairs of samples μ ± σε that estimate the loss, on each batch. In a pair the slope of the loss
            cancels.
        pretrain: train the plain network first. Use False for a trained network.
        rule: how the model predicts: sample, flipout, local, moments, adjoint or mean.
        samples: number of Monte Carlo samples of a prediction.
        seed: seed of the noise of the search.

    Example:
        >>> bnn = lb.bayesianize(trained, lb.StdSearch(tolerance=0.01), data=held_out_loader)
        >>> bnn = lb.bayesianize(peft_model, lb.StdSearch(), data=batches, select="lora_A")
    """

    tolerance: float = 0.01
    relative: bool = True
    max_std: float = 1.0
    draws: int = 4
    pretrain: bool = True
    rule: str = "sample"
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < math.inf:
            raise LeanBayesError(f"tolerance={self.tolerance} must be a positive number of nats.")
        if not 0 < self.max_std < math.inf:
            raise LeanBayesError(f"max_std={self.max_std} must be a positive number.")
        if self.draws < 1:
            raise LeanBayesError(f"draws={self.draws} must be at least 1.")
        check_gaussian_settings(Normal(), 1.0, self.rule, self.samples)

    def empty_posterior(self, layout: Layout, mean: Tensor, factor: float = 1.0) -> MeanFieldPosterior:
        """Make the posterior with one factor of all stds."""
        return initial_posterior(layout, mean, None, Normal(), factor, self.relative)

    def choose(self, bnn: BayesianModel, batches: Iterable[Any]) -> None:
        """Search the std on all of these batches."""
        self._search(bnn, list(labeled(bnn, batches)))

    def start(self, training: Training) -> None:
        """Search the std on the held-out data."""
        with training.autocast():
            self._search(training.model, list(labeled(training.model, training.held_out())))

    def _search(self, bnn: BayesianModel, batches: Sequence[tuple[Any, Tensor]]) -> None:
        if not batches:
            raise LeanBayesError("The search of the std needs data: pass batches (x, y), best held-out ones.")
        weights, mode = bnn.posterior.mean().detach().clone(), bnn.posterior.training
        limit = self._loss(bnn, batches, lambda generator: [weights]) + self.tolerance

        def fits(factor: float) -> bool:
            posterior = self.empty_posterior(bnn.layout, weights, factor)

            def pairs(generator: torch.Generator) -> Iterator[Tensor]:
                for _ in range(self.draws):
                    sample = posterior.sample(bnn.next_draw(generator).key)
                    yield from (sample, 2 * weights - sample)

            return self._loss(bnn, batches, pairs) <= limit

        low = min(_START, self.max_std)
        if fits(low):
            while 2 * low <= self.max_std and fits(2 * low):
                low *= 2
        else:
            while not fits(low):
                low /= 2
                if low < _SMALLEST:
                    raise LeanBayesError(
                        f"Even a std of {low:.1g} raises the loss by more than tolerance={self.tolerance}: increase it."
                    )
        ratio = 2.0
        for _ in range(_BISECTIONS):
            ratio = math.sqrt(ratio)
            if low * ratio <= self.max_std and fits(low * ratio):
                low *= ratio
        bnn.posterior = self.empty_posterior(bnn.layout, weights, low).train(mode)

    @torch.no_grad()
    def _loss(
        self,
        bnn: BayesianModel,
        batches: Sequence[tuple[Any, Tensor]],
        weights_of: Callable[[torch.Generator], Iterable[Tensor]],
    ) -> float:
        """Return the mean loss per observation over samples of the weights, infinite if it is not finite."""
        generator = torch.Generator().manual_seed(self.seed)
        total, count = 0.0, 0.0
        with evaluation_mode(bnn):
            for x, y in batches:
                for weights in weights_of(generator):
                    with bnn.holding(weights) as network:
                        output = output_tensor(call_with(network, x))
                    bnn.likelihood.check_shape(output, y)
                    nll = bnn.likelihood.nll(output, y)
                    total, count = total + float(nll.total), count + float(nll.observations)
        return total / count if math.isfinite(total) else math.inf
