"""A shared posterior: a codebook of few Gaussians, and for every weight the number of its own (2DGBNN, Lin et al.).

An outlier is a code of its own. A weight that is surely zero has the number after the last code. A blended weight takes
the mean and the variance of a mix of several codes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanbayes import gaussian, noise
from leanbayes.compression.mixture import blended
from leanbayes.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior


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


class SharedPosterior(Posterior):
    """w_i ~ N(m_c, softplus(ρ_c)²) with c = label of i, independent for each weight; the KL counts a code n_c times."""

    labels: Tensor
    blended: Tensor
    partners: Tensor
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
    ) -> None:
        """Take means and stds of the codes, and a label for each weight; len(mean) is the label of a zero.

        blended: positions of weights that take, in place of their label's, a mix of the codes `partners` (e, B) by the
        shares `alpha` (e, B).
        """
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std))
        self.prior = prior
        none = labels.new_zeros(0)
        self.register_buffer("labels", labels.to(torch.int32))
        self.register_buffer("blended", none if blended is None else blended)
        self.register_buffer("partners", none.view(0, 1) if partners is None else partners)
        shares = mean.new_zeros(0, 1) if alpha is None else alpha.to(mean)
        self.logits = nn.Parameter(shares.clamp_min(torch.finfo(mean.dtype).tiny).log())
        self._known: tuple[Tensor, int, Tensor | None, Tensor] | None = None  # labels, version, their order and counts

    # -- from codes to weights ----------------------------------------------------------------------------------------

    def counts(self) -> Tensor:
        """How many weights each code has, blended ones left out; the last number is that of zeros."""
        return self._sorted()[1] - self._sizes(self.labels[self.blended])

    def _sizes(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels, minlength=len(self.mu) + 1)

    def _sorted(self) -> tuple[Tensor | None, Tensor]:
        """Weights in the order of their codes, and how many each has; kept until labels change."""
        labels, version = self.labels, self.labels._version
        if self._known is None or self._known[0] is not labels or self._known[1] != version:
            order = labels.argsort(stable=True) if labels.is_cuda else None  # a CPU adds in order anyway
            self._known = (labels, version, order, self._sizes(labels))
        return self._known[2], self._known[3]

    def spread(self, values: Tensor) -> Tensor:
        """Give every weight its code's value, zeros 0."""
        return _Spread.apply(F.pad(values, (0, 1)), self.labels, *self._sorted())

    def _mixes(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the blended weights."""
        return blended(self.mu[self.partners], self.codes_std()[self.partners], self.logits.softmax(1))

    # -- what it is ---------------------------------------------------------------------------------------------------

    def codes_std(self) -> Tensor:
        """Return σ = softplus(ρ) of the codes."""
        return F.softplus(self.rho)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and std of every weight."""
        mean, std = self.spread(self.mu), self.spread(self.codes_std())
        if not len(self.blended):
            return mean, std
        centre, variance = self._mixes()
        return mean.index_copy(0, self.blended, centre), std.index_copy(0, self.blended, variance.sqrt())

    def mean(self) -> Tensor:
        """Return the mean of every weight."""
        return self.moments()[0]

    def variance(self) -> Tensor:
        """Return the variance of every weight."""
        return self.moments()[1].square()

    def sample(self, key: Tensor) -> Tensor:
        """Draw m + σ·ε, with an ε for each weight."""
        mean, std = self.moments()
        return torch.addcmul(mean, std, noise.normal(mean, key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Draw σ·ε."""
        std = self.moments()[1]
        return std * noise.normal(std, key)

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior."""
        return "monte-carlo" if self.prior.normal_terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Σ_c n_c KL(N(m_c, σ_c²) ‖ prior), and that of the blends; equation 10 forgets the n_c. Zeros have none."""
        terms = self.prior.normal_terms()
        if terms is None or terms.loc is not None or isinstance(terms.scale, Tensor):
            return self._kl_of_weights(key)
        mean, std = self.mu / terms.scale, self.codes_std() / terms.scale
        each = 0.5 * (mean.square() + std.square() - 1) - std.log()
        kl = torch.dot(each, self.counts()[:-1].to(each))
        if not len(self.blended):
            return kl
        centre, variance = self._mixes()
        return kl + gaussian.normal_kl(centre, variance.sqrt(), terms)

    def _kl_of_weights(self, key: Tensor) -> Tensor:
        """Sum over the single weights, where the prior differs from one to the next or has no closed form."""
        index = (self.labels < len(self.mu)).nonzero()[:, 0]
        mean, std = (part.index_select(0, index) for part in self.moments())
        terms = self.prior.normal_terms(index)
        if terms is not None:
            return gaussian.normal_kl(mean, std, terms)
        weights = self.sample(key).index_select(0, index)
        return gaussian.log_density(weights - mean, std) - self.prior.log_prob(weights, index)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check that every label and partner is a code."""
        codes = tensors["mu"].numel()
        for name, most in (("labels", codes), ("partners", codes - 1), ("blended", self.layout.numel - 1)):
            numbers = tensors[name]
            if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) > most):
                raise ValueError(f"{name} has numbers beyond {most}")
        if tensors["labels"].shape != (self.layout.numel,) or tensors["rho"].shape != (codes,):
            raise ValueError("codes and labels do not fit each other")
        if not (
            tensors["partners"].shape == tensors["logits"].shape and len(tensors["blended"]) == len(tensors["logits"])
        ):
            raise ValueError("the blends do not fit each other")
        return tensors
