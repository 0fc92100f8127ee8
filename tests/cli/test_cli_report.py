"""`leanbayes report`: one HTML file about trained runs, and early errors for runs that do not belong together."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import EVALUATION, TINY, TOY, Cli, must_not_train
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
    """A run on images of digits."""
    folder = tmp_path_factory.mktemp("numbers") / "run"
    assert main([str(word) for word in ("fit", "deterministic", *DIGITS, "--out", folder)]) == 0
    return folder


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """The documents of the reports."""
    found: list[Document] = []

    def keep(document: Document, path: Path) -> None:
        found.append(document)
        write(document, path)

    monkeypatch.setattr("leanbayes.cli.report.write", keep)
    return found


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_evaluate(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it evaluates a run")

    monkeypatch.setattr("leanbayes.cli.evaluations.evaluated", must_not_evaluate)
    monkeypatch.setattr(Loop, "run", must_not_train)


def refused(cli: Cli, *words: object, code: int = 1) -> str:
    """Return the sentence of a report that is refused before any work."""
    output = cli("report", *words, code=code)
    assert output.out == ""
    assert re.fullmatch(r"leanbayes: [^\n]+[.?]\n", output.err), output.err
    return output.err


# -- reports ----------------------------------------------------------------------------------------------------------


def test_one_run_is_reported_and_its_evaluation_is_stored(cli: Cli, runs: Path, documents: list[Document]) -> None:
    shutil.copytree(runs / "deterministic-0", "run")
    Path("run/evaluation.json").unlink()
    output = cli("report", "run", *EVALUATION, "--quiet")
    assert output == (0, "The report is in report.html: open it in a browser.\n", "")
    (document,) = documents
    assert document.methods == ("deterministic",)
    assert document.title == "toy, mlp"
    assert (
        document.facts["command"]
        == "leanbayes report run --evaluation.shifts noise --evaluation.shift-examples 20 --quiet"
    )
    (row,) = document.table.rows
    stored = json.loads(Path("run/evaluation.json").read_text())
    assert row.cells["rmse"].mean == stored["scores"]["rmse"]
    assert row.cells["epoch_ms"].mean == pytest.approx(1e3 * read_record("run")["costs"]["epoch_seconds"][0])


@pytest.mark.usefixtures("no_work")
def test_a_stored_evaluation_is_not_repeated(cli: Cli, runs: Path, documents: list[Document]) -> None:
    cli("report", runs, *EVALUATION, "--out", "a.html")
    cli("report", *runs.glob("*-?"), *EVALUATION, "--out", "b.html")
    first = documents[0]
    assert first.methods == (
        "deterministic",
        "deterministic + temperature",
        "mean-field:samples=2",
    )  # in the order of the folder names
    cells = [{row.name: str(row.cells) for row in one.table.rows} for one in documents]  # NaN does not equal itself
    assert cells[0] == cells[1]
    assert first.subtitle == "2 methods, 2 seeds, 100 test examples"
    for row in first.table.rows:
        assert row.runs == 2
        assert row.cells["rmse"].low < row.cells["rmse"].mean < row.cells["rmse"].high


@pytest.mark.usefixtures("no_work")
def test_a_report_uses_the_stored_evaluation_whatever_its_settings(
    cli: Cli, runs: Path, documents: list[Document]
) -> None:
    before = {path: path.read_bytes() for path in runs.glob("*/evaluation.json")}
    cli("report", runs)
    assert documents[0].facts["test examples"] == "100; under shift 20"
    assert {path: path.read_bytes() for path in runs.glob("*/evaluation.json")} == before


def test_other_settings_or_other_data_give_a_new_evaluation(cli: Cli, documents: list[Document]) -> None:
    table = Path("a.csv")
    values = np.random.default_rng(0).normal(size=(60, 3))
    np.savetxt(table, values, delimiter=",")
    cli("fit", "deterministic", "--data", table, "--epochs", 1, "--quiet", "--out", "run")
    cli("report", "run", *EVALUATION, "--quiet")
    cli("report", "run", "--quiet")
    cli("report", "run", "--evaluation.shift-examples", 3, "--evaluation.shifts", "noise", "--quiet")
    found = [one.facts["test examples"].partition("; ")[2] for one in documents]
    assert found == ["under shift 6", "under shift 6", "under shift 3"]
    values[:, 2] *= 5  # other targets
    np.savetxt(table, values, delimiter=",")
    cli("report", "run", "--quiet")
    rmse = [one.table.rows[0].cells["rmse"].mean for one in documents]
    assert rmse[0] == rmse[1] == rmse[2] != rmse[3]


def test_ood_data_that_become_available_are_used(
    cli: Cli, numbers: Path, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(numbers, "run")
    monkeypatch.setattr("leanbayes.cli.evaluations.ood_partners", {"digits": ("mnist", "letters")}.get)
    settings = ("--evaluation.shifts", "labels", "--evaluation.no-pruning", "--evaluation.ood-examples", 30, "--quiet")
    cli("report", "run", *settings)
    assert "mnist" in documents[0].facts["left out"]
    # Other images of the same size replace it.
    monkeypatch.setattr("leanbayes.cli.evaluations.read_images", lambda name, *args: read_images("letters", "test"))
    cli("report", "run", *settings)
    keys = [{column.key for column in one.table.columns if "ood:" in column.key} for one in documents]
    assert keys == [
        {"ood:letters", "ood:rotated", "ood:noisy"},
        {"ood:mnist", "ood:letters", "ood:rotated", "ood:noisy"},
    ]
    assert "left out" not in documents[1].facts


@pytest.mark.usefixtures("no_work")
def test_the_page_loads_nothing_else(cli: Cli, runs: Path) -> None:
    cli("report", runs, *EVALUATION)
    page = Path("report.html").read_text()
    links = set(re.findall(r"""https?://[^\s"'<>)]*""", page))
    assert links <= {"http://www.w3.org/2000/svg"}  # a namespace, from which nothing is loaded
    assert not re.search(r"""\b(src|href)=["'](?!data:|#)|@import|url\((?!["']?(data:|#))""", page)
    assert "mean-field:<wbr>samples=2" in page
    assert str(runs) not in page  # a folder of this machine
    assert "leanbayes report a --evaluation.shifts noise" in page


@pytest.mark.usefixtures("no_work")
def test_titles_and_commands_are_escaped(cli: Cli, runs: Path) -> None:
    title = """<script>alert("1")</script> & <b>'bold'</b>"""
    cli("report", runs, *EVALUATION, "--title", title)
    page = Path("report.html").read_text()
    assert "<script>alert" not in page
    assert "<b>'bold'" not in page
    assert page.count("&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt; &amp; &lt;b&gt;&#39;bold&#39;&lt;/b&gt;") >= 2


def test_the_report_of_a_regression(cli: Cli, runs: Path, documents: list[Document]) -> None:
    cli("report", runs, *EVALUATION, "--quiet")
    (document,) = documents
    found = {section.id for section in document.sections}
    assert {"confidence", "shift", "model"} <= found
    assert not {"ood", "segmentation"} & found
    assert document.galleries == ()
    assert {"rmse", "crps", "coverage_95"} <= {column.key for column in document.table.columns}


def test_the_report_of_an_image_classifier(cli: Cli, numbers: Path, documents: list[Document]) -> None:
    words = ("--evaluation.shifts", "noise", "labels", "--evaluation.shift-examples", 20, "--ood", "rotated", "--quiet")
    cli("report", numbers, *words)
    (document,) = documents
    found = [section.id for section in document.sections]
    assert {"confidence", "shift", "ood", "model"} <= {*found}
    assert "segmentation" not in found
    (mistakes,) = document.galleries
    assert mistakes.title == "Most confident mistakes"
    assert len(mistakes.images) == 12
    assert {"accuracy", "ood:rotated"} <= {column.key for column in document.table.columns}
    assert Path("report.html").read_text().count("data:image/png;base64,") == 12


def test_the_report_of_a_segmentation(cli: Cli, scenes: Path, documents: list[Document]) -> None:
    words = ("--resize", 16, 16, "--model-options", "width=4", "--workers", 0, "--epochs", 1, "--quiet")
    cli("fit", "deterministic", "--data", scenes, *words, "--out", "run")
    cli("report", "run", "--evaluation.shifts", "noise", "--evaluation.shift-examples", 2, "--quiet")
    (document,) = documents
    found = {section.id for section in document.sections}
    assert {"confidence", "shift", "segmentation"} <= found
    assert "ood" not in found
    (gallery,) = document.galleries
    assert gallery.title == "Segmentations"
    assert [len(image.pngs) for image in gallery.images] == [4] * 4
    assert "miou" in {column.key for column in document.table.columns}
    page = Path("report.html").read_text()
    assert "Segmentations" in page
    assert str(scenes.parent) not in page


def test_runs_of_one_method_are_named_after_their_differences(cli: Cli, documents: list[Document]) -> None:
    for name, words in {
        "a": (),
        "b": ("--seed", 1),
        "c": ("--lr", 0.02, "--clip", 1.0),
        "d": ("--log-every", 7, "--seed", 2),  # it does not change the result
        "e": ("--model-options", "hidden=[3]"),
    }.items():
        cli("fit", "deterministic", *SMALL, *words, "--out", f"runs/{name}")
    cli("fit", "mean-field", *SMALL, "--out", "runs/f")
    cli("report", "runs", *EVALUATION, "--quiet")
    (document,) = documents
    assert {row.name: row.runs for row in document.table.rows} == {
        "deterministic (lr=0.01, clip=None, hidden=[4])": 3,
        "deterministic (lr=0.01, clip=None, hidden=[4]) + temperature": 3,
        "deterministic (lr=0.02, clip=1.0, hidden=[4])": 1,
        "deterministic (lr=0.01, clip=None, hidden=[3])": 1,
        "mean-field": 1,
    }


@pytest.mark.usefixtures("no_work")
def test_a_run_given_twice_is_used_once(cli: Cli, runs: Path, documents: list[Document]) -> None:
    cli("report", runs, runs / "deterministic-0", runs / "deterministic-0", *EVALUATION)
    assert [row.runs for row in documents[0].table.rows] == [2, 2, 2]


def test_the_number_of_samples_can_be_set(cli: Cli, runs: Path, documents: list[Document]) -> None:
    shutil.copytree(runs / "mean-field-samples=2-0", "run")
    cli("report", "run", *EVALUATION, "--quiet")
    cli("report", "run", *EVALUATION, "--evaluation.samples", 7, "--quiet")
    first, second = (one.table.rows[0].cells["nll"].mean for one in documents)
    assert first != second
    assert documents[1].facts["samples per prediction"] == "7"


# -- errors before any work -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_work")
def test_no_runs(cli: Cli) -> None:
    assert "The run is missing" in refused(cli, code=2)
    Path("empty").mkdir()
    for place in ("empty", "nowhere"):
        assert f"There is no run in {place}" in refused(cli, place)


@pytest.mark.usefixtures("no_work")
def test_runs_of_different_data(cli: Cli, runs: Path, numbers: Path) -> None:
    assert "trained on digits and toy, which cannot be compared" in refused(cli, runs, numbers)


@pytest.mark.usefixtures("no_work")
def test_runs_on_different_examples(cli: Cli, runs: Path) -> None:
    shutil.copytree(runs, "a")
    path = Path("a/deterministic-0/run.json")
    path.write_text(
        json.dumps({**(record := read_record(path.parent)), "config": {**record["config"], "examples": ""}})
    )
    assert "different" in refused(cli, "a")


@pytest.mark.usefixtures("no_work")
def test_two_runs_of_one_method_and_seed(cli: Cli, runs: Path) -> None:
    shutil.copytree(runs / "deterministic-0", "again")
    assert "same method and seed" in refused(cli, runs, "again")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not finished": (lambda run: edit(run, status="stopped"), "not finished (stopped)"),
    "no record": (lambda run: (run / "run.json").write_text("{"), "damaged"),
    "no model": (lambda run: (run / "model.safetensors").unlink(), "model.safetensors"),
}


def edit(run: Path, **changes: Any) -> None:
    (run / "run.json").write_text(json.dumps({**read_record(run), **changes}))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_that_cannot_be_opened_is_named(name: str, cli: Cli, runs: Path) -> None:
    shutil.copytree(runs, "a", ignore=shutil.ignore_patterns("evaluation.json"))
    damage, expected = DAMAGES[name]
    damage(Path("a/mean-field-samples=2-1"))  # the last
    message = refused(cli, "a", *EVALUATION)
    assert expected in message
    assert "a/mean-field-samples=2-1" in message


@pytest.mark.usefixtures("no_work")
def test_a_run_from_python(cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", lambda self: None)
        data = TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
        fit(nn.Linear(2, 1), lb.Deterministic(), data, out="run", epochs=1, progress=False)
    assert "lb.load" in refused(cli, runs, "run")


@pytest.mark.usefixtures("no_work")
def test_a_file_that_cannot_be_written(cli: Cli, runs: Path) -> None:
    assert "Cannot write missing/a.html" in refused(cli, runs, "--out", "missing/a.html")
    assert "Cannot write /proc/a.html" in refused(cli, runs, "--out", "/proc/a.html")
    Path("folder").mkdir()
    assert "folder is a folder" in refused(cli, runs, "--out", "folder")
    assert not Path("missing").exists()
    Path("old.html").write_text("mine")
    refused(cli, "nowhere", "--out", "old.html")
    assert Path("old.html").read_text() == "mine"
    assert {path.name for path in Path().iterdir()} == {"folder", "old.html"}


@pytest.mark.usefixtures("no_work")
def test_unsuitable_ood_data(cli: Cli, runs: Path, numbers: Path) -> None:
    write_svhn(Path("test_32x32.mat"))
    for words, expected in (
        ((numbers, "--ood", "svnh"), "no OOD data set 'svnh': did you mean svhn?"),
        ((numbers, "--ood", "qqq"), "no OOD data set 'qqq': use cifar10, "),
        ((numbers, "--ood", "svhn", "--root", "."), "The images of svhn are 3×32×32, and the network needs 1×8×8"),
        ((numbers, "--ood", "svhn", "--root", "no"), "svhn was not found in no"),
        ((runs, "--ood", "svhn", "--root", "."), "a classifier of images, and toy is not for one: leave out --ood"),
    ):
        assert expected in refused(cli, *words)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--evaluation.shifts", "fog"), ("'fog'", "corruptions, rotation, noise, labels")),
        (("--evaluation.shift-examples", 0), ("shift_examples=0",)),
        (("--evaluation.samples", "many"), ("--evaluation.samples", "'many'")),
        (("--titel", "x"), ("--titel", "--title")),
    ],
    ids=str,
)
def test_wrong_flags(words: tuple[Any, ...], expected: tuple[str, ...], cli: Cli, runs: Path) -> None:
    text = cli("report", runs, *words, code=2).err
    plain = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    for word in (*expected, "leanbayes report --help"):
        assert word in plain
    assert not Path("report.html").exists()
