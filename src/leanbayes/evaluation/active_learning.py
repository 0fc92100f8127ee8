"""Active learning: choose the examples whose labels would teach the model most.

The label of an example tells as much about the weights as their mutual information I(y; w) (BALD, Houlsby et al. 2011,
arXiv:1112.5745). The labels of a batch tell less than the sum, because similar examples tell the same. So a batch is
chosen greedily by their joint information (BatchBALD, Kirsch et al. 2019, arXiv:1906.08158), example by example:

    gain(i) = I(y_i; w | labels of the chosen ones)
            = E[H(y_i | labels of the chosen ones)] - E[H(y_i | w)],

where K samples of the weights stand for the posterior. The first expectation is over the possible labels of the chosen
examples: all of them while these are few, and otherwise random ones. Given labels, the K samples are weighted by their
likelihood. A regression has a closed form if the means of its predictions are jointly Gaussian.
"""

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.network import inputs_of
from leanbayes.data.base import as_pair, label_key
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Prediction, RegressionPrediction
from leanbayes.likelihoods.decisions.checked_values import class_probs, uncertainty
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Rule

_LABELINGS = 1000  # sets of labels of the chosen examples that are averaged over
_CELLS = 1 << 24  # numbers of a temporary tensor


@checked()
def acquire(
    bnn: BayesianModel,
    pool: Iterable[Any],
    number: int,
    *,
    score: str | None = None,
    samples: int | None = None,
    rule: str | Rule | None = None,
    seed: int = 0,
) -> Tensor:
    """Choose the examples of a pool whose labels would teach the model most.

    Args:
        bnn: The trained model. It is not changed.
        pool: Batches of inputs, or of (input, label) pairs, whose labels are not read. Their order must not change
            between the choice and the use of the result.
        number: The number of examples to choose.
        score: None chooses the examples that together tell most about the weights (BatchBALD), so that no two are
            alike. A name chooses those with the highest uncertainty, each on its own: "mutual_information" (BALD),
            "entropy" or "confidence", and "epistemic_std" or "std" for a regression.
        samples: Monte Carlo samples. None means the default of the method.
        rule: The rule of the predictions, a name or a rule with its own settings. None means the current one.
        seed: The seed of the samples.

    Returns:
        The places of the chosen examples in the pool, the most useful one first.

    Raises:
        LeanBayesError: The pool has fewer examples, a prediction has several answers per example, or the samples are
            not the same for all examples (the rules "local" and "flipout", dropout), and score is None.

    Example:
        >>> places = lb.decide.acquire(bnn, pool_loader, 20)
        >>> labels = ask_a_person(pool[places])
    """
    count = 0 if isinstance(number, bool) else index(number)
    if count < 1:
        raise LeanBayesError(f"number={number!r} must be at least 1.")
    with bnn.using(rule or bnn.current_rule):
        shared = bnn.current_rule.random and (bnn.members is not None or not bnn.noise_per_example)
        separate, name = bnn.noise_per_example, bnn.rule
    if score is None and not shared:
        raise LeanBayesError(
            f"Joint information needs weight samples that all examples share, which {type(bnn.method).__name__} with "
            f"the rule {name!r} does not have: use rule='sample', or "
            "score='mutual_information'."
        )
    parts: list[Tensor] = []
    noises: list[Tensor] = []
    for place, batch in enumerate(pool):
        generator = torch.Generator().manual_seed(seed + (place << 20 if separate else 0))
        prediction = bnn.predict(_inputs(batch), samples, rule=rule, generator=generator, keep_outputs=score is None)
        if score is not None:
            parts.append(uncertainty(prediction, score))
            continue
        values, noise = _sampled(bnn, prediction)
        parts.append(values)
        noises.append(noise)
    found = sum(map(len, parts))
    if found < count:
        raise LeanBayesError(f"The pool has {found:,} examples, fewer than number={count}: choose fewer.")
    if score is not None:
        return torch.cat(parts).topk(count).indices.cpu()
    values, noise = torch.cat(parts), torch.cat(noises)
    chosen, _ = gaussian_batch(values, noise, count) if noise.numel() else class_batch(values, count, seed)
    return torch.tensor(chosen)


def _inputs(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return as_pair(batch)[0] if label_key(batch) else batch
    return inputs_of(batch)


def _sampled(bnn: BayesianModel, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return what each sample predicts, in float64.

    Returns:
        Probabilities (examples, samples, classes) and an empty tensor; or, for a regression, means (examples, samples,
        targets) and the variances of the noise (examples, targets).
    """
    assert prediction.outputs is not None
    if isinstance(prediction, RegressionPrediction):
        split = getattr(bnn.likelihood, "split", None)
        means = prediction.outputs if split is None else split(prediction.outputs)[0]
        noise = prediction.aleatoric_variance.double().flatten(1)
        return means.double().flatten(2).transpose(0, 1), noise
    class_probs(prediction)  # refuses several answers per example
    likelihood: Any = bnn.likelihood
    probs = torch.stack([likelihood.logits(output.double()).softmax(-1) for output in prediction.outputs], dim=1)
    return probs, probs.new_zeros(0)


def class_batch(probs: Tensor, number: int, seed: int, labelings: int = _LABELINGS) -> tuple[list[int], list[float]]:
    """Choose examples greedily by the joint information of their labels.

    Args:
        probs: The probability of each class by each sample of the weights, (examples, samples, classes) in float64.
        number: The number of examples to choose.
        seed: The seed of the labels that are drawn if there are too many to enumerate.
        labelings: The number of labelings that are averaged over.

    Returns:
        The chosen examples, and what each adds to the joint information, in nats.
    """
    samples, classes = probs.shape[1:]
    aleatoric = torch.special.entr(probs).sum(-1).mean(-1)
    logs = probs.clamp_min(1e-300).log()
    generator = torch.Generator().manual_seed(seed)
    # One row for each labeling of the chosen examples: its log-likelihood under each sample of the weights, and its
    # probability. `origin` is the sample that a labeling was drawn from; None if all labelings are there.
    likelihood, weight, origin = probs.new_zeros(1, samples), probs.new_ones(1), None
    chosen: list[int] = []
    gains: list[float] = []
    for _ in range(number):
        posterior = likelihood.softmax(-1)
        gain = _expected_entropy(posterior, weight, probs) - aleatoric
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        gains.append(gain[best].item())
        if origin is None and len(weight) * classes <= labelings:
            weight = (weight[:, None] * (posterior @ probs[best])).flatten()
            likelihood = (likelihood[:, None] + logs[best].T).flatten(0, 1)
            continue
        earlier = [best]
        if origin is None:  # from now on, labelings are drawn, beginning with the examples chosen so far
            origin = torch.arange(max(labelings, samples), device=probs.device) % samples
            likelihood, earlier = probs.new_zeros(len(origin), samples), chosen
        for place in earlier:
            drawn = torch.multinomial(probs[place].cpu(), len(origin), replacement=True, generator=generator)
            picked = torch.arange(len(origin), device=probs.device)
            labels = drawn.to(probs.device)[origin, picked]
            likelihood = likelihood + logs[place].T[labels]
        weight = probs.new_full((len(origin),), 1 / len(origin))
    return chosen, gains


def _expected_entropy(posterior: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
    """Return Σ_s weight_s·H(Σ_k posterior_sk·p_k) for each example, a few examples at a time."""
    step = max(1, _CELLS // (len(weight) * probs.shape[-1]))
    found = []
    for part in probs.split(step):
        mixed = torch.einsum("sk,nkc->snc", posterior, part)
        found.append(weight @ torch.special.entr(mixed).sum(-1))
    return torch.cat(found)


def gaussian_batch(means: Tensor, noise: Tensor, number: int) -> tuple[list[int], list[float]]:
    """Choose examples greedily by the joint information ½ log det(1 + covariance of the means / noise).

    Args:
        means: The prediction of each sample of the weights, (examples, samples, targets) in float64.
        noise: The variance of the noise of each target, (examples, targets).
        number: The number of examples to choose.

    Returns:
        The chosen examples, and what each adds to the joint information, in nats.
    """
    samples = means.shape[1]
    scaled = (means - means.mean(1, keepdim=True)) / (samples * noise[:, None]).sqrt()
    left = torch.eye(samples, dtype=means.dtype, device=means.device)  # what the chosen targets leave open
    chosen: list[int] = []
    gains: list[float] = []
    for _ in range(number):
        half = left @ scaled
        covariance = scaled.mT @ half
        covariance.diagonal(dim1=-2, dim2=-1).add_(1)
        gain = 0.5 * torch.logdet(covariance)
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        gains.append(gain[best].item())
        left = left - half[best] @ torch.linalg.solve(covariance[best], half[best].mT)
    return chosen, gains
