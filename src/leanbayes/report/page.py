"""The page: one HTML file with all that it needs inside, so that it can be kept, sent, and opened anywhere."""

import base64
import functools
import hashlib
import json
import math
import os
import re
from importlib import resources
from typing import Any

from leanbayes.errors import LeanBayesError
from leanbayes.figures import Series
from leanbayes.files import written_whole
from leanbayes.report.cells import groups, lines
from leanbayes.report.document import Document, Gallery, MethodFigure, Png, Section

COLOURS, MARKERS, DASHES = 10, 10, 5  # as many as the style sheet and the template have
SCRIPTS = "parts numbers scales marks chart words readout figures table page".split()
DIGITS = 5  # significant ones, of each number in a figure: more than a screen can show
SMALL = 96  # images of fewer pixels are enlarged to about this width, pixel by pixel


def write(document: Document, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, which is there whole or not at all."""
    page = render(document).encode("utf-8", "replace")  # a file name in a command may be no valid text
    with written_whole(path) as file:
        file.write_bytes(page)


def render(document: Document) -> str:
    """Make the page of a document."""
    styles = [style_of(index) for index in range(len(document.methods))]
    sections = [kept for section in document.sections if (kept := _without_empty(section))]
    galleries: dict[str, list[Gallery]] = {}
    for gallery in document.galleries:
        if gallery.pictures:
            galleries.setdefault(gallery.title, []).append(gallery)
    figures = [one for section in sections for one in section.figures]
    css, early, late = _asset("page.css"), _asset("theme.js"), _script()
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(css)}; script-src {_hash(early)} {_hash(late)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template().render(
        document=document,
        methods=dict(zip(document.methods, styles, strict=True)),
        lines=lines(document.table),
        groups=groups(document.table.columns),
        sections=sections,
        numbers={one.figure.key: number for number, one in enumerate(figures)},
        galleries=galleries,
        data=as_json({"methods": _described(document, styles), "figures": [_packed(document, one) for one in figures]}),
        policy=policy,
        css=css,
        early=early,
        late=late,
    )


def style_of(index: int) -> dict[str, int]:
    """Give a method its colour, marker and dashes; from the eleventh on colours come again, with other markers."""
    turned = index + index // COLOURS
    return {"colour": index % COLOURS, "marker": turned % MARKERS, "dash": turned % DASHES}


def as_json(value: Any) -> str:
    """Write plain data as JSON that can stand in a script element; nan and infinity become null."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _described(document: Document, styles: list[dict[str, int]]) -> list[dict[str, Any]]:
    return [{"name": name, **style} for name, style in zip(document.methods, styles, strict=True)]


def _packed(document: Document, one: MethodFigure) -> dict[str, Any]:
    """Describe a figure to the script that draws it; the names of methods are in one list for all."""
    shared = {
        name: value
        for name, value in one.figure.to_json().items()
        if name not in ("series", "caption", "key") and value
    }
    number = {name: place for place, name in enumerate(document.methods)}
    series = [
        {"method": number[name], **_fields(each)}
        for name in sorted(one.by_method, key=document.methods.index)
        for each in one.by_method[name]
        if each.x
    ]
    return {**shared, "series": series}


def _fields(series: Series) -> dict[str, Any]:
    return {name: value for name, value in vars(series).items() if value or name == "name"}


def _without_empty(section: Section) -> Section | None:
    """Leave out figures that show nothing, and a section with neither text nor figures."""
    figures = tuple(one for one in section.figures if any(each.x for own in one.by_method.values() for each in own))
    return Section(section.id, section.title, section.text, figures) if figures or section.text.strip() else None


def _shown_size(png: Png) -> tuple[int, int, bool]:
    """Return the width and height to show an image in, and whether its pixels are to be seen as squares."""
    width, height = png.size
    times = max(1, SMALL // max(width, height, 1))
    return width * times, height * times, max(width, height) <= SMALL


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    """Join the scripts into one, whose names are nobody else's."""
    return '(() => {\n"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS) + "})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _template() -> Any:
    try:
        import jinja2
        import markupsafe
    except ModuleNotFoundError:
        raise LeanBayesError("A report needs jinja2: pip install 'leanbayes[report]'.") from None
    loader = jinja2.PackageLoader("leanbayes.report", "assets")
    around = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    may_break = markupsafe.Markup("<wbr>")
    around.filters["breakable"] = lambda name: may_break.join(re.split(r"(?<=[:,(])", name))
    around.filters["shown_size"] = _shown_size
    around.filters["anchor"] = lambda name: "-".join(str(name).lower().split())
    return around.get_template("page.html")
