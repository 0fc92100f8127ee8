"""A Gaussian whose covariance is a Kronecker product for each parameter, up to the prior.

Each weight matrix W has the precision B ⊗ A + δ. With B = U diag(b) Uᵀ and A = V diag(a) Vᵀ, the entries of Uᵀ W V are
independent, with the variances 1/(b_i a_j + δ). So n·m weights take n² + m² + n·m numbers, not (n·m)².
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior


class KroneckerPosterior(Posterior):
    """W = M + U (S ∘ ε) Vᵀ for each parameter, a matrix of outputs by inputs and pixels (by 1 for a bias).

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        std: S, the stds in the basis of the eigenvectors, one flat vector.
        left: U of each parameter, an orthogonal matrix.
        right: V of each parameter, an orthogonal matrix.
        prior: The prior of the weights, whose scale is the same for all weights of a parameter.
    """

    factorized = False
    std: Tensor

    def __init__(
        self,
        layout: Layout,
        mean: Tensor,
        std: Tensor,
        left: Sequence[Tensor],
        right: Sequence[Tensor],
        prior: BoundPrior,
    ) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.prior = prior
        self.register_buffer("std", std.to(mean.dtype))
        for number, (u, v) in enumerate(zip(left, right, strict=True)):
            self.register_buffer(f"left_{number}", u.to(mean.dtype).contiguous())
            self.register_buffer(f"right_{number}", v.to(mean.dtype).contiguous())

    def mean(self) -> Tensor:
        """Return the means M."""
        return self.mu

    def _turned(self, flat: Tensor, squared: bool = False) -> Tensor:
        """Return U X Vᵀ for the part X of each parameter, or the same with the squares of U and V."""
        found = []
        for number, (slot, part) in enumerate(zip(self.layout, self.layout.split(flat), strict=True)):
            u, v = getattr(self, f"left_{number}"), getattr(self, f"right_{number}")
            u, v = (u.square(), v.square()) if squared else (u, v)
            found.append((u @ matrix_of(part) @ v.mT).view(slot.shape))
        return self.layout.join(found)

    def variance(self) -> Tensor:
        """Return the diagonal of the covariance."""
        return self._turned(self.std.square(), squared=True)

    def sample(self, key: Tensor) -> Tensor:
        """Return M + U (S ∘ ε) Vᵀ."""
        return self.mu + self._turned(self.std * noise.normal(self.std, key))

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior). U and V are orthogonal, so they do not change the trace and the determinant."""
        terms = self.prior.normal_terms()
        assert terms is not None
        scale = torch.as_tensor(terms.scale, dtype=self.mu.dtype, device=self.mu.device)
        distance = self.mu if terms.loc is None else self.mu - terms.loc
        squares = (self.std.square() + distance.square()) / scale.square()
        return (0.5 * (squares - 1) + scale.log() - self.std.log()).sum()

    def extra_repr(self) -> str:
        """Add the kind of the covariance, and the prior."""
        return f"{super().extra_repr()}, Kronecker factors, prior={self.prior}"


def matrix_of(parameter: Tensor) -> Tensor:
    """Return a parameter as a matrix of outputs by inputs and pixels. A bias has one column."""
    return parameter.reshape(len(parameter), -1)
