"""Scores every way to predict of trained runs and of compact files, for the headline table.

python experiments/headline.py RUNS --file NAME=PATH.lbc --ood svhn cifar100 --out experiments/results/headline/all.json

A plain network predicts as it is, and with a temperature that its held-out data choose; a model with random weights by
draws, and in one pass. The two factors of one pass are fitted to draws on held-out data, unless the model was trained
by one pass, or its file has them; and once more to the labels of the held-out data, as the temperature is. Of files
those data are what the first run has held out. --out is written after every row, and goes on with the rows that it
holds.
"""

import argparse
import copy
import hashlib
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from asking import as_script, named_path
from headline_rows import ONE_PASS, name_of
from one_pass import best_temperature, mean_logits, thinned
from sharing_files import Judge, Terms
from torch import Tensor, nn
from trained import folders

import leanbayes as lb
from leanbayes import config
from leanbayes.bayesian import StochasticNetwork
from leanbayes.cli.looking import look_at
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import Look, assess
from leanbayes.evaluation.scores import ignored
from leanbayes.models import build
from leanbayes.plain import without_nan
from leanbayes.report import AssessedRun
from leanbayes.saving import describe
from leanbayes.training.record import machine, versions, without_places, write_json

ALL_OF_SVHN = 26_032
PLAIN, TEMPERATURE, MEMBERS, DRAWS = "plain", "temperature", "members", "{} draws"  # the ways
BY_LABELS = f"{ONE_PASS}, by labels"
SETTINGS = ("samples", "file_draws", "calibration", "examples", "shift_examples", "ood", "ood_examples", "seed")
TOLD = ("accuracy", "nll", "ece", "brier")

Row = dict[str, Any]


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or that leanbayes compare wrote")
    of_file = "a compact file of the first run's network, and what to call it; may be given several times"
    parser.add_argument("--file", type=named_path, action="append", default=[], metavar="NAME=PATH", help=of_file)
    parser.add_argument("--samples", type=int, default=30, help="draws of a prediction")
    parser.add_argument("--file-draws", type=int, default=100, help="of a file, on the test data alone; 0 for none")
    parser.add_argument("--calibration", type=int, default=1000, help="held-out examples that one pass is fitted on")
    parser.add_argument("--examples", type=int, help="test examples, and held-out ones, at most (default: all)")
    parser.add_argument("--shift-examples", type=int, default=1000, help="test examples of each corruption, at most")
    parser.add_argument("--ood", nargs="*", default=[], help="data sets of another kind, such as svhn")
    parser.add_argument("--ood-examples", type=int, default=ALL_OF_SVHN, help="of each of them, at most")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, or to go on with")
    parser.add_argument("--seed", type=int, default=0, help="of the draws and the corruptions")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    parser.add_argument("--root", type=Path, help="folder that holds the data sets")
    return parser.parse_args()


def command_of(args: argparse.Namespace) -> str:
    """Return the command of this process, without the folders of its machine."""

    def shown(word: str) -> str:
        flag = "--file=" if word.startswith("--file=") else ""
        name, _, path = word.removeprefix(flag).partition("=")
        if (name, Path(path)) in args.file:
            return f"{flag}{name}={Path(path).name}"
        return Path(word).resolve().name if Path(word) in args.runs else word

    return shlex.join(["python", "experiments/headline.py", *map(shown, without_places(sys.argv[1:]))])


# -- what is scored ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model that is scored, its file, what is told of it, its data, and the run of its training."""

    model: lb.BayesianModel
    path: Path
    about: Row
    judge: Judge
    run: TrainedRun | None = None

    @property
    def record(self) -> Row | None:
        """The record of its training."""
        return None if self.run is None else self.run.record


def of_run(run: TrainedRun, judge: Judge) -> Subject:
    """Take a trained run as it is."""
    settings = run.record["config"]
    about = {
        "name": name_of(run.model.method),
        "run": run.folder.resolve().name,
        "seed": settings["recipe"]["seed"],
        "method": settings["method"],
        "recipe": settings["recipe"],
        "validation_share": settings["source"]["validation_share"],
        "start": settings.get("start"),
    }
    return Subject(run.model, run.folder / "model.safetensors", about, judge, run)


def of_file(name: str, path: Path, first: TrainedRun, judge: Judge) -> Subject:
    """Load a compact file into the network of the first run."""
    made = first.record["config"]["model"]
    network = build(made["name"], tuple(made["input_shape"]), made["outputs"], **made["options"])
    bnn = lb.load(path, network).eval().to(first.model.device)
    about = {"name": name, "file": path.name, "seed": None, "method": config.encode(bnn.method)}
    return Subject(bnn, path, about, judge)


class Tempered(nn.Module):
    """A network whose logits are divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.network(x) / self.temperature


# -- how it is scored -------------------------------------------------------------------------------------------------


def ways(subject: Subject, args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Give every way to predict with a model, and how to look at it; without shifts it is at test data alone."""
    bnn, draws = subject.model, {"samples": args.samples}
    if bnn.posterior.random_weights:
        rule = None if bnn.current_rule.random else "sample"
        yield DRAWS.format(args.samples), {**draws, "rule": rule}
        for way in (ONE_PASS, BY_LABELS):
            yield way, {"rule": "moments"}
        if subject.record is None and args.file_draws:
            yield DRAWS.format(args.file_draws), {"samples": args.file_draws, "rule": rule, "shifts": ()}
    elif bnn.members is not None:
        yield MEMBERS, {}
    elif isinstance(bnn.network, StochasticNetwork):
        yield DRAWS.format(args.samples), draws
    else:
        yield PLAIN, {}
        if isinstance(bnn.method, lb.Deterministic):
            yield TEMPERATURE, {}


def fitted(subject: Subject, way: str) -> tuple[lb.BayesianModel, Row]:
    """Fit on held-out data what a way to predict needs; return the model, and what was found."""
    bnn, judge = subject.model, subject.judge
    if way == TEMPERATURE:
        found = temperature_of(bnn, judge)
        likelihood = copy.deepcopy(bnn.likelihood)
        network = Tempered(bnn.to_deterministic(), found).to(bnn.device)
        return lb.bayesianize(network, lb.Deterministic(), likelihood=likelihood).eval(), {"temperature": found}
    if way == BY_LABELS:
        made = judge.by_labels(bnn)
        return made, {"moment_scale": made.moment_scale, "fitted_to": "labels"}
    if way != ONE_PASS:
        return bnn, {}
    here = bnn.moment_scale == (1.0, 1.0) and bnn.trained_rule != "moments"
    if here:
        judge.calibrate(bnn)
    return bnn, {"moment_scale": bnn.moment_scale, "fitted_to": "draws", "fitted_here": here}


def temperature_of(bnn: lb.BayesianModel, judge: Judge) -> float:
    """Find the temperature that suits the held-out data best."""
    pairs = [thinned(logits, y) for logits, y in mean_logits(bnn, judge.batches(judge.data.validation))]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return best_temperature(logits, labels, ignored(bnn))


def row_of(subject: Subject, way: str, how: Row, args: argparse.Namespace) -> Row:
    """Score one way to predict."""
    bnn, chosen = fitted(subject, way)
    usual = {"shifts": ("corruptions",), "shift_examples": args.shift_examples, "ood_examples": args.ood_examples}
    if not chosen and how.get("samples") == bnn.method.samples:
        how = {**how, "samples": None}  # as leanbayes compare looks, so that what it has kept serves here
    look = Look(**{**usual, **how}, pruning=False, seed=args.seed)
    if subject.run is not None and not chosen:
        kept = look_at(subject.run, subject.judge.data, look, args.ood, args.root, shown=False)
        found: Mapping[str, Any] = kept.assessment
    else:
        found = assess(bnn, subject.judge.data, look, ood=subject.judge.others if look.shifts else {})
    record = subject.record or {"config": {"recipe": {}}, "costs": found["costs"]["ours"], "history": []}
    figures = AssessedRun(subject.about["name"], args.seed, record, found).figures()
    if subject.record is None:  # it is stored in its own way, and not as `save` would
        parts = describe(subject.path)["parts"].items()
        figures["kilo_stored"] = sum(of["numbers"] for name, of in parts if name != "mask") / 1e3  # of single bits
    size = subject.path.stat().st_size
    return {
        **subject.about,
        "digest": digest_of(subject.path),
        "way": way,
        **chosen,
        "held_out_examples": len(subject.judge.data.validation),  # type: ignore[arg-type]
        "bytes": size,
        "train_seconds": record["costs"].get("train_seconds"),
        "figures": {**figures, "file_kb": size / 1e3, "file_ratio": size / found["costs"]["plain"]["file_bytes"]},
        "ood": {name: {"examples": one["examples"], **one["by"]["entropy"]} for name, one in found["ood"].items()},
        "reliability": found["curves"]["reliability"],
    }


def digest_of(path: Path) -> str:
    """Tell a file by its bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# -- what is written --------------------------------------------------------------------------------------------------


def record_of(args: argparse.Namespace, first: Subject, run: TrainedRun) -> Row:
    """Begin a record, or go on with that of the same task and settings."""
    network, data = task_of(run)
    record = {
        "command": command_of(args),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        "model": network,
        "source": {**data, "name": Path(data["name"]).name},
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "examples": len(first.judge.data.test),  # type: ignore[arg-type]
        "held_out_of_files": first.about["run"],  # the run whose held-out data factors of files are fitted on
        "results": [],
    }
    if args.out.is_file():
        old = json.loads(args.out.read_text())
        if any(old.get(key) != without_nan(record[key]) for key in ("model", "source", "settings")):
            raise LeanBayesError(f"{args.out} has rows of another task, or with other settings: choose another --out.")
        commands = [*old.get("earlier_commands", []), old["command"]]
        record["earlier_commands"] = [one for one in dict.fromkeys(commands) if one != record["command"]]
        record["results"] = old["results"]
    return record


def task_of(run: TrainedRun) -> tuple[Row, Row]:
    """Tell network and data of a run, which may hold out what share it likes."""
    settings = run.record["config"]
    return settings["model"], {key: value for key, value in settings["source"].items() if key != "validation_share"}


def subjects(args: argparse.Namespace, places: Iterable[Path]) -> Iterator[tuple[Subject, TrainedRun]]:
    """Open runs and files one after the other, with the first or their own run; all must be of one task."""
    judges: dict[float, Judge] = {}
    first: TrainedRun | None = None
    for place in places:
        run = open_run(place, args.device)
        first = first or run
        if task_of(run) != task_of(first):
            raise LeanBayesError(f"{place} and {first.folder} differ in data or network: give runs of one task.")
        share = run.record["config"]["source"]["validation_share"]
        if share not in judges:
            judges[share] = Judge(run, Terms.asked(args))
        yield of_run(run, judges[share]), run
    assert first is not None
    for name, path in args.file:
        yield of_file(name, path, first, next(iter(judges.values()))), first


def line(row: Row) -> str:
    """Write a row in a line."""
    scores = ", ".join(f"{key} {row['figures'][key]:.4f}" for key in TOLD)
    return f"{scores}, {row['bytes']:,} bytes"


def main() -> None:
    """Score all that is not scored yet."""
    args = options()
    record: Row = {}
    for subject, run in subjects(args, itertools.chain.from_iterable(map(folders, args.runs))):
        record = record or record_of(args, subject, run)
        known = {(row["name"], row["digest"], row["way"]) for row in record["results"]}
        name, digest = subject.about["name"], digest_of(subject.path)
        for way, how in ways(subject, args):
            if (name, digest, way) in known:
                continue
            print(f"{name} ({subject.about.get('run') or subject.about['file']}), {way} ...", flush=True)
            start = time.perf_counter()
            row = row_of(subject, way, how, args)
            print(f"  {line(row)} ({time.perf_counter() - start:.0f} s)", flush=True)
            record["results"].append(row)
            write_json(args.out, record)


if __name__ == "__main__":
    as_script(main)
