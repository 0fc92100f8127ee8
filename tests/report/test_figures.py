"""Figures as plain data, and the figures of a model's weights and size."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from network_cases import CASES
from torch import nn

import leanbayes as lb
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.weights import model_figures, size_against_nll, weights

SCORES, COSTS = {"nll": 0.25, "accuracy": 0.9}, {"file_bytes": 3_500_000, "stored": 1}


def by_key(found: list[Figure]) -> dict[str, Figure]:
    return {figure.key: figure for figure in found}


# -- plain data -------------------------------------------------------------------------------------------------------


def test_a_figure_survives_json() -> None:
    series = Series("right", (1.0, 2.0), (0.5, 0.6), (0.4, 0.5), (0.6, 0.7), ("a", "b"))
    figure = Figure("key", "Title", "lines", "x", "y", "How to read it.", (series,), "xy", "y", True, True)
    assert Figure.from_json(json.loads(json.dumps(figure.to_json()))) == figure
    bars = Figure("key", "Title", "bars", "x", "y", "", (Series("", ("a", "b"), (1, 2)),))
    assert Figure.from_json(json.loads(json.dumps(bars.to_json()))) == bars


def test_a_series_accepts_lists() -> None:
    assert Series("", [1, 2], [3, 4], labels=["a", "b"]) == Series("", (1, 2), (3, 4), labels=("a", "b"))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"y": (1,)}, {"y": ()}, {"low": (1,)}, {"high": (1, 2, 3)}, {"labels": ("a",)}])
def test_a_series_with_unequal_lengths_raises_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Series(**{"name": "", "x": (1, 2), "y": (3, 4), **wrong})


# -- weights ----------------------------------------------------------------------------------------------------------


def test_the_plane_shows_each_weight_with_a_std() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField())
    plane = by_key(weights(bnn))["weight-plane"]
    (series,) = plane.series
    mean, std = bnn.posterior.mean().tolist(), bnn.posterior.variance().sqrt().tolist()
    assert sorted(zip(series.x, series.y, strict=True)) == sorted(zip(mean, std, strict=True))
    assert f"all {len(mean)} weights" in plane.caption
    assert (plane.kind, plane.log, plane.apart) == ("points", "y", True)


def test_of_many_weights_a_fixed_random_subset_is_shown() -> None:
    bnn = lb.bayesianize(nn.Linear(60, 50), lb.MeanField())
    state = torch.get_rng_state()
    plane = by_key(weights(bnn))["weight-plane"]
    assert torch.equal(state, torch.get_rng_state())
    assert weights(bnn)[0] == plane
    assert len({*plane.series[0].x}) > 1900
    assert len(plane.series[0].x) == 2000
    assert "2,000 of 3,000 weights" in plane.caption
    assert {*plane.series[0].x} <= {*bnn.posterior.mean().tolist()}


class Partial(MeanFieldPosterior):
    """A posterior in which only some weights are random, and some are zero."""

    def variance(self) -> torch.Tensor:
        return torch.where(torch.arange(len(self.mu)) % 4 == 0, super().variance(), 0)

    def mean(self) -> torch.Tensor:
        return torch.where(torch.arange(len(self.mu)) % 2 == 0, super().mean(), 0)


def test_shares_are_computed_per_layer() -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), lb.MeanField())
    full = by_key(weights(bnn))["layer-shares"]
    assert [(series.name, series.x, series.y) for series in full.series] == [
        ("density", ("0.weight", "1.weight"), (1, 1)),
        ("Bayesian", ("0.weight", "1.weight"), (1, 1)),
    ]
    bnn.posterior.__class__ = Partial
    found = by_key(weights(bnn))
    assert [series.y for series in found["layer-shares"].series] == [(0.5, 0.5), (0.25, 0.25)]
    assert len(found["weight-plane"].series[0].x) == 10
    assert "all 10 weights" in found["weight-plane"].caption


@pytest.mark.parametrize("method", [lb.Deterministic(), lb.Ensemble(2), lb.MCDropout(0.1)])
def test_methods_without_random_weights_show_only_their_size(method: lb.Method) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    assert weights(bnn) == []
    assert list(by_key(model_figures(bnn, SCORES, COSTS))) == ["size-nll"]


def test_a_method_shows_its_size_and_its_weights() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField())
    found = model_figures(bnn, SCORES, COSTS)
    assert list(by_key(found)) == ["size-nll", "weight-plane", "layer-shares"]
    for figure in found:
        assert Figure.from_json(json.loads(json.dumps(figure.to_json()))) == figure
        assert figure.caption.endswith(".")
        values = [value for series in figure.series for value in (*series.x, *series.y) if not isinstance(value, str)]
        assert np.isfinite(values).all()


# -- size -------------------------------------------------------------------------------------------------------------


def test_size_is_plotted_against_nll() -> None:
    (figure,) = size_against_nll(SCORES, COSTS)
    assert figure.series == (Series("", (3.5,), (0.25,)),)
    assert (figure.key, figure.kind, figure.log) == ("size-nll", "points", "x")


def test_size_figure_needs_file_bytes_and_nll() -> None:
    assert size_against_nll(SCORES, {"stored": 3}) == []
    assert size_against_nll({"accuracy": 0.9}, COSTS) == []
