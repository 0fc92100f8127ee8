"""Predictions, small tasks and networks for tests of evaluation."""

import json
from pathlib import Path
from typing import Any

import torch
from network_cases import seeded
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import leanbayes as lb
from leanbayes.data import Data, Normalize, from_datasets
from leanbayes.evaluation import EvaluationSettings, Scores, Sum, Whole, evaluate_fully, mean

CLASSES = 4

# -- predictions ------------------------------------------------------------------------------------------------------


def class_prediction(probs: Tensor, class_dim: int = 1) -> lb.ClassPrediction:
    """The mean of two samples around `probs`."""
    other = probs.roll(1, class_dim)
    draws = torch.stack([0.7 * probs + 0.3 * other, 0.9 * probs + 0.1 * other])
    expected = torch.special.entr(draws).sum(class_dim + 1).mean(0)
    return lb.ClassPrediction(2, None, draws.mean(0), expected, class_dim)


def random_probs(*shape: int, class_dim: int = 1, sharp: float = 3.0) -> Tensor:
    return (sharp * torch.randn(*shape)).softmax(class_dim)


def some_labels(probs: Tensor, class_dim: int = 1) -> Tensor:
    """Labels of which about half are the most probable class."""
    best = probs.argmax(class_dim)
    return torch.where(torch.rand(best.shape) < 0.5, best, torch.randint(probs.shape[class_dim], best.shape))


def parts_of(prediction: Any, sizes: list[int]) -> list[Any]:
    """Split a prediction into batches."""
    fields = {name: value for name, value in vars(prediction).items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in vars(prediction).items() if name not in fields}
    cuts = {name: value.split(sizes) for name, value in fields.items()}
    return [
        type(prediction)(**rest, **{name: cut[number] for name, cut in cuts.items()}) for number in range(len(sizes))
    ]


def scored(scores: Scores, prediction: Any, y: Tensor, sizes: list[int] | None = None) -> dict[str, float]:
    """Score batch by batch, or all at once."""
    sizes = sizes or [len(y)]
    for part, labels in zip(parts_of(prediction, sizes), y.split(sizes), strict=True):
        scores.update(part, labels)
    return scores.compute()


OWN = (
    mean("certain", lambda outcome: outcome.confidence > 0.9),
    Sum(
        "answers", lambda outcome: torch.bincount(outcome.answer, minlength=5).double(), lambda sums: float(sums.max())
    ),
    Whole("least", lambda outcome: float(outcome.chosen.min())),
)


def score_in_processes(shares: list[list[int]], folder: Path) -> None:
    """Score this process's share of some predictions, which may be empty, and write the scores of all processes."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    prediction = class_prediction(random_probs(30, 5))
    y = some_labels(prediction.probs)
    together, alone = Scores(details=True, metrics=OWN), Scores(details=True, alone=True)
    for row in shares[rank]:
        for scores in (together, alone):
            scores.update(parts_of(prediction, [1] * 30)[row], y[row : row + 1])
    found: dict[str, Any] = {"together": together.compute(), "bins": together.sums("ece").tolist()}  # type: ignore[union-attr]
    kept = together.outcome()
    found["kept"] = None if kept is None else len(kept)
    own = alone.sums("ece")
    found["alone"] = 0 if own is None else int(own[2].sum())
    bnn, data = lb.bayesianize(network(1), lb.Deterministic()), image_data()
    found["evaluated"] = evaluate_fully(bnn, data, EvaluationSettings(shifts=("noise",)))["curves"]["reliability"]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


# -- tasks and networks -----------------------------------------------------------------------------------------------


def images(count: int = 24, channels: int = 1, side: int = 8, bytes_: bool = True) -> tuple[Tensor, Tensor]:
    """Images, uint8 or floats from 0 to 1, with a bright patch that depends on the class."""
    generator = torch.Generator().manual_seed(8)
    x = 0.4 * torch.rand(count, channels, side, side, generator=generator)
    y = torch.arange(count) % CLASSES
    for image, label in zip(x, y.tolist(), strict=True):
        image[:, 1 + label : 4 + label, 2:6] += 0.5
    return ((255 * x).round().to(torch.uint8) if bytes_ else x), y


def image_data(channels: int = 1, bytes_: bool = True, normalize: bool = True, count: int = 24) -> Data:
    dataset = TensorDataset(*images(count, channels, bytes_=bytes_))
    scaling = Normalize((0.3,) * channels, (0.25,) * channels) if normalize else None
    return from_datasets(dataset, dataset, dataset, name="patches", normalize=scaling, outputs=CLASSES)


def network(channels: int = 1) -> nn.Module:
    """For `image_data`."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, CLASSES))
    )()


def table_data(targets: int = 2, count: int = 40) -> Data:
    """A regression with standardized targets, with their original mean and std."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=generator)
    y = x[:, :targets] + 0.3 * torch.randn(count, targets, generator=generator)
    dataset = TensorDataset(x, y)
    return Data(
        "table",
        "regression",
        dataset,
        dataset,
        dataset,
        (6,),
        targets,
        target_mean=(1.0,) * targets,
        target_std=tuple(2.0 + number for number in range(targets)),
    )


@seeded
def table_network() -> nn.Module:
    """For `table_data`."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


VOID = 255


def segmentation_data(count: int = 6, side: int = 8) -> Data:
    """Images whose upper half is one class and whose lower half another; the right edge has no label."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    y = torch.zeros(count, side, side, dtype=torch.long)
    y[:, side // 2 :] = 1
    y[::2, :2, :2] = 2
    y[:, :, -1] = VOID
    dataset = TensorDataset(x, y)
    return from_datasets(
        dataset,
        dataset,
        dataset,
        name="halves",
        outputs=CLASSES,
        classes=("sky", "earth", "sun", "moon"),
        ignore_index=VOID,
    )


@seeded
def segmentation_network() -> nn.Module:
    """For `segmentation_data`."""
    return nn.Conv2d(3, CLASSES, 3, padding=1)


class Recorded(Dataset[Any]):
    """Returns examples one by one, and records their indices."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.x[index], self.y[index]
