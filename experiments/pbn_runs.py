"""The experiments on PBN that look at trained runs, or at what `leanbayes compare` has written of them."""

import argparse
import base64
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from panels import Picture, beside, from_png, heat
from ssvi import read_comparison
from torch import Tensor
from vdp import folders

import leanbayes as lb
from leanbayes import config
from leanbayes.cli.looking import look_at
from leanbayes.cli.runs import TrainedRun, method_name, open_run
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.evaluation.assessment import batch_size, some
from leanbayes.evaluation.cost import count_flops
from leanbayes.figures import Figure, Series
from leanbayes.report.figures.lines import mean_line
from leanbayes.report.runs import in_columns

SCORES = ("accuracy", "nll", "brier", "ece")
NAMES = {"accuracy": "Accuracy", "nll": "NLL", "brier": "Brier score", "ece": "ECE", "entropy": "Entropy"}
COSTS = ("kilo_trained", "file_kb", "predict_time_ratio", "train_gflops", "predict_mflops")
FEW = (0.01, 0.05, 0.1, 0.5)  # rates of the figures that have a line a method
DIAL = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SENSITIVE = 32  # training batches that a dial by data looks at, as many as a training does
MAP = 150  # pixels of the width of a segmented image
OVER_SEEDS = "The mean over the seeds, from the least to the most."


@dataclasses.dataclass
class Found:
    """What an experiment has found: plain values, SVG files and rows of pictures, by the names of their files."""

    values: dict[str, Any]
    drawings: dict[str, str] = dataclasses.field(default_factory=dict)
    sheets: dict[str, list[list[Picture]]] = dataclasses.field(default_factory=dict)


# -- runs -------------------------------------------------------------------------------------------------------------


def name_of(method: lb.Method) -> str:
    """Name a method by what these experiments change of it."""
    if not isinstance(method, lb.PBN):
        return method_name(method)
    return f"PBN {100 * method.rate:g} %" + ("" if chosen_well(method) else f", {method.sensitivity}")


def chosen_well(method: lb.PBN) -> bool:
    """Whether the weights are chosen as usual, and not for comparison."""
    return method.sensitivity == lb.PBN.sensitivity


def rate_of(method: lb.Method) -> float | None:
    """Return the share of Bayesian weights; None of a method that has no such weights at any rate."""
    if isinstance(method, lb.PBN):
        return method.rate
    return {lb.Deterministic: 0.0, lb.MeanField: 1.0}.get(type(method))


def opened(args: argparse.Namespace) -> Iterator[tuple[TrainedRun, Data]]:
    """Open the runs in the given folders one after the other; data are read once."""
    known: dict[str, Data] = {}
    for place in itertools.chain.from_iterable(folders(given) for given in args.runs):
        run = open_run(place, args.device)
        source = json.dumps(run.record["config"]["source"])
        if source not in known:
            known[source] = run.data(args.root)
        print(f"{name_of(run.model.method)}, seed {run.record['config']['recipe']['seed']} ...", flush=True)
        yield run, known[source]


def about(run: TrainedRun) -> dict[str, Any]:
    """Tell what a run is."""
    settings = run.record["config"]
    return {
        "name": name_of(run.model.method),
        "rate": rate_of(run.model.method),
        "seed": settings["recipe"]["seed"],
        **{key: settings[key] for key in ("method", "model", "recipe")},
        "source": {**settings["source"], "name": Path(settings["source"]["name"]).name},
    }


def compared(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write what all runs have in common once, and then the runs."""
    if not results:
        raise LeanBayesError("There is no run of use to this experiment: give others.")
    common = {key: results[0][key] for key in ("source", "model")}
    if any(one[key] != value for one in results for key, value in common.items()):
        raise LeanBayesError("The runs are of several data sets or networks: give those of one.")
    recipe = {key: value for key, value in results[0]["recipe"].items() if key != "seed"}
    for one in results:
        for key in ("source", "model", "recipe"):
            del one[key]
    return {**common, "recipe": recipe, "results": list(results)}


def task_of(values: Mapping[str, Any]) -> str:
    """Name the network and the data."""
    return f"{values['model']['name']} on {values['source']['name']}"


def by_name(results: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Bring the runs of each method together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(result["name"], []).append(result)
    return found


def lines_figure(key: str, y: str, x: str, series: Iterable[Series], caption: str = OVER_SEEDS, **more: Any) -> Figure:
    """Make a figure whose title is its vertical axis."""
    return Figure(key, y, "lines", x, y, caption, tuple(series), **more)


# -- over rates -------------------------------------------------------------------------------------------------------


def rates(args: argparse.Namespace) -> Found:
    """Compare rates: scores, rotated images, images of another kind, and where the spreads of the first layer lie."""
    results, maps = [], []
    for run, data in opened(args):
        seen = look_at(run, data, None, root=args.root, shown=False)
        found, figures = seen.assessment, seen.figures()
        spread = first_layer(run.model, data)
        turned = [one for one in found["shifts"] if one["family"] in ("none", "rotation")]
        edges, right, wrong = (found["curves"][f"entropy_{name}"] for name in ("edges", "right", "wrong"))
        result = about(run) | {
            "scores": {key: figures[key] for key in (*SCORES, "mutual_information")},
            "costs": {key: figures[key] for key in COSTS},
            "rotation": [
                {"angle": one["level"], **{key: one["scores"][key] for key in ("accuracy", "nll", "entropy")}}
                for one in turned
            ],
            "entropy": [a + b for a, b in zip(right, wrong, strict=True)],
            "ood": {
                name: {"auroc": one["by"]["entropy"]["auroc"], "entropy": one["entropy"]}
                for name, one in found["ood"].items()
            },
            "first_layer": middle_of(spread),
        }
        results.append(result)
        if spread is not None and result["seed"] == results[0]["seed"] and result["first_layer"]["random"]:
            top = spread.mean(0).max().item()
            maps.append((in_order(result), heat(f"{result['name']}: {top:.2g}", spread.mean(0), top, times=6)))
    results.sort(key=in_order)
    drawings = {
        "rates": beside("Over the share of Bayesian weights", rate_figures(results), 2),
        "rotation": beside("Turned digits", rotation_figures(results), 2),
        **{f"entropy-{name}": entropy_drawing(results, edges, name) for name in results[0]["ood"]},
    }
    pictures = [picture for _, picture in sorted(maps, key=lambda one: one[0])]
    rows = [pictures[first : first + 4] for first in range(0, len(pictures), 4)]
    return Found(compared(results) | {"entropy_edges": edges}, drawings, {"first-layer": rows} if rows else {})


def in_order(result: Mapping[str, Any]) -> tuple[bool, float, str]:
    """Sort methods by their rates, those without one first and those for comparison last."""
    rate = result["rate"]
    return "," in result["name"], -1.0 if rate is None else rate, f"{result['name']} {result['seed']}"


def first_layer(bnn: lb.BayesianModel, data: Data) -> Tensor | None:
    """Return σ of the weights that see the pixels (outputs, height, width); None where no layer sees all at once."""
    slots = list(bnn.layout)
    if not slots or data.input_shape[0] != 1 or slots[0].shape[-1] != math.prod(data.input_shape):
        return None
    std = bnn.layout.split(bnn.posterior.variance().detach().sqrt())[0]
    return std.cpu().view(-1, *data.input_shape[1:])


def middle_of(std: Tensor | None) -> dict[str, float]:
    """Tell how many weights of a layer are Bayesian, and which share of them sees the middle quarter of the image."""
    if std is None:
        return {"random": 0.0}
    random, (high, wide) = std > 0, std.shape[1:]
    middle = random[:, high // 4 : high - high // 4, wide // 4 : wide - wide // 4]
    share = middle.sum() / random.sum().clamp_min(1)
    return {"random": random.float().mean().item(), "in_the_middle": share.item(), "mean_std": std.mean().item()}


def rate_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Draw scores over the rate, with methods that have none as level lines."""
    methods = [(config.decode(one["method"]), one) for one in results]
    partial = [(m, one) for m, one in methods if isinstance(m, lb.PBN)]
    random = [(m.rate, one) for m, one in partial if not chosen_well(m)]
    chosen = [(m.rate, one) for m, one in partial if chosen_well(m)]
    whole = [(1.0, one) for m, one in methods if isinstance(m, lb.MeanField)]
    lines = {"the most sensitive weights": chosen + whole, "weights at random": random + whole if random else []}
    level = by_name(one for m, one in methods if not isinstance(m, (lb.PBN, lb.MeanField)))
    figures = []
    for score in SCORES:
        series = []
        for name, points in lines.items():
            places = sorted({rate for rate, _ in points})
            values = [[one["scores"][score] for rate, one in points if rate == place] for place in places]
            if places:
                series.append(banded(name, places, values))
        ends = sorted({rate for points in lines.values() for rate, _ in points})
        for name, runs in level.items():
            values = [[one["scores"][score] for one in runs]] * 2
            series.append(banded(name, [ends[0], ends[-1]], values))
        percent = "xy" if score == "accuracy" else "x"
        figures.append(lines_figure(score, NAMES[score], "Bayesian weights", series, log="x", percent=percent))
    return figures


def banded(name: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> Series:
    """Make a line of the means of some values at each place, with a band from the least to the most."""
    band = (tuple(map(min, values)), tuple(map(max, values))) if max(map(len, values)) > 1 else ((), ())
    return Series(name, tuple(x), tuple(map(statistics.fmean, values)), *band)


def few(results: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Leave out the rates that would make too many lines, and the choice at random."""
    kept = by_name(results)
    return {
        name: runs
        for name, runs in kept.items()
        if not name.startswith("PBN") or (name.count(",") == 0 and runs[0]["rate"] in FEW)
    }


def rotation_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Draw accuracy and entropy over the angle."""
    angles = [one["angle"] for one in results[0]["rotation"]]
    figures = []
    for score in ("accuracy", "entropy"):
        series = [
            mean_line(name, angles, [[one[score] for one in run["rotation"]] for run in runs])
            for name, runs in few(results).items()
        ]
        percent = "y" if score == "accuracy" else ""
        figures.append(lines_figure(score, NAMES[score], "degrees", series, percent=percent))
    return figures


def entropy_drawing(results: Sequence[dict[str, Any]], edges: Sequence[float], other: str) -> str:
    """Draw which share of the test images, and of images of another kind, has more than some entropy."""
    figures = []
    for kind in ("test images", other):
        series = []
        for name, runs in few(results).items():
            counts = [run["entropy"] if kind == "test images" else run["ood"][other]["entropy"] for run in runs]
            series.append(mean_line(name, edges[:-1], [above(one) for one in counts]))
        y = "share with more entropy"
        figures.append(dataclasses.replace(lines_figure(kind, y, "entropy", series, percent="y"), title=kind))
    return beside(f"Entropy of test images and of {other}", figures, 2, marks=False)


def above(counts: Sequence[int]) -> list[float]:
    """Return which share of all lies in each bin of a histogram or beyond it."""
    return [sum(counts[place:]) / sum(counts) for place in range(len(counts))]


# -- a dial -----------------------------------------------------------------------------------------------------------


def dial(args: argparse.Namespace) -> Found:
    """Score trained models at smaller rates, without another training."""
    results = []
    for run, data in opened(args):
        own = rate_of(run.model.method)
        if own and data.test is not None:
            results.append(about(run) | {"points": list(dialled(run.model, data, own, args))})
    figures = []
    for score in ("nll", "ece"):
        series = []
        for name, runs in by_name(results).items():
            for by in dict.fromkeys(point["by"] for point in runs[0]["points"]):
                lines = [[p[score] for p in run["points"] if p["by"] == by and p["rate"]] for run in runs]
                places = [p["rate"] for p in runs[0]["points"] if p["by"] == by and p["rate"]]
                series.append(mean_line(f"{name}, by {by}", places, lines))
        figures.append(lines_figure(score, NAMES[score], "Bayesian weights", series, log="x", percent="x"))
    found = compared(results)
    title = f"{task_of(found)}: one training, served at smaller rates"
    return Found(found, {f"dial-{found['source']['name']}": beside(title, figures, 2)})


def dialled(bnn: lb.BayesianModel, data: Data, own: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Score a model at each rate, by both ways to rank its weights."""
    size = batch_size(data.input_shape)

    def batches(dataset: Any, limit: int) -> Batches:
        return Batches(
            some(dataset, limit, args.seed), size, device=bnn.device, shuffle=False, normalise=data.normalise
        )

    given = list(itertools.islice(batches(data.train, SENSITIVE * size).epoch(), SENSITIVE))
    for by, ranked_on in (("σ", None), ("σ and data", given)):
        for rate in sorted({rate for rate in DIAL if rate < own} | {own}):
            made = bnn.restrict(rate, ranked_on)
            scores = evaluate(made, batches(data.test, args.examples).epoch(), samples=args.samples, seed=args.seed)
            yield {"by": by, "rate": rate, **{key: scores[key] for key in SCORES}}


# -- shares -----------------------------------------------------------------------------------------------------------


def shares(args: argparse.Namespace) -> Found:
    """Count the Bayesian weights of each layer, and the FLOPs of a prediction."""
    results = []
    for run, data in opened(args):
        if not rate_of(run.model.method):
            continue
        assert data.test is not None
        bnn, samples = run.model, args.samples
        x, _ = next(Batches(some(data.test, 1, 0), 1, device=bnn.device, normalise=data.normalise).epoch())
        random = bnn.layout.split((bnn.posterior.variance() > 0).float())
        layers = [
            {"name": slot.name, "weights": part.numel(), "bayesian": int(part.sum())}
            for slot, part in zip(bnn.layout, random, strict=True)
        ]
        flops = {"one_draw": count_flops(bnn, x, 1).dense, f"{samples}_draws": count_flops(bnn, x, samples).dense}
        results.append(about(run) | {"layers": layers, "predict_flops": flops})
    found = compared(results)
    return Found(found, {f"shares-{found['source']['name']}": share_drawing(found)})


def share_drawing(found: Mapping[str, Any]) -> str:
    """Draw the Bayesian share of every layer, a line a rate."""
    series = []
    for name, (run, *_) in by_name(found["results"]).items():
        if name.startswith("PBN"):
            shares = tuple(layer["bayesian"] / layer["weights"] for layer in run["layers"])
            series.append(Series(name, tuple(range(1, len(shares) + 1)), shares))
    caption = "A point is a layer, from the input to the output."
    figure = lines_figure("shares", "Bayesian share of the layer", "layer", series, caption, percent="y")
    return beside(task_of(found), [figure], 1)


# -- corrupted images -------------------------------------------------------------------------------------------------

SHIFTED = (*SCORES, "entropy_right", "entropy_wrong")


def severities(args: argparse.Namespace) -> Found:
    """Average over the corruptions at each severity, from what `leanbayes compare` has written."""
    records = [read_comparison(path) for path in args.comparisons]
    results = []
    for record in records:
        for run in record["results"]:
            method, levels = config.decode(run["method"]), list(by_severity(run["shifts"]))
            if len(levels) > 1:
                results.append(
                    {
                        "name": name_of(method),
                        "rate": rate_of(method),
                        "seed": run["seed"],
                        "method": run["method"],
                        "scores": {key: run["scores"][key] for key in SHIFTED},
                        "costs": {
                            **in_columns(run["costs"]),
                            "predict_time_ratio": run["costs"]["ratios"]["predict_ms_per_1000"],
                        },
                        "levels": levels,
                    }
                )
    if not results:
        raise LeanBayesError("No run of these comparisons has seen corrupted images: compare with such shifts.")
    results.sort(key=in_order)
    groups, numbers = by_name(results), [one["severity"] for one in results[0]["levels"]]

    def line(name: str, label: str, score: str) -> Series:
        values = [[one["levels"][n][score] for one in groups[name]] for n in range(len(numbers))]
        return banded(label, numbers, values)

    figures = [
        lines_figure(score, NAMES[score], "severity", [line(name, name, score) for name in groups], percent=percent)
        for score, percent in zip(SCORES, ("y", "", "", ""), strict=True)
    ]
    doubts = [
        lines_figure(of, f"Entropy of {of} answers", "severity", [line(name, name, f"entropy_{of}") for name in groups])
        for of in ("right", "wrong")
    ]
    settings = {key: records[0][key] for key in ("source", "model", "recipe", "look", "machine", "versions")}
    drawings = {
        "severities": beside("Corrupted images, from clean (0) to the worst", figures, 2),
        "entropies": beside("Entropy under corruptions", doubts, 2),
    }
    return Found(settings | {"results": results}, drawings)


def by_severity(shifts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Give the mean scores of each severity, 0 for clean images; a score that is not defined is left out of a mean."""
    there = [one for one in shifts if one["family"] in ("none", "corruptions")]
    for severity in sorted({one["level"] for one in there}):
        scores = [one["scores"] for one in there if one["level"] == severity]
        known = {key: [one[key] for one in scores if one[key] is not None] for key in SHIFTED}
        known = {key: [value for value in values if math.isfinite(value)] for key, values in known.items()}
        yield {"severity": severity, **{key: statistics.fmean(of) if of else math.nan for key, of in known.items()}}


# -- segmentation -----------------------------------------------------------------------------------------------------


def segmentation(args: argparse.Namespace) -> Found:
    """Compare segmentations: mean IoU, that of each class, and maps of the entropy."""
    results, rows = [], []
    for run, data in opened(args):
        if data.task != "segmentation":
            raise LeanBayesError(f"The run in {run.folder} is for {data.task}: give runs of a segmentation.")
        seen = look_at(run, data, None, root=args.root, shown=False)
        found, figures = seen.assessment, seen.figures()
        (gallery,) = found["galleries"]
        iou = dict(zip(data.classes, found["curves"]["iou"], strict=True))
        results.append(
            about(run)
            | {
                "scores": {key: figures[key] for key in ("miou", *SCORES, "entropy_right", "entropy_wrong")},
                "costs": {key: figures[key] for key in COSTS},
                "iou": iou,
                "levels": list(by_severity(found["shifts"])) if found["shifts"] else [],
            }
        )
        if results[-1]["seed"] == results[0]["seed"]:
            rows.append(maps_of(results[-1]["name"], gallery["pictures"][args.picture], first=not rows))
    results.sort(key=in_order)
    pictures = list(itertools.chain.from_iterable(rows))
    sheet = [pictures[start : start + 4] for start in range(0, len(pictures), 4)]
    return Found(compared(results), sheets={"segmentation": sheet})


def maps_of(name: str, picture: Mapping[str, Any], first: bool) -> list[Picture]:
    """Take the answer and the entropy of a method, and before those of the first the image and the truth."""
    kept = ("image", "truth", "answer", "entropy") if first else ("answer", "entropy")
    return [
        from_png(
            one["label"] if one["label"] in ("image", "truth") else f"{name}, {one['label']}",
            base64.b64decode(one["data"]),
            MAP,
            grey=one["label"] == "entropy",
        )
        for one in picture["pngs"]
        if one["label"] in kept
    ]
