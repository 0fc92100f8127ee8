"""Numbers in few bits, and the INT8 baseline: errors within half a step, and bytes that can be counted by hand."""

from itertools import pairwise

import pytest
import torch
from compact_cases import X, build
from hypothesis import given
from hypothesis import strategies as st

import leanbayes as lb
from leanbayes.compression.quantisation import dequantise, quantise, quantise_posterior
from leanbayes.models import build as build_model
from leanbayes.posteriors import MeanFieldPosterior

FLOATS = st.floats(-1e6, 1e6, width=32).filter(lambda value: value == 0 or abs(value) > 1e-20)


@given(st.lists(FLOATS, max_size=30), st.integers(2, 8))
def test_values_are_within_half_a_step_and_stay_as_they_are(values: list[float], bits: int) -> None:
    given_values = torch.tensor(values, dtype=torch.float32)
    codes, scale = quantise(given_values, bits)
    most = 2 ** (bits - 1) - 1
    assert codes.dtype == torch.int8
    assert codes.abs().amax() <= most if len(values) else scale == 0
    rounded = dequantise(codes, scale).float()
    assert ((rounded - given_values).abs() <= 0.5001 * scale).all()
    again, same = quantise(rounded, bits)
    assert same == scale
    assert torch.equal(again, codes)


def test_what_is_not_finite_is_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(lb.LeanBayesError, match="NaN or infinite"):
            quantise(torch.tensor([1.0, value]))


@pytest.mark.parametrize("std_bits", [4, 2, 1])
def test_the_baseline_takes_few_values_a_layer(std_bits: int) -> None:
    bnn = lb.bayesianize(build(), lb.MeanField(init_std=0.1))
    with torch.no_grad():
        assert isinstance(bnn.posterior, MeanFieldPosterior)
        noise = torch.randn(bnn.layout.numel, generator=torch.Generator().manual_seed(0))
        bnn.posterior.rho.add_(noise, alpha=0.5)
    made = quantise_posterior(bnn, std_bits=std_bits)
    assert isinstance(made.model.posterior, MeanFieldPosterior)
    sizes = bnn.layout.sizes
    for before, after in zip(bnn.posterior.mu.split(sizes), made.model.posterior.mu.split(sizes), strict=True):
        assert (before - after).abs().max() <= 0.5001 * before.abs().max() / 126.9
    for before, after in zip(bnn.posterior.std().split(sizes), made.model.posterior.std().split(sizes), strict=True):
        step = (before.max() - before.min()) / (2**std_bits - 1)
        assert (before - after).abs().max() <= 0.5001 * step + 1e-7
        levels = ((after - before.min()) / step).detach()
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
    points = sum(p.numel() for p in bnn.network.parameters()) + 2 * 8  # and statistics of eight channels
    packed = sum(size + -(-size * std_bits // 8) + 12 for size in sizes)
    assert made.bytes == packed + 4 * points
    assert made.model.predict(X, 2).probs.shape == (6, 5)


def test_bytes_of_a_resnet_20() -> None:
    """Of every weight 8 bits and those of σ: about half of what the paper's Table 4 says for 4, 2 and 1 bits."""
    bnn = lb.bayesianize(build_model("resnet-20", (3, 32, 32), 10, seed=0), lb.MeanField())
    found = [quantise_posterior(bnn, std_bits=bits).bytes for bits in (4, 2, 1)]
    weights = bnn.layout.numel
    assert [(first - second) for first, second in pairwise(found)] == pytest.approx([weights / 4, weights / 8], abs=40)
    assert weights * 12 / 8 < found[0] < 0.87e6


def test_mistakes_are_told() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"lb\.bayesianize\(bnn, lb\.MeanField\(\)\)"):
        quantise_posterior(lb.bayesianize(build(), lb.SSVI(0.5)))
    bnn = lb.bayesianize(build(), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="std_bits=0 must lie between 1 and 16"):
        quantise_posterior(bnn, std_bits=0)
    with pytest.raises(lb.LeanBayesError, match="mean_bits=1 must lie between 2 and 16"):
        quantise_posterior(bnn, mean_bits=1)
