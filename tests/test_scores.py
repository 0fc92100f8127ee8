"""Scores are the same batch by batch, in several processes and of a model; one's own stand beside the usual ones."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_cases import (
    OWN,
    class_prediction,
    parts_of,
    random_probs,
    score_in_processes,
    scored,
    some_labels,
)
from networks import CASES
from scipy import stats
from sklearn import metrics
from torch import Tensor, nn
from training_cases import expect, finish, together

import leanbayes as lb
from leanbayes.evaluation import METRICS, Scores, Sum, Whole, evaluate, mean
from leanbayes.evaluation.outcomes import ClassOutcome

# -- taking in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("details", [False, True])
def test_scores_are_the_same_in_any_cut(details: bool) -> None:
    prediction = class_prediction(random_probs(200, 5))
    y = some_labels(prediction.probs)
    found = scored(Scores(details=details), prediction, y, [1, 120, 79])
    assert found == pytest.approx(scored(Scores(details=details), prediction, y), rel=1e-12)
    assert ("aurc" in found) == ("classwise_ece" in found) == details


@pytest.mark.parametrize("details", [False, True])
def test_examples_are_kept_only_where_details_need_them(details: bool) -> None:
    prediction = class_prediction(random_probs(20, 5))
    y = some_labels(prediction.probs)
    scores = Scores(details=details)
    scored(scores, prediction, y, [4, 16])
    kept = scores.outcome()
    if not details:
        assert kept is None
        return
    assert torch.equal(kept.probs, prediction.probs)
    assert torch.equal(kept.labels, y)
    assert torch.equal(kept.right, prediction.label == y)
    assert torch.equal(kept.chosen, prediction.probs[range(20), y])


def test_scores_go_on_after_they_were_read() -> None:
    prediction = class_prediction(random_probs(30, 5))
    y = some_labels(prediction.probs)
    scores = Scores(details=True)
    first, second = parts_of(prediction, [10, 20])
    scores.update(first, y[:10])
    assert scores.compute() == pytest.approx(scored(Scores(details=True), first, y[:10]), nan_ok=True)
    scores.update(second, y[10:])
    assert scores.compute() == pytest.approx(scored(Scores(details=True), prediction, y))


def test_the_classes_may_lie_in_the_last_dimension() -> None:
    probs = random_probs(8, 6, 4, class_dim=2)
    y = torch.randint(4, (8, 6))
    last = scored(Scores(), class_prediction(probs, 2), y)
    assert last == pytest.approx(scored(Scores(), class_prediction(probs.movedim(2, 1)), y))


def test_what_has_no_examples_is_nan() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    for y, there, missing in (([0, 1], "entropy_right", "entropy_wrong"), ([1, 0], "entropy_wrong", "entropy_right")):
        found = scored(Scores(), class_prediction(probs), torch.tensor(y))
        assert math.isnan(found[missing])
        assert found[there] == pytest.approx(found["entropy"])
        assert found["accuracy"] == (1 if there == "entropy_right" else 0)


def test_examples_without_a_label_do_not_count() -> None:
    prediction = class_prediction(random_probs(40, 5))
    y = some_labels(prediction.probs)
    y[::3] = -100
    counted = y != -100
    part = lb.ClassPrediction(2, None, prediction.probs[counted], prediction.expected_entropy[counted], 1)
    assert scored(Scores(details=True), prediction, y, [3, 37]) == scored(Scores(details=True), part, y[counted])


def test_nothing_to_score_is_said() -> None:
    expect(lambda: Scores().compute(), "nothing to score")
    scores = Scores(details=True)
    scores.update(class_prediction(random_probs(3, 2)), torch.full((3,), -100))
    expect(scores.compute, "nothing to score")
    assert scores.sums("ece") is scores.outcome() is None


def test_classes_and_numbers_cannot_be_scored_together() -> None:
    scores = Scores()
    scores.update(class_prediction(random_probs(3, 2)), torch.zeros(3, dtype=torch.long))
    part = torch.ones(3, 1)
    expect(lambda: scores.update(lb.RegressionPrediction(1, None, part, part, part), part), "use two")


@pytest.mark.parametrize("likelihood", [lb.Gaussian(), lb.Bernoulli()])
def test_targets_of_another_shape_are_refused(likelihood: lb.Gaussian | lb.Bernoulli) -> None:
    bnn = lb.bayesianize(nn.Linear(6, 1), lb.Deterministic(), likelihood=likelihood)
    expect(lambda: evaluate(bnn, [(torch.randn(5, 6), torch.rand(5))]), "shape")


# -- scores of one's own ----------------------------------------------------------------------------------------------


def test_own_scores_stand_beside_the_usual_ones() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=0.3))
    x, y = next(batches([40]))
    prediction = bnn.predict(x, generator=torch.Generator().manual_seed(0))
    own = [
        mean("sure", lambda outcome: outcome.confidence > 0.5),
        Sum("most", lambda outcome: torch.bincount(outcome.answer, minlength=3), lambda sums: float(sums.max())),
        Whole("least", lambda outcome: float(outcome.chosen.min())),
    ]
    found = evaluate(bnn, batches([7, 33]), metrics=own)
    usual = evaluate(bnn, batches([7, 33]))
    assert {name: found[name] for name in usual} == usual
    assert {name: found[name] for name in found.keys() - usual.keys()} == pytest.approx(
        {
            "sure": (prediction.confidence > 0.5).float().mean().item(),
            "most": prediction.label.bincount().max().item(),
            "least": prediction.probs[range(40), y].min().item(),
        }
    )
    basic = evaluate(bnn, batches([7, 33]), details=False, metrics=own)
    assert basic["least"] == found["least"]
    assert "aurc" not in basic


def test_own_scores_of_a_regression_see_its_errors() -> None:
    bnn = lb.bayesianize(nn.Linear(6, 1), lb.Deterministic(), likelihood=lb.Gaussian(0.5))
    x, y = torch.randn(20, 6), torch.randn(20, 1)
    error = 3 * (y - bnn.predict(x).mean)
    own = [mean("mae", lambda o: o.error.abs()), Whole("median", lambda o: float(o.error.abs().quantile(0.5)))]
    found = evaluate(bnn, zip(x.split(6), y.split(6), strict=True), target_scale=[3.0], metrics=own)
    assert found["mae"] == pytest.approx(error.abs().mean().item(), rel=1e-5)
    assert found["median"] == pytest.approx(np.median(error.abs().numpy()), rel=1e-5)


def test_a_score_that_does_not_apply_is_left_out() -> None:
    prediction = class_prediction(random_probs(10, 5))
    own = [mean("never", lambda outcome: None)]
    assert "never" not in scored(Scores(metrics=own), prediction, some_labels(prediction.probs))


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("name", ["accuracy", "aurc", "own"])
def test_two_scores_cannot_have_one_name(name: str, details: bool) -> None:
    own = [Whole("own", lambda outcome: 0.0), mean(name, lambda outcome: outcome.right)]
    scores = Scores(details=details, metrics=own)
    expect(lambda: scored(scores, class_prediction(random_probs(4, 3)), torch.zeros(4, dtype=torch.long)), repr(name))


def test_a_name_of_another_kind_of_prediction_is_free() -> None:
    part = torch.ones(4, 1)
    own = [mean("accuracy", lambda outcome: outcome.error.abs() < 0.1)]
    found = scored(Scores(metrics=own), lb.RegressionPrediction(1, None, part, part, part), part)
    assert found["accuracy"] == 1


# -- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [[[*range(7, 20), 3], [*range(3), *range(4, 7), *range(20, 30)]], [[], [*range(30)]]]
)
def test_processes_score_together_also_if_one_has_nothing(shares: list[list[int]], tmp_path: Path) -> None:
    prediction = class_prediction(random_probs(30, 5))  # the test's own seed is the one that they set
    y = some_labels(prediction.probs)
    scores = Scores(details=True, metrics=OWN)
    expected = scored(scores, prediction, y)
    processes = together(score_in_processes, 2, shares, tmp_path)
    assert [finish(process) for process in processes] == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["together"] == pytest.approx(expected, rel=1e-6)
        assert np.array(found["bins"]) == pytest.approx(scores.sums("ece").numpy())  # type: ignore[union-attr]
        assert found["kept"] == 30
        assert found["alone"] == len(shares[rank])
        assert np.sum(found["assessed"][2]) == 24  # each process has looked at all of the test data, once
    assert set(expected) == {m.name for m in (*METRICS[ClassOutcome], *OWN)} - {"miou", "top5"}


# -- of a model -------------------------------------------------------------------------------------------------------


def batches(sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    yield from zip(x.split(sizes), y.split(sizes), strict=True)


@pytest.mark.parametrize("method", [lb.MeanField(), lb.Deterministic(), lb.Ensemble(3)])
def test_a_model_is_scored_the_same_in_any_cut_of_the_data(method: lb.Method) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    whole = evaluate(bnn, batches([40]))
    assert evaluate(bnn, batches([7, 1, 32])) == pytest.approx(whole, rel=1e-4)
    x, y = next(batches([40]))
    prediction = bnn.predict(x, generator=torch.Generator().manual_seed(0))
    assert whole["accuracy"] == pytest.approx((prediction.label == y).float().mean().item())


def test_samples_seed_and_rule_are_those_of_the_prediction() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=1.0))
    first = evaluate(bnn, batches([40]), samples=2)
    assert evaluate(bnn, batches([40]), samples=2) == first
    assert evaluate(bnn, batches([40]), samples=2, seed=1) != first
    assert evaluate(bnn, batches([40]), samples=3) != first
    assert evaluate(bnn, batches([40]), rule="mean")["mutual_information"] == pytest.approx(0, abs=1e-6)


def test_scoring_leaves_the_noise_and_the_mode_of_a_model_alone() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField()).train()
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    evaluate(bnn, [(CASES["cnn"].example(), torch.zeros(4, dtype=torch.long))])
    assert bnn.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (lb.MeanField(rule="flipout", init_std=1.0), None),
        (lb.MCDropout(0.5), None),
        (lb.MeanField(init_std=1.0), "flipout"),
    ],
)
def test_every_batch_has_noise_of_its_own_where_every_example_has(method: lb.Method, rule: str | None) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    batch = next(batches([40]))
    twice = evaluate(bnn, [batch, batch], samples=2, rule=rule)
    assert twice["nll"] != pytest.approx(evaluate(bnn, [batch], samples=2, rule=rule)["nll"], rel=1e-5)
    x, y = batch
    seeds = (0, 1 << 20)
    predicted = [bnn.predict(x, 2, rule=rule, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    nll = -torch.cat([prediction.probs[range(40), y] for prediction in predicted]).log().mean()
    assert twice["nll"] == pytest.approx(nll.item(), rel=1e-5)


def test_every_batch_has_the_same_draws_where_examples_share_them() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(rule="flipout", init_std=1.0))
    batch = next(batches([40]))
    found = [evaluate(bnn, some, samples=2, rule="sample")["nll"] for some in ([batch], [batch, batch])]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_a_binary_model_and_a_regression_are_scored_by_their_likelihood() -> None:
    x, y = torch.randn(20, 6), torch.rand(20, 1).round()
    network = nn.Linear(6, 1)
    probs = network(x).sigmoid().detach().numpy()
    found = evaluate(lb.bayesianize(network, lb.Deterministic(), likelihood=lb.Bernoulli()), [(x, y)])
    assert found["nll"] == pytest.approx(metrics.log_loss(y.numpy(), probs), rel=1e-5)
    gaussian = lb.bayesianize(network, lb.Deterministic(), likelihood=lb.Gaussian(0.3))
    found = evaluate(gaussian, [(x, y)], target_scale=[2.0])
    error = 2 * (y - network(x)).detach().numpy()
    assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert found["nll"] == pytest.approx(-stats.norm.logpdf(error, 0, 0.6).mean(), rel=1e-5)
