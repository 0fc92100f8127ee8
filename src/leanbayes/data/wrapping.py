"""Wrap any map-style data set of (input, label) pairs, or of dicts, as `Data`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from leanbayes.core.arguments import checked
from leanbayes.data.base import Data, Task, as_pair, check_map_style, held_out, in_memory, label_key
from leanbayes.data.streaming import own_randomness
from leanbayes.data.transforms import Augment, Normalize
from leanbayes.errors import LeanBayesError


@checked()
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
    normalize: Normalize | None = None,
    augment: Augment | None = None,
    ignore_index: int = -100,
) -> Data:
    """Wrap map-style data sets of (input, label) pairs as `Data`.

    Examples may also be dicts, as those of Hugging Face data sets: with the label under "labels", "label" or "target".
    The other entries are the input. If there are several, such as "input_ids" and "attention_mask", the network is
    called with them as keywords; texts are left out.

    Args:
        train: training data.
        validation: validation data. None means that a share of `train` is held out.
        test: test data, if there are any.
        name: name of the data set.
        task: "classification", "segmentation" or "regression". None means that the first label determines it: an
            integer is a class, a map of integers is a segmentation, and floats are regression targets.
        validation_share: share of `train` that is held out if `validation` is None.
        seed: seed of that split.
        input_shape: shape of one example. None means that of the first example.
        outputs: number of classes or targets. None means that it is found in the data: the length of `classes` or of
            the data set's attribute `classes` (or the names in its `features`), or one more than the largest label in
            memory (tensors, or the data set's attribute `targets` or column of labels).
        classes: names of the classes.
        normalize: normalization of images. None means that uint8 images are scaled to [0, 1] and others left unchanged.
        augment: augmentation of training images.
        ignore_index: label of pixels and examples that do not count.

    Returns:
        The data set for `lb.fit` and `lb.evaluate`.

    Raises:
        LeanBayesError: A data set cannot be indexed, is empty or does not return pairs of numbers or tensors; the task
            is unknown; or the number of classes cannot be found.

    Warns:
        UserWarning: The regression targets are far from standardized.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from leanbayes.data import from_datasets
        >>> from_datasets(TensorDataset(torch.randn(20, 6), torch.arange(20) % 3))
        Data('data', 'classification', train=18, validation=2, test=None, input_shape=(6,), classes=3)
    """
    for dataset in (train, *(one for one in (validation, test) if one is not None)):
        check_map_style(dataset)
    with own_randomness():
        first, label = as_pair(train[0])
    x, y = _tensor(first, "input"), _tensor(label, "label")
    if not isinstance(y, Tensor):
        raise LeanBayesError(f"A label is {type(label).__name__}, not a number or a tensor: convert the labels.")
    task = task or _task(y)
    if task not in get_args(Task):
        raise LeanBayesError(f"There is no task {task!r}: use {', '.join(get_args(Task))}.")
    names = tuple(classes) or _class_names(train)
    if outputs is None:
        outputs = _count_targets(y) if task == "regression" else _count_classes(train, names, ignore_index)
    if task == "regression":
        _warn_about_scale(train)
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        if x.dim() != 3:
            raise LeanBayesError(
                f"Inputs are uint8 of shape {tuple(x.shape)}: reshape images to (channels, height, width), or convert "
                "the inputs to floats."
            )
        normalize = normalize or Normalize((0.0,), (1.0,))
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
        normalize=normalize,
        augment=augment,
        ignore_index=ignore_index,
    )


def _tensor(value: Any, what: str) -> Any:
    """Return an input or a label as a tensor; return mappings and sequences of them unchanged."""
    if isinstance(value, (Mapping, tuple, list)):
        return value
    if isinstance(value, (Tensor, np.ndarray, np.generic, bool, int, float)):
        return torch.as_tensor(value)
    raise LeanBayesError(
        f"The data set returns {type(value).__name__} as the {what}: add a transform that converts it to a tensor."
    )


def _task(y: Tensor) -> Task:
    if y.is_floating_point():
        return "regression"
    return "segmentation" if y.dim() > 1 else "classification"


def _count_targets(y: Tensor) -> int:
    """Return the number of regression targets: values of a vector, or channels of a map."""
    return 1 if not y.dim() else y.shape[0] if y.dim() > 2 else y.shape[-1]


def _warn_about_scale(train: Any) -> None:
    """Warn about targets in memory whose scale does not suit the initial noise and the usual learning rates."""
    tensors = in_memory(train)
    if tensors is None or len(tensors.labels()) < 2:
        return
    targets = tensors.labels().double().flatten()
    mean, std = float(targets.mean()), float(targets.std())
    if not 0.05 <= std <= 20 or abs(mean) > 5 * std:
        warnings.warn(
            f"The targets have a mean of {mean:.3g} and a std of {std:.3g}: standardize them, because otherwise the "
            "training is slow to find their scale.",
            stacklevel=3,
        )


def _class_names(train: Any) -> tuple[str, ...]:
    """Return the names of the classes: the attribute `classes`, or those in `features` of Hugging Face data sets."""
    features: Any = getattr(train, "features", None)
    label = label_key(features) if isinstance(features, Mapping) else None
    names = getattr(train, "classes", None) or getattr(features[label] if label else None, "names", None)
    return tuple(map(str, names or ()))


def _labels(train: Any) -> Any:
    """Return all labels from the attribute `targets`, or from the column of a Hugging Face data set."""
    label = label_key(getattr(train, "column_names", None) or ())
    return getattr(train, "targets", None) if label is None else train[label][:]


def _count_classes(train: Any, names: tuple[str, ...], ignore_index: int) -> int:
    if names:
        return len(names)
    tensors = in_memory(train)
    labels = _labels(train) if tensors is None else tensors.labels()
    if labels is None and isinstance(train, Subset):
        whole: Any = train.dataset
        return _count_classes(whole, _class_names(whole), ignore_index)
    if labels is None:
        raise LeanBayesError("The data set does not say how many classes it has: pass outputs= or classes=.")
    labels = torch.as_tensor(labels)
    counted = labels[labels != ignore_index]
    if not counted.numel() or counted.min() < 0:
        raise LeanBayesError(f"Labels must be 0 or more, or ignore_index ({ignore_index}): fix them, or change it.")
    return int(counted.max()) + 1
