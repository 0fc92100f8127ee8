"""The page in a browser: opened from a file, with any theme, on any screen, with or without scripts."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import report_cases

from leanbayes.report import Cell, Column, Document, Gallery, Row, Section, Table, write

# All visible pieces of text: the text, its color, and the first opaque background behind it.
TEXTS = """() => {
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    const isShown = node.getClientRects().length && !node.closest("title, .hidden, .skip");
    if (!own || !isShown) continue;
    let behind = node;
    while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const style = getComputedStyle(node);
    const ink = node instanceof SVGElement ? style.fill : style.color;
    found.push([node.textContent.trim().slice(0, 40), ink, getComputedStyle(behind).backgroundColor]);
  }
  return found;
}"""
COLOR_OF = """(name) => {
  const node = document.body.appendChild(document.createElement("p"));
  node.style.color = `var(${name})`;
  const { color } = getComputedStyle(node);
  node.remove();
  return color;
}"""


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colors by WCAG 2: from 1 to 21."""

    def luminance(color: str) -> float:
        values = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def open_details(page: Any) -> None:
    page.locator("details").evaluate_all("(all) => all.forEach((one) => (one.open = true))")
    for details in page.locator("[data-figure] details").all():
        details.locator("table").wait_for()


def test_contrast_is_computed_correctly():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.48, abs=0.01)


def test_it_opens_without_messages_or_requests(open_page: Any, report: Path):
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_load_state("networkidle")
    assert page.heard == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]


def test_requests_are_blocked(open_page: Any):
    page = open_page()
    blocked = page.evaluate(
        """() => new Promise((done) => {
          document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
          document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/x.png" }));
        })"""
    )
    assert blocked == "img-src"


def test_hostile_names_are_shown_as_text(open_page: Any, tmp_path: Path):
    name = "</script><script>document.title='bad'</script>\"><img src=x onerror=\"document.title='bad'\">"
    table = Table((Column("nll", name, help=name),), (Row(name, {"nll": Cell(0.5)}),))
    section = Section("s", name, name, report_cases.sections(10)[0].figures)
    galleries = (Gallery(name, name, name, report_cases.galleries()[0].images),)
    write(
        Document("good", name, (name,), table, (section,), galleries, {name: name}, {name: name}), tmp_path / "p.html"
    )
    page = open_page(tmp_path / "p.html")
    assert page.title() == "good"
    assert page.heard == []
    assert page.locator(".chip").first.inner_text() == name
    page.locator("button.sort").nth(1).hover()
    assert page.locator("#tip").inner_text() == name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(open_page: Any, scheme: Any):
    page = open_page(color_scheme=scheme)
    open_details(page)
    page.locator("svg.chart").first.focus()
    page.keyboard.press("ArrowRight")
    texts = page.evaluate(TEXTS)
    assert len(texts) > 300
    for text, ink, background in texts:
        assert contrast(ink, background) >= 4.5, (text, ink, background)
    card = page.evaluate(COLOR_OF, "--card")
    for name in (
        "--axis",
        "--bar",
        "--whisker",
        "--link",
        "--best",
        "--warn",
        "--fail",
        *(f"--c{k}" for k in range(10)),
    ):
        assert contrast(page.evaluate(COLOR_OF, name), card) >= 3, name


def test_the_theme_can_be_changed_and_is_remembered(open_page: Any):
    page = open_page(color_scheme="light")

    def colors() -> list[str]:
        return [page.evaluate(COLOR_OF, name) for name in ("--page", "--ink", "--c0")]

    light = colors()
    page.emulate_media(color_scheme="dark")
    dark = colors()
    assert not set(light) & set(dark)
    page.get_by_role("button", name="Light", exact=True).click()
    assert colors() == light
    page.reload()
    assert colors() == light
    page.get_by_role("button", name="Dark", exact=True).press("Enter")
    page.emulate_media(color_scheme="light")
    assert colors() == dark
    page.emulate_media(media="print")
    assert colors()[1:] == light[1:]


@pytest.mark.parametrize("width", [360, 390, 800, 1366, 1400])
def test_nothing_overflows_the_page(open_page: Any, width: int):
    page = open_page(width=width, height=740)
    open_details(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    over = page.evaluate(
        """(width) => [...document.querySelectorAll("body *")]
          .filter((node) => !node.closest(".scroll, .chips, .hidden") && node.getClientRects().length)
          .filter((node) => node.getBoundingClientRect().right > width + 0.5)
          .map((node) => node.outerHTML.slice(0, 80))""",
        width,
    )
    assert over == []


def test_the_printed_table_has_a_row_per_metric(open_page: Any):
    page = open_page(width=720, height=1000)
    page.emulate_media(media="print")
    cells = page.locator(".summary tbody td")
    assert max(cells.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")) <= 720
    tops = page.locator(".summary tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((one) => one.getBoundingClientRect().top))"
    )
    assert len(tops) > 1
    assert all(row == tops[0] == sorted(row) and len(set(row)) == len(row) for row in tops)


def test_images_and_figures_have_descriptions(page: Any):
    alts = page.locator("img").evaluate_all("(all) => all.map((one) => one.alt)")
    assert len(alts) == 44
    assert all(alts)
    assert "truth: A street scene" in alts
    figures = page.locator("[data-figure]").all()
    assert len(figures) == 9
    for figure in figures:
        label = figure.locator("svg[role=img]").get_attribute("aria-label")
        assert label.startswith(figure.locator("h3").inner_text())
        assert len(label) > 150
    label = page.locator("#figure-severity svg[role=img]").get_attribute("aria-label")
    assert "deterministic: from 93.00% at 0 to 68.00% at 5, lowest 68.00% at 5, highest 93.00% at 0." in label


def test_small_images_are_enlarged_without_smoothing(page: Any):
    sizes = page.locator("img").evaluate_all(
        "(all) => all.map((one) => [one.naturalWidth, one.width, getComputedStyle(one).imageRendering])"
    )
    assert {tuple(one) for one in sizes} == {(8, 96, "pixelated"), (32, 96, "pixelated"), (120, 120, "auto")}


def test_headings_are_in_order(page: Any):
    levels = page.locator("h1, h2, h3, h4, h5, h6").evaluate_all("(all) => all.map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_links_have_targets(page: Any):
    links = page.locator("a").evaluate_all("(all) => all.map((one) => one.getAttribute('href'))")
    described = page.locator("[aria-describedby]").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('aria-describedby'))"
    )
    assert len(described) == len(report_cases.COLUMNS)
    for target in [link.removeprefix("#") for link in links] + described:
        assert page.locator(f'[id="{target}"]').count() == 1, target
    ids = page.locator("[id]").evaluate_all("(all) => all.map((one) => one.id)")
    assert len(ids) == len(set(ids))


def test_the_page_works_without_scripts(open_page: Any):
    page = open_page(java_script_enabled=False)
    assert page.locator("h1").inner_text() == "CIFAR-10: five ways to a posterior"
    assert page.locator("table.summary tbody tr").count() == 5
    assert "94.48%" in page.locator("table.summary").inner_text()
    assert page.locator("noscript p").is_visible()
    assert page.locator("img").first.is_visible()
    assert page.locator(".verdict").count() == 6
    assert page.locator(".verdict:visible").count() == 3
    page.get_by_text("Columns and terms explained").click()
    assert page.get_by_text("What the model does not know yet.").is_visible()
    for absent in ("#picker", "#theme", "#method", ".card"):
        assert not page.locator(absent).first.is_visible()
