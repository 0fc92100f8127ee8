"""Tests of the headline: rows of runs and files, the table with papers, costs and targets, and figures."""

import contextlib
import hashlib
import json
import math
import runpy
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.cli.runs import open_run
from leanbayes.data import load
from leanbayes.evaluation.full_evaluation import some
from leanbayes.networks import build

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
TASK = (
    "--data", "digits", "--model", "mlp", "--model-options", "hidden=[24]", "--device", "cpu", "--temperature", "0.01",
    "--quiet",
)  # fmt: skip
METHODS = ("deterministic", "ensemble:members=2", "mc-dropout:rate=0.1", "rigl:density=0.3", "vdp", "ssvi:density=0.3")
PASSES = ("one pass", "one pass, by labels")
SAMPLES = ("3 samples", "3 samples, temperature")
FEW = ("--samples", 3, "--file-samples", 5, "--calibration", 40, "--shift-examples", 12, "--ood", "letters")


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object, folder: Path = EXPERIMENTS) -> dict[str, Any]:
    """Run a script with these arguments, or import it if there are none."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(folder / name), run_name="__main__" if words else "read")


def found(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("headline") / "runs"
    flags = ["--epochs", "1", "--no-report", "--evaluation.shifts", "labels", "--evaluation.no-pruning", "--ood"]
    assert main(["compare", *METHODS, *TASK, *flags, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def files(runs: Path) -> list[tuple[str, Path]]:
    """Two files: without and with the factors of one pass."""
    dense = model(runs / "ssvi-density=0.3-0")
    shared = lb.bayesianize(dense, lb.WeightSharing(components=16)).eval()
    paths = [runs.parent / "bare.lbc", runs.parent / "fitted.lbc"]
    lb.compress(shared, paths[0])
    shared.moment_scale = (1.5, 2.0)
    lb.compress(shared, paths[1])
    return [("Composition", paths[0]), ("With factors", paths[1])]


@pytest.fixture(scope="module")
def headline(runs: Path, files: list[tuple[str, Path]]) -> dict[str, Any]:
    given = [word for name, path in files for word in ("--file", f"{name}={path}")]
    with pytest.MonkeyPatch.context() as monkeypatch:
        words = (runs, *given, *FEW, "--device", "cpu", "--out", runs.parent / "headline.json")
        script(monkeypatch, "headline.py", *words, "--examples", 60)
    return found(runs.parent / "headline.json")


def model(folder: Path) -> lb.BayesianModel:
    return open_run(folder, "cpu").model


def row_of(record: dict[str, Any], name: str, way: str) -> dict[str, Any]:
    (row,) = (row for row in record["results"] if (row["name"], row["way"]) == (name, way))
    return row


def images(split: str) -> tuple[Tensor, Tensor]:
    """Return the examples that the experiment uses."""
    data = load("digits")
    chosen = some(getattr(data, split), 60, 0)
    pairs = [chosen[place] for place in range(60)]
    x, y = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    return data.normalize(x) if data.normalize else x, y


def nll(probs: Tensor, y: Tensor) -> float:
    return -probs.double()[torch.arange(len(y)), y].log().mean().item()


# -- the file in the repository ---------------------------------------------------------------------------------------


def test_the_file_in_the_repository_is_the_scored_one() -> None:
    folder = EXPERIMENTS / "results" / "headline"
    (path,) = folder.glob("*.lbc")
    rows = [row for row in found(folder / "long.json")["results"] if row.get("file")]
    ways = {row["way"] for row in rows if row["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    assert {"30 draws", "100 draws", *PASSES} == ways
    assert {row["bytes"] for row in rows if row["name"] == "composition"} == {path.stat().st_size}
    torch.manual_seed(0)
    bnn = lb.load(path, build("resnet-18", (3, 32, 32), 10)).eval()
    assert bnn.posterior.variance().count_nonzero() < 0.05 * bnn.layout.numel
    image = torch.randn(1, 3, 32, 32)
    for how in ({"samples": 2}, {"rule": "moments"}):
        assert bnn.predict(image, **how).probs.sum().item() == pytest.approx(1, abs=1e-5)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_every_run_has_a_row_per_prediction_mode(headline: dict[str, Any]) -> None:
    assert [(row["name"], row["way"]) for row in headline["results"]] == [
        ("Deterministic", "plain"),
        ("Deterministic", "temperature"),
        ("Ensemble (2)", "members"),
        ("MC dropout", "3 samples"),
        ("RigL 70 %", "plain"),
        *((name, way) for name in ("SSVI 70 %", "VDP++") for way in (*SAMPLES, *PASSES)),
        *((name, way) for name in ("Composition", "With factors") for way in (*SAMPLES, *PASSES, "5 samples")),
    ]


def test_temperature_is_optimal_on_held_out_data(headline: dict[str, Any], runs: Path) -> None:
    network, row = model(runs / "deterministic-0"), row_of(headline, "Deterministic", "temperature")
    (x, y), (test, truth) = images("validation"), images("test")
    logits = network.network(x).detach()
    scores = {t: nll((logits / t).softmax(1), y) for t in torch.linspace(0.02, 3, 3000).tolist()}
    best = min(scores, key=lambda t: scores[t])
    assert row["temperature"] == pytest.approx(best, abs=2e-3)
    probs = (network.network(test) / row["temperature"]).softmax(1)
    assert row["metrics"]["nll"] == pytest.approx(nll(probs, truth), rel=1e-5)
    assert row["metrics"]["accuracy"] == row_of(headline, "Deterministic", "plain")["metrics"]["accuracy"]


def test_the_temperature_of_samples_is_optimal_on_held_out_data(headline: dict[str, Any], runs: Path) -> None:
    bnn, row = model(runs / "ssvi-density=0.3-0"), row_of(headline, "SSVI 70 %", "3 samples, temperature")
    (x, y), (test, truth) = images("validation"), images("test")

    def outputs(x: Tensor) -> Tensor:
        return bnn.predict(x, 3, keep_outputs=True, generator=torch.Generator().manual_seed(0)).outputs

    sampled = outputs(x)
    scores = {t: nll((sampled / t).softmax(-1).mean(0), y) for t in torch.linspace(0.02, 3, 3000).tolist()}
    assert row["temperature"] == pytest.approx(min(scores, key=lambda t: scores[t]), abs=2e-3)
    probs = (outputs(test) / row["temperature"]).softmax(-1).mean(0)
    assert row["metrics"]["nll"] == pytest.approx(nll(probs, truth), rel=1e-5)
    assert row["metrics"]["nll"] != row_of(headline, "SSVI 70 %", "3 samples")["metrics"]["nll"]


def test_rows_match_the_predictions(headline: dict[str, Any], runs: Path, files: list[tuple[str, Path]]) -> None:
    x, y = images("test")
    bare, vdp = (lb.load(files[0][1], model(runs / "deterministic-0").to_deterministic()), model(runs / "vdp-0"))
    for bnn, name, way, how in (
        (bare.eval(), "Composition", "5 samples", {"samples": 5}),
        (vdp, "VDP++", "3 samples", {"samples": 3, "rule": "sample"}),
        (vdp, "VDP++", "one pass", {"rule": "moments"}),
    ):
        probs = bnn.predict(x, generator=torch.Generator().manual_seed(0), **how).probs
        assert row_of(headline, name, way)["metrics"]["nll"] == pytest.approx(nll(probs, y), rel=1e-5)


def test_factors_of_one_pass_are_fitted_if_missing(headline: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in headline["results"] if row["way"] == "one pass"}
    assert {name: row["fitted_here"] for name, row in rows.items()} == {
        "SSVI 70 %": True,
        "VDP++": False,  # trained by one pass
        "Composition": True,
        "With factors": False,
    }
    assert rows["With factors"]["moment_scale"] == [1.5, 2.0]
    assert rows["VDP++"]["moment_scale"] == [1.0, 1.0]
    assert rows["Composition"]["moment_scale"] != [1.0, 1.0]


def test_factors_by_labels_are_optimal_on_held_out_data(
    headline: dict[str, Any], files: list[tuple[str, Path]], runs: Path
) -> None:
    (x, y), (test, truth) = images("validation"), images("test")
    row = row_of(headline, "With factors", "one pass, by labels")
    bnn = lb.load(files[1][1], model(runs / "deterministic-0").to_deterministic()).eval()
    assert bnn.moment_scale == (1.5, 2.0)  # the file is unchanged
    assert row_of(headline, "With factors", "one pass")["moment_scale"] == [1.5, 2.0]
    best = row["moment_scale"]
    around = [(best[0] * a, best[1] * b) for a in (0.8, 1, 1.25) for b in (0.8, 1, 1.25)]
    scores = {}
    for bnn.moment_scale in around:
        scores[bnn.moment_scale] = nll(bnn.predict(x, rule="moments").probs, y)
    assert min(scores.values()) == pytest.approx(scores[tuple(best)], abs=1e-6)
    bnn.moment_scale = tuple(best)
    assert row["metrics"]["nll"] == pytest.approx(nll(bnn.predict(test, rule="moments").probs, truth), rel=1e-5)
    assert row["fitted_to"] == "labels"


def test_bytes_and_numbers_match_the_file(headline: dict[str, Any], runs: Path, files: list[tuple[str, Path]]) -> None:
    row = row_of(headline, "Ensemble (2)", "members")
    assert row["bytes"] == (runs / "ensemble-members=2-0" / "model.safetensors").stat().st_size
    row = row_of(headline, "Composition", "one pass")
    assert row["bytes"] == files[0][1].stat().st_size
    weights = 64 * 24 + 24 * 10
    # Labels of the active weights, the codes, and the biases with the state of the noise.
    assert math.floor(0.3 * weights) + 16 * 2 + 34 <= 1e3 * row["metrics"]["kilo_stored"] < 0.3 * weights + 100


def test_shifts_and_ood_data_are_evaluated_once_per_file(headline: dict[str, Any]) -> None:
    row = row_of(headline, "Composition", "one pass")
    assert {"corruptions:nll", "ood:letters", "predict_peak_mb"} <= row["metrics"].keys()
    assert row["ood"]["letters"]["auroc"] == row["metrics"]["ood:letters"]
    assert sum(row["reliability"][2]) == headline["examples"] == 60
    many = row_of(headline, "Composition", "5 samples")  # on test data only
    assert many["ood"] == {}
    assert "corruptions:nll" not in many["metrics"]


def test_records_contain_no_paths(headline: dict[str, Any], runs: Path) -> None:
    assert str(runs.parent) not in json.dumps(headline)
    words = shlex.split(headline["command"])
    files = ["--file", "Composition=bare.lbc", "--file", "With factors=fitted.lbc"]
    assert words[:8] == ["python", "experiments/headline.py", "runs", *files, "--samples"]


def test_headline_resumes_from_existing_rows(
    headline: dict[str, Any], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, out = runs / "deterministic-0", tmp_path / "headline.json"
    out.write_text(json.dumps({**headline, "results": [{**headline["results"][0], "mark": "kept"}]}))
    script(monkeypatch, "headline.py", place, *FEW, "--examples", 60, "--device", "cpu", "--out", out)
    kept, made = found(out)["results"]
    assert (kept["mark"], made["way"]) == ("kept", "temperature")
    assert made["metrics"]["nll"] == headline["results"][1]["metrics"]["nll"]
    assert found(out)["earlier_commands"] == [headline["command"]]
    with pytest.raises(SystemExit, match="other settings"):
        script(monkeypatch, "headline.py", place, *FEW, "--examples", 30, "--device", "cpu", "--out", out)


def test_runs_may_hold_out_different_shares(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, few = ("fit", "deterministic", *TASK, "--epochs", "1"), ("--shift-examples", 2, "--device", "cpu")
    assert main([*task, "--validation-share", "0.2", "--out", str(tmp_path / "other")]) == 0
    out = tmp_path / "headline.json"
    script(monkeypatch, "headline.py", runs / "deterministic-0", tmp_path / "other", *few, "--out", out)
    held_out = [row["held_out_examples"] for row in found(out)["results"]]
    assert held_out == [len(load("digits", validation_share=share).validation) for share in (0.1, 0.1, 0.2, 0.2)]  # type: ignore[arg-type]
    assert main([*task, "--model-options", "hidden=[8]", "--out", str(tmp_path / "smaller")]) == 0
    with pytest.raises(SystemExit, match="differ in data or network"):
        script(monkeypatch, "headline.py", runs / "deterministic-0", tmp_path / "smaller", *few, "--out", out)


# -- tables and figures -----------------------------------------------------------------------------------------------


@pytest.fixture
def results(headline: dict[str, Any], tmp_path: Path) -> Path:
    """Results with the network and data of the papers, and with three seeds of SSVI."""
    text = json.dumps(headline).replace('"digits"', '"cifar10"').replace('"mlp"', '"resnet-18"')
    text = text.replace("SSVI 70 %", "SSVI 95 %").replace('"density": 0.3', '"density": 0.05')
    record = json.loads(text)
    first = row_of(record, "SSVI 95 %", "3 samples")
    first["metrics"] |= {"accuracy": 0.94, "nll": 0.1}
    for seed, value in ((1, 0.2), (2, 0.3)):
        metrics, recipe = first["metrics"] | {"nll": value}, first["recipe"] | {"seed": seed}
        record["results"].append(first | {"digest": str(seed), "seed": seed, "metrics": metrics, "recipe": recipe})
    record["results"].append(first | {"digest": "long", "recipe": first["recipe"] | {"epochs": 200}})
    folder = tmp_path / "headline"
    folder.mkdir()
    (folder / "all.json").write_text(json.dumps(record))
    (folder / "again.json").write_text(json.dumps(record | {"results": record["results"][:8]}))  # counts once
    return folder


def benchmarks(folder: Path) -> Path:
    """Write made-up benchmark results."""
    one = {"network": "resnet18", "mode": "cudagraphs"}
    passes = {"plain network": (1.0, 1.0), "one pass, shared": (2.4, 2.4), "30 samples, sparse": (30.0, 30.0)}
    rows = [{**one, "variant": name, "ms": ms, "time_ratio": ratio} for name, (ms, ratio) in passes.items()]
    (folder / "one-pass-a.json").write_text(json.dumps({"batch": 250, "rows": rows}))
    (folder / "one-pass-b.json").write_text(json.dumps({"batch": 500, "rows": [{**rows[0], "ms": 9.0}]}))
    steps = [("eager", "subspace 5 %", 7.0), ("cudagraphs", "subspace 5 %", 1.01), ("compiled", "deterministic", 1.0)]
    rows = [{**one, "mode": mode, "variant": name, "time_ratio": ratio} for mode, name, ratio in steps]
    (folder / "step-a.json").write_text(json.dumps({"rows": rows}))
    return folder


def lines_of(table: str) -> dict[str, dict[str, str]]:
    """Return the lines of a table by name; the column "paper" gets the name of the column before it."""
    cut = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    titles = [title if title != "paper" else f"{cut[0][place - 1]}, paper" for place, title in enumerate(cut[0])]
    return {cells[0]: dict(zip(titles, cells, strict=True)) for cells in cut[2:]}


def test_table_has_papers_seeds_and_costs(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script(monkeypatch, "headline_tables.py")
    assert list(tables["headline_tables"](tmp_path, tmp_path)) == []
    table, targets = tables["headline_tables"](results, benchmarks(tmp_path))
    rows = lines_of(table)
    assert list(rows)[:3] == ["Deterministic", "Deterministic, temperature", "Ensemble (2)"]
    ways = [*SAMPLES, "5 samples", *PASSES]
    assert list(rows)[-5:] == [f"With factors, {way}" for way in ways]
    seeds = rows["SSVI 95 % (1 epochs), 3 samples"]
    assert seeds["seeds"] == "3"
    assert seeds["NLL"] == f"**0.2000 ± {4.3027 * 0.1 / math.sqrt(3):.4f}**"  # Student's t of 2 degrees of freedom
    assert (seeds["accuracy"], seeds["accuracy, paper"], seeds["NLL, paper"]) == ("**94.00%**", "93.74%", "0.2180")
    assert (seeds["training × plain"], seeds["epochs"], seeds["ECE, paper"]) == ("1.01", "1", "")
    assert rows["SSVI 95 % (200 epochs), 3 samples"]["seeds"] == "1"
    assert (seeds["of the images"], seeds["temperature"]) == ("90%", "0.01")
    assert "**" not in rows["Deterministic"]["accuracy"]  # an epoch of digits is worse than the paper
    assert rows["Deterministic"]["ms"] == "4.0"  # of 1000 images, of the run with the most variants
    assert rows["Ensemble (2)"]["training × plain"] == "2.00"
    composition = rows["Composition, one pass"]
    assert (composition["ms"], composition["NLL, paper"], composition["epochs"]) == ("9.6", "", "")
    assert rows["Composition, one pass, by labels"]["ms"] == "9.6"
    small = row_of(found(results / "all.json"), "Composition", "one pass")
    assert composition["fitted"] == "mean × {:.2f}, std × {:.2f}".format(*small["moment_scale"])
    tempered = row_of(found(results / "all.json"), "Composition", "3 samples, temperature")
    assert rows["Composition, 3 samples, temperature"]["fitted"] == f"T = {tempered['temperature']:.2f}"
    assert not rows["Composition, 3 samples"]["fitted"]
    assert composition["MB on disk"] == f"{small['bytes'] / 1e6:.2f}"
    assert composition["AUROC letters"] == f"{small['metrics']['ood:letters']:.2%}"
    for way in PASSES:
        assert f"- Composition, {way}: × a plain forward 2.40, target ≤ 2.50: met" in targets
    assert "With factors" not in targets  # which is not called a composition
    assert "- SSVI 95 % (1 epochs), 3 samples: accuracy 94.00%, target ≥ 94.00%: met" in targets
    assert "- SSVI 95 % (1 epochs), 3 samples: NLL 0.2000, target ≤ 0.1900: **missed**" in targets
    assert "Composition, one pass: NLL against 5 samples" in targets


def test_trainings_on_different_shares_have_separate_rows(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = found(results / "all.json")
    long = next(row for row in record["results"] if row["digest"] == "long")
    files = [row for row in record["results"] if row["name"] == "Composition"]
    many = [
        row | {"digest": "many", "held_out_examples": 2500, "metrics": row["metrics"] | {"nll": 9}} for row in files
    ]
    record["results"] += [long | {"digest": "other", "validation_share": 0.05}, *many]
    (results / "all.json").write_text(json.dumps(record))
    (results / "again.json").unlink()
    table, targets = script(monkeypatch, "headline_tables.py")["headline_tables"](results, results)
    rows = lines_of(table)
    assert {"SSVI 95 % (200 epochs on 90%), 3 samples", "SSVI 95 % (200 epochs on 95%), 3 samples"} < {*rows}
    assert "SSVI 95 % (1 epochs), 3 samples" in rows  # no other training has as many epochs
    few = files[0]["held_out_examples"]
    places = [list(rows).index(f"Composition ({count} held out), one pass") for count in (few, 2500)]
    assert places == sorted(places)
    assert rows["Composition (2500 held out), 5 samples"]["NLL"] == "9.0000"
    assert "Composition (2500 held out), one pass: NLL against 5 samples 9.0000, target ≤ 9.0000: met" in targets


def test_label_does_not_repeat_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    group = script(monkeypatch, "headline_rows.py")["Group"]
    labels = [group("", way, [], "file, for one pass").label for way in ("30 samples", *PASSES)]
    assert labels == ["file, for one pass, 30 samples", "file, for one pass", "file, for one pass, by labels"]


def with_comparison(results: Path, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder with one result file, its content, and the start of a comparison of the same task."""
    folder = tmp_path / "results" / "headline"
    shutil.copytree(results, folder)
    (folder / "again.json").unlink()
    given = found(folder / "all.json")
    record = {key: given[key] for key in ("model", "source", "machine", "versions")}
    return folder, given, record | {"command": "leanbayes compare"}


def test_baselines_of_a_comparison_are_included(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, given, record = with_comparison(results, tmp_path)
    given["results"] = [row for row in given["results"] if row["name"] != "MC dropout"]
    (folder / "all.json").write_text(json.dumps(given))
    one = {
        "seed": 0,
        "method": {"type": "MCDropout", "rate": 0.1},
        "scores": {"accuracy": 0.5, "nll": 1.5, "ece": 0.1, "brier": 0.6, "examples": 60},
        "shifts": [
            {"family": kind, "scores": {"nll": nll}}
            for kind, nll in (("none", 9), ("corruptions", 2), ("corruptions", 4))
        ],
        "ood": {"letters": {"by": {"entropy": {"auroc": 0.75}}}},
        "costs": {"stored": 5000, "peak_memory_bytes": 3e6, "file_bytes": 2_000_000, "ours": {"samples": 30}},
    }
    recipe = given["results"][0]["recipe"]
    record["source"] = {**record["source"], "validation_share": 0.1}
    record |= {"recipe": recipe, "results": [{**one, "name": "mc-dropout"}]}
    (tmp_path / "results" / "digits_methods.json").write_text(json.dumps(record))
    tables = script(monkeypatch, "headline_tables.py")
    row = lines_of(next(tables["headline_tables"](folder, tmp_path)))["MC dropout, 30 samples"]
    assert [row[name] for name in ("accuracy", "corrupted NLL", "AUROC letters", "MB on disk", "peak MB")] == [
        "50.00%",
        "3.000",
        "75.00%",
        "2.00",
        "3",
    ]


def test_seeds_of_a_comparison_are_grouped_with_their_training(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, given, record = with_comparison(results, tmp_path)
    plain = next(row for row in given["results"] if row["name"] == "Deterministic" and row["way"] == "plain")
    record["source"] = {**record["source"], "validation_share": plain["validation_share"]}
    one = {
        "method": plain["method"],
        "scores": {"accuracy": 0.25, "nll": 1.5, "ece": 0.1, "brier": 0.6, "examples": 60},
        "shifts": [],
        "ood": {},
        "costs": {"stored": 5000, "peak_memory_bytes": 3e6, "file_bytes": 2_000_000, "ours": {"samples": 1}},
    }
    trained = [{**one, "seed": seed} for seed in (plain["seed"], plain["seed"] + 1)]  # the first is already known
    record |= {"recipe": plain["recipe"], "results": trained}
    (tmp_path / "results" / "digits_methods_again.json").write_text(json.dumps(record))
    tables = script(monkeypatch, "headline_tables.py")
    row = lines_of(next(tables["headline_tables"](folder, tmp_path)))["Deterministic"]
    assert row["seeds"] == "2"
    assert row["accuracy"] == f"{(plain['metrics']['accuracy'] + 0.25) / 2:.2%}"  # the mean of the two
    assert row["MB on disk"] == f"{(plain['bytes'] + 2_000_000) / 2e6:.2f}"


def test_training_times_use_epochs_if_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = script(monkeypatch, "headline_tables.py")["Times"]
    ratios = {"deterministic": 1.0, "ssvi:density=0.05": 1.2, "mean-field:prior.scale=0.05": 1.1}
    (benchmarks(tmp_path) / "epoch-a.json").write_text(json.dumps({"network": "resnet-18", "ratios": ratios}))
    of_training = times(tmp_path).of_training
    assert of_training({"type": "SSVI", "density": 0.05}) == 1.2
    assert of_training({"type": "MeanField", "rule": "sample"}) == 1.1
    assert of_training({"type": "Ensemble", "members": 5}) == 5.0
    assert math.isnan(of_training({"type": "SSVI", "density": 0.1}))


def test_figures_show_the_rows_of_the_readme_and_stay_small(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "figures" / "headline"
    shutil.copytree(results, folder)

    def names(figure: str) -> list[str]:
        script(monkeypatch, "headline_figures.py", folder)
        path = folder / f"{figure}.svg"
        assert path.stat().st_size < 100_000
        return [element.text or "" for element in ElementTree.parse(path).findall(".//{*}text")]

    for start in ("Deterministic: ECE", "Composition, one pass, by labels: ECE", "Composition, 3 samples: ECE"):
        assert any(name.startswith(start) for name in names("reliability"))
    assert {"Deterministic", "VDP++, one pass, by labels"} < {*names("size-nll")}
    assert not {"Ensemble (2)", "Composition, one pass"} & {*names("size-nll")}  # Ensemble (5) and composition would be
    for path in folder.glob("*.json"):  # without those that it shows, all
        record = found(path)
        record["results"] = [row for row in record["results"] if row["name"] in ("Ensemble (2)", "Composition")]
        path.write_text(json.dumps(record))
    assert {"Ensemble (2)", "Composition, one pass"} < {*names("size-nll")}


def test_point_labels_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    labels_at = script(monkeypatch, "headline_figures.py")["labels_at"]
    points = [(300.0, 200.0), (302.0, 201.0), (301.0, 199.0), (600.0, 60.0)]
    elements = [ElementTree.fromstring(part) for part in labels_at(points, ["one", "two", "three", "a long name"])]
    places = [(float(one.attrib["x"]), float(one.attrib["y"]), one.text or "") for one in elements if one.tag == "text"]
    assert [text for _, _, text in places] == ["one", "two", "three", "a long name"]
    for number, (x, y, text) in enumerate(places):
        assert x + 5.3 * len(text) < 640
        for other_x, other_y, other in places[:number]:
            assert abs(y - other_y) > 9 or x + 5 * len(text) < other_x or other_x + 5 * len(other) < x


# -- times to predict -------------------------------------------------------------------------------------------------


def test_benchmark_variants_match_predictions_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script(monkeypatch, "one_pass.py", folder=ROOT / "benchmarks")
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    chosen = ["one pass, sparse", "one pass, shared", "30 samples, partial", "ensemble of 5"]
    with torch.no_grad(), contextlib.ExitStack() as stack:
        ready = benchmark["variants"]("lenet-5", chosen, benchmark["Ways"](x, "eager", stack))
        net = benchmark["build"]("lenet-5", (1, 28, 28), 10, seed=0).eval().to(memory_format=torch.channels_last)
        torch.testing.assert_close(ready["plain network"].run(), net(x))
        bnn = benchmark["MODELS"]["sparse"](net).eval()
        with bnn.using("moments"):
            expected = bnn(x)
        for _ in range(2):  # the weights are there for more than one pass
            loc, variance = ready["one pass, sparse"].run()
            torch.testing.assert_close(loc, expected.loc)
            torch.testing.assert_close(variance, expected.variance)
        values, _ = ready["one pass, shared"].weights()
        assert all(isinstance(value, lb.Moments) for value in values)
        outputs = ready["30 samples, partial"].run()
        assert len(outputs) == 30
        assert not torch.equal(outputs[0], outputs[1])
        first, *others = ready["ensemble of 5"].run()
        torch.testing.assert_close(first, net(x))
        assert len(others) == 4
