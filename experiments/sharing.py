"""The experiments on stochastic weight sharing: likelihood over bytes, files of runs that share, INT8, and figures.

python experiments/sharing.py curve RUN --bit-prices 0.05 0.1 0.2 --epochs 0 10 --ood svhn
python experiments/sharing.py int8 RUN      a mean-field run with μ in 8 bits and σ in 4, 2, 1, beside sharing
python experiments/sharing.py files RUNS    of `leanbayes compare --config experiments/cifar10_sharing_paper.yaml`
python experiments/sharing.py figures RUN   density and plane of the weights, and confidence by class

Each writes a JSON file (--out) and figures (--figures FOLDER). `curve` and `int8` let the weights of a trained run
share, train what is shared where --epochs says so, write the compact file, load it, and score what was loaded. They
write after every file, and go on with what --out holds: where they were stopped, or with more components, prices and so
on. Choices are made on the held-out data.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from asking import PLACES, as_script, command_of, with_places
from sharing_figures import boxes, curve_drawing, density, density_drawing, draw_boxes, plane
from sharing_files import Judge, Row, Terms, counts_of, line, method_for, of_file, shared, shared_rows
from sharing_tables import INT8
from trained import Found, about, folders

import leanbayes as lb
from leanbayes import config
from leanbayes.cli.runs import TrainedRun, method_name, open_run
from leanbayes.compression.mixture import CHI2_95
from leanbayes.compression.quantisation import Precision, quantise_posterior
from leanbayes.errors import LeanBayesError
from leanbayes.plain import without_nan
from leanbayes.posteriors import SharedPosterior
from leanbayes.training.record import machine, versions, write_json

ALL_OF_SVHN = 26_032  # AUPR follows the proportion of the two kinds
GRID = (
    "components",
    "bit_prices",
    "rates",
    "epochs",
    "lrs",
    "values",
    "bits",
)  # what may grow from one call to the next
HIDDEN = ("experiment", "beside", "shared", "keep")  # not in the command as they are


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    commands = parser.add_subparsers(dest="experiment", required=True)

    def command(name: str, summary: str, *, run: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, allow_abbrev=False)
        if run:
            made.add_argument("run", type=Path, help="folder of a trained run")
        else:
            made.add_argument("runs", type=Path, nargs="+", help="folders of runs, or that leanbayes compare wrote")
        made.add_argument("--examples", type=int, help="test examples, and held-out ones, at most (default: all)")
        made.add_argument("--train-examples", type=int, help="training examples, at most (default: all)")
        made.add_argument("--samples", type=int, default=30, help="draws of a prediction")
        made.add_argument("--calibration", type=int, default=1000, help="held-out examples that one pass is fitted on")
        made.add_argument("--ood", nargs="*", default=[], help="data sets of another kind, such as svhn")
        made.add_argument("--ood-examples", type=int, default=ALL_OF_SVHN, help="of each of them, at most")
        return with_places(made)

    def precisions(made: argparse.ArgumentParser) -> None:
        kinds = get_args(Precision)
        made.add_argument("--values", nargs="+", choices=kinds, default=["fp16"], help="precision of the codes")
        made.add_argument("--rest", choices=kinds, default="fp16", help="precision of biases and norms")

    def sharing(made: argparse.ArgumentParser, prices: Sequence[float]) -> None:
        made.add_argument("--method", default="weight-sharing", help="what else is to be set of weight-sharing")
        made.add_argument("--components", type=int, nargs="+", default=[256])
        made.add_argument("--bit-prices", type=or_none, nargs="+", default=list(prices), help="nats a bit, or none")
        made.add_argument(
            "--rates", type=or_none, nargs="+", default=[None], help="share of σ that is kept before, or none"
        )
        made.add_argument("--epochs", type=int, nargs="+", default=[0, 10], help="of the final training; 0 for none")
        made.add_argument("--lrs", type=float, nargs="+", default=[1e-3], help="of the means in that training")
        made.add_argument("--scale-lr", type=float, default=0.0, help="of the spreads: 0 keeps them, else they rise")
        made.add_argument("--rule", help="of that training: moments to train what one pass gives; default: the run's")
        made.add_argument("--batch-size", type=int, default=256)
        made.add_argument("--compile", action="store_true", help="compile the final training")
        made.add_argument("--keep", type=Path, help="folder to keep the compact files in")
        precisions(made)

    one = command("curve", "likelihood over the bytes of the file")
    sharing(one, (0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3))
    one.add_argument("--beside", type=Path, nargs="*", default=[], help="other runs, to be scored for comparison")
    one = command("int8", "the INT8 baseline beside sharing")
    sharing(one, (0.1, 0.3, 1.0))
    one.add_argument("--bits", type=int, nargs="+", default=[4, 2, 1], help="of σ")
    precisions(command("files", "compact files of runs whose weights share", run=False))
    one = command("figures", "density, plane and confidence")
    one.add_argument("--shared", type=Path, help="a run that went out from this one and shares; default: share here")
    usual = f"weight-sharing:threshold=0.2,border={CHI2_95:.3f}"
    one.add_argument("--method", default=usual, help="how weights share here")
    return parser.parse_args()


def or_none(text: str) -> float | None:
    """Read a number, or that there is none."""
    return None if text == "none" else float(text)


# -- experiments on one trained run -----------------------------------------------------------------------------------


def curve(args: argparse.Namespace) -> Found:
    """Score files of many sizes beside the run itself, and other runs."""
    run = open_run(args.run, args.device)
    judge = Judge(run, Terms.asked(args))
    record = begun(args, run, judge)
    known = [row["run"] for row in record["compared"]]
    for place in itertools.chain([args.run], *map(folders, args.beside)):
        if place.resolve().name not in known:
            record["compared"].append(as_it_is(open_run(place, args.device), judge))
    write_rows(args, record, shared_rows(args, run, judge, record["results"]))
    return Found(record, {f"rate-distortion-{record['source']['name']}": curve_drawing(record)})


def record_of(args: argparse.Namespace, run: TrainedRun, judge: Judge) -> dict[str, Any]:
    """Begin a record; its sizes are those of files of the plain network and of mean-field."""
    network = run.model.to_deterministic()
    return {
        "command": command(args),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        **{key: value for key, value in about(run).items() if key != "rate"},
        "examples": len(judge.data.test),  # type: ignore[arg-type]
        "held_out_examples": len(judge.data.validation),  # type: ignore[arg-type]
        "train_examples": len(judge.data.train),  # type: ignore[arg-type]
        "samples": args.samples,
        "settings": {name: value for name, value in vars(args).items() if name not in (*PLACES, *HIDDEN, *GRID)},
        "sizes": {name: saved_bytes(lb.bayesianize(network, method)) for name, method in WHOLE.items()},
    }


def begun(args: argparse.Namespace, run: TrainedRun, judge: Judge) -> dict[str, Any]:
    """Begin a record that rows go into, or go on with that of the same run and settings."""
    record = record_of(args, run, judge) | {"compared": [], "results": []}
    if args.out is not None and args.out.is_file():
        old, new = json.loads(args.out.read_text()), without_nan(record)
        if all(old.get(key) == new[key] for key in ("settings", "method", "model", "source", "recipe")):
            machines = [*old.get("later_machines", []), record["machine"]]
            record["later_machines"] = [one for one in machines if one != old["machine"]]
            record |= {key: old[key] for key in ("compared", "results", "machine", "versions")}
            commands = [*old.get("earlier_commands", []), old["command"]]
            record["earlier_commands"] = [one for one in dict.fromkeys(commands) if one != record["command"]]
    return record


WHOLE = {"plain fp32 network": lb.Deterministic(), "dense fp32 mean-field": lb.MeanField()}


def saved_bytes(bnn: lb.BayesianModel) -> int:
    """Save a model and look at the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        bnn.save(path)
        return path.stat().st_size


def as_it_is(run: TrainedRun, judge: Judge) -> Row:
    """Score a run with the file that it has."""
    if run.model.layout.numel and run.model.current_rule.random:
        judge.calibrate(run.model)
    size = (run.folder / "model.safetensors").stat().st_size
    row: Row = {"name": method_name(run.model.method), "run": run.folder.resolve().name, "bytes": size}
    row |= {"method": run.record["config"]["method"], **judge.of(run.model)}
    print(line(row), flush=True)
    return row


def write_rows(args: argparse.Namespace, record: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write what there is, then take in rows one by one, and write after each."""
    write(args, record)
    for row in rows:
        record["results"].append(row)
        write(args, record)


def write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write what there is, where that is wished."""
    if args.out is not None:
        write_json(args.out, record)


def int8(args: argparse.Namespace) -> Found:
    """Quantise a mean-field run to INT8 with σ in few bits, and let it share, too."""
    run = open_run(args.run, args.device)
    judge = Judge(run, Terms.asked(args))
    record = begun(args, run, judge)
    if not record["compared"]:
        record["compared"].append(as_it_is(run, judge))
    known = [row.get("std_bits") for row in record["compared"]]
    for bits in args.bits:
        if bits not in known:
            made = quantise_posterior(run.model, std_bits=bits)
            judge.calibrate(made.model)
            row: Row = {"name": INT8.format(bits), "std_bits": bits, "bytes": made.bytes, **judge.of(made.model)}
            print(line(row), flush=True)
            record["compared"].append(row)
    write_rows(args, record, shared_rows(args, run, judge, record["results"]))
    return Found(record, {f"int8-{record['source']['name']}": curve_drawing(record)})


# -- runs whose weights share -----------------------------------------------------------------------------------------


def files(args: argparse.Namespace) -> Found:
    """Write the compact files of runs that share already, and score what is loaded from them."""
    record: dict[str, Any] = {}
    judge: Judge | None = None
    for place in itertools.chain.from_iterable(folders(given) for given in args.runs):
        run = open_run(place, args.device)
        if not isinstance(run.model.posterior, SharedPosterior):
            print(f"{place.name} shares no weights, and is left out.", flush=True)
            continue
        judge = judge or Judge(run, Terms.asked(args))
        settings = about(run)
        record = record or {**record_of(args, run, judge), "results": []}
        judge.calibrate(run.model)
        for values in args.values:
            row = {key: settings[key] for key in ("name", "seed", "method")}
            row |= {"start": run.record["config"].get("start"), "costs": run.record["costs"]}
            row |= of_file(run.model, judge, values, args.rest)
            print(line(row), flush=True)
            record["results"].append(row)
    for key in ("name", "method"):  # those of the first run
        record.pop(key, None)
    if not record:
        raise LeanBayesError("None of these runs shares weights: give runs of weight-sharing.")
    return Found(record)


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(args: argparse.Namespace) -> Found:
    """Look at the weights before and after they share, and at the confidence of both models."""
    run = open_run(args.run, args.device)
    judge = Judge(run, Terms.asked(args))
    if args.shared is not None:
        after = open_run(args.shared, args.device).model
        if not isinstance(after.posterior, SharedPosterior):
            raise LeanBayesError(f"The run in {args.shared} shares no weights: give one of weight-sharing.")
    else:
        after = shared(run.model, method_for(run.model, args.method), judge)
    counts = counts_of(after.posterior)
    histogram = density(run.model.posterior, after.posterior)
    assert judge.data.test is not None
    names = judge.data.classes or tuple(map(str, range(judge.data.outputs)))
    confidences = {
        name: boxes(judge.outcome(bnn, judge.data.test, samples=args.samples)[1], names)
        for name, bnn in (("each weight its own", run.model), ("shared", after))
    }
    record = {**record_of(args, run, judge), **counts, "density": histogram, "confidence": confidences}
    record["shared_method"] = config.encode(after.method)
    if args.figures is not None:
        args.figures.mkdir(parents=True, exist_ok=True)
        plane(run.model.posterior, after.posterior, args.seed, args.figures / f"plane-{record['source']['name']}.png")
        draw_boxes(confidences, args.figures / f"confidence-{record['source']['name']}.png")
    return Found(record, {f"density-{record['source']['name']}": density_drawing(histogram)})


# -- what is written --------------------------------------------------------------------------------------------------


def command(args: argparse.Namespace) -> str:
    """Return the command of this process, without the folders of its machine."""
    words = [args.experiment, *(path.resolve().name for path in getattr(args, "runs", None) or [args.run])]
    for name in ("beside", "shared"):
        given = getattr(args, name, None)
        if given:
            places = given if isinstance(given, list) else [given]
            words += [f"--{name}", *(path.resolve().name for path in places)]
    return command_of("sharing", args, words, hidden=HIDDEN)


def main() -> None:
    """Do what the command line asks, and write values and figures."""
    args = options()
    found = {one.__name__: one for one in (curve, int8, files, figures)}[args.experiment](args)
    write(args, found.values)
    if args.figures is not None:
        found.draw(args.figures)


if __name__ == "__main__":
    as_script(main)
