"""The text of posteriors and priors: one line with what a person wants to know."""

from typing import Any

import pytest
from network_cases import seeded
from torch import nn

import leanbayes as lb

PRIOR = "prior=Normal(scale=0.1, center='zero', gain=1.0)"
AUTO = "prior=Normal(scale='auto', center='zero', gain=1.0)"


@seeded
def network() -> nn.Module:
    """2,000 weights in 70 rows."""
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30))


def text(method: Any, start: Any = None) -> str:
    return repr(lb.bayesianize(network() if start is None else lb.bayesianize(network(), start), method).posterior)


TEXTS: dict[str, tuple[Any, str]] = {
    "mean-field": (lb.MeanField(), f"MeanFieldPosterior(2,000 weights, all Bayesian, {AUTO})"),
    "rows": (
        lb.VDP(variance="row"),
        f"RowPosterior(2,000 weights, all Bayesian, one std for each of 70 rows, {PRIOR})",
    ),
    "subspace": (
        lb.SSVI(0.25, prior=lb.Normal()),
        f"SubspacePosterior(2,000 weights, 500 Bayesian, density=0.25, {PRIOR})",
    ),
    "blocks": (
        lb.SSVI(0.25, pattern="2x2", prior=lb.Normal()),
        f"SubspacePosterior(2,000 weights, 500 Bayesian, density=0.25 in blocks of 2x2, {PRIOR})",
    ),
    "sparse": (lb.RigL(0.25), "SparsePointPosterior(2,000 deterministic weights, density=0.25)"),
    "partial": (
        lb.PBN(0.01, sensitivity="random"),
        f"PartialPosterior(2,000 weights, 20 Bayesian, {AUTO})",
    ),
    "partial before the choice": (
        lb.PBN(0.01, sensitivity="fisher"),
        f"PartialPosterior(2,000 weights, Bayesian weights not chosen yet, {AUTO})",
    ),
    "plain network": (lb.Deterministic(), "PointPosterior(the network holds all weights)"),
    "codes before the choice": (
        lb.WeightSharing(8, gradient_share=0.1),
        f"SharedPosterior(2,000 weights, codes not chosen yet, {PRIOR})",
    ),
    "scale mixture": (
        lb.MeanField(prior=lb.ScaleMixture()),
        "MeanFieldPosterior(2,000 weights, all Bayesian, prior=ScaleMixture(pi=0.5, wide=0.5, narrow=0.01))",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_one_line_describes_a_posterior(name: str) -> None:
    method, expected = TEXTS[name]
    assert text(method) == expected


@pytest.mark.parametrize("sampling", ["independent", "hierarchical", "tied"])
def test_one_line_describes_a_codebook(sampling: Any) -> None:
    method = lb.WeightSharing(8, merge_distance=0.0, minimum=1, sampling=sampling)
    rest = f"8 codes, sampling='{sampling}', {PRIOR})"
    assert text(method) == f"SharedPosterior(2,000 weights, all Bayesian, {rest}"
    assert text(method, lb.SSVI(0.25)) == f"SharedPosterior(2,000 weights, 500 Bayesian, density=0.25, {rest}"


def test_a_model_shows_its_posterior_in_one_line() -> None:
    bnn = lb.bayesianize(network(), lb.MeanField())
    assert f"\n  (posterior): {bnn.posterior}\n" in repr(bnn)


def test_priors_show_their_settings() -> None:
    assert repr(lb.Normal("fan_in", gain=0.5)) == "Normal(scale='fan_in', center='zero', gain=0.5)"
    assert repr(lb.ScaleMixture(pi=0.25)) == "ScaleMixture(pi=0.25, wide=0.5, narrow=0.01)"
    for prior in (lb.Normal("std", center="pretrained"), lb.ScaleMixture()):
        assert f"prior={prior!r})" in text(lb.MeanField(prior=prior))
