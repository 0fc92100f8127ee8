"""Compare the rule `adjoint` with one pass by moments and with samples, on small networks trained on digits.

    python benchmarks/adjoint.py --out benchmarks/results/adjoint-digits.json

A small CNN is trained by each method and seed. All ways to predict are compared with 1000 samples on the test images:
the KL of their probabilities, the correlation of log variances of the difference of the two largest logits, and the
median ratio of its std. Times are CPU time of one thread, the median over rounds in which all ways take turns, relative
to a plain forward pass.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import machine_of, write
from torch import Tensor, nn

import leanbayes as lb
import leanbayes.data
from leanbayes.rules import Adjoint

METHODS: dict[str, lb.Method] = {"MeanField": lb.MeanField(), "SSVI": lb.SSVI(density=0.1)}
WAYS: dict[str, dict[str, Any]] = {
    "mean": {"rule": "mean"},
    "8 samples": {"samples": 8},
    "30 samples": {"samples": 30},
    "moments": {"rule": "moments"},
    "adjoint": {"rule": "adjoint"},
    "adjoint, each logit": {"rule": Adjoint("each")},
    "adjoint, mean of moments": {"rule": Adjoint(mean="moments")},
    "adjoint, 3 margins, mean of moments": {"rule": Adjoint(mean="moments", margins=3)},
}
REFERENCE = 1000


def cnn() -> nn.Module:
    """Return three convolutions with BatchNorm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def trained(method: lb.Method, data: leanbayes.data.Data, epochs: int, temperature: float, seed: int) -> Any:
    """Return a trained model."""
    torch.manual_seed(seed)
    return lb.fit(cnn(), method, data, epochs=epochs, batch_size=64, temperature=temperature, seed=seed, progress=False)


def divergence(p: Tensor, q: Tensor) -> float:
    """Return the mean KL(p ‖ q) of probabilities."""
    p, q = p.double().clamp_min(1e-30), q.double().clamp_min(1e-30)
    return (p * (p.log() - q.log())).sum(1).mean().item()


def margin_variance(outputs: Tensor, two: Tensor) -> Tensor:
    """Return the variance over samples of the difference of two logits."""
    first, second = outputs.gather(2, two.expand(len(outputs), -1, -1)).unbind(2)
    return (first - second).var(0)


def compare(bnn: lb.BayesianModel, x: Tensor, y: Tensor, rounds: int) -> dict[str, Any]:
    """Return what each way to predict gives and costs."""
    reference = bnn.predict(x, REFERENCE, keep_outputs=True, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), bnn.using("mean"):
        two = bnn(x).topk(2, 1).indices
    assert reference.outputs is not None
    expected = margin_variance(reference.outputs, two)
    rows: dict[str, Any] = {}
    for name, way in WAYS.items():
        prediction = bnn.predict(x, **way, keep_outputs=True, generator=torch.Generator().manual_seed(2))
        row = {"kl": divergence(reference.probs, prediction.probs), "nll": _nll(prediction.probs, y)}
        if name != "mean":
            if prediction.samples > 1:
                variance = margin_variance(prediction.outputs, two)
            else:
                with torch.no_grad(), bnn.using(way["rule"]):
                    output = bnn(x)  # `moments` keeps the correlation of the two logits
                    variance = (output.gather(1, two[:, :1]) - output.gather(1, two[:, 1:])).variance.squeeze(1)
            row["margin_correlation"] = torch.corrcoef(torch.stack([variance.log(), expected.log()]))[0, 1].item()
            row["margin_std_ratio"] = (variance / expected).sqrt().median().item()
        rows[name] = row
    for name, times in _times({name: lambda way=way: bnn.predict(x, **way) for name, way in WAYS.items()}, rounds):
        rows[name]["cpu_ms"] = times
        rows[name]["time_ratio"] = times / rows["mean"]["cpu_ms"]
    return {
        "accuracy": (reference.label == y).double().mean().item(),
        "nll": _nll(reference.probs, y),
        "mutual_information": reference.mutual_information.mean().item(),
        "rows": rows,
    }


def _nll(probs: Tensor, y: Tensor) -> float:
    return -probs.gather(1, y.unsqueeze(1)).log().mean().item()


def _times(runs: dict[str, Callable[[], Any]], rounds: int) -> list[tuple[str, float]]:
    """Return median milliseconds of CPU time, in turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name].append(1e3 * (time.process_time() - start))
    return [(name, statistics.median(times)) for name, times in found.items()]


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.03)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Train, compare, print and write."""
    options = parsed()
    torch.set_num_threads(1)
    data = leanbayes.data.load("digits")
    test: Any = data.test
    images, labels = zip(*(test[number] for number in range(len(test))), strict=True)
    x, y = torch.stack(images), torch.stack(labels)
    x = data.normalize(x) if data.normalize else x.float()
    results = []
    for name, method in METHODS.items():
        for seed in options.seeds:
            bnn = trained(method, data, options.epochs, options.temperature, seed)
            result = {"method": name, "seed": seed, **compare(bnn, x, y, options.rounds)}
            results.append(result)
            print(name, seed, {key: value for key, value in result.items() if key not in ("method", "seed", "rows")})
            for way, row in result["rows"].items():
                print(f"  {way:<26}" + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    record = {"machine": machine_of("cpu"), "data": "digits", "examples": len(x), **settings, "results": results}
    write(options.out, record)


if __name__ == "__main__":
    main()
