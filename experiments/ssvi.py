"""Experiments of the SSVI paper: densities and initial stds, removal criteria, and numbers of samples.

python experiments/ssvi.py sweep COMPARE.json ... --along density --out FOLDER
python experiments/ssvi.py overlap --data cifar10 --out experiments/results/ssvi/overlap.json --figures FOLDER
python experiments/ssvi.py samples RUNS ... --samples 5 30 --ood svhn --out experiments/results/ssvi/draws.json

`sweep` plots accuracy, NLL and ECE over a setting, from files of `leanbayes compare`. `overlap` trains, and records at
every exchange which weights each removal criterion would remove. `samples` scores trained runs with several numbers of
Monte Carlo samples.
"""

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from arguments import command_of, run_script
from torch import Tensor
from trained_runs import folders, read_comparison, save

import leanbayes as lb
from leanbayes.cli.evaluations import ood_sets
from leanbayes.cli.options import Task
from leanbayes.cli.runs import open_run, prepare
from leanbayes.core import config
from leanbayes.core.ranking import highest
from leanbayes.data import preset
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import EvaluationSettings, evaluate_fully
from leanbayes.methods import describe_method
from leanbayes.methods.ssvi.ssvi import Removal
from leanbayes.model.method import Training
from leanbayes.posteriors import SubspacePosterior
from leanbayes.report import EvaluatedRun
from leanbayes.report.figure import Figure, Series
from leanbayes.training import Recipe, fit
from leanbayes.training.record import machine, versions, write_json

ALONG = {"density": "density", "init_std": "initial σ"}
SCORES = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}
CRITERIA: tuple[Any, ...] = get_args(Removal)
FIRST_FIVE = CRITERIA[:5]  # compared in the paper
PRINTED = ("accuracy", "nll", "ece", "debiased_classwise_error")
ALL_OF_SVHN = 26_032  # AUPR depends on the ratio of test to OOD examples


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("sweep", help="plot scores over a setting", allow_abbrev=False)
    one.add_argument("comparisons", type=Path, nargs="+", metavar="COMPARE.json", help="files of leanbayes compare")
    one.add_argument("--along", choices=ALONG, required=True, help="setting on the x axis")
    one.add_argument("--out", type=Path, required=True, help="folder for the figures (SVG)")

    one = commands.add_parser("overlap", help="compare the removal criteria during training", allow_abbrev=False)
    one.add_argument("--data", default="digits", help="name of a data set")
    one.add_argument("--model", help="name of a network (default: that of the data set's preset)")
    one.add_argument("--epochs", type=int, default=20)
    one.add_argument("--density", type=float, default=0.05)
    one.add_argument("--interval", type=int, default=100, help="steps between exchanges")
    one.add_argument("--temperature", type=float, default=0.02)
    one.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    one.add_argument("--figures", type=Path, help="folder for the figure (SVG)")

    other = commands.add_parser("samples", help="score runs with several numbers of samples", allow_abbrev=False)
    other.add_argument("runs", type=Path, nargs="+", help="folders of runs or of leanbayes compare")
    other.add_argument("--samples", type=int, nargs="+", default=[5, 30], help="Monte Carlo samples per prediction")
    other.add_argument("--ood", nargs="*", default=[], help="out-of-distribution data sets, such as svhn")
    other.add_argument(
        "--ood-examples", type=int, default=ALL_OF_SVHN, help="maximum number of examples per OOD data set"
    )

    for parts in (one, other):
        parts.add_argument("--out", type=Path, help="JSON file to write")
        parts.add_argument("--root", type=Path, help="folder with the data sets")
        parts.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
        parts.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# -- sweeps over a setting --------------------------------------------------------------------------------------------

Points = dict[float, list[Mapping[str, float]]]


def sweep(args: argparse.Namespace) -> None:
    """Write one figure per score."""
    lines = lines_of([read_comparison(path) for path in args.comparisons], args.along)
    save([swept(lines, args.along, score) for score in SCORES], args.out)


def lines_of(records: Sequence[dict[str, Any]], along: str) -> dict[str, Points]:
    """Group the runs of comparisons into lines by method, and by the other settings that differ."""
    found = [(record["recipe"], run) for record in records for run in record["results"] if along in run["method"]]
    if not found:
        raise LeanBayesError(f"No method of these comparisons has the setting {along}: give others.")
    recipe_settings = varying([recipe for recipe, _ in found])
    lines: dict[str, Points] = {}
    for recipe, run in found:
        method = run["method"]
        settings = varying([other["method"] for _, other in found if other["method"]["type"] == method["type"]])
        different = {key: method[key] for key in settings if key != along}
        different |= {key: recipe[key] for key in recipe_settings if key != "seed"}
        name = ", ".join([method["type"], *(f"{key}={value}" for key, value in different.items())])
        lines.setdefault(name, {}).setdefault(method[along], []).append(run["scores"])
    return lines


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that differ."""
    return [key for key in settings[0] if any(one[key] != settings[0][key] for one in settings)]


def swept(lines: Mapping[str, Points], along: str, score: str) -> Figure:
    """Return the figure of one score: means over the seeds, with a band from minimum to maximum."""
    series = []
    for name, points in lines.items():
        x = tuple(sorted(points))
        values = [[scores[score] for scores in points[place]] for place in x]
        band = (tuple(map(min, values)), tuple(map(max, values))) if max(map(len, values)) > 1 else ((), ())
        series.append(Series(name, x, tuple(map(statistics.fmean, values)), *band))
    return Figure(
        key=f"{along}-{score}",
        title=f"{SCORES[score]} over the {ALONG[along]}",
        kind="lines",
        x=ALONG[along],
        y=SCORES[score],
        caption="On test data; mean over the seeds, the band is the range.",
        series=tuple(series),
        log="x",
        percent=("x" if along == "density" else "") + ("y" if score == "accuracy" else ""),
    )


# -- overlap of the criteria ------------------------------------------------------------------------------------------


@config.configurable
@dataclass(frozen=True)
class RecordedSSVI(lb.SSVI):
    """SSVI that records at every exchange which weights each removal criterion would remove."""

    exchanges: ClassVar[list[dict[str, Any]]] = []  # on the class, because a method has no state

    @torch.no_grad()
    def removal_scores(self, training: Training, posterior: SubspacePosterior) -> Tensor:
        """Return the scores of the training criterion."""
        found = {name: lb.SSVI.removal_scores(replace(self, removal=name), training, posterior) for name in CRITERIA}
        share = self.exchanged_share(training)
        sets = {name: removed(posterior, share, scores) for name, scores in found.items()}
        number = int(sets[self.removal].sum())
        if number:
            iou = [[overlap_of(a, b) for b in sets.values()] for a in sets.values()]
            self.exchanges.append({"step": training.step + 1, "share": share, "removed": number, "iou": iou})
        return found[self.removal]


def removed(posterior: SubspacePosterior, share: float, scores: Tensor) -> Tensor:
    """Return a mask of the active weights that an exchange by these scores would remove."""
    mask, first = torch.zeros_like(scores, dtype=torch.bool), 0
    for size, count in zip(posterior.layout.sizes, posterior.counts, strict=True):
        number = min(int(share * count), size - count)
        if number > 0:
            mask[first + highest(-scores[first : first + count], number)] = True
        first += count
    return mask


def overlap_of(a: Tensor, b: Tensor) -> float:
    """Return the intersection over union of two sets."""
    return (a & b).sum().item() / (a | b).sum().item()


def overlap(args: argparse.Namespace) -> None:
    """Train, write the overlap of all pairs of criteria per exchange, and plot that with the training criterion."""
    suited = preset(args.data, None if args.root is None else str(args.root))
    args.model = args.model or suited["model"]
    prepared = prepare(Task(data=args.data, model=args.model, root=args.root), args.seed)
    recipe = {key: value for key, value in suited.items() if key != "model"}
    recipe |= {name: getattr(args, name) for name in ("epochs", "temperature", "precision", "seed", "device")}
    recipe["evaluate_every"] = 0
    RecordedSSVI.exchanges.clear()
    settings: dict[str, Any] = {"density": args.density, "interval": args.interval}
    fit(prepared.network, RecordedSSVI(**settings), prepared.data, **recipe)
    if not RecordedSSVI.exchanges:
        raise LeanBayesError(f"Nothing was exchanged in {args.epochs} epochs: raise --epochs or lower --interval.")
    figure = overlap_figure(RecordedSSVI.exchanges)
    if args.out is not None:
        data = Path(args.data).name
        notes = prepared.notes
        found = {
            "command": command_of("ssvi", args, ["overlap", "--data", data], hidden=("command", "data")),
            "seed": args.seed,
            "source": {**notes["source"], "name": Path(notes["source"]["name"]).name},
            "model": notes["model"],
            "method": config.encode(lb.SSVI(**settings)),
            "recipe": config.encode(Recipe().changed(recipe)),
            "versions": versions(),
            "machine": machine(),
            "criteria": CRITERIA,
            "exchanges": RecordedSSVI.exchanges,
            "figures": [figure.to_json()],
        }
        write_json(args.out, found)
    if args.figures is not None:
        save([figure], args.figures)
    print(
        "\n".join(
            f"{one.name}: {one.y[0]:.3f} at the first exchange, {one.y[-1]:.3f} at the last" for one in figure.series
        )
    )


def overlap_figure(exchanges: Sequence[Mapping[str, Any]], default: str = lb.SSVI.removal) -> Figure:
    """Return the figure of the overlap of each criterion with the default, and the mean over the pairs of the paper."""
    steps, place = tuple(one["step"] for one in exchanges), CRITERIA.index(default)
    pairs = list(itertools.combinations(range(len(FIRST_FIVE)), 2))
    lines = {
        name: [one["iou"][place][number] for one in exchanges]
        for number, name in enumerate(CRITERIA)
        if name != default
    }
    lines["mean over pairs of the first five"] = [
        statistics.fmean(one["iou"][a][b] for a, b in pairs) for one in exchanges
    ]
    return Figure(
        key="overlap",
        title="Overlap of the removal criteria",
        kind="lines",
        x="optimizer step",
        y=f"IoU with {default}",
        caption="Intersection over union of the weights that two criteria would remove, at every exchange.",
        series=tuple(Series(name, steps, tuple(values)) for name, values in lines.items()),
    )


# -- numbers of samples -----------------------------------------------------------------------------------------------


def samples(args: argparse.Namespace) -> None:
    """Score runs with each number of samples, on test data and on OOD data."""
    results = []
    for place in itertools.chain.from_iterable(folders(given) for given in args.runs):
        run = open_run(place, args.device)
        if not run.model.current_rule.random or run.model.members is not None or not run.model.layout.numel:
            raise LeanBayesError(f"The run in {place} does not sample weights to predict: leave it out.")
        data, notes = run.data(args.root), run.record["config"]
        for number in args.samples:
            settings = EvaluationSettings(
                number, shifts=(), ood_examples=args.ood_examples, pruning=False, seed=args.seed
            )
            sets, _ = ood_sets(args.ood, data, args.root, settings, run.model.device)
            name, seed = describe_method(run.model.method), notes["recipe"]["seed"]
            found = EvaluatedRun(name, seed, run.record, evaluate_fully(run.model, data, settings, ood=sets))
            results.append(
                {
                    "name": name,
                    "seed": seed,
                    "samples": number,
                    "source": {**notes["source"], "name": Path(notes["source"]["name"]).name},
                    **{key: notes[key] for key in ("model", "method", "recipe")},
                    "metrics": found.metrics(),
                    "ood": {
                        key: {n: one[n] for n in ("examples", "by")} for key, one in found.evaluation["ood"].items()
                    },
                }
            )
            print(line(results[-1]), flush=True)
    if args.out is not None:
        words = ["samples", *(place.resolve().name for place in args.runs)]
        found = {
            "command": command_of("ssvi", args, words, hidden=("command",)),
            "seed": args.seed,
            "versions": versions(),
            "machine": machine(),
            "results": results,
        }
        write_json(args.out, found)


def line(result: Mapping[str, Any]) -> str:
    """Format the scores of one run."""
    metrics = result["metrics"]
    parts = [f"{key} {metrics[key]:.4f}" for key in PRINTED]
    for name, one in result["ood"].items():
        by = one["by"]["entropy"]
        parts.append(f"{name} AUROC {by['auroc']:.4f} AUPR {by['aupr_out']:.4f}")
    return f"{result['name']}, seed {result['seed']}, {result['samples']} samples: {', '.join(parts)}"


def main() -> None:
    """Run the chosen experiment."""
    args = options()
    {"sweep": sweep, "overlap": overlap, "samples": samples}[args.command](args)


if __name__ == "__main__":
    run_script(main)
