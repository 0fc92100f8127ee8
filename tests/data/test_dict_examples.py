"""Data sets whose examples are dicts, as those of Hugging Face, work in `fit` and `evaluate`."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training_cases import expect

import leanbayes as lb
from leanbayes.data import Batches, fingerprint, from_datasets
from leanbayes.data.base import as_pair

SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 16, "temperature": 0.01, "device": "cpu", "progress": False}


class Dicts(Dataset[dict[str, Any]]):
    """A data set of dicts, with the columns and features of `datasets.Dataset`."""

    def __init__(self, columns: dict[str, Sequence[Any]], features: dict[str, Any] | None = None) -> None:
        self.columns, self.features = columns, features or {}
        self.column_names = [*columns]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int | str) -> Any:
        if isinstance(index, str):
            return self.columns[index]
        return {name: column[index] for name, column in self.columns.items()}


def images(count: int = 96) -> Dicts:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    pixels = labels[:, None, None, None] + 0.1 * torch.randn(count, 1, 4, 4, generator=generator)
    names = SimpleNamespace(names=["no", "perhaps", "yes"])
    return Dicts({"pixel_values": [*pixels], "labels": labels.tolist()}, {"pixel_values": None, "labels": names})


def test_the_only_input_is_a_tensor() -> None:
    x, y = as_pair({"pixel_values": torch.ones(2), "label": 3})
    assert torch.equal(x, torch.ones(2))
    assert y == 3
    x, y = as_pair({"inputs": np.ones(2), "target": [0.5, 1.5]})
    assert isinstance(x, Tensor)
    assert y.tolist() == [0.5, 1.5]


def test_several_inputs_are_keywords_and_texts_are_left_out() -> None:
    x, y = as_pair({"input_ids": [1, 2], "attention_mask": [1, 0], "text": "ab", "tokens": ["a", "b"], "labels": 1})
    assert {name: value.tolist() for name, value in x.items()} == {"input_ids": [1, 2], "attention_mask": [1, 0]}
    assert y == 1


def test_what_is_no_example_is_refused() -> None:
    expect(lambda: as_pair({"pixel_values": 1}), "'pixel_values'", "'labels' or 'label' or 'target'")
    expect(lambda: as_pair({"labels": 1, "text": "a"}), "needs an input")
    expect(lambda: as_pair({}), "nothing")
    expect(lambda: as_pair("ab"), "str")
    picture = Dicts({"image": [Image.new("L", (2, 2))] * 3, "label": [0, 1, 0]})
    expect(lambda: from_datasets(picture), "returns Image", "add a transform")


def test_classes_are_found_in_features_or_in_the_column() -> None:
    data = from_datasets(images())
    assert (data.task, data.outputs, data.classes) == ("classification", 3, ("no", "perhaps", "yes"))
    assert data.input_shape == (1, 4, 4)
    bare = Dicts({"x": [*torch.randn(8, 2)], "label": [0, 4, 1, 2, 0, 0, 1, 1]})
    assert (from_datasets(bare).outputs, from_datasets(bare).classes) == (5, ())
    real = Dicts({"x": [*torch.randn(8, 2)], "labels": [[0.5, 1.0]] * 8})
    assert (from_datasets(real).task, from_datasets(real).outputs) == ("regression", 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_pairs(workers: int) -> None:
    found = images()
    pairs = torch.utils.data.TensorDataset(torch.stack([*found["pixel_values"]]), torch.tensor(found["labels"]))
    ours = Batches(found, 10, shuffle=True, workers=workers).epoch(1)
    for (x, y), (same_x, same_y) in zip(ours, Batches(pairs, 10, shuffle=True).epoch(1), strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
    assert fingerprint(found) == fingerprint(pairs)


def test_fit_learns_from_dicts() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    torch.manual_seed(0)
    bnn = lb.fit(network, lb.MeanField(), images(), **{**SETTINGS, "epochs": 12, "lr": 0.02})
    loader = DataLoader(images(30), batch_size=10)
    assert lb.evaluate(bnn, loader)["accuracy"] > 0.9
    assert lb.decide.fit(bnn, loader, coverage=0.9).sets is not None


def test_a_model_of_transformers_is_trained_on_its_dicts() -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 2
    ids = torch.randint(2, 10, (64, 5), generator=generator)
    ids[:, 0] = 10 + labels
    columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": labels.tolist()}
    text = Dicts({**columns, "sentence": ["words"] * 64})
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=12, num_labels=2, **settings))
    bnn = lb.fit(model, lb.MeanField(), text, **{**SETTINGS, "epochs": 15, "lr": 0.02})
    batch = {name: torch.tensor(columns[name]) for name in ("input_ids", "attention_mask", "labels")}
    assert lb.evaluate(bnn, [batch])["accuracy"] > 0.9
