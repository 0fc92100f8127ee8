"""Compare one pass with corrected layers with one pass as it is, with two factors, and with Monte Carlo samples.

python experiments/layer_corrections.py --out experiments/results/one_pass/layers/digits.json

Small networks are trained on the digits. Corrections and factors are fitted on training images, without labels, and
scored on test images and on letters, which are out of distribution. The truth is a large number of samples.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from arguments import add_common_arguments, command_of, run_script
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.data import Batches, Data, load, preset
from leanbayes.deploy.layer_corrections import correct_layers
from leanbayes.evaluation.full_evaluation import some
from leanbayes.likelihoods.accumulators import Running
from leanbayes.networks import VisionTransformer, build
from leanbayes.training.record import machine, versions, write_json

RATE = 0.02  # of the weights stay random in the restricted model


class Case(NamedTuple):
    """A network, a method, and its temperature; `rate` restricts the trained model to some random weights."""

    network: str
    method: lb.Method
    temperature: float
    rate: float | None = None


CASES = {
    "CNN, mean-field": Case("cnn", lb.MeanField(), 0.1),
    "CNN, mean-field, temperature 1": Case("cnn", lb.MeanField(), 1.0),
    "CNN, SSVI 10 %": Case("cnn", lb.SSVI(0.1), 0.1),
    "CNN, mean-field restricted to 2 %": Case("cnn", lb.MeanField(), 0.1, RATE),
    "ViT, mean-field": Case("vit", lb.MeanField(), 0.02),
    "ViT, SSVI 10 %": Case("vit", lb.SSVI(0.1), 0.02),
}


class Truth(NamedTuple):
    """Mean and variance of the logits over many samples, and their mean probabilities."""

    mean: Tensor
    variance: Tensor
    probs: Tensor


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--truth", type=int, default=1000, help="samples that are the truth")
    parser.add_argument("--samples", type=int, default=64, help="samples to fit to")
    parser.add_argument("--inputs", type=int, default=256, help="training images to fit on")
    parser.add_argument("--examples", type=int, default=599, help="test images, and letters, to score")
    return add_common_arguments(parser).parse_args()


def trained(case: Case, data: Data, args: argparse.Namespace) -> lb.BayesianModel:
    """Train a network, and restrict it if the case says so."""
    settings = {**preset("digits"), "epochs": args.epochs, "temperature": case.temperature, "evaluate_every": 0}
    name, shape = settings.pop("model"), data.input_shape
    torch.manual_seed(args.seed)
    network: nn.Module = (
        build(name, shape, data.outputs, seed=args.seed)
        if case.network == "cnn"
        else VisionTransformer(data.outputs, shape, patch=2, width=32, depth=3, heads=4)
    )
    bnn = lb.fit(network, case.method, data, progress=False, seed=args.seed, device="cpu", **settings)
    return (bnn if case.rate is None else lb.restrict(bnn, case.rate)).eval()


def images(data: Data, split: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return some normalized images and their labels."""
    batches = Batches(some(split, count, seed), count, shuffle=False, normalize=data.normalize)
    x, y = next(iter(batches.epoch()))
    return x, y


@torch.no_grad()
def truth_of(bnn: lb.BayesianModel, x: Tensor, samples: int, generator: torch.Generator) -> Truth:
    """Sample the logits."""
    logits, probs = Running(), Running()
    with bnn.using("sample"):
        for number in range(samples):
            output = bnn(x, _draw=bnn.next_draw(generator, number)).double()
            logits.update(output)
            probs.update(output.softmax(-1))
    return Truth(logits.mean, logits.squares / (samples - 1), probs.mean)


def divergence(truth: Truth, probs: Tensor) -> float:
    """Return the mean KL divergence from the probabilities of the truth."""
    terms = torch.xlogy(truth.probs, truth.probs) - truth.probs * probs.double().clamp_min(1e-30).log()
    return terms.sum(-1).mean().item()


@torch.no_grad()
def compared(bnn: lb.BayesianModel, x: Tensor, truth: Truth) -> dict[str, float]:
    """Compare one pass with the truth: std ratio, correlation of log variances per image, errors of the mean."""
    with bnn.using("moments"), bnn.frozen(0):
        output = bnn(x)
    std, loc = truth.variance.sqrt(), output.loc.double()
    variances = torch.stack([output.variance.double().mean(-1), truth.variance.mean(-1)])
    top = truth.mean.argmax(-1, keepdim=True)
    return {
        "std_ratio": (output.stddev / std).median().item(),
        "log_correlation": torch.corrcoef(variances.log())[0, 1].item(),
        "mean_error": ((loc - truth.mean).abs() / std).mean().item(),
        "top_error": (loc - truth.mean).gather(1, top).mean().item(),
    }


def one_value_per_layer(corrections: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average the shift and the logarithm of the factor over the channels that have a variance."""
    averaged = {}
    for name, (gain, shift, factor) in corrections.items():
        random = (gain != 1) | (shift != 0) | (factor != 1)
        shift, factor = shift.clone(), factor.clone()
        shift[random], factor[random] = shift[random].mean(), factor[random].log().mean().exp()
        averaged[name] = torch.stack([gain, shift, factor])
    return averaged


def ways(bnn: lb.BayesianModel, x: Tensor, args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each way to correct one pass: its name, and a function that fits it."""

    def fit(**settings: Any) -> Callable[[], object]:
        generator = torch.Generator().manual_seed(args.seed)
        own = {"to": "samples", "samples": args.samples, "generator": generator, "layer_inputs": args.inputs}
        return lambda: lb.calibrate(bnn, [x], **{**own, **settings})

    def one_per_layer() -> None:
        generator = torch.Generator().manual_seed(args.seed)
        bnn.moment_layers = one_value_per_layer(correct_layers(bnn, [x], args.samples, args.inputs, generator))

    yield "as it is", lambda: None
    yield "two factors", fit()
    yield "layers, one value per layer", one_per_layer
    yield "layers", fit(layers=True, factors=False)
    yield "layers and two factors", fit(layers=True)


def rows(bnn: lb.BayesianModel, data: Data, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the scores of each number of samples, and of each way to correct one pass."""
    x, _ = images(data, data.train, args.inputs, args.seed)
    assert data.test is not None
    test, labels = images(data, data.test, args.examples, args.seed)
    letters, _ = images(data, load("letters").test, args.examples, args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    sets = {"test": test, "letters": letters}
    truths = {name: truth_of(bnn, some_x, args.truth, generator) for name, some_x in sets.items()}

    def scores(probs: dict[str, Tensor]) -> dict[str, Any]:
        likely = probs["test"].double().gather(1, labels[:, None]).clamp_min(1e-30)
        found = {name: {"kl": divergence(truths[name], probs[name])} for name in sets}
        return {"nll": -likely.log().mean().item(), **found}

    for count in (30, 100):
        drawn = {name: truth_of(bnn, some_x, count, generator).probs for name, some_x in sets.items()}
        yield {"way": f"{count} samples", **scores(drawn)}
    yield {"way": f"{args.truth} samples", **scores({name: truth.probs for name, truth in truths.items()})}
    for way, fit in ways(bnn, x, args):
        bnn.moment_scale, bnn.moment_layers = (1.0, 1.0), {}
        fit()
        row = {
            "way": f"one pass, {way}",
            **scores({name: bnn.predict(some_x, rule="moments").probs for name, some_x in sets.items()}),
        }
        for name, some_x in sets.items():
            row[name] |= compared(bnn, some_x, truths[name])
        yield row


def main() -> None:
    """Train, compare, and write the results after each case."""
    args, data = options(), load("digits")
    record: dict[str, Any] = {
        "command": command_of("layer_corrections", args, []),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        "examples": args.examples,
        "inputs": args.inputs,
        "samples": args.samples,
        "results": {},
    }
    for name in args.cases:
        bnn = trained(CASES[name], data, args)
        record["results"][name] = []
        for row in rows(bnn, data, args):
            record["results"][name].append(row)
            print(name, row, flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.out, record)


if __name__ == "__main__":
    run_script(main)
