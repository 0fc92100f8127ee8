"""Hooks of mkdocs: pages from outside docs/ (README, CONTRIBUTING, ...), generated pages, and the links to all of them.

The pages are written for readers of the repository, so their links are paths in it. Here these links become paths in
the site. A link to the source of a tutorial leads to its page, and one to another file of the repository, such as a
program, becomes plain text.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}  # from the root of the repository, and their place in the site
GENERATED = Path(os.environ.get("LEANBAYES_PAGES", ROOT / "build" / "pages"))  # what the programs in tools/ wrote
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the images that pages show."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=_linked((ROOT / source).read_text(), "", target)))
    for path in sorted(GENERATED.rglob("*")):
        if path.is_file():
            files.append(File.generated(config, path.relative_to(GENERATED).as_posix(), abs_src_path=str(path)))
    for path in sorted((ROOT / "experiments" / "results").rglob("*")):
        if path.suffix in (".svg", ".png"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page in docs/."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return _linked(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)), page.file.src_uri)


def _linked(markdown: str, folder: str, target: str) -> str:
    """Rewrite the links of a page that was written for a folder of the repository, for its place in the site."""

    def rewrite(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, mark, anchor = link.partition("#")
        if not path or ":" in path:
            return match[0]
        found = posixpath.normpath(posixpath.join(folder, path))
        if found.startswith("docs/"):
            place = found.removeprefix("docs/")
            if place.startswith("tutorials/") and not target.startswith("tutorials/"):
                place = re.sub(r"\.py$", ".md", place)
        elif found in PAGES:
            place = PAGES[found]
        elif found.startswith("experiments/results/") and found.endswith((".svg", ".png")):
            place = found
        else:
            return text if (ROOT / found).exists() else match[0]
        return f"{image}[{text}]({posixpath.relpath(place, posixpath.dirname(target) or '.')}{mark}{anchor})"

    return _LINK.sub(rewrite, markdown)
