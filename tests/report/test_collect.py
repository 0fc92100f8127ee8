"""The document of evaluated runs is true of all of them, even if some lack parts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from evaluated_cases import changed, run, runs
from evaluation_cases import (
    image_data,
    network,
    segmentation_data,
    segmentation_network,
    table_data,
    table_network,
)
from training_cases import expect

import leanbayes as lb
from leanbayes.data import Data
from leanbayes.evaluation import EvaluationSettings, evaluate_fully
from leanbayes.report import Document, EvaluatedRun, document_of, evaluate_for_report, render
from leanbayes.report.columns import table
from leanbayes.report.figures.weights import model_figures
from leanbayes.report.galleries import galleries_of
from leanbayes.training import fit, read_record

TWO = {"mean-field": 0.1, "deterministic": 0.0}


def keys(document: Document) -> dict[str, list[str]]:
    return {section.id: [one.figure.key for one in (*section.figures, *section.more)] for section in document.sections}


# -- the document -----------------------------------------------------------------------------------------------------


def test_a_document_has_all_results() -> None:
    some = runs(TWO)
    document = document_of(some, command="leanbayes compare")
    assert document.title == "digits, mlp"
    assert document.subtitle == "2 methods, 3 seeds, 200 test examples"
    assert document.methods == ("mean-field", "deterministic")
    assert document.table == table(some)
    found = keys(document)
    assert list(found) == ["confidence", "shift", "ood", "model"]
    assert found["confidence"] == ["reliability", "risk-coverage", "class-reliability"]
    assert found["ood"] == ["detection", "entropies"]
    assert found["model"] == ["pruning", "history"]
    for one in document.figures:
        assert list(one.by_method) == ["mean-field", "deterministic"]
    assert [one.figure.key for one in document.sections[1].figures] == ["corruptions-accuracy", "noise-entropy"]
    assert len(document.sections[1].more) == 10
    assert document.chosen == "mean-field"
    assert document.shown == ("mean-field", "deterministic")
    assert document.verdicts.keys() == {"mean-field", "deterministic"}
    assert document.facts == {
        "data": "digits",
        "network": "mlp",
        "seeds": "0, 1, 2",
        "training": "5 epochs, batch 16, temperature 1.0",
        "test examples": "200; under shift 100",
        "samples per prediction": "30",
        "analysis of variance": document.facts["analysis of variance"],  # tested below
        "versions": "leanbayes 0.1.0, torch 2.13.0",
        "machine": "Linux, x86_64, 4 cores",
        "command": "leanbayes compare",
    }


def test_a_custom_title_and_singular_counts() -> None:
    document = document_of([run()], title="Mine")
    assert document.title == "Mine"
    assert document.subtitle == "1 method, 1 seed, 200 test examples"
    assert document.facts["command"] == "leanbayes fit --seed 0"


def test_facts_in_which_runs_differ_are_listed() -> None:
    other = changed(run("b"), "record", "config", "recipe", "epochs", value=50)
    other = changed(other, "record", "config", "model", "name", value="cnn")
    other = changed(other, "record", "machine", "gpus", value=["H200", "H200"])
    other = changed(other, "evaluation", "costs", "ours", "samples", value=8)
    other = changed(other, "evaluation", "notes", value=["No letters."])
    document = document_of([run("a"), other])
    assert document.title == "digits, mlp; cnn"
    facts = document.facts
    assert facts["network"] == "mlp; cnn"
    assert facts["training"].startswith("5 epochs, batch 16, temperature 1.0; 50 epochs")
    assert facts["samples per prediction"] == "30; 8"
    assert facts["machine"] == "Linux, x86_64, 4 cores; Linux, H200, H200, 4 cores"
    assert facts["left out"] == "No letters."


def test_a_run_made_in_python_may_have_no_names() -> None:
    one = run()
    for path in (("record", "config", "model"), ("record", "config", "classes")):
        one = changed(one, *path, value=None)
    for name in ("figures", "galleries", "notes"):  # which the command line adds
        one = changed(one, "evaluation", name, value=None)
    document = document_of([one])
    assert document.facts["network"] == "custom network"
    drawn = document.sections[0].more[0].by_method["mean-field"]
    assert all(series.name.startswith("class ") for series in drawn)
    assert keys(document)["model"] == ["pruning", "history"]


def test_the_names_of_classes_are_not_changed() -> None:
    names = ["<b>", "a&b", 'say "no"', "a\nb", "Ωmega", "</script>"]
    document = document_of([changed(run(), "record", "config", "classes", value=names)])
    drawn = document.sections[0].more[0].by_method["mean-field"]
    assert len({series.name for series in drawn} & {*names}) == 5
    assert "<b>" not in render(document)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("record", "config", "data"), "mnist", ["trained on digits and mnist", "separately"]),
        (("record", "config", "examples"), "xyz", ["trained on different examples"]),
        (("evaluation", "scores", "examples"), 201, ["evaluated on different examples"]),
    ],
)
def test_runs_of_different_tasks_raise_an_error(path: tuple[str, ...], value: Any, words: list[str]) -> None:
    expect(lambda: document_of([run("a"), changed(run("b"), *path, value=value)]), *words)


def test_no_run_and_repeated_runs_raise_errors() -> None:
    expect(lambda: document_of([]), "at least one run")
    expect(lambda: document_of([run("a", 1), run("a", 0), run("a", 1)]), "same method and seed")


# -- runs that lack parts ----------------------------------------------------------------------------------------------


def test_runs_without_ood_data_and_shifts_are_shown_with_others() -> None:
    some = runs(TWO)
    some[1] = changed(some[1], "evaluation", "ood", "letters", value=None)
    some[3:] = [
        changed(changed(one, "evaluation", "ood", value={}), "evaluation", "shifts", value=[]) for one in some[3:]
    ]
    document = document_of(some)
    rows = {row.name: row.cells for row in document.table.rows}
    assert math.isnan(rows["mean-field"]["ood:letters"].mean)  # one of its runs has none
    assert math.isfinite(rows["mean-field"]["ood:noisy"].mean)
    assert math.isnan(rows["deterministic"]["ood:noisy"].mean)
    assert math.isnan(rows["deterministic"]["corruptions:nll"].mean)
    assert not any(key.startswith(("ood:", "corruptions:", "noise:")) for key in document.table.winners)
    figures = {one.figure.key: one.by_method for one in document.figures}
    assert list(figures["detection"]) == ["mean-field"]
    assert {series.x for series in figures["detection"]["mean-field"]} == {("noisy",)}
    assert [series.name for series in figures["entropies"]["deterministic"]] == ["correct", "wrong"]
    assert list(figures["noise-nll"]) == ["mean-field"]
    assert render(document)


# -- trained models ---------------------------------------------------------------------------------------------------


def evaluated_run(data: Data, build: Any, method: lb.Method, seed: int, folder: Path) -> EvaluatedRun:
    out = folder / f"{type(method).__name__}-{seed}"
    recipe: dict[str, Any] = {"epochs": 3, "batch_size": 8, "temperature": 0.01, "device": "cpu", "progress": False}
    bnn = fit(build(), method, data, out=out, notes={"classes": data.classes}, seed=seed, **recipe)
    found = evaluate_fully(bnn, data, EvaluationSettings(samples=2, shifts=("noise", "labels")))
    figures = [figure.to_json() for figure in model_figures(bnn, found["scores"], found["costs"]["ours"])]
    galleries = galleries_of(bnn, data, found)
    plain = json.loads(json.dumps({**found, "figures": figures, "galleries": galleries}))
    return EvaluatedRun(type(method).__name__, seed, read_record(out), plain)


def test_a_model_of_a_custom_loop_is_reported_like_one_of_fit(tmp_path: Path) -> None:
    data, settings = image_data(), EvaluationSettings(samples=2, shifts=("noise",))
    recipe = lb.Recipe(epochs=1, temperature=0.01, device="cpu")
    bnn = fit(network(), lb.MeanField(), data, recipe=recipe, out=tmp_path / "run", progress=False)
    own = evaluate_for_report("own", bnn, data, settings, ood={"same": data.test})  # type: ignore[dict-item]
    known = evaluate_for_report("known", bnn, data, settings, record=read_record(tmp_path / "run"), seed=1)
    assert (own.seed, known.seed) == (0, 1)
    assert own.scores == known.scores
    alone, both = document_of([own]), document_of([known])
    assert alone.facts["training"] == "custom training loop"
    assert both.facts["training"].startswith("1 epoch, ")
    assert {"versions", "machine", "command"}.isdisjoint(alone.facts)
    assert {"versions", "machine", "command"} <= both.facts.keys()
    columns = [{column.key for column in one.table.columns} for one in (alone, both)]
    assert columns[1] - columns[0] == {"epoch_ms", "train_gflops", "train_flops_ratio"}
    assert columns[0] - columns[1] == {"ood:same", "ood"}
    assert keys(alone)["model"] == ["pruning", "weight-plane", "layer-shares"]  # nothing to compare the size with
    assert len(alone.verdicts["own"]) == len(both.verdicts["known"]) == 4
    assert [gallery.title for gallery in alone.galleries] == [gallery.title for gallery in both.galleries]
    assert "<figure" in render(alone)


@pytest.mark.parametrize(
    ("data", "build", "sections", "columns"),
    [
        (
            image_data(),
            network,
            {"confidence", "shift", "ood", "model"},
            {"accuracy", "aurc", "noise:accuracy", "noise:spearman"},
        ),
        (
            table_data(),
            table_network,
            {"confidence", "shift", "model"},
            {"rmse", "crps", "coverage_95", "interval_error", "noise:rmse", "noise:spearman"},
        ),
        (
            segmentation_data(),
            segmentation_network,
            {"confidence", "shift", "segmentation", "model"},
            {"accuracy", "miou", "noise:miou", "noise:spearman"},
        ),
    ],
    ids=["images", "table", "segmentation"],
)
def test_runs_of_every_task_make_a_page(
    data: Data, build: Any, sections: set[str], columns: set[str], tmp_path: Path
) -> None:
    some = [
        evaluated_run(data, build, method, seed, tmp_path)
        for method in (lb.MeanField(), lb.Deterministic())
        for seed in (0, 1)
    ]
    document = document_of(some)
    found = keys(document)
    assert set(found) == sections
    assert columns <= {column.key for column in document.table.columns}
    assert found["model"] == ["size-nll", "pruning", "weight-plane", "layer-shares", "history"]
    sizes = {one.figure.key: one for one in document.figures}["size-nll"].by_method
    for method, series in sizes.items():
        nll = [one.scores["nll"] for one in some if one.method == method]
        assert series[0].y == pytest.approx(nll)
    assert document.table.scaled == ("" if data.task == "segmentation" else "Deterministic + temperature")
    assert len(document.verdicts["MeanField"]) == (3 if data.task == "segmentation" else 4)
    if data.task == "regression":
        assert document.galleries == ()
    page = render(document)
    assert page.count("<figure") >= sum(map(len, found.values()))
