"""Experiments on stochastic weight sharing: NLL over file size, files of trained runs, INT8, and figures.

python experiments/sharing.py curve RUN --bit-prices 0.05 0.1 0.2 --epochs 0 10 --ood svhn
python experiments/sharing.py int8 RUN      a mean-field run with 8-bit μ and 4, 2 or 1-bit σ, against sharing
python experiments/sharing.py files RUNS    runs of `leanbayes compare --config experiments/cifar10_sharing_paper.yaml`
python experiments/sharing.py figures RUN   density and (μ, σ) plane of the weights, and confidence per class

Each command writes a JSON file (--out) and figures (--figures FOLDER). `curve` and `int8` share the weights of a
trained run, train the shared values if --epochs is not 0, write the compact file, load it, and score the loaded model.
They write results after every file and continue from an existing --out: after an interruption, or with more
components, prices and so on. Choices are made on held-out data.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from arguments import PLACES, add_common_arguments, command_of, run_script
from int8 import quantize_posterior
from sharing_figures import boxes, curve_drawing, density, density_drawing, draw_boxes, plane
from sharing_files import Arguments, Evaluator, Row, counts_of, line, method_for, of_file, share, shared_rows
from sharing_tables import INT8
from stored import read
from trained_runs import Results, about, folders

import leanbayes as lb
from leanbayes.cli.runs import TrainedRun, method_name, open_run
from leanbayes.core import config
from leanbayes.core.json_values import without_nan
from leanbayes.core.quantization import Precision
from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing.mixture import CHI2_95
from leanbayes.posteriors import SharedPosterior
from leanbayes.training.record import machine, versions, write_json

ALL_OF_SVHN = 26_032  # AUPR depends on the ratio of test to OOD examples
GRID = (
    "components",
    "bit_prices",
    "rates",
    "epochs",
    "lrs",
    "values",
    "bits",
)  # may grow from one call to the next
HIDDEN = ("experiment", "compare_with", "shared", "keep")  # formatted separately in the command, or left out


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    commands = parser.add_subparsers(dest="experiment", required=True)

    def command(name: str, summary: str, *, run: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, allow_abbrev=False)
        if run:
            made.add_argument("run", type=Path, help="folder of a trained run")
        else:
            made.add_argument("runs", type=Path, nargs="+", help="folders of runs or of leanbayes compare")
        made.add_argument("--examples", type=int, help="maximum number of test and of held-out examples (default: all)")
        made.add_argument("--train-examples", type=int, help="maximum number of training examples (default: all)")
        made.add_argument("--samples", type=int, default=30, help="Monte Carlo samples per prediction")
        made.add_argument("--calibration", type=int, default=1000, help="held-out examples to calibrate one pass")
        made.add_argument("--ood", nargs="*", default=[], help="out-of-distribution data sets, such as svhn")
        made.add_argument(
            "--ood-examples", type=int, default=ALL_OF_SVHN, help="maximum number of examples per OOD data set"
        )
        return add_common_arguments(made)

    def precisions(made: argparse.ArgumentParser) -> None:
        kinds = get_args(Precision)
        made.add_argument("--values", nargs="+", choices=kinds, default=["fp16"], help="precision of the codes")
        made.add_argument("--rest", choices=kinds, default="fp16", help="precision of biases and normalization layers")

    def sharing(made: argparse.ArgumentParser, prices: Sequence[float]) -> None:
        made.add_argument("--method", default="weight-sharing", help="weight-sharing with further settings")
        made.add_argument("--components", type=int, nargs="+", default=[256])
        made.add_argument("--bit-prices", type=or_none, nargs="+", default=list(prices), help="nats per bit, or none")
        made.add_argument(
            "--rates",
            type=or_none,
            nargs="+",
            default=[None],
            help="fraction of weights that stay random before sharing, or none",
        )
        made.add_argument(
            "--epochs", type=int, nargs="+", default=[0, 10], help="epochs of the final training; 0 to skip it"
        )
        made.add_argument(
            "--lrs", type=float, nargs="+", default=[1e-3], help="learning rates of the means in the final training"
        )
        made.add_argument(
            "--scale-lr", type=float, default=0.0, help="learning rate of σ: 0 fixes σ, otherwise it grows"
        )
        made.add_argument(
            "--rule", help="rule of the final training: moments to train for one pass (default: the run's rule)"
        )
        made.add_argument("--batch-size", type=int, default=256)
        made.add_argument("--compile", action="store_true", help="compile the final training")
        made.add_argument("--keep", type=Path, help="folder for the compact files")
        precisions(made)

    one = command("curve", "NLL over file size")
    sharing(one, (0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3))
    one.add_argument("--compare-with", type=Path, nargs="*", default=[], help="other runs to score for comparison")
    one = command("int8", "the INT8 baseline against sharing")
    sharing(one, (0.1, 0.3, 1.0))
    one.add_argument("--bits", type=int, nargs="+", default=[4, 2, 1], help="bits of σ")
    precisions(command("files", "compact files of runs with shared weights", run=False))
    one = command("figures", "density, (μ, σ) plane and confidence")
    one.add_argument(
        "--shared", type=Path, help="run with shared weights that started from this run (default: share here)"
    )
    usual = f"weight-sharing:threshold=0.2,border={CHI2_95:.3f}"
    one.add_argument("--method", default=usual, help="how to share the weights")
    return parser.parse_args()


def or_none(text: str) -> float | None:
    """Parse a number or none."""
    return None if text == "none" else float(text)


# -- one trained run --------------------------------------------------------------------------------------------------


def curve(args: argparse.Namespace) -> Results:
    """Score files of many sizes, the run itself, and other runs."""
    run = open_run(args.run, args.device)
    evaluator = Evaluator(run, Arguments.of(args))
    record = resumed(args, run, evaluator)
    known = [row["run"] for row in record["compared"]]
    for place in itertools.chain([args.run], *map(folders, args.compare_with)):
        if place.resolve().name not in known:
            record["compared"].append(unchanged(open_run(place, args.device), evaluator))
    write_rows(args, record, shared_rows(args, run, evaluator, record["results"]))
    return Results(record, {f"rate-distortion-{record['source']['name']}": curve_drawing(record)})


def record_of(args: argparse.Namespace, run: TrainedRun, evaluator: Evaluator) -> dict[str, Any]:
    """Return a new record; `sizes` are the file sizes of the plain network and of mean-field."""
    network = run.model.to_deterministic()
    return {
        "command": command(args),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        **{key: value for key, value in about(run).items() if key != "rate"},
        "examples": len(evaluator.data.test),  # type: ignore[arg-type]
        "held_out_examples": len(evaluator.data.validation),  # type: ignore[arg-type]
        "train_examples": len(evaluator.data.train),  # type: ignore[arg-type]
        "samples": args.samples,
        "settings": {name: value for name, value in vars(args).items() if name not in (*PLACES, *HIDDEN, *GRID)},
        "sizes": {name: saved_bytes(lb.bayesianize(network, method)) for name, method in WHOLE.items()},
    }


def resumed(args: argparse.Namespace, run: TrainedRun, evaluator: Evaluator) -> dict[str, Any]:
    """Return a new record, or the record in --out if it has the same run and settings."""
    record = record_of(args, run, evaluator) | {"compared": [], "results": []}
    if args.out is not None and args.out.is_file():
        old, new = read(args.out), without_nan(record)
        if all(old.get(key) == new[key] for key in ("settings", "method", "model", "source", "recipe")):
            machines = [*old.get("later_machines", []), record["machine"]]
            record["later_machines"] = [one for one in machines if one != old["machine"]]
            record |= {key: old[key] for key in ("compared", "results", "machine", "versions")}
            commands = [*old.get("earlier_commands", []), old["command"]]
            record["earlier_commands"] = [one for one in dict.fromkeys(commands) if one != record["command"]]
    return record


WHOLE = {"plain fp32 network": lb.Deterministic(), "dense fp32 mean-field": lb.MeanField()}


def saved_bytes(bnn: lb.BayesianModel) -> int:
    """Return the size of a saved model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        lb.save(bnn, path)
        return path.stat().st_size


def unchanged(run: TrainedRun, evaluator: Evaluator) -> Row:
    """Score a run with its own file."""
    if run.model.layout.numel and run.model.current_rule.random:
        evaluator.calibrate(run.model)
    size = (run.folder / "model.safetensors").stat().st_size
    row: Row = {"name": method_name(run.model.method), "run": run.folder.resolve().name, "bytes": size}
    row |= {"method": run.record["config"]["method"], **evaluator.evaluate(run.model)}
    print(line(row), flush=True)
    return row


def write_rows(args: argparse.Namespace, record: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write the record, and again after each new row."""
    write(args, record)
    for row in rows:
        record["results"].append(row)
        write(args, record)


def write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the record if --out is given."""
    if args.out is not None:
        write_json(args.out, record)


def int8(args: argparse.Namespace) -> Results:
    """Quantize a mean-field run to INT8 with few-bit σ, and share its weights for comparison."""
    run = open_run(args.run, args.device)
    evaluator = Evaluator(run, Arguments.of(args))
    record = resumed(args, run, evaluator)
    if not record["compared"]:
        record["compared"].append(unchanged(run, evaluator))
    known = [row.get("std_bits") for row in record["compared"]]
    for bits in args.bits:
        if bits not in known:
            made = quantize_posterior(run.model, std_bits=bits)
            evaluator.calibrate(made.model)
            row: Row = {
                "name": INT8.format(bits),
                "std_bits": bits,
                "bytes": made.bytes,
                **evaluator.evaluate(made.model),
            }
            print(line(row), flush=True)
            record["compared"].append(row)
    write_rows(args, record, shared_rows(args, run, evaluator, record["results"]))
    return Results(record, {f"int8-{record['source']['name']}": curve_drawing(record)})


# -- runs with shared weights -----------------------------------------------------------------------------------------


def files(args: argparse.Namespace) -> Results:
    """Write compact files of runs with shared weights, and score the loaded models."""
    record: dict[str, Any] = {}
    evaluator: Evaluator | None = None
    for place in itertools.chain.from_iterable(folders(given) for given in args.runs):
        run = open_run(place, args.device)
        if not isinstance(run.model.posterior, SharedPosterior):
            print(f"{place.name} has no shared weights and is skipped.", flush=True)
            continue
        evaluator = evaluator or Evaluator(run, Arguments.of(args))
        settings = about(run)
        record = record or {**record_of(args, run, evaluator), "results": []}
        evaluator.calibrate(run.model)
        for values in args.values:
            row = {key: settings[key] for key in ("name", "seed", "method")}
            row |= {"start": run.record["config"].get("start"), "costs": run.record["costs"]}
            row |= of_file(run.model, evaluator, values, args.rest)
            print(line(row), flush=True)
            record["results"].append(row)
    for key in ("name", "method"):  # of the first run only
        record.pop(key, None)
    if not record:
        raise LeanBayesError("None of these runs has shared weights: give runs of weight-sharing.")
    return Results(record)


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(args: argparse.Namespace) -> Results:
    """Compare the weights and the confidence before and after sharing."""
    run = open_run(args.run, args.device)
    evaluator = Evaluator(run, Arguments.of(args))
    if args.shared is not None:
        after = open_run(args.shared, args.device).model
        if not isinstance(after.posterior, SharedPosterior):
            raise LeanBayesError(f"The run in {args.shared} has no shared weights: give a run of weight-sharing.")
    else:
        after = share(run.model, method_for(run.model, args.method), evaluator)
    counts = counts_of(after.posterior)
    histogram = density(run.model.posterior, after.posterior)
    assert evaluator.data.test is not None
    names = evaluator.data.classes or tuple(map(str, range(evaluator.data.outputs)))
    confidences = {
        name: boxes(evaluator.outcome(bnn, evaluator.data.test, samples=args.samples)[1], names)
        for name, bnn in (("before sharing", run.model), ("after sharing", after))
    }
    record = {**record_of(args, run, evaluator), **counts, "density": histogram, "confidence": confidences}
    record["shared_method"] = config.encode(after.method)
    if args.figures is not None:
        args.figures.mkdir(parents=True, exist_ok=True)
        plane(run.model.posterior, after.posterior, args.seed, args.figures / f"plane-{record['source']['name']}.png")
        draw_boxes(confidences, args.figures / f"confidence-{record['source']['name']}.png")
    return Results(record, {f"density-{record['source']['name']}": density_drawing(histogram)})


# -- output -----------------------------------------------------------------------------------------------------------


def command(args: argparse.Namespace) -> str:
    """Return the command of this process without the paths of this machine."""
    words = [args.experiment, *(path.resolve().name for path in getattr(args, "runs", None) or [args.run])]
    for name in ("compare_with", "shared"):
        given = getattr(args, name, None)
        if given:
            places = given if isinstance(given, list) else [given]
            words += [f"--{name.replace('_', '-')}", *(path.resolve().name for path in places)]
    return command_of("sharing", args, words, hidden=HIDDEN)


def main() -> None:
    """Run the experiment, and write values and figures."""
    args = options()
    found = {one.__name__: one for one in (curve, int8, files, figures)}[args.experiment](args)
    write(args, found.values)
    if args.figures is not None:
        found.draw(args.figures)


if __name__ == "__main__":
    run_script(main)
