"""`fit`: a training for every method, on accelerate."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import Dataset

from leanbayes.bayesian import BayesianModel
from leanbayes.data import Data, from_datasets, load
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Select
from leanbayes.likelihoods import Likelihood
from leanbayes.method import Method
from leanbayes.training.recipe import Recipe
from leanbayes.training.run import Run


def fit(
    model: nn.Module,
    method: Method,
    data: Data | Dataset[Any] | str | Path,
    *,
    out: str | Path | None = None,
    likelihood: Likelihood | None = None,
    select: Select = None,
    overwrite: bool = False,
    progress: bool = True,
    notes: Mapping[str, Any] | None = None,
    **settings: Any,
) -> BayesianModel:
    """Train a network by a method, and return the Bayesian model, in evaluation mode.

    model: the network to start from; it is left as it is. data: a `leanbayes.data.Data`, the name of one, or any torch
    Dataset of (x, y), of which a tenth is held out. settings: those of `leanbayes.training.Recipe`, such as epochs=30.
    out: a folder for run.json, checkpoints, tensorboard and the trained model.safetensors. The same call resumes a
    run that was stopped there, and returns the model of a finished one; overwrite=True starts anew.
    notes: more settings for run.json, such as the network's name. progress: show a bar, or lines without a terminal.
    """
    recipe = Recipe().changed(settings)
    if not isinstance(method, Method):
        raise LeanBayesError(f"method must be an instance such as lb.MeanField(), not {method!r}.")
    task = (
        data
        if isinstance(data, Data)
        else load(data)
        if isinstance(data, (str, Path))
        else from_datasets(data, outputs=0)
    )
    with _accelerated(recipe) as accelerator, torch.inference_mode(False), torch.enable_grad():
        run = Run(model, method, task, recipe, accelerator, out, likelihood, select, dict(notes or {}))
        return run.train(overwrite, progress and accelerator.is_main_process)


@contextlib.contextmanager
def _accelerated(recipe: Recipe) -> Iterator[Accelerator]:
    """Give an accelerator, and put accelerate's and torch's global state back as they were."""
    before = dict(AcceleratorState._shared_state)
    accelerator = _accelerator(recipe)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield accelerator
    finally:
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(before)


def _accelerator(recipe: Recipe) -> Accelerator:
    """Make an accelerator for this recipe, whatever was made in this process before."""
    cpu = recipe.device == "cpu" or (recipe.device is None and not torch.cuda.is_available())
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise LeanBayesError("device='cuda' needs a GPU that torch can see: leave it out to train on the CPU.")
    if recipe.precision == "fp16" and cpu:
        raise LeanBayesError("precision='fp16' needs a GPU: use 'bf16' or 'fp32' on a CPU.")
    if PartialState._shared_state and (PartialState().device.type == "cpu") != cpu:
        AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState._shared_state.clear()
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(recipe.precision or "", recipe.precision),
        cpu=cpu,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=recipe.unused_parameters)],
    )
    if accelerator.num_processes == 1 and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
        warnings.warn(
            "A launcher has set MASTER_PORT but started only this process: for several on a CPU, use torchrun.",
            stacklevel=4,
        )
    return accelerator
