"""Saliency maps under the posterior: their mean and std over Monte Carlo samples, and metrics of their quality.

With Φ(f, x) the map of a sampled network f at x, Yeh et al. (2019) define
    infidelity:       E (I·Φ(f, x) - (f(x) - f(x - I)))² over perturbations I;
    sensitivity_max:  max ‖Φ(f, x') - Φ(f, x)‖ / ‖Φ(f, x)‖ over x' around x,
here for each sample with its own map, and averaged over the samples. Both are computed by captum.

captum gets all examples of x at once and in order: if each example has its own noise (flipout, local, dropout), it
keeps that noise in every call.
"""

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.names import suggestion
from leanbayes.core.network import evaluation_mode, inputs_of, output_tensor
from leanbayes.errors import LeanBayesError, missing_package
from leanbayes.likelihoods import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from leanbayes.likelihoods.accumulators import MomentAccumulator
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Moments

Score = Callable[[Tensor], Tensor]  # from a batch to the explained output of each example, (batch,)
Attribution = Callable[[Score, Tensor], Tensor]  # from a score and a batch that requires a gradient to its map
_STD, _RADIUS = 0.1, 0.02  # of perturbations, as fractions of the std of the inputs


@dataclass(frozen=True)
class Explanation:
    """The saliency maps of a batch: their mean and std over samples, shaped as x, and the output that each explains."""

    mean: Tensor
    std: Tensor
    target: Tensor


def _gradient(score: Score, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(score(x).sum(), x)[0]


def _magnitude(score: Score, x: Tensor) -> Tensor:
    return _gradient(score, x).abs()


def _integrated(score: Score, x: Tensor) -> Tensor:
    return _captum("attr").IntegratedGradients(score).attribute(x, internal_batch_size=len(x))


KINDS: dict[str, Attribution] = {"gradient": _gradient, "magnitude": _magnitude, "integrated": _integrated}


def _captum(module: str) -> Any:
    try:
        return importlib.import_module(f"captum.{module}")
    except ImportError:
        raise missing_package("This explanation needs captum", "explain") from None


def saliency(
    bnn: BayesianModel,
    x: Tensor,
    target: int | Tensor | None = None,
    *,
    samples: int | None = None,
    kind: str | Attribution = "gradient",
    rule: str | None = None,
    seed: int = 0,
) -> Explanation:
    """Return the mean saliency map of each example over Monte Carlo samples, and its std.

    Args:
        bnn: The model.
        x: A batch of real inputs.
        target: The output (class, or regression target) to explain, one for all examples or one per example. The
            default is the predicted class, or the only output.
        samples: Number of Monte Carlo samples. None means the default of the method.
        kind: "gradient" of the output (for a class, of its logit), its "magnitude" (Simonyan et al. 2014),
            "integrated" gradients from 0 (Sundararajan et al. 2017, needs captum), or a function of (score, x).
        rule: How random weights are combined with activations. None means the model's own rule.
        seed: Seed of the Monte Carlo samples, the same as those of a prediction with this seed.
    """
    mean, std, target = _over_samples(bnn, x, target, samples, kind, rule, seed, lambda x, score, explain: explain(x))
    return Explanation(mean, std, target)


def infidelity(
    bnn: BayesianModel,
    x: Tensor,
    target: int | Tensor | None = None,
    *,
    samples: int | None = None,
    kind: str | Attribution = "gradient",
    rule: str | None = None,
    std: float | None = None,
    perturbations: int = 10,
    normalize: bool = False,
    seed: int = 0,
) -> Tensor:
    """Return the error with which the maps of each example predict the effect of a perturbation I ~ N(0, std²).

    std is a tenth of the std of x by default. With normalize, the maps are first scaled to fit best, so that only their
    shape counts. Integrated gradients are already multiplied by x, so the perturbation is divided by it, as in captum.
    """
    captum, std, generator = _captum("metrics"), _size("std", std, _STD, x), _perturbing(x, perturbations, seed)

    def perturb(x: Tensor) -> tuple[Tensor, Tensor]:
        change = std * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        return change / torch.where(x == 0, 1.0, x) if kind == "integrated" else change, x - change

    def measure(x: Tensor, score: Score, explain: Score) -> Tensor:
        return captum.infidelity(score, perturb, x, explain(x), n_perturb_samples=perturbations,
                                 max_examples_per_batch=len(x), normalize=normalize)  # fmt: skip

    return _over_samples(bnn, x, target, samples, kind, rule, seed, measure)[0]


def sensitivity_max(
    bnn: BayesianModel,
    x: Tensor,
    target: int | Tensor | None = None,
    *,
    samples: int | None = None,
    kind: str | Attribution = "gradient",
    rule: str | None = None,
    radius: float | None = None,
    perturbations: int = 10,
    seed: int = 0,
) -> Tensor:
    """Return the largest relative change of the maps of each example under perturbations within a radius.

    The radius is a fiftieth of the std of x by default; the perturbations are uniform within it.
    """
    captum, radius = _captum("metrics"), _size("radius", radius, _RADIUS, x)
    generator = _perturbing(x, perturbations, seed)

    def perturb(x: Tensor) -> Tensor:
        return x + radius * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) - 1)

    def measure(x: Tensor, score: Score, explain: Score) -> Tensor:
        def as_tuples(inputs: Tensor | tuple[Tensor]) -> tuple[Tensor]:  # captum passes one or the other
            return (explain(inputs[0] if isinstance(inputs, tuple) else inputs),)

        return captum.sensitivity_max(as_tuples, x, perturb, n_perturb_samples=perturbations,
                                      max_examples_per_batch=len(x))  # fmt: skip

    return _over_samples(bnn, x, target, samples, kind, rule, seed, measure)[0]


def explanation_scores(
    bnn: BayesianModel,
    batches: Iterable[Any],
    *,
    target: int | None = None,
    samples: int | None = None,
    kind: str | Attribution = "gradient",
    rule: str | None = None,
    std: float | None = None,
    radius: float | None = None,
    perturbations: int = 10,
    seed: int = 0,
) -> dict[str, float]:
    """Return the means of infidelity, sensitivity_max and saliency_std (‖std‖/‖mean‖ of a map) over all examples.

    batches: inputs, or (input, label) pairs. Each batch has its own samples and perturbations.
    """
    rows: dict[str, list[Tensor]] = {"infidelity": [], "sensitivity_max": [], "saliency_std": []}
    for number, batch in enumerate(batches):
        x = inputs_of(batch)
        common: dict[str, Any] = {"samples": samples, "kind": kind, "rule": rule, "seed": seed + (number << 20)}
        maps = saliency(bnn, x, target, **common)
        common["perturbations"] = perturbations
        rows["infidelity"].append(infidelity(bnn, x, maps.target, std=std, **common))
        rows["sensitivity_max"].append(sensitivity_max(bnn, x, maps.target, radius=radius, **common))
        std_norm, size = maps.std.flatten(1).norm(dim=1), maps.mean.flatten(1).norm(dim=1)
        rows["saliency_std"].append(std_norm / torch.where(size == 0, 1.0, size))
    if not rows["infidelity"]:
        raise LeanBayesError("There is nothing to explain: pass at least one batch.")
    return {name: float(torch.cat(values).double().mean()) for name, values in rows.items()}


@torch.inference_mode(False)
@torch.no_grad()
def _over_samples(
    bnn: BayesianModel,
    x: Tensor,
    target: int | Tensor | None,
    samples: int | None,
    kind: str | Attribution,
    rule: str | None,
    seed: int,
    measure: Callable[[Tensor, Score, Score], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and std of `measure(x, score, explain)` over samples, and the target."""
    _check(x)
    attribution = _attribution(kind)
    generator = torch.Generator().manual_seed(seed)
    with bnn.using(rule or bnn.current_rule), evaluation_mode(bnn):
        prediction = bnn.predict(x, samples, generator=generator)
        target = _targets(prediction, target, x)
        generator.manual_seed(seed)  # the same samples again
        moments = MomentAccumulator(lambda values: (values, torch.zeros((), device=values.device)))
        for number in range(prediction.samples):
            with bnn.drawn(bnn.next_draw(generator, number)) as call:
                score = partial(_score, call, target)
                moments.update(measure(x, score, partial(_explain, attribution, score)))
        found = moments.finish(prediction.samples, None)
    assert isinstance(found, RegressionPrediction)
    return found.mean, found.epistemic_variance.sqrt(), target


def _score(call: Callable[..., Any], target: Tensor, x: Tensor) -> Tensor:
    """Return the target output of each example."""
    if len(x) != len(target):
        raise LeanBayesError(
            f"The score needs all {len(target)} examples at once, not {len(x)}: call it once per perturbation."
        )
    output = output_tensor(call(x))
    mean = output.loc if isinstance(output, Moments) else output
    return mean.reshape(len(x), -1).gather(1, target[:, None])[:, 0]


def _explain(attribution: Attribution, score: Score, x: Tensor) -> Tensor:
    found = attribution(score, x.detach().clone().requires_grad_())
    if found.shape != x.shape:
        shapes = f"{tuple(found.shape)} does not match inputs of shape {tuple(x.shape)}"
        raise LeanBayesError(f"A map of shape {shapes}: return one number per input.")
    return found.detach().contiguous()  # captum takes views of it


def _check(x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise LeanBayesError(
            f"Explanations need one tensor of real inputs, not {kind}: wrap the network in a module that takes one."
        )


def _attribution(kind: str | Attribution) -> Attribution:
    if callable(kind):
        return kind
    if kind not in KINDS:
        hint = suggestion(kind, KINDS, f"choose {', '.join(KINDS)}, or pass a function of (score, x).")
        raise LeanBayesError(f"There is no explanation of kind {kind!r}: {hint}")
    return KINDS[kind]


def _targets(prediction: Prediction, target: int | Tensor | None, x: Tensor) -> Tensor:
    """Return the index of the output to explain, one per example."""
    assert isinstance(prediction, (ClassPrediction, BinaryPrediction, RegressionPrediction))
    values = prediction.mean if isinstance(prediction, RegressionPrediction) else prediction.probs
    values = values[:, None] if values.dim() == 1 else values
    if values.dim() != 2:
        raise LeanBayesError(
            f"Outputs of shape {tuple(values.shape)} have no single number to explain: wrap the network in a module "
            "that returns (batch, outputs), such as the mean over all pixels."
        )
    if target is None and isinstance(prediction, ClassPrediction):
        return prediction.label
    if target is None and values.shape[1] > 1:
        raise LeanBayesError(f"The network has {values.shape[1]} outputs: choose the one to explain with target=.")
    targets = torch.as_tensor(0 if target is None else target, device=values.device)
    valid = not targets.is_floating_point() and targets.shape in ((), values.shape[:1])
    if not valid or targets.min() < 0 or targets.max() >= values.shape[1]:
        raise LeanBayesError(
            f"target must be an integer from 0 to {values.shape[1] - 1}, or a tensor of {len(x)} of them."
        )
    return targets.long().expand(len(x))


def _size(name: str, given: float | None, share: float, x: Tensor) -> float:
    """Return the size of the perturbations."""
    _check(x)
    size = share * x.detach().double().std(correction=0).item() if given is None else given
    if not 0 < size < math.inf:
        remedy = f"pass {name}=, because the inputs are constant" if given is None else "pass a positive number"
        raise LeanBayesError(f"Perturbations cannot have {name}={size}: {remedy}.")
    return size


def _perturbing(x: Tensor, perturbations: int, seed: int) -> torch.Generator:
    if perturbations < 1:
        raise LeanBayesError(f"perturbations={perturbations} must be at least 1.")
    return torch.Generator(x.device).manual_seed(seed)
