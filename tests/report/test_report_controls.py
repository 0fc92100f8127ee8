"""The controls of the page: sorting the table, selecting methods, and reading values off figures."""

import math
import re
from typing import Any

import pytest
import report_cases

METHODS = report_cases.METHODS
# The bounding boxes of the marks of each panel, of its frame, and of all texts of the figure.
BOXES = """(svg) => {
  const box = (node) => {
    const { left, top, right, bottom } = node.getBoundingClientRect();
    return [left, top, right, bottom];
  };
  const panels = [...svg.querySelectorAll(":scope > g")].map((panel) => ({
    frame: box(panel.querySelector(".frame")),
    marks: [...panel.querySelectorAll(".marks path")].map((path) => [path.getAttribute("d"), ...box(path)]),
  }));
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, ...box(text)]);
  return { svg: box(svg), panels, texts };
}"""


def order_of(page: Any) -> list[str]:
    return page.locator("table.summary tbody th").evaluate_all("(all) => all.map((one) => one.dataset.order)")


def sorted_by(before: list[str], number: int, descending: bool) -> list[str]:
    """Sort names as a column should: rows without a value last, and equal ones in their order."""
    if number == 0:
        return sorted(before, reverse=descending)
    key = report_cases.COLUMNS[number - 1].key
    values = {row.name: row.cells[key].mean for row in report_cases.table().rows}
    known = [name for name in before if not math.isnan(values[name])]
    return sorted(known, key=values.__getitem__, reverse=descending) + [name for name in before if name not in known]


@pytest.mark.parametrize("how", ["mouse", "keys"])
def test_every_column_sorts_both_ways(open_page: Any, how: str):
    page = open_page(width=1700)
    for number, button in enumerate(page.locator("table.summary button.sort").all()):
        low_first = number == 0 or report_cases.COLUMNS[number - 1].best == "low"
        for descending in (not low_first, low_first, not low_first):
            before = order_of(page)
            if how == "mouse":
                button.click()
            else:
                button.press("Enter" if descending else "Space")
            assert order_of(page) == sorted_by(before, number, descending)
            directions = page.locator("th[aria-sort]").evaluate_all(
                "(all) => all.map((one) => one.getAttribute('aria-sort'))"
            )
            assert directions == ["descending" if descending else "ascending"]
    assert page.locator("#status").inner_text() == "Sorted by predict ms/1000, ascending."


def test_rows_without_a_value_come_last_both_ways(open_page: Any):
    page = open_page()
    button = page.get_by_role("button", name="AUROC")
    for _ in range(2):
        button.click()
        assert order_of(page)[-1] == report_cases.BROKEN


def test_the_tab_key_reaches_every_button(open_page: Any):
    page = open_page()
    reached: list[str] = []
    while reached.count("skipA") < 2 and len(reached) < 100:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className + document.activeElement.tagName"))
    assert reached[0] == "skipA"
    assert reached.count("sortBUTTON") == len(report_cases.COLUMNS) + 1
    assert reached.count("INPUT") == len(METHODS)
    assert reached.count("[object SVGAnimatedString]svg") == 9


def test_the_picker_hides_a_method_in_all_charts(open_page: Any):
    page = open_page()
    name, number = "mean-field", METHODS.index("mean-field")
    own = page.locator(f"[data-method='{number}']:visible")
    before = own.count()
    assert before > 10
    assert name in page.locator("#figure-severity .legend").inner_text()
    page.get_by_role("checkbox", name=name).uncheck()
    assert own.count() == 0
    assert page.locator("table.summary tbody tr:visible").count() == len(METHODS)  # the table keeps all
    assert name not in page.locator("#figure-severity .legend").inner_text()
    assert name not in page.locator("#figure-severity svg.chart").get_attribute("aria-label")
    assert page.locator("#figure-plane .panel-title").count() == 3
    assert not page.get_by_role("heading", name="Segmentation").is_visible()
    page.get_by_role("button", name="Show all").click()
    assert own.count() == before
    assert page.get_by_role("checkbox", name=name).is_checked()


def test_figures_without_methods_show_a_message(open_page: Any):
    page = open_page()
    for box in page.locator("#picker input").all():
        box.uncheck()
    assert page.locator("svg.chart").count() == 0
    assert page.get_by_text("None of the selected methods has this figure.").count() == 9
    page.locator("#picker input").first.check()
    assert page.locator("svg.chart").count() == 9
    assert page.heard == []


@pytest.mark.parametrize("width", [1280, 360])
def test_marks_and_labels_do_not_overlap(open_page: Any, width: int):
    page = open_page(width=width)
    found = page.locator("svg.chart").evaluate_all(f"(all) => all.map({BOXES})")
    assert len(found) == 9
    for number, figure in enumerate(found):
        for panel in figure["panels"]:
            frame = panel["frame"]
            assert frame[2] - frame[0] > 80
            assert frame[3] - frame[1] > 80
            assert panel["marks"]
            for d, *box in panel["marks"]:
                assert len(d) > 10
                assert "NaN" not in d
                assert is_inside(box, frame, 5), number
        assert len(figure["texts"]) >= 6
        for place, (text, *box) in enumerate(figure["texts"]):
            assert is_inside(box, figure["svg"], 1), text
            for other, *second in figure["texts"][:place]:
                assert are_apart(box, second), (text, other)


def is_inside(box: list[float], frame: list[float], slack: float) -> bool:
    first = all(mine >= edge - slack for mine, edge in zip(box[:2], frame[:2], strict=True))
    return first and all(mine <= edge + slack for mine, edge in zip(box[2:], frame[2:], strict=True))


def are_apart(a: list[float], b: list[float]) -> bool:
    return a[0] >= b[2] or a[2] <= b[0] or a[1] >= b[3] - 1 or a[3] <= b[1] + 1


def in_view(node: Any) -> Any:
    """Scroll to a part of the page, and wait for the end of scrolling, which closes tooltips."""
    node.scroll_into_view_if_needed()
    node.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return node


def point_of(page: Any, figure: str, method: str, number: int) -> tuple[float, float]:
    """Return the position of a point of a line on the screen."""
    svg = in_view(page.locator(f"#figure-{figure} svg.chart"))
    marks = svg.locator(f".marks[data-method='{METHODS.index(method)}']")
    x, y = re.findall(r"M([\d.]+) ([\d.]+)", marks.locator(".dot").get_attribute("d"))[number]
    return tuple(
        marks.evaluate(
            "(g, [x, y]) => { const p = new DOMPoint(x, y).matrixTransform(g.getScreenCTM()); return [p.x, p.y] }",
            [float(x), float(y)],
        )
    )


def test_the_mouse_shows_the_value_of_a_point(open_page: Any):
    page = open_page()
    page.mouse.move(*point_of(page, "severity", "deterministic", 3))
    tip = page.locator("#tip")
    lines = tip.inner_text().split("\n")
    assert lines[:2] == ["severity: 3", "accuracy"]
    assert lines[2].split("\t")[1:] == ["deterministic", "78.00% (74.00% to 81.00%)"]
    assert [line.split("\t")[1] for line in lines[2:]] == [*METHODS]  # one crosshair lists all series
    assert tip.locator(".active").inner_text().split("\t")[1] == "deterministic"
    assert page.locator("#figure-severity .cross").count() == 1
    page.get_by_role("checkbox", name="ensemble").uncheck()
    page.mouse.move(*point_of(page, "severity", "mc-dropout", 5))
    assert tip.locator(".active").inner_text().split("\t")[1] == "mc-dropout"
    assert "ensemble" not in tip.inner_text()
    page.get_by_role("checkbox", name="ensemble").check()
    page.mouse.move(*point_of(page, "severity", "mc-dropout", 5))
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    assert page.locator(".cross").count() == 0
    page.mouse.move(*point_of(page, "size", "ensemble", 1))
    assert "seed 1" in tip.inner_text()
    assert "file in bytes: 246,180,000" in tip.inner_text()


def test_a_touch_shows_the_value_of_a_point(open_page: Any):
    page = open_page(width=360, height=740, has_touch=True, is_mobile=True)
    page.touchscreen.tap(*point_of(page, "severity", "deterministic", 5))
    tip = page.locator("#tip")
    assert "deterministic\t68.00%" in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.touchscreen.tap(5, 300)
    assert not tip.is_visible()


def test_the_arrow_keys_announce_values(open_page: Any):
    page = open_page()
    page.locator("#figure-severity svg.chart").focus()
    status = page.locator("#status")
    page.keyboard.press("ArrowRight")
    assert status.inner_text() == "deterministic, severity: 0, accuracy: 93.00% (92.00% to 93.00%)"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert status.inner_text().startswith("mean-field, severity: 1, ")
    page.keyboard.press("End")
    assert status.inner_text().startswith("mean-field, severity: 5, ")
    assert page.locator("#figure-severity .ring").count() == 1
    page.keyboard.press("Tab")
    assert page.locator(".ring").count() == 0


def test_values_of_bars_and_clouds_are_shown(open_page: Any):
    page = open_page()
    for figure, words in {
        "layers": "layer1.0.conv1.weight",
        "plane": "μ: ",
        "entropy": "entropy in nats: 0.05",
        "reliability": "confidence: 10.00%",
    }.items():
        page.locator(f"#figure-{figure} svg.chart").focus()
        page.keyboard.press("ArrowRight")
        assert words in page.locator("#tip").inner_text()


def test_the_area_of_a_point_is_its_share_of_the_examples(page: Any):
    scales = page.locator("#figure-reliability .marks[data-method='0'] .sized").evaluate_all(
        "(all) => all.map((one) => Number(one.getAttribute('transform').match(/scale\\((.*)\\)/)[1]))"
    )
    share = report_cases.sections(10)[0].figures[0].by_method["deterministic"][0].sizes
    assert scales == pytest.approx([max(0.8, 2.4 * part**0.5) for part in share[:14]], abs=0.05)
    assert len(set(scales)) > 2
    assert page.locator("#figure-reliability .whisker").count() == len(METHODS)


def test_a_figure_says_who_fails(open_page: Any):
    page = open_page()
    warnings = page.locator("#figure-severity .warning")
    assert [" ".join(text.split()) for text in warnings.all_inner_texts()] == [
        f"⚠ {name}: The accuracy falls below 65%." for name in ("ensemble", "ssvi:density=0.05", "mc-dropout")
    ]
    page.get_by_role("checkbox", name="ensemble").uncheck()
    assert page.locator("#figure-severity .warning:visible").count() == 2


def test_a_cell_shows_each_run(open_page: Any):
    page = open_page()
    in_view(page.locator("table.summary td").first).hover()
    lines = page.locator("#tip").inner_text().split("\n")
    assert lines[0] == "deterministic, accuracy: 93.48%"
    assert lines[1].startswith("95% interval of the mean: ")
    assert lines[2].startswith("3 runs: ")


def test_the_data_of_a_figure_are_in_a_table(open_page: Any):
    page = open_page()
    details = page.locator("#figure-severity details")
    details.locator("summary").click()
    details.locator("table").wait_for()
    assert details.locator("tbody tr").count() == 30
    assert details.locator("tbody tr").first.inner_text().split("\t") == [
        "deterministic",
        "0",
        "93.00%",
        "92.00%",
        "93.00%",
    ]
    page.get_by_role("checkbox", name="ensemble").uncheck()
    assert details.locator("tbody tr").count() == 24
    cloud = page.locator("#figure-plane details")
    cloud.locator("summary").click()
    cloud.locator("table").wait_for()
    assert cloud.locator("tbody tr").count() <= 4 * 60
    assert "1,941 of 2,000 points of deterministic" in cloud.inner_text()


def test_thousands_of_points_are_fast(open_page: Any):
    page = open_page()
    took = page.evaluate(
        """() => {
          const box = document.querySelector("#picker input");
          const start = performance.now();
          for (let k = 0; k < 10; k++) box.click();
          document.body.getBoundingClientRect();
          return (performance.now() - start) / 10;
        }"""
    )
    assert took < 1000  # milliseconds; about 40 on an idle machine
    assert page.locator("#figure-plane svg.chart path").count() < 150
