"""What the tests of the command line share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import leanbayes as lb
from leanbayes.models import build
from leanbayes.training import read_record
from leanbayes.training.loop import Loop

RANDOM = np.random.default_rng(0)
TOY = ("--data", "toy", "--epochs", 1, "--quiet")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": ""}


class Told(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Told]


def must_not_train(self: Loop) -> None:
    raise AssertionError("it trains again")


def load_run(folder: Path) -> lb.BayesianModel:
    model = read_record(folder)["config"]["model"]
    network = build(model["name"], tuple(model["input_shape"]), model["outputs"], **model["options"])
    return lb.load(folder / "model.safetensors", network).eval()


def picture(path: Path, *shape: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


def without_times(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scores.items() if name != "predict_ms_per_1000"}
