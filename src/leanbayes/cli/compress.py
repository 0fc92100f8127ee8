"""`leanbayes compress RUN [OUT]`: search for a compact file that is small enough, or good enough."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from leanbayes.cli.console import cell
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import open_run
from leanbayes.cli.text_tables import show
from leanbayes.core.json_values import json_text
from leanbayes.deploy.compact.compact_file import CompactFile
from leanbayes.deploy.compact.compress import compress
from leanbayes.deploy.compact.search import Goal, parse_size
from leanbayes.errors import LeanBayesError, printable
from leanbayes.methods import METHODS

CompactPath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[OUT]")]


@dataclass(frozen=True)
class CompressOptions:
    """Let the weights of a trained run share few Gaussians, and write them to a compact file.

    It shares the weights finely and coarsely, and scores each file on the validation data. With --target-size it keeps
    the best of the files that are small enough, with --max-nll-increase the smallest of those that are good enough, and
    with neither the finest.

    Attributes:
        run: folder of the run.
        out: file to write. None means model.lbc in that folder.
        target_size: the largest size of the file in bytes, such as 700KB or 1.5MiB.
        max_nll_increase: by how much the mean negative log-likelihood of the validation data may increase.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        device: where to predict. None means the GPU, if there is one.
        seed: seed of the samples.
        json: print JSON instead of a table.
    """

    run: RunFolder
    out: CompactPath = None
    target_size: str | None = None
    max_nll_increase: float | None = None
    samples: int | None = None
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(CompressOptions, _with_out_last(words), "compress")
    size = options.target_size
    Goal(None if size is None else parse_size(size), options.max_nll_increase)  # raises errors before the run is loaded
    return lambda: _compress(options)


def _with_out_last(words: list[str]) -> list[str]:
    """Accept --out FILE for OUT, because other commands have that flag."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--out=") else [word])]
    if "--out" not in split[:-1]:
        return words
    place = split.index("--out")
    return [*split[:place], *split[place + 2 :], split[place + 1]]


def _compress(options: CompressOptions) -> None:
    run = open_run(options.run, options.device)
    if not run.model.method.shareable_weights:
        others = ", ".join(name for name, method in METHODS.items() if method.shareable_weights)
        raise LeanBayesError(
            f"{options.run} is a run of {type(run.model.method).__name__}, whose weights cannot be shared: "
            f"compress one of {others}."
        )
    data = run.data(options.root)
    if data.validation is None:
        raise LeanBayesError(f"{data.name} has no validation data to choose on: train with --validation-share above 0.")

    def report(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    file = compress(
        run.model,
        options.out or options.run / "model.lbc",
        target_size=options.target_size,
        max_nll_increase=options.max_nll_increase,
        data=run.batches(data, data.validation).epoch,
        samples=options.samples,
        seed=options.seed,
        target_scale=data.target_std,
        progress=report,
    )
    _print(options, file)


def _print(options: CompressOptions, file: CompactFile) -> None:
    chosen, before = file.chosen, file.nll_before
    assert chosen is not None
    assert before is not None
    if options.json:
        result = {"run": str(options.run), "file": str(file.path), "nll_before": before, "chosen": asdict(chosen)}
        print(json_text({**result, "tried": [asdict(one) for one in file.tried]}))
        return
    view = Table("tried", box=None)
    for name in ("bytes", "NLL", "NLL\nincrease", ""):
        view.add_column(name, justify="right")
    for one in file.tried:
        mark = "chosen" if one is chosen else ""
        view.add_row(cell(one.trial), f"{one.bytes:,}", f"{one.nll:.4f}", f"{one.nll - before:+z.4f}", mark)
    show(f"{file.path}: {file.bytes:,} bytes, validation NLL {chosen.nll:.4f}", view)
