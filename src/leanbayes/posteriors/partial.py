"""The partial posterior of PBN: every weight has a mean, and only the weights at chosen positions have a std.

The other weights are deterministic. Stds, and their optimizer state, exist for the Bayesian weights only: (1 + rate)·θ
numbers in total.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.priors import BoundPrior

KLSum = Literal["sum", "mean"]


class PartialPosterior(Posterior):
    """w_i ~ N(μ_i, softplus(ρ_i)²) at the chosen positions, and w_i = μ_i elsewhere. The KL is that of the former.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        std: Std that each weight gets if it is chosen.
        prior: The prior of the weights.
        index: The chosen positions in increasing order. None to call `choose` later; until then only `mean` works.
        kl: "sum", or "mean" to divide the KL by the number of Bayesian weights of each slot, as the authors of PBN do.
    """

    index: Tensor
    sizes_vary = True
    caches_moments = True

    def __init__(
        self,
        layout: Layout,
        mean: Tensor,
        std: Tensor,
        prior: BoundPrior,
        index: Tensor | None = None,
        kl: KLSum = "sum",
    ) -> None:
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
        """Whether the Bayesian weights are chosen."""
        return self._stds is None

    @torch.no_grad()
    def choose(self, index: Tensor) -> None:
        """Make the weights at these positions, in increasing order, Bayesian."""
        assert self._stds is not None
        self.index = index.to(self.index.dtype)
        std = self._stds.to(self.mu).index_select(0, self.index)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std), requires_grad=len(index) > 0)
        self.prior.keep(self.index)
        self._stds = None
        self._cache_random_slots()

    def _cache_random_slots(self) -> None:
        """Find the slots with a Bayesian weight; a compiled graph cannot read the index."""
        counts = torch.bincount(self.layout.slots_of(self.index), minlength=len(self.layout)).tolist()
        self._random = [count > 0 for count in counts]

    def random_slots(self) -> Sequence[bool]:
        """Return for each slot whether it has a Bayesian weight."""
        return self._random

    @property
    def random_weights(self) -> int:
        """The number of Bayesian weights."""
        return len(self.index)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._stds = None
        self._cache_random_slots()

    # -- moments, samples and the KL ----------------------------------------------------------------------------------

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def std(self) -> Tensor:
        """Return σ = softplus(ρ) of the Bayesian weights."""
        return F.softplus(self._chosen_rho())

    def variance(self) -> Tensor:
        """Return σ², 0 for deterministic weights."""
        return self._scatter(self.std().square())

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + σ·ε, which is μ bit for bit for deterministic weights."""
        return self.mu.index_add(0, self.index, self._noise(key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Return σ·ε, 0 for deterministic weights."""
        return self._scatter(self._noise(key))

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample and the KL, from one pass over the Bayesian weights."""
        values, kl = self._noise_and_kl(key)
        return self.mu.index_add(0, self.index, values), kl

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return σ·ε and the KL, from one pass over the Bayesian weights."""
        values, kl = self._noise_and_kl(key)
        return self._scatter(values), kl

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variance and the KL, from one pass over the Bayesian weights."""
        terms = self._terms()
        if terms is None or self.kl_is_mean:
            return super().variance_and_kl(key)
        values, kl = gaussian.variance_and_kl(self._means(), self._chosen_rho(), terms)
        return self._scatter(values), kl

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior, else Monte Carlo."""
        return "monte-carlo" if self._terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior) of the Bayesian weights, or log q(w) - log p(w) at one sample without a closed form."""
        terms = self._terms()
        if terms is None:
            return self._log_ratio(self._noise(key))
        if self.kl_is_mean:
            return self._mean_kl(terms)
        return gaussian.normal_kl(self._means(), self.std(), terms)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    def diagonal_gaussian(self) -> DiagonalGaussian | None:
        """Return μ of all weights, and ρ and the prior of the Bayesian ones, if the prior is Gaussian."""
        terms = self._terms()
        return None if terms is None or self.kl_is_mean else DiagonalGaussian(self.mu, self.rho, terms, self.index)

    def extra_repr(self) -> str:
        """Add the prior, or say that no weights are chosen yet."""
        waiting = f"{self.layout.numel:,} weights, Bayesian weights not chosen yet"
        return f"{super().extra_repr() if self.is_chosen else waiting}, prior={self.prior}"

    # -- the Bayesian weights -----------------------------------------------------------------------------------------

    def _chosen_rho(self) -> nn.Parameter:
        if not self.is_chosen:
            raise LeanBayesError(
                "The Bayesian weights are not chosen yet: pass lb.bayesianize(..., data=batches), or call "
                "method.start(training) first."
            )
        return self.rho

    def _means(self) -> Tensor:
        return self.mu.index_select(0, self.index)

    def _terms(self) -> gaussian.NormalTerms | None:
        return self.prior.normal_terms(self.index)

    def _scatter(self, values: Tensor) -> Tensor:
        """Return a flat vector with one value per Bayesian weight at its position, and zeros elsewhere."""
        return values.new_zeros(self.layout.numel).index_add(0, self.index, values)

    def _noise(self, key: Tensor) -> Tensor:
        rho = self._chosen_rho()
        return gaussian.draw(torch.zeros_like(rho), rho, key)

    def _noise_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return σ·ε and the KL: that of a zero mean, plus the term of μ."""
        rho, terms = self._chosen_rho(), self._terms()
        if terms is None:
            values = self._noise(key)
            return values, self._log_ratio(values)
        if self.kl_is_mean:
            return self._noise(key), self._mean_kl(terms)
        zero_mean = gaussian.NormalTerms(None, terms.scale)
        values, kl = gaussian.draw_and_kl(torch.zeros_like(rho), rho, key, zero_mean)
        return values, kl + gaussian.mean_kl(self._means(), terms)

    def _mean_kl(self, terms: gaussian.NormalTerms) -> Tensor:
        """Return the mean KL of the Bayesian weights of each slot, summed over the slots."""
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
        """Encode the positions by their gaps."""
        self._chosen_rho()
        return {**tensors, "index": positions.encode(tensors["index"])}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the positions, one per std."""
        if not {"index", "mu", "rho"} <= tensors.keys():
            return tensors
        count = tensors["rho"].numel()
        for name, expected in (
            ("mu", self.layout.numel),
            ("rho", count),
            ("prior.loc", count),
            ("prior.scales", count),
        ):
            if name in tensors and tensors[name].shape != (expected,):
                raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, not {(expected,)}")
        index = positions.decode(tensors["index"], count, self.layout.numel)
        return {**tensors, "index": index.to(self.index.dtype)}
