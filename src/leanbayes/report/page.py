"""The report as one self-contained HTML file, which can be stored, sent, and opened anywhere."""

import base64
import functools
import hashlib
import json
import math
import os
import re
from importlib import resources
from typing import Any

from leanbayes.core.arguments import checked
from leanbayes.core.files import written_whole
from leanbayes.errors import missing_package
from leanbayes.report.cells import groups, lines
from leanbayes.report.document import Document, MethodFigure, Section
from leanbayes.report.figure import Series
from leanbayes.report.gallery import Gallery, Png

COLORS, MARKERS, DASHES = 10, 10, 5  # as in the style sheet and the template
SCRIPTS = "parts numbers scales marks chart descriptions readout figures table page".split()
DIGITS = 5  # significant digits of the numbers in figures: more than a screen can show
SMALL = 96  # images with fewer pixels are enlarged to about this width, without smoothing


@checked()
def write(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a report to an HTML file.

    The file is self-contained and needs no network. It is written completely or not at all.

    Args:
        document: The report.
        path: The file to write.

    Raises:
        LeanBayesError: If jinja2 is missing, or the file cannot be written.

    Example:
        >>> write(document_of(runs), "report.html")
    """
    page = render(document).encode("utf-8", "replace")  # a file name in a command may not be valid text
    with written_whole(path) as file:
        file.write_bytes(page)


@checked()
def render(document: Document) -> str:
    """Return a report as an HTML page.

    Args:
        document: The report.

    Returns:
        The whole page, with style sheet, scripts and images inside.

    Raises:
        LeanBayesError: If jinja2 is missing.

    Example:
        >>> from IPython.display import HTML
        >>> HTML(render(document_of(runs)))
    """
    styles = [style_of(index) for index in range(len(document.methods))]
    sections = [kept for section in document.sections if (kept := _without_empty(section))]
    galleries: dict[str, list[Gallery]] = {}
    for gallery in document.galleries:
        if gallery.images:
            galleries.setdefault(gallery.title, []).append(gallery)
    figures = [one for section in sections for one in (*section.figures, *section.more)]
    verdicts = {name: some for name, some in document.verdicts.items() if some}
    css, early, late = _asset("page.css") + _print_rows(document), _asset("theme.js"), _script()
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
        verdicts=verdicts,
        chosen=document.chosen if document.chosen in verdicts else next(iter(verdicts), ""),
        data=as_json({"methods": _described(document, styles), "figures": [_packed(document, one) for one in figures]}),
        policy=policy,
        css=css,
        early=early,
        late=late,
    )


def _print_rows(document: Document) -> str:
    """Return the style of the table on paper, where each column is a row: their number cannot be counted in CSS."""
    return f"@media print {{ .summary {{ grid-template-rows: repeat({1 + len(document.table.columns)}, auto); }} }}\n"


def style_of(index: int) -> dict[str, int]:
    """Return the color, marker and dashes of a method; from the eleventh on, colors repeat with other markers."""
    turned = index + index // COLORS
    return {"color": index % COLORS, "marker": turned % MARKERS, "dash": turned % DASHES}


def as_json(value: Any) -> str:
    """Return plain data as JSON that is safe in a script element; nan and infinity become null."""
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
    """Return a figure for the script that draws it, with methods as indices into one list of names."""
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
    """Remove empty figures, and return None for a section with neither text nor figures."""
    kept = [
        tuple(one for one in some if any(each.x for own in one.by_method.values() for each in own))
        for some in (section.figures, section.more)
    ]
    return Section(section.id, section.title, section.text, *kept) if any(kept) or section.text.strip() else None


def _shown_size(png: Png) -> tuple[int, int, bool]:
    """Return the displayed width and height of an image, and whether its pixels are shown as squares."""
    width, height = png.size
    times = max(1, SMALL // max(width, height, 1))
    return width * times, height * times, max(width, height) <= SMALL


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    """Join the scripts into one, with names in their own scope."""
    return '(() => {\n"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS) + "})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _template() -> Any:
    try:
        import jinja2
        import markupsafe
    except ModuleNotFoundError:
        raise missing_package("A report needs jinja2", "report") from None
    loader = jinja2.PackageLoader("leanbayes.report", "assets")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    may_break = markupsafe.Markup("<wbr>")
    environment.filters["breakable"] = lambda name: may_break.join(re.split(r"(?<=[:,(])", name))
    environment.filters["joined"] = lambda text: text.replace(" %", "\u00a0%")  # no line ends between number and sign
    environment.filters["shown_size"] = _shown_size
    environment.filters["anchor"] = lambda name: "-".join(str(name).lower().split())
    return environment.get_template("page.html")
