"""Code, its texts and the docs are in plain American English, without words that this project once used privately."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "experiments", "benchmarks", "examples", "tools", "docs")
# This file, and what reads the names that earlier versions wrote into files.
EXEMPT = {"tests/test_language.py", "experiments/stored.py", "tests/experiments/test_stored.py"}
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).as_posix() not in EXEMPT
]
PAGES = [
    path.relative_to(ROOT).as_posix() for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
]
# Say what stands behind the colon instead; see CONTRIBUTING.md.
WORDS = {
    r"spreads?": "std",
    r"doubts?|doubtful": "uncertainty",
    r"anew": "again, new",
    r"mend(s|ed|ing)?": "fix",
    r"told apart|tell apart": "significantly different, distinguish",
    r"(data|images|inputs) of another kind": "out-of-distribution data",
    r"(seen|looked at) from all sides": "evaluated",
    r"assess(es|ed|ment|ments)?": "evaluate, evaluation",
    r"\w*(optim|normal|initial|quant|reparameter|standard|minim|maxim)is(e|es|ed|er|ers|ing|ation)": "…ize",
    r"centre[sd]?|colours?|behaviours?|labelled|grey": "American spelling",
    r"is wished|are wished|as wished": "wanted",
}
KINDS = (tokenize.COMMENT, tokenize.STRING, tokenize.NAME, getattr(tokenize, "FSTRING_MIDDLE", -1))
PATTERN = re.compile("|".join(rf"(?P<w{number}>\b(?:{words})\b)" for number, words in enumerate(WORDS)), re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, strings and names of a file, but for lines with the former names of settings."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        former = re.search(r"former|renamed\(", token.line, re.IGNORECASE)
        if token.type in KINDS and not former:
            yield token.start[0], re.sub(r"_", " ", token.string)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_private_words(folder: str) -> None:
    found = []
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        for line, text in texts(path):
            if match := PATTERN.search(text):
                instead = [*WORDS.values()][int(str(match.lastgroup)[1:])]
                found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: say {instead}")
    assert not found, "\n".join(found[:40])


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CONTRIBUTING.md"])  # it lists the words
def test_no_private_words_in_pages(page: str) -> None:
    found = [
        f"{page}:{line}: {match[0]!r}"
        for line, text in enumerate((ROOT / page).read_text().splitlines(), 1)
        if (match := PATTERN.search(text))
    ]
    assert not found, "\n".join(found[:40])


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("the spread of a weight", True),
        ("a spreadsheet", False),
        ("optimise", True),
        ("start_anew", True),
        ("fix", False),
    ],
)
def test_the_pattern_finds_whole_words(text: str, bad: bool) -> None:
    assert bool(PATTERN.search(text.replace("_", " "))) == bad
