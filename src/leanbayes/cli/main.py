"""The entry point of the command line: choose a command, and report errors in one sentence.

Exit codes: 0 success, 1 the command failed, 2 the arguments are wrong, 130 interrupted.
"""

import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from leanbayes.cli.console import complain, one_line_warnings
from leanbayes.core.names import suggestion
from leanbayes.core.version import __version__
from leanbayes.errors import LeanBayesError, missing_package
from leanbayes.methods import METHODS

Action = Callable[[], None]


class Command(NamedTuple):
    """What the usage message says about a command. The function `command` of its module parses its arguments."""

    arguments: str
    summary: str


COMMANDS = {
    "fit": Command("METHOD", f"train a network; METHOD is one of {', '.join(METHODS)}"),
    "evaluate": Command("RUN", "score a trained run on the test data"),
    "predict": Command("RUN FILES", "label, probability and uncertainty of images (mean and std for rows of a csv)"),
    "serve": Command("RUN", "a local page in the browser: drop an image, a row or a text, see what it predicts"),
    "compare": Command("[METHODS]", "train several methods on one data set: a table of quality and cost, and a report"),
    "report": Command("RUNS", "one HTML file about trained runs: calibration, shift, OOD data, cost"),
    "calibrate": Command("RUN", "fit one-pass predictions (without sampling) to held-out labels"),
    "decide": Command("RUN", "fit when to answer and when to ask a person, with a bound on wrong answers"),
    "acquire": Command("RUN POOL", "which unlabeled images or rows to label next, because they would teach most"),
    "compress": Command("RUN [OUT]", "write a compact file: weights share few Gaussians, with entropy coding"),
    "export": Command("RUN FILE", "write the model as ONNX: mean and variance in one pass, without Python"),
    "push": Command("RUN REPO", "share a run on the Hugging Face Hub, with a model card from its evaluation"),
    "sensitivity": Command("RUN", "which layers hold the weights that matter most, which PBN makes Bayesian"),
    "plan": Command("MODEL", "memory and communication of each GPU if a network is sharded over many"),
    "info": Command("PATH", "what a saved model or the folder of a run contains"),
    "completion": Command("SHELL", "a script that completes commands and flags in bash or zsh"),
}
_WIDTH, _INDENT = 80, 22


def usage() -> str:
    """Return the usage message."""
    lines = []
    for name, command in COMMANDS.items():
        start = f"  {name} {command.arguments}".ljust(_INDENT)
        rest = " " * _INDENT
        lines.append(
            textwrap.fill(command.summary, _WIDTH, initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)
        )
    commands = "\n".join(lines)
    return f"""usage: leanbayes COMMAND ...

Calibrated uncertainty for neural networks, at about the cost of a plain one.

{commands}

Examples:
  leanbayes fit mean-field                  handwritten digits, in a minute
  leanbayes fit mean-field --data cifar10 --model resnet-18 --root FOLDER
  leanbayes COMMAND --help                  all options of a command
  torchrun --nproc-per-node 2 -m leanbayes fit mean-field      two processes
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    code = _run_safely(list(sys.argv[1:] if arguments is None else arguments))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Threads of torch may abort while the interpreter shuts down, which torchrun reports as a failed training.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


def _run_safely(words: list[str]) -> int:
    """Run one command, and report errors as one sentence."""
    try:
        with one_line_warnings():
            code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        return complain(str(stop) or "Stopped.", 130)
    except BrokenPipeError:  # the reader of a pipe, such as head, is gone: discard the rest of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        return complain(str(missing_package(f"This needs {error.name}, which is not installed", "cli")), 1)
    except SystemExit as leaving:  # the parser has reported an error, or printed its help
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 2


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"leanbayes {__version__}")
        return 0
    if words[0] not in COMMANDS:
        hint = suggestion(words[0], COMMANDS, f"use one of {', '.join(COMMANDS)}.")
        return complain(f"There is no command {words[0]!r}: {hint}", 2)
    try:
        action = _parser_of(words[0])(words[1:])
    except LeanBayesError as error:
        return complain(str(error), 2)
    try:
        action()
    except LeanBayesError as error:
        return complain(str(error), 1)
    return 0


def _parser_of(name: str) -> Callable[[list[str]], Action]:
    """Import a command, and return the function that parses its arguments and returns its action."""
    parser: Callable[[list[str]], Action] = importlib.import_module(f"leanbayes.cli.{name}").command
    return parser
