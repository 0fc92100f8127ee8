"""The mean softmax of many samples of Gaussian logits as one Triton kernel: maps would take gigabytes per sample.

`kernels.py` imports it if Triton is installed, and decides when to use it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_TILE = 512  # logits of one program of a single warp, whose threads need no shared memory to add up a row


@triton.jit
def _places(example, position, column, stride0, stride1, stride2):
    """Return where the values of some rows and all classes are."""
    return (example * stride0 + position * stride1)[:, None] + column[None, :] * stride2


@triton.jit
def mean_softmax_kernel(
    loc_ptr, std_ptr, shift_ptr, noise_ptr, probs_ptr, entropy_ptr, examples, positions, classes, samples,
    loc0, loc1, loc2, std0, std1, std2, probs0, probs1, probs2,
    HAS_SHIFT: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    example, position = row // positions, row % positions
    exists = row < examples * positions
    mask = exists[:, None] & (column < classes)[None, :]
    # Classes that do not exist have a probability of 0, without infinities that would give NaN.
    loc = tl.load(loc_ptr + _places(example, position, column, loc0, loc1, loc2), mask=mask, other=-1e30)
    std = tl.load(std_ptr + _places(example, position, column, std0, std1, std2), mask=mask, other=0.0)
    probs = tl.zeros((ROWS, CLASSES), tl.float32)
    logs = tl.zeros((ROWS,), tl.float32)
    exponents = tl.zeros((ROWS, CLASSES), tl.float32)
    for sample in range(samples):
        noise = tl.load(noise_ptr + sample * classes + column, mask=column < classes, other=0.0)
        z = loc + std * noise[None, :]
        if HAS_SHIFT:
            start = (sample * examples + example) * classes
            z += tl.load(shift_ptr + start[:, None] + column[None, :], mask=mask, other=0.0)
        z -= tl.max(z, 1)[:, None]
        unscaled = tl.exp(z)
        total = tl.sum(unscaled, 1)
        p = unscaled / total[:, None]
        probs += p
        logs += tl.log(total)
        exponents += tl.where(p > 0.0, p * z, 0.0)  # the sum over classes comes last, because it mixes threads
    tl.store(probs_ptr + _places(example, position, column, probs0, probs1, probs2), probs / samples, mask=mask)
    tl.store(entropy_ptr + row, (logs - tl.sum(exponents, 1)) / samples, mask=exists)


@triton_op("leanbayes::mean_softmax", mutates_args={})
def mean_softmax(loc: Tensor, std: Tensor, shift: Tensor | None, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over s of softmax(loc + std·noise[s] + shift[s]), and of its entropy.

    Args:
        loc: Means, (examples, positions, classes), with any strides.
        std: Standard deviations of the same shape.
        shift: What all positions of an example have in common, (samples, examples, classes), contiguous.
        noise: Standard normals, (samples, classes), contiguous.
    """
    examples, positions, classes = loc.shape
    probs = torch.empty_like(loc)
    entropy = torch.empty((examples, positions), dtype=loc.dtype, device=loc.device)
    width = max(2, triton.next_power_of_2(classes))
    rows = max(1, _TILE // width)
    if loc.numel():
        wrap_triton(mean_softmax_kernel)[(triton.cdiv(examples * positions, rows),)](
            loc, std, shift, noise, probs, entropy, examples, positions, classes, len(noise),
            *loc.stride(), *std.stride(), *probs.stride(), shift is not None, rows, width,
            num_warps=max(1, width // _TILE),
        )  # fmt: skip
    return probs, entropy
