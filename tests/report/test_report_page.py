"""The text of the page: its content, what is omitted, and that all names are escaped."""

import html
import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_cases

from leanbayes.errors import LeanBayesError
from leanbayes.report import Cell, Column, Document, Gallery, MethodFigure, Row, Section, Table, merge, render, write
from leanbayes.report.cells import lines, writer
from leanbayes.report.figure import Figure, Series
from leanbayes.report.page import COLORS, DASHES, MARKERS, as_json, style_of

HOSTILE = ('</script><script>alert("1")</script>', "<!--<script>", "\"'><img src=x onerror=alert(1)>", "a\u2028b & c")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def small(name: str = "a", figures: tuple[MethodFigure, ...] = (), **fields: Any) -> Document:
    table = Table((Column("nll", "NLL", "quality", "low", "decimal"),), (Row(name, {"nll": Cell(0.5)}),))
    return Document("Title", table=table, sections=(Section("s", "Some section", "", figures),), **fields)


def line(x: tuple[float, ...], y: tuple[float, ...], name: str = "a") -> tuple[MethodFigure, ...]:
    return tuple(merge({name: [Figure("key", "A figure", "lines", "x", "y", "Caption.", (Series("", x, y),))]}))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_escaped(name: str):
    column = Column("nll", name, name, "low", "decimal", name)
    table = Table((column,), (Row(name, {"nll": Cell(0.5, 0.4, 0.6, (0.4, 0.6))}, 2),), {"nll": (name,)}, name, name)
    images = report_cases.galleries()[0].images
    section = Section("s", name, name, line((1.0,), (2.0,), name))
    page = render(
        Document(
            name, name, (name,), table, (section,), (Gallery(name, name, name, images),), {name: name}, {name: name}
        )
    )
    assert data_of(page)["methods"][0]["name"] == name
    assert page.count("<script") == page.count("</script") == 3
    rest = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
    assert "<!--" not in rest
    assert "<img src=x" not in rest
    assert html.unescape(rest).count(name) > 10


def test_numbers_that_are_not_finite_are_null():
    page = render(small(figures=line((0.0, 1.0, 2.0), (math.nan, math.inf, -math.inf))))
    assert data_of(page)["figures"][0]["series"][0]["y"] == [None, None, None]


def test_numbers_are_short():
    assert as_json([1 / 3, 1e-9 / 3, 123456.7, 2.0, np.float32(0.1), 7, True, None]) == (
        "[0.33333,3.3333e-10,123460,2,0.1,7,true,null]"
    )


def test_json_cannot_end_its_script():
    text = as_json({"<": "</script><!-- & \u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"<": "</script><!-- & \u2028"}


def test_empty_parts_are_omitted():
    page = render(small(figures=line((), ()), galleries=(Gallery("No images", "", "a", ()),)))
    for absent in (
        "Some section",
        "A figure",
        "No images",
        'id="examples"',
        'id="reading"',
        'id="summary"',
        "<noscript>",
    ):
        assert absent not in page
    assert "<table" not in render(Document("Title"))
    assert 'id="picker"' not in render(Document("Title"))


def test_nan_is_shown_as_a_dash():
    page = render(
        Document("Title", table=Table((Column("nll", "NLL"),), (Row("a", {"nll": Cell(math.nan)}), Row("b", {}))))
    )
    assert page.count('<span class="value">–</span>') == 2
    assert "nan" not in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S).lower()


def test_winners_are_marked_with_text():
    cells = [cell for line in lines(report_cases.table()) for cell in line.cells]
    names = sum(len(names) for names in report_cases.WINNERS.values())
    assert sum(cell.best for cell in cells) == names
    page = render(report_cases.document(points=10))
    assert page.count('<span class="hidden">marked: </span>') == names
    # The page shows the given winners, and determines none itself.
    assert '<span class="hidden">marked' not in render(small())


def test_a_cell_shows_its_runs_and_interval():
    table = Table((Column("a", "accuracy", form="percent"),), (Row("m", {"a": Cell(0.9, 0.89, 0.92, (0.88, 0.92))}),))
    (cell,) = lines(table)[0].cells
    assert (cell.text, cell.interval) == ("90.00%", "±1.50")
    assert cell.tip == "m, accuracy: 90.00%\ninterval: 89.00% to 92.00%\n2 runs: 88.00%, 92.00%"


def test_bars_are_in_the_range_of_their_column():
    for line in lines(report_cases.table()):
        for cell in line.cells:
            if cell.bar is not None:
                assert 0 < (cell.low or cell.bar) <= cell.bar <= (cell.high or cell.bar) <= 100


@pytest.mark.parametrize(
    ("form", "values", "texts"),
    [
        ("percent", [0.93121, math.nan], ["93.12%", "–"]),
        ("decimal", [0.12345, -1.0], ["0.1235", "−1.0000"]),
        ("number", [1234.5, 12.3], ["1,234", "12"]),
        ("number", [46.0, 2.31], ["46.00", "2.31"]),
        ("number", [0.0, math.inf], ["0.000", "∞"]),
        ("number", [3e12], ["3.000e+12"]),
        ("count", [1_234_567.0], ["1,234,567"]),
        ("times", [5.017], ["5.02×"]),
    ],
)
def test_numbers_of_a_column_have_the_same_decimals(form: Any, values: list[float], texts: list[str]):
    assert list(map(writer(form, values), values)) == texts


def test_every_method_has_a_different_style():
    styles = [style_of(index) for index in range(50)]
    assert len({(style["color"], style["marker"], style["dash"]) for style in styles}) == 50
    assert len({style["color"] for style in styles[:10]}) == len({style["marker"] for style in styles[:10]}) == 10
    css, page = asset("page.css"), render(Document("Title"))
    assert all(f".c{k} {{" in css and f"--c{k}:" in css for k in range(COLORS))
    assert all(f".d{k} {{" in css for k in range(1, DASHES))
    assert all(f'id="marker-{k}"' in page for k in range(MARKERS))


def asset(name: str) -> str:
    return resources.files("leanbayes.report").joinpath("assets", name).read_text(encoding="utf-8")


def test_the_page_is_self_contained():
    page = render(report_cases.document(points=10))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert html.unescape(policy[1]).startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert set(re.findall(r'(?:src|href)="([^"#]{1,5})', page)) == {"data:"}
    assert set(re.findall(r"\w+://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, not an address


def test_the_page_is_small():
    assert len(render(Document("Title")).encode()) < 70_000
    assert len(render(report_cases.document())) < 500_000


def test_the_page_is_written_atomically(tmp_path: Path):
    write(small(facts={"command": "file-\udcff.txt"}), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "file-?.txt" in text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(LeanBayesError, match="Cannot write"):
        write(small(), tmp_path / "missing" / "page.html")
