"""From a trained model to what a report shows of it."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from leanbayes.bayesian import BayesianModel
from leanbayes.data import Data
from leanbayes.evaluation import Look, assess
from leanbayes.evaluation.assessment import Tell
from leanbayes.report.pictures import galleries_of
from leanbayes.report.runs import AssessedRun


def run_of(
    name: str,
    bnn: BayesianModel,
    data: Data,
    look: Look | None = None,
    *,
    ood: Mapping[str, Dataset[Any]] | None = None,
    record: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> AssessedRun:
    """Assess a model for a report, however it was trained.

    name: what to call its method. record: the run.json of `lb.fit`, for costs and history of the training. seed: tells
    several models of one method apart.
    """
    found = assessed(bnn, data, record and record["costs"], look, ood=ood)
    return AssessedRun(name, seed, record or _without_record(data, found), found)


def _without_record(data: Data, found: Mapping[str, Any]) -> dict[str, Any]:
    """Say what is known of a model that was trained in a loop of one's own."""
    config = {"data": data.name, "classes": data.classes, "recipe": {}}
    costs = {name: found["costs"]["ours"][name] for name in ("trainable", "stored", "file_bytes")}
    return {"config": config, "costs": costs, "history": [], "versions": {}, "machine": {}, "command": ""}


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
