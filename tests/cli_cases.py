"""Shared by the tests of the command line."""

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.networks import build
from leanbayes.training import read_record
from leanbayes.training.loop import Loop

RANDOM = np.random.default_rng(0)
TOY = ("--data", "toy", "--epochs", 1, "--quiet")
EVALUATION = ("--evaluation.shifts", "noise", "--evaluation.shift-examples", 20)  # a short one
TINY = (*TOY, "--model-options", "hidden=[4]", *EVALUATION)
TIMES = re.compile(r"seconds|_ms|time_ratio")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": ""}


class Output(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Output]


def must_not_train(self: Loop) -> None:
    raise AssertionError("it trains again")


def command(*words: Any) -> Output:
    """Run a command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words])
    return Output(code, out.getvalue(), err.getvalue())


def run_main(words: list[str], folder: Path) -> None:
    """Run a command in this process, and write what it prints to a file named after the rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    Path(folder, f"{os.environ['RANK']}.out").write_text(out.getvalue())
    assert code == 0


def load_run(folder: Path) -> lb.BayesianModel:
    model = read_record(folder)["config"]["model"]
    network = build(model["name"], tuple(model["input_shape"]), model["outputs"], **model["options"])
    return lb.load(folder / "model.safetensors", network).eval()


def write_image(path: Path, *shape: int) -> Path:
    """Write a random image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


def without_times(values: Any) -> Any:
    """Leave out times at any depth, and replace NaN by -1, because NaN does not equal itself."""
    if isinstance(values, dict):
        return {name: without_times(value) for name, value in values.items() if not TIMES.search(name)}
    if isinstance(values, list):
        return [without_times(value) for value in values]
    return -1.0 if values != values else values
