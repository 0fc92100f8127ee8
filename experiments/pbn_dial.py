"""Trained PBNs: one model at smaller rates, and the Bayesian weights of each layer."""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from panels import beside
from trained import NAMES, SCORES, Found, about, by_name, compared, lines_figure, opened, rate_of, task_of

import leanbayes as lb
from leanbayes.data import Batches, Data
from leanbayes.evaluation import evaluate
from leanbayes.evaluation.assessment import batch_size, some
from leanbayes.evaluation.cost import count_flops
from leanbayes.figures import Series
from leanbayes.report.figures.lines import mean_line

DIAL = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SENSITIVE = 32  # training batches that a dial by data looks at, as many as a training does


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
