"""The posterior of LP-BNN (Franchi et al. 2023): rank-1 factors that a small variational autoencoder generates.

For the factors r of a layer's members, stored minus 1, an encoder gives the mean and std of a few latent variables z
of each member, and a linear decoder makes the factors from a sample of z:
    z ~ N(m(r), s(r)²),   r̂ = D z + c.
The loss has KL(z ‖ N(0, 1)) and the error of reconstruction |r̂ - r|².
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import Posterior


class LatentFactors(Posterior):
    """Factors of each slot, (members, channels), from latent variables of each member.

    Args:
        layout: The place of each parameter in the flat vector. All have the shape (members, channels).
        mean: The initial factors, stored minus 1.
        latent: The number of latent variables of a member in a layer.
        init_std: The initial std of the latent variables.
        seed: The seed of encoders and decoders.
    """

    factorized = False

    def __init__(self, layout: Layout, mean: Tensor, latent: int, init_std: float, seed: int) -> None:
        super().__init__(layout)
        self.members = layout.slots[0].shape[0]
        self.codes = nn.Parameter(mean)  # r, which the encoders read
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> nn.Parameter:
            values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(columns)
            return nn.Parameter(values.to(mean))

        widths = [slot.shape[1] for slot in layout]
        self.encoders = nn.ParameterList(weight(latent, width) for width in widths)
        self.means = nn.ParameterList(weight(latent, latent) for _ in widths)
        self.scales = nn.ParameterList(nn.Parameter(mean.new_zeros(latent, latent)) for _ in widths)
        self.biases = nn.ParameterList(nn.Parameter(mean.new_full((latent,), math.log(init_std))) for _ in widths)
        self.decoders = nn.ParameterList(weight(width, latent) for width in widths)
        self.centers = nn.ParameterList(nn.Parameter(part.mean(0)) for part in layout.split(mean))

    def _latent(self) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and the std of the latent variables of each slot, (members, latent)."""
        found = []
        for slot, codes in enumerate(self.layout.split(self.codes)):
            hidden = F.relu(F.linear(codes, self.encoders[slot]))
            scale = F.linear(hidden, self.scales[slot], self.biases[slot]).exp()
            found.append((F.linear(hidden, self.means[slot]), scale))
        return found

    def _decoded(self, latent: list[Tensor]) -> Tensor:
        parts = zip(latent, self.decoders, self.centers, strict=True)
        return self.layout.join([F.linear(z, decoder, center) for z, decoder, center in parts])

    def mean(self) -> Tensor:
        """Return D m + c."""
        return self._decoded([mean for mean, _ in self._latent()])

    def variance(self) -> Tensor:
        """Return the diagonal of D s² Dᵀ."""
        parts = zip(self._latent(), self.decoders, strict=True)
        return self.layout.join([F.linear(scale.square(), decoder.square()) for (_, scale), decoder in parts])

    def sample(self, key: Tensor) -> Tensor:
        """Return D (m + s·ε) + c."""
        latent = self._latent()
        return self._decoded([torch.addcmul(m, s, noise.normal(m, key, place)) for place, (m, s) in enumerate(latent)])

    @property
    def kl_kind(self) -> str:
        """Monte Carlo: the error of reconstruction is that of one sample."""
        return "monte-carlo"

    def kl(self, key: Tensor) -> Tensor:
        """Return the loss of the autoencoders, at the sample of this key."""
        return self.sample_and_kl(key)[1]

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample, and the mean over members of KL(z ‖ N(0, 1)) + |r̂ - r|², summed over layers."""
        sample = self.sample(key)
        total = (sample - self.codes).square().sum()
        for mean, scale in self._latent():
            total = total + 0.5 * (mean.square() + scale.square() - 1).sum() - scale.log().sum()
        return sample, total / self.members

    def extra_repr(self) -> str:
        """Add the number of latent variables."""
        return f"{super().extra_repr()}, {self.means[0].shape[0]} latent variables per member and layer"
