"""The cross-entropy of many classes, such as the tokens of a language model, without large copies of the logits.

Logits of half precision are scored in single precision. Plain torch then makes four tensors of single precision in the
size of the logits: a copy, its log-softmax, and the gradients of both. Here a few rows are converted at a time, and the
backward pass writes the gradient in the dtype of the logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core import noise

_CHUNK = 1 << 24  # logits that are converted at a time; fewer would cost more kernels than they save memory


def cross_entropy(logits: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    """Return the sum of -log softmax(logits)[y] over rows, in at least single precision.

    Args:
        logits: One row per position, (positions, classes).
        y: The class of each position.
        ignore_index: Positions with this class do not count.
    """
    # The compiler fuses the conversion by itself, and transforms need plain operations.
    whole = logits.numel() <= _CHUNK or torch.compiler.is_compiling() or noise.in_transform()
    return (_plain if whole else _CrossEntropy.apply)(logits, y, ignore_index)


def _plain(logits: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(_single(logits), y, ignore_index=ignore_index, reduction="sum")


def _single(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, ignore_index: int) -> Tensor:
        labeled = y != ignore_index
        index = y.where(labeled, 0)[:, None]
        rows = _rows(logits)
        parts = zip(logits.split(rows), index.split(rows), strict=True)
        losses = torch.cat([-_single(part).log_softmax(-1).gather(1, label) for part, label in parts])
        ctx.save_for_backward(logits, y, losses)
        ctx.ignore_index = ignore_index
        return losses[:, 0].where(labeled, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, y, losses = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated too
            (slope,) = torch.autograd.grad(_plain(logits, y, ctx.ignore_index), logits, grad, create_graph=True)
            return slope, None, None
        # The gradient is softmax(logits) - one-hot(y), and 0 for positions that do not count. At y the difference is
        # taken in single precision: bf16 would round a probability of 0.999 to 1, and the gradient to 0.
        labeled = y != ctx.ignore_index
        weights, index = (labeled * grad)[:, None], y.where(labeled, 0)[:, None]
        at_label = torch.expm1(-losses).mul_(weights).to(logits.dtype)
        slope, rows = torch.empty_like(logits), _rows(logits)
        parts = zip(*(tensor.split(rows) for tensor in (slope, logits, weights, index, at_label)), strict=True)
        for target, part, weight, label, value in parts:
            wide = part.float() if part.dtype == torch.float16 else part  # in which small probabilities would be 0
            torch.mul(wide.softmax(-1), weight, out=target)
            target.scatter_(1, label, value)
        return slope, None, None


def _rows(logits: Tensor) -> int:
    return max(1, _CHUNK // logits.shape[-1])
