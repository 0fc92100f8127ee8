"""`leanbayes report`: one HTML file on runs that are there, and what cannot be brought together is told at once."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import LOOK, TINY, TOY, Cli, must_not_train
from data_cases import write_svhn
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.data import read_images
from leanbayes.report import Document, write
from leanbayes.training import fit, read_record
from leanbayes.training.loop import Loop

SMALL = (*TOY, "--model-options", "hidden=[4]")
DIGITS = ("--model", "mlp", "--epochs", 1, "--quiet")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two methods with two seeds."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    words = ("compare", "deterministic", "mean-field:samples=2", *TINY, "--seeds", 2, "--out", folder)
    assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pictures of classes."""
    folder = tmp_path_factory.mktemp("numbers") / "run"
    assert main([str(word) for word in ("fit", "deterministic", *DIGITS, "--out", folder)]) == 0
    return folder


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """What was written, before it became a page."""
    found: list[Document] = []

    def keep(document: Document, path: Path) -> None:
        found.append(document)
        write(document, path)

    monkeypatch.setattr("leanbayes.cli.report.write", keep)
    return found


@pytest.fixture
def nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_look(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it looks at a run")

    monkeypatch.setattr("leanbayes.cli.looking.assessed", must_not_look)
    monkeypatch.setattr(Loop, "run", must_not_train)


def refused(cli: Cli, *words: object, code: int = 1) -> str:
    """The sentence that a command is refused with, before any work."""
    told = cli("report", *words, code=code)
    assert told.out == ""
    assert re.fullmatch(r"leanbayes: [^\n]+[.?]\n", told.err), told.err
    return told.err


# -- what is reported -------------------------------------------------------------------------------------------------


def test_one_run_is_reported_and_what_was_found_is_kept(cli: Cli, runs: Path, documents: list[Document]) -> None:
    shutil.copytree(runs / "deterministic-0", "run")
    Path("run/assessment.json").unlink()
    told = cli("report", "run", *LOOK, "--quiet")
    assert told == (0, "The report is in report.html: open it in a browser.\n", "")
    (document,) = documents
    assert document.methods == ("deterministic",)
    assert document.title == "toy, mlp"
    assert document.facts["command"] == "leanbayes report run --look.shifts noise --look.shift-examples 20 --quiet"
    (row,) = document.table.rows
    kept = json.loads(Path("run/assessment.json").read_text())
    assert row.cells["rmse"].mean == kept["scores"]["rmse"]
    assert row.cells["epoch_ms"].mean == pytest.approx(1e3 * read_record("run")["costs"]["epoch_seconds"][0])


@pytest.mark.usefixtures("nothing_is_done")
def test_a_look_that_is_kept_is_not_taken_again(cli: Cli, runs: Path, documents: list[Document]) -> None:
    cli("report", runs, *LOOK, "--out", "a.html")
    cli("report", *runs.glob("*-?"), *LOOK, "--out", "b.html")
    first = documents[0]
    assert first.methods == ("deterministic", "mean-field:samples=2")  # in the order of the folders' names
    cells = [{row.name: str(row.cells) for row in one.table.rows} for one in documents]  # nan is not itself
    assert cells[0] == cells[1]
    assert first.subtitle == "2 methods, 2 seeds, 100 test examples"
    for row in first.table.rows:
        assert row.runs == 2
        assert row.cells["rmse"].low < row.cells["rmse"].mean < row.cells["rmse"].high


@pytest.mark.usefixtures("nothing_is_done")
def test_a_report_takes_the_look_that_there_is(cli: Cli, runs: Path, documents: list[Document]) -> None:
    before = {path: path.read_bytes() for path in runs.glob("*/assessment.json")}
    cli("report", runs)
    assert documents[0].facts["test examples"] == "100; under shift 20"
    assert {path: path.read_bytes() for path in runs.glob("*/assessment.json")} == before


def test_another_look_is_taken_where_it_is_asked_for_or_the_data_are_others(
    cli: Cli, documents: list[Document]
) -> None:
    table = Path("a.csv")
    values = np.random.default_rng(0).normal(size=(60, 3))
    np.savetxt(table, values, delimiter=",")
    cli("fit", "deterministic", "--data", table, "--epochs", 1, "--quiet", "--out", "run")
    cli("report", "run", *LOOK, "--quiet")
    cli("report", "run", "--quiet")
    cli("report", "run", "--look.shift-examples", 3, "--look.shifts", "noise", "--quiet")
    found = [one.facts["test examples"].partition("; ")[2] for one in documents]
    assert found == ["under shift 6", "under shift 6", "under shift 3"]
    values[:, 2] *= 5  # other targets
    np.savetxt(table, values, delimiter=",")
    cli("report", "run", "--quiet")
    rmse = [one.table.rows[0].cells["rmse"].mean for one in documents]
    assert rmse[0] == rmse[1] == rmse[2] != rmse[3]


def test_data_of_another_kind_that_come_later_are_seen(
    cli: Cli, numbers: Path, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(numbers, "run")
    monkeypatch.setattr("leanbayes.cli.looking.OOD", {"digits": ("mnist", "letters")})
    look = ("--look.shifts", "labels", "--look.no-pruning", "--look.ood-examples", 30, "--quiet")
    cli("report", "run", *look)
    assert "mnist" in documents[0].facts["left out"]
    # Files of other images of that size stand for it.
    monkeypatch.setattr("leanbayes.cli.looking.read_images", lambda name, *args: read_images("letters", "test"))
    cli("report", "run", *look)
    keys = [{column.key for column in one.table.columns if "ood:" in column.key} for one in documents]
    assert keys == [
        {"ood:letters", "ood:rotated", "ood:noisy"},
        {"ood:mnist", "ood:letters", "ood:rotated", "ood:noisy"},
    ]
    assert "left out" not in documents[1].facts


@pytest.mark.usefixtures("nothing_is_done")
def test_the_page_needs_nothing_else_and_is_of_this_comparison(cli: Cli, runs: Path) -> None:
    cli("report", runs, *LOOK)
    page = Path("report.html").read_text()
    links = set(re.findall(r"""https?://[^\s"'<>)]*""", page))
    assert links <= {"http://www.w3.org/2000/svg"}  # a name, which nothing is loaded from
    assert not re.search(r"""\b(src|href)=["'](?!data:|#)|@import|url\((?!["']?(data:|#))""", page)
    assert "mean-field:<wbr>samples=2" in page
    assert str(runs) not in page  # whose machine it was
    assert "leanbayes report a --look.shifts noise" in page


@pytest.mark.usefixtures("nothing_is_done")
def test_titles_and_commands_are_shown_as_they_are(cli: Cli, runs: Path) -> None:
    title = """<script>alert("1")</script> & <b>'bold'</b>"""
    cli("report", runs, *LOOK, "--title", title)
    page = Path("report.html").read_text()
    assert "<script>alert" not in page
    assert "<b>'bold'" not in page
    assert page.count("&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt; &amp; &lt;b&gt;&#39;bold&#39;&lt;/b&gt;") >= 2


def test_a_regression_has_a_report_of_its_own(cli: Cli, runs: Path, documents: list[Document]) -> None:
    cli("report", runs, *LOOK, "--quiet")
    (document,) = documents
    found = {section.id for section in document.sections}
    assert {"shift", "weights"} <= found
    assert not {"ood", "selective", "segmentation"} & found
    assert document.galleries == ()
    assert {"rmse", "crps", "coverage_95"} <= {column.key for column in document.table.columns}


def test_pictures_of_classes_have_a_report_of_their_own(cli: Cli, numbers: Path, documents: list[Document]) -> None:
    words = ("--look.shifts", "noise", "labels", "--look.shift-examples", 20, "--ood", "rotated", "--quiet")
    cli("report", numbers, *words)
    (document,) = documents
    found = [section.id for section in document.sections]
    assert {"calibration", "selective", "shift", "ood", "weights"} <= {*found}
    assert "segmentation" not in found
    mistakes, unsure = document.galleries
    assert (mistakes.title, unsure.title) == ("Surest mistakes", "Least sure answers")
    assert len(mistakes.pictures) == len(unsure.pictures) == 12
    assert {"accuracy", "ood:rotated"} <= {column.key for column in document.table.columns}
    assert Path("report.html").read_text().count("data:image/png;base64,") == 24


def test_a_segmentation_has_a_report_of_its_own(cli: Cli, scenes: Path, documents: list[Document]) -> None:
    words = ("--resize", 16, 16, "--model-options", "width=4", "--workers", 0, "--epochs", 1, "--quiet")
    cli("fit", "deterministic", "--data", scenes, *words, "--out", "run")
    cli("report", "run", "--look.shifts", "noise", "--look.shift-examples", 2, "--quiet")
    (document,) = documents
    found = {section.id for section in document.sections}
    assert {"calibration", "shift", "segmentation"} <= found
    assert not {"ood", "selective"} & found
    (gallery,) = document.galleries
    assert gallery.title == "Segmentations"
    assert [len(picture.pngs) for picture in gallery.pictures] == [4] * 4
    assert "miou" in {column.key for column in document.table.columns}
    page = Path("report.html").read_text()
    assert "Segmentations" in page
    assert str(scenes.parent) not in page


def test_runs_of_one_method_are_told_apart_by_what_they_differ_in(cli: Cli, documents: list[Document]) -> None:
    for name, words in {
        "a": (),
        "b": ("--seed", 1),
        "c": ("--lr", 0.02, "--clip", 1.0),
        "d": ("--log-every", 7, "--seed", 2),  # which changes nothing
        "e": ("--model-options", "hidden=[3]"),
    }.items():
        cli("fit", "deterministic", *SMALL, *words, "--out", f"runs/{name}")
    cli("fit", "mean-field", *SMALL, "--out", "runs/f")
    cli("report", "runs", *LOOK, "--quiet")
    (document,) = documents
    assert {row.name: row.runs for row in document.table.rows} == {
        "deterministic (lr=0.01, clip=None, hidden=[4])": 3,
        "deterministic (lr=0.02, clip=1.0, hidden=[4])": 1,
        "deterministic (lr=0.01, clip=None, hidden=[3])": 1,
        "mean-field": 1,
    }


@pytest.mark.usefixtures("nothing_is_done")
def test_a_run_that_is_named_twice_is_taken_once(cli: Cli, runs: Path, documents: list[Document]) -> None:
    cli("report", runs, runs / "deterministic-0", runs / "deterministic-0", *LOOK)
    assert [row.runs for row in documents[0].table.rows] == [2, 2]


def test_another_look_may_be_taken(cli: Cli, runs: Path, documents: list[Document]) -> None:
    shutil.copytree(runs / "mean-field-samples=2-0", "run")
    cli("report", "run", *LOOK, "--quiet")
    cli("report", "run", *LOOK, "--look.samples", 7, "--quiet")
    first, second = (one.table.rows[0].cells["nll"].mean for one in documents)
    assert first != second
    assert documents[1].facts["draws of a prediction"] == "7"


# -- what cannot be reported, which is told before any work -----------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_done")
def test_no_run_is_told(cli: Cli) -> None:
    assert "No run was given" in refused(cli, code=2)
    Path("empty").mkdir()
    for place in ("empty", "nowhere"):
        assert f"There is no run in {place}" in refused(cli, place)


@pytest.mark.usefixtures("nothing_is_done")
def test_runs_of_different_data_are_told(cli: Cli, runs: Path, numbers: Path) -> None:
    assert "trained on digits and toy, which cannot be compared" in refused(cli, runs, numbers)


@pytest.mark.usefixtures("nothing_is_done")
def test_runs_on_different_examples_are_told(cli: Cli, runs: Path) -> None:
    shutil.copytree(runs, "a")
    path = Path("a/deterministic-0/run.json")
    path.write_text(
        json.dumps({**(record := read_record(path.parent)), "config": {**record["config"], "examples": ""}})
    )
    assert "different" in refused(cli, "a")


@pytest.mark.usefixtures("nothing_is_done")
def test_two_runs_of_one_method_and_seed_are_told(cli: Cli, runs: Path) -> None:
    shutil.copytree(runs / "deterministic-0", "again")
    assert "same method and seed" in refused(cli, runs, "again")


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not finished": (lambda run: edit(run, status="stopped"), "not finished (stopped)"),
    "no record": (lambda run: (run / "run.json").write_text("{"), "damaged"),
    "no model": (lambda run: (run / "model.safetensors").unlink(), "model.safetensors"),
}


def edit(run: Path, **changes: Any) -> None:
    (run / "run.json").write_text(json.dumps({**read_record(run), **changes}))


@pytest.mark.usefixtures("nothing_is_done")
@pytest.mark.parametrize("name", SPOILT)
def test_a_run_that_cannot_be_opened_is_told_whichever_it_is(name: str, cli: Cli, runs: Path) -> None:
    shutil.copytree(runs, "a", ignore=shutil.ignore_patterns("assessment.json"))
    spoil, told = SPOILT[name]
    spoil(Path("a/mean-field-samples=2-1"))  # the last
    message = refused(cli, "a", *LOOK)
    assert told in message
    assert "a/mean-field-samples=2-1" in message


@pytest.mark.usefixtures("nothing_is_done")
def test_a_run_from_python_is_told(cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", lambda self: None)
        data = TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
        fit(nn.Linear(2, 1), lb.Deterministic(), data, out="run", epochs=1, progress=False)
    assert "lb.load" in refused(cli, runs, "run")


@pytest.mark.usefixtures("nothing_is_done")
def test_a_file_that_cannot_be_written_is_told(cli: Cli, runs: Path) -> None:
    assert "Cannot write missing/a.html" in refused(cli, runs, "--out", "missing/a.html")
    assert "Cannot write /proc/a.html" in refused(cli, runs, "--out", "/proc/a.html")
    Path("folder").mkdir()
    assert "folder is a folder" in refused(cli, runs, "--out", "folder")
    assert not Path("missing").exists()
    Path("old.html").write_text("mine")
    refused(cli, "nowhere", "--out", "old.html")
    assert Path("old.html").read_text() == "mine"
    assert {path.name for path in Path().iterdir()} == {"folder", "old.html"}


@pytest.mark.usefixtures("nothing_is_done")
def test_data_of_another_kind_that_do_not_suit_are_told(cli: Cli, runs: Path, numbers: Path) -> None:
    write_svhn(Path("test_32x32.mat"))
    for words, told in (
        ((numbers, "--ood", "svnh"), "no data set 'svnh' for --ood: did you mean svhn?"),
        ((numbers, "--ood", "qqq"), "no data set 'qqq' for --ood: there are digits, "),
        ((numbers, "--ood", "svhn", "--root", "."), "The images of svhn are 3×32×32, and the network wants 1×8×8"),
        ((numbers, "--ood", "svhn", "--root", "no"), "svhn was not found in no"),
        ((runs, "--ood", "svhn", "--root", "."), "images of classes, and toy has none"),
    ):
        assert told in refused(cli, *words)


@pytest.mark.usefixtures("nothing_is_done")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--look.shifts", "fog"), ("'fog'", "corruptions, rotation, noise, labels")),
        (("--look.shift-examples", 0), ("shift_examples=0",)),
        (("--look.samples", "many"), ("--look.samples", "'many'")),
        (("--titel", "x"), ("--titel", "--title")),
    ],
    ids=str,
)
def test_a_look_that_there_is_not_is_told(words: tuple[Any, ...], told: tuple[str, ...], cli: Cli, runs: Path) -> None:
    text = cli("report", runs, *words, code=2).err
    plain = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    for word in (*told, "leanbayes report --help"):
        assert word in plain
    assert not Path("report.html").exists()
