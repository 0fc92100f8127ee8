"""Train on few examples by both engines: where temperature 1 could drown the likelihood.

python experiments/small_data.py --digits 100 300 1078 --out experiments/results/engines/small-digits.json

A small CNN on 100, 300 and all training digits, and an MLP on UCI tables. Each row is the mean over seeds, which choose
the examples, the initial weights and the noise. Rows: the plain network, mean-field by Bayes by Backprop with the
temperature of the data set's preset and with temperature 1, and mean-field by IVON with its defaults, and without the
choice of the initial curvature by the number of examples.
"""

import argparse
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from torch.utils.data import Subset

import leanbayes as lb
from leanbayes.data import Batches, Data, load, preset
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json


@dataclass(frozen=True)
class Row:
    """A method, and its settings that differ from the preset of the data set."""

    method: lb.Method
    settings: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "plain": Row(lb.Deterministic()),
    "backprop": Row(lb.MeanField()),
    "backprop, temperature 1": Row(lb.MeanField(), {"temperature": 1.0}),
    "ivon": Row(lb.MeanField(engine="ivon")),
    "ivon, hess_init 0.5": Row(lb.MeanField(engine="ivon"), {"hess_init": 0.5}),
    "pbn by ivon": Row(lb.PBN(engine="ivon")),
    "ssvi 10 % by ivon": Row(lb.SSVI(0.1, engine="ivon")),
}


def main() -> None:
    """Train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--digits", type=int, nargs="*", default=[], help="numbers of training digits, such as 100 300")
    parser.add_argument("--tables", nargs="*", default=[], help="UCI tables, such as boston energy")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    if not args.digits and not args.tables:
        parser.error("name some --digits or --tables")
    results = []
    cases = [*(("digits", count) for count in args.digits), *((name, None) for name in args.tables)]
    for name, count in cases:
        for row in args.rows:
            scores = [scores_of(args, name, count, ROWS[row], seed) for seed in range(args.seeds)]
            result = {"data": name, "examples": count, "row": row, "scores": scores}
            results.append(result)
            means = {key: round(statistics.fmean(one[key] for one in scores), 4) for key in scores[0]}
            print(name, count or "", row, means, flush=True)
            record = {"command": command_of("small_data", args, []), "results": results}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.out, {**record, "versions": versions(), "machine": machine()})  # so far


def scores_of(args: argparse.Namespace, name: str, count: int | None, row: Row, seed: int) -> dict[str, float]:
    """Return the scores of one training on the test data."""
    data = load(name, args.root, seed=seed)
    if count is not None:
        data = some(data, count, seed)
    settings = preset(name, args.root, row.method)
    network = build(settings.pop("model"), data.input_shape, data.outputs, seed=seed)
    own = {"epochs": args.epochs, "batch_size": 32, "evaluate_every": 0, "seed": seed, "device": "cpu"}
    bnn = lb.fit(network, row.method, data, progress=False, **{**settings, **own, **row.settings})  # type: ignore[arg-type]
    batches = list(Batches(data.test, 1000, normalize=data.normalize).epoch())
    found = lb.evaluate(bnn, batches, seed=0, target_scale=data.target_std)
    return {key: float(found[key]) for key in ("accuracy", "rmse", "nll", "ece") if key in found}


def some(data: Data, count: int, seed: int) -> Data:
    """Return the data with some of its training examples, chosen at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.train), generator=generator)  # type: ignore[arg-type]
    return replace(data, train=Subset(data.train, order[:count].tolist()))


if __name__ == "__main__":
    run_script(main)
