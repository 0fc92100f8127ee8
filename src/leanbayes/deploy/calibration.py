"""`lb.calibrate`: two numbers that bring one-pass predictions in line with labels, or with samples of the weights.

With `layers=True` it first corrects each layer by samples (`layer_corrections`); the two numbers correct what is left.

The mean of the outputs is multiplied by a and their std by b. If the outputs are logits, a and b minimize

    Σ -p̂ log p(a·m, b²·v)

over all outcomes of all examples, where m and v are the mean and variance of one pass. Fitted to samples, p̂ is their
mean probability, which is right on average however few they are. (Matching the variances instead would match them
on most examples, for which the network is certain, so that it would not matter.) Fitted to labels, p̂ is 1 for the
label, and the sum is its negative log-likelihood. It then includes a prior log a, log b ~ N(0, ½²): without it, labels
that the network gets all right would push a to infinity, and labels that say nothing about b would leave it free.
With fewer than 5 wrong predictions among the labels, a is at most 1 and b at least 1: correct predictions of familiar
inputs would make all predictions more certain, those of unknown inputs too, and few mistakes cannot contradict.

The noise of samples says nothing about the factors, and all outcomes share it. If σ hardly changes the probabilities,
the sum is little else, and its minimum may be at any b. So it has a prior of the same std around the factors that match
mean and variance (below), and counts κ times. With D = ∂ log p/∂ log a, or b, it is as certain as so many labels:

    κ = Σ p D² / Var[Σ p̂ D],

the smaller of the two, where the variance is that between groups of the samples.

Outputs that are not logits have no probabilities. For them

    a = Σ m·m̂ / Σ m²,      log b = mean ½ log(v̂ / v),

where m̂ and v̂ are the mean and variance of the samples. The logarithm of v̂ from n samples is too small by
log(ν/2) - ψ(ν/2), ν = n - 1, on average, and this is corrected.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.network import call_with, evaluation_mode, inputs_of, output_tensor, tensors_of
from leanbayes.deploy.layer_corrections import Progress, correct_layers
from leanbayes.deploy.margin_fit import fit_margins
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Running
from leanbayes.likelihoods.expectations import softmax_means
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Moments

Target = Literal["labels", "samples"]
_LOGITS, _OUTCOMES = 1 << 13, 64  # most logits per batch to keep, but at least this number of outcomes
_LEAST = 1e-30  # floor of a variance, whose root needs a gradient, and of a probability, which needs a logarithm
_PRIOR_STD = 0.5  # of the logarithms of the factors
_GROUPS = 8  # of samples, whose differences show the noise of their mean
_STEP = 1e-3  # of a difference quotient
LEAST_WRONG = 5  # wrong predictions from which labels may make predictions more certain, as for a normal approximation
_NAN = "The outputs contain NaN: clean the inputs of calibrate()."
_NO_LAYERS = "calibrate() found no layer to correct: pass some inputs, or use layers=False."
_SAMPLES, _LAYER_SAMPLES = 30, 64
_NOTHING = "calibrate() got no batches whose outputs vary: pass some held-out inputs."


class _Logits(NamedTuple):
    """Logits of one pass, (outcomes, classes): mean, independent variance, and common noise with its probes first."""

    loc: Tensor
    variance: Tensor
    common: Tensor | None

    def probs(self, mean: Tensor | float, std: Tensor | float) -> Tensor:
        """Return the probabilities, given the two factors."""
        common = None if self.common is None else std * self.common
        return softmax_means(mean * self.loc, std**2 * self.variance.clamp_min(_LEAST), common)[0]

    @property
    def is_random(self) -> bool:
        """Whether any logit has a variance."""
        return bool((self.variance > 0).any() or (self.common is not None and (self.common != 0).any()))


class _Outcomes(NamedTuple):
    """Logits of one pass, and the probabilities that they should give, (outcomes, classes).

    `groups` has these probabilities by each of some groups of the samples, (groups, outcomes, classes).
    """

    logits: _Logits
    probs: Tensor
    groups: Tensor | None = None


@checked()
@torch.inference_mode(False)
def calibrate(
    bnn: BayesianModel,
    batches: Iterable[Any],
    *,
    to: Target | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    layers: bool = False,
    layer_inputs: int = 256,
    factors: bool = True,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Fit the factors of mean and std for one-pass prediction, and store them in the model.

    `bnn.predict(x, rule="moments")` uses them from then on, and `lb.save` and `lb.compress` keep them. With
    `layers=True` the output of each layer is corrected too, from the first to the last, without labels: its mean and
    variance become those of samples, per channel and on average over the inputs. For classes it also fits how
    `Adjoint(mean="moments")` combines its two variances of the margins.

    Args:
        bnn: The trained model. Only `bnn.moment_scale` and, with `layers=True`, `bnn.moment_layers` and
            `bnn.moment_margins` change, and a `bnn.policy`, which was fitted to other predictions, is removed.
        batches: Held-out (input, label) pairs. Inputs alone are enough if `to="samples"`. Some hundred
            examples are enough.
        to: "labels" makes one pass agree with held-out labels, which corrects a posterior that is over- or
            underconfident. If fewer than 5 predictions are wrong, they may only become less certain. "samples" makes it
            agree with Monte Carlo samples of the weights. By default labels if the outputs are logits, and samples if
            they are not or with `layers=True`.
        samples: The number of Monte Carlo samples per example. By default 30, and 64 with `layers=True`.
        generator: The source of their noise. By default the model's own stream.
        layers: Whether to measure the corrections of layers. If False, those that the model has stay, and the
            factors are fitted with them.
        layer_inputs: The number of inputs to measure the corrections of layers on, the first ones of the batches.
        factors: Whether to fit the two factors. If False, with `layers=True`, they become 1.
        progress: A function that gets the number of inputs that are done, and of all inputs, while layers are measured.

    Returns:
        The factors of the mean and of the std.

    Raises:
        LeanBayesError: The batches are empty, lack labels for `to="labels"`, or give outputs without variance. With
            `layers=True`: the model has no Bayesian weights, or no layer with a random input.

    Example:
        >>> lb.calibrate(bnn, validation_loader)
        >>> lb.calibrate(bnn, [x], to="samples", layers=True)
        >>> bnn.predict(x, rule="moments")
    """
    target = target_of(bnn, to, layers)
    samples = samples_of(samples, layers)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise LeanBayesError(f"samples={samples!r} must be a whole number of at least 2: a variance needs two.")
    _check_layers(bnn, layers, layer_inputs, factors)
    before = bnn.moment_scale, bnn.moment_layers, bnn.moment_margins
    bnn.moment_scale = found = (1.0, 1.0)
    try:
        with torch.no_grad(), evaluation_mode(bnn):
            batches = _not_empty(batches)
            if layers:
                batches, bnn.moment_layers = list(batches), {}
                corrections = correct_layers(bnn, batches, samples, layer_inputs, generator, progress)
                if not corrections:
                    raise LeanBayesError(_NO_LAYERS)
                bnn.moment_layers = corrections
                bnn.moment_margins = fit_margins(bnn, batches, samples, layer_inputs, generator)
            if factors:
                to_labels = target == "labels"
                found = _to_labels(bnn, batches) if to_labels else _to_samples(bnn, batches, samples, generator)
    except BaseException:
        bnn.moment_scale, bnn.moment_layers, bnn.moment_margins = before
        raise
    bnn.moment_scale, bnn.policy = found, None  # a policy was fitted to other predictions
    return found


def _not_empty(batches: Iterable[Any]) -> Iterator[Any]:
    """Return the batches that have examples."""
    return (batch for batch in batches if next(tensors_of(inputs_of(batch))).shape[0])


def _check_layers(bnn: BayesianModel, layers: bool, layer_inputs: int, factors: bool) -> None:
    if not layers and not factors:
        raise LeanBayesError("factors=False leaves nothing to fit: use layers=True, or factors=True.")
    if layers and (type(layer_inputs) is not int or layer_inputs < 1):
        raise LeanBayesError(f"layer_inputs={layer_inputs!r} must be a whole number of at least 1.")
    if layers and not any(bnn.posterior.random_slots()):
        raise LeanBayesError(
            f"{type(bnn.method).__name__} has no random weights, so there is nothing to correct in its layers: use a "
            "method with Bayesian weights, such as lb.MeanField()."
        )


def samples_of(samples: int | None, layers: bool) -> int:
    """Return the number of Monte Carlo samples per example: by default more if layers are corrected."""
    return (_LAYER_SAMPLES if layers else _SAMPLES) if samples is None else samples


def target_of(bnn: BayesianModel, to: Target | None = None, layers: bool = False) -> Target:
    """Return what `calibrate` fits to: by default labels if the outputs are logits and layers are not corrected."""
    if to is None:
        return "labels" if bnn.likelihood.has_logits and not layers else "samples"
    if to not in get_args(Target):
        raise LeanBayesError(f"to={to!r} is unknown: use 'labels' or 'samples'.")
    return to


def _to_samples(
    bnn: BayesianModel, batches: Iterable[Any], samples: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """Fit the factors to samples."""
    sums = torch.zeros(4, dtype=torch.float64, device=bnn.device)
    kept: list[_Outcomes] = []
    for batch in batches:
        x = inputs_of(batch)
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
    return _nearest(kept, scale, _PRIOR_STD**-2 / _labels_worth(kept, scale)) if kept else scale


def _compare(
    bnn: BayesianModel, x: Any, samples: int, generator: torch.Generator | None
) -> tuple[Tensor, _Outcomes | None]:
    """Return sums over one batch (m·m̂, m², log(v̂/v), and its number of terms), and its outcomes if there are logits."""
    ours = _one_pass(bnn, x)
    loc, variance = ours.loc.double(), ours.variance.double().expand_as(ours.loc)
    outputs, probs, groups = Running(), Running(), [Running() for _ in range(min(_GROUPS, samples))]
    with bnn.using("sample"):
        for number in range(samples):
            draw = bnn.next_draw(generator, number)
            drawn = output_tensor(call_with(bnn, x, _draw=draw)).double()
            outputs.update(drawn)
            logits = bnn.likelihood.logits(drawn)
            if logits is not None:
                found = _some(logits).softmax(-1)
                probs.update(found)
                groups[number % len(groups)].update(found)
    true = outputs.squares / (samples - 1)
    usable = (variance > 0) & (true > 0)
    logs = torch.where(usable, torch.where(usable, true, 1.0).log() - torch.where(usable, variance, 1.0).log(), 0.0)
    sums = torch.stack([(loc * outputs.mean).sum(), loc.square().sum(), logs.sum(), usable.sum().double()])
    rows = _rows(bnn, ours)
    return sums, None if rows is None else _Outcomes(rows, probs.mean, torch.stack([group.mean for group in groups]))


def _labels_worth(kept: Sequence[_Outcomes], factors: tuple[float, float]) -> float:
    """Return how many labels each outcome is worth, given the noise of the samples: κ of the module's docstring."""
    worth = []
    for number in (0, 1):
        information = noise = 0.0
        for logits, _, groups in kept:
            assert groups is not None
            logs = []
            for step in (_STEP, -_STEP):
                moved = [factor * math.exp(step * (number == place)) for place, factor in enumerate(factors)]
                logs.append(logits.probs(*moved).clamp_min(_LEAST).log())
            slope = (logs[0] - logs[1]) / (2 * _STEP)
            information += float((logits.probs(*factors) * slope.square()).sum())
            noise += float((groups * slope).sum((-2, -1)).var()) / len(groups)
        worth.append(information / noise if noise > 0 else math.inf)
    return min(worth)


def _to_labels(bnn: BayesianModel, batches: Iterable[Any]) -> tuple[float, float]:
    """Fit the factors to labels."""
    kept: list[_Outcomes] = []
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise LeanBayesError('calibrate() needs (input, label) pairs: pass them, or use to="samples".')
        ours = _one_pass(bnn, inputs_of(batch))
        loc, rows, y = ours.loc.double(), _rows(bnn, ours), batch[1].to(ours.loc.device)
        if rows is None:
            name = type(bnn.likelihood).__name__
            raise LeanBayesError(f'{name} has no probabilities to fit to labels: use to="samples".')
        bnn.likelihood.check_shape(loc, y)
        bnn.likelihood.check_values(loc, y)
        kept.append(_Outcomes(rows, _some(bnn.likelihood.label_probs(y, loc))))
    if any(not logits.loc.isfinite().all() or logits.variance.isnan().any() for logits, _, _ in kept):
        raise LeanBayesError(_NAN)
    if not any(logits.is_random for logits, _, _ in kept):
        raise LeanBayesError(_NOTHING)
    found = _nearest(kept, (1.0, 1.0), _PRIOR_STD**-2)
    return found if _wrong(kept) >= LEAST_WRONG else _not_more_certain(kept, found)


def _wrong(kept: Sequence[_Outcomes]) -> int:
    """Return how many of the labels are not the most probable class."""
    wrong = 0
    for logits, probs, _ in kept:
        ours = logits.probs(1.0, 1.0)
        wrong += int(((ours.argmax(-1) != probs.argmax(-1)) & (probs.sum(-1) > 0)).sum())
    return wrong


def _not_more_certain(kept: Sequence[_Outcomes], found: tuple[float, float]) -> tuple[float, float]:
    """Return the best factors with a ≤ 1 and b ≥ 1: those that were found, or the best ones on that border."""
    if found[0] <= 1 <= found[1]:
        return found
    mean, _ = _nearest(kept, (1.0, 1.0), _PRIOR_STD**-2, (True, False))
    _, std = _nearest(kept, (1.0, 1.0), _PRIOR_STD**-2, (False, True))
    border = [(min(mean, 1.0), 1.0), (1.0, max(std, 1.0))]
    return min(border, key=lambda factors: _cross_entropy(kept, factors))


def _cross_entropy(kept: Sequence[_Outcomes], factors: tuple[float, float]) -> float:
    """Return the cross-entropy with the prior of the factors, as `_nearest` minimizes it."""
    mean, std = factors
    total = 0.5 * _PRIOR_STD**-2 * (math.log(mean) ** 2 + math.log(std) ** 2)
    for logits, probs, _ in kept:
        ours = logits.probs(mean, std)
        total -= float((probs * ours.clamp_min(_LEAST).log()).sum())
    return total


def _one_pass(bnn: BayesianModel, x: Any) -> Moments:
    """Return the outputs of one pass, without advancing the model's noise stream."""
    with bnn.using("moments"), bnn.frozen(0):
        output: Moments = output_tensor(call_with(bnn, x))
    return output.plain()


def _rows(bnn: BayesianModel, output: Moments) -> _Logits | None:
    """Return some of the logits, or None if the outputs are not logits."""

    def rows(part: Tensor) -> Tensor | None:
        logits = bnn.likelihood.logits(part.double().expand_as(output.loc))
        return None if logits is None else _some(logits)

    coherent = output.within.coherent and output.common is not None
    loc, variance = rows(output.loc), rows(output.variance if coherent else output.independent)
    if loc is None or variance is None:
        return None
    directions = [] if output.common is None else [rows(direction) for direction in output.common]
    common = [direction for direction in directions if direction is not None]
    if not common:
        return _Logits(loc, variance, None)
    if not coherent:
        return _Logits(loc, variance, torch.stack(common))
    noise = torch.stack(common)
    noise = noise * (variance / noise.square().sum(0).clamp_min(_LEAST)).sqrt()
    return _Logits(loc, torch.zeros_like(variance), noise)


def _some(logits: Tensor) -> Tensor:
    """Take evenly spaced outcomes if there are very many, as in dense predictions."""
    count, most = len(logits), max(_OUTCOMES, _LOGITS // logits.shape[-1])
    return logits if count <= most else logits[torch.arange(most, device=logits.device) * count // most]


def _nearest(
    kept: Sequence[_Outcomes],
    start: tuple[float, float],
    precision: float,
    free: tuple[bool, bool] = (True, True),
) -> tuple[float, float]:
    """Minimize the cross-entropy over the logarithms of the factors by L-BFGS, from a start.

    Args:
        precision: The precision of the Gaussian prior of the logarithms around the start.
        free: Which of the two factors to fit. The other one keeps its start.
    """
    logs = torch.tensor([math.log(max(factor, _LEAST)) for factor in start], dtype=torch.float64, requires_grad=True)
    count, center = sum(len(outcomes.probs) for outcomes in kept), logs.detach().clone()
    optimizer = torch.optim.LBFGS([logs], max_iter=100, line_search_fn="strong_wolfe")

    def cross_entropy() -> float:
        optimizer.zero_grad()
        prior = 0.5 * precision * (logs - center).square().sum() / count
        prior.backward()
        total = prior.item()
        for logits, probs, _ in kept:
            ours = logits.probs(*logs.to(probs.device).exp())
            loss = -(probs * ours.clamp_min(_LEAST).log()).sum() / count
            loss.backward()
            total += loss.item()
        logs.grad = logs.grad * torch.tensor(free) if logs.grad is not None else None
        return total

    with torch.enable_grad():
        optimizer.step(cross_entropy)
    mean, std = logs.detach().exp().tolist()
    return mean, std
