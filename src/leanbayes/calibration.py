"""Two numbers that bring one pass by moments in line with draws of the weights, or with labels, from a few examples.

The mean is multiplied by a and the std by b. Where outputs are logits, both are those that bring the probabilities
nearest to the mean ones p̂ of the draws: over all outcomes of all examples they minimise

    Σ -p̂ log p(a·m, b²·v),

with m, v those of one pass. p̂ is right on average however few the draws. To match variances instead is to match them
where most examples are, which is where the network is sure, and not where they matter. With labels in place of the
draws, p̂ is 1 for what was the case, and the sum is their negative log-likelihood; to it comes that of a prior,
log a, log b ~ N(0, ½²), without which labels that the network all gets right would ask for a mean without bound, and
those that tell nothing of the std for any. Other outputs have no probabilities, and there

    a = Σ m·m̂ / Σ m²,      log b = mean ½ log(v̂ / v),

with m̂, v̂ those of the draws; the logarithm of v̂ from n draws is too small by log(ν/2) - ψ(ν/2), ν = n - 1, on average,
which is put back.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
_PRIOR_STD = 0.5  # of the logarithms of the factors, where these are fitted to labels
_NAN = "The outputs contain NaN: clean the inputs of calibrate_moments()."
_NOTHING = "calibrate_moments() got no batches whose outputs vary: pass some held-out inputs."


class _Outcomes(NamedTuple):
    """Logits of one pass, and the probabilities that they are brought near, (outcomes, classes) each."""

    loc: Tensor
    variance: Tensor
    probs: Tensor


@torch.inference_mode(False)
def fit_moment_scale(
    bnn: "BayesianModel",
    batches: Iterable[Any],
    samples: int,
    generator: torch.Generator | None,
    to: Literal["draws", "labels"],
) -> tuple[float, float]:
    """Fit both factors and keep them in the model."""
    if to not in ("draws", "labels"):
        raise LeanBayesError(f"to={to!r} is unknown: use 'draws' or 'labels'.")
    if samples < 2:
        raise LeanBayesError(f"samples={samples} must be at least 2: a variance needs as many.")
    before, bnn.moment_scale = bnn.moment_scale, (1.0, 1.0)
    try:
        with torch.no_grad(), evaluation_mode(bnn):
            found = _to_labels(bnn, batches) if to == "labels" else _to_draws(bnn, batches, samples, generator)
    except BaseException:
        bnn.moment_scale = before
        raise
    bnn.moment_scale = found
    return found


def _to_draws(
    bnn: "BayesianModel", batches: Iterable[Any], samples: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """Find the factors that bring one pass in line with draws."""
    sums = torch.zeros(4, dtype=torch.float64, device=bnn.device)
    kept: list[_Outcomes] = []
    for batch in batches:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        found, outcomes = _compare(bnn, x, samples, generator)
        sums += found
        kept += [] if outcomes is None else [outcomes]
    product, square, logs, count = sums.tolist()
    if math.isnan(product) or math.isnan(logs):
        raise LeanBayesError(_NAN)
    if not count:
        raise LeanBayesError(_NOTHING)
    degrees = torch.tensor((samples - 1) / 2, dtype=torch.float64)
    bias = (degrees.log() - torch.special.digamma(degrees)).item()
    scale = product / square if square else 1.0, math.exp(0.5 * (logs / count + bias))
    return _nearest(kept, scale) if kept else scale


def _compare(
    bnn: "BayesianModel", x: Any, samples: int, generator: torch.Generator | None
) -> tuple[Tensor, _Outcomes | None]:
    """Sums over one batch: of m·m̂, of m², of log(v̂/v), and how many the last has; and what the probabilities are of."""
    loc, variance = _one_pass(bnn, x)
    outputs, probs = Running(), Running()
    with bnn.using("sample"):
        for number in range(samples):
            draw = bnn.next_draw(generator, number)
            drawn = output_tensor(call_with(bnn, x, _draw=draw)).double()
            outputs.update(drawn)
            logits = bnn.likelihood.logits(drawn)
            if logits is not None:
                probs.update(_some(logits).softmax(-1))
    true = outputs.squares / (samples - 1)
    usable = (variance > 0) & (true > 0)
    logs = torch.where(usable, torch.where(usable, true, 1.0).log() - torch.where(usable, variance, 1.0).log(), 0.0)
    sums = torch.stack([(loc * outputs.mean).sum(), loc.square().sum(), logs.sum(), usable.sum().double()])
    rows = _rows(bnn, loc, variance)
    return sums, None if rows is None else _Outcomes(*rows, probs.mean)


def _to_labels(bnn: "BayesianModel", batches: Iterable[Any]) -> tuple[float, float]:
    """Find the factors with which labels are likeliest."""
    kept: list[_Outcomes] = []
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise LeanBayesError('calibrate_moments(to="labels") needs (input, label) pairs: pass such, or to="draws".')
        loc, variance = _one_pass(bnn, batch[0])
        rows, y = _rows(bnn, loc, variance), batch[1].to(loc.device)
        if rows is None:
            name = type(bnn.likelihood).__name__
            raise LeanBayesError(f'{name} has no probabilities that labels could be fitted by: use to="draws".')
        bnn.likelihood.check_shape(loc, y)
        bnn.likelihood.check_values(loc, y)
        kept.append(_Outcomes(*rows, _some(bnn.likelihood.label_probs(y, loc))))
    if any(not outcomes.loc.isfinite().all() or outcomes.variance.isnan().any() for outcomes in kept):
        raise LeanBayesError(_NAN)
    if not any((outcomes.variance > 0).any() for outcomes in kept):
        raise LeanBayesError(_NOTHING)
    return _nearest(kept, (1.0, 1.0), _PRIOR_STD**-2)


def _one_pass(bnn: "BayesianModel", x: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs; the model's stream of noise is left as it is."""
    with bnn.using("moments"), bnn.frozen(0):
        ours = output_tensor(call_with(bnn, x))
    return ours.loc.double(), ours.variance.double().expand_as(ours.loc)


def _rows(bnn: "BayesianModel", loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and variance of some of the logits, (outcomes, classes); None where the outputs are no logits."""
    rows = [bnn.likelihood.logits(part) for part in (loc, variance)]
    return None if rows[0] is None or rows[1] is None else (_some(rows[0]), _some(rows[1]))


def _some(logits: Tensor) -> Tensor:
    """Take outcomes at equal distances where there are very many, as in dense predictions."""
    count, most = len(logits), max(_OUTCOMES, _LOGITS // logits.shape[-1])
    return logits if count <= most else logits[torch.arange(most, device=logits.device) * count // most]


def _nearest(kept: Sequence[_Outcomes], start: tuple[float, float], precision: float = 0.0) -> tuple[float, float]:
    """Go from a start to the factors with the least cross entropy, by L-BFGS on their logarithms.

    precision: of a Gaussian around 0, where their logarithms have such a prior.
    """
    logs = torch.tensor([math.log(max(factor, _LEAST)) for factor in start], dtype=torch.float64, requires_grad=True)
    count = sum(len(outcomes.loc) for outcomes in kept)
    optimiser = torch.optim.LBFGS([logs], max_iter=100, line_search_fn="strong_wolfe")

    def cross_entropy() -> float:
        optimiser.zero_grad()
        prior = 0.5 * precision * logs.square().sum() / count
        prior.backward()
        total = prior.item()
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
