"""The INT8 baseline: rounding errors within half a step, and sizes that match a count by hand."""

import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from compact_cases import X, build
from torch import Tensor

import leanbayes as lb
from leanbayes.networks import build as build_model
from leanbayes.posteriors import MeanFieldPosterior

quantize_posterior = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "int8.py"))["quantize_posterior"]


@pytest.mark.parametrize("std_bits", [4, 2, 1])
def test_each_layer_has_few_distinct_values(std_bits: int) -> None:
    bnn = lb.bayesianize(build(), lb.MeanField(init_std=0.1))
    with torch.no_grad():
        assert isinstance(bnn.posterior, MeanFieldPosterior)
        noise = torch.randn(bnn.layout.numel, generator=torch.Generator().manual_seed(0))
        bnn.posterior.rho.add_(noise, alpha=0.5)
    quantized = quantize_posterior(bnn, std_bits=std_bits)
    posterior, sizes = quantized.model.posterior, bnn.layout.sizes
    assert isinstance(posterior, MeanFieldPosterior)
    for before, after in zip(bnn.posterior.mu.split(sizes), posterior.mu.split(sizes), strict=True):
        assert (before - after).abs().max() <= 0.5001 * before.abs().max() / 126.9
    for before, after in zip(bnn.posterior.std().split(sizes), posterior.std().split(sizes), strict=True):
        step = (before.max() - before.min()) / (2**std_bits - 1)
        assert (before - after).abs().max() <= 0.5001 * step + 1e-7
        levels: Tensor = ((after - before.min()) / step).detach()
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
    deterministic = sum(p.numel() for p in bnn.network.parameters()) + 2 * 8  # and BatchNorm statistics of 8 channels
    packed = sum(size + -(-size * std_bits // 8) + 12 for size in sizes)
    assert quantized.bytes == packed + 4 * deterministic
    assert quantized.model.predict(X, 2).probs.shape == (6, 5)


def test_bytes_of_a_resnet_20() -> None:
    """8 bits for every μ and those of σ: about half of the sizes in Table 4 of the paper for 4, 2 and 1 bits."""
    bnn = lb.bayesianize(build_model("resnet-20", (3, 32, 32), 10, seed=0), lb.MeanField())
    sizes = [quantize_posterior(bnn, std_bits=bits).bytes for bits in (4, 2, 1)]
    weights = bnn.layout.numel
    assert [(first - second) for first, second in pairwise(sizes)] == pytest.approx([weights / 4, weights / 8], abs=40)
    assert weights * 12 / 8 < sizes[0] < 0.87e6


def test_other_posteriors_and_bits_out_of_range_raise_an_error() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"lb\.bayesianize\(bnn, lb\.MeanField\(\)\)"):
        quantize_posterior(lb.bayesianize(build(), lb.SSVI(0.5)))
    bnn = lb.bayesianize(build(), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="std_bits=0 must be from 1 to 16"):
        quantize_posterior(bnn, std_bits=0)
    with pytest.raises(lb.LeanBayesError, match="mean_bits=1 must be from 2 to 16"):
        quantize_posterior(bnn, mean_bits=1)
