"""`leanbayes evaluate RUN`: score a run on its test data."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.options import parse
from leanbayes.cli.runs import open_run
from leanbayes.cli.tables import scores_table, wide_console
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.training.record import write_json

_BATCH = 500


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a trained run on the test data, which it has never seen.

    Attributes:
        run: folder of the run.
        samples: draws of a prediction. By default what the method says.
        rule: how weights meet activations. By default what it was trained with.
        root: the folder that holds the data sets. By default the environment variable LEANBAYES_DATA.
        split: which data to score.
        device: by default the GPU if there is one.
        seed: of the draws.
        json: print JSON.
    """

    run: tyro.conf.Positional[Path]
    samples: int | None = None
    rule: str | None = None
    root: Path | None = None
    split: Literal["test", "validation"] = "test"
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def evaluate_run(words: list[str]) -> None:
    """Run the command."""
    options = parse(EvaluateOptions, words, "leanbayes evaluate")
    run = open_run(options.run, options.device)
    data = run.data(options.root)
    scores = score(run.model, data, options.split, options.samples, options.rule, options.seed)
    if options.split == "test" and options.samples is None and options.rule is None:
        run.record["scores"]["test"] = scores
        write_json(options.run / "run.json", run.record)
    if options.json:
        print(json.dumps({"run": str(options.run), "scores": scores, "costs": run.record["costs"]}, indent=1))
    else:
        wide_console().print(scores_table(str(options.run), scores, run.record["costs"]))


def score(
    bnn: BayesianModel, data: Data, split: str, samples: int | None = None, rule: str | None = None, seed: int = 0
) -> dict[str, Any]:
    """Score a model on a split, and time its predictions."""
    dataset = data.test if split == "test" else data.validation
    if dataset is None:
        raise LeanBayesError(f"{data.name} has no {split} data: score another split, or add some.")
    batches = Batches(dataset, _BATCH, device=bnn.device, shuffle=False, normalise=data.normalise)
    scale = data.target_std
    scores: dict[str, Any] = evaluate(bnn, batches.epoch(), samples=samples, rule=rule, seed=seed, target_scale=scale)
    scores["examples"] = batches.examples
    scores["predict_ms_per_1000"] = _predict_ms_per_1000(bnn, batches, samples, rule)
    return scores


def _predict_ms_per_1000(bnn: BayesianModel, batches: Batches, samples: int | None, rule: str | None) -> float:
    """Time a prediction of one batch, once warm: the median of three."""
    x, _ = next(batches.epoch())
    times = []
    for _ in range(4):
        _wait(bnn.device)
        start = time.perf_counter()
        prediction = bnn.predict(x, samples, rule=rule, generator=torch.Generator().manual_seed(0))
        _wait(bnn.device)
        times.append(time.perf_counter() - start)
    rows = len(next(value for value in vars(prediction).values() if isinstance(value, torch.Tensor)))
    return 1e3 * sorted(times[1:])[1] * 1000 / rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
