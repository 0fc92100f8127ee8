"""Gaussian dropout with a learned rate (Kingma, Salimans and Welling 2015): weights with noise in proportion to them.

Either each weight has noise of its own, w_i ~ N(μ_i, α·μ_i²), or all weights of an input share a factor,
w_i = μ_i·(1 + √α·ε_g). The prior is log-uniform, so that the KL depends on α ≤ 1 only. Its published approximation is

    KL(α) ≈ C - ½·log α - c₁α - c₂α² - c₃α³,    c₁ = 1.16145124, c₂ = -1.50204118, c₃ = 0.58629921,

for each independent factor. Here C makes it about the KL that is 0 for α → ∞.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import GroupFactors, Posterior
from leanbayes.posteriors.input_groups import InputGroups

_C, _C1, _C2, _C3 = 0.67, 1.16145124, -1.50204118, 0.58629921

Per = Literal["layer", "input", "weight"]


class GaussianDropoutPosterior(Posterior):
    """One number per weight, μ, and one per layer, input or weight: α = sigmoid(ρ).

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        alpha: The initial α, between 0 and 1.
        per: What has an α of its own.
        by_input: Whether the weights of an input share their noise; then none has an α of its own.
    """

    caches_moments = True

    def __init__(self, layout: Layout, mean: Tensor, alpha: float, per: Per, by_input: bool) -> None:
        super().__init__(layout)
        self.per, self.factorized, self.has_groups = per, not by_input, by_input
        self._inputs = InputGroups(layout)
        count = {"layer": len(layout), "input": self._inputs.total, "weight": layout.numel}[per]
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(torch.logit(mean.new_full((count,), alpha)))

    def _per_weight(self, values: Tensor) -> Tensor:
        """Repeat the values of each α over the weights that have it."""
        if self.per == "weight":
            return values
        return self.layout.expand(values) if self.per == "layer" else self._inputs.expand(values)

    def _per_input(self, values: Tensor) -> Tensor:
        """Repeat the values of each α over the inputs that have it."""
        if self.per == "input":
            return values
        counts = torch.tensor(self._inputs.counts, device=values.device)
        return values.repeat_interleave(counts, output_size=self._inputs.total)

    def _noise_scale(self) -> Tensor:
        return torch.sigmoid(self.rho).sqrt()

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def variance(self) -> Tensor:
        """Return α·μ²."""
        return self._per_weight(torch.sigmoid(self.rho)) * self.mu.square()

    def sample(self, key: Tensor) -> Tensor:
        """Return μ·(1 + √α·ε), with one ε per weight or per input."""
        scale = self._noise_scale()
        if self.has_groups:
            return self.mu * self._inputs.expand(self._factors(key, 1)[0])
        return self.mu * (1 + self._per_weight(scale) * noise.normal(self.mu, key))

    def group_factors(self) -> GroupFactors:
        """Return μ, the groups, and samples of their factors."""
        groups = self._inputs.views(torch.arange(self._inputs.total, device=self.mu.device))
        return GroupFactors(self.mu, groups, self._factors)

    def _factors(self, key: Tensor, examples: int) -> Tensor:
        scale = self._per_input(self._noise_scale()).expand(examples, -1)
        return 1 + scale * noise.normal(scale.contiguous(), key)

    def kl(self, key: Tensor) -> Tensor:
        """Return the approximate KL(q ‖ log-uniform), summed over all independent factors."""
        kl = log_uniform_kl(self.rho)
        return (self._per_input(kl) if self.has_groups else self._per_weight(kl)).sum()

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    def extra_repr(self) -> str:
        """Add what has an α, and their mean."""
        return f"{super().extra_repr()}, α per {self.per}, {torch.sigmoid(self.rho).mean().item():.3g} on average"


def log_uniform_kl(rho: Tensor) -> Tensor:
    """Return the approximate KL of a factor with α = sigmoid(ρ)."""
    alpha = torch.sigmoid(rho)
    return _C - 0.5 * nn.functional.logsigmoid(rho) - alpha * (_C1 + alpha * (_C2 + alpha * _C3))
