"""The plain network with temperature: the lowest NLL by SciPy, and what does not change."""

import numpy as np
import pytest
import torch
from evaluation_cases import random_probs, some_labels
from scipy import optimize
from torch import Tensor
from torch.nn import functional

from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, RegressionOutcome
from leanbayes.evaluation.temperature import HIGHEST, LOWEST, Temperature, fit_temperature


def classes(probs: Tensor, labels: Tensor) -> ClassOutcome:
    return ClassOutcome(probs, labels, torch.special.entr(probs).sum(-1), torch.full((len(probs),), 0.1))


def nll(outcome: ClassOutcome, smoothing: float = 0.0) -> float:
    """The NLL, if this share of the labels is random."""
    return functional.cross_entropy(outcome.probs.double().log(), outcome.labels, label_smoothing=smoothing).item()


@pytest.mark.parametrize("sharp", [0.3, 1.0, 4.0])
def test_the_temperature_has_the_lowest_nll(sharp: float) -> None:
    torch.manual_seed(0)
    probs = random_probs(80, 5, sharp=sharp)
    outcome = classes(probs, some_labels(probs))
    found = fit_temperature(outcome)
    assert found is not None
    best = optimize.minimize_scalar(
        lambda log: nll(Temperature(float(np.exp(log)))(outcome), 1 / 81),
        bounds=np.log([LOWEST, HIGHEST]),
        method="bounded",
    )
    assert found.value == pytest.approx(np.exp(best.x), rel=1e-3)
    assert nll(found(outcome), 1 / 81) <= nll(outcome, 1 / 81) + 1e-6


def test_a_temperature_divides_logits_and_keeps_answers() -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(50, 4)
    labels = torch.randint(4, (50,))
    scaled = Temperature(2.5)(classes(logits.softmax(-1), labels))
    assert torch.allclose(scaled.probs, (logits / 2.5).softmax(-1), atol=1e-6)
    assert torch.equal(scaled.answer, logits.argmax(-1))
    expected = torch.distributions.Categorical(logits=logits / 2.5).entropy()
    assert torch.allclose(scaled.entropy, expected, atol=1e-5)
    assert not scaled.mutual_information.any()


def test_the_temperature_of_a_regression_has_the_lowest_nll() -> None:
    torch.manual_seed(2)
    error, std = torch.randn(60, 2), 0.2 + torch.rand(60, 2)
    found = fit_temperature(RegressionOutcome(error, std, std / 2))
    assert found is not None

    def gaussian_nll(log: float) -> float:
        normal = torch.distributions.Normal(torch.zeros_like(error), std * float(np.exp(log / 2)))
        made_up = torch.distributions.Normal(0.0, float(np.exp(log / 2))).log_prob(torch.tensor(1.0))
        return -(normal.log_prob(error).sum() + made_up).item()

    best = optimize.minimize_scalar(gaussian_nll, bounds=(-3, 3), method="bounded")
    assert found.value == pytest.approx(np.exp(best.x), rel=1e-3)
    scaled = found(RegressionOutcome(error, std, std / 2))
    assert torch.allclose(scaled.std, found.value**0.5 * std)
    assert torch.allclose(scaled.epistemic_std, scaled.std / 2)


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_held_out_examples_that_are_all_right_do_not_make_answers_certain(count: int) -> None:
    outcome = classes(torch.tensor([[0.9, 0.05, 0.05]] * count), torch.zeros(count).long())
    found = fit_temperature(outcome)
    assert found is not None
    # The confidence is the share of right labels, if one of n + 1 is random.
    assert found(outcome).confidence[0].item() == pytest.approx(1 - 2 / 3 / (count + 1), abs=1e-4)


def test_the_temperature_is_bounded_and_may_not_exist() -> None:
    probs = torch.tensor([[0.9, 0.1]] * 8)
    assert fit_temperature(classes(probs, torch.ones(8).long())).value == pytest.approx(HIGHEST)  # type: ignore[union-attr]
    assert fit_temperature(None) is None
    assert fit_temperature(RegressionOutcome(torch.ones(3), torch.zeros(3), torch.zeros(3))) is None
    assert fit_temperature(BinaryOutcome(*torch.rand(4, 3))) is None
