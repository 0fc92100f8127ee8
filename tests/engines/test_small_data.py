"""With few examples, the presets of both engines are not worse than the plain network by more than noise."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

import leanbayes as lb
from leanbayes.data import Batches, load, preset
from leanbayes.networks import build

METHODS = {
    "plain": lb.Deterministic(),
    "backprop": lb.MeanField(),
    "ivon": lb.MeanField(engine="ivon"),
    "pbn, ivon": lb.PBN(engine="ivon"),
}


def scores(name: str, examples: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Train with each method on some examples of a data set, and return its scores on the test data."""
    data = load(name)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    data = replace(data, train=Subset(data.train, order[:examples].tolist()))
    assert data.test is not None
    batches = list(Batches(data.test, 1000, normalize=data.normalize).epoch())
    found = {}
    for row, method in METHODS.items():
        settings = {**preset(name, method=method), "epochs": epochs, "batch_size": 32}
        network = build(settings.pop("model"), data.input_shape, data.outputs, seed=0)
        bnn = lb.fit(network, method, data, progress=False, evaluate_every=0, device="cpu", **settings)
        found[row] = lb.evaluate(bnn, batches, seed=0, target_scale=data.target_std)
    return found


@pytest.mark.parametrize("row", ["backprop", "ivon", "pbn, ivon"])
def test_digits(row: str, digits: dict[str, dict[str, Any]]) -> None:
    assert digits["plain"]["accuracy"] > 0.93
    assert digits[row]["accuracy"] >= digits["plain"]["accuracy"] - 0.02
    assert digits[row]["nll"] <= digits["plain"]["nll"] + 0.05


@pytest.fixture(scope="module")
def digits() -> dict[str, dict[str, Any]]:
    return scores("digits", 300, 40)


@pytest.mark.parametrize("row", ["backprop", "ivon", "pbn, ivon"])
def test_a_table(row: str, table: dict[str, dict[str, Any]]) -> None:
    assert table[row]["rmse"] <= 1.1 * table["plain"]["rmse"]
    assert table[row]["nll"] <= table["plain"]["nll"] + 0.3  # of 2.6: the toy data are few, and lie far apart


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Any]]:
    return scores("toy", 200, 60)
