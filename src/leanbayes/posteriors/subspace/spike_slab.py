"""A chain of sparse weights with a spike-and-slab prior, whose latent variables adapt (AEB, Deng et al. 2019).

Each weight has a Laplace distribution (the spike) or a Gaussian one (the slab):

    w | z = 0 ~ Laplace(0, σ·v₀),  w | z = 1 ~ N(0, σ²·v₁),  P(z = 1) = δ,  σ² ~ InverseGamma(½, λ/2),  δ ~ U(0, 1).

With ρ = P(z = 1 | w), κ₀ = (1 - ρ)/v₀ and κ₁ = ρ/v₁, the expected negative log prior is Σ κ₀|w|/σ + κ₁w²/(2σ²) plus
a constant. The chain samples w at given latent variables, and these follow w by stochastic approximation: moving
averages, with falling rates, of ρ, κ₀, κ₁, and of the σ and δ that maximize the expected log posterior. Each layer has
its own σ and δ.
"""

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.core.ranking import highest
from leanbayes.posteriors.subspace.collected import CollectedPosterior

_LAMBDA = 1e-4  # of the prior of σ², in squared weights: it only keeps σ above 0


class SpikeSlabPosterior(CollectedPosterior):
    """The current weights of the chain and their latent variables; after `finish` the weights that were collected.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights to start from.
        spike: v₀.
        slab: v₁.
    """

    slab_probability: Tensor
    kappa: Tensor
    sigma: Tensor
    delta: Tensor

    def __init__(self, layout: Layout, mean: Tensor, spike: float, slab: float) -> None:
        super().__init__(layout, mean)
        self.spike, self.slab = spike, slab
        stds = torch.stack([part.square().mean().sqrt() for part in mean.split(layout.sizes)])
        self.register_buffer("sigma", (stds / slab**0.5).clamp_min(1e-3).detach())
        self.register_buffer("delta", torch.full_like(self.sigma, 0.5))
        self.register_buffer("slab_probability", torch.full_like(mean, 0.5))
        self.register_buffer("kappa", torch.stack([self.slab_probability / spike, self.slab_probability / slab]))

    @property
    def is_finished(self) -> bool:
        """Whether only the collected weights are left."""
        return self.slab_probability.numel() == 0 < self.layout.numel

    # -- the chain ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adapt(self, rate: float) -> None:
        """Move the latent variables toward those of the current weights, by a rate from 0 to 1."""
        sigma, delta = self.layout.expand(self.sigma), self.layout.expand(self.delta)
        in_slab = torch.distributions.Normal(0.0, sigma * self.slab**0.5).log_prob(self.mu) + delta.log()
        in_spike = torch.distributions.Laplace(0.0, sigma * self.spike).log_prob(self.mu) + torch.log1p(-delta)
        self.slab_probability.lerp_(torch.sigmoid(in_slab - in_spike), rate)
        chosen = torch.stack([(1 - self.slab_probability) / self.spike, self.slab_probability / self.slab])
        self.kappa.lerp_(chosen, rate)
        sizes = self.layout.sizes
        parts = zip(self.mu.split(sizes), self.kappa.split(sizes, 1), strict=True)
        best = torch.stack([_best_variance(weights, kappa) for weights, kappa in parts])
        share = torch.stack([part.mean() for part in self.slab_probability.split(sizes)])
        self.sigma.copy_(torch.lerp(self.sigma.square(), best, rate).sqrt())
        self.delta.copy_(torch.lerp(self.delta, share, rate).clamp(1e-6, 1 - 1e-6))

    @torch.no_grad()
    def keep_largest(self, counts: list[int]) -> None:
        """Set all weights of each slot to zero except for so many of the largest."""
        for weights, count in zip(self.mu.split(self.layout.sizes), counts, strict=True):
            if count < weights.numel():
                largest = highest(weights.abs(), count)
                weights.copy_(torch.zeros_like(weights).index_copy_(0, largest, weights[largest]))

    @torch.no_grad()
    def fix(self) -> None:
        """Let the weights that are zero now stay zero; the others can be collected from now on."""
        self.begin(self.mu.nonzero()[:, 0])

    @torch.no_grad()
    def apply_support(self) -> None:
        """Set the weights to zero that `fix` found to be zero, after a step has moved them."""
        self.mu.copy_(torch.zeros_like(self.mu).index_copy_(0, self.index, self.mu[self.index]))

    @torch.no_grad()
    def finish(self) -> None:
        """Drop the latent variables, and store what was collected."""
        super().finish()
        self.slab_probability, self.kappa = self.slab_probability[:0].clone(), self.kappa[:, :0].clone()

    def energy(self) -> Tensor:
        """Return the expected negative log prior of the current weights, up to a constant."""
        ratio = self.mu / self.layout.expand(self.sigma)
        return (self.kappa[0] * ratio.abs() + 0.5 * self.kappa[1] * ratio.square()).sum()

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the positions, and check the shapes."""
        if not {"index", "members", "mu", "kappa", "slab_probability"} <= tensors.keys():
            return tensors
        latent = tensors["slab_probability"].numel()
        if latent not in (0, self.layout.numel) or tensors["kappa"].shape != (2, latent):
            raise ValueError(f"there are latent variables of {latent} weights, not of {self.layout.numel}")
        return self.decoded(tensors, finished=latent == 0)


def _best_variance(weights: Tensor, kappa: Tensor) -> Tensor:
    """Return the σ² that maximizes the expected log posterior: (n + 3)σ² - σ Σκ₀|w| - (Σκ₁w² + λ) = 0."""
    linear, square = (kappa[0] * weights.abs()).sum(), (kappa[1] * weights.square()).sum() + _LAMBDA
    total = weights.numel() + 3
    return ((linear + (linear.square() + 4 * total * square).sqrt()) / (2 * total)).square()
