"""`leanbayes compare`: several methods and seeds in one table, with winners only if the seeds show them."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from cli_cases import EVALUATION, TINY, Cli, load_run, must_not_train, without_times, write_image
from scipy import stats

import leanbayes as lb
from leanbayes import report
from leanbayes.cli import main, text_tables
from leanbayes.cli.text_tables import SHOWN, comparison, show
from leanbayes.core import config
from leanbayes.methods import METHODS
from leanbayes.report import Cell, Column, Row, Table
from leanbayes.report.columns import known_keys
from leanbayes.training.loop import Loop

LONG = "mean-field:rule=flipout,prior.scale=0.05,samples=4,init-std=0.02,prior.gain=1.0,relative=True,prior.center=zero"
SPECS = ["deterministic", "ensemble:members=2", LONG]
SHORT = ("deterministic", "mean-field:samples=2")


class Comparison(NamedTuple):
    folder: Path
    words: list[str]
    out: str
    record: dict[str, Any]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show all columns of a terminal."""
    monkeypatch.setattr(text_tables, "WIDTH", 1000)


def record_in(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "compare.json").read_text())
    return found


def compare(folder: Path, *words: object) -> Comparison:
    command = ["compare", *map(str, words), "--out", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch.object(text_tables, "WIDTH", 1000):
        assert main(command) == 0
    return Comparison(folder, command, out.getvalue(), record_in(folder))


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared")
    return compare(folder / "all", *SPECS, *TINY, "--seeds", 3, "--seed", 5)


@pytest.fixture(scope="session")
def finished_three(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(tmp_path_factory.mktemp("three") / "a", *SHORT, *TINY, "--seeds", 3)


@pytest.fixture(scope="session")
def finished_two(finished_three: Comparison) -> Comparison:
    return compare(finished_three.folder, *SHORT, *TINY)


@pytest.fixture
def two(finished_two: Comparison) -> Comparison:
    """A copy of a comparison of two runs, in the folder a, to be damaged."""
    shutil.copytree(finished_two.folder, "a", ignore=shutil.ignore_patterns("*-1", "*-2"))
    return Comparison(
        Path("a"),
        [*finished_two.words[:-1], "a"],
        finished_two.out.replace(str(finished_two.folder), "a"),
        finished_two.record,
    )


class Work(NamedTuple):
    """How often runs were trained and evaluated."""

    trained: int
    evaluated: int


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Work]:
    """Return a function that counts the work since its last call."""
    trained, evaluations, run, evaluated = [], [], Loop.run, report.evaluated

    def train(self: Loop) -> None:
        trained.append(self)
        run(self)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        evaluations.append(args)
        return evaluated(*args, **kwargs)

    def count() -> Work:
        found = Work(len(trained), len(evaluations))
        trained.clear()
        evaluations.clear()
        return found

    monkeypatch.setattr(Loop, "run", train)
    monkeypatch.setattr("leanbayes.cli.evaluations.evaluated", evaluate)
    return count


SCALED = "deterministic + temperature"
OF_TOY = {*SHOWN} - {"ood:", "error_at_90", "accuracy", "miou", "ece", "corruptions:accuracy", "corruptions:nll"}


def cells_of(out: str, method: str) -> dict[str, str]:
    """The line of a method in a table of the toy data, by the keys of the columns."""
    line = next(line for line in out.splitlines() if line.startswith(f"{method} ") and SCALED not in line)
    keys = [key for key in known_keys() if key in OF_TOY]
    return dict(zip(keys, line.removeprefix(method).split(), strict=True))


def order_of(out: str, methods: list[str]) -> list[str]:
    lines = [line for line in out.splitlines() if line and " is significantly " not in line]
    found = [line.split()[0] for line in lines if SCALED not in line]
    return [name for name in found if name in methods]


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_shows_means_and_intervals_over_the_seeds(compared: Comparison) -> None:
    lines = compared.out.splitlines()
    assert lines[0] == "toy, mlp: 100 test examples, 3 seeds"
    assert sorted(lines[1].split()) == ["%", "95", "predict", "predict", "train", "trained"]
    assert lines[2].split()[:4] == ["method", "RMSE", "NLL", "CRPS"]
    assert {*lines[2].split()[4:]} == {"interval", "×1000", "file", "kB", "ms/epoch", "ms/1000", "×", "plain"}
    for spec in SPECS:
        cells = cells_of(compared.out, spec)
        for key, decimals in (("rmse", 2), ("nll", 4)):
            values = [one["scores"][key] for one in compared.record["results"] if one["name"] == spec]
            assert len(values) == 3
            half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / math.sqrt(3)
            assert cells[key].rstrip("*") == f"{np.mean(values):.{decimals}f}±{half:.{decimals}f}"
        assert "±" not in cells["kilo_trained"]  # an exact count
        assert "±" in cells["epoch_ms"]
    assert lines[-1] == f"Runs and results are in {compared.folder}."
    assert lines[-2] == f"The report is in {compared.folder / 'report.html'}: open it in a browser."
    assert "A star marks methods that are significantly better than deterministic, and those that are the best" in (
        " ".join(compared.out.split())
    )
    assert "significantly better than the plain network in" in " ".join(compared.out.split())
    assert "…" not in compared.out


@pytest.mark.parametrize("column", ["nll", "rmse", "file_kb", "noise:rmse"])
def test_the_table_is_sorted_by_the_chosen_column(column: str, compared: Comparison, cli: Cli) -> None:
    means = {name: compared.record["summary"]["methods"][name][column]["mean"] for name in SPECS}
    out = cli(*compared.words, "--sort", column).out
    assert order_of(out, SPECS) == sorted(means, key=lambda name: means[name])
    assert len(set(means.values())) == len(means)
    if column == "noise:rmse":  # a column that is shown only on request
        assert "noisy" in out
        assert "noisy" not in compared.out.partition(" is significantly ")[0]


def test_high_values_are_the_best_of_some_columns(cli: Cli) -> None:
    words = (
        "compare",
        *SHORT,
        "--model",
        "mlp",
        "--epochs",
        1,
        "--quiet",
        *EVALUATION,
        "--ood",
        "rotated",
        "--out",
        "a",
    )
    out = cli(*words, "--sort", "accuracy").out
    methods = record_in("a")["summary"]["methods"]
    for column in ("accuracy", "ood:rotated"):
        means = {name: methods[name][column]["mean"] for name in SHORT}
        assert order_of(cli(*words, "--sort", column).out, list(SHORT)) == sorted(means, key=lambda name: -means[name])
    assert "digits, mlp: 599 test examples\n" in out
    assert re.search(r"AUROC.*\n.*rotated", out)
    accuracy = {name: f"{cells['accuracy']['mean']:.2%}" for name, cells in methods.items()}
    for name in SHORT:
        assert re.search(rf"^{name} +{accuracy[name]} ", out, re.MULTILINE)


def laid_out(**values: list[float]) -> Table:
    """A table of the columns nll and accuracy, with one row per method."""
    columns = (Column("nll", "NLL", best="low", form="decimal"), Column("accuracy", "accuracy", "", "high", "percent"))
    rows = tuple(Row(name, {"nll": Cell(nll), "accuracy": Cell(accuracy)}) for name, (nll, accuracy) in values.items())
    return Table(columns, rows, {"nll": ("b",)})


@pytest.mark.parametrize(
    ("sort", "order"),
    [("nll", ["b", "c", "d", "a"]), ("accuracy", ["d", "a", "c", "b"]), ("not_there", ["a", "b", "c", "d"])],
)
def test_undefined_values_are_last(sort: str, order: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    table = laid_out(a=[math.nan, 0.8], b=[0.1, math.nan], c=[0.2, 0.5], d=[math.inf, 0.9])
    show("", comparison(table, sort))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == order
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert cells == {"a": ["–", "80.00%"], "b": ["0.1000*", "–"], "c": ["0.2000", "50.00%"], "d": ["∞", "90.00%"]}


@pytest.mark.parametrize("columns", [None, "20", "80", "400"])
@pytest.mark.parametrize("color", [False, True])
def test_the_table_is_not_cut_off(
    columns: str | None, color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if color:  # as in a terminal
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    titles = {"nll": "NLL", "coverage_95": "95 % interval", "epoch_ms": "train ms/epoch", "ood:x": "AUROC x"}
    shown = tuple(Column(key, title, best="low", form="decimal") for key, title in titles.items())
    names = ["deterministic", LONG, "[bold]"]  # the last one looks like markup
    rows = tuple(Row(name, dict.fromkeys(titles, Cell(0.125, 0.1, 0.15))) for name in names)
    show("digits", comparison(Table(shown, rows, dict.fromkeys(titles, tuple(names))), "nll", everything=True))
    out = capsys.readouterr().out
    assert ("\x1b[" in out) == color
    title, above, head, *lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert title == "digits"
    assert above.split() == ["95", "%", "train"]
    assert head.split() == ["method", "NLL", "interval", "ms/epoch", "AUROC", "x"]
    assert [line.split() for line in lines] == [[name, *["0.1250±0.0250*"] * 4] for name in names]
    assert len({len(line) for line in (above, head, *lines)}) == 1
    assert len(head) < len(LONG) + 70  # no wider than necessary


def test_a_comparison_is_not_a_run_and_the_error_names_its_runs(compared: Comparison, cli: Cli) -> None:
    first = sorted(compared.folder.glob("*/run.json"))[0].parent
    assert cli("evaluate", compared.folder, code=1).err.endswith(f"give one of the runs in it, such as {first}.\n")


# -- winners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "starred"),
    [
        (([1.0, 1.1, 1.2], [2.0, 2.1, 2.21]), ["deterministic", SCALED]),
        (([2.0, 2.1, 2.21], [1.0, 1.1, 1.2]), ["mean-field:samples=2"]),
        (([1.0, 2.1, 1.2], [2.0, 1.1, 1.9]), []),  # either may be better
        (([1.0, 1.1, 1.2], [1.0, 1.1, 1.2]), []),
    ],
)
def test_a_star_marks_a_significant_difference(
    found: tuple[list[float], ...], starred: list[str], cli: Cli, finished_three: Comparison
) -> None:
    shutil.copytree(finished_three.folder, "a")
    for name, values in zip(("deterministic", "mean-field-samples=2"), found, strict=True):
        for seed, value in enumerate(values):
            path = Path("a", f"{name}-{seed}", "evaluation.json")
            stored = json.loads(path.read_text())
            for part in filter(None, (stored, stored["scaled"])):  # a temperature does not change answers
                part["scores"]["rmse"] = value
            evaluation = {part: of for part, of in stored.items() if part not in ("key", "digest")}
            stored["digest"] = hashlib.sha256(json.dumps(evaluation).encode()).hexdigest()
            path.write_text(json.dumps(stored))
    out = cli("compare", *SHORT, *TINY, "--seeds", 3, "--out", "a").out
    for name, values in zip(SHORT, found, strict=True):
        half = stats.t.ppf(0.975, 2) * stats.sem(values)
        assert cells_of(out, name)["rmse"] == f"{np.mean(values):.3f}±{half:.3f}{'*' * (name in starred)}"
    winners = record_in("a")["summary"]["winners"]
    assert winners.get("rmse", []) == starred
    assert winners["file_kb"] == ["deterministic", SCALED]  # an exact count


def test_one_seed_has_winners_only_by_exact_counts(two: Comparison) -> None:
    starred = [{key for key, cell in cells_of(two.out, name).items() if cell.endswith("*")} for name in SHORT]
    assert starred == [{"kilo_trained", "file_kb"}, set()]
    assert "±" not in two.out
    assert "With one seed there are no intervals, so only counts have winners: train more seeds." in two.out


def test_a_single_method_has_no_winners(cli: Cli) -> None:
    out = cli("compare", "deterministic", *TINY, "--out", "a").out
    assert "*" not in out
    assert "star" not in out
    assert "seed" not in out
    assert record_in("a")["summary"]["winners"] == {}


def test_the_table_fits_100_columns_with_the_most_important_metrics_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_tables, "WIDTH", 100)
    others = {"miou", "rmse", "crps", "coverage_95"}  # scores of other tasks
    keys = (*(key for key in known_keys() if key not in others), "ood:letters", "ood:noisy")
    shown = tuple(Column(key, key.replace("_", " "), best="low", form="decimal") for key in keys)
    rows = tuple(Row(name, dict.fromkeys(keys, Cell(0.125, 0.1, 0.15))) for name in ("deterministic", "mean-field"))
    for everything in (False, True):
        show("", comparison(Table(shown, rows, {}), "brier", everything))
        out = capsys.readouterr().out
        assert (max(map(len, out.splitlines())) <= 100) != everything
        assert all(title in out.split() for title in ("accuracy", "nll", "brier", "ood:noisy"))
        assert ("sensitivity" in out) == everything


def test_all_compares_all_methods_and_no_names_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr("leanbayes.cli.compare._compare", lambda options, recipes, methods, _: found.append(methods))
    for words in (["compare"], ["compare", "--all"], ["compare", "--all", "ensemble"]):
        assert main(words) == 0
    assert [list(methods) for methods in found] == [["deterministic", "mean-field", "vdp"], list(METHODS), ["ensemble"]]


def test_json_prints_the_record_alone(cli: Cli, compared: Comparison) -> None:
    printed = json.loads(cli(*compared.words, "--json").out)
    assert printed["results"] == compared.record["results"]
    assert printed["summary"] == compared.record["summary"]
    assert printed == record_in(compared.folder)
    assert printed["command"] == f"{compared.record['command']} --json"


# -- the results ------------------------------------------------------------------------------------------------------


def test_the_record_is_complete(compared: Comparison) -> None:
    record, place = compared.record, compared.folder.parent
    evaluation = "--evaluation.shifts noise --evaluation.shift-examples 20"
    assert record["command"] == (
        f"leanbayes compare deterministic ensemble:members=2 {LONG} --data toy --epochs 1 --quiet "
        f"--model-options 'hidden=[4]' {evaluation} --seeds 3 --seed 5"
    )
    assert str(place) not in json.dumps(record)
    assert (record["seed"], record["seeds"]) == (5, 3)
    assert record["recipe"]["epochs"] == 1
    assert (record["evaluation"]["shifts"], record["evaluation"]["shift_examples"]) == (["noise"], 20)
    assert record["model"]["name"] == "mlp"
    assert record["source"]["name"] == "toy"
    assert record["versions"]["leanbayes"] == lb.__version__
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cores"] == os.cpu_count()
    assert [(one["name"], one["seed"]) for one in record["results"]] == [(s, n) for n in (5, 6, 7) for s in SPECS]
    for result in record["results"]:
        assert {"rmse", "nll", "crps", "coverage_95", "examples", "predict_ms_per_1000"} <= result["scores"].keys()
        assert {shift["family"] for shift in result["shifts"]} == {"none", "noise"}
        assert {"rmse", "nll"} <= result["shifts"][0]["scores"].keys()
        assert result["ood"] == result["explanation"] == {}
        assert result["pruning"]
        costs = result["costs"]
        assert {"trainable", "file_bytes", "epoch_seconds", "train_seconds", "ours", "plain", "ratios"} <= costs.keys()
        assert costs["ours"].keys() == costs["plain"].keys() == costs["ratios"].keys()
        assert costs["ratios"]["file_bytes"] == costs["ours"]["file_bytes"] / costs["plain"]["file_bytes"]
    one, both = record["results"][:2]
    assert config.decode(both["method"]) == lb.Ensemble(2)
    assert one["costs"]["trainable"] * 2 - 1 == both["costs"]["trainable"]
    assert list(record["summary"]["methods"]) == [SPECS[0], SCALED, *SPECS[1:]]
    assert record["summary"]["winners"]["kilo_trained"] == ["deterministic", SCALED]
    for cells in record["summary"]["methods"].values():
        assert cells["rmse"]["low"] < cells["rmse"]["mean"] < cells["rmse"]["high"]


def test_the_record_has_ood_detection(cli: Cli) -> None:
    words = ("--model", "mlp", "--epochs", 1, "--quiet", *EVALUATION, "--ood", "Rotated", "noisy", "--out", "a")
    cli("compare", "deterministic", *words, "--evaluation.ood-examples", 30)
    (result,) = record_in("a")["results"]
    assert list(result["ood"]) == ["rotated", "noisy"]
    for one in result["ood"].values():
        assert one["examples"] == 30
        assert {"entropy", "max_probability", "mutual_information"} == one["by"].keys()
        assert 0 <= one["by"]["entropy"]["auroc"] <= 1


def test_records_and_reports_do_not_contain_folders_of_this_machine(cli: Cli, table: Path) -> None:
    Path("a.yaml").write_text("epochs: 1\n")
    words = ("--data", table, "--config", Path("a.yaml").resolve(), *EVALUATION, "--quiet", "--out", table.parent / "a")
    cli("compare", "deterministic", *words)
    for name in ("compare.json", "report.html"):
        text = Path("a", name).read_text()
        assert str(table.parent) not in text
        assert "--data table.csv --config a.yaml --evaluation.shifts noise" in text


def test_missing_ood_data_are_noted_without_their_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanbayes.cli.evaluations.ood_partners", {"digits": ("mnist",)}.get)
    root = Path("somewhere").resolve()
    words = ("--model", "mlp", "--epochs", 1, "--quiet", *EVALUATION, "--root", root, "--out", "a")
    out = cli("compare", "deterministic", *words).out
    assert "OOD detection on mnist is missing, because it cannot be read: --ood mnist says why.\n" in out
    assert list(record_in("a")["results"][0]["ood"]) == ["rotated", "noisy"]
    page = Path("a/report.html").read_text()
    assert "OOD detection on mnist is missing" in page
    assert str(root) not in page
    error = cli("compare", "deterministic", *words, "--ood", "mnist", code=1).err
    assert f"mnist was not found in {root}" in error


# -- finished work is not repeated ------------------------------------------------------------------------------------


def must_not_evaluate(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("it evaluates again")


def test_a_finished_comparison_is_not_repeated(compared: Comparison, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    monkeypatch.setattr("leanbayes.cli.evaluations.evaluated", must_not_evaluate)
    output = cli(*compared.words)
    assert output.err == ""  # --quiet
    assert output.out == compared.out
    assert record_in(compared.folder) == compared.record


def test_progress_is_reported(cli: Cli) -> None:
    words = ("compare", "deterministic", *(word for word in TINY if word != "--quiet"), "--out", "a")
    start, held_out, done = cli(*words).err.splitlines()
    assert start == "Deterministic on toy: 810 examples, 25 steps in a/deterministic-0"
    assert re.fullmatch(r"Held-out split: RMSE [\d.]+, NLL [\d.]+", held_out)
    scores = record_in("a")["results"][0]["scores"]
    assert done == f"deterministic, seed 0: RMSE {scores['rmse']:.4g}, NLL {scores['nll']:.4f} (1 of 1)"
    finished = "The run in a/deterministic-0 is finished: nothing was trained. --overwrite starts again."
    assert cli(*words).err.splitlines() == [finished, done]


def test_each_run_of_a_comparison_can_be_evaluated(compared: Comparison, cli: Cli) -> None:
    runs = sorted(path.parent for path in compared.folder.glob("*/run.json"))
    assert len(runs) == 3 * len(SPECS)
    assert {"deterministic-5", "ensemble-members=2-7"} <= {run.name for run in runs}
    found = {json.loads(cli("evaluate", run, "--json").out)["scores"]["rmse"] for run in runs}
    assert found == {result["scores"]["rmse"] for result in compared.record["results"]}
    assert len(found) > len(SPECS)


def test_runs_of_a_comparison_have_verdicts_as_those_of_fit(two: Comparison, cli: Cli) -> None:
    Path("row.csv").write_text("x\n100\n")
    (row,) = json.loads(cli("predict", next(two.folder.glob("mean-field*")), "row.csv", "--json").out)
    assert row["verdict"] == "ask a person: unlike the training data"


def test_only_new_runs_are_trained_and_evaluated(two: Comparison, cli: Cli, work: Callable[[], Work]) -> None:
    cli(*two.words, "--seeds", 2)
    assert work() == (2, 2)
    cli("compare", "ensemble:members=2", *two.words[1:], "--seeds", 2)
    assert work() == (2, 2)
    assert [one["name"] for one in record_in("a")["results"]] == ["ensemble:members=2", *SHORT] * 2
    cli("compare", "ensemble:members=2", *two.words[1:], "--seeds", 2)
    cli(*two.words, "--seed", 1)
    assert work() == (0, 0)


def test_overwrite_repeats_all_work(two: Comparison, cli: Cli, work: Callable[[], Work]) -> None:
    cli(*two.words, "--overwrite")
    assert work() == (2, 2)
    assert without_times(record_in("a")["results"]) == without_times(two.record["results"])


DAMAGES = {
    "empty": lambda text: "",
    "truncated": lambda text: text[:-100],
    "not an object": lambda text: "[]",
    "foreign": lambda text: '{"a": 1}',
    "without a key": lambda text: json.dumps({**json.loads(text), "key": None}),
    "changed by hand": lambda text: json.dumps({**json.loads(text), "costs": {}, "ood": None}),
    "without a part": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "curves"}),
    "of another version": lambda text: text.replace(f'"{lb.__version__}"', '"0.0.1"', 1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_evaluation_is_repeated(name: str, two: Comparison, cli: Cli, work: Callable[[], Work]) -> None:
    path = two.folder / "deterministic-0" / "evaluation.json"
    text = path.read_text()
    damaged = DAMAGES[name](text)
    assert damaged != text
    path.write_text(damaged)
    cli(*two.words)
    assert work() == (0, 1)
    assert without_times(record_in("a")["results"]) == without_times(two.record["results"])
    again, before = ({**json.loads(one), "digest": None} for one in (path.read_text(), text))
    assert without_times(again) == without_times(before)


def test_an_evaluation_that_is_not_text_is_repeated(two: Comparison, cli: Cli, work: Callable[[], Work]) -> None:
    (two.folder / "deterministic-0" / "evaluation.json").write_bytes(b"\xff\xfe\x00")
    cli(*two.words)
    assert work() == (0, 1)


@pytest.mark.parametrize(
    "words", [("--evaluation.samples", 3), ("--evaluation.seed", 1), ("--evaluation.shift-examples", 10)], ids=str
)
def test_other_settings_give_a_new_evaluation(
    words: tuple[object, ...], two: Comparison, cli: Cli, work: Callable[[], Work]
) -> None:
    cli(*two.words, *words)
    assert work() == (0, 2)
    assert record_in("a")["results"] != two.record["results"]
    cli(*two.words, *words)
    assert work() == (0, 0)


def test_a_changed_model_is_evaluated_again(two: Comparison, cli: Cli, work: Callable[[], Work]) -> None:
    run = two.folder / "deterministic-0"
    bnn = load_run(run)
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.mul_(1.5)
    lb.save(bnn, run / "model.safetensors")
    cli(*two.words)
    assert work() == (0, 1)
    old, new = two.record["results"], record_in("a")["results"]
    assert new[0]["scores"]["rmse"] != old[0]["scores"]["rmse"]
    assert new[1] == old[1]


def test_an_evaluation_that_cannot_be_stored_is_reported_and_shown(
    two: Comparison, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, values: Any) -> None:
        raise lb.LeanBayesError(f"Cannot write {path}.")

    monkeypatch.setattr("leanbayes.cli.evaluations.write_json", read_only)
    output = cli(*(word for word in two.words if word != "--quiet"), "--evaluation.seed", 3)
    for name in ("deterministic-0", "mean-field-samples=2-0"):
        assert f"The evaluation is not stored: Cannot write a/{name}/evaluation.json.\n" in output.err
    assert cells_of(output.out, "deterministic")


# -- undefined values -------------------------------------------------------------------------------------------------


def strictly(text: str) -> Any:
    """Read JSON strictly, without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_undefined_values_are_null_in_files_and_a_dash_in_tables(cli: Cli, work: Callable[[], Work]) -> None:
    for name in ("cat", "dog"):
        for number in range(4):
            write_image(Path("pets", "train", name, f"{number}.png"), 8, 8, 3)
    write_image(Path("pets", "val", "cat", "0.png"), 8, 8, 3)  # with one answer, there is no right or no wrong one
    methods = ("deterministic", "weight-sharing:components=4")  # it has infinite settings
    task = ("--data", "pets", "--model-options", "hidden=[4]", "--model", "mlp", "--workers", 0, "--epochs", 2)
    words = ("compare", *methods, *task, *EVALUATION, "--quiet", "--out", "a")
    first, page = cli(*words), Path("a/report.html").read_text()
    files = list(Path("a").rglob("*.json"))
    assert {path.name for path in files} == {"compare.json", "run.json", "evaluation.json", "digests.json"}
    assert all(strictly(path.read_text()) for path in files)
    for run in record_in("a")["results"]:
        undefined = "entropy_wrong" if run["scores"]["accuracy"] else "entropy_right"
        assert [name for name, value in run["scores"].items() if value is None] == [undefined]
    assert work() == (3, 2)  # weight sharing has two stages
    earlier = Path("a/weight-sharing-components=4-0/run.json")  # as older versions wrote it
    earlier.write_text(earlier.read_text().replace('"merge_gradient": null', '"merge_gradient": Infinity'))
    assert cli(*words).out == first.out
    assert Path("a/report.html").read_text() == page
    assert work() == (0, 0)

    cli("report", "a", "--out", "again.html", "--quiet")
    assert all(name in Path("again.html").read_text() for name in methods)
    scores = strictly(cli("evaluate", "a/deterministic-0", "--json").out)["scores"]
    assert (scores["entropy_right"], scores["entropy_wrong"]).count(None) == 1
    assert re.search(r"^   entropy if (right|wrong) +–  ", cli("evaluate", "a/deterministic-0").out, re.MULTILINE)
    run = strictly(cli("info", "a/weight-sharing-components=4-0", "--json").out)["run"]
    assert run["config"]["method"]["merge_gradient"] is None
    assert config.decode(run["config"]["method"]) == lb.WeightSharing(components=4)


# -- config files -----------------------------------------------------------------------------------------------------


def test_methods_may_be_in_a_file(cli: Cli) -> None:
    Path("a.yaml").write_text(
        "methods: [deterministic, 'mean-field:samples=2']\ndata: toy\nepochs: 1\nquiet: true\nseeds: 2\nsort: rmse\n"
        "evaluation: {shifts: [noise], shift_examples: 20}\nreport: false\n"
    )
    text = cli("compare", "--config", "a.yaml", "--out", "a").out
    assert re.search(r"^mean-field:samples=2 ", text, re.MULTILINE)
    assert "ensemble" not in text
    assert "2 seeds" in text
    assert sorted(path.name for path in Path("a").iterdir()) == [
        *("compare.json", "deterministic-0", "deterministic-1", "mean-field-samples=2-0", "mean-field-samples=2-1")
    ]
    output = cli("compare", "ensemble:members=1", "--config", "a.yaml", "--seeds", 1, "--report", "--out", "b")
    assert "ensemble" in output.out  # flags override the file
    assert sorted(path.name for path in Path("b").iterdir()) == ["compare.json", "ensemble-members=1-0", "report.html"]


@pytest.mark.parametrize("line", ["model_options: {hidden: [4]}", "model_options: ['hidden=[4]']", "resize: [8, 8]"])
def test_a_file_does_not_change_the_methods_of_the_command_line(
    line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.yaml").write_text(f"quiet: true\n{line}\n")
    found: list[Any] = []
    monkeypatch.setattr("leanbayes.cli.compare._compare", lambda *args: found.extend(args))
    cli("compare", "deterministic", "--data", "toy", "--config", "a.yaml")
    assert found[0].methods == ("deterministic",)
    assert list(found[2]) == ["deterministic"]
