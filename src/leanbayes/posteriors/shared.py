"""A shared posterior: a codebook of few Gaussians, and for every weight the number of its own (2DGBNN, Lin et al.).

An outlier is a code of its own. Codes without a spread, points, come after those with one, and a weight that is surely
zero has the number after the last code. A blended weight takes the mean and the variance of a mix of several codes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanbayes import gaussian, noise
from leanbayes.compression.codes import Codes
from leanbayes.compression.mixture import blended
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior

Sampling = Literal["independent", "hierarchical", "tied"]
_LABELS = (torch.uint8, torch.int16, torch.int32)
_MEAN, _STD, _MIX = range(1 << 29, (1 << 29) + 3)  # streams of noise that no rule takes


class _Spread(torch.autograd.Function):
    """Give every weight the value of its code; the gradient of a code is the sum over its weights, in one order."""

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


def _factors(covariance: Tensor) -> Tensor:
    """Roots of 2×2 covariances: (a, b, c) of each, with (a·z₁, b·z₁ + c·z₂) a draw."""
    xx, xy, yy = covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]
    first = xx.clamp_min(0).sqrt()
    across = torch.where(first > 0, xy / first, 0.0)
    return torch.stack([first, across, (yy - across.square()).clamp_min(0).sqrt()], 1)


class SharedPosterior(Posterior):
    """w_i ~ N(m_c, σ_c²) with c the label of i and σ = softplus(ρ); the KL counts a code once for each of its weights.

    sampling: independent gives each weight noise of its own. hierarchical first draws the weight's own (μ, σ) from the
    Gaussian of its code's members, N((m_c, σ_c), Σ_c), so that its variance is σ_c² + tr Σ_c; its KL is that of the
    Gaussian with this variance, which is no more than the true one. tied draws each code once for all its weights,
    which then are one Bayesian number: the KL counts it once. A blended weight always has noise of its own.
    """

    labels: Tensor
    blended: Tensor
    partners: Tensor
    factors: Tensor
    sizes_vary = True

    def __init__(
        self,
        layout: Layout,
        mean: Tensor,
        std: Tensor,
        labels: Tensor,
        prior: BoundPrior,
        blended: Tensor | None = None,
        partners: Tensor | None = None,
        alpha: Tensor | None = None,
        covariance: Tensor | None = None,
        sampling: Sampling = "independent",
    ) -> None:
        """Take means of the codes, stds of the first of them, and a label for each weight; len(mean) is that of a zero.

        blended: positions of weights, in increasing order, that take, in place of their label's, a mix of the codes
        `partners` (e, B), which have a std, by the shares `alpha` (e, B). covariance: of (μ, σ) among the members of
        each code with a std (G, 2, 2), for hierarchical sampling.
        """
        super().__init__(layout)
        self.prior, self.sampling, self.is_shared = prior, sampling, True
        for name in ("labels", "blended", "partners", "factors"):
            self.register_buffer(name, torch.zeros(0))
        none = torch.zeros(0, dtype=torch.int64, device=mean.device)
        self._hold(
            Codes(
                mean,
                std,
                mean.new_zeros(len(std), 2, 2) if covariance is None else covariance,
                labels,
                none if blended is None else blended,
                none.view(0, 1) if partners is None else partners,
                mean.new_zeros(0, 1) if alpha is None else alpha,
            )
        )

    @classmethod
    def of(
        cls, layout: Layout, codes: Codes, prior: BoundPrior, sampling: Sampling = "independent", shared: bool = True
    ) -> "SharedPosterior":
        """Make it of a codebook; shared=False: one that only keeps the weights until `share` is called."""
        made = cls(layout, codes.mean, codes.std, codes.labels, prior, sampling=sampling)
        made._hold(codes)
        made.is_shared = shared
        return made

    @torch.no_grad()
    def share(self, codes: Codes) -> None:
        """Take this codebook in place of what it holds."""
        self._hold(codes)
        self.is_shared = True

    def _hold(self, codes: Codes) -> None:
        self.mu = nn.Parameter(codes.mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus(codes.std.to(codes.mean)), requires_grad=len(codes.std) > 0)
        self.labels = codes.labels.to(torch.int32)
        self.blended, self.partners = codes.blended, codes.partners
        shares = codes.alpha.to(codes.mean).clamp_min(torch.finfo(codes.mean.dtype).tiny)
        self.logits = nn.Parameter(shares.log(), requires_grad=len(shares) > 0)
        covariance = codes.covariance if self.sampling == "hierarchical" else codes.covariance[:0]
        self.factors = _factors(covariance).to(codes.mean)
        self._note()

    def _note(self) -> None:
        """Note what follows from the labels, which stay: a compiled graph cannot ask them."""
        labels = self.labels
        self._order = labels.argsort(stable=True) if labels.is_cuda else None  # a CPU adds in order anyway
        self._sizes = torch.bincount(labels, minlength=len(self.mu) + 1)
        self._counts = self._sizes - torch.bincount(labels[self.blended], minlength=len(self.mu) + 1)
        slots = self.layout.slots_of((labels < len(self.rho)).nonzero()[:, 0])
        random = torch.bincount(slots, minlength=len(self.layout)).tolist()
        self._random, self._random_weights = [count > 0 for count in random], sum(random)

    def _apply(self, fn: Any, recurse: bool = True) -> "SharedPosterior":
        before = self.labels.device
        super()._apply(fn, recurse)
        if self.labels.device != before:
            self._note()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.is_shared = True
        self._note()

    def random_slots(self) -> Sequence[bool]:
        """Whether each slot has a weight that is neither a point nor zero."""
        return self._random

    @property
    def random_weights(self) -> int:
        """How many weights are neither points nor zero."""
        return self._random_weights

    def _check_shared(self) -> None:
        if not self.is_shared:
            raise LeanBayesError(
                "Which weights share is not chosen yet: pass lb.bayesianize(..., data=batches), or call "
                "method.start(training) first."
            )

    # -- from codes to weights ----------------------------------------------------------------------------------------

    def counts(self) -> Tensor:
        """How many weights each code has, blended ones left out; the last number is that of zeros."""
        return self._counts

    def spread(self, values: Tensor) -> Tensor:
        """Give every weight its code's value; zeros, and codes beyond the last value, have 0."""
        padded = F.pad(values, (0, len(self.mu) + 1 - len(values)))
        return _Spread.apply(padded, self.labels, self._order, self._sizes)

    def _mixes(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the blended weights."""
        return blended(self.mu[self.partners], self._stds()[self.partners], self.logits.softmax(1))

    def _stds(self) -> Tensor:
        """Return the std of a weight that has a code, for each code with a spread."""
        own = F.softplus(self.rho)
        return own if self.sampling != "hierarchical" else (own.square() + self.factors.square().sum(1)).sqrt()

    # -- what it is ---------------------------------------------------------------------------------------------------

    def codes_std(self) -> Tensor:
        """Return σ = softplus(ρ) of the codes, 0 for points."""
        return F.pad(F.softplus(self.rho), (0, len(self.mu) - len(self.rho)))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and std of every weight."""
        self._check_shared()
        mean, std = self.spread(self.mu), self.spread(self._stds())
        if not len(self.blended):
            return mean, std
        centre, variance = self._mixes()
        return mean.index_copy(0, self.blended, centre), std.index_copy(0, self.blended, variance.sqrt())

    def mean(self) -> Tensor:
        """Return the mean of every weight."""
        mean = self.spread(self.mu)
        return mean.index_copy(0, self.blended, self._mixes()[0]) if len(self.blended) else mean

    def variance(self) -> Tensor:
        """Return the variance of every weight."""
        return self.moments()[1].square()

    def sample(self, key: Tensor) -> Tensor:
        """Draw m + σ·ε, with an ε for each weight, or for each code."""
        if self.sampling == "tied":
            return self._tied(key)
        mean, std = self.moments()
        if self.sampling == "hierarchical":
            return mean + self._hierarchical(std, key)
        return torch.addcmul(mean, std, noise.normal(mean, key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Draw σ·ε."""
        if self.sampling == "tied":
            return self._tied(key) - self.mean()
        std = self.moments()[1]
        return self._hierarchical(std, key) if self.sampling == "hierarchical" else std * noise.normal(std, key)

    def _hierarchical(self, std: Tensor, key: Tensor) -> Tensor:
        """Draw δμ + (σ + δσ)·ε with (δμ, δσ) ~ N(0, Σ) of the code; std: of the weights, for the blended ones."""
        width, *factors = (self.spread(part) for part in (F.softplus(self.rho), *self.factors.unbind(1)))
        if len(self.blended):
            width = width.index_copy(0, self.blended, std[self.blended])
            factors = [factor.index_fill(0, self.blended, 0.0) for factor in factors]
        first, across, second = factors
        own_mean, own_std = noise.normal(std, key, _MEAN), noise.normal(std, key, _STD)
        return first * own_mean + (width + across * own_mean + second * own_std) * noise.normal(std, key)

    def _tied(self, key: Tensor) -> Tensor:
        self._check_shared()
        weights = self.spread(torch.addcmul(self.mu, self.codes_std(), noise.normal(self.mu, key)))
        if not len(self.blended):
            return weights
        centre, variance = self._mixes()
        mixes = torch.addcmul(centre, variance.sqrt(), noise.normal(centre, key, _MIX))
        return weights.index_copy(0, self.blended, mixes)

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior."""
        return "monte-carlo" if self.prior.normal_terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Σ_c n_c KL(N(m_c, σ_c²) ‖ prior), and that of the blends; equation 10 forgets the n_c. Points have none."""
        self._check_shared()
        terms = self.prior.normal_terms()
        if terms is None or terms.loc is not None or isinstance(terms.scale, Tensor):
            return self._kl_of_weights(key)
        mean, std = self.mu[: len(self.rho)] / terms.scale, self._stds() / terms.scale
        each = 0.5 * (mean.square() + std.square() - 1) - std.log()
        counts = self.counts()[: len(self.rho)]
        kl = torch.dot(each, (counts.clamp_max(1) if self.sampling == "tied" else counts).to(each))
        if not len(self.blended):
            return kl
        centre, variance = self._mixes()
        return kl + gaussian.normal_kl(centre, variance.sqrt(), terms)

    def _kl_of_weights(self, key: Tensor) -> Tensor:
        """Sum over the single weights, where the prior differs from one to the next or has no closed form."""
        if self.sampling == "tied":
            raise LeanBayesError("A tied code has one prior for all its weights: use a prior such as lb.Normal(0.1).")
        index = (self.labels < len(self.rho)).nonzero()[:, 0]
        mean, std = (part.index_select(0, index) for part in self.moments())
        terms = self.prior.normal_terms(index)
        if terms is not None:
            return gaussian.normal_kl(mean, std, terms)
        weights = self.sample(key).index_select(0, index)
        return gaussian.log_density(weights - mean, std) - self.prior.log_prob(weights, index)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ, and the shares of blends, which want an adaptive optimiser too."""
        yield from (parameter for parameter in (self.rho, self.logits) if len(parameter))

    # -- files --------------------------------------------------------------------------------------------------------

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write labels in as few bytes as their number needs."""
        self._check_shared()
        narrow = next(dtype for dtype in _LABELS if len(self.mu) <= torch.iinfo(dtype).max)
        return {**tensors, "labels": tensors["labels"].to(narrow)}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check that every label and partner is a code."""
        if not {"mu", "rho", "logits", "labels", "blended", "partners", "factors"} <= tensors.keys():
            return tensors
        codes, spreads = tensors["mu"].numel(), tensors["rho"].numel()
        shapes: dict[str, tuple[int, ...]] = {
            "mu": (codes,),
            "rho": (min(spreads, codes),),
            "labels": (self.layout.numel,),
            "blended": (len(tensors["logits"]),),
            "partners": (*tensors["logits"].shape,),
            "factors": (spreads if self.sampling == "hierarchical" else 0, 3),
        }
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, not {shape}")
        for name, most in (("labels", codes), ("partners", spreads - 1), ("blended", self.layout.numel - 1)):
            numbers = tensors[name]
            if numbers.is_floating_point():
                raise ValueError(f"{name} are no whole numbers")
            if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) > most):
                raise ValueError(f"{name} has numbers beyond {most}")
        if not tensors["blended"].diff().gt(0).all():
            raise ValueError("blended positions are out of order")
        return {**tensors, "labels": tensors["labels"].to(torch.int32)}
