"""`leanbayes acquire RUN POOL`: which unlabeled images or rows to label next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor

from leanbayes.cli.console import cell, line
from leanbayes.cli.decide import Score
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import TrainedRun, files_in, open_run
from leanbayes.cli.text_tables import show
from leanbayes.core.json_values import json_text
from leanbayes.data import TABLE_ENDINGS
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import decide
from leanbayes.evaluation.full_evaluation import batch_size
from leanbayes.training.progress import Progress

Pool = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="POOL", help_behavior_hint="(required)")]


@dataclass(frozen=True)
class AcquireOptions:
    """Choose which unlabeled inputs to label next: those whose labels would teach the model most.

    The chosen inputs together tell most about the weights (BatchBALD), so that no two of them are alike. With --score
    they are those with the highest uncertainty, each on its own.

    Attributes:
        run: folder of the run.
        pool: unlabeled images and folders of images, or csv tables of inputs.
        number: how many inputs to choose.
        score: uncertainty to choose by, such as mutual_information (BALD) or entropy. None means joint information.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: how random weights are combined with activations: sample, moments, mean or another rule, also with
            settings, such as adjoint:mean=moments,margins=3. None means the rule used in training.
        device: where to predict. None means the GPU, if there is one.
        seed: seed of the samples.
        json: print JSON instead of a table.
    """

    run: RunFolder
    pool: Pool
    number: int = 10
    score: Score | None = None
    samples: int | None = None
    rule: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(AcquireOptions, words, "acquire")
    if not options.pool:
        raise LeanBayesError("There is nothing to choose from: give images, folders of images or tables.")
    if options.number < 1:
        raise LeanBayesError(f"--number {options.number} must be at least 1.")
    return lambda: _acquire(options)


def _acquire(options: AcquireOptions) -> None:
    run = open_run(options.run, options.device)
    size = batch_size(run.record["config"]["model"]["input_shape"])
    names, read = _listed(run, options.pool)
    if len(names) < options.number:
        raise LeanBayesError(f"The pool has {len(names):,} inputs: give a --number of at most that, or a larger pool.")
    with Progress("Predicting the pool", len(names), not options.json, None) as progress:

        def batches() -> Iterator[Tensor]:
            for start in range(0, len(names), size):
                parts = []
                for place in range(start, min(start + size, len(names))):
                    parts.append(read(place))
                    progress.advance()
                yield torch.cat(parts).to(run.model.device)

        places = decide.acquire(
            run.model,
            batches(),
            options.number,
            score=options.score,
            samples=options.samples,
            rule=options.rule,
            seed=options.seed,
        ).tolist()
    chosen = [names[place] for place in places]
    if options.json:
        document = {"run": str(options.run), "pool": len(names), "score": options.score or "joint information"}
        print(json_text({**document, "chosen": chosen}))
        return
    view = Table("", *chosen[0], box=None)
    for rank, name in enumerate(chosen, start=1):
        view.add_row(str(rank), *(cell(value) for value in name.values()))
    show("", view, wrap=True)
    line(f"Label these {len(chosen):,} of {len(names):,} inputs next, the most useful one first.")


def _listed(run: TrainedRun, pool: tuple[Path, ...]) -> tuple[list[dict[str, Any]], Callable[[int], Tensor]]:
    """Return what names each input, and a function that reads the input at a place."""
    tables = [path.name.lower().endswith(TABLE_ENDINGS) for path in pool]
    if all(tables):
        parts = [run.read_rows(path) for path in pool]
        rows = torch.cat(parts)
        names = [
            {"table": str(path), "row": number}
            for path, part in zip(pool, parts, strict=True)
            for number in range(1, len(part) + 1)
        ]
        return names, lambda place: rows[place : place + 1]
    if any(tables):
        raise LeanBayesError("The pool has images and tables: give only one kind.")
    files = files_in(pool)
    return [{"image": str(path)} for path in files], lambda place: run.read(files[place])
