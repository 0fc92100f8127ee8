"""`leanbayes sensitivity RUN`: which layers hold the weights that matter most."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from leanbayes.cli.console import cell
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.cli.text_tables import show
from leanbayes.core.json_values import json_text
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.methods.pbn.estimators import DEFAULT, Kind
from leanbayes.methods.pbn.selection import Per, check_rate
from leanbayes.methods.pbn.sensitivity import Sensitivity, sensitivity

_BATCH, _BAR = 64, 30  # examples per batch, and characters of a full bar


@dataclass(frozen=True)
class SensitivityOptions:
    """Score all weights of a trained run on its training data, and show how the scores are distributed over the layers.

    The score of a weight says how much its noise would change the outputs. PBN makes the weights with the highest
    scores Bayesian: the table shows how many of them each layer has.

    Attributes:
        run: folder of the run.
        kind: how a weight is scored: jacobian (how the outputs change with it), moment (the same from the moment
            graph), fisher (mean squared gradient), paper (size of the mean gradient), magnitude or random.
        rate: fraction of the weights that PBN would make Bayesian.
        per: choose single weights, or whole rows or layers.
        examples: largest number of training examples to use.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        device: where to compute. None means the GPU, if there is one.
        seed: seed of random choices and signs.
        json: print JSON instead of a table.
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


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(SensitivityOptions, words, "sensitivity")
    check_rate(options.rate)
    if options.examples < 1:
        raise LeanBayesError(f"--examples {options.examples} must be at least 1.")
    return lambda: _print(options)


def _print(options: SensitivityOptions) -> None:
    found = _score(open_run(options.run, options.device), options)
    shares, chosen = found.per_layer(), found.chosen(options.rate, options.per)
    layers: list[dict[str, Any]] = [
        {"name": slot.name, "weights": slot.numel, "share": shares[slot.name], "chosen": chosen[slot.name]}
        for slot in found.layout
    ]
    overlap = found.overlap(options.rate, options.per)
    if options.json:
        document = {"run": str(options.run), "kind": options.kind, "rate": options.rate, "overlap": overlap}
        print(json_text({**document, "layers": layers}))
        return
    view = Table("layer", box=None)
    for name in ("weights", "share of\nall scores", f"in the top\n{100 * options.rate:.3g} %"):
        view.add_column(name, justify="right")
    view.add_column("")
    most = max(sum(chosen.values()), 1)
    for layer in layers:
        bar = "█" * round(_BAR * layer["chosen"] / most)
        view.add_row(cell(layer["name"]), f"{layer['weights']:,}", f"{layer['share']:.3f}", f"{layer['chosen']:,}", bar)
    total = sum(chosen.values())
    show(f"{options.run}, {options.kind}: {total:,} of {found.layout.numel:,} weights", view)
    if overlap is not None:
        top = f"{100 * options.rate:.3g} %"
        print(f"About {overlap:.0%} of them are in the exact top {top} (estimated from random signs).")


def _score(run: TrainedRun, options: SensitivityOptions) -> Sensitivity:
    data, bnn = run.data(options.root), run.model
    batches = Batches(
        data.train,
        _BATCH,
        device=bnn.device,
        seed=options.seed,
        normalize=data.normalize,
        workers=run.record["config"]["recipe"]["workers"],
    )
    chosen = islice(batches.epoch(), -(-options.examples // _BATCH))
    if len(bnn.layout):
        return sensitivity(bnn, chosen, options.kind, seed=options.seed)
    return sensitivity(bnn.to_deterministic(), chosen, options.kind, likelihood=bnn.likelihood, seed=options.seed)
