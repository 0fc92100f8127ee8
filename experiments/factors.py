"""Compares ways to fit the two factors of one pass: by mean and std of the outputs, by probabilities, and by labels.

python experiments/factors.py RUN --file NAME=PATH.lbc --out experiments/results/factors/NAME.json

The first two are fitted to draws, without labels, and all on held-out images. Scored are a run and compact files of
its network, on some test images: by draws, and in one pass without factors and with each.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asking import as_script, command_of, named_path, with_places
from sharing_files import Judge, Terms

import leanbayes as lb
from leanbayes.cli.runs import method_name, open_run
from leanbayes.training.record import machine, versions, write_json

DRAWS, BY_MOMENTS, LABELS = "draws", "moments", "labels"
FACTORS = {"none": "none", BY_MOMENTS: "by mean and std", "probabilities": "by probabilities", LABELS: "by labels"}


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a trained run")
    parser.add_argument(
        "--file", type=named_path, action="append", default=[], metavar="NAME=PATH", help="compact file"
    )
    parser.add_argument("--files-only", action="store_true", help="leave out the run itself")
    ways = [*FACTORS, DRAWS]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="draws, or what factors are fitted by")
    parser.add_argument("--samples", type=int, default=30, help="draws of a prediction, and of the fit")
    parser.add_argument("--calibration", type=int, default=500, help="held-out examples that are fitted on")
    parser.add_argument("--examples", type=int, default=1000, help="test examples")
    return with_places(parser).parse_args()


def ways(bnn: lb.BayesianModel, judge: Judge, wished: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Score one pass with each kind of factors, and draws."""
    test = judge.data.test
    assert test is not None
    likelihood = bnn.likelihood
    for by, name in FACTORS.items():
        if by not in wished:
            continue
        bnn.moment_scale = (1.0, 1.0)
        if by == LABELS:
            bnn.moment_scale = judge.by_labels(bnn).moment_scale
        elif by != "none":
            bnn.likelihood = lb.Gaussian() if by == BY_MOMENTS else likelihood  # outputs that are numbers
            judge.calibrate(bnn)
            bnn.likelihood = likelihood
        yield f"one pass, factors {name}", {"factors": bnn.moment_scale, **judge.outcome(bnn, test, rule="moments")[0]}
    if DRAWS in wished:
        samples = judge.terms.samples
        yield f"{samples} draws", judge.outcome(bnn, test, samples=samples)[0]


def main() -> None:
    """Score all, and write what was found after each."""
    args = options()
    run = open_run(args.run, args.device)
    judge = Judge(run, Terms.asked(args))
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
        "examples": len(judge.data.test),  # type: ignore[arg-type]
        "results": {},
    }
    models = [*([] if args.files_only else [(method_name(run.model.method), None)]), *args.file]
    for title, path in models:
        bnn = run.model if path is None else lb.load(path, run.model.to_deterministic()).eval().to(judge.device)
        found = record["results"][title] = {}
        for way, scores in ways(bnn, judge, args.ways):
            found[way] = scores
            print(f"{title}, {way}: " + ", ".join(f"{key} {value}" for key, value in scores.items()), flush=True)
            if args.out is not None:
                write_json(args.out, record)


if __name__ == "__main__":
    as_script(main)
