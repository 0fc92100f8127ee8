"""Command-line arguments that experiments share, and the command that is stored with their results."""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from leanbayes.errors import LeanBayesError

PLACES = ("run", "runs", "comparisons", "out", "figures", "root", "device")  # folders and devices of one machine


def add_common_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments for outputs, data, device and seed."""
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    return parser


def run_script(main: Callable[[], None]) -> None:
    """Run a script; print the message of an expected error without a traceback."""
    try:
        main()
    except LeanBayesError as error:
        sys.exit(str(error))


def named_path(text: str) -> tuple[str, Path]:
    """Parse NAME=PATH."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} must have the form NAME=PATH")
    return name, Path(path)


def command_of(script: str, args: argparse.Namespace, words: Iterable[str], hidden: Iterable[str] = ()) -> str:
    """Return the command of this process without the paths of this machine: `words`, then all other flags."""
    flags = []
    for name, value in vars(args).items():
        if name in (*PLACES, *hidden) or value is None or value is False or value == []:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        flags += [f"--{name.replace('_', '-')}", *("none" if one is None else str(one) for one in values)]
    return shlex.join(["python", f"experiments/{script}.py", *words, *flags])
