"""Fixtures: a browser, and pages of reports."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import report_cases
from browser_cases import browser as browser

from leanbayes.report import write


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write(report_cases.document(), path)
    return path


@pytest.fixture(scope="module")
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The report, for tests that do not change it."""
    with browser.new_page() as found:
        found.goto(report.as_uri())
        yield found


@pytest.fixture
def open_page(browser: Any, report: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the report, or another page, in a new window."""
    contexts = []

    def opened(path: Path = report, width: int = 1280, height: int = 900, **settings: Any) -> Any:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, reduced_motion="reduce", **settings)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.heard = []
        page.on("console", lambda message: page.heard.append(message.text))
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
