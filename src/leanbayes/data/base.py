"""The description of a data set that the rest of leanbayes works with: three splits, a task and its preprocessing."""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from leanbayes.core.noise import mix
from leanbayes.data.transforms import Augment, Normalize
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Categorical, Gaussian, Likelihood

Task = Literal["classification", "segmentation", "regression"]
LABELS = ("labels", "label", "target")  # names of the label in examples that are dicts


@dataclass(frozen=True)
class Data:
    """A data set with its three splits, its task and its preprocessing.

    `load` and `from_datasets` create it.

    Attributes:
        name: name of the data set.
        task: "classification", "segmentation" or "regression".
        train: map-style data set of (input, label) pairs to train on.
        validation: held-out part of the training data. Settings are chosen on it.
        test: test data, or None if there are none.
        input_shape: shape of one example, (channels, height, width) or (features,). It is () if inputs are not tensors.
        outputs: number of classes, or of regression targets.
        classes: names of the classes, or () if they are unknown.
        normalize: normalization of every batch of images, on the device.
        augment: augmentation of training batches.
        ignore_index: label of pixels and examples that do not count.
        input_mean: mean of each input column of a table. Inputs are standardized with it.
        input_std: std of each input column of a table.
        target_mean: mean of each target of a table. Targets are standardized with it.
        target_std: std of each target of a table.

    Example:
        >>> import leanbayes.data
        >>> leanbayes.data.load("digits")
        Data('digits', 'classification', train=1078, validation=120, test=599, input_shape=(1, 8, 8), classes=10)
    """

    name: str
    task: Task
    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any] | None
    input_shape: tuple[int, ...]
    outputs: int
    classes: tuple[str, ...] = ()
    normalize: Normalize | None = None
    augment: Augment | None = None
    ignore_index: int = -100
    input_mean: tuple[float, ...] = ()
    input_std: tuple[float, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split}={_size(getattr(self, split))}" for split in ("train", "validation", "test"))
        outputs = "outputs" if self.task == "regression" else "classes"
        return f"Data({self.name!r}, {self.task!r}, {sizes}, input_shape={self.input_shape}, {outputs}={self.outputs})"

    @property
    def has_color_classes(self) -> bool:
        """Whether the task is to classify color images."""
        return self.task == "classification" and len(self.input_shape) == 3 and self.input_shape[0] == 3

    def augmentation(self, choice: str = "standard") -> Augment | None:
        """Return the augmentation of training images by its name in `Recipe.augment`.

        Args:
            choice: "standard" for that of this data set, "trivial" to add TrivialAugment to it, or "none".

        Raises:
            LeanBayesError: The choice is "trivial", and inputs are not images.
        """
        if choice != "trivial":
            return None if choice == "none" else self.augment
        if len(self.input_shape) != 3:
            found = f"have the shape {self.input_shape}" if self.input_shape else "are not tensors of one shape"
            raise LeanBayesError(
                f"augment='trivial' is for images of shape (channels, height, width), but inputs {found}: leave it out."
            )
        return replace(self.augment or Augment(crop=0, flip=False), trivial=True)

    def likelihood(self) -> Likelihood:
        """Return the usual likelihood of the task: categorical, or for a regression a Gaussian with learned noise."""
        if self.task == "regression":
            return Gaussian(std=0.5, learned=True)
        return Categorical(ignore_index=self.ignore_index)


def _size(dataset: Dataset[Any] | None) -> int | str | None:
    return len(dataset) if isinstance(dataset, Sized) else None if dataset is None else type(dataset).__name__


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose examples are in memory.

    Args:
        x: inputs as a tensor or an array: uint8 images of shape (examples, channels, height, width), or floats.
        y: one label or float target per example.

    Raises:
        LeanBayesError: `x` and `y` do not have the same number of examples.

    Example:
        >>> import torch
        >>> from leanbayes.data import ArrayDataset
        >>> ArrayDataset(torch.zeros(20, 6), torch.arange(20) % 3)
        ArrayDataset(20 examples, x: float32 (6,), y: int64 ())
    """

    def __init__(self, x: Any, y: Any) -> None:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if not x.dim() or not y.dim() or len(x) != len(y):
            raise LeanBayesError(
                f"Inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)} do not match: pass one label "
                "per example."
            )
        self.x = x.float() if x.dtype == torch.float64 else x
        self.y = y.float() if y.is_floating_point() else y.long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __repr__(self) -> str:
        x, y = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in (self.x, self.y))
        return f"ArrayDataset({len(self)} examples, x: {x}, y: {y})"


class InMemory(NamedTuple):
    """Tensors of inputs and labels, and the rows of them that are the examples (None: all)."""

    x: Tensor
    y: Tensor
    rows: Tensor | None = None

    def bytes(self) -> int:
        """Return the size of the examples."""
        share = 1.0 if self.rows is None else len(self.rows) / max(len(self.x), 1)
        return int(share * (self.x.nbytes + self.y.nbytes))

    def labels(self) -> Tensor:
        """Return the labels of the examples."""
        return self.y if self.rows is None else self.y[self.rows]

    def inputs(self) -> Tensor:
        """Return the inputs of the examples."""
        return self.x if self.rows is None else self.x[self.rows]


def in_memory(dataset: Any) -> InMemory | None:
    """Return the tensors of a data set that only indexes them; None for others, subclasses with transforms included."""
    if type(dataset) is ArrayDataset:
        return InMemory(dataset.x, dataset.y)
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return InMemory(dataset.tensors[0], dataset.tensors[1])
    if type(dataset) is Subset and (whole := in_memory(dataset.dataset)):
        rows = torch.as_tensor(dataset.indices, dtype=torch.long, device=whole.x.device)
        return whole._replace(rows=rows if whole.rows is None else whole.rows[rows])
    return None


def check_map_style(dataset: Any) -> int:
    """Return the number of examples; raise an error if they cannot be indexed."""
    if isinstance(dataset, DataLoader):
        raise LeanBayesError("A DataLoader has its own order: pass its data set, loader.dataset.")
    indexed = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    indexed = indexed and not isinstance(dataset, (Mapping, Tensor, str, type))
    if isinstance(dataset, IterableDataset) or not indexed:
        raise LeanBayesError(
            f"{type(dataset).__name__} cannot be indexed, so that an epoch could not be repeated: pass a map-style "
            "data set, with __len__ and __getitem__."
        )
    if not len(dataset):
        raise LeanBayesError("The data set is empty: pass one with examples.")
    return len(dataset)


def as_pair(example: Any) -> tuple[Any, Any]:
    """Return an example or a batch as an (input, label) pair; raise an error if it is not one.

    A dict, as data sets of Hugging Face return it, has the label under "labels", "label" or "target". The other
    entries are the input: a tensor if there is one, and otherwise a dict, with which the network is called by keywords.
    Texts are left out.
    """
    if isinstance(example, (tuple, list)) and len(example) == 2:
        return example[0], example[1]
    if not isinstance(example, Mapping):
        raise LeanBayesError(
            f"The data set returns {type(example).__name__}, not (input, label) pairs: wrap it in a data set that does."
        )
    found = label_key(example)
    inputs = {name: _numbers(value) for name, value in example.items() if name != found and not _is_text(value)}
    if found is None or not inputs:
        raise LeanBayesError(
            f"The data set returns a dict with {', '.join(map(repr, example)) or 'nothing'}: it needs an input and a "
            f"label, which must be called {' or '.join(map(repr, LABELS))}."
        )
    return inputs.popitem()[1] if len(inputs) == 1 else inputs, _numbers(example[found])


def label_key(names: Iterable[str]) -> str | None:
    """Return the name of the label among the entries of a dict, or None if there is none."""
    return next((name for name in LABELS if name in [*names]), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and bool(value) and all(map(_is_text, value)))


def _numbers(value: Any) -> Any:
    """Return lists of numbers and arrays as tensors, and others unchanged."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError):  # lists of tensors, or of different lengths
        return value


def held_out(examples: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split indices at random into a training part and a held-out part, each with at least one."""
    if not 0 < share < 1:
        raise LeanBayesError(f"validation_share={share} must lie between 0 and 1.")
    if examples < 2:
        raise LeanBayesError(f"{examples} example cannot be split: pass two or more, or a validation set.")
    count = min(max(round(examples * share), 1), examples - 1)
    order = torch.randperm(examples, device="cpu", generator=torch.Generator().manual_seed(mix(seed))).tolist()
    return sorted(order[count:]), sorted(order[:count])


def arrange(
    train: Dataset[Any], val: Dataset[Any] | None, test: Dataset[Any] | None, validation_share: float, seed: int
) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any] | None]:
    """Return the splits for training, validation and test.

    If only one of `val` and `test` exists, it is the test set, because papers report it, and a share of `train` is
    held out for validation.
    """
    if val is not None and test is not None:
        return train, val, test
    training, validation = held_out(check_map_style(train), validation_share, seed)
    return Subset(train, training), Subset(train, validation), val if test is None else test
