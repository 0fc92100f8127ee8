"""`fit`: train any network with any method, on accelerate."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import Dataset

from leanbayes.core.arguments import checked
from leanbayes.core.layout import Select
from leanbayes.core.network import has_batchnorm, is_finite
from leanbayes.data import Data, from_datasets, load
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.likelihoods.base import P
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.defaults import OF_BACKPROP, with_engine
from leanbayes.model.method import Method
from leanbayes.training.recipe import Recipe, RecipeSettings
from leanbayes.training.run import Run
from leanbayes.training.run_folder import checked_folder, remove_run
from leanbayes.training.temperatures import chosen_temperature, train_with_each
from leanbayes.training.tracking import OnLog, checked_trackers


@overload
def fit(
    model: nn.Module,
    method: Method,
    data: Data | Dataset[Any] | str | Path,
    *,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    likelihood: Likelihood[P],
    select: Select = None,
    overwrite: bool = False,
    progress: bool = True,
    notes: Mapping[str, Any] | None = None,
    on_log: OnLog | None = None,
    log_with: Any = None,
    **settings: Unpack[RecipeSettings],
) -> BayesianModel[P]: ...
@overload
def fit(
    model: nn.Module,
    method: Method,
    data: Data | Dataset[Any] | str | Path,
    *,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    likelihood: None = None,
    select: Select = None,
    overwrite: bool = False,
    progress: bool = True,
    notes: Mapping[str, Any] | None = None,
    on_log: OnLog | None = None,
    log_with: Any = None,
    **settings: Unpack[RecipeSettings],
) -> BayesianModel[Any]: ...


@checked(recipe="an instance such as lb.Recipe(epochs=30)")
def fit(
    model: nn.Module,
    method: Method,
    data: Data | Dataset[Any] | str | Path,
    *,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    likelihood: Likelihood[Any] | None = None,
    select: Select = None,
    overwrite: bool = False,
    progress: bool = True,
    notes: Mapping[str, Any] | None = None,
    on_log: OnLog | None = None,
    log_with: Any = None,
    **settings: Unpack[RecipeSettings],
) -> BayesianModel[Any]:
    """Train a network with a method, and return the Bayesian model. The network itself is not changed.

    Args:
        model: The network to start from. A `BayesianModel` hands over its means and variances.
        method: The method, such as `lb.MeanField()`.
        data: A `leanbayes.data.Data` with its own splits, the name of a data set, or any torch `Dataset` of pairs
            (x, y), of which a tenth is held out.
        recipe: The settings of the training. By default `lb.Recipe()`.
        out: A folder for run.json, checkpoints, TensorBoard logs and the trained model.safetensors. The same call
            resumes a run that was stopped there, and returns the model of a finished one. Only one process at a time
            can train in a folder.
        likelihood: What the outputs mean. By default the likelihood of the data, e.g. `lb.Categorical()` for classes.
        select: The parameters that become Bayesian, as in `lb.bayesianize`.
        overwrite: Whether to remove the run that `out` holds, and start again. Other files in it stay.
        progress: Whether to show a progress bar, or lines if there is no terminal. Without it, a posterior that
            collapsed is a warning in the log.
        notes: More settings for run.json, such as the name of the network. Only JSON values.
        on_log: A function that gets the number of steps done and a dict of metrics, such as {"train/loss": 0.31,
            "validation/accuracy": 0.94}, at each log entry, and {"final/accuracy": ...} at the end. What it raises
            stops the training.
        log_with: Trackers of accelerate that get the same metrics: "wandb", "mlflow" and others that are installed, an
            `accelerate.tracking.GeneralTracker`, or a list of them. A tracker object is not closed.
        **settings: Settings that differ from `recipe`, such as epochs=30: all those of `lb.Recipe`.

    Returns:
        The trained model, in evaluation mode.

    Raises:
        LeanBayesError: An argument is wrong, `out` holds another run, another process trains there, a file cannot be
            written, or the loss becomes NaN or infinite.
        FileFormatError: The record of the run to resume, or every checkpoint of it, is damaged.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP has stopped the run, after a checkpoint if `out` is given.

    Example:
        >>> bnn = lb.fit(network, lb.MeanField(), train_set, epochs=30, out="runs/first")
        >>> bnn.predict(x).probs  # the probabilities of the classes
    """
    changed = (recipe or Recipe()).changed(settings)
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if not is_finite(parameter):
            raise LeanBayesError(f"{name} of the model has NaN or infinite values: start from a model without them.")
    folder = None if out is None else checked_folder(out)
    if isinstance(data, (str, Path)):
        data = load(data)
    elif not isinstance(data, Data):
        data = from_datasets(data, outputs=0)
    found: Data = data
    used = likelihood or data.likelihood()
    own_optimizer = any(getattr(changed, name) != getattr(Recipe(), name) for name in OF_BACKPROP)
    of_images = data.has_color_classes and used.has_logits and has_batchnorm(model)
    method = with_engine(method, of_images and not own_optimizer)
    changed = changed.for_task(method, used)
    trackers = checked_trackers(log_with, folder)

    def train(temperature: float, folder: Path | None, overwrite: bool = overwrite) -> tuple[BayesianModel, float]:
        own = changed.changed({"temperature": temperature})
        with _accelerated(own, trackers, folder) as accelerator, torch.inference_mode(False), torch.enable_grad():
            if changed.temperature == "auto" and accelerator.num_processes > 1:
                raise LeanBayesError("temperature='auto' needs one process: give a number to train with several.")
            run = Run(model, method, found, own, accelerator, folder, likelihood, select, dict(notes or {}), on_log)
            return run.train(overwrite, progress and accelerator.is_main_process), run.held_out_nll()

    if changed.temperature is not None and changed.temperature != "auto":
        return train(changed.temperature, folder)[0]
    if not method.has_temperature:
        return train(1.0, folder)[0]
    chosen = None if folder is None or overwrite else chosen_temperature(folder)
    if chosen is not None:
        return train(chosen, folder)[0]
    if folder is not None and overwrite:
        remove_run(folder)
    return train_with_each(train, folder, progress)[0]


@contextlib.contextmanager
def _accelerated(recipe: Recipe, trackers: list[Any], folder: Path | None) -> Iterator[Accelerator]:
    """Yield an accelerator, and restore the global state of accelerate and torch afterwards."""
    before = dict(AcceleratorState._shared_state)
    accelerator = _accelerator(recipe, trackers, folder)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield accelerator
    finally:
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(before)


def _accelerator(recipe: Recipe, trackers: list[Any], folder: Path | None) -> Accelerator:
    """Return a new accelerator for this recipe, whatever this process has used before."""
    cpu = recipe.device == "cpu" or (recipe.device is None and not torch.cuda.is_available())
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise LeanBayesError("device='cuda' needs a GPU that torch can use: leave it out to train on the CPU.")
    if recipe.precision == "fp16" and cpu:
        raise LeanBayesError("precision='fp16' needs a GPU: use 'bf16' or 'fp32' on a CPU.")
    if PartialState._shared_state and (PartialState().device.type == "cpu") != cpu:
        AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState._shared_state.clear()
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(recipe.precision or "", recipe.precision),
        cpu=cpu,
        log_with=trackers or None,
        project_dir=folder,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=recipe.unused_parameters)],
    )
    if accelerator.num_processes == 1 and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
        warnings.warn(
            "A launcher has set MASTER_PORT but started only this process: to start several on a CPU, use torchrun.",
            stacklevel=4,
        )
    return accelerator
