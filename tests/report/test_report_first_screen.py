"""A report of evaluated runs: the answer comes first, and the rest on request, on every screen and on paper."""

from pathlib import Path
from typing import Any

import pytest
from evaluated_cases import changed, picture, png, runs, with_scaled

from leanbayes.report import Document, document_of, write

METHODS = {"deterministic": 0.0, "ensemble": 0.05, "mean-field": 0.1, "pbn": 0.02, "ssvi": 0.01, "vdp": 0.0}
SCREENS = [(1400, 900), (1366, 768)]


def document() -> Document:
    some = []
    for one in runs(METHODS):
        found = one.evaluation["mistakes"]["index"]
        gallery = {"title": "M", "caption": "C", "pictures": [picture(index) for index in found]}
        one = changed(one, "evaluation", "galleries", value=[gallery])
        some.append(with_scaled(one) if one.method == "deterministic" else one)
    return document_of(some, command="leanbayes compare --seeds 3")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("first") / "report.html"
    write(document(), found)
    return found


@pytest.mark.parametrize(("width", "height"), SCREENS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_answer_and_the_verdicts_are_on_the_first_screen(
    open_page: Any, path: Path, width: int, height: int, scheme: Any
):
    page = open_page(path, width, height, color_scheme=scheme)
    assert page.heard == []
    lead = page.locator(".lead")
    assert lead.inner_text().startswith("mean-field is significantly better than the plain network, with and without")
    cards = page.locator(".verdict:visible")
    assert cards.count() == 4
    for card in (lead, *cards.all()):
        box = card.bounding_box()
        assert box["y"] + box["height"] <= height
    assert page.locator("#about").bounding_box()["y"] > page.locator("#section-model").bounding_box()["y"]


def segmentations() -> Document:
    """Return a report of two methods, with four segmentations of 320×240 pixels each."""
    labels = ("image", "truth", "prediction", "entropy")
    pictures = [{"pngs": [png(320, 240, label) for label in labels], "caption": "C " * 30, "alt": ""} for _ in range(4)]
    gallery = {"title": "Segmentations", "caption": "C " * 40, "pictures": pictures}
    some = [
        changed(one, "evaluation", "galleries", value=[gallery]) for one in runs({"deterministic": 0.0, "pbn": 0.1})
    ]
    return document_of([changed(one, "evaluation", "mistakes", value={}) for one in some])


@pytest.mark.parametrize("width", [1400, 1366, 390])
@pytest.mark.parametrize("kind", ["images", "segmentations"])
def test_the_page_is_not_long(open_page: Any, path: Path, tmp_path: Path, width: int, kind: str):
    if kind == "segmentations":
        path = tmp_path / "segmentations.html"
        write(segmentations(), path)
    page = open_page(path, width, 800)
    assert page.evaluate("document.documentElement.scrollHeight") <= 8000
    assert page.evaluate("document.documentElement.scrollWidth") == width
    if kind == "segmentations":
        assert page.locator("img:visible").count() == 2 * 4 * (2 if width == 390 else 4)  # methods, maps and images


def test_the_chosen_method_has_its_verdicts_and_lines(open_page: Any, path: Path):
    page = open_page(path)
    legend = page.locator("#figure-risk-coverage .legend")
    assert legend.inner_text().split() == ["deterministic", "mean-field"]  # the plain one and the best
    first = page.locator(".verdict:visible").all_inner_texts()
    page.get_by_label("Verdicts on").select_option("vdp")
    assert page.locator(".verdict:visible").all_inner_texts() != first
    assert page.locator("[data-verdicts]:visible").get_attribute("data-verdicts") == "vdp"
    assert legend.inner_text().split() == ["deterministic", "mean-field", "vdp"]
    assert page.get_by_role("checkbox", name="vdp").is_checked()
    assert page.heard == []


def test_the_table_has_six_columns_and_all_on_request(open_page: Any, path: Path):
    page = open_page(path, 1366, 768)
    table = page.locator("table.summary")
    heads, groups = table.locator("thead button.sort:visible"), table.locator(".groups th:visible")

    def spans() -> int:
        return sum(groups.evaluate_all("(all) => all.map((one) => one.colSpan)"))

    assert heads.all_inner_texts()[1:] == ["accuracy", "NLL", "ECE", "AUROC unknown", "predict × plain"]
    assert spans() == 6
    assert not page.locator(".cue").is_visible()
    button = page.locator("#columns")
    total = len(document().table.columns)
    assert button.inner_text() == f"All {total} columns"
    button.press("Enter")
    assert heads.count() == spans() == total + 1
    page.locator("#comparison.continues").wait_for()
    assert page.locator(".cue").is_visible()
    page.locator("#comparison").evaluate("(box) => box.scrollTo(box.scrollWidth, 0)")
    page.locator("#comparison:not(.continues)").wait_for()
    page.get_by_role("button", name="Main columns").click()
    assert heads.count() == 6


def test_a_narrow_screen_says_that_the_table_continues(open_page: Any, path: Path):
    page = open_page(path, 390, 844)
    assert page.locator(".cue").is_visible()
    assert page.locator("table.summary thead button.sort:visible").count() == 6


def test_all_columns_are_printed(open_page: Any, path: Path):
    page = open_page(path, 720, 1000)
    page.emulate_media(media="print")
    cells = page.locator("table.summary tbody tr").first.locator("td:visible")
    assert cells.count() == len(document().table.columns)
    boxes = page.locator("table.summary th:visible, table.summary td:visible").evaluate_all(
        "(all) => all.map((one) => [one.scrollWidth - one.clientWidth, one.getBoundingClientRect().right])"
    )
    assert max(over for over, _ in boxes) <= 1
    assert max(right for _, right in boxes) <= 720
    assert page.evaluate("document.documentElement.scrollWidth") == 720
    assert page.locator(".verdict:visible").count() == 4


def test_more_figures_are_drawn_on_request(open_page: Any, path: Path):
    page = open_page(path)
    more = page.locator("#section-shift details.more")
    assert not more.locator("[data-figure]").first.is_visible()
    assert more.locator("> summary").inner_text() == "10 more figures"
    more.locator("> summary").press("Enter")
    for figure in more.locator("[data-figure]").all():
        figure.locator("svg.chart").wait_for()
    assert page.heard == []


def test_a_report_on_one_model_has_verdicts(open_page: Any, tmp_path: Path):
    write(document_of(runs({"vdp": 0.1}, seeds=(0,))), tmp_path / "one.html")
    page = open_page(tmp_path / "one.html", 1366, 768)
    assert page.locator(".verdict:visible").count() == 4
    assert page.locator("#picker, #method, .lead").count() == 0
    assert page.locator("#table h2").inner_text() == page.locator("nav a[href='#table']").inner_text() == "Scores"
    assert page.locator("svg.chart").count() >= 5
    assert page.heard == []
