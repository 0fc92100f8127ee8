"""How q(w) is stored: each posterior is a module over the flat weight vector of a `Layout`."""

from leanbayes.posteriors.base import Posterior
from leanbayes.posteriors.mean_field import MeanFieldPosterior
from leanbayes.posteriors.partial import PartialPosterior
from leanbayes.posteriors.point import PointPosterior
from leanbayes.posteriors.row import RowPosterior
from leanbayes.posteriors.shared import SharedPosterior
from leanbayes.posteriors.subspace import SparsePointPosterior, SubspacePosterior

__all__ = [
    "MeanFieldPosterior",
    "PartialPosterior",
    "PointPosterior",
    "Posterior",
    "RowPosterior",
    "SharedPosterior",
    "SparsePointPosterior",
    "SubspacePosterior",
]
