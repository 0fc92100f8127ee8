"""Choosing a command, and telling a user's mistake in one sentence: exit code 0 is success, 1 a failure, 2 misuse."""

import sys
from collections.abc import Callable, Sequence

import leanbayes
from leanbayes.errors import LeanBayesError
from leanbayes.methods import METHODS

USAGE = f"""usage: leanbayes COMMAND ...

Calibrated uncertainty for neural networks, at about the cost of a plain one.

  fit METHOD            train a network; METHOD is one of {", ".join(METHODS)}
  evaluate RUN          score a trained run on the test data it has never seen
  predict RUN IMAGES    label, probability and uncertainty of pictures
  compare [METHODS]     train several methods on one data set: one table of quality and cost
  info FILE             what is in a saved model, or in a run's folder

Try:  leanbayes fit mean-field                      handwritten digits, in a minute
      leanbayes fit mean-field --data cifar10 --model resnet-18 --root FOLDER
      leanbayes COMMAND --help                      everything that can be set
      torchrun --nproc-per-node 2 -m leanbayes fit mean-field       two processes
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"leanbayes {leanbayes.__version__}")
        return 0
    try:
        commands = _commands()
        if words[0] not in commands:
            return _complain(f"There is no command {words[0]!r}: use one of {', '.join(commands)}.", 2)
        commands[words[0]](words[1:])
    except LeanBayesError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("Stopped; the same command goes on from the last checkpoint.", 130)
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        sys.stderr.close()
        return 1
    except SystemExit as leaving:  # the parser has told what was wrong
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 2
    return 0


def _commands() -> dict[str, Callable[[list[str]], None]]:
    """Import the commands, which need the extras."""
    try:
        from leanbayes.cli.compare import compare
        from leanbayes.cli.evaluate import evaluate_run
        from leanbayes.cli.fit import fit_method
        from leanbayes.cli.info import info
        from leanbayes.cli.predict import predict_images
    except ModuleNotFoundError as error:
        raise LeanBayesError(
            f"The command line needs {error.name}, which is not installed: pip install 'leanbayes[cli]'."
        ) from None
    return {
        "fit": fit_method,
        "evaluate": evaluate_run,
        "predict": predict_images,
        "compare": compare,
        "info": info,
    }


def _complain(text: str, code: int) -> int:
    print(f"leanbayes: {text}", file=sys.stderr)
    return code
