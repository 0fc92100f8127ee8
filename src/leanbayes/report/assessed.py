"""From a trained model to what a report shows of it."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from leanbayes.bayesian import BayesianModel
from leanbayes.data import Data
from leanbayes.evaluation import Look, assess
from leanbayes.evaluation.assessment import Tell
from leanbayes.report.pictures import galleries_of


def assessed(
    bnn: BayesianModel,
    data: Data,
    costs: Mapping[str, Any] | None = None,
    look: Look | None = None,
    *,
    ood: Mapping[str, Dataset[Any]] | None = None,
    workers: int = 0,
    tell: Tell = lambda what, done, of: None,
) -> dict[str, Any]:
    """Assess a model, and add the figures of its method and pictures of examples; see `leanbayes.evaluation.assess`.

    costs: those of its training, as run.json has them, or None for those of the model itself.
    """
    found = assess(bnn, data, look, ood=ood, workers=workers, tell=tell)
    figures = bnn.method.figures(bnn, found["scores"], costs or found["costs"]["ours"])
    galleries = galleries_of(bnn, data, found)
    return {**found, "figures": [figure.to_json() for figure in figures], "galleries": galleries, "notes": []}
