"""Two numbers that bring one pass by moments in line with draws of the weights, from a few examples.

The mean is multiplied by a and the std by b. Where outputs are logits, both are those that bring the probabilities
nearest to the mean ones p̂ of the draws: over all outcomes of all examples they minimise

    Σ -p̂ log p(a·m, b²·v),

with m, v those of one pass. p̂ is right on average however few the draws. To match variances instead is to match them
where most examples are, which is where the network is sure, and not where they matter. Other outputs have no
probabilities, and there

    a = Σ m·m̂ / Σ m²,      log b = mean ½ log(v̂ / v),

with m̂, v̂ those of the draws; the logarithm of v̂ from n draws is too small by log(ν/2) - ψ(ν/2), ν = n - 1, on average,
which is put back.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.expectations import softmax_means
from leanbayes.network import call_with, evaluation_mode, output_tensor
from leanbayes.prediction import Running

if TYPE_CHECKING:
    from leanbayes.bayesian import BayesianModel

_LOGITS, _OUTCOMES = 1 << 13, 64  # of a batch that are kept at most, but at least as many outcomes
_LEAST = 1e-30  # a variance with a root that has a gradient, and a probability with a logarithm


class _Outcomes(NamedTuple):
    """Logits of one pass and mean probabilities of the draws, (outcomes, classes) each."""

    loc: Tensor
    variance: Tensor
    probs: Tensor


@torch.inference_mode(False)
def fit_moment_scale(
    bnn: "BayesianModel", batches: Iterable[Any], samples: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """Fit both factors and keep them in the model."""
    if samples < 2:
        raise LeanBayesError(f"samples={samples} must be at least 2: a variance needs as many.")
    before, bnn.moment_scale = bnn.moment_scale, (1.0, 1.0)
    sums = torch.zeros(4, dtype=torch.float64, device=bnn.device)
    kept: list[_Outcomes] = []
    try:
        with torch.no_grad(), evaluation_mode(bnn):
            for batch in batches:
                x = batch[0] if isinstance(batch, (tuple, list)) else batch
                found, outcomes = _compare(bnn, x, samples, generator)
                sums += found
                kept += [] if outcomes is None else [outcomes]
    finally:
        bnn.moment_scale = before
    product, square, logs, count = sums.tolist()
    if math.isnan(product) or math.isnan(logs):
        raise LeanBayesError("The outputs contain NaN: clean the inputs of calibrate_moments().")
    if not count:
        raise LeanBayesError("calibrate_moments() got no batches whose outputs vary: pass some training inputs.")
    degrees = torch.tensor((samples - 1) / 2, dtype=torch.float64)
    bias = (degrees.log() - torch.special.digamma(degrees)).item()
    scale = product / square if square else 1.0, math.exp(0.5 * (logs / count + bias))
    bnn.moment_scale = _nearest(kept, scale) if kept else scale
    return bnn.moment_scale


def _compare(
    bnn: "BayesianModel", x: Any, samples: int, generator: torch.Generator | None
) -> tuple[Tensor, _Outcomes | None]:
    """Sums over one batch: of m·m̂, of m², of log(v̂/v), and how many the last has; and what the probabilities are of."""
    with bnn.using("moments"):
        ours = output_tensor(call_with(bnn, x))
    outputs, probs = Running(), Running()
    with bnn.using("sample"):
        for number in range(samples):
            draw = bnn.next_draw(generator, number)
            drawn = output_tensor(call_with(bnn, x, _draw=draw)).double()
            outputs.update(drawn)
            logits = bnn.likelihood.logits(drawn)
            if logits is not None:
                probs.update(_some(logits).softmax(-1))
    variance, true = ours.variance.double().expand_as(ours.loc), outputs.squares / (samples - 1)
    usable = (variance > 0) & (true > 0)
    logs = torch.where(usable, torch.where(usable, true, 1.0).log() - torch.where(usable, variance, 1.0).log(), 0.0)
    loc = ours.loc.double()
    sums = torch.stack([(loc * outputs.mean).sum(), loc.square().sum(), logs.sum(), usable.sum().double()])
    rows = [bnn.likelihood.logits(part) for part in (loc, variance)]
    return sums, None if rows[0] is None or rows[1] is None else _Outcomes(_some(rows[0]), _some(rows[1]), probs.mean)


def _some(logits: Tensor) -> Tensor:
    """Take outcomes at equal distances where there are very many, as in dense predictions."""
    count, most = len(logits), max(_OUTCOMES, _LOGITS // logits.shape[-1])
    return logits if count <= most else logits[torch.arange(most, device=logits.device) * count // most]


def _nearest(kept: Sequence[_Outcomes], start: tuple[float, float]) -> tuple[float, float]:
    """Go from a start to the factors with the least cross entropy, by L-BFGS on their logarithms."""
    logs = torch.tensor([math.log(max(factor, _LEAST)) for factor in start], dtype=torch.float64, requires_grad=True)
    count = sum(len(outcomes.loc) for outcomes in kept)
    optimiser = torch.optim.LBFGS([logs], max_iter=100, line_search_fn="strong_wolfe")

    def cross_entropy() -> float:
        optimiser.zero_grad()
        total = 0.0
        for loc, variance, probs in kept:
            mean, std = logs.to(loc.device).exp()
            ours, _ = softmax_means(mean * loc, std.square() * variance.clamp_min(_LEAST))
            loss = -(probs * ours.clamp_min(_LEAST).log()).sum() / count
            loss.backward()
            total += loss.item()
        return total

    with torch.enable_grad():
        optimiser.step(cross_entropy)
    mean, std = logs.detach().exp().tolist()
    return mean, std
