"""Data sets of one's own: any map-style data set of (input, label) pairs becomes `Data`."""

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
        outputs = (
            (y.shape[-1] if y.dim() else 1) if task == "regression" else _count_classes(train, names, ignore_index)
        )
    if isinstance(x, Tensor) and x.dtype == torch.uint8 and x.dim() == 3:
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
        f"The data set yields an {what} of type {type(value).__name__}: give it a transform that makes tensors."
    )


def _task(y: Tensor) -> Task:
    if y.is_floating_point():
        return "regression"
    return "segmentation" if y.dim() > 1 else "classification"


def _count_classes(train: Any, names: tuple[str, ...], ignore_index: int) -> int:
    if names:
        return len(names)
    tensors = in_memory(train)
    labels = getattr(train, "targets", None) if tensors is None else tensors.labels()
    if labels is None:
        raise LeanBayesError("The number of classes cannot be seen in the data set: give outputs=, or classes=.")
    labels = torch.as_tensor(labels)
    counted = labels[labels != ignore_index]
    if not counted.numel() or counted.min() < 0:
        raise LeanBayesError(f"Labels must be 0 or more, or ignore_index ({ignore_index}): mend them, or set it.")
    return int(counted.max()) + 1
