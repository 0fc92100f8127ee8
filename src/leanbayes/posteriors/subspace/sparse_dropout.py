"""Sparse variational dropout (Molchanov et al. 2017): Gaussian weights with a log-uniform prior, which can be pruned.

The KL depends on α = σ²/μ² only. It has no closed form, and its published approximation is

    KL(α) ≈ k₁·sigmoid(-k₂ - k₃·log α) + ½·log(1 + 1/α),    k₁ = 0.63576, k₂ = 1.8732, k₃ = 1.48695,

with the constant that makes it 0 for α → ∞. Weights with a large α are noise around 0, and `prune` removes them.
"""

import torch
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.layout import Layout
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.posteriors.subspace.subspace import SubspacePosterior
from leanbayes.priors import BoundPrior

_K1, _K2, _K3 = 0.63576, 1.8732, 1.48695


def log_uniform_kl(mean: Tensor, std: Tensor) -> Tensor:
    """Return the approximate KL(N(μ, σ²) ‖ log-uniform) of each weight, up to a constant: it is 0 for μ = 0."""
    ratio = (mean / std).square()  # 1/α
    log_ratio = ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log()
    return _K1 * torch.sigmoid(_K3 * log_ratio - _K2) + 0.5 * ratio.log1p()


class VariationalDropoutPosterior(SubspacePosterior):
    """w_i ~ N(μ_i, softplus(ρ_i)²) with a log-uniform prior. All weights are active until `prune`.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        std: Std of each weight.
        log_alpha: The largest log α of weights that `prune` keeps.
    """

    sizes_vary = True

    def __init__(self, layout: Layout, mean: Tensor, std: Tensor, log_alpha: float) -> None:
        nothing = torch.zeros(0, dtype=torch.int64, device=mean.device)
        super().__init__(layout, nothing, mean, std, _LogUniform())
        self.log_alpha = log_alpha

    @property
    def is_dense(self) -> bool:
        """Whether all weights are active; then no positions are stored."""
        return len(self.mu) == self.layout.numel

    @property
    def random_weights(self) -> int:
        """The number of active weights, which are all Bayesian."""
        return len(self.mu)

    @torch.no_grad()
    def prune(self) -> int:
        """Set the weights with log α above the limit to zero, and store only the others. Return how many these are.

        The parameters become shorter: make new optimizers if the training continues.
        """
        log_alpha = 2 * (self.std().log() - self.mu.abs().log())  # inf for μ = 0
        kept = (log_alpha <= self.log_alpha).nonzero()[:, 0]
        if len(kept) < len(self.mu):
            self.index = (kept if self.is_dense else self.index[kept]).to(self.index.dtype)
            trained = self.mu.requires_grad
            self.mu = nn.Parameter(self.mu[kept], trained)
            self.rho = nn.Parameter(self.rho[kept], trained)
        return len(kept)

    @property
    def counts(self) -> list[int]:
        """The number of active weights of each slot."""
        return self.layout.sizes if self.is_dense else super().counts

    def scatter(self, values: Tensor) -> Tensor:
        """Return a flat vector with one value per active weight at its position, and zeros elsewhere."""
        return values if self.is_dense else super().scatter(values)

    def _weights(self, active: Tensor) -> list[Tensor]:
        return self.layout.split(active) if self.is_dense else super()._weights(active)  # type: ignore[return-value]

    @property
    def kl_kind(self) -> str:
        """Exact: a closed form, although an approximate one."""
        return "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Return the approximate KL(q ‖ log-uniform) of the active weights."""
        return log_uniform_kl(self.mu, self.std()).sum()

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample and the KL."""
        return self.sample(key), self.kl(key)

    def reusable_std(self) -> Tensor | None:
        """Return σ, or None if a kernel computes it or weights are pruned."""
        return gaussian.reusable_std(self.rho) if self.is_dense else None

    def diagonal_gaussian(self) -> DiagonalGaussian | None:
        """Return None: the prior is not Gaussian."""
        return None

    def extra_repr(self) -> str:
        """Return the number of weights, the density, the number of Bayesian weights, and the prior."""
        return (
            f"{Posterior.extra_repr(self)}, density={len(self.mu) / max(self.layout.numel, 1):.3g}, prior={self.prior}"
        )

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the positions of pruned weights, one per mean."""
        if not {"index", "mu", "rho"} <= tensors.keys():
            return tensors
        count = tensors["mu"].numel()
        if tensors["mu"].shape != (count,) or tensors["rho"].shape != (count,) or count > self.layout.numel:
            raise ValueError(f"means and stds of the shape {tuple(tensors['mu'].shape)} do not fit the network")
        stored = 0 if count == self.layout.numel else count
        index = positions.decode(tensors["index"], stored, self.layout.numel)
        return {**tensors, "index": index.to(self.index.dtype)}


class _LogUniform(BoundPrior):
    """The prior p(log |w|) = constant. Only its KL is known, and no density."""

    def __init__(self) -> None:
        super().__init__("log-uniform")  # type: ignore[arg-type]  # it has no settings

    def __repr__(self) -> str:
        return "log-uniform"
