"""The removal criteria of SSVI: closed forms against Monte Carlo and the paper's formulas, and their order in fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.special import ndtr

from leanbayes.methods.ssvi import criteria
from leanbayes.methods.ssvi.criteria import REMOVAL

MU = torch.tensor([0.0, 0.1, -0.35, 0.5, -1.0, 2.0, 0.7], dtype=torch.float64)
SIGMA = torch.tensor([0.2, 0.5, 0.3, 0.05, 1.0, 0.4, 0.9], dtype=torch.float64)


def samples(count: int = 4_000_000) -> Tensor:
    noise = torch.randn(count // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return MU[:, None] + SIGMA[:, None] * torch.cat([noise, -noise])


def printed_exponential(mu: Tensor, sigma: Tensor, exponent: float) -> Tensor:
    """E e^{λ|θ|} by equation 16."""
    ratio, half = mu / sigma, 0.5 * (exponent * sigma).square()
    upper = ndtr(ratio + exponent * sigma) * torch.exp(half + exponent * mu)
    return upper + ndtr(exponent * sigma - ratio) * torch.exp(half - exponent * mu)


def printed_absolute_snr(mu: Tensor, sigma: Tensor) -> Tensor:
    """Equation 7."""
    mean = criteria.absolute_mean(mu, sigma)
    return mean / (mu.square() + sigma.square() - mean.square()).sqrt()


# -- against Monte Carlo ----------------------------------------------------------------------------------------------


def test_mean_of_the_absolute_value() -> None:
    torch.testing.assert_close(criteria.absolute_mean(MU, SIGMA), samples().abs().mean(1), rtol=2e-3, atol=0)


def test_signal_to_noise_ratio_of_the_absolute_value() -> None:
    absolute = samples().abs()
    ratio = absolute.mean(1) / absolute.std(1)
    torch.testing.assert_close(printed_absolute_snr(MU, SIGMA), ratio, rtol=2e-3, atol=0)
    assert torch.equal(criteria.absolute_snr(MU, SIGMA).argsort(), ratio.argsort())


@pytest.mark.parametrize("exponent", [0.3, 0.6, 1.0])
def test_exponential_criteria(exponent: float) -> None:
    values = torch.exp(exponent * samples().abs())
    mean, snr = values.mean(1), values.mean(1) / values.std(1)
    torch.testing.assert_close(criteria.exponential_mean(MU, SIGMA, exponent).exp(), mean, rtol=5e-3, atol=0)
    found = torch.exp(0.5 * criteria.exponential_snr(MU, SIGMA, exponent))
    torch.testing.assert_close(found, snr, rtol=2e-2, atol=0)


# -- against the formulas of the paper, in fp64 -----------------------------------------------------------------------


@given(st.floats(-3, 3), st.floats(0.05, 2), st.floats(0.2, 3))
def test_they_equal_the_printed_formulas_if_these_can_be_computed(mu: float, sigma: float, exponent: float) -> None:
    m, s = torch.tensor([mu], dtype=torch.float64), torch.tensor([sigma], dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0)
    density = normal.log_prob(m / s).exp()
    torch.testing.assert_close(criteria.absolute_mean(m, s), m * (2 * ndtr(m / s) - 1) + 2 * s * density)
    first, second = (printed_exponential(m, s, k * exponent) for k in (1, 2))
    torch.testing.assert_close(criteria.exponential_mean(m, s, exponent), first.log(), rtol=1e-9, atol=1e-12)
    squared = first.square() / (second - first.square())
    torch.testing.assert_close(criteria.exponential_snr(m, s, exponent), squared.log(), rtol=1e-5, atol=1e-5)


def test_snr_of_the_absolute_value_increases_with_that_of_the_weight() -> None:
    ratio = torch.linspace(0, 30, 3000, dtype=torch.float64)
    for sigma in (1e-3, 0.1, 2.0):
        s = torch.full_like(ratio, sigma)
        assert (printed_absolute_snr(ratio * s, s).diff() > 0).all()
        assert (criteria.absolute_snr(ratio * s, s).diff() > 0).all()


def test_the_series_for_small_exponents_is_continuous() -> None:
    """On both sides of the threshold of λσ, the score minus 2 log(λσ) is the same function of |μ|/σ."""
    ratio = torch.linspace(0, 8, 200, dtype=torch.float64)
    found = []
    for tilt in (0.999e-5, 1.001e-5):
        sigma = torch.full_like(ratio, tilt)
        found.append(criteria.exponential_snr(ratio * sigma, sigma) + 2 * math.log(tilt))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[0], -variance_of_absolute(ratio).log(), rtol=0, atol=1e-4)


def variance_of_absolute(ratio: Tensor) -> Tensor:
    one = torch.ones_like(ratio)
    return 1 + ratio.square() - criteria.absolute_mean(ratio, one).square()


# -- in single precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REMOVAL)
def test_single_precision_ranks_as_double_precision(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    mu = 0.05 * torch.randn(5000, generator=generator)
    sigma = 10 ** (-4 + 3 * torch.rand(5000, generator=generator))
    single, double = REMOVAL[name](mu, sigma, 1.0), REMOVAL[name](mu.double(), sigma.double(), 1.0)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-7)
    order, exact = (values.argsort().argsort().double() for values in (single, double))
    assert (order - exact).abs().max() <= 3


def test_the_printed_snr_of_the_absolute_value_loses_its_order() -> None:
    ratio = torch.linspace(0.001, 0.01, 1000)
    assert (printed_absolute_snr(ratio, torch.ones(())).diff() <= 0).any()
    assert not printed_absolute_snr(torch.tensor([5000.0]), torch.ones(1)).isfinite().all()
    assert (criteria.absolute_snr(ratio, torch.ones(())).diff() > 0).all()


@pytest.mark.parametrize("name", REMOVAL)
@pytest.mark.parametrize("exponent", [1e-3, 1.0, 300.0])
def test_extreme_values_are_ranked_and_not_nan(name: str, exponent: float) -> None:
    smallest = torch.finfo(torch.float32).tiny
    mu = torch.tensor([0.0, 1e-12, 1e-4, 1.0, 100.0]).repeat(4)
    sigma = torch.tensor([smallest, 1e-9, 1e-3, 10.0]).repeat_interleave(5)
    scores = REMOVAL[name](mu, sigma, exponent)
    assert not scores.isnan().any()
    if name == "exponential_snr":  # |θ| has a smaller std at μ = 0 than elsewhere, so that μ = 0 scores high
        assert scores[0] > scores[4]
        return
    for part in scores.view(4, 5):  # for the same σ a larger |μ| never scores lower
        assert (part.diff()[part[:-1].isfinite()] >= 0).all()


@given(st.floats(-2, 2), st.floats(1e-3, 1))
def test_the_sign_of_the_mean_does_not_matter(mu: float, sigma: float) -> None:
    m, s = torch.tensor([mu]), torch.tensor([sigma])
    for criterion in REMOVAL.values():
        assert torch.equal(criterion(m, s, 1.0), criterion(-m, s, 1.0))


def test_criteria_rank_weights_differently() -> None:
    """|μ| and |μ|/σ rank differently, E|θ| is between them, and e^{λ|θ|} with large λ favors weights with a large σ."""
    mu, sigma = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([1.0, 0.1, 1.4])
    orders = {name: criterion(mu, sigma, 2.0).argsort().tolist() for name, criterion in REMOVAL.items()}
    assert orders["mean"] == [2, 1, 0]
    assert orders["snr"] == orders["absolute_snr"] == [2, 0, 1]
    assert orders["absolute_mean"] == [1, 0, 2]
    assert orders["exponential_mean"] == [1, 0, 2]
    assert orders["exponential_snr"] == [2, 0, 1]
