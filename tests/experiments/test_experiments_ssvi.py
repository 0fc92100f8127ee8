"""Tests of the experiments on SSVI: sweeps, overlap of criteria, numbers of samples, and tables."""

import itertools
import json
import math
import re
import runpy
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_cases import REMOVALS, stepped, subspace
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.core import config
from leanbayes.methods import parse_method
from leanbayes.methods.ssvi.ssvi import SSVI
from leanbayes.networks import build

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
TABLE_MODULES = ["tables", "headline_rows", "engine_rows", "stored"]
TABLE_MODULES += sorted(path.stem for path in EXPERIMENTS.glob("*_tables.py"))
METHODS = ("ssvi:density=0.3,samples=3", "mean-field:samples=2")


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object, folder: Path = EXPERIMENTS) -> dict[str, Any]:
    """Run a script with these arguments, or import it if there are none."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(folder / name), run_name="__main__" if words else "read")


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).findall(".//{*}text")]


def lines(path: Path) -> int:
    return len(ElementTree.parse(path).findall(".//{*}polyline"))


# -- what the criteria have in common ---------------------------------------------------------------------------------


def lowest(training: lb.Training, scores: Sequence[float], share: float) -> set[int]:
    """Return the positions that an exchange by these scores would drop, layer by layer, by sorting lists."""
    posterior = subspace(training.model)
    index, found, first = posterior.index.tolist(), set(), 0
    for size, count in zip(posterior.layout.sizes, posterior.counts, strict=True):
        number = min(math.floor(share * count), size - count)
        order = sorted(range(first, first + count), key=lambda place: (scores[place], place))
        found |= {index[place] for place in order[:number]}
        first += count
    return found


def test_overlap_matches_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = script(monkeypatch, "ssvi.py")["RecordedSSVI"]
    method = recorded(0.4, interval=4, drop=0.8, init_std=0.05)
    training = stepped(method, "cnn")
    share = 0.4 * (1 + math.cos(math.pi * 4 / 750))
    posterior = subspace(training.model)
    sets = {}
    for removal in REMOVALS:
        scores = SSVI(0.4, removal=removal).removal_scores(training, posterior)
        sets[removal] = lowest(training, scores.tolist(), share)
    before = set(posterior.index.tolist())
    method.after_step(training)
    (exchange,) = recorded.exchanges
    assert before - set(posterior.index.tolist()) == sets["absolute_snr"]  # what it says is what is done
    assert (exchange["step"], exchange["removed"]) == (4, len(sets["absolute_snr"]))
    assert exchange["share"] == pytest.approx(share)
    expected = [[len(a & b) / len(a | b) for b in sets.values()] for a in sets.values()]
    assert exchange["iou"] == [pytest.approx(row) for row in expected]
    assert min(itertools.chain(*expected)) < 0.9  # they do not all agree


def test_overlap_is_written_and_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, figures = tmp_path / "overlap.json", tmp_path / "figures"
    words = f"--data digits --model mlp --epochs 1 --interval 4 --density 0.1 --out {out} --figures {figures}"
    script(monkeypatch, "ssvi.py", "overlap", *words.split(), "--device", "cpu")
    found = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert found["command"].startswith("python experiments/ssvi.py overlap --data digits --model mlp --epochs 1")
    assert (found["method"]["type"], found["method"]["density"], found["seed"]) == ("SSVI", 0.1, 0)
    assert {"versions", "machine", "recipe"} <= found.keys()
    assert found["criteria"] == list(REMOVALS)
    assert [one["step"] for one in found["exchanges"]] == [4, 8]  # of 16 steps, until 75 %
    for one in found["exchanges"]:
        for a, b in itertools.product(range(7), repeat=2):
            assert one["iou"][a][b] == one["iou"][b][a]
            assert 0 <= one["iou"][a][b] <= one["iou"][a][a] == 1
        assert one["iou"][REMOVALS.index("snr")][REMOVALS.index("absolute_snr")] == 1
    assert lines(figures / "overlap.svg") == 7


def test_training_without_an_exchange_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "overlap --data digits --model mlp --epochs 1 --interval 1000 --device cpu"
    with pytest.raises(SystemExit, match="raise --epochs"):
        script(monkeypatch, "ssvi.py", *words.split())


# -- over a setting ---------------------------------------------------------------------------------------------------


def comparison(path: Path, methods: Sequence[str], **recipe: Any) -> Path:
    """Write a comparison with two seeds per method, and scores that all differ."""
    numbers = itertools.count(1)
    results = []
    for name, seed in itertools.product(methods, range(2)):
        scores = {key: next(numbers) / 1000 for key in ("accuracy", "nll", "ece")}
        results.append({"name": name, "seed": seed, "method": config.encode(parse_method(name)), "scores": scores})
    path.write_text(json.dumps({"recipe": {"epochs": 20, "temperature_warmup": 0.5, **recipe}, "results": results}))
    return path


def test_sweep_has_one_line_per_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    densities = (0.5, 0.01, 0.1)
    methods = [f"{name}:density={density}" for name in ("ssvi", "rigl") for density in densities]
    path = comparison(tmp_path / "compare.json", [*methods, "mean-field"])
    script(monkeypatch, "ssvi.py", "sweep", path, "--along", "density", "--out", tmp_path)
    assert {one.stem for one in tmp_path.glob("*.svg")} == {"density-accuracy", "density-nll", "density-ece"}
    for one in tmp_path.glob("*.svg"):
        assert lines(one) == 2
        assert {"SSVI", "RigL", "1 %", "2 %", "5 %", "10 %", "20 %", "50 %"} <= set(texts(one))
    place = script(monkeypatch, "plotting.py")["_LogAxis"]([0.01, 0.5], 0, 170)
    assert place(0.01) == 0
    assert place(0.5) == 170
    assert place(0.1) == pytest.approx(170 * math.log(10) / math.log(50), abs=0.01)


def test_points_are_sorted_means_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = script(monkeypatch, "ssvi.py")
    record = names["read_comparison"](comparison(tmp_path / "a.json", ["ssvi:density=0.5", "ssvi:density=0.1"]))
    (series,) = names["swept"](names["lines_of"]([record], "density"), "density", "accuracy").series
    assert series.x == (0.1, 0.5)
    assert series.y == pytest.approx((0.0085, 0.0025))  # scores count 1 to 12; accuracy is every third
    assert (series.low, series.high) == ((0.007, 0.001), (0.010, 0.004))


def test_lines_are_named_by_the_settings_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stds = (0.001, 0.01)
    dense = [f"mean-field:init_std={std},relative=false" for std in stds]
    sparse = [f"ssvi:init_std={std},removal={removal}" for std in stds for removal in ("mean", "snr")]
    paths = [comparison(tmp_path / f"{w}.json", [*dense, *sparse], temperature_warmup=w) for w in (0.5, 0.0)]
    script(monkeypatch, "ssvi.py", "sweep", *paths, "--along", "init_std", "--out", tmp_path)
    assert lines(tmp_path / "init_std-nll.svg") == 6
    found = texts(tmp_path / "init_std-nll.svg")
    assert "MeanField, temperature_warmup=0.0" in found
    assert "SSVI, removal=snr, temperature_warmup=0.5" in found


def test_sweep_rejects_unsuitable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"other\.json cannot be read"):
        script(monkeypatch, "ssvi.py", "sweep", tmp_path / "other.json", "--along", "density", "--out", tmp_path)
    path = comparison(tmp_path / "compare.json", ["mean-field"])
    with pytest.raises(SystemExit, match="setting density"):
        script(monkeypatch, "ssvi.py", "sweep", path, "--along", "density", "--out", tmp_path)


# -- samples and tables -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared")
    words = (
        f"--data digits --model mlp --model-options hidden=[8] --epochs 1 --seeds 2 --out {out} --quiet --device cpu"
    )
    words += (
        " --no-report --evaluation.shifts noise --evaluation.shift-examples 10 --evaluation.no-pruning --ood letters"
    )
    assert main(["compare", *METHODS, *words.split()]) == 0
    return out


def sampled(monkeypatch: pytest.MonkeyPatch, runs: Path, out: Path) -> list[dict[str, Any]]:
    words = ["samples", runs, "--samples", 2, 3, "--ood", "letters", "--out", out, "--device", "cpu"]
    script(monkeypatch, "ssvi.py", *words)
    return json.loads(out.read_text())["results"]


def test_samples_scores_match_compare(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, compared, tmp_path / "draws.json")
    assert str(compared.parent) not in (tmp_path / "draws.json").read_text()
    assert len(found) == 8  # methods, seeds, numbers of samples
    for run in json.loads((compared / "compare.json").read_text())["results"]:
        (same,) = (
            one
            for one in found
            if (one["method"], one["seed"], one["samples"]) == (run["method"], run["seed"], run["method"]["samples"])
        )
        for key in ("accuracy", "nll", "ece", "debiased_classwise_error"):
            assert same["metrics"][key] == pytest.approx(run["scores"][key], rel=1e-4, abs=1e-6)
        expected = run["ood"]["letters"]["by"]["entropy"]
        assert same["ood"]["letters"]["by"]["entropy"] == pytest.approx(expected, rel=1e-3)


def pages(folder: Path) -> Path:
    """Copy scripts and make pages, without results."""
    for name in ("experiments", "docs"):
        (folder / name).mkdir()
    for name in TABLE_MODULES:
        shutil.copy(EXPERIMENTS / f"{name}.py", folder / "experiments")
    shutil.copy(EXPERIMENTS / "papers.toml", folder / "experiments")
    (folder / "docs" / "guide").mkdir()
    measured = ("baselines", "engines", "one_pass", "one_pass_results", "papers", "partial", "sharing", "sparse")
    for name in (*measured, "guide/language_models", "guide/tune"):
        (folder / "docs" / f"{name}.md").write_text("before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n")
    for name, mark in (("README.md", "summary"), ("docs/guide/choose.md", "headline")):
        (folder / name).write_text(f"before\n<!-- measured: {mark} -->\nold\n<!-- /measured -->\nafter\n")
    return folder / "experiments" / "results"


def write_tables(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[str, str]:
    for name in TABLE_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    script(monkeypatch, "tables.py", "now", folder=folder / "experiments")
    return (folder / "docs" / "results.md").read_text(), (folder / "docs" / "sparse.md").read_text()


def test_tables_leave_out_missing_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages(tmp_path)
    results, sparse = write_tables(monkeypatch, tmp_path)
    assert "|" not in results
    for name in ("README.md", "docs/guide/choose.md"):
        assert "|" not in (tmp_path / name).read_text()
    assert sparse == "before\n<!-- measured -->\n\n<!-- /measured -->\nafter\n"


def test_tables_show_the_paper_and_our_results(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pages(tmp_path)
    (folder / "ssvi").mkdir(parents=True)
    text = (compared / "compare.json").read_text()
    text = text.replace('"digits"', '"cifar10"').replace('"mlp"', '"resnet-18"').replace('"letters"', '"cifar100"')
    (folder / "cifar10_ssvi.json").write_text(text)
    results, sparse = write_tables(monkeypatch, tmp_path)
    assert "## resnet-18 on cifar10: SSVI" in results
    head, rows = table_of(sparse)
    assert [row["density"] for row in rows] == ["100%", "100%", "30%", "10%", "5%"]
    assert [row[""] for row in rows] == ["paper", "MeanField", "SSVI", "paper", "paper"]
    assert rows[-1]["accuracy"] == "93.74%"
    assert rows[-1]["AUROC / AUPR svhn"] == "0.93 / 0.96"
    assert rows[-1]["10¹⁵ FLOPs to train"] == "5.7"
    metrics = json.loads(text)["summary"]["methods"]["ssvi:density=0.3,samples=3"]
    assert rows[2]["NLL"] == f"{metrics['nll']['mean']:.3f}"
    assert rows[2]["AUROC / AUPR cifar100"].startswith(f"{metrics['ood:letters']['mean']:.2f} / ")
    assert rows[2]["AUROC / AUPR svhn"] == ""
    assert "MB on disk" in head
    # Other numbers of samples add lines; the same number does not.
    sampled(monkeypatch, compared, folder / "ssvi" / "draws.json")
    text = (folder / "ssvi" / "draws.json").read_text().replace('"digits"', '"cifar10"').replace('"mlp"', '"resnet-18"')
    (folder / "ssvi" / "draws.json").write_text(text)
    (folder / "ssvi" / "density-nll.svg").write_text("")
    _, sparse = write_tables(monkeypatch, tmp_path)
    _, rows = table_of(sparse)
    assert sorted(row["samples"] for row in rows if row[""] == "SSVI") == ["2", "3"]
    assert len(rows) == 7
    assert "(../experiments/results/ssvi/density-nll.svg)" in sparse


def test_overlap_and_many_methods_have_tables(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pages(tmp_path)
    (folder / "ssvi").mkdir(parents=True)
    record = json.loads((compared / "compare.json").read_text())
    methods = record["summary"]["methods"]
    record["summary"]["methods"] = {f"ssvi:density={n}": methods[METHODS[0]] for n in range(6)}
    (folder / "cifar10_density.json").write_text(json.dumps(record))
    words = "overlap --data digits --model mlp --epochs 1 --interval 4 --device cpu"
    script(monkeypatch, "ssvi.py", *words.split(), "--out", folder / "ssvi" / "overlap.json")
    results, sparse = write_tables(monkeypatch, tmp_path)
    assert "## mlp on digits: densities" in results
    assert len(re.findall(r"^\| `ssvi:density=\d`", results, re.MULTILINE)) == 6
    assert "overlap of the removal criteria" in results
    assert re.search(r"^\| `snr` \| 1.000 \| 1.000 \| 1.000 \|$", results, re.MULTILINE)
    assert "paper" not in sparse


def table_of(page: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the first table of a page, with all columns: its column titles, and its rows by title."""
    page = page.partition("<details")[2] or page
    found = [line for line in page.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in found)
    return head, [dict(zip(head, row, strict=True)) for row in rows]


def test_counted_flops_are_those_of_the_active_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = script(monkeypatch, "sparse_flops.py")["rows"]("resnet-20", 10, [0.1])
    network = build("resnet-20", (3, 32, 32), 10)
    with FlopCounterMode(display=False, depth=99) as counter:
        network(torch.zeros(1, 3, 32, 32))
    counts = {name.partition(".")[2]: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert [row["densities"] for row in rows] == ["erk", "uniform"]
    for row in rows:
        expected = sum(counts[name] * share for name, share in zip(layers, row["layers"], strict=True))
        assert row["flops"] == pytest.approx(expected, rel=1e-6)
        assert row["share"] == row["flops"] / sum(counts[name] for name in layers)
    assert rows[1]["share"] < rows[0]["share"]  # small layers, which erk keeps dense, have many pixels
