"""The defaults that depend on the engine and the kind of task, in one place.

`lb.elbo_loss`, `lb.IVON`, `lb.fit`, the estimators of `lb.sklearn` and the command line all read them here.
docs/guide/tune.md has the measurements that they were chosen by.
"""

from typing import NamedTuple

from leanbayes.likelihoods import Likelihood


class Defaults(NamedTuple):
    """What an engine trains with unless it is given.

    Attributes:
        temperature: The weight of the KL.
        lr: The learning rate. None means that of the optimizer.
    """

    temperature: float
    lr: float | None


# The simple prior of backprop is far too strong for networks with more weights than examples at temperature 1. The
# prior of ivon follows the number of examples. The loss of a regression is steeper than that of classes: ivon diverges
# on some tables with a learning rate of 1.
_CLASSES = {"backprop": Defaults(0.01, None), "ivon": Defaults(1.0, 1.0)}
_REGRESSION = {"backprop": Defaults(0.1, None), "ivon": Defaults(1.0, 0.1)}


def defaults(engine: str, classes: bool) -> Defaults:
    """Return the defaults of an engine, for classes (of inputs or of pixels) or for a regression."""
    known = _CLASSES if classes else _REGRESSION
    return known.get(engine, known["backprop"])


def defaults_for(engine: str, likelihood: Likelihood) -> Defaults:
    """Return the defaults of an engine for a likelihood."""
    return defaults(engine, likelihood.has_logits)
