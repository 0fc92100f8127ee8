"""Label shift with given and with random class proportions."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from scipy import stats
from shift_cases import seeded
from torch import Tensor
from training_cases import expect

from leanbayes.evaluation.shift import label_shift
from leanbayes.evaluation.shift.label_shift import _dirichlet

LABELS = torch.tensor([0] * 50 + [2] * 10 + [5] * 140)[torch.randperm(200, generator=seeded(9))]


def shares(labels: Tensor, rows: Tensor) -> Tensor:
    return labels[rows].bincount(minlength=6).double() / len(rows)


@pytest.mark.parametrize("proportions", [[0.2, 0, 0.5, 0, 0, 0.3], [0, 0, 1, 0, 0, 0], [2.0, 0, 2, 0, 0, 4, 0]])
def test_labels_follow_given_proportions(proportions: list[float]) -> None:
    rows = label_shift(LABELS, seeded(), size=20_000, proportions=proportions)
    assert rows.shape == (20_000,)
    assert rows.dtype == torch.long
    wanted = torch.tensor(proportions[:6], dtype=torch.float64) / sum(proportions)
    assert torch.allclose(shares(LABELS, rows), wanted, atol=0.015)
    assert torch.equal(shares(LABELS, rows) > 0, wanted > 0)
    tensor = torch.tensor(proportions)
    assert torch.equal(rows, label_shift(LABELS, seeded(), size=20_000, proportions=tensor))


def test_examples_of_a_class_are_equally_likely() -> None:
    rows = label_shift(LABELS, seeded(), size=40_000, proportions=[0.3, 0, 0.3, 0, 0, 0.4])
    for label in (0, 2, 5):
        members = LABELS.eq(label).nonzero().flatten()
        counts = rows.bincount(minlength=200)[members]
        assert counts.min() > 0
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_drawn_proportions_are_over_the_classes_that_occur() -> None:
    rows = label_shift(LABELS, seeded(1))
    assert rows.shape == LABELS.shape
    assert set(LABELS[rows].tolist()) <= {0, 2, 5}
    assert torch.equal(rows, label_shift(LABELS, seeded(1)))
    assert not torch.allclose(shares(LABELS, rows), shares(LABELS, label_shift(LABELS, seeded(2))), atol=0.01)
    even = label_shift(LABELS, seeded(), concentration=1e6, size=20_000)
    assert torch.allclose(shares(LABELS, even)[[0, 2, 5]], torch.tensor(1 / 3, dtype=torch.float64), atol=0.015)
    lone = label_shift(LABELS, seeded(), concentration=1e-3, size=100)
    assert shares(LABELS, lone).max() == 1
    assert label_shift(LABELS, seeded(), size=0).shape == (0,)
    assert label_shift(LABELS.to(torch.uint8), seeded(1)).equal(rows)


@pytest.mark.parametrize("concentration", [0.3, 1.0, 8.0])
def test_proportions_are_dirichlet(concentration: float) -> None:
    generator = seeded()
    draws = torch.stack([_dirichlet(4, concentration, generator) for _ in range(4000)])
    assert torch.allclose(draws.sum(1), torch.ones(4000, dtype=torch.float64))
    assert torch.allclose(draws.mean(0), torch.full((4,), 0.25, dtype=torch.float64), atol=0.02)
    marginal = stats.beta(concentration, 3 * concentration)  # of each share
    for k in range(4):
        assert stats.kstest(draws[:, k].numpy(), marginal.cdf).pvalue > 1e-3


def test_a_tiny_concentration_gives_no_nan_and_the_global_state_is_not_changed() -> None:
    state = torch.random.get_rng_state()
    for seed in range(20):
        draw = _dirichlet(10, 1e-8, seeded(seed))
        assert draw.sum() == pytest.approx(1)
    label_shift(LABELS, seeded())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_invalid_settings_raise_errors() -> None:
    for bad in (LABELS.double(), LABELS[None], LABELS[:0]):
        expect(partial(label_shift, bad, seeded()), "Labels must be integers", str(tuple(bad.shape)))
    for concentration in (0, -1, math.nan, math.inf):
        expect(partial(label_shift, LABELS, seeded(), concentration), f"concentration={concentration}")
    expect(lambda: label_shift(LABELS, seeded(), size=-1), "size=-1")
    expect(lambda: label_shift(LABELS, seeded(), proportions=[1, 0, 1]), "3 proportions", "from 0 to 5")
    expect(lambda: label_shift(LABELS, seeded(), proportions=[1, 0, 1, 2, 0, 1]), "label 3", "set it to 0")
    impossible: list[Any] = [[0.0] * 6, [1, 0, -1, 0, 0, 1], [1, 0, math.nan, 0, 0, 1], [math.inf] * 6, 1.0]
    for wrong in impossible:
        expect(partial(label_shift, LABELS, seeded(), proportions=wrong), "proportions must be nonnegative")
    expect(lambda: label_shift(LABELS - 1, seeded(), proportions=[1] * 6), "from -1 to 4")
