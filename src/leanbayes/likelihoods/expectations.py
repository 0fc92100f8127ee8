"""Expectations under Gaussian outputs z ~ N(m, v): quadrature of functions of one output, samples for a softmax.

Gradients are those of the expectation itself (Bonnet and Price), not of one sample m + √v·ε:

    ∂/∂m E f(z) = E f'(z),      ∂/∂v E f(z) = ½ E f''(z),

so they are finite and correct at v = 0, and their noise does not grow as v shrinks.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanbayes.core import kernels, noise
from leanbayes.errors import LeanBayesError

LOGIT_SAMPLES = 8  # per training step
PREDICTION_SAMPLES, MAP_SAMPLES = 256, 128  # of the logits in a prediction: of one outcome per example, and of several
_EVEN_SAMPLES = 96  # of maps, if the noise has so few columns that samples can cover it evenly
_NODES, _REACH = 65, 8.0  # 1e-15 of a Gaussian is beyond 8 standard deviations
_ELEMENTS = 1 << 22  # processed at once
_MANY, _LARGEST = 1024, 256  # classes: from how many on only the largest are sampled, and how many of them
_STREAM = 1 << 20  # noise stream of the logits; those of layers count from 1

Functions = Callable[[Tensor], tuple[Tensor, ...]]


def gaussian_means(functions: Functions, loc: Tensor, variance: Tensor) -> list[Tensor]:
    """Return the mean of each elementwise function of z ~ N(loc, variance).

    It uses the trapezoidal rule over ±8 standard deviations. For softplus the error is 1e-11 up to a std of 3 and
    1e-4 at a std of 10; Gauss-Hermite quadrature with as many nodes has 1e-7 and 2e-3.
    """
    nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=loc.dtype, device=loc.device)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    std, column = _root(variance), (-1, *[1] * loc.dim())
    sums: list[Tensor] = []
    for x, w in zip(*(_chunks(part.view(column), loc.numel()) for part in (nodes, weights)), strict=True):
        parts = [(w * value).sum(0) for value in functions(loc + std * x)]
        sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else parts
    return sums


def _root(variance: Tensor) -> Tensor:
    return variance.clamp_min(0).sqrt()


def _chunks(values: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split along the first dimension, so that each part times `size` is a bounded number of elements."""
    return values.split(max(1, _ELEMENTS // max(size, 1)))


class _Expectation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor, functions: Functions) -> Tensor:
        value, first, second = gaussian_means(functions, loc, variance)
        ctx.save_for_backward(first, 0.5 * second)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, half_second = ctx.saved_tensors
        return grad * first, grad * half_second, None


def expect(functions: Functions, loc: Tensor, variance: Tensor) -> Tensor:
    """Return E f(z), elementwise, where `functions` returns f, f' and f''. It is differentiable in both moments."""
    return _Expectation.apply(loc, variance, functions)


def softplus(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log(1 + exp z) and its two derivatives."""
    probs = z.sigmoid()
    return -F.logsigmoid(-z), probs, probs * (1 - probs)


class _ExpectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, variance: Tensor, y: Tensor, counted: Tensor, key: Tensor, samples: int
    ) -> Tensor:
        std, index = _root(variance), y.unsqueeze(-1)
        total = torch.zeros((), dtype=loc.dtype, device=loc.device)
        first, second = torch.zeros_like(loc), torch.zeros_like(loc)
        for epsilon in _pairs_of_noise(loc, key, samples):
            log_probs = (loc + std * epsilon).log_softmax(-1)
            total = total - (log_probs.gather(-1, index.expand(len(epsilon), *index.shape)).squeeze(-1) * counted).sum()
            probs = log_probs.exp()
            first += probs.sum(0)
            second += (probs * (1 - probs)).sum(0)
        first = first / samples - torch.zeros_like(loc).scatter(-1, index, 1.0)
        ctx.save_for_backward(first * counted.unsqueeze(-1), second * (0.5 / samples) * counted.unsqueeze(-1))
        return total / samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, half_second = ctx.saved_tensors
        return grad * first, grad * half_second, None, None, None, None


def _pairs_of_noise(loc: Tensor, key: Tensor, samples: int) -> Iterator[Tensor]:
    """Yield noise of shape (n, *loc.shape), each sample with its negative: all at once, or in pairs for maps."""
    pairs = (samples + 1) // 2
    if loc.dim() == 2:
        epsilon = noise.normal(loc.new_empty((pairs, *loc.shape)), key, _STREAM)
        yield torch.cat([epsilon, -epsilon])[:samples]
        return
    for number in range(pairs):
        epsilon = noise.normal(loc, key, _STREAM + number)
        yield torch.stack([epsilon, -epsilon])[: samples - 2 * number]


def expected_cross_entropy(
    loc: Tensor, variance: Tensor, y: Tensor, counted: Tensor, key: Tensor, samples: int = LOGIT_SAMPLES
) -> Tensor:
    """Return the sum of E[-log softmax(z)_y] over the counted positions, from samples z ~ N(loc, variance).

    Classes are the last dimension. Loss and gradients are unbiased and use the same samples.
    """
    return _ExpectedCrossEntropy.apply(loc, variance, y, counted, key, samples)


def noise_settings(loc: Tensor, common: Tensor | None) -> tuple[int, int, bool]:
    """Return the arguments of `logit_noise` for logits; maps and sequences have many outcomes, and fewer samples."""
    columns = loc.shape[-1] + (0 if common is None else len(common))
    if loc.dim() <= 2:
        return columns, PREDICTION_SAMPLES, False
    even = columns <= _EVEN_SAMPLES // 2
    return columns, _EVEN_SAMPLES if even else MAP_SAMPLES, even


def common_by_class(loc: Tensor, common: Tensor | None, scaled: bool = False) -> Tensor | None:
    """Return common noise of the same covariance with one direction per class, if that makes the noise of a map even.

    With `scaled` it is that of the correlations, with a variance of 1. All positions of an example must share it. The
    directions are the columns of the Cholesky factor, by operations that every compiler and exporter knows. For a
    singular covariance pivots have a lower limit.
    """
    if scaled and common is not None:
        common = common * common.square().sum(0).clamp_min(torch.finfo(common.dtype).tiny).rsqrt()
    classes = loc.shape[-1]
    if common is None or loc.dim() <= 2 or len(common) <= classes or 4 * classes > _EVEN_SAMPLES:
        return common
    if any([size != 1 for size in common.shape[2:-1]]) or common.shape[-1] != classes:
        return common
    flat = common.reshape(len(common), -1, classes)
    rest = torch.einsum("rbc,rbd->bcd", flat, flat)
    least = (1e-6 * rest.diagonal(dim1=-2, dim2=-1)).clamp_min(torch.finfo(rest.dtype).tiny)
    directions = []
    for number in range(classes):
        pivot = torch.maximum(rest[:, number, number], least[:, number])
        directions.append(rest[:, :, number] * pivot.rsqrt().unsqueeze(-1))
        rest = rest - directions[-1].unsqueeze(-1) * directions[-1].unsqueeze(-2)
    return torch.stack(directions).reshape(classes, *common.shape[1:])


def logit_noise(columns: int, samples: int = PREDICTION_SAMPLES, even: bool = False) -> Tensor:
    """Return the fixed noise of the logits that every prediction uses: (samples, columns), in double precision.

    The columns are the probes of common noise, then the classes. The second half is the negative of the first, so each
    column has exactly mean 0, and it has exactly variance 1. The first columns, up to half of the samples, are exactly
    uncorrelated too, so that the samples have the covariance of the logits, which divides the error of the mean
    probabilities by ten. With `even` the first half are points of a Sobol sequence, moved as little as possible so that
    they are uncorrelated: 96 of them in few columns are as accurate as 128 others in 64 columns more.
    """
    if samples < 2 or samples % 2:
        raise LeanBayesError(f"samples={samples} must be even and at least 2: each sample comes with its negative.")
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):  # the result is kept, and may be used for gradients later
        if even:
            half = _sobol(samples // 2, columns)
        else:
            half = torch.randn(samples // 2, columns, generator=generator, dtype=torch.float64, device="cpu")
            orthogonal, _ = torch.linalg.qr(half[:, : len(half)])
            half = torch.cat([orthogonal, half[:, len(half) :]], 1)
        half = half / half.square().mean(0).sqrt()
        return torch.cat([half, -half])


def _sobol(points: int, columns: int) -> Tensor:
    """Return normal points that cover the space evenly, with uncorrelated columns; at most as many as points."""
    engine = torch.quasirandom.SobolEngine(columns, scramble=True, seed=0)
    uniform = engine.draw(points, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    left, _, right = torch.linalg.svd(torch.special.ndtri(uniform), full_matrices=False)
    return left @ right


def _noise_like(loc: Tensor, columns: int, samples: int, even: bool = False) -> Tensor:
    """Return the noise of the logits with the dtype and device of a tensor."""
    if type(loc) is not Tensor and not torch.compiler.is_dynamo_compiling():  # such as the tensors of a tracer
        return logit_noise(columns, samples, even).to(loc)
    return _constant_noise(columns, samples, even, loc.dtype, loc.device)


@torch.compiler.assume_constant_result
def _constant_noise(columns: int, samples: int, even: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _cached_noise(columns, samples, even, dtype, device)


@functools.lru_cache(maxsize=16)
def _cached_noise(columns: int, samples: int, even: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    # It is made on the CPU, and would take longer than a pass on a GPU. Tensors of inference mode have no gradients.
    with torch.inference_mode(False):
        return logit_noise(columns, samples, even).to(device, dtype)


def softmax_means(
    loc: Tensor, variance: Tensor, common: Tensor | None = None, scaled: bool = False
) -> tuple[Tensor, Tensor]:
    """Return E softmax(z) and its expected entropy over the last dimension, with noise that all examples share.

    Of more than 1,024 classes the 256 with the largest E exp(z) are sampled, as if independent. The others together are
    replaced by their mean, because the sum of many small terms hardly varies: a vocabulary would take hundreds of times
    its size otherwise.

    Args:
        loc: The mean of z.
        variance: The variance of the noise that is independent for each element.
        common: Signed directions of noise that elements share, (probes, ...), in a shape that broadcasts to `loc`.
        scaled: Whether `variance` is that of all noise, of which `common` has only the correlations.
    """
    scaled = scaled and common is not None
    with torch.autocast(loc.device.type, enabled=False):
        if loc.shape[-1] > _MANY:
            return _means_of_many(loc, variance if common is None or scaled else variance + common.square().sum(0))
        common = common_by_class(loc, common, scaled)
        both = _noise_like(loc, *noise_settings(loc, common))
        if is_fused(loc, common):
            return _fused_means(loc, _root(variance), common, both, scaled)
        return _means(loc, _root(variance), common, both, scaled)


def is_fused(loc: Tensor, common: Tensor | None) -> bool:
    """Whether one kernel computes all samples: on a GPU, if all positions share the common noise of few classes."""
    positions = () if common is None else common.shape[2:-1]
    shared = loc.shape[-1] <= _MANY and all([size == 1 for size in positions])
    return shared and kernels.usable(loc) and not torch.is_grad_enabled()


def _fused_means(loc: Tensor, std: Tensor, common: Tensor | None, both: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
    outer, classes = loc.shape[:-1], loc.shape[-1]
    probes, shift = 0, None
    if common is not None:
        probes = len(common)
        sizes = (*outer[:1], *[1] * len(outer[1:]), classes)
        shift = both[:, :probes] @ common.expand(-1, *sizes).reshape(probes, -1)
        shift = shift.reshape(len(both), -1, classes)
    parts = (part.reshape(*outer[:1] or (1,), -1, classes) for part in (loc, std.expand_as(loc)))
    probs, entropy = kernels.softmax_ops.mean_softmax(*parts, shift, both[:, probes:].contiguous(), scaled)
    return probs.reshape(loc.shape), entropy.reshape(outer)


def _means(loc: Tensor, std: Tensor, common: Tensor | None, both: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
    probs, entropy = torch.zeros_like(loc), torch.zeros_like(loc[..., 0])
    for part in _chunks(both, loc.numel()):
        sampled = logit_samples(loc, std, common, part, scaled).softmax(-1)
        probs = probs + sampled.sum(0)
        entropy = entropy + torch.special.entr(sampled).sum((0, -1))
    return probs / len(both), entropy / len(both)


def logit_samples(loc: Tensor, std: Tensor, common: Tensor | None, noise: Tensor, scaled: bool = False) -> Tensor:
    """Return z for each row of the noise, whose columns are the probes and then the classes."""
    probes = 0 if common is None else len(common)
    if scaled and common is not None:
        return loc + std * torch.tensordot(noise[:, :probes], common, 1)
    logits = loc + std * noise[:, probes:].reshape(-1, *[1] * (loc.dim() - 1), loc.shape[-1])
    if common is not None:
        logits = logits + torch.tensordot(noise[:, :probes], common, 1)
    return logits


def _means_of_many(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `softmax_means`, with z = m + √v·ε for the largest classes only.

    The others enter the normalizer Z by A = Σ E e^z = Σ e^(m + v/2), and the entropy log Z - Σ z e^z / Z by
    B = Σ E z e^z = Σ (m + v) e^(m + v/2).
    """
    exponent = loc + 0.5 * variance.clamp_min(0)
    top = exponent.topk(_LARGEST, -1)
    exponent = (exponent - top.values[..., :1]).scatter(-1, top.indices, -torch.inf)  # without overflow
    shift = top.values[..., :1]
    rest = exponent.exp()
    normalizer, weighted = rest.sum(-1), (rest * (loc - shift + variance.clamp_min(0))).sum(-1)
    centered, std = loc.gather(-1, top.indices) - shift, _root(variance.gather(-1, top.indices))
    noise_of_top = _noise_like(loc, _LARGEST, MAP_SAMPLES).view(-1, *[1] * (loc.dim() - 1), _LARGEST)
    of_top, inverse, entropy = torch.zeros_like(centered), torch.zeros_like(normalizer), torch.zeros_like(normalizer)
    for epsilon in _chunks(noise_of_top, centered.numel()):
        z = centered + std * epsilon
        largest = z.amax(-1).clamp_min(0)  # e^z may overflow
        scaled, scale = (z - largest[..., None]).exp(), (-largest).exp()
        total = scaled.sum(-1) + normalizer * scale
        of_top += (scaled / total[..., None]).sum(0)
        inverse += (scale / total).sum(0)
        mean = ((scaled * z).sum(-1) + weighted * scale) / total
        entropy += (total.log() + largest - mean).sum(0)
    count = len(noise_of_top)
    return (rest * (inverse / count)[..., None]).scatter(-1, top.indices, of_top / count), entropy / count
