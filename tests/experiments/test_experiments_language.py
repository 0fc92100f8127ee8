"""Tests of the experiment on adapters of a language model: choices by held-out text, then a comparison over seeds."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import leanbayes as lb

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = ["--length", 32, "--batch", 8, "--pretraining", 30, "--adapting", 40, "--pages", 8, "--width", 16]
SMALL += ["--layers", 1, "--heads", 2, "--rank", 2]
WAYS = ["10 samples", "one pass"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("language")


def run(monkeypatch: pytest.MonkeyPatch, script: str, *words: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
    runpy.run_path(str(EXPERIMENTS / f"{script}.py"), run_name="__main__")


def choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the choices, made once."""
    out = folder / "choices.json"
    if not out.exists():
        run(monkeypatch, "language_choices", *SMALL, "--base", folder / "base.pt", "--out", out)
    return out


def test_settings_are_those_with_the_lowest_held_out_nll(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(choices(folder, monkeypatch).read_text())
    assert str(folder) not in json.dumps(record)
    assert [*record["chosen"]] == ["plain", "mean-field", "mean-field, ivon"]
    for name, chosen in record["chosen"].items():
        rows = [row for row in record["tried"] if row["method"] == name]
        best = min(rows, key=lambda row: row["nll"])
        assert chosen == {key: value for key, value in best.items() if key not in ("method", "nll")}
        assert len(rows) >= 2
    for curve, row in zip(record["curves"], record["tried"], strict=False):
        assert curve["steps"] == [20, 40]
        assert row["nll"] == pytest.approx(min(curve["held_out_nll"]))  # that of early stopping
    table = runpy.run_path(str(EXPERIMENTS / "language_tables.py"))["choices_table"](record).splitlines()
    first = record["curves"][0]["held_out_nll"]
    assert table[4].startswith("| plain | 0.001 |")
    assert table[4].endswith(f"| {min(first):.4f} ({first[-1]:.4f}) |")
    assert len(table) == 4 + len(record["tried"])
    assert record["pretraining"]["nll"]["code"] < 5.2  # log 256 is 5.5


def test_choices_continue_where_they_were_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = choices(folder, monkeypatch).read_text()
    record, part = json.loads(whole), folder / "part.json"
    part.write_text(json.dumps({**record, "tried": record["tried"][:-2], "chosen": {}}))
    run(monkeypatch, "language_choices", *SMALL, "--base", folder / "base.pt", "--out", part)
    assert json.loads(part.read_text()) == record
    with pytest.raises(SystemExit, match="has choices for other settings"):
        run(monkeypatch, "language_choices", *SMALL, "--rank", 3, "--base", folder / "base.pt", "--out", part)


def test_adapters_are_compared_over_seeds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, out = choices(folder, monkeypatch), folder / "adapters.json"
    predict = lb.BayesianModel.predict
    asked = []

    def eager(self: Any, *args: Any, compile: bool | None = None, **settings: Any) -> Any:
        asked.append(compile)  # compiling takes too long for a test
        return predict(self, *args, **settings)

    monkeypatch.setattr(lb.BayesianModel, "predict", eager)
    words = [chosen, "--test", 8, "--seeds", 2, "--compile", "--base", folder / "base.pt", "--out", out]
    run(monkeypatch, "language_model", *words)
    record = json.loads(out.read_text())
    first, second = record["seeds"]
    names = ["mean-field", "mean-field, ivon", "Laplace", "std search"]
    ways = [f"{name} {way}" for name in names for way in WAYS]
    assert [*first] == [*second] == ["base", "plain", "plain, early stopping", *ways]
    assert first["base"]["nll"] == second["base"]["nll"]
    assert all(first[name]["nll"] != second[name]["nll"] for name in first if name != "base")
    assert all(row["nll_scaled"] > 0 and row["temperature"] > 0 for row in first.values())
    assert first["plain"]["auroc_mutual_information"] == 0.5
    assert first["mean-field 10 samples"]["bytes"] > first["plain"]["bytes"]
    assert record["settings"]["pretraining"] == 30
    assert {*record["compiled"]} == {"plain", *ways[:2]}
    assert asked.count(True) == 18
    assert [path.name for path in folder.glob("*.safetensors")] == []
    table = runpy.run_path(str(EXPERIMENTS / "language_tables.py"))["language_table"]
    lines = table(record).splitlines()
    mean = (first["plain"]["nll"] + second["plain"]["nll"]) / 2
    (line,) = [line for line in lines if line.startswith("| plain |")]
    assert line.split("|")[3].strip() == f"{mean:.4f}"
    record["compiled"] = {ways[0]: 1.25, ways[1]: 2.5, "plain": "a reason"}
    cells = [line.split("|")[-2].strip() for line in table(record).splitlines()[-11:]]
    assert cells == ["", "", "", "1.2", "2.5", "", "", "", "", "", ""]


def test_a_base_of_other_sizes_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices(folder, monkeypatch)
    words = ["--length", 16, "--base", folder / "base.pt", "--out", folder / "none.json"]
    with pytest.raises(SystemExit, match="was trained with other settings"):
        run(monkeypatch, "language_choices", *words)
