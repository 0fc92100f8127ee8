"""Evaluation of a trained model for a report."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from leanbayes.core import config
from leanbayes.core.arguments import checked
from leanbayes.data import Data
from leanbayes.evaluation import EvaluationSettings, evaluate_fully
from leanbayes.evaluation.full_evaluation import OnProgress
from leanbayes.model.bayesian import BayesianModel
from leanbayes.report.evaluated_run import EvaluatedRun
from leanbayes.report.figures.weights import model_figures
from leanbayes.report.galleries import galleries_of


@checked()
def evaluate_for_report(
    name: str,
    bnn: BayesianModel,
    data: Data,
    settings: EvaluationSettings | None = None,
    *,
    ood: Mapping[str, Dataset[Any]] | None = None,
    record: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> EvaluatedRun:
    """Evaluate a model for a report, however it was trained.

    Args:
        name: Name of the method in the report.
        bnn: The trained model.
        data: The data set, with a test split.
        settings: What to evaluate and how. Defaults to `EvaluationSettings()`.
        ood: Out-of-distribution data sets by name, for classifiers.
        record: The record of a training by `lb.fit`, from `leanbayes.training.read_record(folder)`. It adds the costs
            and the history of the training.
        seed: Seed of the training, which distinguishes several models of one method.

    Returns:
        The evaluated run, for `document_of`.

    Raises:
        LeanBayesError: If data has no test split, or ood does not apply to the model.

    Example:
        >>> from leanbayes.data import from_datasets
        >>> from leanbayes.report import document_of, evaluate_for_report, write
        >>> data = from_datasets(train_set, test=test_set, name="mine")
        >>> runs = [evaluate_for_report("mean-field", bnn, data), evaluate_for_report("plain", plain, data)]
        >>> write(document_of(runs), "report.html")
    """
    found = evaluated(bnn, data, record and record["costs"], settings, ood=ood)
    return EvaluatedRun(name, seed, record or _without_record(bnn, data, found), found)


def _without_record(bnn: BayesianModel, data: Data, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a model that was trained in a custom loop."""
    settings = {"data": data.name, "classes": data.classes, "recipe": {}, "method": config.encode(bnn.method)}
    costs = {name: found["costs"]["ours"][name] for name in ("trainable", "stored", "file_bytes")}
    return {"config": settings, "costs": costs, "history": [], "versions": {}, "machine": {}, "command": ""}


@checked()
def evaluated(
    bnn: BayesianModel,
    data: Data,
    costs: Mapping[str, Any] | None = None,
    settings: EvaluationSettings | None = None,
    *,
    ood: Mapping[str, Dataset[Any]] | None = None,
    workers: int = 0,
    on_progress: OnProgress = lambda what, done, of: None,
) -> dict[str, Any]:
    """Evaluate a model, and add the figures of its weights and galleries of examples.

    Args:
        bnn: The trained model.
        data: The data set, with a test split.
        costs: The costs of its training, as in run.json. None means the costs of the model itself.
        settings: What to evaluate and how. Defaults to `EvaluationSettings()`.
        ood: Out-of-distribution data sets by name, for classifiers.
        workers: Worker processes that read data.
        on_progress: Called before each step with its name, the number of steps done, and the total number of steps.

    Returns:
        What `leanbayes.evaluation.evaluate_fully` returns, with "figures", "galleries" and "notes".

    Raises:
        LeanBayesError: If data has no test split, or ood does not apply to the model.

    Example:
        >>> evaluated(bnn, data)["galleries"][0]["title"]
        'Most confident mistakes'
    """
    found = evaluate_fully(bnn, data, settings, ood=ood, workers=workers, on_progress=on_progress)
    figures = model_figures(bnn, found["scores"], costs or found["costs"]["ours"])
    galleries = galleries_of(bnn, data, found)
    return {**found, "figures": [figure.to_json() for figure in figures], "galleries": galleries, "notes": []}
