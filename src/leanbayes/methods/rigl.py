"""RigL (Evci et al. 2020): sparse training of a plain network, the bar for SSVI at the same density."""

from dataclasses import dataclass

from torch import Tensor

from leanbayes.config import configurable
from leanbayes.layout import Layout
from leanbayes.methods.sparse import SparseMethod
from leanbayes.posteriors import SparsePointPosterior
from leanbayes.sparsity.blocks import block_shape


@configurable
@dataclass(frozen=True)
class RigL(SparseMethod):
    """A sparse plain network, for comparison: the smallest weights go, and those with the largest gradients come."""

    rule = "mean"
    samples = 1

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SparsePointPosterior:
        """Choose the first subspace, and put the points on the weights there."""
        index, start = self.first_subspace(layout, mean, variance, lambda mu, sigma: mu.abs())
        return SparsePointPosterior(layout, index, start[index], block_shape(self.pattern))
