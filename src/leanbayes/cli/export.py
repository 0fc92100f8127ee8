"""`leanbayes export RUN FILE`: write the model of a run as ONNX."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import open_run
from leanbayes.export import export_onnx

OnnxFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run as ONNX: mean and variance of its outputs in one pass, and probabilities of classes.

    The file takes any number of examples, prepared as for the training: pictures normalised, tables standardised (see
    the run's run.json). Outputs of a table are in units of the target's std.

    Attributes:
        run: folder of the run.
        out: file to write, such as model.onnx.
        check: run the file with onnxruntime, if it is installed, and compare it with torch.
    """

    run: RunFolder
    out: OnnxFile
    check: bool = True


def export_run(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(ExportOptions, words, "export")
    return lambda: _export(options)


def _export(options: ExportOptions) -> None:
    run = open_run(options.run, "cpu")
    shape = run.record["config"]["model"]["input_shape"]
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    made = export_onnx(run.model, options.out, example, check=options.check)
    checked = "not checked" if made.error is None else f"within {made.error:.0e} of torch"
    size = f"{made.bytes / 2**20:.1f} MiB" if made.bytes >= 2**20 else f"{made.bytes / 2**10:.0f} KiB"
    print(f"{made.path}: {size}, from {', '.join(made.inputs)} to {', '.join(made.outputs)}, {checked}")
