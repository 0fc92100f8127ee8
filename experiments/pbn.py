"""Experiments of the PBN paper: how many weights to make Bayesian, which ones, and the benefit and cost.

python experiments/pbn.py toy
python experiments/pbn.py convergence --data mnist --model lenet-300-100 --root FOLDER
python experiments/pbn.py rates RUNS          runs of `leanbayes compare --config experiments/mnist_pbn.yaml`
python experiments/pbn.py dial RUN ...        one trained model at smaller rates
python experiments/pbn.py shares RUN ...      Bayesian weights per layer
python experiments/pbn.py severities COMPARE.json ...
python experiments/pbn.py segmentation RUNS   runs of `leanbayes compare --config experiments/camvid_pbn.yaml`

Each command writes a JSON file (--out) and figures (--figures FOLDER). `toy` and `convergence` train.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from arguments import add_common_arguments, command_of, run_script
from panels import side_by_side
from pbn_dial import dial, shares
from pbn_images import segmentation, severities
from pbn_rates import rates
from torch import Tensor, nn
from torch.utils.data import Subset
from trained_runs import Results, lines_figure, name_of, task_of

import leanbayes as lb
from leanbayes.cli.options import Task
from leanbayes.cli.runs import prepare
from leanbayes.core import config
from leanbayes.data import Data, load, preset
from leanbayes.evaluation import evaluate
from leanbayes.methods import parse_method
from leanbayes.networks import build
from leanbayes.report.figure import Series
from leanbayes.training import Recipe, fit, read_record
from leanbayes.training.record import machine, versions, write_json

ENDS = {"inside": (0.0, 4.0), "outside": (4.0, 6.0)}  # ranges of |x| with and without toy data
NOISE, BAND = 3.0, 3.0  # std of the noise, and half width of the bands in std
TOY = {"epochs": 2000, "batch_size": 50, "lr": 1e-2, "weight_decay": 0.0, "temperature": 1.0, "evaluate_every": 0}
TOY_SCORES = ("rmse", "nll", "coverage_95", "std", "epistemic_std")
POINTS = 2000  # to score per range


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    commands = parser.add_subparsers(dest="experiment", required=True)

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, allow_abbrev=False)
        return add_common_arguments(made)

    def on_runs(name: str, summary: str) -> argparse.ArgumentParser:
        made = command(name, summary)
        made.add_argument("runs", type=Path, nargs="+", help="folders of runs or of leanbayes compare")
        return made

    toy = command("toy", "predictive bands of y = x³ + noise")
    toy.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.5])
    toy.add_argument("--examples", type=int, default=100, help="number of training points")
    toy.add_argument("--samples", type=int, default=500, help="Monte Carlo samples per prediction")

    starts = command("convergence", "training from a trained and from a random network")
    starts.add_argument("--data", default="digits", help="name of a data set")
    starts.add_argument("--model", help="name of a network (default: that of the data set's preset)")
    starts.add_argument("--methods", nargs="+", default=["pbn:rate=0.05", "mean-field"], help="as in leanbayes compare")
    starts.add_argument(
        "--epochs",
        type=int,
        default=10,
        help="epochs of the deterministic training, and of the Bayesian training after it",
    )
    starts.add_argument("--temperature", type=float, default=0.01)
    starts.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")

    on_runs("rates", "scores over rates, rotation, OOD data, and stds of the first layer")
    dialed = on_runs("dial", "one trained model at smaller rates")
    dialed.add_argument("--examples", type=int, default=10_000, help="maximum number of test examples")
    dialed.add_argument("--samples", type=int, default=30, help="Monte Carlo samples per prediction")
    on_runs("shares", "Bayesian weights per layer").add_argument("--samples", type=int, default=5)
    on_runs("segmentation", "IoU and entropy maps").add_argument(
        "--image", type=int, default=1, help="which of four images"
    )
    given = command("severities", "scores and entropies under corruptions")
    given.add_argument("comparisons", type=Path, nargs="+", metavar="COMPARE.json", help="files of leanbayes compare")
    return parser.parse_args()


# -- bands ------------------------------------------------------------------------------------------------------------


def toy(args: argparse.Namespace) -> Results:
    """Fit y = x³ + noise on [-4, 4], and compare the predictive bands on [-6, 6]."""
    data = load("toy")
    data = dataclasses.replace(data, train=Subset(data.train, range(args.examples)))
    network = build("mlp", data.input_shape, data.outputs, seed=args.seed, hidden=[100])
    prior = lb.Normal(1.0)
    methods: list[lb.Method] = [lb.Deterministic(), *(lb.PBN(rate, prior=prior) for rate in args.rates)]
    results, x = [], torch.linspace(-6, 6, 49)
    for method in [*methods, lb.MeanField(prior)]:
        bnn = fit(network, method, data, **TOY, seed=args.seed, device="cpu", progress=False)
        samples = args.samples if bnn.layout.numel else None
        scores = {
            end: evaluate(bnn, [toy_points(data, *between, args.seed)], samples=samples, target_scale=data.target_std)
            for end, between in ENDS.items()
        }
        found = bnn.predict(standardized(data, x), samples, generator=torch.Generator().manual_seed(args.seed))
        mean, std = found.mean[:, 0] * data.target_std[0] + data.target_mean[0], found.std[:, 0] * data.target_std[0]
        results.append(
            {
                "name": name_of(method),
                "method": config.encode(method),
                **{end: {key: of[key] for key in TOY_SCORES} for end, of in scores.items()},
                "curve": {"x": x.tolist(), "mean": mean.tolist(), "std": std.tolist()},
            }
        )
        print(results[-1]["name"], {end: results[-1][end] for end in ENDS}, flush=True)
    recipe = config.encode(Recipe().changed({**TOY, "seed": args.seed}))
    values = {"recipe": recipe, "examples": args.examples, "band": BAND, "results": results}
    return Results(values, {"toy": toy_drawing(results)})


def standardized(data: Data, x: Tensor) -> Tensor:
    """Standardize inputs as in training."""
    return ((x - data.input_mean[0]) / data.input_std[0])[:, None]


def toy_points(data: Data, least: float, most: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw new points with |x| in a range."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(POINTS, generator=generator) * (most - least) + least
    x = size * torch.randint(0, 2, (POINTS,), generator=generator).mul(2).sub(1)
    y = x**3 + NOISE * torch.randn(POINTS, generator=generator)
    return standardized(data, x), ((y - data.target_mean[0]) / data.target_std[0])[:, None]


def toy_drawing(results: list[dict[str, Any]]) -> str:
    """Draw one panel per method, with common axes and a frame around the range of the data."""
    curves = [(torch.tensor(one["curve"]["mean"]), torch.tensor(one["curve"]["std"])) for one in results]
    low = min((mean - BAND * std).min().item() for mean, std in curves)
    high = max((mean + BAND * std).max().item() for mean, std in curves)
    edge = ENDS["inside"][1]
    frame = Series("range of the data", (-edge, -edge, edge, edge, -edge), (low, high, high, low, low))
    figures = []
    for one, (mean, std) in zip(results, curves, strict=True):
        x = tuple(one["curve"]["x"])
        band = Series(
            f"mean ± {BAND:g} std", x, mean.tolist(), (mean - BAND * std).tolist(), (mean + BAND * std).tolist()
        )
        truth = Series("x³", x, tuple(place**3 for place in x))
        figures.append(
            dataclasses.replace(lines_figure(one["name"], "y", "x", [band, truth, frame]), title=one["name"])
        )
    return side_by_side("Predictive bands of y = x³ + noise", figures, 3, marks=False)


# -- convergence ------------------------------------------------------------------------------------------------------


def convergence(args: argparse.Namespace) -> Results:
    """Train from a trained and from a random network, with the same total number of epochs."""
    suited = preset(args.data, None if args.root is None else str(args.root))
    args.model = args.model or suited["model"]
    task = Task(data=args.data, model=args.model, root=args.root)
    prepared = prepare(task, args.seed)
    recipe = {key: value for key, value in suited.items() if key != "model"}
    recipe |= {name: getattr(args, name) for name in ("epochs", "temperature", "precision", "seed", "device")}

    def trained(start: nn.Module, method: lb.Method, epochs: int) -> tuple[lb.BayesianModel, dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            bnn = fit(start, method, prepared.data, out=folder, **{**recipe, "epochs": epochs}, progress=False)
            return bnn, read_record(folder)

    plain_network, record = trained(prepared.network, lb.Deterministic(), args.epochs)
    results = [{"name": "deterministic", "start": "random", **history_of(record, 0)}]
    pretrained = plain_network.to_deterministic()
    for method in methods_of(args.methods):
        for start, network, before in (("trained", pretrained, args.epochs), ("random", prepared.network, 0)):
            _, record = trained(network, method, 2 * args.epochs - before)
            history = history_of(record, before)
            results.append({"name": name_of(method), "start": start, "method": config.encode(method), **history})
            print(results[-1]["name"], start, results[-1]["last"], flush=True)
    figures = [
        lines_figure(
            score,
            f"held-out {label}",
            "epochs, including the deterministic training",
            [
                Series(
                    one["name"] + ("" if one["name"] == "deterministic" else f", {one['start']} start"),
                    tuple(point["epoch"] for point in one["epochs"]),
                    tuple(point[score] for point in one["epochs"]),
                )
                for one in results
            ],
            "With one sample after every epoch except the last.",
            percent=percent,
        )
        for score, label, percent in (("nll", "NLL", ""), ("accuracy", "accuracy", "y"))
    ]
    source = {**prepared.notes["source"], "name": Path(prepared.notes["source"]["name"]).name}
    settings = config.encode(Recipe().changed(recipe))
    values = {"source": source, "model": prepared.notes["model"], "recipe": settings, "results": results}
    title = f"{task_of(values)}: from a trained and from a random network"
    return Results(values, {f"convergence-{source['name']}": side_by_side(title, figures, 2)})


def methods_of(texts: list[str]) -> Iterator[lb.Method]:
    """Parse methods; PBN does not pretrain here."""
    for method in map(parse_method, texts):
        yield dataclasses.replace(method, pretrain=0.0) if isinstance(method, lb.PBN) else method


def history_of(record: dict[str, Any], before: int) -> dict[str, Any]:
    """Return held-out scores per epoch, counted from the start of the deterministic training, and the last ones."""
    kept = ("accuracy", "nll", "ece")
    epochs = [
        {"epoch": before + one["epoch"], **{key: one["validation"][key] for key in kept}}
        for one in record["history"]
        if "validation" in one
    ]
    last = {key: record["scores"]["validation"][key] for key in kept}
    return {"epochs": epochs, "last": last, "train_seconds": record["costs"]["train_seconds"]}


# -- output -----------------------------------------------------------------------------------------------------------


def write(found: Results, args: argparse.Namespace) -> None:
    """Write values to --out and figures to --figures."""
    if args.out is not None:
        places = getattr(args, "runs", None) or getattr(args, "comparisons", [])
        words = [args.experiment, *(path.resolve().name for path in places)]
        command = command_of("pbn", args, words, hidden=("experiment",))
        start = {"command": command, "seed": args.seed, "versions": versions(), "machine": machine()}
        write_json(args.out, start | found.values)
    if args.figures is not None:
        found.draw(args.figures)


EXPERIMENTS = (toy, convergence, rates, dial, shares, severities, segmentation)


def main() -> None:
    """Run the chosen experiment."""
    args = options()
    write({one.__name__: one for one in EXPERIMENTS}[args.experiment](args), args)


if __name__ == "__main__":
    run_script(main)
