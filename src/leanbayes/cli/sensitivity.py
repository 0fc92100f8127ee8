"""`leanbayes sensitivity RUN`: which layers hold the weights that matter."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.cli.tables import show
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.plain import json_text
from leanbayes.selection import Per, check_rate
from leanbayes.sensitivities import DEFAULT, Kind, Sensitivity, sensitivity

_BATCH, _BAR = 64, 30  # examples of a batch, and letters of a bar


@dataclass(frozen=True)
class SensitivityOptions:
    """Score all weights of a trained run on its training data, and tell how they spread over the layers.

    The score of a weight says how much its noise would change the outputs. PBN makes those with the highest scores
    Bayesian: the table tells how many of them each layer has.

    Attributes:
        run: folder of the run.
        kind: how a weight is scored: jacobian (how the outputs change with it), moment (the same from the moment
            graph), fisher (mean squared gradient), paper (size of the mean gradient), magnitude or random.
        rate: share of the weights that PBN would make Bayesian.
        per: choose single weights, or whole rows or layers.
        examples: training examples to look at, at most.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        device: where to compute. None means the GPU, if there is one.
        seed: number that random choices and signs follow from.
        json: print JSON, not a table.
    """

    run: RunFolder
    kind: Kind = DEFAULT
    rate: float = 0.05
    per: Per = "weight"
    examples: int = 2048
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def sensitivity_of_run(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(SensitivityOptions, words, "sensitivity")
    check_rate(options.rate)
    if options.examples < 1:
        raise LeanBayesError(f"--examples {options.examples} must be at least 1.")
    return lambda: _tell(options)


def _tell(options: SensitivityOptions) -> None:
    found = _score(open_run(options.run, options.device), options)
    shares, chosen = found.per_layer(), found.chosen(options.rate, options.per)
    layers: list[dict[str, Any]] = [
        {"name": slot.name, "weights": slot.numel, "share": shares[slot.name], "chosen": chosen[slot.name]}
        for slot in found.layout
    ]
    if options.json:
        print(json_text({"run": str(options.run), "kind": options.kind, "rate": options.rate, "layers": layers}))
        return
    view = Table("layer", box=None)
    for name in ("weights", "share of\nall scores", f"in the top\n{options.rate:.3g}"):
        view.add_column(name, justify="right")
    view.add_column("")
    most = max(sum(chosen.values()), 1)
    for layer in layers:
        bar = "█" * round(_BAR * layer["chosen"] / most)
        view.add_row(
            escape(layer["name"]), f"{layer['weights']:,}", f"{layer['share']:.3f}", f"{layer['chosen']:,}", bar
        )
    total = sum(chosen.values())
    show(f"{options.run}, {options.kind}: {total:,} of {found.layout.numel:,} weights", view)


def _score(run: TrainedRun, options: SensitivityOptions) -> Sensitivity:
    data, bnn = run.data(options.root), run.model
    batches = Batches(
        data.train,
        _BATCH,
        device=bnn.device,
        seed=options.seed,
        normalise=data.normalise,
        workers=run.record["config"]["recipe"]["workers"],
    )
    some = islice(batches.epoch(), -(-options.examples // _BATCH))
    if len(bnn.layout):
        return sensitivity(bnn, some, options.kind, seed=options.seed)
    return sensitivity(bnn.to_deterministic(), some, options.kind, likelihood=bnn.likelihood, seed=options.seed)
