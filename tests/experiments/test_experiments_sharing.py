"""Tests of the experiments on weight sharing: curve of files, INT8, files of runs, figures, and tables."""

import json
import math
import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.cli.runs import open_run
from leanbayes.core import config
from leanbayes.data import load
from leanbayes.methods import parse_method
from leanbayes.posteriors import SharedPosterior

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
TASK = (
    "--data", "digits", "--model", "mlp", "--model-options", "hidden=[40]", "--device", "cpu", "--temperature", "0.01",
    "--quiet",
)  # fmt: skip
FEW = ("--samples", 3, "--calibration", 40, "--examples", 60, "--device", "cpu")
GRID = ("--components", 16, "--bit-prices", "none", 0.3, "--epochs", 0, 1, "--lrs", 1e-2, "--values", "fp16", "int8")
SHARING = "weight-sharing:components=30,threshold=0.25,border=5.991,pretrain_std=0"


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> dict[str, Any]:
    """Run a script with these arguments, or import it if there are none."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(EXPERIMENTS / name), run_name="__main__" if words else "read")


def found(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).findall(".//{*}text")]


def model(folder: Path) -> lb.BayesianModel:
    return open_run(folder, "cpu").model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "dense"
    assert main(["fit", "mean-field", *TASK, "--epochs", "3", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def compared(run: Path) -> Path:
    out = run.parent / "compared"
    flags = [
        "--start",
        str(run),
        "--epochs",
        "1",
        "--no-report",
        "--evaluation.shifts",
        "labels",
        "--evaluation.no-pruning",
    ]
    assert main(["compare", SHARING, "mean-field", *TASK, *flags, "--ood", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def curve(run: Path, compared: Path) -> dict[str, Any]:
    other = next(compared.glob("mean-field*"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        words = ("curve", run, *GRID, *FEW, "--ood", "letters", "--compare-with", other)
        script(monkeypatch, "sharing.py", *words, "--out", run.parent / "curve.json", "--figures", run.parent / "curve")
    return found(run.parent / "curve.json")


# -- a curve of files -------------------------------------------------------------------------------------------------


def nll_and_accuracy(bnn: lb.BayesianModel, count: int, **how: Any) -> tuple[float, float]:
    """Compute scores directly, on the examples that the experiment uses."""
    from leanbayes.evaluation.full_evaluation import some

    data = load("digits")
    assert data.test is not None
    chosen = some(data.test, count, 0)
    pairs = [chosen[place] for place in range(count)]
    x, y = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    x = data.normalize(x) if data.normalize else x
    probs = bnn.predict(x, generator=torch.Generator().manual_seed(0), **how).probs
    right = (probs.argmax(1) == y).double().mean().item()
    return -probs[torch.arange(count), y].double().log().mean().item(), right


@pytest.mark.parametrize(
    ("outliers", "ellipses", "gaussians", "millions"),
    [(23013, 10885, 2217, 0.038), (37172, 56873, 3250, 0.101), (53641, 4311, 2464, 0.063), (9765, 338329, 5440, 0.359)],
)
def test_the_count_of_parameters_is_that_of_table_1(
    monkeypatch: pytest.MonkeyPatch, outliers: int, ellipses: int, gaussians: int, millions: float
) -> None:
    count = script(monkeypatch, "sharing_files.py")["paper_parameters"]
    assert round(count(outliers, ellipses, gaussians) / 1e6, 3) == millions


def test_scores_of_a_file_match_the_loaded_model(curve: dict[str, Any], run: Path, tmp_path: Path) -> None:
    assert len(curve["results"]) == 8  # prices, trainings, precisions
    assert (curve["examples"], curve["samples"]) == (60, 3)
    (row,) = (row for row in curve["results"] if (row["bit_price"], row["epochs"], row["values"]) == (0.3, 0, "int8"))
    dense = model(run)
    shared = lb.bayesianize(dense, lb.WeightSharing(16, bit_price=0.3, prior=dense.method.prior)).eval()  # type: ignore[attr-defined]
    made = lb.compress(shared, tmp_path / "model.lbc", values="int8")
    assert row["bytes"] == sum(row["parts"].values()) == pytest.approx(made.bytes, abs=40)  # the factors of one pass
    loaded = lb.load(tmp_path / "model.lbc", dense.to_deterministic()).eval()
    sampled = row["test"]["samples"]
    assert (sampled["nll"], sampled["accuracy"]) == pytest.approx(nll_and_accuracy(loaded, 60, samples=3), rel=1e-5)
    assert row["test"]["one_pass"]["nll"] == pytest.approx(nll_and_accuracy(loaded, 60, rule="moments")[0], rel=0.1)
    assert row["held_out_one_pass_by_labels"]["nll"] <= row["held_out_one_pass"]["nll"] + 1e-6
    assert row["paper_parameters"] == row["outliers"] + row["blends"] + 2 * row["gaussians"]
    assert row["gaussians"] == len(torch.unique(shared.posterior.get_buffer("labels")))
    assert 0.5 < sampled["ood"]["letters"]["auroc"] < 1


def test_final_training_changes_codes_but_not_labels(curve: dict[str, Any]) -> None:
    pairs = {(row["bit_price"], row["epochs"]): row for row in curve["results"] if row["values"] == "fp16"}
    for price in (None, 0.3):
        before, after = pairs[price, 0], pairs[price, 1]
        assert before["parts"]["labels"] == after["parts"]["labels"]
        assert after["held_out"]["nll"] < before["held_out"]["nll"]
        assert (before["lr"], after["lr"]) == (None, 1e-2)


def test_full_size_files_are_in_the_figure(curve: dict[str, Any], run: Path, compared: Path, tmp_path: Path) -> None:
    network = model(run).to_deterministic()
    for name, method in (("plain fp32 network", lb.Deterministic()), ("dense fp32 mean-field", lb.MeanField())):
        lb.save(lb.bayesianize(network, method), tmp_path / "whole")
        assert curve["sizes"][name] == (tmp_path / "whole").stat().st_size
    runs = (run, next(compared.glob("mean-field*")))
    assert [row["bytes"] for row in curve["compared"]] == [(one / "model.safetensors").stat().st_size for one in runs]
    assert curve["compared"][0]["test"] != curve["compared"][1]["test"]
    labels = texts(run.parent / "curve" / "rate-distortion-digits.svg")
    assert "16 components, 1 epochs of final training, int8" in labels
    ways = [text for text in labels if text.startswith("Test NLL, ")]
    assert [way.split(", ")[1] for way in ways] == ["Monte Carlo samples", "one pass by moments", "one pass by labels"]
    assert f"plain fp32 network {curve['sizes']['plain fp32 network'] / 1e6:.3g} MB" in labels[0]
    assert (
        f"mean-field, {curve['compared'][0]['bytes'] / 1e6:.3g} MB" in labels
    )  # a horizontal line: its file is much larger
    text = (run.parent / "curve.json").read_text()
    assert str(run.parent) not in text
    assert curve["command"].startswith(
        "python experiments/sharing.py curve dense --compare-with mean-field-0 --examples 60"
    )
    assert "--bit-prices none 0.3" in curve["command"]


def test_curve_resumes_from_existing_rows(
    curve: dict[str, Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = {**curve, "results": [{**row, "mark": "kept"} for row in curve["results"][:-1]]}
    out = tmp_path / "curve.json"
    out.write_text(json.dumps(stopped))
    words = ("curve", run, *FEW, "--ood", "letters", "--out", out)
    script(monkeypatch, "sharing.py", *words, *GRID)
    rows = found(out)["results"]
    assert [row.get("mark") for row in rows] == ["kept"] * 7 + [None]
    assert rows[-1]["test"] == curve["results"][-1]["test"]
    more = ("--components", 16, "--bit-prices", 0.3, 0.5, "--epochs", 0)
    script(monkeypatch, "sharing.py", *words, *more)  # what is there is not done again
    record = found(out)
    assert [row["bit_price"] for row in record["results"][8:]] == [0.5]
    assert (record["results"][:8], record["compared"]) == (rows, curve["compared"])
    assert curve["command"] in record["earlier_commands"]


def test_files_with_a_high_nll_are_counted_but_not_plotted(
    curve: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = script(monkeypatch, "sharing_figures.py")["curve_drawing"]
    level = curve["compared"][0]["test"]["samples"]["nll"]
    worse = {**curve["results"][0], "bit_price": 9.0, "test": {"samples": {"nll": 1.6 * level}}}
    before, after = (draw({**curve, "results": rows}) for rows in (curve["results"], [*curve["results"], worse]))
    assert f"Monte Carlo samples, without 1 above {1.5 * level:.2f}" in after
    assert "without" not in before
    assert after.count("<circle") == before.count("<circle")


def test_curve_needs_weight_sharing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="does not share weights"):
        script(monkeypatch, "sharing.py", "curve", run, *FEW, "--method", "mean-field")


# -- INT8, files and figures ------------------------------------------------------------------------------------------


def test_int8_size_follows_its_bits(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "int8.json"
    words = ("--components", 16, "--bit-prices", 0.3, "--epochs", 0, "--bits", 4, 1)
    script(monkeypatch, "sharing.py", "int8", run, *words, *FEW, "--out", out)
    record, weights, biases = found(out), (64 * 40, 40 * 10), 50
    _, four, one = record["compared"]
    for row, bits in ((four, 4), (one, 1)):
        assert row["bytes"] == sum(n + math.ceil(n * bits / 8) + 12 for n in weights) + 4 * biases
    assert (four["name"], len(record["results"])) == ("INT8, 4-bit σ", 1)
    assert four["test"]["samples"]["nll"] == pytest.approx(record["compared"][0]["test"]["samples"]["nll"], rel=0.05)
    assert four["test"] != one["test"]


def test_files_of_runs_with_shared_weights(
    compared: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "files.json"
    script(monkeypatch, "sharing.py", "files", compared, *FEW, "--values", "fp16", "int8", "--out", out)
    record = found(out)
    assert [row["values"] for row in record["results"]] == ["fp16", "int8"]  # mean-field is left out
    (place,) = compared.glob("weight-sharing*")
    posterior = model(place).posterior
    assert isinstance(posterior, SharedPosterior)
    blended = set(posterior.blended.tolist())
    labels = Counter(label for place, label in enumerate(posterior.labels.tolist()) if place not in blended)
    alone = {label for label, count in labels.items() if count == 1} - set(posterior.partners.flatten().tolist())
    row = record["results"][0]
    assert (row["outliers"], row["blends"]) == (len(alone), len(blended))
    assert len(alone) > 0 < len(blended)
    assert row["start"]["method"]["type"] == "MeanField"
    with pytest.raises(SystemExit, match="None of these"):
        script(monkeypatch, "sharing.py", "files", run, *FEW)


@pytest.mark.parametrize("there", [True, False], ids=["trained", "here"])
def test_figures_show_all_weights(
    there: bool, compared: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("--shared", next(compared.glob("weight-sharing*"))) if there else ("--method", SHARING)
    out = tmp_path / "figures.json"
    script(monkeypatch, "sharing.py", "figures", run, *how, *FEW, "--out", out, "--figures", tmp_path)
    record, mean = found(out), model(run).posterior.mean().detach().double().numpy()
    counts, _ = np.histogram(mean, record["density"]["edges"])
    assert record["density"]["before"] == pytest.approx(counts.tolist(), abs=1)  # at an edge
    assert sum(record["density"]["after"]) == 64 * 40 + 40 * 10
    boxes = record["confidence"]["after sharing"]
    assert sum(one["examples"] for one in boxes) == 60
    assert all(sorted(one["quantiles"]) == one["quantiles"] and 0.1 <= one["mean"] <= 1 for one in boxes)
    assert {"before", "after"} <= set(texts(tmp_path / "density-digits.svg"))
    for name in ("plane", "confidence"):
        path = tmp_path / f"{name}-digits.png"
        assert path.stat().st_size < 200_000
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 5


def test_boxes_have_the_quantiles_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = script(monkeypatch, "sharing_figures.py")["boxes"]
    from leanbayes.evaluation.outcomes import ClassOutcome

    probs = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    labels = torch.arange(50) % 2
    for one, number in zip(boxes(ClassOutcome(probs, labels, labels, labels), ["a", "b", "c"]), (0, 1), strict=True):
        values = probs.max(1).values[labels == number].double().numpy()
        assert one["quantiles"] == pytest.approx(np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist())
        assert one["mean"] == pytest.approx(values.mean())


# -- tables, settings, page -------------------------------------------------------------------------------------------


def made_up(size: int, nll: float, lr: float | None = None, price: float = 0.1) -> dict[str, Any]:
    same = {"components": 256, "bit_price": price, "rate": None, "epochs": 10, "values": "fp16"}
    return {**same, "lr": lr, "bytes": size, "held_out": {"nll": nll}}


def test_choices_use_held_out_data(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script(monkeypatch, "sharing_tables.py")
    rows = [made_up(10, 0.3, 1e-3), made_up(11, 0.2, 1e-4), made_up(12, 0.25, price=0.2), made_up(13, 0.1, price=0.3)]
    assert tables["best_training"](rows) == rows[1:]
    for chosen in (rows, rows[::-1]):
        kept = [
            a
            for a in rows
            if all(a is b or b["bytes"] > a["bytes"] or b["held_out"]["nll"] > a["held_out"]["nll"] for b in rows)
        ]
        assert tables["front"](chosen) == kept == [rows[0], rows[1], rows[3]]


def test_tables_contain_the_paper_and_our_results(
    curve: dict[str, Any], compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = script(monkeypatch, "sharing_tables.py")
    assert list(tables["sharing_tables"](tmp_path)) == []
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    for name in ("paper", "ablations"):
        script(monkeypatch, "sharing.py", "files", compared, *FEW, "--out", tmp_path / f"{name}.json")
    words = ("--components", 16, "--bit-prices", 0.3, "--epochs", 0)
    script(
        monkeypatch,
        "sharing.py",
        "int8",
        next(compared.glob("mean-field*")),
        *words,
        *FEW,
        "--out",
        tmp_path / "int8.json",
    )
    text = (tmp_path / "int8.json").read_text().replace('"name": "digits"', '"name": "cifar10"')
    (tmp_path / "int8.json").write_text(text)
    (tmp_path / "plane-digits.png").write_text("")
    held = {**curve, "settings": curve["settings"] | {"scale_lr": 0.5, "rule": "moments"}, "command": "another"}
    for name, record in (("a", held), ("b", curve)):
        (tmp_path / f"final_{name}.json").write_text(json.dumps(record))
    claims, files, final, trained, counts, int8, ablations, figure = tables["sharing_tables"](tmp_path)
    # What the paper prints is its count in thousands, for all networks but ResNet-18.
    theirs = {line.split("|")[1].strip(): line.split("|")[5:7] for line in counts.splitlines() if "| paper, " in line}
    rounded = {name: float(printed) * 1e6 - int(total.replace(",", "")) for name, (printed, total) in theirs.items()}
    assert {name for name, error in rounded.items() if abs(error) >= 1000} == {"paper, ResNet-18"}
    smallest = min((row for row in curve["results"]), key=lambda row: row["held_out"]["nll"])
    assert f"NLL {smallest['test']['samples']['nll']:.3f}" in claims
    by_labels = min((row for row in curve["results"]), key=lambda row: row["held_out_one_pass_by_labels"]["nll"])
    (claim,) = (line for line in claims.splitlines() if "mean-field, in one pass by labels |" in line)
    assert f"NLL {by_labels['test']['one_pass_by_labels']['nll']:.3f}" in claim
    titles = next(line for line in files.splitlines() if line.startswith("|"))
    columns = [title.strip() for title in titles.strip("|").split("|")]
    assert columns[2:11] == [
        f"{score}{way}" for way in ("", ", one pass", ", by labels") for score in ("accuracy", "NLL", "ECE")
    ]
    known = {**curve, "compared": [], "results": [{"test": {"samples": {}, "one_pass": {}}}]}
    assert tables["ways_of"](known) == ["samples", "one_pass"]  # as in older files
    assert cells(files, "mean-field, its own file")[0] == f"{curve['compared'][0]['bytes'] / 1e6:.3f}"
    assert [line for line in final.splitlines() if line[:1] == "`"] == ["`another`", f"`{curve['command']}`"]
    after = [row for row in curve["results"] if row["epochs"]]
    scale_lrs = [line.split("|")[6].strip() for line in final.splitlines() if line.startswith("| by")]
    assert scale_lrs == ["0"] * len(after) + ["0.5"] * len(after)
    assert len(re.findall(r"^\| by moments \|", final, re.MULTILINE)) == len(after)
    for row in after:
        assert final.count(f"| {row['test']['samples']['nll']:.4f} |") >= 2  # of either record
    assert "threshold 0.25" in trained
    assert cells(int8, "paper, INT8, 2-bit σ")[:4] == ["0.720", "90.85%", "0.2730", "0.0255"]
    assert "| threshold 0.25 |" in ablations
    assert figure.startswith("![plane-digits](../experiments/results/sharing/plane-digits.png)")
    for table in (claims, files, final, trained, int8, ablations):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def cells(table: str, name: str) -> Sequence[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_configs_have_the_settings_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script(monkeypatch, "sharing_tables.py")
    paper = replace(lb.WeightSharing.paper(), border=5.991, pretrain=0.0, sampling="independent")
    given = {
        name: [
            parse_method(text)
            for text in yaml.safe_load((EXPERIMENTS / f"cifar10_sharing_{name}.yaml").read_text())["methods"]
        ]
        for name in ("paper", "ablations")
    }
    as_mean_field = replace(paper, prior=lb.Normal(0.05), init_std=1e-3, relative=False)  # on this data
    assert given["paper"][0] == replace(as_mean_field, pretrain_std=0.5)
    assert given["ablations"][0] == replace(paper, pretrain_std=0.0)
    names = [tables["ablation_of"](config.encode(method)) for method in given["ablations"]]
    assert sorted(names) == sorted(tables["PAPER_ABLATIONS"])


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, of_headline = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sharing.md").read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(of_headline, names)
    assert names["bnn"].layout.numel > 11e6
    monkeypatch.chdir(tmp_path)
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 2))
    train_set = TensorDataset(x, (x[:, 0] > 0).long())
    names = {"lb": lb, "model": network, "train_set": train_set, "validation_loader": DataLoader(train_set, 32)}
    exec(block.replace("epochs=30", "epochs=1").replace("components=256", "components=4"), names)
    assert names["file"].bytes == (tmp_path / "model.lbc").stat().st_size
    assert isinstance(names["bnn"].posterior, SharedPosterior)
    assert names["small"].bytes == (tmp_path / "small.lbc").stat().st_size <= 700_000
