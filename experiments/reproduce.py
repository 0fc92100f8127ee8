"""Make the files in experiments/results that are missing, then all pages: `make experiments`.

python experiments/reproduce.py --list
python experiments/reproduce.py --dry-run --only 'pbn/*'

results.toml has the command of every file. A file that is there is not made again: delete it to repeat its experiment.
An experiment that needs a run or a model that is not in runs/ repeats that training first. What was stopped
continues. What needs a GPU, or data sets in the folder LEANBAYES_DATA, is skipped without them, and so is all
that needs its outputs.
"""

import argparse
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).parents[1]
RESULTS = "experiments/results/"
MADE = ("runs/", RESULTS)  # where steps write
OUTPUTS = ("--out", "--keep", "--save-model", "--save-probs", "--figures")  # flags of what a command writes


@dataclass(frozen=True)
class Step:
    """One command of results.toml."""

    command: str
    result: str | None = None
    makes: str | None = None
    needs: tuple[str, ...] = ()
    note: str = ""

    @property
    def words(self) -> list[str]:
        """The command with the folder or file that it writes to."""
        words = shlex.split(self.command)
        if self.result is None:
            return words
        return [*words, "--out", f"runs/{Path(self.result).stem if words[0] == 'leanbayes' else self.result}"]

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the step writes, the most important one first."""
        words = self.words
        written = [words[place + 1] for place, word in enumerate(words) if word in OUTPUTS and word != "--figures"]
        first = RESULTS + self.result if self.result else self.makes or written[0]
        return tuple(dict.fromkeys([first, *written]))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Runs, models and results that the command reads."""
        words = self.words
        flags = ["", *words[:-1]]
        given = [word.rpartition("=")[2] if flag == "--file" else word for flag, word in zip(flags, words, strict=True)]
        read = [word for flag, word in zip(flags, given, strict=True) if flag not in OUTPUTS]
        if "--config" in words and "--start" not in words:
            settings = yaml.safe_load((ROOT / words[words.index("--config") + 1]).read_text())
            read += [settings["start"]] if "start" in settings else []
        return tuple(word for word in read if word.startswith(MADE))

    def title(self) -> str:
        """Name the step by its output."""
        return self.result or self.outputs[0]


def steps() -> list[Step]:
    """Read results.toml."""
    table = tomllib.loads((ROOT / "experiments" / "results.toml").read_text())["step"]
    return [Step(**{**row, "needs": tuple(row.get("needs", ()))}) for row in table]


def maker_of(path: str, known: Sequence[Step]) -> Step | None:
    """Return the step that writes a path or a folder around it; None if it is a stored file."""
    writes = (step for step in known for made in step.outputs if path == made or path.startswith(f"{made}/"))
    return next(writes, None)


def missing(known: Sequence[Step], pattern: str, exists: Callable[[str], bool]) -> list[Step]:
    """Return the steps to run, in order: those with a missing result, and those that make a missing input of them."""
    wanted = [step for step in known if (step.result or step.makes) and fnmatch.fnmatch(step.title(), pattern)]
    todo = [step for step in wanted if not exists(step.outputs[0])]
    for step in todo:  # the list grows
        makers = (maker_of(path, known) for path in step.inputs if not exists(path))
        todo += [maker for maker in makers if maker is not None and maker not in todo]
    return [step for step in known if step in todo]


def lack(step: Step) -> str | None:
    """Return why a step cannot run on this machine."""
    if "gpu" in step.needs and not torch.cuda.is_available():
        return "it needs a GPU"
    if "data" in step.needs and "LEANBAYES_DATA" not in os.environ:
        return "set LEANBAYES_DATA to the folder of the data sets"
    return None


def run(step: Step) -> None:
    """Run a command to its end, and store its result. A result that is there stays as it is."""
    program, *rest = step.words
    start = [sys.executable, "-m", "leanbayes"] if program == "leanbayes" else [sys.executable]
    for path in step.outputs:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run([*start, *rest, *(["--no-report"] if rest[0] == "compare" else [])], cwd=ROOT).returncode:
        sys.exit(f"{step.title()} failed: the messages above say why. The same command continues here.")
    if step.result is not None and not (ROOT / step.outputs[0]).exists():
        record = {"compare": "compare.json", "fit": "run.json"}.get(rest[0], "")
        shutil.copyfile(ROOT / step.outputs[1] / record, ROOT / step.outputs[0])


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="files to make, such as 'pbn/*'")
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    parser.add_argument("--list", action="store_true", help="print all files and their commands")
    args = parser.parse_args()
    known = steps()
    if args.list:
        for step in known:
            print(f"{step.title()}\n    {shlex.join(step.words)}{f'  # {step.note}' if step.note else ''}")
        return
    todo = missing(known, args.only, lambda path: (ROOT / path).exists())
    skipped: list[Step] = []
    for step in todo:
        why = lack(step)
        before = next((one for path in step.inputs if (one := maker_of(path, skipped)) is not None), None)
        if why or before:
            skipped.append(step)
            print(f"Skipped {step.title()}: {why or f'it needs {before.title() if before else None}'}.")
            continue
        print(shlex.join(step.words), flush=True)
        if not args.dry_run:
            run(step)
    if not todo:
        print("All files are there. To repeat an experiment, delete its file in experiments/results.")
    elif not args.dry_run and len(skipped) < len(todo):
        subprocess.run([sys.executable, "experiments/tables.py"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
