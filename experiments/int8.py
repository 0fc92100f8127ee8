"""INT8 BNNs (Subedar et al. 2021): a mean-field posterior with μ in 8 bits and σ in fewer."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.core import gaussian
from leanbayes.core.quantization import dequantize, quantize
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.posteriors import MeanFieldPosterior


class QuantizedPosterior(NamedTuple):
    """The result of `quantize_posterior`.

    Attributes:
        model: The model with quantized μ and σ.
        bytes: The bytes that its parameters take. Deterministic ones count 4 bytes each.
    """

    model: BayesianModel
    bytes: int


@torch.no_grad()
def quantize_posterior(bnn: BayesianModel, mean_bits: int = 8, std_bits: int = 4) -> QuantizedPosterior:
    """Return a copy of a mean-field model with quantized μ and σ, and its size.

    In each layer μ is rounded to integer multiples of one scale, and σ to equal steps between its minimum and maximum.
    This is the INT8 BNN of Subedar et al. (2021), the baseline of Table 4 of Lin et al. (2025).

    Args:
        bnn: A model with a mean-field posterior.
        mean_bits: The bits per μ, from 2 to 16.
        std_bits: The bits per σ, from 1 to 16.

    Returns:
        The quantized model and the bytes that its parameters take.

    Raises:
        LeanBayesError: The posterior is not mean-field, or the number of bits is out of range.

    Example:
        >>> quantized = quantize_posterior(bnn, mean_bits=8, std_bits=4)
        >>> quantized.model.predict(x)
    """
    posterior = bnn.posterior
    if not isinstance(posterior, MeanFieldPosterior):
        raise LeanBayesError(
            f"{type(posterior).__name__} has no μ and σ per weight to quantize: use lb.bayesianize(bnn, "
            "lb.MeanField()) first."
        )
    for name, bits, least in (("mean_bits", mean_bits, 2), ("std_bits", std_bits, 1)):
        if not least <= bits <= 16:
            raise LeanBayesError(f"{name}={bits} must be from {least} to 16.")
    quantized = copy.deepcopy(bnn)
    sizes, count, means, stds = posterior.layout.sizes, 0, [], []
    for mean, std in zip(posterior.mu.split(sizes), posterior.std().split(sizes), strict=True):
        means.append(dequantize(*quantize(mean, mean_bits)))
        stds.append(_in_steps(std.double(), std_bits))
        # Per layer also three floats: the scale of μ, and the minimum and maximum of σ.
        count += -(-mean.numel() * mean_bits // 8) + -(-std.numel() * std_bits // 8) + 3 * 4
    quantized.posterior.load_state_dict(
        {
            **posterior.state_dict(),
            "mu": torch.cat(means).to(posterior.mu),
            "rho": gaussian.inverse_softplus(torch.cat(stds)).to(posterior.rho),
        }
    )
    deterministic = [*bnn.network.parameters(), *(b for b in bnn.network.buffers() if b.is_floating_point())]
    return QuantizedPosterior(quantized, count + 4 * sum(tensor.numel() for tensor in deterministic))


def _in_steps(std: Tensor, bits: int) -> Tensor:
    low, high = std.min(), std.max()
    step = (high - low).clamp_min(torch.finfo(std.dtype).tiny) / (2**bits - 1)
    return low + ((std - low) / step).round() * step
