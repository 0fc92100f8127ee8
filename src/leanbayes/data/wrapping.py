"""Data sets of one's own: any map-style data set of (input, label) pairs becomes `Data`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from leanbayes.data.base import Data, Task, as_pair, check_map_style, held_out, in_memory
from leanbayes.data.streaming import own_randomness
from leanbayes.data.transforms import Augment, Normalise
from leanbayes.errors import LeanBayesError


def from_datasets(
    train: Dataset[Any],
    validation: Dataset[Any] | None = None,
    test: Dataset[Any] | None = None,
    *,
    name: str = "data",
    task: Task | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
    outputs: int | None = None,
    classes: Sequence[str] = (),
    normalise: Normalise | None = None,
    augment: Augment | None = None,
    ignore_index: int = -100,
) -> Data:
    """Wrap map-style data sets of (input, label) pairs; without `validation` a share of `train` is held out.

    The first example tells the task (an integer: classification; a map of integers: segmentation; floats: regression)
    and the input's shape. The number of classes is that of `classes` (also the data set's own), or one more than the
    greatest label in memory (tensors, or the data set's `targets`); else give `outputs`. uint8 images are taken from
    0 to 1 where `normalise` says nothing else.
    """
    for dataset in (train, validation, test):
        if dataset is not None:
            check_map_style(dataset)
    with own_randomness():
        first, label = as_pair(train[0])
    x, y = _tensor(first, "input"), _tensor(label, "label")
    if not isinstance(y, Tensor):
        raise LeanBayesError(f"A label is {type(label).__name__}, not a number or a tensor: wrap the data set.")
    task = task or _task(y)
    if task not in get_args(Task):
        raise LeanBayesError(f"There is no task {task!r}: choose one of {', '.join(get_args(Task))}.")
    names = tuple(classes) or tuple(str(item) for item in getattr(train, "classes", ()))
    if outputs is None:
        outputs = _count_targets(y) if task == "regression" else _count_classes(train, names, ignore_index)
    if task == "regression":
        _warn_of_scale(train)
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        if x.dim() != 3:
            raise LeanBayesError(
                f"Inputs are uint8 of shape {tuple(x.shape)}: give images a channel, (channels, height, width), or "
                "make floats of them."
            )
        normalise = normalise or Normalise((0.0,), (1.0,))
    if input_shape is None:
        input_shape = tuple(x.shape) if isinstance(x, Tensor) else ()
    if validation is None:
        kept, held = held_out(check_map_style(train), validation_share, seed)
        train, validation = Subset(train, kept), Subset(train, held)
    return Data(
        name=name,
        task=task,
        train=train,
        validation=validation,
        test=test,
        input_shape=input_shape,
        outputs=outputs,
        classes=names if task != "regression" and len(names) == outputs else (),
        normalise=normalise,
        augment=augment,
        ignore_index=ignore_index,
    )


def _tensor(value: Any, what: str) -> Any:
    """Look at an input or a label as the tensor that it becomes in a batch; a mapping or a sequence of them stays."""
    if isinstance(value, (Mapping, tuple, list)):
        return value
    if isinstance(value, (Tensor, np.ndarray, np.generic, bool, int, float)):
        return torch.as_tensor(value)
    raise LeanBayesError(
        f"The data set yields {type(value).__name__} as the {what}: give it a transform that makes tensors."
    )


def _task(y: Tensor) -> Task:
    if y.is_floating_point():
        return "regression"
    return "segmentation" if y.dim() > 1 else "classification"


def _count_targets(y: Tensor) -> int:
    """Count the outputs that targets need: values of a vector, or channels of a map."""
    return 1 if not y.dim() else y.shape[0] if y.dim() > 2 else y.shape[-1]


def _warn_of_scale(train: Any) -> None:
    """Warn of targets that the usual first noise and learning rates do not suit, where they can be looked at."""
    tensors = in_memory(train)
    if tensors is None or len(tensors.labels()) < 2:
        return
    targets = tensors.labels().double().flatten()
    mean, std = float(targets.mean()), float(targets.std())
    if not 0.05 <= std <= 20 or abs(mean) > 5 * std:
        warnings.warn(
            f"The targets have a mean of {mean:.3g} and a std of {std:.3g}: standardise them, or the noise of the data "
            "and the network will be long in finding their scale.",
            stacklevel=3,
        )


def _count_classes(train: Any, names: tuple[str, ...], ignore_index: int) -> int:
    if names:
        return len(names)
    tensors = in_memory(train)
    labels = getattr(train, "targets", None) if tensors is None else tensors.labels()
    if labels is None and isinstance(train, Subset):
        whole: Any = train.dataset
        return _count_classes(whole, tuple(getattr(whole, "classes", ())), ignore_index)
    if labels is None:
        raise LeanBayesError("The number of classes cannot be seen in the data set: give outputs=, or classes=.")
    labels = torch.as_tensor(labels)
    counted = labels[labels != ignore_index]
    if not counted.numel() or counted.min() < 0:
        raise LeanBayesError(f"Labels must be 0 or more, or ignore_index ({ignore_index}): mend them, or set it.")
    return int(counted.max()) + 1
