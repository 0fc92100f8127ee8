"""Decisions keep their guarantees in simulations, and agree with brute-force references and with scipy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from training_cases import expect

import leanbayes as lb
from leanbayes.core import config
from leanbayes.likelihoods.decisions import Abstention, ConformalIntervals, ConformalSets, OODGate, Policy
from leanbayes.likelihoods.decisions.abstention import (
    binomial_tail,
    candidate_counts,
    fit_abstention,
    least_examples,
)
from leanbayes.likelihoods.decisions.checked_values import uncertainty
from leanbayes.likelihoods.decisions.conformal import class_scores, conformal_quantile, fit_intervals, fit_sets
from leanbayes.likelihoods.decisions.ood_gate import fit_gate


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- abstain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.7])
@pytest.mark.parametrize("count", [1, 7, 400, 100_000])
def test_the_binomial_tail_is_that_of_scipy(rate: float, count: int) -> None:
    for errors in {0, 1, count // 20, round(rate * count), count}:
        expected = stats.binom.cdf(errors, count, rate)
        assert binomial_tail(errors, count, rate) == pytest.approx(expected, rel=1e-7, abs=1e-300)


def test_a_threshold_passes_if_the_bound_of_clopper_and_pearson_is_below_the_risk() -> None:
    for count, errors, risk, level in ((300, 0, 0.01, 0.05), (500, 3, 0.02, 0.01), (50, 1, 0.1, 0.05)):
        bound = stats.binomtest(errors, count, alternative="less").proportion_ci(1 - level, "exact").high
        assert (binomial_tail(errors, count, risk) <= level) == (bound <= risk)


def reference(
    scores: list[float], wrong: list[bool], risk: float, confidence: float
) -> tuple[float | None, int] | None:
    """Try every candidate, and return the threshold that accepts most, and how many it accepts."""
    counts, found = candidate_counts(len(scores), risk, 1 - confidence), None
    for count in counts:
        threshold = None if count == len(scores) else sorted(scores)[count]
        accepted = [i for i, value in enumerate(scores) if threshold is None or value < threshold]
        errors = sum(wrong[i] for i in accepted)
        p = stats.binom.cdf(errors, len(accepted), risk) if accepted else 1.0
        if p <= (1 - confidence) / len(counts):
            found = (threshold, len(accepted))
    return found


@pytest.mark.parametrize("levels", [3, 40, 10**9])  # few levels mean many ties
@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_is_that_of_brute_force(seed: int, levels: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(30, 400))
    scores = random.integers(0, levels, count) / levels
    wrong = random.random(count) < 0.3 * scores
    expected = reference(scores.tolist(), wrong.tolist(), 0.1, 0.9)
    call = lambda: fit_abstention(torch.tensor(scores), torch.tensor(wrong), 0.1, 0.9, "entropy")  # noqa: E731
    if expected is None:
        expect(call, "0.1")
        return
    found = call()
    assert found.threshold == expected[0]
    accepted = found.accepts(torch.tensor(scores))
    assert int(accepted.sum()) == expected[1] == round(found.answered * count)
    assert found.wrong == pytest.approx(wrong[accepted.numpy()].mean())


@pytest.mark.parametrize(("tied", "slope"), [(False, 0.2), (True, 0.2), (False, 0.0)])
def test_the_risk_is_kept_in_most_simulated_data_sets(tied: bool, slope: float) -> None:
    """The score is uniform, and an answer with score s is wrong with probability base + slope·s.

    Without a slope no threshold keeps the risk, and every answer is a violation.
    """
    random = np.random.default_rng(0)
    base, count = (0.0, 3000) if slope else (0.05, 600)
    risk, confidence, violated, answered = 0.05 - 1e-6, 0.9, 0, 0
    for _ in range(200):
        scores = random.random(count)
        scores = np.ceil(10 * scores) / 10 if tied else scores
        wrong = random.random(count) < base + slope * scores
        try:
            found = fit_abstention(torch.tensor(scores), torch.tensor(wrong), risk, confidence, "entropy")
        except lb.LeanBayesError:
            continue
        answered += 1
        if tied:
            levels = np.arange(1, 11) / 10
            levels = levels if found.threshold is None else levels[levels < found.threshold]
            true_risk = base + slope * levels.mean()
        else:
            true_risk = base + slope * (1 if found.threshold is None else found.threshold) / 2
        violated += true_risk > risk
    assert violated <= stats.binom.ppf(0.999, 200, 1 - confidence)
    if slope:
        assert answered > (100 if tied else 190)  # the bound is useful, not only valid


def test_more_risk_or_less_confidence_answers_more() -> None:
    random = np.random.default_rng(1)
    scores = random.random(5000)
    wrong = torch.tensor(random.random(5000) < 0.2 * scores**2)
    answered = [
        fit_abstention(torch.tensor(scores), wrong, r, 0.95, "entropy").answered for r in (0.01, 0.02, 0.05, 0.2)
    ]
    assert answered == sorted(answered)
    assert answered[0] < 0.5 < answered[-1] == 1
    sure, unsure = (fit_abstention(torch.tensor(scores), wrong, 0.02, c, "entropy").answered for c in (0.999, 0.8))
    assert sure <= unsure


def test_equal_scores_are_answered_together() -> None:
    scores = torch.tensor([0.0] * 500 + [0.5] * 500)
    wrong = torch.tensor([False] * 500 + [True, False] * 250)
    found = fit_abstention(scores, wrong, 0.05, 0.95, "entropy")
    assert (found.threshold, found.answered, found.wrong) == (0.5, 0.5, 0)
    expect(lambda: fit_abstention(torch.zeros(1000), wrong, 0.05, 0.95, "entropy"), "No threshold", "can be kept")


def test_too_few_examples_are_refused_with_the_number_that_is_needed() -> None:
    assert least_examples(0.01, 0.05) == 299  # 0.99^299 < 0.05 < 0.99^298
    right = torch.zeros(299, dtype=torch.bool)
    assert fit_abstention(torch.rand(299), right, 0.01, 0.95, "entropy").threshold is None
    expect(lambda: fit_abstention(torch.rand(298), right[:298], 0.01, 0.95, "entropy"), "298", "at least 299")
    expect(lambda: fit_abstention(torch.rand(0), right[:0], 0.01, 0.95, "entropy"), "no held-out examples")
    expect(lambda: fit_abstention(torch.full((299,), math.nan), right, 0.01, 0.95, "entropy"), "NaN")


def test_the_refusal_says_that_examples_with_an_alarm_do_not_count() -> None:
    call = lambda: fit_abstention(torch.rand(27), torch.zeros(27), 0.05, 0.95, "confidence", not_answered=3)  # noqa: E731
    expect(call, "27 held-out examples without an alarm are too few")


def test_the_refusal_names_a_risk_that_can_be_kept() -> None:
    random = np.random.default_rng(2)
    scores, wrong = torch.tensor(random.random(1000)), torch.tensor(random.random(1000) < 0.1)
    with pytest.raises(lb.LeanBayesError, match="allow a risk of") as refused:
        fit_abstention(scores, wrong, 0.02, 0.95, "entropy")
    lowest = float(str(refused.value).partition("risk of ")[2].partition("%")[0]) / 100
    assert fit_abstention(scores, wrong, lowest, 0.95, "entropy").risk == lowest
    expect(lambda: fit_abstention(scores, wrong, lowest / 1.2, 0.95, "entropy"), "No threshold")


# -- the OOD gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [19, 100, 999, 3217])
@pytest.mark.parametrize("levels", [7, 10**9])
def test_p_values_are_those_of_brute_force(count: int, levels: int) -> None:
    random = np.random.default_rng(count)
    held_out, new = random.integers(0, levels, count) / levels, random.integers(-1, levels + 1, 200) / levels
    gate = fit_gate(torch.tensor(held_out), 0.25 if levels == 7 else 0.05, "entropy")
    found = gate.p_values(torch.tensor(new)).numpy()
    exact = np.array([(1 + (held_out >= value).sum()) / (count + 1) for value in new])
    if count <= 1000:
        assert found == pytest.approx(exact)
    else:  # not all scores are stored
        assert (found >= exact - 1e-12).all()
        assert (found <= exact + count / 1000 / count + 1e-12).all()
    alarms = exact <= gate.false_alarms + 1e-12
    assert (gate.alarms(torch.tensor(new)).numpy() == alarms).all()


def test_false_alarms_have_the_chosen_rate() -> None:
    random = np.random.default_rng(0)
    rates = []
    for _ in range(600):
        held_out, new = torch.tensor(random.gamma(2, 1, (2, 99)))
        rates.append(fit_gate(held_out, 0.1, "entropy").alarms(new).double().mean().item())
    assert np.mean(rates) == pytest.approx(0.1, abs=0.006)


def test_a_gate_without_information_is_refused() -> None:
    expect(lambda: fit_gate(torch.zeros(500), 0.05, "mutual_information"), "same mutual information", "ood_score")
    expect(lambda: fit_gate(torch.rand(18), 0.05, "entropy"), "18 held-out", "at least 19")
    assert fit_gate(torch.rand(19), 0.05, "entropy").examples == 19
    expect(lambda: fit_gate(torch.rand(19), 0.0, "entropy"), "false_alarms=0.0", "between 0 and 1")


@pytest.mark.parametrize("tied", [False, True])
def test_the_risk_is_kept_below_the_threshold_of_a_gate(tied: bool) -> None:
    """The gate is fitted to the same examples, and its score is correlated with that of the answers and with errors."""
    random = np.random.default_rng(0)
    risk, confidence = 0.08, 0.9

    def sample(count: int) -> tuple[Tensor, Tensor, Tensor]:
        hard, far = random.random(count), random.random(count)
        wrong = random.random(count) < 0.15 * hard + 0.5 * (far > 0.9)
        gate = 0.9 * far + 0.1 * hard
        gate, score = (np.ceil(12 * gate) / 12, np.ceil(9 * hard) / 9) if tied else (gate, hard)
        return torch.tensor(gate), torch.tensor(score), torch.tensor(wrong)

    population = sample(200_000)
    violated = answered = 0
    for _ in range(200):
        unfamiliar, scores, wrong = sample(2000)
        gate = fit_gate(unfamiliar, 0.15, "entropy")
        below = unfamiliar < gate.threshold
        try:
            found = fit_abstention(scores[below], wrong[below], risk, confidence, "confidence")
        except lb.LeanBayesError:
            continue
        answered += 1
        accepted = (population[0] < gate.threshold) & found.accepts(population[1])
        violated += population[2][accepted].double().mean().item() > risk
    assert violated <= stats.binom.ppf(0.999, 200, 1 - confidence)
    assert answered > 100


# -- conformal prediction ---------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 5), min_size=20, max_size=60), st.sampled_from([0.5, 0.8, 0.9, 0.95]))
def test_the_quantile_is_the_lowest_with_enough_scores(values: list[float], coverage: float) -> None:
    found = conformal_quantile(torch.tensor(values, dtype=torch.float64), coverage)
    enough = [v for v in values if sum(u <= v for u in values) >= coverage * (len(values) + 1) - 1e-9]
    assert found == min(enough)


def test_the_scores_of_classes_are_those_of_a_loop() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    probs = torch.cat([probs, torch.randn(40, 4, dtype=torch.float64, generator=seeded(0)).softmax(-1)])
    for row, found in zip(probs.tolist(), class_scores(probs, "adaptive").tolist(), strict=True):
        assert found == pytest.approx([sum(other for other in row if other > p) for p in row])
    assert torch.equal(class_scores(probs, "threshold"), 1 - probs)


def classes(random: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Overconfident probabilities of 5 classes, and labels."""
    logits = random.normal(size=(count, 5))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    labels = [random.choice(5, p=row) for row in p]
    return torch.tensor(3 * logits).softmax(-1), torch.tensor(labels)


@pytest.mark.parametrize("kind", ["adaptive", "threshold"])
def test_sets_have_their_coverage_whatever_the_model(kind: Any) -> None:
    random = np.random.default_rng(0)
    found = []
    for _ in range(120):
        sets = fit_sets(*classes(random, 99), 0.9, kind)
        probs, labels = classes(random, 200)
        found.append(sets(probs).gather(-1, labels[:, None]).double().mean().item())
    assert np.mean(found) == pytest.approx(0.9, abs=0.015)
    if kind == "adaptive":
        assert sets(probs).any(-1).all()  # no set is empty
    wider = fit_sets(*classes(np.random.default_rng(1), 99), 0.97, kind)(probs)
    narrow = fit_sets(*classes(np.random.default_rng(1), 99), 0.7, kind)(probs)
    assert (wider | ~narrow).all()


def test_sets_contain_the_most_probable_classes() -> None:
    probs, labels = classes(np.random.default_rng(0), 300)
    for kind in ("adaptive", "threshold"):
        sets = fit_sets(probs, labels, 0.8, kind)(probs)
        least = probs.where(sets, 1.0).amin(-1)
        most = probs.where(~sets, 0.0).amax(-1)
        assert (least > most).all()


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_intervals_have_their_coverage_for_all_targets_together(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)

    def sample(count: int) -> tuple[Tensor, Tensor]:
        std = random.gamma(2, 1, (count, *shape))
        return torch.tensor(std * random.standard_t(3, (count, *shape))), torch.tensor(std)

    found = []
    for _ in range(150):
        intervals = fit_intervals(*sample(79), 0.9)
        error, std = sample(200)
        low, high = intervals(torch.zeros_like(std), std)
        inside = (low <= error) & (error <= high)
        found.append(inside.reshape(200, -1).all(-1).double().mean().item())
    assert np.mean(found) == pytest.approx(0.9, abs=0.015)


def test_conformal_prediction_needs_enough_examples() -> None:
    expect(lambda: conformal_quantile(torch.rand(8), 0.9), "8 held-out", "at least 9")
    assert conformal_quantile(torch.arange(9.0), 0.9) == 8
    expect(lambda: fit_intervals(torch.ones(50), torch.zeros(50), 0.9), "std of 0")
    assert fit_intervals(torch.zeros(50), torch.zeros(50), 0.9).quantile == 0


# -- predictions and the policy ---------------------------------------------------------------------------------------


def of_classes(probs: Tensor, aleatoric: float = 0.0) -> lb.ClassPrediction:
    return lb.ClassPrediction(8, None, probs, torch.full((len(probs),), aleatoric), 1)


PROBS = torch.tensor([[0.98, 0.02], [0.6, 0.4], [0.5, 0.5]], dtype=torch.float64)
ABSTENTION = Abstention(0.01, 0.95, "confidence", 0.1, 400, 0.9, 0.0)
GATE = OODGate(0.25, "entropy", 0.68, 3, (0.7, 0.68, 0.1))


def test_a_policy_says_what_to_do_and_why() -> None:
    decision = Policy("sample", 8, ABSTENTION, GATE, ConformalSets(0.9, "threshold", 0.45, 100))(of_classes(PROBS, 0.5))
    assert decision.accepted.tolist() == [True, False, False]
    assert decision.alarm.tolist() == [False, False, True]
    assert decision.verdict == [
        "answer",
        "ask a person: the inputs are ambiguous",
        "ask a person: unlike the training data",
    ]
    assert decision.p_values is not None
    assert decision.p_values.tolist() == [1.0, 0.75, 0.5]
    assert decision.sets is not None
    assert decision.sets.tolist() == [[True, False], [True, False], [False, False]]
    assert repr(decision).startswith("Decision(3 examples; answer: 1; ask a person: the inputs are ambiguous: 1;")
    assert Policy("sample", 8)(of_classes(PROBS)).accepted.all()
    assert Policy("sample", 8, gate=GATE)(of_classes(PROBS)).accepted.tolist() == [True, True, False]


def test_the_reason_is_noise_in_the_data_or_lack_of_knowledge() -> None:
    policy = Policy("sample", 8, ABSTENTION)
    noise, knowledge = (
        "ask a person: the inputs are ambiguous",
        "ask a person: the model knows too little about this input",
    )
    for aleatoric, reason in ((0.6, noise), (0.05, knowledge)):  # of entropies 0.673 and 0.693
        decision = policy(of_classes(PROBS[1:], aleatoric))
        assert decision.verdict == [reason] * 2
        assert decision.epistemic is not None
        entropies = [math.log(10) - 0.6 * math.log(6) - 0.4 * math.log(4), math.log(2)]
        assert decision.epistemic.tolist() == pytest.approx(
            [1 - aleatoric / entropy for entropy in entropies], rel=1e-6
        )
    variances = torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
    abstention = Abstention(0.01, 0.95, "std", 0.1, 400, 0.9, 0.0, 1.0)
    regression = lb.RegressionPrediction(8, None, variances[:, :1], variances[:, :1], variances[:, 1:])
    assert Policy("sample", 8, abstention)(regression).verdict == [knowledge, noise]


def test_a_policy_warns_of_other_predictions() -> None:
    with pytest.warns(
        lb.RuleMismatchWarning, match="fitted to predictions with one pass .*, but this one is with 8 samples"
    ):
        Policy("moments", 1, ABSTENTION)(of_classes(PROBS))
    mean = torch.zeros(2, 1)
    regression = lb.RegressionPrediction(1, None, mean, mean + 1, mean)
    expect(lambda: Policy("moments", 1, ABSTENTION)(regression), "no score 'confidence'", "std, epistemic_std")
    intervals = Policy("moments", 8, intervals=ConformalIntervals(0.9, 2.0, 100))
    expect(lambda: intervals(of_classes(PROBS)), "policy for a regression", "ClassPrediction")
    sets = Policy("moments", 1, sets=ConformalSets(0.9, "adaptive", 0.5, 100))
    expect(lambda: sets(regression), "policy for classes", "RegressionPrediction")
    dense = lb.ClassPrediction(8, None, torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4), 1)
    expect(lambda: Policy("sample", 8, ABSTENTION)(dense), "one answer per example")


def test_scores_are_those_of_the_prediction() -> None:
    prediction = of_classes(PROBS, 0.01)
    assert uncertainty(prediction, "confidence").tolist() == pytest.approx([0.02, 0.4, 0.5])
    assert uncertainty(prediction, "entropy") == pytest.approx(prediction.entropy)
    assert uncertainty(prediction, "mutual_information") == pytest.approx(prediction.mutual_information)
    yes = lb.BinaryPrediction(1, None, torch.tensor([[0.9], [0.2]]), torch.zeros(2, 1))
    assert uncertainty(yes, "confidence").tolist() == pytest.approx([0.1, 0.2])
    assert uncertainty(yes, "entropy").tolist() == pytest.approx(yes.entropy[:, 0].tolist())
    two = lb.RegressionPrediction(1, None, torch.zeros(1, 2), torch.tensor([[3.0, 8.0]]), torch.ones(1, 2))
    assert uncertainty(two, "std").tolist() == [3]
    assert uncertainty(two, "epistemic_std").tolist() == [1]


def test_a_policy_is_stored_as_json() -> None:
    policy = Policy("sample", 8, ABSTENTION, GATE, ConformalSets(0.9, "adaptive", 0.45, 100))
    assert config.decode(config.encode(policy)) == policy
    encoded = config.encode(policy)
    for part, name, value in (
        ("abstention", "risk", 2.0),
        ("abstention", "threshold", "a"),
        ("abstention", "score", "luck"),
        ("gate", "scores", ["a"]),
        ("gate", "scores", [1.0] * 4),
        ("gate", "examples", -1),
        ("sets", "kind", "other"),
        ("sets", "quantile", math.inf),
    ):
        with pytest.raises(lb.FileFormatError):
            config.decode({**encoded, part: {**encoded[part], name: value}})
    with pytest.raises(lb.FileFormatError):
        config.decode({**encoded, "gate": encoded["sets"]})


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_an_interval_is_that_of_a_gaussian(level: float) -> None:
    mean, std = torch.tensor([[1.0], [-2.0]], dtype=torch.float64), torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    low, high = lb.RegressionPrediction(1, None, mean, 0.3 * std**2, 0.7 * std**2).interval(level)
    expected = stats.norm.interval(level, mean.numpy(), std.numpy())
    assert low.numpy() == pytest.approx(expected[0])
    assert high.numpy() == pytest.approx(expected[1])


def test_an_interval_needs_a_level() -> None:
    prediction = lb.RegressionPrediction(1, None, torch.zeros(1), torch.ones(1), torch.ones(1))
    expect(lambda: prediction.interval(95), "level=95", "between 0 and 1")
