"""What a data set is to leanbayes: three splits, and what is needed to feed a network with them and to judge it."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from leanbayes.data.transforms import Augment, Normalise
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Categorical, Gaussian, Likelihood
from leanbayes.noise import mix

Task = Literal["classification", "segmentation", "regression"]


@dataclass(frozen=True)
class Data:
    """A task: three splits, and what is needed to feed a network with them and to judge it."""

    name: str
    task: Task
    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any] | None
    input_shape: tuple[int, ...]  # one example: (channels, height, width) or (features,); () where it is no tensor
    outputs: int  # classes, or targets
    classes: tuple[str, ...] = ()  # their names, where known
    normalise: Normalise | None = None  # applied on the device to every batch of images
    augment: Augment | None = None  # applied to training batches only
    ignore_index: int = -100
    input_mean: tuple[float, ...] = ()  # tables: inputs are standardised, and so must new ones be
    input_std: tuple[float, ...] = ()
    target_mean: tuple[float, ...] = ()  # tables: targets are standardised, and these undo it
    target_std: tuple[float, ...] = ()

    def likelihood(self) -> Likelihood:
        """Make the usual likelihood of the task; targets of a regression have a noise that is learned."""
        if self.task == "regression":
            return Gaussian(std=0.5, learned=True)
        return Categorical(ignore_index=self.ignore_index)


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Examples in memory: uint8 images (examples, channels, height, width) or floats, and labels or float targets."""

    def __init__(self, x: Any, y: Any) -> None:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if not x.dim() or not y.dim() or len(x) != len(y):
            raise LeanBayesError(
                f"Inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)} do not fit: give one label to "
                "each example."
            )
        self.x = x.float() if x.dtype == torch.float64 else x
        self.y = y.float() if y.is_floating_point() else y.long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class InMemory(NamedTuple):
    """Tensors of inputs and labels, and which of their rows are the examples (None: all)."""

    x: Tensor
    y: Tensor
    rows: Tensor | None = None

    def bytes(self) -> int:
        """Size of the examples."""
        share = 1.0 if self.rows is None else len(self.rows) / max(len(self.x), 1)
        return int(share * (self.x.nbytes + self.y.nbytes))

    def labels(self) -> Tensor:
        """Labels of the examples."""
        return self.y if self.rows is None else self.y[self.rows]

    def inputs(self) -> Tensor:
        """Inputs of the examples."""
        return self.x if self.rows is None else self.x[self.rows]


def in_memory(dataset: Any) -> InMemory | None:
    """Return the tensors of a data set that does no more than index them, which a subclass may do; else None."""
    if type(dataset) is ArrayDataset:
        return InMemory(dataset.x, dataset.y)
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return InMemory(dataset.tensors[0], dataset.tensors[1])
    if type(dataset) is Subset and (whole := in_memory(dataset.dataset)):
        rows = torch.as_tensor(dataset.indices, dtype=torch.long, device=whole.x.device)
        return whole._replace(rows=rows if whole.rows is None else whole.rows[rows])
    return None


def check_map_style(dataset: Any) -> int:
    """Return how many examples there are, or say what to pass where they cannot be indexed."""
    if isinstance(dataset, DataLoader):
        raise LeanBayesError("A DataLoader has an order of its own: pass its data set, loader.dataset.")
    indexed = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not indexed:
        raise LeanBayesError(
            f"{type(dataset).__name__} cannot be indexed, and an epoch could not be repeated: pass a map-style data "
            "set, with __len__ and __getitem__."
        )
    if not len(dataset):
        raise LeanBayesError("The data set is empty: pass one with examples.")
    return len(dataset)


def as_pair(example: Any) -> tuple[Any, Any]:
    """Return an example that is an (input, label) pair, or say what it is."""
    if isinstance(example, (tuple, list)) and len(example) == 2:
        return example[0], example[1]
    raise LeanBayesError(
        f"The data set yields {type(example).__name__}, not (input, label) pairs: wrap it in a data set that does."
    )


def held_out(examples: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Cut some numbers at random into those that stay and the share that is held out, at least one each."""
    if not 0 < share < 1:
        raise LeanBayesError(f"validation_share={share} must lie between 0 and 1.")
    if examples < 2:
        raise LeanBayesError(f"{examples} example cannot be split: give two or more, or a validation set.")
    count = min(max(round(examples * share), 1), examples - 1)
    order = torch.randperm(examples, device="cpu", generator=torch.Generator().manual_seed(mix(seed))).tolist()
    return sorted(order[count:]), sorted(order[:count])


def arrange(
    train: Dataset[Any], val: Dataset[Any] | None, test: Dataset[Any] | None, validation_share: float, seed: int
) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any] | None]:
    """Choose the three splits; a lone `val` is what people report as test, and a share of `train` takes its place."""
    if val is not None and test is not None:
        return train, val, test
    kept, held = held_out(check_map_style(train), validation_share, seed)
    return Subset(train, kept), Subset(train, held), val if test is None else test
