"""The checks of a document, its text form, and how figures of several methods are merged."""

import dataclasses
import json
import math

import pytest
import report_cases

from leanbayes.report import Cell, Column, Document, EvaluatedRun, MethodFigure, Png, Row, Section, Table, merge
from leanbayes.report.figure import Figure, Kind, Series


def figure(key: str, kind: Kind = "lines", title: str = "Title", y: float = 1.0) -> Figure:
    return Figure(key, title, kind, "x", "y", "Caption.", (Series("", (0.0,), (y,)),))


def test_figures_with_the_same_key_become_one():
    merged = merge(
        {"a": [figure("one"), figure("two", title="Two of a")], "b": [figure("two", title="Two of b", y=2.0)]}
    )
    one, two = merged
    assert [one.figure.key, two.figure.key] == ["one", "two"]
    assert two.figure.title == "Two of a"
    assert two.figure.series == ()
    assert list(one.by_method) == ["a"]
    assert {method: series[0].y for method, series in two.by_method.items()} == {"a": (1.0,), "b": (2.0,)}


def test_figures_of_different_kinds_do_not_merge():
    with pytest.raises(ValueError, match="'one' is lines elsewhere, but bars for b"):
        merge({"a": [figure("one")], "b": [figure("one", kind="bars")]})


def test_repeated_figures_of_one_method_raise_an_error():
    with pytest.raises(ValueError, match="two figures named 'one'"):
        merge({"a": [figure("one"), figure("one")]})


def test_no_figures_merge_to_none():
    assert merge({}) == merge({"a": []}) == []


def test_winners_must_be_in_the_table():
    columns, rows = (Column("nll", "NLL"),), (Row("a", {"nll": Cell(1.0)}),)
    with pytest.raises(ValueError, match="method 'b'"):
        Table(columns, rows, {"nll": ("b",)})
    with pytest.raises(ValueError, match="column 'ece'"):
        Table(columns, rows, {"ece": ("a",)})
    with pytest.raises(ValueError, match="tuple of names"):
        Table(columns, rows, {"nll": "a"})  # type: ignore[dict-item]


def test_repeated_names_raise_errors():
    with pytest.raises(ValueError, match="two columns named 'nll'"):
        Table((Column("nll", "NLL"), Column("nll", "again")), ())
    with pytest.raises(ValueError, match="two methods named 'a'"):
        Table((), (Row("a", {}), Row("a", {})))
    with pytest.raises(ValueError, match="two sections named 'a'"):
        Document("Title", sections=(Section("a", "A"), Section("a", "B")))
    shown = MethodFigure(figure("one"), {})
    with pytest.raises(ValueError, match="two figures named 'one'"):
        Document("Title", sections=(Section("a", "A", figures=(shown,)), Section("b", "B", figures=(shown,))))


@pytest.mark.parametrize("name", ["", "Capital", "two words", "1st", 'quote"'])
def test_an_invalid_section_id_raises_an_error(name: str):
    with pytest.raises(ValueError, match="must be lower-case"):
        Section(name, "Title")


@pytest.mark.parametrize("data", ["", "bm8gcGljdHVyZQ==", "<script>", 'iVBORw0KGgo="'])
def test_invalid_png_data_raise_an_error(data: str):
    with pytest.raises(ValueError, match="PNG file in base64"):
        Png(data)


def test_a_png_knows_its_size():
    sizes = {png.size for gallery in report_cases.galleries() for one in gallery.images for png in one.pngs}
    assert sizes == {(8, 8), (32, 32), (120, 90)}


def test_methods_are_those_of_the_table_first():
    shown = MethodFigure(figure("one"), {"only-a-figure": (), "a": ()})
    table = Table((), (Row("b", {}), Row("a", {})))
    assert Document("Title", table=table, sections=(Section("s", "S", figures=(shown,)),)).methods == (
        "b",
        "a",
        "only-a-figure",
    )


def test_a_document_can_be_written_as_json():
    values = json.loads(json.dumps(dataclasses.asdict(report_cases.document(points=10))))
    assert values["title"] == "CIFAR-10: five ways to a posterior"
    assert math.isnan(values["table"]["rows"][-1]["cells"]["auroc"]["mean"])


# -- text form --------------------------------------------------------------------------------------------------------


def test_parts_of_a_document_have_short_reprs():
    document = report_cases.document(points=10)
    assert (
        repr(document)
        == "Document('CIFAR-10: five ways to a posterior', 5 methods, 4 sections, 9 figures, 6 galleries)"
    )
    assert repr(document.table) == f"Table(5 methods × 11 columns: {', '.join(report_cases.METHODS)})"
    assert repr(document.sections[0]) == "Section('calibration', 'Calibration', 2 figures)"
    shown = document.sections[0].figures[0]
    assert repr(shown) == f"MethodFigure('reliability', 'Reliability', lines: {', '.join(report_cases.METHODS)})"
    assert repr(document.galleries[0]) == "Gallery('Most confident mistakes', 'deterministic', 8 images)"
    assert repr(document.galleries[0].images[0].pngs) == "(Png(8×8),)"
    assert repr(document.galleries[-1].images[0].pngs[1]) == "Png(120×90, 'truth')"


def test_reprs_count_one_in_the_singular():
    one = Table((Column("nll", "NLL"),), (Row("a", {"nll": Cell(1.0)}),))
    assert repr(one) == "Table(1 method × 1 column: a)"
    assert repr(Document("Title", table=one)) == "Document('Title', 1 method, 0 sections, 0 figures, 0 galleries)"
    assert repr(Table((), ())) == "Table(0 methods × 0 columns)"


def test_figures_and_runs_have_short_reprs():
    assert repr(figure("one")) == "Figure('one', 'Title', lines, 1 point)"
    assert repr(dataclasses.replace(figure("one"), series=())) == "Figure('one', 'Title', lines, 0 points)"
    scores = {"accuracy": 0.9721, "nll": 0.09812, "brier": 0.1}
    one = EvaluatedRun("mean-field", 3, {"config": {"data": "digits"}}, {"scores": scores, "shifts": [{}] * 100})
    assert repr(one) == "EvaluatedRun('mean-field', seed 3, digits, accuracy 0.972, nll 0.0981)"
