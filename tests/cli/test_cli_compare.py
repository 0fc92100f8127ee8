"""`leanbayes compare`: one table, and a winner a column."""

import contextlib
import io
import json
import math
import os
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cli_cases import TOY, Cli, must_not_train, without_times

import leanbayes as lb
from leanbayes import config
from leanbayes.cli import main
from leanbayes.cli.tables import COST, QUALITY, comparison, show
from leanbayes.training.loop import Loop

LONG = "mean-field:rule=flipout,prior.scale=0.05,samples=4,init-std=0.02,prior.gain=1.0,relative=True,prior.center=zero"
SPECS = ["deterministic", "ensemble:members=2", LONG]


class Comparison(NamedTuple):
    folder: Path
    words: list[str]
    out: str
    figures: dict[str, Any]


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared")
    words = ["compare", *SPECS, *map(str, TOY), "--out", str(folder / "all"), f"--json={folder / 'copy.json'}"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return Comparison(folder / "all", words, out.getvalue(), json.loads((folder / "all/compare.json").read_text()))


def test_the_table_stars_the_best_of_each_column_and_names_it_below(compared: Comparison) -> None:
    lines = compared.out.splitlines()
    rows = {spec: next(line for line in lines if line.startswith(f"{spec} ")) for spec in SPECS}
    cells = {spec: line.removeprefix(spec).split() for spec, line in rows.items()}
    titles = ["RMSE", "NLL", "numbers ×1000", "file kB", "train ms/epoch", "predict ms/1000"]
    columns = {column.title.replace("\n", " "): column for column in (*QUALITY, *COST)}
    values = {result["name"]: {**result["scores"], **result["costs"]} for result in compared.figures["results"]}
    for name in values:
        values[name]["file_kb"] = values[name]["file_bytes"] / 1e3
        values[name]["kilo_trained"] = values[name]["trainable"] / 1e3
        values[name]["epoch_ms"] = 1e3 * statistics.median(values[name]["epoch_seconds"])
    assert {len(row) for row in cells.values()} == {len(titles)}
    for number, title in enumerate(titles):
        starred = [spec for spec in SPECS if cells[spec][number].endswith("*")]
        assert starred
        below = next(line for line in lines if line.startswith(f"  {title}:"))
        assert below.partition(":")[2].strip() == ", ".join(starred)
        column = columns[title]
        shown = {spec: column.form.format(values[spec][column.key]) for spec in SPECS}
        assert {spec: cells[spec][number].rstrip("*") for spec in SPECS} == shown
        best = min(values[spec][column.key] for spec in SPECS)
        assert starred == [spec for spec in SPECS if shown[spec] == column.form.format(best)]
    assert lines[0] == "toy, mlp: 100 test examples"
    assert lines[-1] == f"The figures are those of one run. Runs and figures are in {compared.folder}."
    assert "…" not in compared.out


def test_the_figures_are_complete(compared: Comparison) -> None:
    figures = compared.figures
    place = compared.folder.parent
    assert json.loads((place / "copy.json").read_text()).keys() == figures.keys()
    assert (
        figures["command"] == f"leanbayes compare deterministic ensemble:members=2 {LONG} --data toy --epochs 1 --quiet"
    )
    assert str(place) not in json.dumps(figures)
    assert figures["seed"] == 0
    assert figures["recipe"]["epochs"] == 1
    assert figures["model"]["name"] == "mlp"
    assert figures["source"]["name"] == "toy"
    assert figures["versions"]["leanbayes"] == lb.__version__
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["machine"]["cores"] == os.cpu_count()
    assert [result["name"] for result in figures["results"]] == SPECS
    for result in figures["results"]:
        assert {"rmse", "nll", "examples", "predict_ms_per_1000"} <= result["scores"].keys()
        assert {"trainable", "file_bytes", "epoch_seconds", "train_seconds"} <= result["costs"].keys()
    assert config.decode(figures["results"][1]["method"]) == lb.Ensemble(2)
    assert figures["results"][0]["costs"]["trainable"] * 2 - 1 == figures["results"][1]["costs"]["trainable"]


def test_a_comparison_is_not_trained_again(compared: Comparison, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    told = cli(*compared.words)
    assert told.err == ""  # --quiet
    again = json.loads((compared.folder / "compare.json").read_text())
    assert json.loads((compared.folder.parent / "copy.json").read_text()) == again
    for old, new in zip(compared.figures["results"], again["results"], strict=True):
        assert without_times(old["scores"]) == without_times(new["scores"])
        assert old["costs"] == new["costs"]


def test_each_run_of_a_comparison_can_be_looked_at(compared: Comparison, cli: Cli) -> None:
    runs = sorted(path.parent for path in compared.folder.glob("*/run.json"))
    assert len(runs) == len(SPECS)
    found = {json.loads(cli("evaluate", run, "--json").out)["scores"]["rmse"] for run in runs}
    assert found == {result["scores"]["rmse"] for result in compared.figures["results"]}


def test_a_comparison_of_one_has_no_winner_and_is_not_trained_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", "deterministic", "--model", "lenet-300-100", "--epochs", 1)
    told = cli(*words)
    assert "digits, lenet-300-100: 599 test examples" in told.out
    for missing in ("*", "Best", "Brier"):
        assert missing not in told.out
    error = re.search(r"on 599 examples an accuracy has a standard error of ([\d.]+)%", told.out)
    folder = Path("runs/digits-lenet-300-100-compare-0")
    scores = json.loads((folder / "compare.json").read_text())["results"][0]["scores"]
    assert re.search(rf"^deterministic +{scores['accuracy']:.2%} +{scores['nll']:.4f} ", told.out, re.MULTILINE)
    expected = 100 * math.sqrt(scores["accuracy"] * (1 - scores["accuracy"]) / 599)
    assert error is not None
    assert float(error.group(1)) == pytest.approx(expected, abs=0.006)
    assert "brier" in scores  # in the figures, as it follows from accuracy and calibration
    # The progress, and then the same again from what is there.
    begin, end = told.err.splitlines()
    assert re.fullmatch(rf"Deterministic on digits: 1,078 examples, \d+ steps in {folder}/deterministic", begin)
    assert re.fullmatch(r"Held-out split: accuracy [\d.]+%, NLL [\d.]+, ECE [\d.]+", end)
    monkeypatch.setattr(Loop, "run", must_not_train)
    finished = f"The run in {folder}/deterministic is finished: nothing was trained. --overwrite starts anew.\n"
    assert cli(*words).err == finished


FIGURES = {
    **dict.fromkeys(("accuracy", "nll", "ece", "brier", "entropy_right", "entropy_wrong"), 0.125),
    **{"kilo_trained": 117.0, "file_kb": 472.0, "epoch_ms": 1234.0, "predict_ms_per_1000": 1234.0},
}


@pytest.mark.parametrize("columns", [None, "20", "80", "400"])
@pytest.mark.parametrize("colour", [False, True])
def test_a_comparison_is_not_cut_off(
    columns: str | None, colour: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if colour:  # as in a terminal
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    view, winners = comparison({name: FIGURES for name in ("deterministic", LONG)})
    show("digits", view)
    out = capsys.readouterr().out
    assert ("\x1b[" in out) == colour
    title, above, head, *rows = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert title == "digits"
    assert above.split() == ["entropy", "numbers", "file", "train", "predict"]
    assert head.split() == "method accuracy NLL ECE if wrong ×1000 kB ms/epoch ms/1000".split()
    cells = ["12.50%*", "0.1250*", "0.1250*", "0.125*", "117.0*", "472*", "1234*", "1234*"]
    assert [row.split() for row in rows] == [["deterministic", *cells], [LONG, *cells]]
    assert len({len(row) for row in (above, head, *rows)}) == 1
    assert len(head) < len(LONG) + 80  # no wider than need be
    first, *lines = winners.splitlines()
    assert first == "* Best in its column:"
    assert [line.partition(":")[0].strip() for line in lines] == [
        *("accuracy", "NLL", "ECE", "entropy if wrong", "numbers ×1000", "file kB", "train ms/epoch"),
        "predict ms/1000",
    ]
    assert {line.partition(":")[2].strip() for line in lines} == {f"deterministic, {LONG}"}


def test_a_score_that_is_not_there_wins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    perfect = {**FIGURES, "entropy_wrong": math.nan}
    view, winners = comparison({"a": perfect, "b": FIGURES})
    show("", view)
    out = capsys.readouterr().out
    assert [line.split()[4] for line in out.splitlines()[2:]] == ["–", "0.125*"]
    assert re.search(r"^  entropy if wrong: +b$", winners, re.MULTILINE)
    view, winners = comparison({"a": perfect, "b": perfect})
    show("", view)
    assert [line.split()[4] for line in capsys.readouterr().out.splitlines()[2:]] == ["–", "–"]
    assert re.search(r"^  entropy if wrong: +–$", winners, re.MULTILINE)


def test_figures_that_look_alike_win_together_and_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "a": FIGURES,
        "b": {**FIGURES, "accuracy": 0.12501, "nll": 0.2},
        "c": {**FIGURES, "accuracy": 0.1, "nll": 0},
    }
    view, winners = comparison(rows)
    show("", view)
    cells = [line.split()[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert cells == [["12.50%*", "0.1250"], ["12.50%*", "0.2000"], ["10.00%", "0.0000*"]]
    assert re.search(r"^  accuracy: +a, b$", winners, re.MULTILINE)
    assert re.search(r"^  NLL: +c$", winners, re.MULTILINE)


def test_one_method_alone_wins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view, winners = comparison({"a": FIGURES})
    show("", view)
    assert winners == ""
    assert "*" not in capsys.readouterr().out


def test_methods_may_stand_in_a_file(cli: Cli) -> None:
    Path("a.yaml").write_text("methods: [deterministic, 'mean-field:samples=2']\ndata: toy\nepochs: 1\nquiet: true\n")
    text = cli("compare", "--config", "a.yaml", "--out", "a").out
    assert re.search(r"^mean-field:samples=2 ", text, re.MULTILINE)
    assert "ensemble" not in text
    assert "ensemble" in cli("compare", "ensemble:members=1", "--config", "a.yaml", "--out", "b").out  # flags win
    assert [path.name for path in Path("b").iterdir() if path.is_dir()] == ["ensemble-members=1"]


@pytest.mark.parametrize("line", ["model_options: {hidden: [4]}", "model_options: ['hidden=[4]']", "resize: [8, 8]"])
def test_a_file_takes_no_methods_away(line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text(f"quiet: true\n{line}\n")
    found: list[Any] = []
    monkeypatch.setattr("leanbayes.cli.compare._compare", lambda *args: found.extend(args))
    cli("compare", "deterministic", "--data", "toy", "--config", "a.yaml")
    assert found[0].methods == ("deterministic",)
    assert list(found[1]) == ["deterministic"]
