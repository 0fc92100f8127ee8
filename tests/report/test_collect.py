"""From assessed runs to the document: what it says is true of all of them, whatever some of them lack."""

import dataclasses
import io
import json
import math
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from assessed_cases import changed, run, runs
from evaluation_cases import (
    image_data,
    network,
    segmentation_data,
    segmentation_network,
    table_data,
    table_network,
)
from PIL import Image
from scipy import stats
from training_cases import expect

import leanbayes as lb
from leanbayes.data import Data
from leanbayes.evaluation import Look, assess
from leanbayes.report import AssessedRun, Document, document_of, render, run_of
from leanbayes.report.columns import table
from leanbayes.report.pictures import galleries_of
from leanbayes.training import fit, read_record

TWO = {"mean-field": 0.1, "deterministic": 0.0}


def keys(document: Document) -> dict[str, list[str]]:
    return {section.id: [one.figure.key for one in section.figures] for section in document.sections}


# -- the whole --------------------------------------------------------------------------------------------------------


def test_a_document_has_all_that_was_found() -> None:
    some = runs(TWO)
    document = document_of(some, command="leanbayes compare")
    assert document.title == "digits, mlp"
    assert document.subtitle == "2 methods, 3 seeds, 200 test examples"
    assert document.methods == ("mean-field", "deterministic")
    assert document.table == table(some)
    found = keys(document)
    assert list(found) == ["calibration", "selective", "shift", "ood", "pruning", "training"]
    assert found["ood"] == ["entropies", "detection"]
    for section in document.sections:
        for one in section.figures:
            assert list(one.by_method) == ["mean-field", "deterministic"]
    assert document.facts == {
        "data": "digits",
        "network": "mlp",
        "seeds": "0, 1, 2",
        "training": "5 epochs, batch 16, temperature 1.0",
        "test examples": "200; under shift 100",
        "draws of a prediction": "as the method says",
        "analysis of variance": document.facts["analysis of variance"],  # tested below
        "versions": "leanbayes 0.1.0, torch 2.13.0",
        "machine": "Linux, x86_64, 4 cores",
        "command": "leanbayes compare",
    }


def test_a_title_and_numbers_of_one_are_as_they_should_be() -> None:
    document = document_of([run()], title="Mine")
    assert document.title == "Mine"
    assert document.subtitle == "1 method, 1 seed, 200 test examples"
    assert document.facts["command"] == "leanbayes fit --seed 0"


def test_where_runs_differ_in_a_fact_all_of_it_is_told() -> None:
    other = changed(run("b"), "record", "config", "recipe", "epochs", value=50)
    other = changed(other, "record", "config", "model", "name", value="cnn")
    other = changed(other, "record", "machine", "gpus", value=["H200", "H200"])
    other = changed(other, "assessment", "look", "samples", value=8)
    other = changed(other, "assessment", "notes", value=["No letters."])
    document = document_of([run("a"), other])
    assert document.title == "digits, mlp; cnn"
    facts = document.facts
    assert facts["network"] == "mlp; cnn"
    assert facts["training"].startswith("5 epochs, batch 16, temperature 1.0; 50 epochs")
    assert facts["draws of a prediction"] == "as the method says; 8"
    assert facts["machine"] == "Linux, x86_64, 4 cores; Linux, H200, H200, 4 cores"
    assert facts["left out"] == "No letters."


def test_a_run_made_in_python_may_have_no_names() -> None:
    one = run()
    for path in (("record", "config", "model"), ("record", "config", "classes")):
        one = changed(one, *path, value=None)
    for name in ("figures", "galleries", "notes"):  # which the command line adds
        one = changed(one, "assessment", name, value=None)
    document = document_of([one])
    assert document.facts["network"] == "a network of one's own"
    drawn = document.sections[0].figures[2].by_method["mean-field"]
    assert all(series.name.startswith("class ") for series in drawn)
    assert "weights" not in keys(document)


def test_the_names_of_classes_are_kept_as_they_are() -> None:
    names = ["<b>", "a&b", 'say "no"', "a\nb", "Ωmega", "</script>"]
    document = document_of([changed(run(), "record", "config", "classes", value=names)])
    drawn = document.sections[0].figures[2].by_method["mean-field"]
    assert len({series.name for series in drawn} & {*names}) == 5
    assert "<b>" not in render(document)


# -- what cannot be compared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("record", "config", "data"), "mnist", ["trained on digits and mnist", "one by one"]),
        (("record", "config", "examples"), "xyz", ["trained on different examples"]),
        (("assessment", "scores", "examples"), 201, ["scored on different examples"]),
    ],
)
def test_runs_of_different_tasks_are_refused(path: tuple[str, ...], value: Any, words: list[str]) -> None:
    expect(lambda: document_of([run("a"), changed(run("b"), *path, value=value)]), *words)


def test_no_run_and_the_same_run_twice_are_refused() -> None:
    expect(lambda: document_of([]), "at least one run")
    expect(lambda: document_of([run("a", 1), run("a", 0), run("a", 1)]), "same method and seed")


# -- what some runs lack ----------------------------------------------------------------------------------------------


def test_runs_with_other_data_and_shifts_than_others_are_shown_together() -> None:
    some = runs(TWO)
    some[1] = changed(some[1], "assessment", "ood", "letters", value=None)
    some[3:] = [
        changed(changed(one, "assessment", "ood", value={}), "assessment", "shifts", value=[]) for one in some[3:]
    ]
    document = document_of(some)
    rows = {row.name: row.cells for row in document.table.rows}
    assert math.isnan(rows["mean-field"]["ood:letters"].mean)  # one of its runs has none
    assert math.isfinite(rows["mean-field"]["ood:noisy"].mean)
    assert math.isnan(rows["deterministic"]["ood:noisy"].mean)
    assert math.isnan(rows["deterministic"]["corruptions:nll"].mean)
    assert not any(key.startswith(("ood:", "corruptions:", "noise:")) for key in document.table.winners)
    figures = {one.figure.key: one.by_method for section in document.sections for one in section.figures}
    assert list(figures["detection"]) == ["mean-field"]
    assert {series.x for series in figures["detection"]["mean-field"]} == {("noisy",)}
    assert [series.name for series in figures["entropies"]["deterministic"]] == ["right", "wrong"]
    assert list(figures["noise-nll"]) == ["mean-field"]
    assert render(document)


# -- the summary ------------------------------------------------------------------------------------------------------


def test_the_summary_names_who_is_better_in_what() -> None:
    document = document_of(runs({"mean-field": 0.1, "deterministic": 0.0, "ensemble": 0.0}))
    won: dict[str, list[str]] = {}
    for column in document.table.columns:
        best = document.table.winners.get(column.key, ())
        named = column.key in ("accuracy", "nll", "ece", "corruptions:accuracy", "corruptions:nll", "noise:nll")
        if len(best) == 1 and (named or column.key.startswith("ood:")):
            won.setdefault(best[0], []).append(column.title)
    assert {"accuracy", "NLL", "corrupted NLL"} <= {*won["mean-field"]}
    assert not any("file" in title or "MFLOPs" in title for titles in won.values() for title in titles)
    test = stats.f_oneway(*(row.cells["nll"].values for row in document.table.rows))
    assert document.summary == (
        *(f"{name} is shown to be better than all others in {', '.join(titles)}." for name, titles in won.items()),
    )
    variance = f"of the NLL over methods: F = {test.statistic:.3g}, p = {test.pvalue:.2g}"
    assert document.facts["analysis of variance"] == variance


NOBODY = "No method is shown to be better than all others in any figure of quality."


def claims(document: Document) -> list[str]:
    return [sentence for sentence in document.summary if "better than all others" in sentence and sentence != NOBODY]


def test_no_winner_is_named_that_the_statistics_do_not_give() -> None:
    for some in (
        runs({"a": 0.0, "b": 0.0}, seeds=(0,)),  # one seed
        [run("a", 0, 0.1), run("a", 1, 0.1), run("b", 0), run("b", 2)],  # different seeds
        [dataclasses.replace(one, method=name) for name in "ab" for one in runs({"same": 0.1})],  # all alike
    ):
        document = document_of(some)
        assert claims(document) == []
        assert document.summary[0] == NOBODY


def test_two_that_share_a_place_are_not_named() -> None:
    values = {"a": [0.10, 0.20, 0.30], "b": [0.16, 0.25, 0.37], "c": [0.10, 0.40, 0.20]}
    some = [
        changed(run(method, seed), "assessment", "scores", "crps", value=value)
        for method, of in values.items()
        for seed, value in enumerate(of)
    ]
    document = document_of(some)
    assert document.table.winners["crps"] == ("a", "c")
    assert not any("CRPS" in sentence for sentence in document.summary)


def test_better_than_all_others_is_not_said_where_some_have_no_figure() -> None:
    values = {"a": [0.10, 0.20, 0.30], "b": [0.16, 0.25, 0.37], "c": [math.nan] * 3}
    some = [
        changed(run(method, seed), "assessment", "scores", "crps", value=value)
        for method, of in values.items()
        for seed, value in enumerate(of)
    ]
    document = document_of(some)
    assert document.table.winners["crps"] == ("a",)
    assert not any("CRPS" in sentence for sentence in document.summary)


def test_one_method_is_compared_with_nothing() -> None:
    assert document_of(runs({"a": 0.0})).summary == ()


def test_a_likelihood_that_a_method_lacks_has_no_analysis_of_variance() -> None:
    some = [
        changed(one, "assessment", "scores", "nll", value=math.nan) if one.method == "b" else one
        for one in runs({"a": 0.0, "b": 0.0})
    ]
    assert not any("variance" in sentence for sentence in document_of(some).summary)


# -- pictures ---------------------------------------------------------------------------------------------------------


def gallery(title: str, caption: str) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("L", (3, 2)).save(file, "PNG")
    picture = {
        "pngs": [{"data": b64encode(file.getvalue()).decode(), "label": "image"}],
        "caption": caption,
        "alt": "A",
    }
    return {"title": title, "caption": "Look.", "pictures": [picture]}


def test_pictures_of_one_kind_stand_together_and_are_those_of_the_first_seed() -> None:
    some = []
    for one in runs(TWO, seeds=(1, 0)):
        own = [gallery(title, f"{one.method} {one.seed}") for title in ("Mistakes", "Unsure")]
        some.append(changed(one, "assessment", "galleries", value=own))
    found = document_of(some).galleries
    assert [(one.title, one.method, one.pictures[0].caption) for one in found] == [
        ("Mistakes", "mean-field", "mean-field 0"),
        ("Mistakes", "deterministic", "deterministic 0"),
        ("Unsure", "mean-field", "mean-field 0"),
        ("Unsure", "deterministic", "deterministic 0"),
    ]
    assert found[0].pictures[0].pngs[0].size == (3, 2)


# -- of trained models ------------------------------------------------------------------------------------------------


def looked_at(data: Data, build: Any, method: lb.Method, seed: int, folder: Path) -> AssessedRun:
    out = folder / f"{type(method).__name__}-{seed}"
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 8, "seed": seed, "device": "cpu", "progress": False}
    bnn = fit(build(), method, data, out=out, notes={"classes": data.classes}, **settings)
    found = assess(bnn, data, Look(samples=2, shifts=("noise", "labels")))
    figures = [figure.to_json() for figure in method.figures(bnn, found["scores"], found["costs"]["ours"])]
    galleries = galleries_of(bnn, data, found)
    plain = json.loads(json.dumps({**found, "figures": figures, "galleries": galleries}))
    return AssessedRun(type(method).__name__, seed, read_record(out), plain)


def test_a_model_of_a_loop_of_ones_own_is_reported_as_one_of_fit(tmp_path: Path) -> None:
    data, look = image_data(), Look(samples=2, shifts=("noise",))
    bnn = fit(network(), lb.MeanField(), data, out=tmp_path / "run", epochs=1, device="cpu", progress=False)
    own = run_of("own", bnn, data, look, ood={"same": data.test})  # type: ignore[dict-item]
    known = run_of("known", bnn, data, look, record=read_record(tmp_path / "run"), seed=1)
    assert (own.seed, known.seed) == (0, 1)
    assert own.scores == known.scores
    alone, both = document_of([own]), document_of([known])
    assert alone.facts["training"] == "in a loop of one's own"
    assert both.facts["training"].startswith("1 epoch, ")
    assert {"versions", "machine", "command"}.isdisjoint(alone.facts)
    assert {"versions", "machine", "command"} <= both.facts.keys()
    columns = [{column.key for column in one.table.columns} for one in (alone, both)]
    assert columns[1] - columns[0] == {"epoch_ms", "train_gflops", "train_flops_ratio"}
    assert columns[0] - columns[1] == {"ood:same"}
    assert keys(alone)["weights"] == ["size-nll", "weight-plane", "layer-shares"]
    assert [gallery.title for gallery in alone.galleries] == [gallery.title for gallery in both.galleries]
    assert "<figure" in render(alone)


@pytest.mark.parametrize(
    ("data", "build", "sections", "columns"),
    [
        (
            image_data(),
            network,
            {"calibration", "selective", "shift", "ood", "weights", "pruning", "training"},
            {"accuracy", "aurc", "noise:accuracy", "noise:spearman"},
        ),
        (
            table_data(),
            table_network,
            {"calibration", "shift", "weights", "pruning", "training"},
            {"rmse", "crps", "coverage_95", "interval_error", "noise:rmse", "noise:spearman"},
        ),
        (
            segmentation_data(),
            segmentation_network,
            {"calibration", "shift", "segmentation", "weights", "pruning", "training"},
            {"accuracy", "miou", "noise:miou", "noise:spearman"},
        ),
    ],
    ids=["images", "table", "segmentation"],
)
def test_runs_of_every_task_make_a_page(
    data: Data, build: Any, sections: set[str], columns: set[str], tmp_path: Path
) -> None:
    some = [
        looked_at(data, build, method, seed, tmp_path)
        for method in (lb.MeanField(), lb.Deterministic())
        for seed in (0, 1)
    ]
    document = document_of(some)
    found = keys(document)
    assert set(found) == sections
    assert columns <= {column.key for column in document.table.columns}
    assert found["weights"] == ["size-nll", "weight-plane", "layer-shares"]
    sizes = {one.figure.key: one for section in document.sections for one in section.figures}["size-nll"].by_method
    for method, series in sizes.items():
        nll = [one.scores["nll"] for one in some if one.method == method]
        assert series[0].y == pytest.approx(nll)
    assert bool(document.galleries) == (data.task != "regression")
    page = render(document)
    assert page.count("<figure") >= sum(map(len, found.values()))
