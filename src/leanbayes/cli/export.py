"""`leanbayes export RUN FILE`: write the model of a run as ONNX."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from leanbayes.cli.console import line
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import open_run
from leanbayes.core.json_values import json_text
from leanbayes.deploy.export import export_onnx
from leanbayes.training.progress import say

OnnxFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run as ONNX: mean and variance of its outputs in one pass, and class probabilities.

    The file takes any number of examples, prepared as in training: normalized images or standardized tables. Its
    metadata say how (normalize), and have the names of the classes, the units of the outputs, and the policy if decide
    has fitted one with the same --rule. For a table, the outputs are in units of the target's std.

    Attributes:
        run: folder of the run.
        out: file to write, such as model.onnx.
        rule: moments, or adjoint, which ranks inputs better and takes longer, also with settings, such as
            adjoint:mean=moments,margins=3.
        check: run the file with onnxruntime, if it is installed, and compare its outputs with torch.
        json: print JSON instead of a sentence.
    """

    run: RunFolder
    out: OnnxFile
    rule: str = "moments"
    check: bool = True
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(ExportOptions, words, "export")
    return lambda: _export(options)


def _export(options: ExportOptions) -> None:
    run = open_run(options.run, "cpu")
    shape = run.record["config"]["model"]["input_shape"]
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    metadata = _metadata(run.record["config"])
    say(
        sys.stderr.isatty(),
        f"Writing the graph of {run.record['config']['model']['name']}: a large network takes some minutes ...",
    )
    file = export_onnx(run.model, options.out, example, rule=options.rule, metadata=metadata, check=options.check)
    if options.json:
        found = {"file": str(file.path), "bytes": file.bytes, "inputs": file.inputs, "outputs": file.outputs}
        print(json_text({"run": str(options.run), **found, "error": file.error}))
        return
    checked = "not checked" if file.error is None else f"within {file.error:.0e} of torch"
    size = f"{file.bytes / 2**20:.1f} MiB" if file.bytes >= 2**20 else f"{file.bytes / 2**10:.0f} KiB"
    line(f"{file.path}: {size}, from {', '.join(file.inputs)} to {', '.join(file.outputs)}, {checked}")


def _metadata(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a program needs to know about the inputs and outputs of a file."""
    found: dict[str, Any] = {"data": settings["data"], "input_shape": settings["model"]["input_shape"]}
    if settings["classes"]:
        found["classes"] = settings["classes"]
    scales = settings.get("scales") or {}
    if settings["normalize"] is not None:  # of images with values from 0 to 1
        found["normalize"] = settings["normalize"]
    elif scales.get("input_mean"):
        found["normalize"] = {"mean": scales["input_mean"], "std": scales["input_std"]}
    if scales.get("target_mean"):
        found["target"] = {"mean": scales["target_mean"], "std": scales["target_std"]}
    return found
