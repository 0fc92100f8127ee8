"""Attention: variances through scores, softmax and values in one step, and common noise by one small matrix.

To first order, with scores s_ij = q_i·k_j/√d, weights P_ij and outputs o_i = Σ_j P_ij v_j,

    δo_i = Σ_j P_ij [δs_ij (v_j - o_i) + δv_j]:

noise that all scores of a query share cancels, and noise that all values share passes through unchanged. Keys and
values with independent noise contribute the variance

    v_O = Σ_j P_ij² [q_i²·v_kj/d · (v_j - o_i)² + v_vj],      plus second-order terms of independent factors.

The noise of a query affects all its scores: δo_i = δq_i C_i/√d, where C_i is the covariance of keys and values under
the weights P_i. To compute it would take one matrix per query. If keys and values were unrelated, it would be about
C_i² = Σ_j P_ij² (k_j - k̄_i)² (v_j - o_i)². Its mean over the queries is C̄ = [Σ_ij P_ij k_j v_jᵀ - Σ_i k̄_i o_iᵀ]/L;
the excess of C̄² over C_i² is added in proportion to the variances of keys and values under P_i.

An output is a mean of values, so its variance is below that of one value sampled with the weights,
b_i = Σ_j P_ij (v_j - o_i)². So a variance x that comes from the scores is reduced to x/(1 + x/b), which matters if x is
large.

Noise that all tokens share stays common: that of the keys vanishes, that of the values passes unchanged, and that of
the queries is multiplied by C̄. The effect of C_i - C̄ becomes independent.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules import multi_head_attention
from leanbayes.rules.moments.buffers import spent
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.products import matmul
from leanbayes.rules.moments.registry import moment_rule
from leanbayes.rules.moments.softmax import saturated
from leanbayes.rules.moments.value import Moments, variance_dtype

_PIECE = 1 << 16  # scores of one piece on a CPU
_ALIGNED = {"cuda": 8}  # rows of scores have a multiple of so many keys: products of other matrices are far slower


@moment_rule(F.multi_head_attention_forward)
def multi_head_attention_forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute `F.multi_head_attention_forward`, with inputs and outputs (length, batch, channels)."""
    parameters = (x for x in (*args, *kwargs.values()) if isinstance(x, Moments))
    within = next(x for x in (query, key, value, *parameters) if isinstance(x, Moments)).within
    batch_first, within.batch_first = within.batch_first, True  # the batch is first inside
    try:
        return multi_head_attention.multi_head_attention_forward(query, key, value, *args, **kwargs)
    finally:
        within.batch_first = batch_first


@moment_rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Moments:
    """Compute attention with noise in any of the arguments."""
    if enable_gqa:
        key, value = (_repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if dropout_p > 0:
        return _with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)
    loc = F.scaled_dot_product_attention(
        loc_of(query), loc_of(key), loc_of(value), loc_of(attn_mask), is_causal=is_causal, scale=scale
    )
    dtype = variance_dtype(loc.dtype)
    q, k, v = (_parts(x, dtype) for x in (query, key, value))
    mask = _mask(loc_of(attn_mask), is_causal, query.shape[-2], key.shape[-2], loc.device, dtype)
    noise = attn_mask.variance.to(dtype) if isinstance(attn_mask, Moments) else None
    independent, common = _in_pieces(q, k, v, mask, noise, scale)
    like = next(x for x in (query, key, value, attn_mask) if isinstance(x, Moments))
    # Under autocast the products above have low precision.
    return like.like(loc, independent.to(dtype).expand(loc.shape), None if common is None else common.to(dtype))


def _in_pieces(
    q: Moments, k: Moments, v: Moments, mask: Tensor | None, noise: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Compute the noise of a few examples at a time on a CPU: there are dozens of results of the size of the scores."""
    if q.device.type != "cpu" or _spent(q.loc) is None:  # the compiler plans memory itself, for any number of examples
        return _noise(q, k, v, mask, noise, scale)
    examples, extras = len(q.loc), [x for x in (mask, noise) if x is not None]
    rows = max(1, _PIECE // max(1, math.prod(q.shape[1:-1]) * k.shape[-2]))
    alike = q.dim() > 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and all(x.dim() <= q.dim() for x in extras)
    if rows >= examples or not alike:
        return _noise(q, k, v, mask, noise, scale)

    def cut(x: Tensor | None, piece: slice, dim: int = 0) -> Tensor | None:
        if x is None or x.dim() < q.dim() or x.shape[dim] == 1:
            return x
        return x[piece] if dim == 0 else x[:, piece]

    def part(x: Moments, piece: slice) -> Moments:
        return x.like(x.loc[piece], x.independent[piece], cut(x.common, piece, 1))

    found = []
    for start in range(0, examples, rows):
        piece = slice(start, start + rows)
        own = [part(x, piece) for x in (q, k, v)]
        found.append(_noise(own[0], own[1], own[2], cut(mask, piece), cut(noise, piece), scale))
    first = found[0][1]
    shared = first is None or first.shape[1] != rows
    return torch.cat([own for own, _ in found]), first if shared else torch.cat(
        [c for _, c in found if c is not None], 1
    )


def _noise(
    q: Moments, k: Moments, v: Moments, mask: Tensor | None, noise: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Return the independent variance and the common noise of the outputs."""
    for x in (k, v):
        x.loc = x.loc - x.loc.mean(-2, keepdim=True)  # only differences matter, and this reduces rounding errors
    with_padding = any(x.within.counted is not None for x in (q, k, v))
    counted = _counted(mask, q.shape[-2], k.shape[-2]) if with_padding and mask is not None else None
    extra = -k.shape[-2] % _ALIGNED.get(k.device.type, 1)
    if extra:
        k, v = (x.like(_padded(x.loc, extra), _padded(x.independent, extra), x.common) for x in (k, v))
        noise = noise if noise is None or noise.shape[-1] == 1 else F.pad(noise, (0, extra))
    attended = _attend(q.loc, k.loc, v.loc, mask, scale, extra, counted)
    by_scores, by_values = _variances(q, k, v, attended, noise, scale)
    independent = saturated(by_scores, attended.bound)
    independent = torch.add(independent, by_values, out=_spent(independent))
    common = v.common
    if common is not None and mask is not None:  # fully masked rows have no output
        rows = attended.weights.sum(-1, keepdim=True)
        share = attended.mean(rows)
        independent = independent + (rows - share).square() * v.common_variance()
        common = share * common
    if q.common is not None:
        rows = q.common.squeeze(-2).movedim(0, -2)  # one product for all probes
        kept = (rows @ attended.covariance).movedim(-2, 0).unsqueeze(-2)
        common = kept if common is None else torch.add(common, kept, out=_spent(kept))
        own = q.common_variance()
        assert isinstance(own, Tensor)
        independent = (independent - own @ attended.covariance.square()).clamp_min(0)  # it is part of `by_scores`
    return independent, common


class _Attended(NamedTuple):
    """Results of the means: P, o, k̄, the mean variance of the keys under P, that of the values, and C̄/√d.

    `counted` is 1 for queries that count in means over them, and 0 for padding; None if all count.
    """

    weights: Tensor
    output: Tensor
    keys: Tensor
    key_variance: Tensor
    bound: Tensor
    covariance: Tensor
    counted: Tensor | None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the queries that count."""
        if self.counted is None:
            return values.mean(-2, keepdim=True)
        return (values * self.counted).sum(-2, keepdim=True) / _number(self.counted, values.shape[-2])


def _counted(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return which queries count: those that attend to something and, in self-attention, that something attends to."""
    allowed = mask > torch.finfo(mask.dtype).min / 4  # networks also mask by the least finite number
    attends = allowed.any(-1)
    if queries == keys:
        attends = attends & allowed.any(-2)
    return attends.unsqueeze(-1).to(mask.dtype)


def _number(counted: Tensor, queries: int) -> Tensor:
    """Return the number of queries that count, at least 1."""
    return counted.expand(*counted.shape[:-2], queries, 1).sum(-2, keepdim=True).clamp_min(1)


def _padded(x: Tensor, extra: int) -> Tensor:
    """Add tokens of zeros."""
    return F.pad(x, (0, 0, 0, extra))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, extra: int, counted: Tensor | None
) -> _Attended:
    """Compute what the means of queries, keys and values give. The last `extra` keys have weights of 0."""
    scores = (scale * q) @ k.mT
    scores = scores[..., : scores.shape[-1] - extra] if extra else scores
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        # A fully masked row gives 0; with -inf in it, its gradient would be NaN.
        weights = torch.softmax(scores + mask.clamp_min(torch.finfo(q.dtype).min / 4), -1) * (mask > -math.inf)
    weights = F.pad(weights, (0, extra)) if extra else weights
    # One product for all columns.
    columns = [v, k, v.square(), k.square().sum(-1, keepdim=True)]
    sums = weights @ torch.cat(columns, -1)
    output, keys, second, key_second = sums.split([column.shape[-1] for column in columns], -1)
    queries = weights.shape[-2]
    received = (weights if counted is None else weights * counted).sum(-2).unsqueeze(-1)
    number = queries if counted is None else _number(counted, queries)
    own = keys if counted is None else keys * counted
    covariance = ((received * k).mT @ v - own.mT @ output) * (scale / number)
    key_variance = ((key_second - keys.square().sum(-1, keepdim=True)) / k.shape[-1]).clamp_min(0)
    bound = (second - output.square()).clamp_min(0)
    return _Attended(weights, output, keys, key_variance, bound, covariance, counted)


def _variances(
    q: Moments, k: Moments, v: Moments, attended: _Attended, noise: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the variance that comes from the scores, and that which comes from the values."""
    weights, output, keys, key_variance, bound, covariance, _ = attended
    squares = weights.square()
    variance = scale**2 * q.variance
    by_keys = torch.add(variance, q.loc.square(), alpha=scale**2) @ k.independent.mT
    by_keys = by_keys if noise is None else by_keys + noise
    shifts = variance * keys
    by_queries = torch.cat([variance, -2 * shifts], -1) @ torch.cat([k.loc.square(), k.loc], -1).mT
    by_queries = torch.add(by_queries, (shifts * keys).sum(-1, keepdim=True), out=_spent(by_queries))
    by_queries = torch.clamp_min(by_queries, 0, out=_spent(by_queries))
    by_keys, by_queries = (
        torch.mul(part, squares, out=_spent(part) if part.shape == squares.shape else None)  # a mask may be larger
        for part in (by_keys, by_queries)
    )
    of_keys, of_queries = (part.sum(-1, keepdim=True) for part in (by_keys, by_queries))

    columns = torch.cat([v.loc.square(), v.loc], -1)

    def through(of_weights: Tensor, sums: Tensor) -> Tensor:
        """Return Σ_j of_weights_ij (v_j - o_i)²."""
        second, first = (of_weights @ columns).chunk(2, -1)
        inner = torch.sub(output * sums, first, alpha=2)
        result = torch.addcmul(second, output, inner, out=_spent(inner))
        return torch.clamp_min(result, 0, out=_spent(result))

    unrelated = through(by_queries, of_queries)
    related = q.variance @ covariance.square()
    # These proportions are constants for the gradient.
    size = key_variance * bound
    size = _proportion(size, attended.mean(size))
    alike = _proportion(attended.mean(weights).square().sum(-1, keepdim=True), squares.sum(-1, keepdim=True))
    excess = torch.addcmul(related * size, alike, unrelated, value=-1)
    by_scores = unrelated + torch.clamp_min(excess, 0, out=_spent(excess)) + through(by_keys, of_keys)

    # The variance of the weights is that of `share_variance`, from products that are known already.
    mixed = torch.add(by_keys, by_queries, out=_spent(by_keys))
    own = torch.addcmul(mixed, mixed, weights, value=-2, out=_spent(by_queries))
    own = torch.addcmul(own, squares, of_keys + of_queries, out=_spent(own))
    own = saturated(torch.clamp_min(own, 0, out=_spent(own)), weights - squares)
    return by_scores, torch.add(own, squares, out=_spent(own)) @ v.independent


def _spent(x: Tensor) -> Tensor | None:
    return None if torch.is_autocast_enabled(x.device.type) else spent(x)  # products have another dtype


def _proportion(part: Tensor, whole: Tensor) -> Tensor:
    return (part / whole.clamp_min(torch.finfo(part.dtype).tiny)).detach()


def _parts(value: Any, dtype: torch.dtype) -> Moments:
    """Return a value in the precision of variances, with noise that is either common to all tokens or independent."""
    if not isinstance(value, Moments):
        loc = value.to(dtype)
        return Moments(loc, torch.zeros_like(loc))
    value = value.settled([-2])
    return value.like(value.loc.to(dtype), value.independent, value.common)


def _repeated(value: Any, times: int) -> Any:
    """Repeat the key or value heads for each group of query heads."""
    if isinstance(value, Moments):
        return value.viewed(lambda x: x.repeat_interleave(times, -3))
    return value.repeat_interleave(times, -3)


def _mask(
    mask: Tensor | None, is_causal: bool, rows: int, columns: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Return the mask that is added to the scores, with -inf for masked keys."""
    if is_causal:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
    return mask.to(dtype)


def _with_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float
) -> Any:
    """Compute attention step by step, so that dropout can be applied to the weights."""
    mask = attn_mask
    if not isinstance(mask, Moments):
        mask = _mask(mask, is_causal, query.shape[-2], key.shape[-2], query.device, query.dtype)
    scores = matmul(query, key.transpose(-2, -1)) * scale
    scores = scores if mask is None else scores + mask
    return matmul(F.dropout(torch.softmax(scores, -1), dropout_p), value)
