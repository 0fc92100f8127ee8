"""Choose settings of sparse baselines, VBLL and variational dropout by held-out images. Test images are not read.

python experiments/sparse_choices.py --out experiments/results/choices/sparse-baselines.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from arguments import command_of, run_script

import leanbayes as lb
from leanbayes.core.config import encode
from leanbayes.data import Batches, load
from leanbayes.methods import get_method
from leanbayes.model.method import Method
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json

SPARSE = ["sparse-vd", "sbp", "aeb"]
OTHERS = ["vbll", "mbnn", "variational-dropout"]


def main() -> None:
    """Train with each setting and write the held-out scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--data", default="digits", help="name of a data set of images")
    parser.add_argument("--model", default="small-cnn", help="name of a network")
    parser.add_argument(
        "--methods", nargs="+", choices=[*SPARSE, *OTHERS], default=SPARSE, help="besides the plain network"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.1, 0.01, 0.001])
    parser.add_argument("--noise", nargs="+", type=float, default=[1.0, 0.1, 0.01, 0.001], help="of the chains")
    parser.add_argument("--lrs", nargs="+", type=float, default=[0.002, 0.02, 0.05, 0.1], help="learning rates of AEB")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="batch size")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of all but AEB")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    cases = [(method, settings, seed) for method, settings in _cases(args) for seed in range(args.seeds)]
    results = [held_out(args, *case) for case in cases]
    record = {
        "command": command_of("sparse_choices", args, []),
        "means": means(results),
        "results": results,
        "versions": versions(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, record)


def _cases(args: argparse.Namespace) -> list[tuple[Method, dict[str, Any]]]:
    """Return the methods and the settings of their training: all pairs for mBNN, one setting at a time for AEB."""
    cases: list[tuple[Method, dict[str, Any]]] = [(lb.Deterministic(), {"lr": args.lr})]
    cases += [
        (get_method(name), {"lr": args.lr, "temperature": temperature})
        for name in args.methods
        if name not in ("aeb", "mbnn")
        for temperature in args.temperatures
    ]
    if "mbnn" in args.methods:
        noises, temperatures = args.noise, args.temperatures
        cases += [(lb.MBNN(temperature=noise), {"temperature": one}) for noise in noises for one in temperatures]
        cases += [(lb.MBNN(sparsity=0.1, interval=interval), {}) for interval in (2, 1)]
    if "aeb" not in args.methods:
        return cases
    middle = lb.AEB(temperature=min(args.noise))
    cases += [(middle, {"lr": lr, "temperature": 0.01}) for lr in args.lrs]
    cases += [(middle, {"temperature": temperature}) for temperature in args.temperatures if temperature != 0.01]
    cases += [(lb.AEB(temperature=noise), {"temperature": 0.01}) for noise in args.noise if noise != min(args.noise)]
    return cases


def means(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over seeds, one for each method and settings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault(json.dumps([one["method"], one["settings"]]), []).append(one)
    found = []
    for runs in groups.values():
        scores = {name: fmean(run["held_out"][name] for run in runs) for name in ("nll", "accuracy")}
        density = fmean(run["density"] for run in runs)
        found.append({"method": runs[0]["method"], "settings": runs[0]["settings"], "density": density, **scores})
    return found


def held_out(args: argparse.Namespace, method: Method, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train one network, and score it on held-out images."""
    data = load(args.data, validation_share=0.25, seed=seed)
    network = build(args.model, data.input_shape, data.outputs, seed=seed)
    bnn = lb.fit(
        network, method, data, epochs=args.epochs, batch_size=args.batch, evaluate_every=0, seed=seed, device="cpu",
        progress=False, **settings,
    )  # fmt: skip
    x, y = next(Batches(data.validation, 10_000, normalize=data.normalize, shuffle=False).epoch())
    probs = bnn.predict(x, None if bnn.members else 30, generator=torch.Generator().manual_seed(seed)).probs
    scores = {
        "examples": len(y),
        "nll": float(torch.nn.functional.nll_loss(probs.clamp_min(1e-30).log(), y)),
        "accuracy": float((probs.argmax(1) == y).double().mean()),
    }
    sparse = not isinstance(method, (lb.Deterministic, lb.VBLL, lb.VariationalDropout))
    density = float((bnn.posterior.mean() != 0).double().mean()) if sparse else 1.0
    print(encode(method), settings, seed, scores, density, flush=True)
    return {"method": encode(method), "settings": settings, "seed": seed, "density": density, "held_out": scores}


if __name__ == "__main__":
    run_script(main)
