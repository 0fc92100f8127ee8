"""Choose the amplitude of SNGP's kernel, or the bound of its layers, by held-out images. Test images are not read.

python experiments/sngp_amplitude.py --out experiments/results/choices/sngp-amplitude.json
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json


def main() -> None:
    """Train with each amplitude and write the held-out scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--data", default="digits", help="name of a data set of images")
    parser.add_argument("--model", default="small-cnn", help="name of a network")
    parser.add_argument("--amplitudes", nargs="+", type=float, default=[0.3, 1.0, 3.0, 10.0, 30.0])
    parser.add_argument("--bounds", nargs="+", type=float, default=[lb.SNGP().norm_bound])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    cases = itertools.product(args.amplitudes, args.bounds, range(args.seeds))
    results = [held_out(args, *case) for case in cases]
    record = {
        "command": command_of("sngp_amplitude", args, []),
        "results": results,
        "versions": versions(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, record)


def held_out(args: argparse.Namespace, amplitude: float, bound: float, seed: int) -> dict[str, Any]:
    """Train one network, and score it on held-out images."""
    data = load(args.data, validation_share=0.25, seed=seed)
    network = build(args.model, data.input_shape, data.outputs, seed=seed)
    method = lb.SNGP(amplitude=amplitude, norm_bound=bound, seed=seed)
    bnn = lb.fit(network, method, data, epochs=args.epochs, evaluate_every=0, seed=seed, device="cpu", progress=False)
    batches = Batches(data.validation, 1000, normalize=data.normalize, shuffle=False)
    x, y = next(batches.epoch())
    probs = bnn.predict(x, 30, generator=torch.Generator().manual_seed(seed)).probs
    nll = float(torch.nn.functional.nll_loss(probs.log(), y))
    accuracy = float((probs.argmax(1) == y).double().mean())
    print(amplitude, bound, seed, nll, accuracy, flush=True)
    scores = {"examples": len(y), "nll": nll, "accuracy": accuracy}
    return {"amplitude": amplitude, "norm_bound": bound, "seed": seed, "held_out": scores}


if __name__ == "__main__":
    run_script(main)
