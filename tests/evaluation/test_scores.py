"""Scores do not depend on batches and processes, and custom metrics are added to the built-in ones."""

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
from network_cases import CASES
from scipy import stats
from sklearn import metrics
from torch import Tensor, nn
from training_cases import expect, finish, together

import leanbayes as lb
from leanbayes.evaluation import METRICS, Scores, Sum, Whole, evaluate, mean
from leanbayes.evaluation.cost import count_flops
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.rules import Adjoint

# -- accumulating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("details", [False, True])
def test_scores_do_not_depend_on_the_batch_size(details: bool) -> None:
    prediction = class_prediction(random_probs(200, 5))
    y = some_labels(prediction.probs)
    found = scored(Scores(details=details), prediction, y, [1, 120, 79])
    assert found == pytest.approx(scored(Scores(details=details), prediction, y), rel=1e-12)
    assert ("aurc" in found) == ("classwise_ece" in found) == details


@pytest.mark.parametrize("details", [False, True])
def test_examples_are_kept_in_memory_only_for_details(details: bool) -> None:
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


def test_scores_can_be_updated_after_compute() -> None:
    prediction = class_prediction(random_probs(30, 5))
    y = some_labels(prediction.probs)
    scores = Scores(details=True)
    first, second = parts_of(prediction, [10, 20])
    scores.update(first, y[:10])
    assert scores.compute() == pytest.approx(scored(Scores(details=True), first, y[:10]), nan_ok=True)
    scores.update(second, y[10:])
    assert scores.compute() == pytest.approx(scored(Scores(details=True), prediction, y))


def test_classes_may_be_the_last_dimension() -> None:
    probs = random_probs(8, 6, 4, class_dim=2)
    y = torch.randint(4, (8, 6))
    last = scored(Scores(), class_prediction(probs, 2), y)
    assert last == pytest.approx(scored(Scores(), class_prediction(probs.movedim(2, 1)), y))


def test_a_score_without_examples_is_nan() -> None:
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


def test_scores_without_examples_raise_an_error() -> None:
    expect(lambda: Scores().compute(), "nothing to score")
    scores = Scores(details=True)
    scores.update(class_prediction(random_probs(3, 2)), torch.full((3,), -100))
    expect(scores.compute, "nothing to score")
    assert scores.sums("ece") is scores.outcome() is None


def test_mixed_kinds_of_predictions_raise_an_error() -> None:
    scores = Scores()
    scores.update(class_prediction(random_probs(3, 2)), torch.zeros(3, dtype=torch.long))
    part = torch.ones(3, 1)
    expect(lambda: scores.update(lb.RegressionPrediction(1, None, part, part, part), part), "use two")


@pytest.mark.parametrize("likelihood", [lb.Gaussian(), lb.Bernoulli()])
def test_targets_of_another_shape_raise_an_error(likelihood: lb.Gaussian | lb.Bernoulli) -> None:
    bnn = lb.bayesianize(nn.Linear(6, 1), lb.Deterministic(), likelihood=likelihood)
    expect(lambda: evaluate(bnn, [(torch.randn(5, 6), torch.rand(5))]), "shape")


def test_scores_have_a_short_repr() -> None:
    scores = Scores()
    assert repr(scores) == "Scores(empty)"
    scores.update(class_prediction(random_probs(1200, 3)), torch.zeros(1200, dtype=torch.long))
    assert repr(scores).startswith("Scores(classification, 1,200 rows: accuracy, ")
    part = torch.ones(3, 1)
    scores = Scores(metrics=[mean("mae", lambda outcome: outcome.error.abs())])
    scores.update(lb.RegressionPrediction(1, None, part, part, part), part)
    assert repr(scores).startswith("Scores(regression, 3 rows: rmse, nll, ")
    assert repr(scores).endswith(", mae)")


# -- custom metrics ---------------------------------------------------------------------------------------------------


def test_custom_metrics_are_added_to_the_built_in_ones() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=0.3))
    x, y = next(batches([40]))
    prediction = bnn.predict(x, generator=torch.Generator().manual_seed(0))
    own = [
        mean("certain", lambda outcome: outcome.confidence > 0.5),
        Sum("most", lambda outcome: torch.bincount(outcome.answer, minlength=3), lambda sums: float(sums.max())),
        Whole("least", lambda outcome: float(outcome.chosen.min())),
    ]
    found = evaluate(bnn, batches([7, 33]), metrics=own)
    usual = evaluate(bnn, batches([7, 33]))
    assert {name: found[name] for name in usual} == usual
    assert {name: found[name] for name in found.keys() - usual.keys()} == pytest.approx(
        {
            "certain": (prediction.confidence > 0.5).float().mean().item(),
            "most": prediction.label.bincount().max().item(),
            "least": prediction.probs[range(40), y].min().item(),
        }
    )
    basic = evaluate(bnn, batches([7, 33]), details=False, metrics=own)
    assert basic["least"] == found["least"]
    assert "aurc" not in basic


def test_custom_metrics_of_a_regression_get_its_errors() -> None:
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
def test_metrics_with_the_same_name_raise_an_error(name: str, details: bool) -> None:
    own = [Whole("own", lambda outcome: 0.0), mean(name, lambda outcome: outcome.right)]
    scores = Scores(details=details, metrics=own)
    expect(lambda: scored(scores, class_prediction(random_probs(4, 3)), torch.zeros(4, dtype=torch.long)), repr(name))


def test_a_custom_metric_may_have_a_name_of_another_kind_of_prediction() -> None:
    part = torch.ones(4, 1)
    own = [mean("accuracy", lambda outcome: outcome.error.abs() < 0.1)]
    found = scored(Scores(metrics=own), lb.RegressionPrediction(1, None, part, part, part), part)
    assert found["accuracy"] == 1


# -- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [[[*range(7, 20), 3], [*range(3), *range(4, 7), *range(20, 30)]], [[], [*range(30)]]]
)
def test_processes_score_together_even_if_one_has_no_examples(shares: list[list[int]], tmp_path: Path) -> None:
    prediction = class_prediction(random_probs(30, 5))  # with the seed that the processes set
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
        assert np.sum(found["evaluated"][2]) == 24  # each process has evaluated all of the test data once
    assert set(expected) == {m.name for m in (*METRICS[ClassOutcome], *OWN)} - {"miou", "top5"}


# -- models -----------------------------------------------------------------------------------------------------------


def batches(sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    yield from zip(x.split(sizes), y.split(sizes), strict=True)


@pytest.mark.parametrize("method", [lb.MeanField(), lb.Deterministic(), lb.Ensemble(3)])
def test_the_scores_of_a_model_do_not_depend_on_the_batch_size(method: lb.Method) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    whole = evaluate(bnn, batches([40]))
    assert evaluate(bnn, batches([7, 1, 32])) == pytest.approx(whole, rel=1e-4)
    x, y = next(batches([40]))
    prediction = bnn.predict(x, generator=torch.Generator().manual_seed(0))
    assert whole["accuracy"] == pytest.approx((prediction.label == y).float().mean().item())


def test_samples_seed_and_rule_are_passed_to_predict() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=1.0))
    first = evaluate(bnn, batches([40]), samples=2)
    assert evaluate(bnn, batches([40]), samples=2) == first
    assert evaluate(bnn, batches([40]), samples=2, seed=1) != first
    assert evaluate(bnn, batches([40]), samples=3) != first
    assert evaluate(bnn, batches([40]), rule="mean")["mutual_information"] == pytest.approx(0, abs=1e-6)


def test_a_rule_may_have_its_own_settings() -> None:
    """The scores are those of its predictions, and its cost is that of its passes."""
    bnn, x = lb.bayesianize(CASES["cnn"].build(), lb.MeanField(init_std=0.3)), CASES["cnn"].example()
    rule = Adjoint(mean="moments", margins=2)
    probs = bnn.predict(x, rule=rule).probs
    y = torch.zeros(len(x), dtype=torch.long)
    found = evaluate(bnn, [(x, y)], rule=rule)["nll"]
    assert found == pytest.approx(-probs[:, 0].log().mean().item(), rel=1e-5)
    assert found != pytest.approx(evaluate(bnn, [(x, y)], rule="adjoint")["nll"], rel=1e-3)
    both, margins, moments = (count_flops(bnn, x, rule=used) for used in (rule, Adjoint(margins=2), "moments"))
    assert both == margins + moments


def test_scoring_does_not_change_the_noise_and_the_mode_of_a_model() -> None:
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
def test_batches_have_separate_noise_if_examples_have(method: lb.Method, rule: str | None) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    batch = next(batches([40]))
    twice = evaluate(bnn, [batch, batch], samples=2, rule=rule)
    assert twice["nll"] != pytest.approx(evaluate(bnn, [batch], samples=2, rule=rule)["nll"], rel=1e-5)
    x, y = batch
    seeds = (0, 1 << 20)
    predicted = [bnn.predict(x, 2, rule=rule, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    nll = -torch.cat([prediction.probs[range(40), y] for prediction in predicted]).log().mean()
    assert twice["nll"] == pytest.approx(nll.item(), rel=1e-5)


def test_batches_have_the_same_samples_if_examples_share_them() -> None:
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
