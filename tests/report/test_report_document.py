"""What a document takes, and how figures of several methods become one."""

import dataclasses
import json
import math

import pytest
import report_cases

from leanbayes.figures import Figure, Kind, Series
from leanbayes.report import Cell, Column, Document, MethodFigure, Png, Row, Section, Table, merge


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
    with pytest.raises(ValueError, match="'one' is lines elsewhere, and bars for b"):
        merge({"a": [figure("one")], "b": [figure("one", kind="bars")]})


def test_one_method_has_a_figure_once():
    with pytest.raises(ValueError, match="two figures named 'one'"):
        merge({"a": [figure("one"), figure("one")]})


def test_nothing_merges_to_nothing():
    assert merge({}) == merge({"a": []}) == []


def test_winners_must_be_in_the_table():
    columns, rows = (Column("nll", "NLL"),), (Row("a", {"nll": Cell(1.0)}),)
    with pytest.raises(ValueError, match="method 'b'"):
        Table(columns, rows, {"nll": ("b",)})
    with pytest.raises(ValueError, match="column 'ece'"):
        Table(columns, rows, {"ece": ("a",)})
    with pytest.raises(ValueError, match="tuple of names"):
        Table(columns, rows, {"nll": "a"})  # type: ignore[dict-item]


def test_names_are_given_once():
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
def test_a_sections_id_is_fit_for_an_address(name: str):
    with pytest.raises(ValueError, match="id is lower-case"):
        Section(name, "Title")


@pytest.mark.parametrize("data", ["", "bm8gcGljdHVyZQ==", "<script>", 'iVBORw0KGgo="'])
def test_a_png_is_one(data: str):
    with pytest.raises(ValueError, match="PNG file in base64"):
        Png(data)


def test_a_png_knows_its_size():
    sizes = {png.size for gallery in report_cases.galleries() for one in gallery.pictures for png in one.pngs}
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
