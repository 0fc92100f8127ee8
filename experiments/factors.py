"""Compare ways to fit the two calibration factors of one pass: by output mean and std, by probabilities, and by labels.

python experiments/factors.py RUN --file NAME=PATH.lbc --out experiments/results/factors/NAME.json

All factors are fitted on held-out images; the first two kinds match Monte Carlo samples and need no labels. The program
scores a run and compact files of its network on test images: with samples, and in one pass without and with factors.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arguments import add_common_arguments, command_of, named_path, run_script
from sharing_files import Arguments, Evaluator

import leanbayes as lb
from leanbayes.cli.runs import method_name, open_run
from leanbayes.training.record import machine, versions, write_json

SAMPLES, BY_MOMENTS, LABELS = "samples", "moments", "labels"
FACTORS = {"none": "none", BY_MOMENTS: "by mean and std", "probabilities": "by probabilities", LABELS: "by labels"}


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a trained run")
    parser.add_argument(
        "--file", type=named_path, action="append", default=[], metavar="NAME=PATH", help="compact file"
    )
    parser.add_argument("--files-only", action="store_true", help="score only the files")
    ways = [*FACTORS, SAMPLES]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="samples, or how to fit the factors")
    parser.add_argument("--samples", type=int, default=30, help="Monte Carlo samples per prediction and for the fit")
    parser.add_argument("--calibration", type=int, default=500, help="held-out examples for the fit")
    parser.add_argument("--examples", type=int, default=1000, help="number of test examples")
    return add_common_arguments(parser).parse_args()


def ways(bnn: lb.BayesianModel, evaluator: Evaluator, chosen: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Score one pass with each kind of factors, and Monte Carlo samples."""
    test = evaluator.data.test
    assert test is not None
    likelihood = bnn.likelihood
    for by, name in FACTORS.items():
        if by not in chosen:
            continue
        bnn.moment_scale = (1.0, 1.0)
        if by == LABELS:
            bnn.moment_scale = evaluator.by_labels(bnn).moment_scale
        elif by != "none":
            bnn.likelihood = lb.Gaussian() if by == BY_MOMENTS else likelihood  # match mean and std of the outputs
            evaluator.calibrate(bnn)
            bnn.likelihood = likelihood
        yield (
            f"one pass, factors {name}",
            {"factors": bnn.moment_scale, **evaluator.outcome(bnn, test, rule="moments")[0]},
        )
    if SAMPLES in chosen:
        samples = evaluator.arguments.samples
        yield f"{samples} samples", evaluator.outcome(bnn, test, samples=samples)[0]


def main() -> None:
    """Score all models, and write the results after each."""
    args = options()
    run = open_run(args.run, args.device)
    evaluator = Evaluator(run, Arguments.of(args))
    settings = run.record["config"]
    words = [
        args.run.resolve().name,
        *itertools.chain(*(("--file", f"{name}={path.name}") for name, path in args.file)),
    ]
    record = {
        "command": command_of("factors", args, words, hidden=("file",)),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        "model": settings["model"],
        "source": settings["source"],
        "examples": len(evaluator.data.test),  # type: ignore[arg-type]
        "results": {},
    }
    models = [*([] if args.files_only else [(method_name(run.model.method), None)]), *args.file]
    for title, path in models:
        bnn = run.model if path is None else lb.load(path, run.model.to_deterministic()).eval().to(evaluator.device)
        results = record["results"][title] = {}
        for way, scores in ways(bnn, evaluator, args.ways):
            results[way] = scores
            print(f"{title}, {way}: " + ", ".join(f"{key} {value}" for key, value in scores.items()), flush=True)
            if args.out is not None:
                write_json(args.out, record)


if __name__ == "__main__":
    run_script(main)
