"""Active learning: joint information against brute force over all labelings, and determinants of covariances."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.evaluation.active_learning import class_batch, gaussian_batch

EXAMPLES, SAMPLES, CLASSES = 12, 7, 3


def probabilities(seed: int, examples: int = EXAMPLES) -> Tensor:
    logits = 2 * torch.randn(examples, SAMPLES, CLASSES, generator=torch.Generator().manual_seed(seed)).double()
    return logits.softmax(-1)


def information(probs: Tensor, places: Sequence[int]) -> float:
    """I(labels of some examples; w) by the sum over all labelings."""
    joint = 0.0
    for labels in itertools.product(range(CLASSES), repeat=len(places)):
        mean = torch.stack([probs[place, :, label] for place, label in zip(places, labels, strict=True)]).prod(0).mean()
        joint -= float(mean * mean.log())
    return joint - float(torch.special.entr(probs[[*places]]).sum(-1).mean(-1).sum())


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_is_the_greedy_one_of_brute_force(seed: int) -> None:
    probs = probabilities(seed)
    expected: list[int] = []
    for _ in range(4):
        rest = [place for place in range(EXAMPLES) if place not in expected]
        expected.append(max(rest, key=lambda place: information(probs, [*expected, place])))
    chosen, gains = class_batch(probs, 4, 0)
    assert chosen == expected
    for count in range(1, 5):
        assert sum(gains[:count]) == pytest.approx(information(probs, chosen[:count]), rel=1e-9)


def test_drawn_labelings_estimate_the_information() -> None:
    probs = probabilities(1)
    exact, _ = class_batch(probs, 5, 0)
    chosen, gains = class_batch(probs, 5, 0, labelings=20_000)  # enumerates all 3^5
    assert chosen == exact
    few = probabilities(1, 6)
    _, drawn = class_batch(few, 6, 3, labelings=8)
    assert len(drawn) == 6
    order, drawn = class_batch(few, 6, 3, labelings=200)  # draws from the fifth example on
    assert sum(drawn) == pytest.approx(information(few, order), rel=0.03)
    assert sum(gains) == pytest.approx(information(probs, chosen), rel=1e-9)


def test_copies_of_an_example_tell_nothing_new() -> None:
    certain = torch.eye(CLASSES, dtype=torch.float64)[torch.arange(SAMPLES) % CLASSES]  # each sample is sure
    other = torch.eye(CLASSES, dtype=torch.float64)[torch.arange(SAMPLES) // CLASSES]
    probs = torch.stack([certain, certain, certain, 0.5 * other + 0.5 / CLASSES])
    chosen, gains = class_batch(probs, 2, 0)
    assert 3 in chosen
    assert class_batch(probs[:3], 2, 0)[1][1] == pytest.approx(0, abs=1e-12)
    assert all(gain > 0.1 for gain in gains)


@pytest.mark.parametrize("targets", [1, 2])
def test_a_batch_of_a_regression_is_the_greedy_one_of_determinants(targets: int) -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(EXAMPLES, SAMPLES, targets, generator=generator, dtype=torch.float64)
    noise = 0.1 + torch.rand(EXAMPLES, targets, generator=generator, dtype=torch.float64)

    def joint(places: Sequence[int]) -> float:
        values = means[[*places]].transpose(1, 2).reshape(-1, SAMPLES)  # one row per target
        covariance = torch.cov(values, correction=0).reshape(len(values), len(values))
        ratio = covariance / noise[[*places]].flatten()
        return 0.5 * torch.linalg.slogdet(torch.eye(len(values)) + ratio)[1].item()

    expected: list[int] = []
    for _ in range(4):
        rest = [place for place in range(EXAMPLES) if place not in expected]
        expected.append(max(rest, key=lambda place: joint([*expected, place])))
    chosen, gains = gaussian_batch(means, noise, 4)
    assert chosen == expected
    assert sum(gains) == pytest.approx(joint(chosen), rel=1e-9)


@pytest.fixture(scope="module")
def bnn() -> lb.BayesianModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    return lb.bayesianize(network, lb.MeanField(init_std=0.8, samples=12), seed=0)


def pool(count: int = 40) -> Tensor:
    return 2 * torch.randn(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_first_choice_is_that_of_bald(bnn: lb.BayesianModel) -> None:
    x = pool()
    prediction = bnn.predict(x, generator=torch.Generator().manual_seed(5))
    places = lb.decide.acquire(bnn, x.split(7), 6, seed=5)
    assert len(set(places.tolist())) == 6
    assert places[0] == prediction.mutual_information.argmax()
    for score in ("mutual_information", "entropy"):
        top = lb.decide.acquire(bnn, [(part, None) for part in x.split(16)], 6, score=score, seed=5)
        torch.testing.assert_close(top, getattr(prediction, score).topk(6).indices)
    assert lb.decide.acquire(bnn, [{"x": x, "labels": x}], 6, seed=5).tolist() == places.tolist()


def test_models_of_other_kinds_choose_too() -> None:
    network = nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 2)).double()
    x = pool()
    noisy = lb.bayesianize(network, lb.MeanField(init_std=0.5), likelihood=lb.HeteroscedasticGaussian(), seed=0)
    prediction = noisy.predict(x, generator=torch.Generator().manual_seed(0))
    ratio = prediction.epistemic_variance / prediction.aleatoric_variance
    assert lb.decide.acquire(noisy, [x], 3)[0] == ratio[:, 0].argmax()
    std = lb.decide.acquire(noisy, [x], 3, score="epistemic_std")
    torch.testing.assert_close(std, prediction.epistemic_variance[:, 0].topk(3).indices)
    yes_or_no = lb.bayesianize(nn.Linear(2, 1), lb.MeanField(init_std=1.0), likelihood=lb.Bernoulli(), seed=0)
    assert len(lb.decide.acquire(yes_or_no, [x.float()], 3)) == 3
    members = lb.bayesianize(network, lb.Ensemble(members=4))
    assert len(lb.decide.acquire(members, [x], 3)) == 3
    dropout = lb.bayesianize(network, lb.MCDropout())
    assert len(lb.decide.acquire(dropout, [x], 3, score="mutual_information")) == 3
    with pytest.raises(lb.LeanBayesError, match="weight samples that all examples share"):
        lb.decide.acquire(dropout, [x], 3)


def test_what_cannot_be_chosen_is_refused(bnn: lb.BayesianModel) -> None:
    x = pool()
    with pytest.raises(lb.LeanBayesError, match="40 examples, fewer than number=41"):
        lb.decide.acquire(bnn, [x], 41)
    with pytest.raises(lb.LeanBayesError, match="at least 1"):
        lb.decide.acquire(bnn, [x], 0)
    with pytest.raises(lb.LeanBayesError, match="has no score 'std'"):
        lb.decide.acquire(bnn, [x], 2, score="std")
    for rule in ("local", "mean"):
        with pytest.raises(lb.LeanBayesError, match="weight samples that all examples share"):
            lb.decide.acquire(bnn, [x], 2, rule=rule)
