"""No link of a page is dead: files exist, and so do the headings that anchors name."""

import posixpath
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
# Pages that `make docs` writes, and what it writes them from.
GENERATED = {
    "docs/reference/cli.md": "tools/reference_pages.py",
    "docs/reference/glossary.md": "tools/reference_pages.py",
}


def text_of(page: str) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")


def anchors(page: str) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)}


def source_of(path: str) -> str:
    """Return what a page is made of: itself, or the source of a generated one."""
    if match := re.fullmatch(r"docs/tutorials/(\w+)\.md", path):
        return f"docs/tutorials/{match[1]}.py"
    return GENERATED.get(path, path)


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page: str) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, name = link.partition("#")
        if ":" in path:  # another host
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        exists = (ROOT / source_of(target)).exists()
        if not exists or (
            name and target.endswith(".md") and target == source_of(target) and name not in anchors(target)
        ):
            dead.append(link)
    assert not dead


def test_the_site_shows_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = set(re.findall(r"[\w/]+\.md", text.partition("\nnav:")[2]))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    pages |= {f"tutorials/{path.stem}.md" for path in (ROOT / "docs" / "tutorials").glob("*.py")}
    pages |= {"index.md", "contributing.md", "changelog.md", "security.md"}
    assert pages <= nav
    for page in nav - pages:
        assert page.startswith("reference/"), page
    assert yaml.safe_load(text)["strict"]


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Only calibration?", "only-calibration"),
        ("`lb.fit`", "lbfit"),
        ("One pass: mean and variance", "one-pass-mean-and-variance"),
    ],
)
def test_anchors_are_those_of_the_site(heading: str, expected: str) -> None:
    assert anchor(heading) == expected
