"""Mean-field with one variance per row: w_i ~ N(μ_i, softplus(ρ_r)²) for all weights i of a row r (VDP++, eq. 12).

A row is an index of a parameter's first dimension: an output of a linear layer or a convolution. In layers that are
stored the other way round (transposed convolutions, Conv1D of transformers), a row is an input.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior


class RowPosterior(Posterior):
    """One number per weight, μ, and one number per row, ρ.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        std: Std of each weight. A row gets the root of the mean square of its stds.
        prior: The prior of the weights.
    """

    caches_moments = True

    def __init__(self, layout: Layout, mean: Tensor, std: Tensor, prior: BoundPrior) -> None:
        super().__init__(layout)
        self.prior = prior
        self._rows = [slot.shape[0] if slot.shape else 1 for slot in layout]
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus((self.row_sums(std.square()) / self._widths(mean)).sqrt()))

    def expand(self, per_row: Tensor) -> Tensor:
        """Repeat one value per row over the weights of the row."""
        values = []
        for slot, part in zip(self.layout, per_row.split(self._rows), strict=True):
            column = slot.shape[:1] + (1,) * (len(slot.shape) - 1)
            values.append(part.view(column).expand(slot.shape))
        return self.layout.join(values)

    def row_sums(self, per_weight: Tensor) -> Tensor:
        """Sum over the weights of each row."""
        parts = zip(self._rows, self.layout.split(per_weight), strict=True)
        return torch.cat([part.reshape(rows, -1).sum(1) for rows, part in parts])

    def _widths(self, like: Tensor) -> Tensor:
        """Return the number of weights of each row."""
        widths = [slot.numel // rows for slot, rows in zip(self.layout, self._rows, strict=True)]
        each, rows = (torch.tensor(numbers, device=like.device) for numbers in (widths, self._rows))
        return torch.repeat_interleave(each, rows, output_size=sum(self._rows)).to(like.dtype)

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def std(self) -> Tensor:
        """Return σ = softplus(ρ) of each weight."""
        return self.expand(F.softplus(self.rho))

    def variance(self) -> Tensor:
        """Return σ² of each weight."""
        return self.expand(F.softplus(self.rho).square())

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + σ·ε, with one ε per weight."""
        return gaussian.draw(self.mu, self.expand(self.rho), key)

    def reusable_std(self) -> Tensor | None:
        """Return σ, or None if a kernel computes it."""
        return gaussian.reusable_std(self.expand(self.rho))

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior, else Monte Carlo."""
        return "monte-carlo" if self.prior.normal_terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior), or log q(w) - log p(w) at one sample without a closed form.

        For rows of n weights and a prior N(m, s²) it is Σ_i ½[(μ_i - m_i)²/s_i² - 1] + log s_i
        + Σ_r ½ σ_r² Σ_{i in r} 1/s_i² - n log σ_r.
        """
        sigma = F.softplus(self.rho)
        widths, terms = self._widths(sigma), self.prior.normal_terms()
        log_sigma = torch.dot(widths, sigma.log())  # summed over all weights
        if terms is None:
            weights = self.sample(key)
            return gaussian.log_density(weights - self.mu, self.expand(sigma)) - self.prior.log_prob(weights)
        if isinstance(terms.scale, Tensor):
            precision = self.row_sums(terms.scale.square().reciprocal())
            log_scale: Tensor | float = terms.scale.log().sum()
        else:
            precision = widths / terms.scale**2
            log_scale = self.layout.numel * math.log(terms.scale)
        squares = gaussian.mean_kl(self.mu, terms) + 0.5 * torch.dot(precision, sigma.square())
        return squares - log_sigma + log_scale - 0.5 * self.layout.numel

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    def extra_repr(self) -> str:
        """Add the number of rows and the prior."""
        return f"{super().extra_repr()}, one std for each of {len(self.rho):,} rows, prior={self.prior}"
