"""`leanbayes evaluate RUN`: score a run on its test data."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.cli.text_tables import scores_table, show
from leanbayes.core.json_values import json_text
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import costs_of, evaluate
from leanbayes.report.evaluated_run import in_columns
from leanbayes.training.progress import Progress, say
from leanbayes.training.record import write_json

_SPLITS = {"test": "test data", "validation": "held-out part of the training data"}


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a trained run on the test data, which it has not been trained on.

    Attributes:
        run: folder of the run.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: how random weights are combined with activations: sample, moments, mean or another rule, also with
            settings, such as adjoint:mean=moments,margins=3. None means the rule used in training.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        split: which data to score.
        device: where to predict. None means the GPU, if there is one.
        seed: seed of the samples.
        json: print JSON instead of a table.
    """

    run: RunFolder
    samples: int | None = None
    rule: str | None = None
    root: Path | None = None
    split: Literal["test", "validation"] = "test"
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(EvaluateOptions, words, "evaluate")
    return lambda: _evaluate(options)


def _evaluate(options: EvaluateOptions) -> None:
    run = open_run(options.run, options.device)
    scores = score(run, options)
    if options.json:
        print(json_text({"run": str(options.run), "scores": scores, "costs": run.record["costs"]}))
    else:
        show(
            f"{options.run}, {_SPLITS[options.split]}",
            scores_table({**scores, **in_columns(run.record["costs"])}),
            wrap=True,
        )
    if options == EvaluateOptions(options.run, root=options.root, device=options.device, json=options.json):
        run.record["scores"]["test"] = scores
        try:
            write_json(options.run / "run.json", run.record)
        except LeanBayesError as error:  # the folder may belong to somebody else
            say(True, f"The scores are not stored in the run: {error}")


def _counted(batches: Iterable[Any], progress: Progress) -> Iterator[Any]:
    """Yield batches, and count each one when the next is asked for."""
    for batch in batches:
        yield batch
        progress.advance()
        progress.line()


def score(run: TrainedRun, options: EvaluateOptions) -> dict[str, Any]:
    """Score a run on one split, and time its predictions and those of the plain network."""
    data, bnn = run.data(options.root), run.model
    dataset = data.test if options.split == "test" else data.validation
    if dataset is None:
        raise LeanBayesError(f"{data.name} has no {options.split} data: add some, or score the validation data.")
    batches = run.batches(data, dataset)
    how: dict[str, Any] = {"samples": options.samples, "rule": options.rule}
    with Progress("Evaluating", len(batches), not options.json, None) as progress:
        watched = _counted(batches.epoch(), progress)
        scores: dict[str, Any] = evaluate(bnn, watched, seed=options.seed, target_scale=data.target_std, **how)
    costs = costs_of(bnn, next(batches.epoch())[0], repeats=3, **how)
    return {
        **scores,
        "examples": batches.examples,
        "predict_ms_per_1000": costs.ours.predict_ms_per_1000,
        "predict_time_ratio": costs.ratios()["predict_ms_per_1000"],
    }
