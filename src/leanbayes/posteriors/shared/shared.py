"""The shared posterior: a codebook of few Gaussians, and the label of each weight's code (2DGBNN, Lin et al. 2025)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanbayes.core import gaussian, noise
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors.base import Posterior
from leanbayes.posteriors.shared.codes import Codes, blend_moments
from leanbayes.posteriors.shared.schemes import SCHEMES, Sampling
from leanbayes.priors import BoundPrior

_LABEL_TYPES = (torch.uint8, torch.int16, torch.int32)


class _Expand(torch.autograd.Function):
    """Give each weight the value of its code. The gradient of a code is the sum over its weights, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, labels: Tensor, order: Tensor | None, sizes: Tensor) -> Tensor:
        ctx.save_for_backward(labels, order, sizes)
        return values.index_select(0, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        labels, order, sizes = ctx.saved_tensors
        if order is None:
            return grad.new_zeros(len(sizes)).index_add_(0, labels, grad), None, None, None
        sums = torch.segment_reduce(grad.index_select(0, order), "sum", lengths=sizes, unsafe=True)
        return sums, None, None, None


class SharedPosterior(Posterior):
    """w_i ~ N(m_c, σ_c²), with c the label of weight i and σ = softplus(ρ). The KL counts a code once per weight.

    Gaussian codes come first, then deterministic ones. A weight with the label after the last code is exactly zero.
    A blended weight has the mean and the variance of a mixture of several codes.

    Args:
        layout: The place of each parameter in the flat vector.
        codes: The codebook.
        prior: The prior of the weights.
        sampling: How the weights of one code get their noise: "independent", "hierarchical" or "tied"
            (`leanbayes.posteriors.shared.schemes`).
        shared: False for a posterior that only holds the weights until `share` is called.
    """

    labels: Tensor
    blended: Tensor
    partners: Tensor
    factors: Tensor
    sizes_vary = True
    caches_moments = True

    def __init__(
        self,
        layout: Layout,
        codes: Codes,
        prior: BoundPrior,
        sampling: Sampling = "independent",
        shared: bool = True,
    ) -> None:
        super().__init__(layout)
        self.prior, self.sampling, self.scheme = prior, sampling, SCHEMES[sampling]
        self.factorized = self.scheme.factorized
        for name in ("labels", "blended", "partners", "factors"):
            self.register_buffer(name, torch.zeros(0))
        self._hold(codes)
        self.is_shared = shared

    @torch.no_grad()
    def share(self, codes: Codes) -> None:
        """Replace the current codebook."""
        self._hold(codes)
        self.is_shared = True

    def _hold(self, codes: Codes) -> None:
        self.mu = nn.Parameter(codes.mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus(codes.std.to(codes.mean)), requires_grad=len(codes.std) > 0)
        self.labels = codes.labels.to(torch.int32)
        self.blended, self.partners = codes.blended, codes.partners
        alpha = codes.alpha.to(codes.mean).clamp_min(torch.finfo(codes.mean.dtype).tiny)
        self.logits = nn.Parameter(alpha.log(), requires_grad=len(alpha) > 0)
        self.factors = self.scheme.factors(codes.covariance).to(codes.mean)
        self._cache_counts()

    def _cache_counts(self) -> None:
        """Compute what follows from the labels, which do not change: a compiled graph cannot read them."""
        labels = self.labels
        self._order = labels.argsort(stable=True) if labels.is_cuda else None  # a CPU sums in order anyway
        self._sizes = torch.bincount(labels, minlength=len(self.mu) + 1)
        self._counts = self._sizes - torch.bincount(labels[self.blended], minlength=len(self.mu) + 1)
        self._zeros = int(self._sizes[-1])
        slots = self.layout.slots_of((labels < len(self.rho)).nonzero()[:, 0])
        random = torch.bincount(slots, minlength=len(self.layout)).tolist()
        self._random, self._random_weights = [count > 0 for count in random], sum(random)

    def _apply(self, fn: Any, recurse: bool = True) -> "SharedPosterior":
        before = self.labels.device
        super()._apply(fn, recurse)
        if self.labels.device != before:
            self._cache_counts()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.is_shared = True
        self._cache_counts()

    def random_slots(self) -> Sequence[bool]:
        """Return for each slot whether it has a weight with a Gaussian code."""
        return self._random

    @property
    def random_weights(self) -> int:
        """The number of weights with a Gaussian code."""
        return self._random_weights

    def _check_shared(self) -> None:
        if not self.is_shared:
            raise LeanBayesError(
                "The codes of the weights are not chosen yet: pass lb.bayesianize(..., data=batches), or call "
                "method.start(training) first."
            )

    # -- from codes to weights ----------------------------------------------------------------------------------------

    def counts(self) -> Tensor:
        """Return the number of weights of each code, without blended ones. The last entry counts the zeros."""
        return self._counts

    def expand(self, values: Tensor) -> Tensor:
        """Return the value of each weight's code. Zeros, and codes beyond the last value, get 0."""
        padded = F.pad(values, (0, len(self.mu) + 1 - len(values)))
        if noise.in_transform():
            return padded.index_select(0, self.labels)
        return _Expand.apply(padded, self.labels, self._order, self._sizes)

    def blends(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the blended weights."""
        return blend_moments(self.mu[self.partners], self._weight_stds()[self.partners], self.logits.softmax(1))

    def _weight_stds(self) -> Tensor:
        """Return the std of the weights of each Gaussian code."""
        return self.scheme.weight_stds(F.softplus(self.rho), self.factors)

    # -- moments and samples ------------------------------------------------------------------------------------------

    def codes_std(self) -> Tensor:
        """Return σ = softplus(ρ) of the codes, 0 for deterministic ones."""
        return F.pad(F.softplus(self.rho), (0, len(self.mu) - len(self.rho)))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and std of each weight."""
        self._check_shared()
        mean, std = self.expand(self.mu), self.expand(self._weight_stds())
        if not len(self.blended):
            return mean, std
        center, variance = self.blends()
        return mean.index_copy(0, self.blended, center), std.index_copy(0, self.blended, variance.sqrt())

    def mean(self) -> Tensor:
        """Return the mean of each weight."""
        mean = self.expand(self.mu)
        return mean.index_copy(0, self.blended, self.blends()[0]) if len(self.blended) else mean

    def variance(self) -> Tensor:
        """Return the variance of each weight."""
        return self.moments()[1].square()

    def sample(self, key: Tensor) -> Tensor:
        """Return one sample of all weights, by the sampling scheme."""
        self._check_shared()
        return self.scheme.sample(self, key)

    def perturbation(self, key: Tensor) -> Tensor:
        """Return a sample minus the mean."""
        self._check_shared()
        return self.scheme.perturbation(self, key)

    # -- the KL -------------------------------------------------------------------------------------------------------

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior, else Monte Carlo."""
        return "monte-carlo" if self.prior.normal_terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Return Σ_c n_c KL(N(m_c, σ_c²) ‖ prior) over Gaussian codes with n_c weights, plus the KL of the blends.

        Equation 10 of the paper leaves out n_c.
        """
        self._check_shared()
        terms = self.prior.normal_terms()
        if terms is None or terms.loc is not None or isinstance(terms.scale, Tensor):
            return self._kl_of_weights(key)
        mean, std = self.mu[: len(self.rho)] / terms.scale, self._weight_stds() / terms.scale
        each = 0.5 * (mean.square() + std.square() - 1) - std.log()
        counts = self.counts()[: len(self.rho)]
        kl = torch.dot(each, self.scheme.multiplicities(counts).to(each))
        if not len(self.blended):
            return kl
        center, variance = self.blends()
        return kl + gaussian.normal_kl(center, variance.sqrt(), terms)

    def _kl_of_weights(self, key: Tensor) -> Tensor:
        """Sum over single weights, for a prior that differs between them or has no closed form."""
        if not self.factorized:
            raise LeanBayesError(f"sampling={self.sampling!r} needs one prior for all weights: use lb.Normal(0.1).")
        index = (self.labels < len(self.rho)).nonzero()[:, 0]
        mean, std = (part.index_select(0, index) for part in self.moments())
        terms = self.prior.normal_terms(index)
        if terms is not None:
            return gaussian.normal_kl(mean, std, terms)
        weights = self.sample(key).index_select(0, index)
        return gaussian.log_density(weights - mean, std) - self.prior.log_prob(weights, index)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ and the logits of the blends."""
        yield from (parameter for parameter in (self.rho, self.logits) if len(parameter))

    def extra_repr(self) -> str:
        """Add the density, the number of codes, the sampling scheme and the prior."""
        if not self.is_shared:
            return f"{self.layout.numel:,} weights, codes not chosen yet, prior={self.prior}"
        density = f", density={1 - self._zeros / self.layout.numel:.3g}" if self._zeros else ""
        codes = f"{len(self.mu):,} codes, sampling={self.sampling!r}, prior={self.prior}"
        return f"{super().extra_repr()}{density}, {codes}"

    # -- files --------------------------------------------------------------------------------------------------------

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the labels to the smallest integer type that holds them."""
        self._check_shared()
        narrow = next(dtype for dtype in _LABEL_TYPES if len(self.mu) <= torch.iinfo(dtype).max)
        return {**tensors, "labels": tensors["labels"].to(narrow)}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the labels back, and check that all labels and partners are valid codes."""
        if not {"mu", "rho", "logits", "labels", "blended", "partners", "factors"} <= tensors.keys():
            return tensors
        codes, gaussians = tensors["mu"].numel(), tensors["rho"].numel()
        shapes: dict[str, tuple[int, ...]] = {
            "mu": (codes,),
            "rho": (min(gaussians, codes),),
            "labels": (self.layout.numel,),
            "blended": (len(tensors["logits"]),),
            "partners": (*tensors["logits"].shape,),
            "factors": (gaussians if self.scheme.has_factors else 0, 3),
        }
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, not {shape}")
        limits = {"labels": codes, "partners": gaussians - 1, "blended": self.layout.numel - 1}
        for name, largest in limits.items():
            numbers = tensors[name]
            if numbers.is_floating_point():
                raise ValueError(f"{name} has values that are not integers")
            if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) > largest):
                raise ValueError(f"{name} has values outside 0 to {largest}")
        if not tensors["blended"].diff().gt(0).all():
            raise ValueError("blended does not increase")
        return {**tensors, "labels": tensors["labels"].to(torch.int32)}
