"""`leanbayes evaluate RUN`: score a run on its test data."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import open_run
from leanbayes.cli.tables import scores_table, show
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import costs_of, evaluate
from leanbayes.evaluation.assessment import batch_size
from leanbayes.report.runs import in_columns
from leanbayes.training.record import write_json


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a trained run on the test data, which it has never seen.

    Attributes:
        run: folder of the run.
        samples: draws of a prediction. None means what the method says.
        rule: how weights meet activations. None means as in training.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        split: which data to score.
        device: where to predict. None means the GPU, if there is one.
        seed: number that the draws follow from.
        json: print JSON, not a table.
    """

    run: RunFolder
    samples: int | None = None
    rule: Literal["sample", "flipout", "local", "mean"] | None = None
    root: Path | None = None
    split: Literal["test", "validation"] = "test"
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def evaluate_run(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(EvaluateOptions, words, "evaluate")
    return lambda: _evaluate(options)


def _evaluate(options: EvaluateOptions) -> None:
    run = open_run(options.run, options.device)
    data, workers = run.data(options.root), run.record["config"]["recipe"]["workers"]
    scores = score(run.model, data, options.split, options.samples, options.rule, options.seed, workers)
    if options.json:
        print(json.dumps({"run": str(options.run), "scores": scores, "costs": run.record["costs"]}, indent=1))
    else:
        show(f"{options.run}, {options.split} data", scores_table({**scores, **in_columns(run.record["costs"])}))
    if options == EvaluateOptions(options.run, root=options.root, device=options.device, json=options.json):
        run.record["scores"]["test"] = scores
        write_json(options.run / "run.json", run.record)


def score(
    bnn: BayesianModel,
    data: Data,
    split: str,
    samples: int | None = None,
    rule: str | None = None,
    seed: int = 0,
    workers: int = 0,
) -> dict[str, Any]:
    """Score a model on a split, and time its predictions."""
    dataset = data.test if split == "test" else data.validation
    if dataset is None:
        raise LeanBayesError(f"{data.name} has no {split} data: add some, or score the validation data.")
    size = batch_size(data.input_shape)
    batches = Batches(dataset, size, device=bnn.device, shuffle=False, normalise=data.normalise, workers=workers)
    scale = data.target_std
    scores: dict[str, Any] = evaluate(bnn, batches.epoch(), samples=samples, rule=rule, seed=seed, target_scale=scale)
    scores["examples"] = batches.examples
    costs = costs_of(bnn, next(batches.epoch())[0], samples=samples, rule=rule, repeats=3)
    scores["predict_ms_per_1000"] = costs.ours.predict_ms_per_1000
    scores["predict_time_ratio"] = costs.ratios()["predict_ms_per_1000"]
    return scores
