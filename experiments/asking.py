"""What the command lines of experiments ask alike, how they are kept, and how mistakes are told."""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from leanbayes.errors import LeanBayesError

PLACES = ("run", "runs", "comparisons", "out", "figures", "root", "device")  # folders, and what the machine tells


def with_places(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Ask where results go, where data are and where to compute, and for a seed."""
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--figures", type=Path, help="folder to draw the figures into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    parser.add_argument("--root", type=Path, help="folder that holds the data sets")
    return parser


def as_script(main: Callable[[], None]) -> None:
    """Run a script; a mistake is told in its one sentence."""
    try:
        main()
    except LeanBayesError as error:
        sys.exit(str(error))


def named_path(text: str) -> tuple[str, Path]:
    """Read NAME=PATH."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"write {text!r} as NAME=PATH")
    return name, Path(path)


def command_of(script: str, args: argparse.Namespace, words: Iterable[str], hidden: Iterable[str] = ()) -> str:
    """Return the command of this process, without the folders of its machine: some words, and all other flags."""
    flags = []
    for name, value in vars(args).items():
        if name in (*PLACES, *hidden) or value is None or value is False or value == []:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        flags += [f"--{name.replace('_', '-')}", *("none" if one is None else str(one) for one in values)]
    return shlex.join(["python", f"experiments/{script}.py", *words, *flags])
