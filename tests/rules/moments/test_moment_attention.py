"""Attention with noise in queries, keys and values, against samples."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import SAMPLES, assert_moments, common_pass, gaussian, samples_of, without_variance
from torch import Tensor, nn

import leanbayes as lb

attention: Any = F.scaled_dot_product_attention  # declared for tensors only
forward: Any = F.multi_head_attention_forward
SHAPE = (2, 2, 6, 4)  # batch, heads, tokens, channels
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "closed": {"attn_mask": torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.6},
    "biased": {"attn_mask": torch.linspace(-2, 1, 36).reshape(6, 6)},
    "padded": {"attn_mask": torch.zeros(2, 1, 1, 6).index_fill(3, torch.tensor([4, 5]), -math.inf)},
    "scaled": {"scale": 0.3},
}
KINDS["closed"]["attn_mask"][0] = False  # a query without any key


def settings_of(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    mask = KINDS[kind].get("attn_mask")
    if mask is None or mask.dtype == torch.bool:
        return KINDS[kind]
    return {"attn_mask": mask.to(dtype)}


def values(
    std: float = 0.1, positions: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float64
) -> list[lb.Moments]:
    return apart(*(gaussian(SHAPE, seed, std, positions, dtype) for seed in range(3)))


def apart(*values: lb.Moments) -> list[lb.Moments]:
    """Give each value its own directions of common noise, because it is sampled independently."""
    for number, value in enumerate(values):
        if value.common is not None:
            probes = torch.zeros(len(values), *value.common.shape, dtype=value.common.dtype)
            probes[number] = value.common
            value.common = probes.flatten(0, 1)
    return list(values)


def attend(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: Any = False, scale: Any = 0.5) -> Any:
    """Compute attention step by step, for samples."""
    scores = scale * q @ k.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(6, 6, dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores, -1).nan_to_num() @ v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [None, (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_without_variance_equal_those_of_torch(
    kind: str, positions: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    options = settings_of(kind, dtype)
    q, k, v = (without_variance(x) for x in values(0.1, positions, torch.float32))
    for x in (q, k, v):
        x.loc = x.loc.to(dtype)
    result = attention(q, k, v, **options)
    assert torch.equal(result.loc, attention(q.loc, k.loc, v.loc, **options))
    assert result.dtype == dtype
    assert result.variance.dtype == torch.float32
    assert not result.variance.any()


@pytest.mark.parametrize("noisy", ["k", "v"])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_keys_or_values_alone_is_exact_to_first_order(kind: str, noisy: str) -> None:
    options = settings_of(kind, torch.float64)
    parts = dict(zip("qkv", values(0.05), strict=True))
    x = parts[noisy]
    arguments = {name: x if name == noisy else part.loc for name, part in parts.items()}
    sample = {
        name: samples_of(x, SAMPLES if kind == "plain" else 20_000) if name == noisy else part.loc
        for name, part in parts.items()
    }
    result = attention(**{_NAMES[n]: a for n, a in arguments.items()}, **options)
    assert_moments(result, attend(*(sample[n] for n in "qkv"), **options), mean=0.1, std=0.01)


_NAMES = {"q": "query", "k": "key", "v": "value"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [None, (2,)])
@pytest.mark.parametrize(("variance", "tolerance"), [(0.01, 0.06), (0.1, 0.08), (1.0, 0.2)])
def test_variance_equals_that_of_samples(
    kind: str, positions: tuple[int, ...] | None, variance: float, tolerance: float
) -> None:
    options = settings_of(kind, torch.float64)
    inputs = values(math.sqrt(variance / (0.7 if positions is None else 1.7)), positions)
    result = attention(*inputs, **options)
    outcomes = attend(*[samples_of(x, 20_000, seed) for seed, x in enumerate(inputs, 1)], **options)
    assert (result.variance >= 0).all()
    assert abs(result.variance.mean() / outcomes.var(0).mean() - 1) < tolerance
    if variance <= 0.1 and positions is None:
        open_ = outcomes.std(0) > 1e-9
        ratio = (result.stddev / outcomes.std(0))[open_]
        assert ratio.quantile(0.05) > 0.75
        assert ratio.quantile(0.95) < 1.3


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=10)
def test_any_lengths_and_widths(heads: int, length: int, keys: int, channels: int, width: int) -> None:
    q = gaussian((2, heads, length, channels), 0, 0.05, (2,))
    k, v = gaussian((2, heads, keys, channels), 1, 0.05, (2,)), gaussian((2, heads, keys, width), 2, 0.05, (2,))
    q, k, v = apart(q, k, v)
    result = attention(q, k, v)
    assert result.shape == (2, heads, length, width)
    assert result.common is not None
    assert result.common.shape == (9, 2, heads, 1, width)
    assert (result.variance >= 0).all()
    scale = 1 / math.sqrt(channels)
    samples = [samples_of(x, 5_000, seed) for seed, x in enumerate((q, k, v), 1)]
    outcomes = attend(samples[0], samples[1], samples[2], scale=scale)
    assert abs(result.variance.mean() / outcomes.var(0).mean() - 1) < 0.2


def tokens(std: float, shape: tuple[int, ...] = (2, 7, 12)) -> lb.Moments:
    """Return queries, keys and values of two heads in one value, whose common noise has the same directions."""
    x = gaussian(shape, 5, std, (1,))
    return x.like(x.loc, torch.zeros_like(x.independent), x.common)


def split(x: Any) -> list[Any]:
    """Split (batch, tokens, 3 · 2 · 2) to three values (batch, heads, tokens, channels)."""
    return [x[..., start : start + 4].reshape(*x.shape[:-1], 2, 2).transpose(-3, -2) for start in (0, 4, 8)]


def test_common_noise_of_queries_keys_and_values_together() -> None:
    x = tokens(0.02)
    result = attention(*split(x))
    assert result.common is not None
    assert result.common.shape == (3, 2, 2, 1, 2)
    queries, keys, vs = split(samples_of(x))
    outcomes = attend(queries, keys, vs, scale=1 / math.sqrt(2))
    means = result.like(result.loc.mean(2), torch.zeros_like(result.independent.mean(2)), result.common.squeeze(3))
    assert_moments(means, outcomes.mean(3), mean=0.1, std=0.01)  # exact: C̄ is the mean of all C_i
    assert abs(result.variance.mean() / outcomes.var(0).mean() - 1) < 0.1


def test_common_noise_of_keys_cancels_and_that_of_values_does_not() -> None:
    q, k, v = (x.like(x.loc, torch.zeros_like(x.independent), x.common) for x in values(0.3, (2,)))
    result = attention(q.loc, k, v)
    torch.testing.assert_close(result.common, v.common)
    assert result.independent.max() < 1e-12


def test_attention_step_by_step_keeps_the_same_common_noise() -> None:
    q, k, v = split(gaussian((2, 7, 12), 5, 0.05, (1,)))
    whole = attention(q, k, v)
    steps = torch.softmax((q / math.sqrt(2)) @ k.transpose(-2, -1), -1) @ v
    torch.testing.assert_close(steps.loc, whole.loc)
    torch.testing.assert_close(steps.common, whole.common)
    assert 0.9 < steps.variance.mean() / whole.variance.mean() < 1.4
    moved = torch.softmax((q / math.sqrt(2)) @ k.transpose(-2, -1), -1) @ (v + 10.0)
    torch.testing.assert_close(moved.variance, steps.variance)  # a shift of all values changes nothing


def test_grouped_heads() -> None:
    q, k, v = gaussian((1, 4, 3, 2), 0, positions=(2,)), gaussian((1, 2, 3, 2), 1), gaussian((1, 2, 3, 2), 2)
    result = attention(q, k, v, enable_gqa=True)
    k, v = (x.like(x.loc.repeat_interleave(2, 1), x.independent.repeat_interleave(2, 1)) for x in (k, v))
    expected = attention(q, k, v)
    assert torch.equal(result.loc, expected.loc)
    torch.testing.assert_close(result.variance, expected.variance)


@pytest.mark.parametrize("kind", [*KINDS, "random"])
@pytest.mark.parametrize("positions", [None, (2,)])
def test_keys_that_align_matrices_change_nothing(
    kind: str, positions: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU six keys become eight, two of them without weight."""
    settings = {"attn_mask": gaussian((2, 6, 6), 7)} if kind == "random" else settings_of(kind, torch.float64)
    expected = attention(*values(positions=positions), **settings)
    monkeypatch.setattr("leanbayes.rules.moments.attention._ALIGNED", {"cpu": 8})
    found = attention(*values(positions=positions), **settings)
    for name in ("loc", "independent", "common"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12)


def test_a_random_mask_adds_its_variance_to_the_scores() -> None:
    q, k, v = values()
    mask = gaussian((2, 6, 6), 7)
    result = attention(q.loc, k.loc, v.loc, mask)
    outcomes = torch.stack([attend(q.loc, k.loc, v.loc, m) for m in samples_of(mask, 5_000)])
    assert abs(result.variance.mean() / outcomes.var(0).mean() - 1) < 0.05


def test_dropout_of_the_weights_keeps_the_mean() -> None:
    q, k, v = (gaussian((3, 2, 50, 4), seed, 0.1, (2,)) for seed in range(3))
    result = attention(q, k, v, dropout_p=0.5, is_causal=True)
    kept = attention(q, k, v, is_causal=True)
    assert result.variance.isfinite().all()
    assert (result.loc - kept.loc).mean().abs() < 0.05
    assert not torch.equal(result.loc, kept.loc)


@pytest.mark.parametrize("kind", ["plain", "closed", "padded"])
@pytest.mark.parametrize("std", [0.0, 0.3, 100.0])
def test_gradients_are_finite(kind: str, std: float) -> None:
    options = settings_of(kind, torch.float32)
    inputs = values(std, (2,), torch.float32)
    leaves = [part.requires_grad_() for x in inputs for part in (x.loc, x.independent, x.common) if part is not None]
    result = attention(*inputs, **options)
    (result.loc.sum() + result.variance.sum()).backward()
    assert sum(leaf.grad is None for leaf in leaves) <= 1  # common noise of the keys has no effect
    assert all(leaf.grad.isfinite().all() for leaf in leaves if leaf.grad is not None)


def test_the_variance_of_outputs_is_bounded_by_the_range_of_values() -> None:
    q, k, v = values(1000.0)
    result = attention(q, k, v.loc)
    span = v.loc.max(2, keepdim=True).values - v.loc.min(2, keepdim=True).values
    assert (result.variance <= span.square() / 4).all()  # Popoviciu's bound for a mean of values


# -- nn.MultiheadAttention --------------------------------------------------------------------------------------------


def heads(module: nn.MultiheadAttention, x: Any, within: Any = None, std: float = 0.0, **options: Any) -> Any:
    """Compute self-attention by `F.multi_head_attention_forward` with noise in the weights."""
    weights = [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias]
    if within is not None:
        weights = [lb.Moments(w, torch.full_like(w, std**2), within=within) for w in weights]  # type: ignore[misc]
    w, b, out_w, out_b = weights
    extra = (module.bias_k, module.bias_v, module.add_zero_attn, 0.0)
    sizes = module.embed_dim, module.num_heads
    return forward(x, x, x, *sizes, w, b, *extra, out_w, out_b, training=False, **options)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("padded", [False, True])
def test_multi_head_attention_without_variance_equals_that_of_torch(
    need_weights: bool, extra: dict[str, Any], padded: bool
) -> None:
    module, x = nn.MultiheadAttention(8, 2, **extra), torch.randn(5, 3, 8)
    options: dict[str, Any] = {"need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = torch.arange(5) >= torch.tensor([[5], [3], [2]])
    expected, shares = heads(module, x, **options)
    result, weights = heads(module, x, common_pass(batch_first=False), **options)
    torch.testing.assert_close(result.loc, expected, rtol=0, atol=1e-6)
    assert not result.variance.any()
    if need_weights:
        torch.testing.assert_close(weights.loc, shares, rtol=0, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("correlation", ["common", "none"])
def test_multi_head_attention_with_random_weights(need_weights: bool, correlation: str) -> None:
    module, x, std = nn.MultiheadAttention(8, 2).double().requires_grad_(False), torch.randn(6, 2, 8).double(), 0.02
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    options: dict[str, Any] = {"need_weights": need_weights, "key_padding_mask": padding}
    within = common_pass(batch_first=False) if correlation == "common" else lb.Moments(x, x).within
    result, _ = heads(module, x, within, std, **options)
    assert not within.batch_first or correlation == "none"  # restored
    means = {name: p.clone() for name, p in module.named_parameters()}
    outcomes = []
    for _ in range(1_000):
        for name, p in module.named_parameters():
            p.copy_(means[name] + std * torch.randn_like(p))
        outcomes.append(heads(module, x, **options)[0])
    sample = torch.stack(outcomes)
    # Layers overestimate their common noise, which does not average out over the tokens.
    assert 0.8 < result.variance.mean() / sample.var(0).mean() < (1.5 if correlation == "common" else 1.25)
    if correlation == "common":
        assert result.common is not None
        assert result.common.shape == (64, 1, 2, 8)  # one per example, the same for all tokens
        mean = result.common.square().sum(0).squeeze(0) + result.independent.mean(0) / 6
        assert 0.7 < mean.mean() / sample.mean(1).var(0).mean() < 1.4


def test_attention_compiles_into_one_graph() -> None:
    module, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)

    def function(x: Tensor, within: Any) -> tuple[Tensor, Tensor]:
        result, _ = heads(module, x, within, 0.1, need_weights=False)
        return result.loc, result.variance

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    passes = common_pass(batch_first=False), common_pass(batch_first=False)
    torch.testing.assert_close(compiled(x, passes[0]), function(x, passes[1]))
