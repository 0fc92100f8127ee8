"""What methods have in common that fit a posterior to a trained network."""

from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.model.method import Method, Stage
from leanbayes.posteriors import Posterior, UnfittedPosterior


class AfterTraining(Method):
    """The base class of methods whose posterior is fitted after training.

    A subclass has a setting `pretrain`, fits the posterior in `start` and `choose`, and makes the posterior that a file
    fills in `empty_posterior`.
    """

    pretrain: bool
    has_kl = False

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        """Keep the weights until the posterior is fitted."""
        return UnfittedPosterior(layout, mean)

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, then fit the posterior without a step."""
        return (Stage(Deterministic()), Stage(self, 0.0)) if self.pretrain else (Stage(self, 0.0),)
