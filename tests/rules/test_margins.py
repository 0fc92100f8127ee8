"""Tests of the variances of margins, and of noise whose margins get other variances, against dense matrices."""

import math

import pytest
import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.rules import MarginFit
from leanbayes.rules.margins import margin_covariance, margin_variances, with_margin_variances

CLASSES = 5


def logits(probes: int, shape: tuple[int, ...], seed: int = 1) -> lb.Moments:
    """Return random logits with the classes in dimension 1, with independent and common noise."""
    source = torch.Generator().manual_seed(seed)
    loc, variance = (torch.rand(shape, generator=source, dtype=torch.float64) for _ in range(2))
    common = torch.randn(probes, *shape[:2], *[1] * (len(shape) - 2), generator=source, dtype=torch.float64)
    return lb.Moments(loc, variance, common if probes else None)


def covariance(moments: lb.Moments) -> Tensor:
    """Return the covariance of the logits, (..., classes, classes)."""
    total = torch.diag_embed(moments.independent.movedim(1, -1))
    for probe in () if moments.common is None else moments.common:
        u = probe.expand(moments.loc.shape).movedim(1, -1)
        total = total + u[..., :, None] * u[..., None, :]
    return total


def directions(classes: Tensor) -> Tensor:
    """Return D, (..., classes, margins)."""
    units = torch.eye(CLASSES, dtype=torch.float64)[classes]
    return (units[..., :1, :] - units[..., 1:, :]).mT


def parts(moments: lb.Moments) -> tuple[Tensor, Tensor | None]:
    """Return the independent variance and the common noise, with the classes last."""
    common = None if moments.common is None else moments.common.expand(-1, *moments.loc.shape).movedim(2, -1)
    return moments.independent.movedim(1, -1), common


@pytest.mark.parametrize("probes", [0, 4])
@pytest.mark.parametrize("shape", [(7, CLASSES), (2, CLASSES, 3)])
@pytest.mark.parametrize("margins", [1, 3])
def test_variances_of_margins(margins: int, shape: tuple[int, ...], probes: int) -> None:
    moments = logits(probes, shape)
    classes = moments.loc.movedim(1, -1).topk(margins + 1, -1).indices
    d = directions(classes)
    expected = d.mT @ covariance(moments) @ d
    torch.testing.assert_close(margin_covariance(*parts(moments), classes), expected)
    torch.testing.assert_close(margin_variances(*parts(moments), classes), expected.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("probes", [0, 4])
@pytest.mark.parametrize("shape", [(7, CLASSES), (2, CLASSES, 3)])
@pytest.mark.parametrize("margins", [1, 3])
def test_margins_get_other_variances(margins: int, shape: tuple[int, ...], probes: int) -> None:
    """The covariance is A C Aᵀ, A = I + C D (DᵀC D)⁻¹ (S - 1) Dᵀ, and what is uncorrelated with the margins stays."""
    moments = logits(probes, shape)
    classes = moments.loc.movedim(1, -1).topk(margins + 1, -1).indices
    source = torch.Generator().manual_seed(2)
    wanted = 0.1 + 3 * torch.rand(classes[..., 1:].shape, generator=source, dtype=torch.float64)
    found = with_margin_variances(moments, wanted, classes, 1)
    before, after, d = covariance(moments), covariance(found), directions(classes)
    own = d.mT @ before @ d
    gains = torch.diag_embed((wanted / own.diagonal(dim1=-2, dim2=-1)).sqrt())
    one = torch.eye(margins, dtype=torch.float64)
    matrix = torch.eye(CLASSES, dtype=torch.float64) + before @ d @ torch.linalg.solve(own, (gains - one) @ d.mT)
    near = 1e-6 if margins == 1 else 0.02  # correlations of several margins are reduced
    torch.testing.assert_close(after, matrix @ before @ matrix.mT, rtol=near, atol=near)
    torch.testing.assert_close((d.mT @ after @ d).diagonal(dim1=-2, dim2=-1), wanted, rtol=near, atol=near)
    torch.testing.assert_close(found.variance.movedim(1, -1), after.diagonal(dim1=-2, dim2=-1))
    assert torch.equal(found.loc, moments.loc)


def test_the_fit_scales_all_noise_and_weighs_the_margins() -> None:
    moments = logits(3, (7, CLASSES))
    classes = moments.loc.topk(3, -1).indices
    wanted = 0.1 + 3 * torch.rand(7, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fit = MarginFit(0.7, 1.2, 0.4, 0.9)
    found = with_margin_variances(moments, wanted, classes, 1, fit)
    before = margin_variances(*parts(moments), classes)
    combined = 1.2**2 * before**0.3 * wanted**0.7
    torch.testing.assert_close(margin_variances(*parts(found), classes), combined, rtol=0.01, atol=0.01)
    # A logit without a margin gets the noise of one pass, times a factor, and what the margins add.
    scale = 0.9 * (0.2 * (wanted / before).log().mean(-1)).exp()
    scaled = lb.Moments(
        moments.loc, moments.independent * scale[:, None] ** 2, torch.as_tensor(moments.common) * scale[:, None]
    )
    expected = with_margin_variances(scaled, combined, classes, 1)
    torch.testing.assert_close(covariance(found), covariance(expected))


def test_nearly_equal_margins_give_bounded_noise() -> None:
    """Two logits with the same noise, to which other variances are given: no noise is many times that of both."""
    source = torch.Generator().manual_seed(0)
    common = torch.randn(4, 6, CLASSES, generator=source)
    common[..., 2] = common[..., 1]
    loc = torch.arange(CLASSES, 0, -1.0).expand(6, -1)
    moments = lb.Moments(loc, torch.zeros(6, CLASSES), common)
    classes = loc.topk(3, -1).indices
    wanted = margin_variances(*parts(moments), classes) * torch.tensor([1.0, 1.5])
    found = with_margin_variances(moments, wanted, classes, 1)
    assert found.variance.isfinite().all()
    assert (found.variance / moments.variance).max() < 20


def test_logits_without_noise_stay_without() -> None:
    loc = torch.rand(3, CLASSES)
    classes = loc.topk(3, -1).indices
    found = with_margin_variances(lb.Moments(loc, torch.zeros_like(loc)), torch.zeros(3, 2), classes, 1)
    assert (found.variance == 0).all()


def test_the_fit_of_the_nearest_number_of_margins_is_used() -> None:
    fits = (MarginFit(0.1), MarginFit(0.2))
    assert MarginFit.of(fits, 1) == fits[0]
    assert MarginFit.of(fits, 3) == fits[1]
    assert MarginFit.of((), 2) == MarginFit()
    assert math.prod(MarginFit()) == 0  # the margins get the other variances, and no other noise changes


def test_autocast_does_not_round_the_noise() -> None:
    moments = logits(4, (7, CLASSES))
    single = lb.Moments(moments.loc.float(), moments.independent.float(), torch.as_tensor(moments.common).float())
    classes = moments.loc.topk(4, -1).indices
    wanted = 0.1 + 3 * torch.rand(7, 3, generator=torch.Generator().manual_seed(2))
    exact = with_margin_variances(single, wanted, classes, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_margin_variances(single, wanted, classes, 1)
    assert torch.equal(found.variance, exact.variance)
    assert torch.equal(torch.as_tensor(found.common), torch.as_tensor(exact.common))
