"""Small PBN models, and functions that train them."""

from pathlib import Path
from typing import Any

from training_cases import SETTINGS, clusters, mlp, task

import leanbayes as lb
from leanbayes.posteriors import PartialPosterior
from leanbayes.training import fit

BATCHES = [clusters()[:64], clusters()[64:128]]


def partial(bnn: lb.BayesianModel) -> PartialPosterior:
    assert isinstance(bnn.posterior, PartialPosterior)
    return bnn.posterior


def train(method: Any, out: Path | None = None, **changes: Any) -> lb.BayesianModel:
    return fit(mlp(), method, task(clusters()), out=out, **{**SETTINGS, **changes})
