"""The mean softmax of many samples of Gaussian logits as one Triton kernel: maps would take gigabytes per sample.

`kernels.py` imports it if Triton is installed, and decides when to use it.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_TILE = 512  # logits of one program of a single warp: with up to 16 classes, each thread has all classes of a row
_PROGRAMS = 1024  # fewer rows than these need are shared by several programs, which take some of the samples each
_LEAST = 8  # samples of such a program
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _places(example, position, column, stride0, stride1, stride2):
    """Return where the values of all classes and some rows are."""
    return column[:, None] * stride2 + (example * stride0 + position * stride1)[None, :]


@triton.jit
def mean_softmax_kernel(
    loc_ptr, std_ptr, shift_ptr, noise_ptr, probs_ptr, entropy_ptr, examples, positions, classes, samples, at_once,
    loc0, loc1, loc2, std0, std1, std2, probs0, probs1, probs2,
    HAS_SHIFT: tl.constexpr, SCALED: tl.constexpr, ONE_EXAMPLE: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    part = tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    example, position = row // positions, row % positions
    exists = row < examples * positions
    mask = (column < classes)[:, None] & exists[None, :]
    # Logits to the base 2. Classes that do not exist have a probability of 0, without infinities that would give NaN.
    loc = tl.load(loc_ptr + _places(example, position, column, loc0, loc1, loc2), mask=mask, other=-1e30) * _LOG2E
    std = tl.load(std_ptr + _places(example, position, column, std0, std1, std2), mask=mask, other=0.0) * _LOG2E
    probs = tl.zeros((CLASSES, ROWS), tl.float32)
    entropy = tl.zeros((ROWS,), tl.float32)
    if HAS_SHIFT:
        shift_ptr += part.to(tl.int64) * at_once * examples * CLASSES
    for sample in range(part * at_once, tl.minimum((part + 1) * at_once, samples)):
        z = loc
        if not SCALED:
            z += std * tl.load(noise_ptr + sample * CLASSES + column)[:, None]
        if HAS_SHIFT:
            factor = std if SCALED else _LOG2E
            if ONE_EXAMPLE:
                z += tl.load(shift_ptr + (first // positions) * CLASSES + column)[:, None] * factor
            else:
                places = column[:, None] + (example * CLASSES)[None, :]
                z += tl.load(shift_ptr + places, mask=exists[None, :], other=0.0) * factor
            shift_ptr += examples * CLASSES
        z -= tl.max(z, 0)[None, :]
        unscaled = tl.exp2(z)
        total = tl.sum(unscaled, 0)
        inverse = 1.0 / total
        probs += unscaled * inverse[None, :]
        exponent = tl.sum(tl.where(unscaled > 0.0, unscaled * z, 0.0), 0)
        entropy += tl.log2(total) - exponent * inverse
    stored = probs_ptr + part * probs0 * examples  # parts follow one another
    tl.store(stored + _places(example, position, column, probs0, probs1, probs2), probs / samples, mask=mask)
    places = part.to(tl.int64) * examples * positions + row
    tl.store(entropy_ptr + places, entropy / (samples * _LOG2E), mask=exists)


@triton_op("leanbayes::mean_softmax", mutates_args={})
def mean_softmax(loc: Tensor, std: Tensor, shift: Tensor | None, noise: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
    """Return the mean over s of softmax(loc + std·noise[s] + shift[s]), and of its entropy.

    With `scaled` it is that of softmax(loc + std·shift[s]).

    Args:
        loc: Means, (examples, positions, classes), with any strides.
        std: Standard deviations of the same shape.
        shift: What all positions of an example have in common, (samples, examples, classes).
        noise: Standard normals, (samples, classes).
    """
    examples, positions, classes = loc.shape
    samples, width = len(noise), max(2, triton.next_power_of_2(classes))
    rows = max(1, _TILE // width)
    blocks = triton.cdiv(examples * positions, rows)
    parts = min(triton.cdiv(_PROGRAMS, max(1, blocks)), max(1, samples // _LEAST))
    at_once = triton.cdiv(samples, parts)
    parts = triton.cdiv(samples, at_once)
    # With one part the probabilities keep the order of the logits in memory.
    probs = torch.empty_like(loc) if parts == 1 else loc.new_empty(parts, *loc.shape)
    entropy = loc.new_empty(parts, examples, positions)
    if loc.numel():
        padded = [None if one is None else F.pad(one, (0, width - classes)).contiguous() for one in (shift, noise)]
        wrap_triton(mean_softmax_kernel)[(blocks, parts)](
            loc, std, *padded, probs, entropy, examples, positions, classes, samples, at_once,
            *loc.stride(), *std.stride(), *probs.stride()[-3:], shift is not None, scaled,
            positions % rows == 0, rows, width,
            num_warps=max(1, width // _TILE),
        )  # fmt: skip
    return (probs if parts == 1 else probs.sum(0)), entropy.sum(0)
