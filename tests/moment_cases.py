"""Moments against Monte Carlo: sample the inputs of a function, call it on each sample, and compare."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import leanbayes as lb
from leanbayes.rules.moments.context import Pass, make_signs

SAMPLES = 100_000
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def common_pass(**settings: Any) -> Pass:
    """Return a forward pass that keeps common noise."""
    return Pass(correlation="common", signs=make_signs(), **settings)


def gaussian(
    shape: tuple[int, ...],
    seed: int = 0,
    std: float = 0.3,
    positions: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    probes: int = 3,
) -> lb.Moments:
    """Return a random value; with `positions`, also noise that is common along these dimensions."""
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randn(shape, generator=generator, dtype=dtype)
    variance = std**2 * (0.2 + torch.rand(shape, generator=generator, dtype=dtype))
    if positions is None:
        return lb.Moments(loc, variance)
    sizes = [1 if dim in positions else size for dim, size in enumerate(shape)]
    common = std / math.sqrt(probes) * torch.randn((probes, *sizes), generator=generator, dtype=dtype)
    return lb.Moments(loc, variance, common, within=common_pass())


def samples_of(value: lb.Moments, count: int = SAMPLES, seed: int = 1) -> Tensor:
    """Sample a value: (count, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    value = value.plain()
    noise = torch.randn((count, *value.shape), generator=generator, dtype=value.loc.dtype)
    sample = value.loc + value.independent.sqrt() * noise
    if value.common is not None:
        xi = torch.randn((count, len(value.common)), generator=generator, dtype=value.loc.dtype)
        sample = sample + torch.einsum("nr,r...->n...", xi, value.common)
    return sample


def assert_moments(
    result: lb.Moments, outcomes: Tensor, *, mean: float = 0.0, std: float = 0.0, atol: float = 1e-9
) -> None:
    """Compare with outcomes (sample, ...).

    Means must agree within `mean` true stds, and stds within a fraction `std`, plus 5 standard errors each.
    """
    count = len(outcomes)
    true_mean, true_std = outcomes.mean(0), outcomes.std(0)
    assert result.shape == true_mean.shape
    assert (result.variance >= 0).all()
    off = (result.loc - true_mean).abs()
    allowed = (mean + 5 / math.sqrt(count)) * true_std + atol
    assert (off <= allowed).all(), f"means off by {(off / true_std).max():.4f} std"
    centered = outcomes - true_mean
    fourth = centered.pow(4).mean(0)
    error = 0.5 * ((fourth - true_std**4).clamp_min(0) / count).sqrt() / true_std.clamp_min(1e-30)  # of the std
    wrong = (result.stddev - true_std).abs()
    assert (wrong <= std * true_std + 5 * error + atol).all(), f"stds off by {(wrong / true_std).max():.4f}"


def check(
    function: Callable[..., Any], *values: lb.Moments, mean: float = 0.0, std: float = 0.0, batched: bool = False
) -> None:
    """Call a function on values and on their samples, one by one (vmap) or all at once, and compare."""
    result = function(*values)
    samples = [samples_of(value, seed=number + 1) for number, value in enumerate(values)]
    outcomes = function(*samples) if batched else torch.vmap(function)(*samples)
    assert_moments(result, outcomes, mean=mean, std=std)


def without_variance(value: lb.Moments) -> lb.Moments:
    """Return the same means without noise."""
    common = None if value.common is None else torch.zeros_like(value.common)
    return lb.Moments(value.loc, torch.zeros_like(value.independent), common, within=value.within)
