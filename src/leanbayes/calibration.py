"""Two numbers that bring one pass by moments in line with draws of the weights, from a few examples.

The mean is multiplied by a and the std by b, where over all outputs of all examples

    a = Σ m·m̂ / Σ m²,      log b = mean ½ log(v̂ / v),

with m, v those of one pass and m̂, v̂ those of the draws; the logarithm of v̂ from n draws is too small by
log(ν/2) - ψ(ν/2), ν = n - 1, on average, which is put back.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.network import call_with, evaluation_mode, output_tensor
from leanbayes.prediction import Running

if TYPE_CHECKING:
    from leanbayes.bayesian import BayesianModel


def fit_moment_scale(
    bnn: "BayesianModel", batches: Iterable[Any], samples: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """Fit both factors and keep them in the model."""
    if samples < 2:
        raise LeanBayesError(f"samples={samples} must be at least 2: a variance needs as many.")
    before, bnn.moment_scale = bnn.moment_scale, (1.0, 1.0)
    sums = torch.zeros(4, dtype=torch.float64, device=bnn.device)
    try:
        with torch.no_grad(), evaluation_mode(bnn):
            for batch in batches:
                sums += _compare(bnn, batch[0] if isinstance(batch, (tuple, list)) else batch, samples, generator)
    finally:
        bnn.moment_scale = before
    product, square, logs, count = sums.tolist()
    if math.isnan(product) or math.isnan(logs):
        raise LeanBayesError("The outputs contain NaN: clean the inputs of calibrate_moments().")
    if not count:
        raise LeanBayesError("calibrate_moments() got no batches whose outputs vary: pass some training inputs.")
    degrees = torch.tensor((samples - 1) / 2, dtype=torch.float64)
    bias = (degrees.log() - torch.special.digamma(degrees)).item()
    bnn.moment_scale = product / square if square else 1.0, math.exp(0.5 * (logs / count + bias))
    return bnn.moment_scale


def _compare(bnn: "BayesianModel", x: Any, samples: int, generator: torch.Generator | None) -> Tensor:
    """Sums over one batch: of m·m̂, of m², of log(v̂/v), and how many the last has."""
    with bnn.using("moments"):
        ours = output_tensor(call_with(bnn, x))
    outputs = Running()
    with bnn.using("sample"):
        for number in range(samples):
            draw = bnn.next_draw(generator, number)
            outputs.update(output_tensor(call_with(bnn, x, _draw=draw)).double())
    variance, true = ours.variance.double(), outputs.squares / (samples - 1)
    usable = (variance > 0) & (true > 0)
    logs = torch.where(usable, torch.where(usable, true, 1.0).log() - torch.where(usable, variance, 1.0).log(), 0.0)
    loc = ours.loc.double()
    return torch.stack([(loc * outputs.mean).sum(), loc.square().sum(), logs.sum(), usable.sum().double()])
