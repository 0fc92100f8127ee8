"""Trained PBNs: one model at smaller rates, and Bayesian weights per layer."""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from panels import side_by_side
from trained_runs import NAMES, SCORES, Results, about, by_name, compared, lines_figure, opened, rate_of, task_of

import leanbayes as lb
from leanbayes.data import Batches, Data
from leanbayes.evaluation import evaluate
from leanbayes.evaluation.cost import count_flops
from leanbayes.evaluation.full_evaluation import batch_size, some
from leanbayes.report.figure import Series
from leanbayes.report.figures.seed_lines import mean_line

DIAL = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SENSITIVE = 32  # training batches to rank weights on, as many as in training


def dial(args: argparse.Namespace) -> Results:
    """Score trained models at smaller rates, without training again."""
    results = []
    for run, data in opened(args):
        own = rate_of(run.model.method)
        if own and data.test is not None:
            results.append(about(run) | {"points": list(scores_by_rate(run.model, data, own, args))})
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
    title = f"{task_of(found)}: one trained model at smaller rates"
    return Results(found, {f"dial-{found['source']['name']}": side_by_side(title, figures, 2)})


def scores_by_rate(bnn: lb.BayesianModel, data: Data, own: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the scores of a model at each rate, for both rankings of its weights."""
    size = batch_size(data.input_shape)

    def batches(dataset: Any, limit: int) -> Batches:
        return Batches(
            some(dataset, limit, args.seed), size, device=bnn.device, shuffle=False, normalize=data.normalize
        )

    given = list(itertools.islice(batches(data.train, SENSITIVE * size).epoch(), SENSITIVE))
    for by, ranked_on in (("σ", None), ("σ and data", given)):
        for rate in sorted({rate for rate in DIAL if rate < own} | {own}):
            made = lb.restrict(bnn, rate, ranked_on)
            scores = evaluate(made, batches(data.test, args.examples).epoch(), samples=args.samples, seed=args.seed)
            yield {"by": by, "rate": rate, **{key: scores[key] for key in SCORES}}


def shares(args: argparse.Namespace) -> Results:
    """Count the Bayesian weights per layer, and the FLOPs of a prediction."""
    results = []
    for run, data in opened(args):
        if not rate_of(run.model.method):
            continue
        assert data.test is not None
        bnn, samples = run.model, args.samples
        x, _ = next(Batches(some(data.test, 1, 0), 1, device=bnn.device, normalize=data.normalize).epoch())
        random = bnn.layout.split((bnn.posterior.variance() > 0).float())
        layers = [
            {"name": slot.name, "weights": part.numel(), "bayesian": int(part.sum())}
            for slot, part in zip(bnn.layout, random, strict=True)
        ]
        flops = {"one_sample": count_flops(bnn, x, 1).dense, f"{samples}_samples": count_flops(bnn, x, samples).dense}
        results.append(about(run) | {"layers": layers, "predict_flops": flops})
    found = compared(results)
    return Results(found, {f"shares-{found['source']['name']}": share_drawing(found)})


def share_drawing(found: Mapping[str, Any]) -> str:
    """Draw the Bayesian fraction of every layer, one line per rate."""
    series = []
    for name, (run, *_) in by_name(found["results"]).items():
        if name.startswith("PBN"):
            shares = tuple(layer["bayesian"] / layer["weights"] for layer in run["layers"])
            series.append(Series(name, tuple(range(1, len(shares) + 1)), shares))
    caption = "Each point is a layer, from input to output."
    figure = lines_figure("shares", "Bayesian fraction of the layer", "layer", series, caption, percent="y")
    return side_by_side(task_of(found), [figure], 1)
