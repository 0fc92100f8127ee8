"""The engine that "auto" stands for, and the defaults that depend on the engine and the kind of task, in one place.

`lb.bayesianize`, `lb.elbo_loss`, `lb.IVON`, `lb.fit`, the estimators of `lb.sklearn` and the command line all read them
here. docs/guide/tune.md has the measurements that they were chosen by.
"""

import contextlib
from typing import NamedTuple, TypeVar

from leanbayes.core import config
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.model.method import Method

# Settings of a training that are about the optimizers of backprop: ivon would read them differently, or not at all.
OF_BACKPROP = ("optimizer", "lr", "weight_decay", "scale_lr", "scale_optimizer", "temperature", "temperature_end")

M = TypeVar("M", bound=Method)


class Defaults(NamedTuple):
    """What an engine trains with unless it is given.

    Attributes:
        temperature: The weight of the KL.
        lr: The learning rate. None means that of the optimizer.
    """

    temperature: float
    lr: float | None


# The simple prior of backprop is far too strong for networks with more weights than examples at temperature 1. At 0.003
# the likelihood of familiar images is that of the plain network, and unknown ones are still noticed. The prior of ivon
# follows the number of examples. The loss of a regression is steeper than that of classes: ivon diverges
# on some tables with a learning rate of 1.
_CLASSES = {"backprop": Defaults(0.003, None), "ivon": Defaults(1.0, 1.0)}
_REGRESSION = {"backprop": Defaults(0.1, None), "ivon": Defaults(1.0, 0.1)}


def defaults(engine: str, classes: bool) -> Defaults:
    """Return the defaults of an engine, for classes (of inputs or of pixels) or for a regression."""
    known = _CLASSES if classes else _REGRESSION
    return known.get(engine, known["backprop"])


def defaults_of(method: Method, classes: bool) -> Defaults:
    """Return the defaults of a method: those of its engine, and its own temperature if it has one."""
    found, own = defaults(method.engine, classes), method.default_temperature
    return found if own is None else found._replace(temperature=own)


def defaults_for(method: Method, likelihood: Likelihood) -> Defaults:
    """Return the defaults of a method for a likelihood."""
    return defaults_of(method, likelihood.has_logits)


def with_engine(method: M, suits_ivon: bool = False) -> M:
    """Return a method with the engine that its engine "auto" stands for. Other methods are returned as they are.

    Args:
        method: The method.
        suits_ivon: Whether `lb.fit` or the command line trains a network with BatchNorm on classes of color images, and
            chooses the optimizer. Then the engine is ivon, which has the better likelihood there (docs/engines.md), if
            the method can use it. Its steps are those of SGD, by which transformers hardly learn. Any other training,
            and a loop that brings its own optimizer, uses backprop.
    """
    if method.engine != "auto":
        return method
    if suits_ivon:
        with contextlib.suppress(LeanBayesError):  # a prior or KL that ivon cannot use
            return config.change(method, {"engine": "ivon"})
    return config.change(method, {"engine": "backprop"})
