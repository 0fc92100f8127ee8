"""How q(w) is stored. Each posterior is a module over the flat weight vector of a `Layout`."""

from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.posteriors.full import FullPosterior
from leanbayes.posteriors.gaussian_dropout import GaussianDropoutPosterior
from leanbayes.posteriors.group_noise import GroupNoisePosterior
from leanbayes.posteriors.kronecker import KroneckerPosterior
from leanbayes.posteriors.latent_factors import LatentFactors
from leanbayes.posteriors.low_rank import LowRankPosterior
from leanbayes.posteriors.mean_field import MeanFieldPosterior
from leanbayes.posteriors.multiplicative import MultiplicativePosterior
from leanbayes.posteriors.partial import PartialPosterior
from leanbayes.posteriors.point import PointPosterior
from leanbayes.posteriors.rank_one_factors import CauchyFactors, GaussianFactors
from leanbayes.posteriors.row import RowPosterior
from leanbayes.posteriors.shared.shared import SharedPosterior
from leanbayes.posteriors.subspace.masked import MaskedPosterior
from leanbayes.posteriors.subspace.sparse_dropout import VariationalDropoutPosterior
from leanbayes.posteriors.subspace.spike_slab import SpikeSlabPosterior
from leanbayes.posteriors.subspace.subspace import SparsePointPosterior, SubspacePosterior
from leanbayes.posteriors.unfitted import UnfittedPosterior

__all__ = [
    "CauchyFactors",
    "DiagonalGaussian",
    "FullPosterior",
    "GaussianDropoutPosterior",
    "GaussianFactors",
    "GroupNoisePosterior",
    "KroneckerPosterior",
    "LatentFactors",
    "LowRankPosterior",
    "MaskedPosterior",
    "MeanFieldPosterior",
    "MultiplicativePosterior",
    "PartialPosterior",
    "PointPosterior",
    "Posterior",
    "RowPosterior",
    "SharedPosterior",
    "SparsePointPosterior",
    "SpikeSlabPosterior",
    "SubspacePosterior",
    "UnfittedPosterior",
    "VariationalDropoutPosterior",
]
