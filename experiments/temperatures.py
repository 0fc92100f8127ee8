"""Train at several temperatures by both engines, and score held-out data and noise: what the defaults are chosen by.

python experiments/temperatures.py --root DATA --out experiments/results/temperatures/images.json

Each case is a data set with some of its training examples, the network of its preset (or a smaller one for CIFAR-10,
which a CPU can train), and a number of epochs. A third of the examples is held out, and only they are scored; test data
are not read. For images the noise is that of `leanbayes compare`: held-out images with Gaussian noise at -6 dB.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from small_data import some

import leanbayes as lb
from leanbayes.data import Batches, load, preset
from leanbayes.evaluation.detection import auroc
from leanbayes.evaluation.shift import add_noise
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json

HELD_OUT, NOISE = 1 / 3, -6
TEMPERATURES = (1.0, 0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Case:
    """A data set, how many of its examples are trained on, and for how long."""

    data: str
    examples: int | None = None
    epochs: int = 40
    model: str | None = None


CASES = {
    "digits": Case("digits"),
    "letters": Case("letters", model="small-cnn"),
    "mnist": Case("mnist", 1000, 20),
    "cifar10": Case("cifar10", 2000, 10, "small-cnn"),
    "boston": Case("boston", epochs=100),
    "concrete": Case("concrete", epochs=100),
    "energy": Case("energy", epochs=100),
    "wine": Case("wine", epochs=50),
    "yacht": Case("yacht", epochs=100),
}
METHODS = {
    "plain": lb.Deterministic(),
    "mean-field, backprop": lb.MeanField(engine="backprop"),
    "mean-field, ivon": lb.MeanField(engine="ivon"),
    "pbn, ivon": lb.PBN(engine="ivon"),
    "vdp": lb.VDP(),
}


def main() -> None:
    """Train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    parser.add_argument("--epochs", type=int, help="epochs of every case (default: those of the case)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    results = []
    for name in args.cases:
        for method in args.methods:
            for temperature in args.temperatures if METHODS[method].bayesian_weights else (1.0,):
                setting = (args, CASES[name], METHODS[method], temperature)
                scores = [scores_of(*setting, seed) for seed in range(args.seeds)]
                results.append({"case": name, "method": method, "temperature": temperature, "scores": scores})
                means = {key: round(statistics.fmean(one[key] for one in scores), 4) for key in scores[0]}
                print(name, method, temperature, means, flush=True)
                record = {"command": command_of("temperatures", args, []), "results": results}
                args.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(args.out, {**record, "versions": versions(), "machine": machine()})  # so far


def scores_of(
    args: argparse.Namespace, case: Case, method: lb.Method, temperature: float, seed: int
) -> dict[str, float]:
    """Return the scores of one training on the held-out examples, and how well it detects noise."""
    data = load(case.data, args.root, seed=seed, validation_share=HELD_OUT)
    if case.examples is not None:
        data = some(data, case.examples, seed)
    settings = preset(case.data, args.root, method)
    network = build(case.model or settings["model"], data.input_shape, data.outputs, seed=seed)
    settings.pop("model")
    if case.model is not None:  # the settings of the preset are those of its network
        settings = {"batch_size": 64, **({} if method.engine == "ivon" else {"lr": 2e-3})}
    own: dict[str, Any] = {"temperature": temperature, "epochs": args.epochs or case.epochs, "evaluate_every": 0}
    own |= {"seed": seed, "device": "cpu", "augment": "none"}
    bnn = lb.fit(network, method, data, progress=False, **{**settings, **own})
    batches = list(Batches(data.validation, 1000, normalize=data.normalize).epoch())[:2]
    found = lb.evaluate(bnn, batches, seed=0, target_scale=data.target_std)
    scores = {key: float(found[key]) for key in ("accuracy", "rmse", "nll", "ece") if key in found}
    if data.task == "classification":
        scores["noise_auroc"] = _noise_auroc(bnn, data, seed)
    return scores


def _noise_auroc(bnn: lb.BayesianModel, data: Any, seed: int) -> float:
    """Return how well the best score of uncertainty separates held-out images from the same images with noise."""
    x = next(iter(Batches(data.validation, 300).epoch()))[0].float() / 255
    found = []
    for images in (x, add_noise(x, NOISE, torch.Generator().manual_seed(seed))):
        prediction = bnn.predict(data.normalize(images), generator=torch.Generator().manual_seed(0))
        found.append({name: getattr(prediction, name) for name in ("entropy", "mutual_information")})
    return max(auroc(found[0][name], found[1][name]) for name in found[0])


if __name__ == "__main__":
    run_script(main)
