"""Choosing a command, and telling a user's mistake in one sentence.

Exit codes: 0 success; 1 the command failed; 2 it was called in a wrong way; 130 it was interrupted.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import leanbayes
from leanbayes.errors import LeanBayesError, RuleMismatchWarning, did_you_mean
from leanbayes.methods import METHODS

USAGE = f"""usage: leanbayes COMMAND ...

Calibrated uncertainty for neural networks, at about the cost of a plain one.

  fit METHOD            train a network; METHOD is one of
                        {", ".join(METHODS)}
  evaluate RUN          score a trained run on the test data, which it has never seen
  predict RUN IMAGES    label, probability and uncertainty of pictures (or mean and std for rows of a csv)
  compare [METHODS]     train several methods on one data set: one table of quality and cost, and a report
  report RUNS           one HTML file on trained runs: calibration, shift, what they have never seen, cost
  calibrate RUN         bring predictions in one pass, without draws, in line with held-out labels
  compress RUN [OUT]    write a compact file: weights that share few Gaussians, entropy coded
  export RUN FILE       write the model as ONNX: mean and variance in one pass, without Python
  sensitivity RUN       which layers hold the weights that matter, which PBN makes Bayesian
  info PATH             what is in a saved model, or in a run's folder

Try:  leanbayes fit mean-field                      handwritten digits, in a minute
      leanbayes fit mean-field --data cifar10 --model resnet-18 --root FOLDER
      leanbayes COMMAND --help                      everything that can be set
      torchrun --nproc-per-node 2 -m leanbayes fit mean-field       two processes
"""

Action = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with one_line_warnings():
            code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        return _complain(str(stop) or "Stopped.", 130)
    except BrokenPipeError:  # the reader of a pipe, such as head, has left: what is still to be said goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        return _complain(f"This needs {error.name}, which is not installed: pip install 'leanbayes[cli]'.", 1)
    except SystemExit as leaving:  # the parser has told what was wrong, or shown its help
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 2
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"leanbayes {leanbayes.__version__}")
        return 0
    commands = _commands()
    if words[0] not in commands:
        hint = did_you_mean(words[0], commands, f"use one of {', '.join(commands)}.")
        return _complain(f"There is no command {words[0]!r}: {hint}", 2)
    try:
        action = commands[words[0]](words[1:])
    except LeanBayesError as error:
        return _complain(str(error), 2)
    try:
        action()
    except LeanBayesError as error:
        return _complain(str(error), 1)
    return 0


def _commands() -> dict[str, Callable[[list[str]], Action]]:
    """Import the commands: each reads its words, and returns what is to be done."""
    from leanbayes.cli.calibrate import calibrate_run
    from leanbayes.cli.compare import compare
    from leanbayes.cli.compress import compress_run
    from leanbayes.cli.evaluate import evaluate_run
    from leanbayes.cli.export import export_run
    from leanbayes.cli.fit import fit_method
    from leanbayes.cli.info import info
    from leanbayes.cli.predict import predict_images
    from leanbayes.cli.report import report
    from leanbayes.cli.sensitivity import sensitivity_of_run

    return {
        "fit": fit_method,
        "evaluate": evaluate_run,
        "predict": predict_images,
        "compare": compare,
        "report": report,
        "calibrate": calibrate_run,
        "compress": compress_run,
        "export": export_run,
        "sensitivity": sensitivity_of_run,
        "info": info,
    }


def _complain(text: str, code: int) -> int:
    print(f"leanbayes: {text}", file=sys.stderr)
    return code


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Tell warnings of leanbayes once, in a line, without the place in the code that they come from."""
    told: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, RuleMismatchWarning):
            usual(message, category, *place, **more)
        elif str(message) not in told:
            told.add(str(message))
            _complain(str(message), 0)

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.simplefilter("always", RuleMismatchWarning)
        warnings.showwarning = show
        yield
