"""The model card says what the evaluation says, in words and in the metadata that the Hub reads."""

import math
from typing import Any

import evaluated_cases
import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.data import from_datasets
from leanbayes.evaluation import EvaluationSettings
from leanbayes.report import EvaluatedRun, evaluate_for_report, model_card
from leanbayes.report.verdicts import verdicts_on

BNN = lb.bayesianize(nn.Linear(4, 3), lb.MeanField(), seed=0)


def section(card: str, title: str) -> str:
    return card.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def own() -> EvaluatedRun:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = from_datasets(TensorDataset(x, x.argmax(1) % 3), test=TensorDataset(x, x.argmax(1) % 3), name="mine")
    settings = EvaluationSettings(shifts=(), pruning=False, samples=3)
    return evaluate_for_report("mean-field", BNN, data, settings)


def test_the_metadata_have_the_scores(own: EvaluatedRun) -> None:
    found: Any = ModelCard(model_card(own, BNN, "me/mine", license="mit"))
    assert found.data.to_dict()["license"] == "mit"
    results = {one.metric_type: one for one in found.data.eval_results}
    for name in ("accuracy", "nll", "ece", "brier"):
        assert results[name].metric_value == own.scores[name]
        assert (results[name].dataset_name, results[name].dataset_split) == ("mine", "test")
    assert found.data.model_name == "mine"


def test_a_model_of_a_custom_loop_is_described(own: EvaluatedRun) -> None:
    card = model_card(own, BNN, "me/mine")
    wrong = round(60 * (1 - own.scores["accuracy"]))
    assert f"It makes {wrong} mistakes" in section(card, "What it is unsure about")
    assert "| accuracy | {:.2%} |".format(own.scores["accuracy"]) in section(card, "Scores")
    assert "3 samples (rule sample)" in section(card, "Scores")
    assert "custom loop" in section(card, "Method")
    limits = section(card, "Limits")
    for words in ("not evaluated on unknown inputs", "not evaluated on corrupted", "Nothing says when to ask"):
        assert words in limits
    assert 'lb.from_pretrained("me/mine", make_network())' in section(card, "Use")
    assert "nan" not in card.lower().replace("finance", "")


def test_the_verdicts_of_the_report_are_in_the_card() -> None:
    run = evaluated_cases.run()
    card = model_card(run, BNN, "me/mine")
    for verdict in verdicts_on([run]):
        assert verdict.answer in card
    parsed: Any = ModelCard(card)
    results = {one.metric_name: one.metric_value for one in parsed.data.eval_results}
    for name, one in run.evaluation["ood"].items():
        assert results[f"AUROC {name}"] in {by["auroc"] for by in one["by"].values()}
    assert all(math.isfinite(value) for value in results.values())
    assert "not evaluated on" not in section(card, "Limits")


def test_a_policy_is_described(own: EvaluatedRun) -> None:
    bnn = lb.bayesianize(nn.Linear(4, 3), lb.MeanField(), seed=0)
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    lb.decide.fit(bnn, [(x, x.argmax(1) % 3)], false_alarms=0.2, samples=3)
    card = model_card(own, bnn, "me/mine")
    assert str(bnn.policy) in section(card, "What it is unsure about")
    assert "hold for inputs like the held-out ones" in section(card, "Limits")
