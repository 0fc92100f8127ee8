"""A partial posterior: every weight has a mean, and only those at some positions of the flat vector have a spread.

The others are points, the same in every draw. Spreads, and what an optimiser knows of them, are as many as there are
Bayesian weights: (1 + rate)·θ numbers in all (PBN).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes import gaussian
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior
from leanbayes.sparsity import positions

KLSum = Literal["sum", "mean"]


class PartialPosterior(Posterior):
    """w_i ~ N(μ_i, softplus(ρ_i)²) at the chosen positions, and w_i = μ_i elsewhere; the KL is that of the former."""

    index: Tensor
    sizes_vary = True

    def __init__(
        self,
        layout: Layout,
        mean: Tensor,
        std: Tensor,
        prior: BoundPrior,
        index: Tensor | None = None,
        kl: KLSum = "sum",
    ) -> None:
        """Take means and stds of all weights; index: the chosen positions in increasing order, None to `choose` later.

        Until then there is a mean, and nothing else. kl: "mean" divides it by the number of Bayesian weights of each
        slot, as the authors of PBN do, in place of a plain sum.
        """
        super().__init__(layout)
        self.kl_is_mean = kl == "mean"
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(mean.new_zeros(0), requires_grad=False)
        self.prior = prior
        small = layout.numel <= torch.iinfo(torch.int32).max
        dtype = torch.int32 if small else torch.int64
        self.register_buffer("index", torch.zeros(0, dtype=dtype, device=mean.device))
        self._stds: Tensor | None = std
        self._random = [False] * len(layout)
        if index is not None:
            self.choose(index)

    @property
    def is_chosen(self) -> bool:
        """Whether it is known which weights are Bayesian."""
        return self._stds is None

    @torch.no_grad()
    def choose(self, index: Tensor) -> None:
        """Give the weights at these positions, in increasing order, the stds that they were to have."""
        assert self._stds is not None
        self.index = index.to(self.index.dtype)
        std = self._stds.to(self.mu).index_select(0, self.index)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std), requires_grad=len(index) > 0)
        self.prior.keep(self.index)
        self._stds = None
        self._find_random()

    def _find_random(self) -> None:
        """Note which slots have a Bayesian weight; a compiled graph cannot ask the tensor."""
        counts = torch.bincount(self.layout.slots_of(self.index), minlength=len(self.layout)).tolist()
        self._random = [count > 0 for count in counts]

    def random_slots(self) -> Sequence[bool]:
        """Whether each slot has a Bayesian weight."""
        return self._random

    @property
    def random_weights(self) -> int:
        """How many weights are Bayesian."""
        return len(self.index)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._stds = None
        self._find_random()

    # -- what it is ---------------------------------------------------------------------------------------------------

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def std(self) -> Tensor:
        """Return σ = softplus(ρ) of the Bayesian weights."""
        return F.softplus(self._chosen_rho())

    def variance(self) -> Tensor:
        """Return σ², 0 for points."""
        return self._spread(self.std().square())

    def sample(self, key: Tensor) -> Tensor:
        """Draw μ + σ·ε; where there is no σ, that is μ to the last bit."""
        return self.mu.index_add(0, self.index, self._noise(key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Draw σ·ε, 0 for points."""
        return self._spread(self._noise(key))

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Draw, and the KL from the same pass over the Bayesian weights."""
        values, kl = self._noise_and_kl(key)
        return self.mu.index_add(0, self.index, values), kl

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Perturbation, and the KL from the same pass over the Bayesian weights."""
        values, kl = self._noise_and_kl(key)
        return self._spread(values), kl

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Variance and KL in one pass over the Bayesian weights."""
        terms = self._terms()
        if terms is None or self.kl_is_mean:
            return super().variance_and_kl(key)
        values, kl = gaussian.variance_and_kl(self._means(), self._chosen_rho(), terms)
        return self._spread(values), kl

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior."""
        return "monte-carlo" if self._terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """KL(q ‖ prior) of the Bayesian weights, or log q(w) - log p(w) at one draw where there is no closed form."""
        terms = self._terms()
        if terms is None:
            return self._log_ratio(self._noise(key))
        if self.kl_is_mean:
            return self._mean_kl(terms)
        return gaussian.normal_kl(self._means(), self.std(), terms)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    # -- of the Bayesian weights --------------------------------------------------------------------------------------

    def _chosen_rho(self) -> nn.Parameter:
        if not self.is_chosen:
            raise LeanBayesError(
                "Which weights are Bayesian is not chosen yet: pass lb.bayesianize(..., data=batches), or call "
                "method.start(training) first."
            )
        return self.rho

    def _means(self) -> Tensor:
        return self.mu.index_select(0, self.index)

    def _terms(self) -> gaussian.NormalTerms | None:
        return self.prior.normal_terms(self.index)

    def _spread(self, values: Tensor) -> Tensor:
        """Put one number a Bayesian weight at its position in the flat vector of zeros."""
        return values.new_zeros(self.layout.numel).index_add(0, self.index, values)

    def _noise(self, key: Tensor) -> Tensor:
        rho = self._chosen_rho()
        return gaussian.draw(torch.zeros_like(rho), rho, key)

    def _noise_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Noise, and the KL: that of a draw around 0, and then what the distance of μ adds."""
        rho, terms = self._chosen_rho(), self._terms()
        if terms is None:
            values = self._noise(key)
            return values, self._log_ratio(values)
        if self.kl_is_mean:
            return self._noise(key), self._mean_kl(terms)
        around_zero = gaussian.NormalTerms(None, terms.scale)
        values, kl = gaussian.draw_and_kl(torch.zeros_like(rho), rho, key, around_zero)
        return values, kl + gaussian.mean_kl(self._means(), terms)

    def _mean_kl(self, terms: gaussian.NormalTerms) -> Tensor:
        """Sum over the slots of the mean KL of a Bayesian weight there."""
        means, std = self._means(), self.std()
        ratio = (std / terms.scale).square()
        distance = ((means if terms.loc is None else means - terms.loc) / terms.scale).square()
        slots = self.layout.slots_of(self.index)
        counts = torch.zeros(len(self.layout), dtype=std.dtype, device=std.device)
        counts = counts.index_add(0, slots, torch.ones_like(std))
        return ((0.5 * (ratio + distance - 1 - ratio.log())) / counts[slots]).sum()

    def _log_ratio(self, noise: Tensor) -> Tensor:
        return gaussian.log_density(noise, self.std()) - self.prior.log_prob(self._means() + noise, self.index)

    # -- files --------------------------------------------------------------------------------------------------------

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the positions as the gaps between them."""
        self._chosen_rho()
        return {**tensors, "index": positions.encode(tensors["index"])}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read the positions, which must be as many as there are spreads."""
        if not {"index", "mu", "rho"} <= tensors.keys():
            return tensors
        count = tensors["rho"].numel()
        for name, expected in (("mu", self.layout.numel), ("rho", count), ("prior.loc", count)):
            if name in tensors and tensors[name].shape != (expected,):
                raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, not {(expected,)}")
        index = positions.decode(tensors["index"], count, self.layout.numel)
        return {**tensors, "index": index.to(self.index.dtype)}
