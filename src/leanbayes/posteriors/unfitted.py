"""The posterior of a method that is fitted to a trained network, before the fit: only the weights are known."""

from typing import NoReturn

from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.posteriors.point import PointPosterior


class UnfittedPosterior(PointPosterior):
    """The trained weights. Variances and samples raise an error until the method replaces this posterior."""

    def variance(self) -> NoReturn:
        """Raise an error."""
        raise LeanBayesError(
            "The posterior is not fitted yet: pass lb.bayesianize(..., data=batches), or call method.start(training)."
        )

    def sample(self, key: Tensor) -> NoReturn:
        """Raise an error."""
        self.variance()

    def kl(self, key: Tensor) -> NoReturn:
        """Raise an error."""
        self.variance()
