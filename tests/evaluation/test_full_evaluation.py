"""`evaluate_fully` agrees with predictions made by hand, for every kind of task, method and shift."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_cases import (
    CLASSES,
    VOID,
    Recorded,
    image_data,
    images,
    network,
    segmentation_data,
    segmentation_network,
    table_data,
    table_network,
)
from scipy import optimize
from sklearn import metrics
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from training_cases import expect

import leanbayes as lb
from leanbayes.core.noise import mix
from leanbayes.data import Data, from_datasets
from leanbayes.evaluation import EvaluationSettings, evaluate, evaluate_fully, full_evaluation
from leanbayes.evaluation.asking import confidence_threshold
from leanbayes.evaluation.curves import histogram
from leanbayes.evaluation.detection import auroc
from leanbayes.evaluation.explanation import explanation_scores
from leanbayes.evaluation.levels import ANGLES, DECIBELS
from leanbayes.evaluation.pruning import SHARES, prune
from leanbayes.evaluation.shift import CORRUPTIONS, GEOMETRIC, SEVERITIES, add_noise, corrupt, label_shift, rotate

METHODS = [lb.Deterministic(), lb.MeanField(init_std=0.1), lb.Ensemble(2), lb.MCDropout(0.3)]
BLACK = torch.zeros(9, 1, 8, 8, dtype=torch.uint8)


def named(method: lb.Method) -> str:
    return type(method).__name__


def predicted(bnn: lb.BayesianModel, x: Tensor, seed: int = 0, samples: int | None = None) -> Any:
    return bnn.predict(x, samples, generator=torch.Generator().manual_seed(seed))


def scores_of(prediction: Any, y: Tensor) -> dict[str, float]:
    """Some scores of a classification, by numpy."""
    p = prediction.probs.double().numpy()
    return {
        "accuracy": (p.argmax(1) == y.numpy()).mean(),
        "nll": -np.log(p[np.arange(len(y)), y.numpy()]).mean(),
        "entropy": -(p * np.log(np.maximum(p, 1e-38))).sum(1).mean(),
    }


def assert_scores(found: dict[str, float], expected: dict[str, float]) -> None:
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def without_times(found: dict[str, Any]) -> str:
    """An evaluation without its measured times."""
    costs = {
        part: {name: value for name, value in found["costs"][part].items() if name != "predict_ms_per_1000"}
        for part in ("ours", "plain", "ratios")
    }
    return json.dumps({**found, "costs": costs})


def levels_of(found: dict[str, Any]) -> list[tuple[str, str, float]]:
    return [(shift["family"], shift["name"], shift["level"]) for shift in found["shifts"]]


def shifted(x: Tensor, shift: dict[str, Any], generator: torch.Generator) -> Tensor:
    if shift["family"] == "corruptions":
        return corrupt(x, shift["name"], shift["level"], generator)
    if shift["family"] == "rotation":
        return rotate(x, shift["level"])
    return add_noise(x, shift["level"], generator) if shift["family"] == "noise" else x


NONE = [("none", "none", 0)]
ROTATION = [("rotation", "rotation", angle) for angle in ANGLES]
NOISE = [("noise", "noise", decibels) for decibels in DECIBELS]
LABELS = [("labels", "labels", concentration) for concentration in (10.0, 1.0, 0.1)]


def corruptions(*left_out: str) -> list[tuple[str, str, float]]:
    return [("corruptions", name, s) for name in CORRUPTIONS if name not in left_out for s in SEVERITIES]


@pytest.mark.parametrize(
    ("data", "model"),
    [(image_data(), network()), (image_data(bytes_=False), network()), (table_data(), table_network())],
)
def test_a_trained_network_in_double_precision_can_be_evaluated(data: Data, model: nn.Module) -> None:
    recipe: dict[str, Any] = {"epochs": 1, "batch_size": 8, "temperature": 0.01, "device": "cpu", "progress": False}
    bnn = lb.fit(model.double(), lb.MeanField(init_std=0.1), data, **recipe)
    settings = EvaluationSettings(rule="mean", explained=2)
    found = evaluate_fully(bnn, data, settings)
    expected = evaluate_fully(bnn.float(), data, settings)
    assert_scores(found["scores"], {"nll": expected["scores"]["nll"]})
    assert levels_of(found) == levels_of(expected)


# -- by hand ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> tuple[lb.BayesianModel, Data, dict[str, Any], list[tuple[str, int, int]]]:
    """A full evaluation of a model, in two batches."""
    calls: list[tuple[str, int, int]] = []
    bnn, data = lb.bayesianize(network(), lb.MeanField(init_std=0.1)), image_data()
    sets = {"black": TensorDataset(BLACK, torch.zeros(9)), "same": data.test}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_evaluation, "BATCH", 16)
        settings = EvaluationSettings(samples=3, seed=7)
        found = evaluate_fully(bnn, data, settings, ood=sets, on_progress=lambda *args: calls.append(args))  # type: ignore[arg-type]
    return bnn, data, found, calls


def test_the_scores_are_those_of_evaluate(whole: Any) -> None:
    bnn, data, found, _ = whole
    x, y = data.test[:]
    expected = evaluate(bnn, [(data.normalize(x), y)], samples=3, seed=7)
    assert found["scores"] == pytest.approx({**expected, "examples": 24}, rel=1e-4, nan_ok=True)
    assert_scores(found["scores"], scores_of(predicted(bnn, data.normalize(x), 7, 3), y))


def test_inputs_are_shifted_before_normalization_at_every_level(whole: Any) -> None:
    bnn, data, found, _ = whole
    x, y = data.test[:]
    assert levels_of(found) == [*NONE, *corruptions(), *ROTATION, *NOISE, *LABELS]
    for shift in found["shifts"]:
        if shift["family"] == "labels":
            continue
        parts = enumerate((x / 255).split(16))
        changed = [shifted(part, shift, torch.Generator().manual_seed(mix(7, number))) for number, part in parts]
        expected = scores_of(predicted(bnn, (torch.cat(changed) - 0.3) / 0.25, 7, 3), y)
        assert_scores(shift["scores"], expected)
    assert found["shift_examples"] == 24


def test_unchanged_inputs_have_the_scores_of_the_test_data(whole: Any) -> None:
    _, _, found, _ = whole
    none = found["shifts"][0]["scores"]
    assert none == pytest.approx({name: found["scores"][name] for name in none}, rel=1e-4, nan_ok=True)
    assert "aurc" not in none


def test_label_shift_changes_only_the_class_proportions(whole: Any) -> None:
    bnn, data, found, _ = whole
    x, y = data.test[:]
    prediction = predicted(bnn, data.normalize(x), 7, 3)
    shifts = [shift for shift in found["shifts"] if shift["family"] == "labels"]
    for shift in shifts:
        rows = label_shift(y, torch.Generator().manual_seed(mix(7)), shift["level"])
        chosen = lb.ClassPrediction(3, None, prediction.probs[rows], prediction.expected_entropy[rows], 1)
        assert_scores(shift["scores"], scores_of(chosen, y[rows]))
        assert len(rows) == 24
        assert y[rows].bincount(minlength=CLASSES).tolist() != y.bincount().tolist()


def test_ood_detection_scores_are_those_of_scikit_learn(whole: Any) -> None:
    bnn, data, found, _ = whole
    x, _ = data.test[:]
    inside, outside = predicted(bnn, data.normalize(x), 7, 3), predicted(bnn, data.normalize(BLACK), 7, 3)
    assert list(found["ood"]) == ["black", "same"]
    assert found["ood"]["black"]["examples"] == 9
    truth = [0] * 24 + [1] * 9
    for measure, sign in (("max_probability", -1), ("entropy", 1), ("mutual_information", 1)):
        name = "confidence" if measure == "max_probability" else measure
        scores = sign * torch.cat([getattr(inside, name), getattr(outside, name)]).double().numpy()
        by = found["ood"]["black"]["by"][measure]
        assert by["auroc"] == pytest.approx(metrics.roc_auc_score(truth, scores))
        assert by["aupr_out"] == pytest.approx(metrics.average_precision_score(truth, scores))
        assert by["aupr_in"] == pytest.approx(metrics.average_precision_score(np.logical_not(truth), -scores))
        false, true, _ = metrics.roc_curve(np.logical_not(truth), -scores, drop_intermediate=False)
        assert by["fpr95"] == pytest.approx(false[true >= 0.95][0])
        assert by["fpr85"] == pytest.approx(false[true >= 0.85][0])
    edges = torch.tensor(found["curves"]["entropy_edges"], dtype=torch.float64)
    assert found["ood"]["black"]["entropy"] == histogram(outside.entropy, edges)


def test_progress_counts_up_to_the_total(whole: Any) -> None:
    *_, found, calls = whole
    total = 2 + sum(shift["family"] != "labels" for shift in found["shifts"]) + 2 + len(found["pruning"])
    assert [done for _, done, _ in calls] == [*range(total + 1)]
    assert {of for *_, of in calls} == {total}
    names = [what for what, *_ in calls]
    assert names[:2] == ["test data", "none 0"]
    assert names[-6:] == ["black", "same", "pruning by magnitude", "pruning by snr", "cost", "done"]
    assert "gaussian noise 3" in names


def test_costs_are_those_of_both_networks_and_their_ratios(whole: Any) -> None:
    bnn, _, found, _ = whole
    costs = found["costs"]
    assert costs["examples"] == 16
    assert costs["ours"]["samples"] == 3
    assert costs["train_flops"] == costs["plain"]["predict_flops"]  # one sample
    assert costs["ours"]["trainable"] == sum(p.numel() for p in bnn.parameters())
    assert costs["plain"]["trainable"] == sum(p.numel() for p in network().parameters())
    assert costs["ratios"] == {name: ours / costs["plain"][name] for name, ours in costs["ours"].items()}


def test_pruning_has_the_scores_of_pruned_models(whole: Any) -> None:
    bnn, data, found, _ = whole
    x, y = data.test[:]
    x = data.normalize(x)
    assert list(found["pruning"]) == ["magnitude", "snr"]
    for by, curve in found["pruning"].items():
        assert [point["share"] for point in curve] == list(SHARES)
        assert_scores(curve[0], scores_of(predicted(bnn, x, 7, 3), y))
        assert_scores(curve[3], scores_of(predicted(prune(bnn, SHARES[3], by), x, 7, 3), y))
    assert found["pruning"]["magnitude"][3] != found["pruning"]["snr"][3]


def test_pruning_uses_only_criteria_that_apply() -> None:
    data = image_data()
    plain = evaluate_fully(lb.bayesianize(network(), lb.Deterministic()), data, EvaluationSettings(shifts=()))
    assert list(plain["pruning"]) == ["magnitude"]
    biases = lb.bayesianize(network(), lb.MeanField(), select=lambda name, p: p.dim() == 1)
    assert evaluate_fully(biases, data, EvaluationSettings(shifts=()))["pruning"] == {}
    assert evaluate_fully(biases, data, EvaluationSettings(shifts=(), pruning=False))["pruning"] == {}


@pytest.mark.parametrize("make", [(image_data, network), (table_data, table_network)], ids=["images", "table"])
def test_saliency_maps_are_evaluated_on_request(make: Any) -> None:
    data = make[0]()
    bnn = lb.bayesianize(make[1](), lb.MeanField(init_std=0.1), likelihood=data.likelihood())
    settings = EvaluationSettings(samples=2, shifts=(), pruning=False, explained=6, seed=3)
    calls: list[str] = []
    found = evaluate_fully(bnn, data, settings, on_progress=lambda what, done, of: calls.append(f"{what} {done} {of}"))
    assert calls == ["test data 0 3", "explanations 1 3", "cost 2 3", "done 3 3"]
    assert evaluate_fully(bnn, data, EvaluationSettings(shifts=(), pruning=False))["explanation"] == {}
    order = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(mix(3)))
    rows = order[:6].sort().values
    x = torch.stack([data.test[int(row)][0] for row in rows])
    x = data.normalize(x) if data.normalize else x
    target = 0 if data.task == "regression" else None
    expected = explanation_scores(bnn, [x], target=target, samples=2, seed=3)
    assert found["explanation"] == pytest.approx(expected, rel=1e-4)
    assert expected["saliency_std"] > 0


def test_an_evaluation_is_plain_values(whole: Any) -> None:
    *_, found, _ = whole
    again = json.loads(json.dumps(found))
    assert again == {**found, "settings": {**found["settings"], "shifts": [*found["settings"]["shifts"]]}}
    assert found["settings"]["samples"] == 3
    assert json.loads(json.dumps(found, allow_nan=False))  # nothing is nan here


def test_all_mistakes_are_listed_with_the_most_confident_first(whole: Any) -> None:
    bnn, data, found, _ = whole
    x, y = data.test[:]
    prediction = predicted(bnn, data.normalize(x), 7, 3)
    wrong = [i for i in range(24) if prediction.label[i] != y[i]]
    assert 2 < len(wrong) < 24
    mistakes = found["mistakes"]
    assert mistakes["index"] == sorted(wrong, key=lambda i: -prediction.confidence[i].item())
    assert mistakes["truth"] == y[mistakes["index"]].tolist()
    assert mistakes["answer"] == prediction.label[mistakes["index"]].tolist()
    assert mistakes["confidence"] == pytest.approx(prediction.confidence[mistakes["index"]].tolist())


def split_data() -> Data:
    """Images with held-out examples that are not the test examples."""
    x, y = images(60)
    y[::5] = (y[::5] + 1) % CLASSES  # labels that no model can predict
    parts = [TensorDataset(x[start : start + 20], y[start : start + 20]) for start in (0, 20, 40)]
    return from_datasets(*parts, outputs=CLASSES)


def test_the_threshold_for_asking_comes_from_the_held_out_split() -> None:
    bnn = lb.bayesianize(network(), lb.MeanField(init_std=0.1))
    parts = []
    for x in images(60)[0].split(20):
        prediction = predicted(bnn, x / 255, samples=3)
        uncertain = prediction.confidence < prediction.confidence.median()
        parts.append(TensorDataset(x, (prediction.label + uncertain) % CLASSES))
    data = from_datasets(*parts, outputs=CLASSES)
    found = evaluate_fully(bnn, data, EvaluationSettings(samples=3, shifts=()))
    outcomes = []
    for split in (data.validation, data.test):
        x, y = split[:]  # type: ignore[index]
        prediction = predicted(bnn, x / 255, samples=3)
        outcomes.append((prediction.confidence, prediction.label == y))
    threshold = confidence_threshold(*outcomes[0])
    assert 0 < threshold < 1
    confidence, right = outcomes[1]
    assert found["asking"]["threshold"] == pytest.approx(threshold, rel=1e-5)
    assert found["asking"]["asked"] == pytest.approx((confidence < threshold).double().mean().item())
    assert found["asking"]["wrong_without"] == pytest.approx((~right).double().mean().item())
    assert found["scaled"] == {}


def test_a_plain_network_is_also_evaluated_with_temperature() -> None:
    data = split_data()
    bnn = lb.bayesianize(network(), lb.Deterministic())
    settings = EvaluationSettings(shifts=("noise", "labels"))
    found = evaluate_fully(bnn, data, settings, ood={"same": data.train})
    scaled = found["scaled"]
    with torch.no_grad():
        logits = bnn.network(data.validation[:][0] / 255).double()
        y = data.validation[:][1]
        best = optimize.minimize_scalar(
            lambda log: nn.functional.cross_entropy(logits / np.exp(log), y, label_smoothing=1 / 21).item(),
            bounds=(-2.9, 2.9),
            method="bounded",
        )
        outputs = bnn.network(data.test[:][0] / 255)  # type: ignore[index]
    assert scaled["temperature"] == pytest.approx(np.exp(best.x), rel=1e-3)
    expected = nn.functional.cross_entropy(outputs / scaled["temperature"], data.test[:][1]).item()  # type: ignore[index]
    assert scaled["scores"]["nll"] == pytest.approx(expected, rel=1e-5)
    assert scaled["scores"]["accuracy"] == found["scores"]["accuracy"]
    assert scaled["scores"]["mutual_information"] == 0
    assert abs(scaled["temperature"] - 1) > 0.05
    assert scaled["scores"]["nll"] != pytest.approx(found["scores"]["nll"], rel=1e-3)
    assert [shift["level"] for shift in scaled["shifts"]] == [shift["level"] for shift in found["shifts"]]
    outside = bnn.network(data.train[:][0] / 255)
    entropies = [torch.special.entr((of / scaled["temperature"]).softmax(-1)).sum(-1) for of in (outputs, outside)]
    assert scaled["ood"]["same"]["by"]["entropy"]["auroc"] == pytest.approx(auroc(*entropies), abs=1e-3)
    assert scaled.keys() == {"temperature", "scores", "curves", "mistakes", "asking", "shifts", "ood"}


def test_a_plain_regression_is_also_evaluated_with_a_rescaled_std() -> None:
    data = table_data()
    bnn = lb.bayesianize(table_network(), lb.Deterministic(), likelihood=lb.Gaussian(0.5))
    found = evaluate_fully(bnn, data, EvaluationSettings(shifts=()))
    x, y = data.validation[:]
    prediction = predicted(bnn, x)
    squares = ((y - prediction.mean) / prediction.std).double().square()
    factor = (squares.sum().item() + 1) / (squares.numel() + 1)
    assert found["scaled"]["temperature"] == pytest.approx(factor, rel=1e-5)
    widths = [of["scores"]["width_95"] for of in (found, found["scaled"])]
    assert widths[1] == pytest.approx(factor**0.5 * widths[0], rel=1e-5)
    assert found["asking"]["asked"] == 0  # all stds are equal
    assert found["asking"]["rmse"] == pytest.approx(found["scores"]["rmse"])


# -- reproducibility and side effects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_an_evaluation_is_reproducible_and_has_no_side_effects(method: lb.Method) -> None:
    bnn, data = lb.bayesianize(network(), method).train(), image_data(count=12)
    bnn.network.eval()
    flags = [module.training for module in bnn.modules()]
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    settings = EvaluationSettings(samples=2, shifts=("rotation", "noise", "labels"))
    found = evaluate_fully(bnn, data, settings, ood={"same": data.test})  # type: ignore[dict-item]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (str(np.random.get_state()), random.getstate())
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
    assert [module.training for module in bnn.modules()] == flags
    random.random()
    torch.rand(3)
    again = evaluate_fully(bnn, data, settings, ood={"same": data.test})  # type: ignore[dict-item]
    assert without_times(again) == without_times(found)
    other = evaluate_fully(bnn, data, EvaluationSettings(samples=2, shifts=("noise",), seed=1))
    assert other["shifts"][-1] != found["shifts"][-4]


@pytest.mark.parametrize(
    ("method", "rule"),
    [*((method, None) for method in METHODS), (lb.MeanField(init_std=0.3), "flipout")],
    ids=lambda value: named(value) if isinstance(value, lb.Method) else str(value),
)
def test_every_method_predicts_ood_data_as_it_predicts_the_test_data(
    method: lb.Method, rule: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_evaluation, "BATCH", 8)  # so that there are several batches
    bnn, data = lb.bayesianize(network(), method), image_data()
    found = evaluate_fully(bnn, data, EvaluationSettings(rule=rule, shifts=()), ood={"same": data.test})  # type: ignore[dict-item]
    for by in found["ood"]["same"]["by"].values():
        assert by["auroc"] == 0.5
    curves = found["curves"]
    assert found["ood"]["same"]["entropy"] == [
        *map(sum, zip(curves["entropy_right"], curves["entropy_wrong"], strict=True))
    ]
    x, y = data.test[:]  # type: ignore[index]
    parts = zip(data.normalize(x).split(8), y.split(8), strict=True)  # type: ignore[misc]
    assert found["scores"]["nll"] == pytest.approx(evaluate(bnn, parts, rule=rule)["nll"], rel=1e-5)
    if named(method) == "MCDropout" or rule == "flipout":  # each batch has separate noise
        one_seed = torch.cat([bnn.predict(part, rule=rule, generator=torch.Generator().manual_seed(0)).entropy
                              for part in data.normalize(x).split(8)])  # type: ignore[misc] # fmt: skip
        assert found["scores"]["entropy"] != pytest.approx(one_seed.mean().item(), rel=1e-6)


# -- which shifts apply -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_and_floats_from_0_to_1_have_the_same_shifts(channels: int, normalize: bool) -> None:
    bnn = lb.bayesianize(network(channels), lb.Deterministic())
    settings = EvaluationSettings(shifts=("rotation", "noise"), samples=1)
    found = [evaluate_fully(bnn, image_data(channels, bytes_, normalize, 8), settings) for bytes_ in (True, False)]
    for result in found:
        assert levels_of(result) == [*NONE, *ROTATION, *NOISE]
    for one, other in zip(found[0]["shifts"], found[1]["shifts"], strict=True):
        assert one["scores"]["nll"] == pytest.approx(other["scores"]["nll"], rel=2e-2, abs=2e-2)  # a byte is rounded
    x, y = images(8, channels, bytes_=False)
    turned = rotate(x, 30)
    expected = scores_of(predicted(bnn, (turned - 0.3) / 0.25 if normalize else turned), y)
    assert_scores(found[1]["shifts"][2]["scores"], expected)


@pytest.mark.parametrize("bytes_", [True, False])
def test_color_images_are_corrupted_by_all_corruptions(bytes_: bool) -> None:
    bnn = lb.bayesianize(network(3), lb.Deterministic())
    found = evaluate_fully(bnn, image_data(3, bytes_, count=4), EvaluationSettings(shifts=("corruptions",)))
    assert levels_of(found) == [*NONE, *corruptions()]


@pytest.mark.parametrize(
    "x",
    [
        images(8, channels=2)[0],
        3 * images(8, bytes_=False)[0],
        images(8, bytes_=False)[0] - 0.1,
        images(8, side=7, bytes_=False)[0],
    ],
    ids=["two channels", "above 1", "below 0", "too small"],
)
def test_images_that_cannot_be_corrupted_have_only_rotation_and_noise(x: Tensor) -> None:
    dataset = TensorDataset(x, torch.arange(8) % CLASSES)
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), CLASSES))
    found = evaluate_fully(lb.bayesianize(plain, lb.Deterministic()), data)
    assert levels_of(found) == [*NONE, *ROTATION, *NOISE, *LABELS]


def test_a_table_has_only_noise_and_scores_in_the_unit_of_the_targets() -> None:
    data = table_data()
    bnn = lb.bayesianize(table_network(), lb.MeanField(init_std=0.1), likelihood=lb.Gaussian(0.5))
    found = evaluate_fully(bnn, data, EvaluationSettings(samples=4))
    assert levels_of(found) == [*NONE, *NOISE]
    x, y = data.test[:]  # type: ignore[index]
    unit = torch.tensor([2.0, 3.0])
    for shift in (found["shifts"][0], found["shifts"][4]):
        generator = torch.Generator().manual_seed(mix(0, 0))
        changed = x if shift["name"] == "none" else add_noise(x, shift["level"], generator)
        error = (y - predicted(bnn, changed, samples=4).mean) * unit
        assert shift["scores"]["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
    assert found["scores"]["rmse"] == pytest.approx(found["shifts"][0]["scores"]["rmse"])
    assert found["mistakes"] == found["ood"] == {}
    prediction = predicted(bnn, x, samples=4)
    z = ((y - prediction.mean) / prediction.std).abs().double()
    half = torch.special.ndtri(torch.tensor(0.75, dtype=torch.float64))
    assert found["curves"]["intervals"][9] == pytest.approx((z <= half).double().mean().item())
    assert json.loads(json.dumps(found, allow_nan=False))


def test_a_classifier_of_tables_has_noise_and_label_shift() -> None:
    dataset = TensorDataset(torch.randn(20, 6), torch.arange(20) % 2)
    data = from_datasets(dataset, dataset, dataset)
    found = evaluate_fully(lb.bayesianize(nn.Linear(6, 2), lb.MeanField()), data, EvaluationSettings(samples=2))
    assert levels_of(found) == [*NONE, *NOISE, *LABELS]


def test_a_segmentation_has_only_shifts_that_do_not_move_pixels() -> None:
    data = segmentation_data()
    bnn = lb.bayesianize(
        segmentation_network(), lb.MeanField(init_std=0.1), likelihood=lb.Categorical(ignore_index=VOID)
    )
    found = evaluate_fully(bnn, data, EvaluationSettings(samples=2))
    assert levels_of(found) == [*NONE, *corruptions(*GEOMETRIC), *NOISE]
    assert found["mistakes"] == found["ood"] == {}
    assert found["scores"]["examples"] == 6
    assert found["curves"].keys() == {"reliability", "class_reliability", "iou"}
    x, y = data.test[:]  # type: ignore[index]
    answer = predicted(bnn, x / 255, samples=2).label[y != VOID].numpy()
    expected = metrics.jaccard_score(y[y != VOID].numpy(), answer, average=None)
    assert [one for one in found["curves"]["iou"] if not math.isnan(one)] == pytest.approx(expected)
    noisy = found["shifts"][-1]
    changed = add_noise(x / 255, noisy["level"], torch.Generator().manual_seed(mix(0, 0)))
    wrong = predicted(bnn, changed, samples=2).label[y != VOID] != y[y != VOID]
    assert noisy["scores"]["accuracy"] == pytest.approx(1 - wrong.float().mean().item(), rel=1e-5)
    assert np.sum(found["curves"]["reliability"][2]) == (y != VOID).sum()


class Words(Dataset[Any]):
    """Token ids in a dict, as transformers take them, or in a tensor."""

    def __init__(self, mapping: bool) -> None:
        self.mapping, self.targets = mapping, torch.arange(12) % 2

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        ids = torch.arange(index, index + 5)
        return ({"ids": ids} if self.mapping else ids), self.targets[index]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).mean(1)


@pytest.mark.parametrize("mapping", [True, False])
def test_tokens_have_no_noise(mapping: bool) -> None:
    words = Words(mapping)
    data = from_datasets(words, words, words, outputs=2)
    found = evaluate_fully(lb.bayesianize(Bag(), lb.MeanField()), data, EvaluationSettings(samples=2))
    assert levels_of(found) == LABELS
    assert found["scores"]["examples"] == 12


# -- how many examples ------------------------------------------------------------------------------------------------


def test_all_levels_use_the_same_examples_which_are_read_once() -> None:
    dataset = Recorded(*images(20))
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES, input_shape=(1, 8, 8))
    bnn = lb.bayesianize(network(), lb.Deterministic())
    dataset.read.clear()
    found = evaluate_fully(bnn, data, EvaluationSettings(shifts=("noise",), shift_examples=6, pruning=False, seed=3))
    chosen, rest = dataset.read[:6], dataset.read[6:]
    assert chosen == sorted(set(chosen))
    assert chosen != [*range(6)]
    assert rest == [*range(20)] * 3  # for the held-out data, the test data, and the cost
    assert found["shift_examples"] == 6
    assert found["scores"]["examples"] == 20
    x, y = dataset.x[chosen] / 255, dataset.y[chosen]
    assert_scores(found["shifts"][0]["scores"], scores_of(predicted(bnn, x, 3), y))
    changed = add_noise(x, -6, torch.Generator().manual_seed(mix(3, 0)))
    assert_scores(found["shifts"][-1]["scores"], scores_of(predicted(bnn, changed, 3), y))


def test_examples_that_are_too_large_to_cache_are_read_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Recorded(*images(20))
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES, input_shape=(1, 8, 8))
    bnn, settings = (
        lb.bayesianize(network(), lb.Deterministic()),
        EvaluationSettings(shifts=("noise",), shift_examples=6, pruning=False),
    )
    cached = evaluate_fully(bnn, data, settings)
    monkeypatch.setattr(full_evaluation, "_CACHED_BYTES", 100)
    dataset.read.clear()
    assert without_times(evaluate_fully(bnn, data, settings)) == without_times(cached)
    assert len(dataset.read) == 6 * (2 + 8) + 3 * 20  # twice to check them, and once for each level


def test_ood_examples_are_limited() -> None:
    data, other = image_data(), Recorded(*images(30))
    bnn = lb.bayesianize(network(), lb.Deterministic())
    found = evaluate_fully(bnn, data, EvaluationSettings(shifts=(), ood_examples=11), ood={"other": other})
    assert found["ood"]["other"]["examples"] == 11 == len(set(other.read))


def test_examples_without_a_label_do_not_change_the_indices_of_others() -> None:
    x, y = images(16)
    y[:5] = -100
    dataset = TensorDataset(x, y)
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES)
    bnn = lb.bayesianize(network(), lb.Deterministic())
    found = evaluate_fully(bnn, data, EvaluationSettings(shifts=("labels",)))
    mistakes = found["mistakes"]
    prediction = predicted(bnn, x / 255)
    assert mistakes["index"]
    assert sorted(mistakes["index"]) == [i for i in range(5, 16) if prediction.label[i] != y[i]]
    assert mistakes["truth"] == y[mistakes["index"]].tolist()
    assert mistakes["confidence"] == pytest.approx(prediction.confidence[mistakes["index"]].tolist(), rel=1e-5)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shifts": ("noise", "fog")}, ["'fog'", "corruptions, rotation, noise, labels"]),
        ({"shift_examples": 0}, ["shift_examples=0", "1 or more"]),
        ({"ood_examples": -1}, ["ood_examples=-1", "1 or more"]),
        ({"samples": 0}, ["samples=0", "1 or more"]),
        ({"rule": "guess"}, ["guess"]),
    ],
)
def test_invalid_settings_raise_errors(settings: dict[str, Any], words: list[str]) -> None:
    expect(lambda: EvaluationSettings(**settings), *words)


def test_ood_data_with_binary_outputs_raise_an_error() -> None:
    x, y = torch.randn(20, 3), torch.randint(2, (20, 2)).float()
    dataset = TensorDataset(x, y)
    bnn = lb.bayesianize(nn.Linear(3, 2), lb.MeanField(), likelihood=lb.Bernoulli())
    data = Data("d", "classification", dataset, dataset, dataset, (3,), 2)
    settings = EvaluationSettings(shifts=(), pruning=False)
    assert evaluate_fully(bnn, data, settings)["scores"].keys() >= {"accuracy", "ece", "aurc"}
    expect(lambda: evaluate_fully(bnn, data, settings, ood={"far": dataset}), "predicts classes", "remove ood=")


@pytest.mark.parametrize("method", [lb.MeanField(rule="local"), lb.MeanField(), lb.Ensemble(3)], ids=str)
def test_training_flops_do_not_depend_on_the_prediction(method: lb.Method) -> None:
    bnn, data = lb.bayesianize(network(), method), image_data()
    settings = EvaluationSettings(samples=1, rule=None if bnn.members else "mean", shifts=(), pruning=False)
    costs = evaluate_fully(bnn, data, settings)["costs"]
    bnn.trained_rule = bnn.rule
    trained = evaluate_fully(bnn, data, settings)["costs"]
    products = {"local": 2, "sample": 1, "mean": 1}[bnn.rule] * (bnn.members or 1)
    assert trained["train_flops"] == products * trained["plain"]["predict_flops"]
    assert trained["ours"]["predict_effective_flops"] == costs["ours"]["predict_effective_flops"]


def test_ood_data_with_a_regression_raise_an_error() -> None:
    data = table_data()
    bnn = lb.bayesianize(table_network(), lb.Deterministic(), likelihood=lb.Gaussian())
    expect(lambda: evaluate_fully(bnn, data, ood={"table": data.test}), "regression", "remove ood=")  # type: ignore[dict-item]


def test_a_torch_dataset_raises_an_error() -> None:
    dataset: Any = image_data().test
    bnn = lb.bayesianize(network(), lb.Deterministic())
    expect(lambda: evaluate_fully(bnn, dataset), type(dataset).__name__, "from_datasets")


def test_missing_test_data_raise_an_error() -> None:
    data = from_datasets(TensorDataset(*images(8)), outputs=CLASSES, name="patches")
    expect(lambda: evaluate_fully(lb.bayesianize(network(), lb.Deterministic()), data), "patches", "no test data")
