"""RigL (Evci et al. 2020): sparse training of a plain network, the baseline for SSVI at the same density."""

from dataclasses import dataclass

from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.methods.sparse_training.base import SparseMethod
from leanbayes.model.method import register_method
from leanbayes.posteriors import SparsePointPosterior
from leanbayes.posteriors.subspace.blocks import block_shape


@register_method("rigl")
@dataclass(frozen=True)
class RigL(SparseMethod):
    """RigL: a sparse plain network, for comparison with SSVI.

    At regular intervals the active weights with the smallest magnitude are replaced by the inactive weights with the
    largest gradients. The settings are inherited from `SparseMethod`.

    Paper: Evci et al. (2020), "Rigging the Lottery: Making All Tickets Winners".

    Example:
        >>> bnn = lb.fit(network, lb.RigL(density=0.05), train_set, epochs=30)
    """

    rule = "mean"
    samples = 1

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SparsePointPosterior:
        """Choose the initial subspace and keep the weights in it."""
        index, start = self.initial_subspace(layout, mean, variance, lambda mu, sigma: mu.abs())
        return SparsePointPosterior(layout, index, start[index], block_shape(self.pattern))
