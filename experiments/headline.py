"""Score trained runs and compact files with every prediction mode, for the headline table.

python experiments/headline.py RUNS --file NAME=PATH.lbc --ood svhn cifar100 --out experiments/results/headline/all.json

A deterministic network predicts without and with a temperature that is fitted on held-out data; a model with random
weights predicts with Monte Carlo samples and in one pass. The two calibration factors of one pass are fitted to samples
on held-out data, unless the model was trained by one pass or its file contains them; and a second time to the labels of
the held-out data, as the temperature is. For files, the held-out data are those of the first run. The program writes
--out after every row, and continues from the rows that it already has.
"""

import argparse
import copy
import hashlib
import itertools
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import named_path, run_script
from headline_rows import ONE_PASS, name_of
from mean_network import best_temperature, best_temperature_of_samples, mean_logits, thinned
from sharing_files import Arguments, Evaluator
from stored import read
from torch import Tensor, nn
from trained_runs import folders

import leanbayes as lb
from leanbayes.cli.evaluations import evaluation_of
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.core import config
from leanbayes.core.json_values import without_nan
from leanbayes.deploy.loading import describe
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import EvaluationSettings, evaluate_fully
from leanbayes.evaluation.scores import ignored
from leanbayes.model.draw import StochasticNetwork
from leanbayes.networks import build
from leanbayes.report import EvaluatedRun
from leanbayes.training.record import machine, versions, without_places, write_json

ALL_OF_SVHN = 26_032
PLAIN, TEMPERATURE, MEMBERS, SAMPLES = "plain", "temperature", "members", "{} samples"  # prediction modes
BY_LABELS = f"{ONE_PASS}, by labels"
SCALED = f", {TEMPERATURE}"  # the end of the name of samples whose logits are divided by a temperature
SETTINGS = ("samples", "file_samples", "calibration", "examples", "shift_examples", "ood", "ood_examples", "seed")
PRINTED = ("accuracy", "nll", "ece", "brier")

Row = dict[str, Any]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or that leanbayes compare wrote")
    of_file = "compact file of the first run's network and its name in the table; may be repeated"
    parser.add_argument("--file", type=named_path, action="append", default=[], metavar="NAME=PATH", help=of_file)
    parser.add_argument("--samples", type=int, default=30, help="Monte Carlo samples per prediction")
    parser.add_argument("--file-samples", type=int, default=100, help="samples for files, on test data only; 0 to skip")
    parser.add_argument("--calibration", type=int, default=1000, help="held-out examples to calibrate one pass")
    parser.add_argument("--examples", type=int, help="maximum number of test and of held-out examples (default: all)")
    parser.add_argument(
        "--shift-examples", type=int, default=1000, help="maximum number of test examples per corruption"
    )
    parser.add_argument("--ood", nargs="*", default=[], help="out-of-distribution data sets, such as svhn")
    parser.add_argument(
        "--ood-examples", type=int, default=ALL_OF_SVHN, help="maximum number of examples per OOD data set"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write or continue")
    parser.add_argument("--seed", type=int, default=0, help="seed of samples and corruptions")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    return parser.parse_args()


def command_of(args: argparse.Namespace) -> str:
    """Return the command of this process without the paths of this machine."""

    def shown(word: str) -> str:
        flag = "--file=" if word.startswith("--file=") else ""
        name, _, path = word.removeprefix(flag).partition("=")
        if (name, Path(path)) in args.file:
            return f"{flag}{name}={Path(path).name}"
        return Path(word).resolve().name if Path(word) in args.runs else word

    return shlex.join(["python", "experiments/headline.py", *map(shown, without_places(sys.argv[1:]))])


# -- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model to score, with its file, description and data, and its training run if there is one."""

    model: lb.BayesianModel
    path: Path
    about: Row
    evaluator: Evaluator
    run: TrainedRun | None = None

    @property
    def record(self) -> Row | None:
        """The training record; None for a compact file."""
        return None if self.run is None else self.run.record


def of_run(run: TrainedRun, evaluator: Evaluator) -> Subject:
    """Return the subject of a trained run."""
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
    return Subject(run.model, run.folder / "model.safetensors", about, evaluator, run)


def of_file(name: str, path: Path, first: TrainedRun, evaluator: Evaluator) -> Subject:
    """Load a compact file into the network of the first run."""
    made = first.record["config"]["model"]
    network = build(made["name"], tuple(made["input_shape"]), made["outputs"], **made["options"])
    bnn = lb.load(path, network).eval().to(first.model.device)
    about = {"name": name, "file": path.name, "seed": None, "method": config.encode(bnn.method)}
    return Subject(bnn, path, about, evaluator)


class Tempered(nn.Module):
    """A network with its logits divided by a temperature."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.network(x) / self.temperature


def divide_logits(bnn: lb.BayesianModel, temperature: float) -> None:
    """Let predictions by samples divide the logits of each sample by a temperature."""
    usual = bnn.likelihood.accumulator

    def accumulator() -> Any:
        made = usual()
        add = made.update
        made.update = lambda output: add(output / temperature)
        return made

    bnn.likelihood.accumulator = accumulator  # type: ignore[method-assign]


# -- scoring ----------------------------------------------------------------------------------------------------------


def ways(subject: Subject, args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Yield each prediction mode of a model with its evaluation settings; without shifts, only test data are scored."""
    bnn, sampled = subject.model, {"samples": args.samples}
    if bnn.posterior.random_weights:
        rule = None if bnn.current_rule.random else "sample"
        yield SAMPLES.format(args.samples), {**sampled, "rule": rule}
        if subject.evaluator.data.task == "classification":
            yield SAMPLES.format(args.samples) + SCALED, {**sampled, "rule": rule}
        for way in (ONE_PASS, BY_LABELS):
            yield way, {"rule": "moments"}
        if subject.record is None and args.file_samples:
            yield SAMPLES.format(args.file_samples), {"samples": args.file_samples, "rule": rule, "shifts": ()}
    elif bnn.members is not None:
        yield MEMBERS, {}
    elif isinstance(bnn.network, StochasticNetwork):
        yield SAMPLES.format(args.samples), sampled
    else:
        yield PLAIN, {}
        if isinstance(bnn.method, lb.Deterministic):
            yield TEMPERATURE, {}


def fitted(subject: Subject, way: str) -> tuple[lb.BayesianModel, Row]:
    """Fit on held-out data what a prediction mode needs; return the model and the fitted values."""
    bnn, evaluator = subject.model, subject.evaluator
    if way == TEMPERATURE:
        found = temperature_of(bnn, evaluator)
        likelihood = copy.deepcopy(bnn.likelihood)
        network = Tempered(bnn.to_deterministic(), found).to(bnn.device)
        return lb.bayesianize(network, lb.Deterministic(), likelihood=likelihood).eval(), {"temperature": found}
    if way.endswith(SCALED):
        scaled, found = copy.deepcopy(bnn), sampled_temperature(bnn, evaluator, int(way.split()[0]))
        divide_logits(scaled, found)
        return scaled, {"temperature": found}
    if way == BY_LABELS:
        made = evaluator.by_labels(bnn)
        return made, {"moment_scale": made.moment_scale, "fitted_to": "labels"}
    if way != ONE_PASS:
        return bnn, {}
    here = bnn.moment_scale == (1.0, 1.0) and bnn.trained_rule != "moments"
    if here:
        evaluator.calibrate(bnn)
    return bnn, {"moment_scale": bnn.moment_scale, "fitted_to": "samples", "fitted_here": here}


def temperature_of(bnn: lb.BayesianModel, evaluator: Evaluator) -> float:
    """Return the temperature with the lowest held-out NLL."""
    pairs = [thinned(logits, y) for logits, y in mean_logits(bnn, evaluator.batches(evaluator.data.validation))]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return best_temperature(logits, labels, ignored(bnn))


def sampled_temperature(bnn: lb.BayesianModel, evaluator: Evaluator, samples: int) -> float:
    """Return the temperature of samples with the lowest held-out NLL."""
    rule = None if bnn.current_rule.random else "sample"
    generator = torch.Generator().manual_seed(0)
    parts, labels = [], []
    for x, y in evaluator.batches(evaluator.data.validation):
        found = bnn.predict(x, samples, rule=rule, keep_outputs=True, generator=generator)
        parts.append(found.outputs.double())
        labels.append(y)
    return best_temperature_of_samples(torch.cat(parts, 1), torch.cat(labels))


def row_of(subject: Subject, way: str, how: Row, args: argparse.Namespace) -> Row:
    """Score one prediction mode."""
    bnn, chosen = fitted(subject, way)
    usual = {"shifts": ("corruptions",), "shift_examples": args.shift_examples, "ood_examples": args.ood_examples}
    if not chosen and how.get("samples") == bnn.method.samples:
        how = {**how, "samples": None}  # as in leanbayes compare, so that its stored evaluation is reused
    settings = EvaluationSettings(**{**usual, **how}, pruning=False, seed=args.seed)
    if subject.run is not None and not chosen:
        stored = evaluation_of(subject.run, subject.evaluator.data, settings, args.ood, args.root, shown=False)
        found: Mapping[str, Any] = stored.evaluation
    else:
        found = evaluate_fully(
            bnn, subject.evaluator.data, settings, ood=subject.evaluator.others if settings.shifts else {}
        )
    record = subject.record or {"config": {"recipe": {}}, "costs": found["costs"]["ours"], "history": []}
    metrics = EvaluatedRun(subject.about["name"], args.seed, record, found).metrics()
    if subject.record is None:  # a compact file stores its numbers differently from lb.save
        parts = describe(subject.path)["parts"].items()
        metrics["kilo_stored"] = (
            sum(of["numbers"] for name, of in parts if name != "mask") / 1e3
        )  # the mask holds single bits
    size = subject.path.stat().st_size
    return {
        **subject.about,
        "digest": digest_of(subject.path),
        "way": way,
        **chosen,
        "held_out_examples": len(subject.evaluator.data.validation),  # type: ignore[arg-type]
        "bytes": size,
        "train_seconds": record["costs"].get("train_seconds"),
        "metrics": {**metrics, "file_kb": size / 1e3, "file_ratio": size / found["costs"]["plain"]["file_bytes"]},
        "ood": {name: {"examples": one["examples"], **one["by"]["entropy"]} for name, one in found["ood"].items()},
        "reliability": found["curves"]["reliability"],
    }


def digest_of(path: Path) -> str:
    """Return a hash of the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# -- output -----------------------------------------------------------------------------------------------------------


def record_of(args: argparse.Namespace, first: Subject, run: TrainedRun) -> Row:
    """Return a new record, or the record in --out if it has the same task and settings."""
    network, data = task_of(run)
    record = {
        "command": command_of(args),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        "model": network,
        "source": {**data, "name": Path(data["name"]).name},
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "examples": len(first.evaluator.data.test),  # type: ignore[arg-type]
        "held_out_of_files": first.about["run"],  # this run's held-out data calibrate the files
        "results": [],
    }
    if args.out.is_file():
        old = read(args.out)
        if any(old.get(key) != without_nan(record[key]) for key in ("model", "source", "settings")):
            raise LeanBayesError(f"{args.out} has rows of another task or with other settings: choose another --out.")
        commands = [*old.get("earlier_commands", []), old["command"]]
        record["earlier_commands"] = [one for one in dict.fromkeys(commands) if one != record["command"]]
        record["results"] = old["results"]
    return record


def task_of(run: TrainedRun) -> tuple[Row, Row]:
    """Return network and data of a run, without the held-out share, which may differ."""
    settings = run.record["config"]
    return settings["model"], {key: value for key, value in settings["source"].items() if key != "validation_share"}


def subjects(args: argparse.Namespace, places: Iterable[Path]) -> Iterator[tuple[Subject, TrainedRun]]:
    """Yield runs and files with their run, or the first run for files; all must have one task."""
    evaluators: dict[float, Evaluator] = {}
    first: TrainedRun | None = None
    for place in places:
        run = open_run(place, args.device)
        first = first or run
        if task_of(run) != task_of(first):
            raise LeanBayesError(f"{place} and {first.folder} differ in data or network: give runs of one task.")
        share = run.record["config"]["source"]["validation_share"]
        if share not in evaluators:
            evaluators[share] = Evaluator(run, Arguments.of(args))
        yield of_run(run, evaluators[share]), run
    assert first is not None
    for name, path in args.file:
        yield of_file(name, path, first, next(iter(evaluators.values()))), first


def line(row: Row) -> str:
    """Format a row as one line."""
    scores = ", ".join(f"{key} {row['metrics'][key]:.4f}" for key in PRINTED)
    return f"{scores}, {row['bytes']:,} bytes"


def main() -> None:
    """Score everything that --out does not have yet."""
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
    run_script(main)
