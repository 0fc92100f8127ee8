"""`leanbayes evaluate RUN`: score a run on its test data."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import open_run
from leanbayes.cli.tables import scores_table, show
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.training.record import write_json

_BATCH, _PIXELS = 500, 500 * 64 * 64  # examples, and pixels, of a batch at most


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
        show(f"{options.run}, {options.split} data", scores_table(scores, run.record["costs"]))
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
    pixels = math.prod(data.input_shape[1:]) if len(data.input_shape) == 3 else 1
    size = max(1, min(_BATCH, _PIXELS // pixels))
    batches = Batches(dataset, size, device=bnn.device, shuffle=False, normalise=data.normalise, workers=workers)
    scale = data.target_std
    scores: dict[str, Any] = evaluate(bnn, batches.epoch(), samples=samples, rule=rule, seed=seed, target_scale=scale)
    scores["examples"] = batches.examples
    scores["predict_ms_per_1000"] = _predict_ms_per_1000(bnn, batches, samples, rule)
    return scores


def _predict_ms_per_1000(bnn: BayesianModel, batches: Batches, samples: int | None, rule: str | None) -> float:
    """Time a prediction of one batch, once warm: the median of three."""
    x, y = next(batches.epoch())
    times = []
    for _ in range(4):
        _wait(bnn.device)
        start = time.perf_counter()
        bnn.predict(x, samples, rule=rule, generator=torch.Generator().manual_seed(0))
        _wait(bnn.device)
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times[1:])[1] * 1000 / len(y)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
