"""A chain of sparse weights with a spike-and-slab prior, whose latent variables adapt (AEB, Deng et al. 2019).

Each weight has a Laplace distribution (the spike) or a Gaussian one (the slab):

    w | z = 0 ~ Laplace(0, σ·v₀),  w | z = 1 ~ N(0, σ²·v₁),  P(z = 1) = δ,  σ² ~ InverseGamma(½, λ/2),  δ ~ U(0, 1).

With ρ = P(z = 1 | w), κ₀ = (1 - ρ)/v₀ and κ₁ = ρ/v₁, the expected negative log prior is Σ κ₀|w|/σ + κ₁w²/(2σ²) plus
a constant. The chain samples w at given latent variables, and these follow w by stochastic approximation: moving
averages, with falling rates, of ρ, κ₀, κ₁, and of the σ and δ that maximize the expected log posterior. Each layer has
its own σ and δ.
"""

import torch
from torch import Tensor, nn

from leanbayes.core.layout import Layout
from leanbayes.core.ranking import highest
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import Posterior

_LAMBDA = 1e-4  # of the prior of σ², in squared weights: it only keeps σ above 0


class SpikeSlabPosterior(Posterior):
    """The current weights of the chain and their latent variables; after `finish` the weights that were collected.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights to start from.
        spike: v₀.
        slab: v₁.
    """

    factorized = False  # the weights of a collected vector belong together
    sizes_vary = True
    slab_probability: Tensor
    kappa: Tensor
    sigma: Tensor
    delta: Tensor
    index: Tensor
    members: Tensor

    def __init__(self, layout: Layout, mean: Tensor, spike: float, slab: float) -> None:
        super().__init__(layout)
        self.spike, self.slab = spike, slab
        self.mu = nn.Parameter(mean)
        stds = torch.stack([part.square().mean().sqrt() for part in mean.split(layout.sizes)])
        self.register_buffer("sigma", (stds / slab**0.5).clamp_min(1e-3).detach())
        self.register_buffer("delta", torch.full_like(self.sigma, 0.5))
        self.register_buffer("slab_probability", torch.full_like(mean, 0.5))
        self.register_buffer("kappa", torch.stack([self.slab_probability / spike, self.slab_probability / slab]))
        self.register_buffer("index", torch.zeros(0, dtype=torch.int64, device=mean.device))
        self.register_buffer("members", mean.new_zeros(0, 0))

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
        self.index = self.mu.nonzero()[:, 0]
        self.members = self.mu.new_zeros(0, len(self.index))

    @torch.no_grad()
    def apply_support(self) -> None:
        """Set the weights to zero that `fix` found to be zero, after a step has moved them."""
        self.mu.copy_(torch.zeros_like(self.mu).index_copy_(0, self.index, self.mu[self.index]))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the current weights."""
        self.members = torch.cat([self.members, self.mu[self.index][None]])

    @torch.no_grad()
    def finish(self) -> None:
        """Drop the chain, and store the mean of the collected weights and the difference of each to it."""
        if not len(self.members):
            raise LeanBayesError("AEB has collected no weights: train longer, or set until to a smaller share.")
        mean = self.members.mean(0)
        self.mu = nn.Parameter(mean, self.mu.requires_grad)
        self.members = self.members - mean
        self.slab_probability, self.kappa = self.slab_probability[:0].clone(), self.kappa[:, :0].clone()

    # -- the posterior ------------------------------------------------------------------------------------------------

    def _place(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.layout.numel).index_put_((self.index,), values)

    def mean(self) -> Tensor:
        """Return the current weights, or the mean of those that were collected."""
        return self._place(self.mu) if self.is_finished else self.mu

    def variance(self) -> Tensor:
        """Return the variance of the collected weights, 0 before `finish`."""
        if not self.is_finished:
            return torch.zeros_like(self.mu)
        return self._place(self.members.square().mean(0))

    def sample(self, key: Tensor) -> Tensor:
        """Return the current weights, or collected weights that the key chooses."""
        if not self.is_finished:
            return self.mu
        chosen = self.members.index_select(0, (key[:2].sum() % len(self.members))[None])[0]
        return self._place(self.mu + chosen)

    def key_of_member(self, key: Tensor, number: int) -> Tensor:
        """Return the key of the collected weights with this number."""
        return torch.full_like(key, number).index_fill_(0, torch.arange(1, len(key), device=key.device), 0)

    @property
    def random_weights(self) -> int:
        """The number of weights that are not zero for good."""
        return len(self.index) if self.is_finished else self.layout.numel

    def kl(self, key: Tensor) -> Tensor:
        """Return the expected negative log prior of the current weights, up to a constant; 0 after `finish`.

        It takes the place of a KL in the loss, so that the loss is the energy that the chain samples from.
        """
        if self.is_finished:
            return torch.zeros((), device=key.device)
        ratio = self.mu / self.layout.expand(self.sigma)
        return (self.kappa[0] * ratio.abs() + 0.5 * self.kappa[1] * ratio.square()).sum()

    def extra_repr(self) -> str:
        """Add the density, and how many weights are collected."""
        density = f"density={len(self.index) / max(self.layout.numel, 1):.3g}, " if self.is_finished else ""
        return f"{super().extra_repr()}, {density}{len(self.members)} collected"

    # -- files --------------------------------------------------------------------------------------------------------

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode the positions by their gaps."""
        return {**tensors, "index": positions.encode(tensors["index"])}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the positions, and check the shapes."""
        if not {"index", "members", "mu", "kappa", "slab_probability"} <= tensors.keys():
            return tensors
        members, latent, size = tensors["members"], tensors["slab_probability"].numel(), self.layout.numel
        if members.dim() != 2 or latent not in (0, size) or tensors["kappa"].shape != (2, latent):
            raise ValueError(f"the collected weights have the shape {tuple(members.shape)}")
        count = members.shape[1]
        if tensors["mu"].shape != ((size,) if latent == size else (count,)) or (latent == 0 and not len(members)):
            raise ValueError(f"the weights have the shape {tuple(tensors['mu'].shape)}, and {count} are collected")
        return {**tensors, "index": positions.decode(tensors["index"], count, size)}


def _best_variance(weights: Tensor, kappa: Tensor) -> Tensor:
    """Return the σ² that maximizes the expected log posterior: (n + 3)σ² - σ Σκ₀|w| - (Σκ₁w² + λ) = 0."""
    linear, square = (kappa[0] * weights.abs()).sum(), (kappa[1] * weights.square()).sum() + _LAMBDA
    total = weights.numel() + 3
    return ((linear + (linear.square() + 4 * total * square).sqrt()) / (2 * total)).square()
