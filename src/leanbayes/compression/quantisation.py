"""Numbers in few bits, and the baseline of the paper's Table 4: a mean-field posterior with μ in 8 bits and σ in fewer.

A scale has 12 significant bits, so that its multiples are exact: what was quantised once stays as it is.
"""

import copy
import math
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from leanbayes import gaussian
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors import MeanFieldPosterior

if TYPE_CHECKING:
    from leanbayes.bayesian import BayesianModel

Precision = Literal["fp16", "int8", "fp32"]
_SIGNIFICANT = 12


def check_precision(name: str, precision: str) -> None:
    """Refuse what is no precision."""
    if precision not in get_args(Precision):
        raise LeanBayesError(f"{name}={precision!r} is unknown: use 'fp16', 'int8' or 'fp32'.")


def quantise(values: Tensor, bits: int = 8) -> tuple[Tensor, float]:
    """Round to whole multiples of one scale, at most 2^(bits-1) - 1 in size."""
    most = 2 ** (bits - 1) - 1
    if not values.isfinite().all():
        raise LeanBayesError("Some values are NaN or infinite: look for NaN in the training.")
    scale = _rounded_up(float(values.abs().max()) / most) if values.numel() else 0.0
    codes = (values.double() / (scale or 1.0)).round()
    return codes.to(torch.int8 if bits <= 8 else torch.int32), scale


def dequantise(codes: Tensor, scale: float) -> Tensor:
    """Undo `quantise`, in double precision."""
    return codes.double() * scale


def _rounded_up(scale: float) -> float:
    fraction, exponent = math.frexp(scale)
    return math.ldexp(math.ceil(math.ldexp(fraction, _SIGNIFICANT)), exponent - _SIGNIFICANT)


class QuantisedPosterior(NamedTuple):
    """A model whose μ and σ take few values, and the bytes that these take; points beside them count 4 each."""

    model: "BayesianModel"
    bytes: int


@torch.no_grad()
def quantise_posterior(bnn: "BayesianModel", mean_bits: int = 8, std_bits: int = 4) -> QuantisedPosterior:
    """Return a copy with μ in whole multiples of a scale and σ in even steps from the least to the largest, per layer.

    The INT8 BNN of Subedar et al. (2021), with which Table 4 compares 2DGBNN.
    """
    posterior = bnn.posterior
    if not isinstance(posterior, MeanFieldPosterior):
        raise LeanBayesError(
            f"{type(posterior).__name__} has no μ and σ of each weight to quantise: use lb.bayesianize(bnn, "
            "lb.MeanField()) first."
        )
    for name, bits, least in (("mean_bits", mean_bits, 2), ("std_bits", std_bits, 1)):
        if not least <= bits <= 16:
            raise LeanBayesError(f"{name}={bits} must lie between {least} and 16.")
    made = copy.deepcopy(bnn)
    sizes, count, means, stds = posterior.layout.sizes, 0, [], []
    for mean, std in zip(posterior.mu.split(sizes), posterior.std().split(sizes), strict=True):
        means.append(dequantise(*quantise(mean, mean_bits)))
        stds.append(_in_steps(std.double(), std_bits))
        count += -(-mean.numel() * mean_bits // 8) + -(-std.numel() * std_bits // 8) + 3 * 4  # a scale, and a range
    made.posterior.load_state_dict(
        {
            **posterior.state_dict(),
            "mu": torch.cat(means).to(posterior.mu),
            "rho": gaussian.inverse_softplus(torch.cat(stds)).to(posterior.rho),
        }
    )
    points = [*bnn.network.parameters(), *(b for b in bnn.network.buffers() if b.is_floating_point())]
    return QuantisedPosterior(made, count + 4 * sum(tensor.numel() for tensor in points))


def _in_steps(std: Tensor, bits: int) -> Tensor:
    low, high = std.min(), std.max()
    step = (high - low).clamp_min(torch.finfo(std.dtype).tiny) / (2**bits - 1)
    return low + ((std - low) / step).round() * step
