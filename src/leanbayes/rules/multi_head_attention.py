"""`F.multi_head_attention_forward` in terms of functions that random weights support."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.errors import UnsupportedOperation


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `F.multi_head_attention_forward`, with inputs and outputs (length, batch, channels).

    Inside, the batch is the first dimension, so that the signs of flipout belong to examples.
    """
    if static_k is not None or static_v is not None:
        raise UnsupportedOperation(
            "This rule does not support static_k and static_v of torch.nn.functional.multi_head_attention_forward: "
            'use bnn.using("sample").'
        )
    batched = query.dim() == 3
    same = key is query and value is query
    queries, keys, values = (x.transpose(0, 1) if batched else x.unsqueeze(0) for x in (query, key, value))
    if same and not use_separate_proj_weight:
        q, k, v = F.linear(queries, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        weights = weights if use_separate_proj_weight else in_proj_weight.chunk(3)
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        projected = zip((queries, keys, values), weights, biases, strict=True)
        q, k, v = (F.linear(x, weight, bias) for x, weight, bias in projected)
    batch, length, channels = q.shape
    extra = 0
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.expand(batch, 1, -1)], 1), torch.cat([v, bias_v.expand(batch, 1, -1)], 1)
        extra += 1
    if add_zero_attn:
        zero = k.new_zeros(batch, 1, channels)
        k, v = torch.cat([k, zero], 1), torch.cat([v, zero], 1)
        extra += 1
    q, k, v = (x.reshape(batch, -1, num_heads, channels // num_heads).transpose(1, 2) for x in (q, k, v))
    mask = _additive_mask(attn_mask, key_padding_mask, batch, num_heads, extra, q.dtype)
    dropout = dropout_p if training else 0.0
    attention = None
    if need_weights:
        scores = torch.matmul(q / math.sqrt(q.shape[-1]), k.transpose(-2, -1))
        attention = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        attention = F.dropout(attention, dropout) if dropout else attention
        mixed = torch.matmul(attention, v)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    mixed = mixed.transpose(1, 2).reshape(batch, length, channels)
    output = F.linear(mixed, out_proj_weight, out_proj_bias)
    if attention is not None and average_attn_weights:
        attention = attention.mean(dim=1)
    if batched:
        return output.transpose(0, 1), attention
    return output.squeeze(0), None if attention is None else attention.squeeze(0)


def _additive_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    num_heads: int,
    extra: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Combine both masks to one that is added to the scores, with zeros for appended keys."""
    mask = None
    if attn_mask is not None:
        mask = _as_additive(attn_mask, dtype)
        mask = mask.view(batch, num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask
    if key_padding_mask is not None:
        padding = _as_additive(key_padding_mask, dtype)
        padding = padding.view(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    return F.pad(mask, (0, extra)) if mask is not None and extra else mask


def _as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)
