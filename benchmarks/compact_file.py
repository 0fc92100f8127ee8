"""Measure compact files of a ResNet-18: their size against the entropy of their content, and their times.

    python benchmarks/compact_file.py --out benchmarks/results/compact-file-cpu.json

Labels and positions are random: 5 % of the weights with 256 codes; and all weights with 6000 codes, of which 1 % are
outliers and 20,000 are blended.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import machine_of, write
from torch import nn

import leanbayes as lb
from leanbayes.networks import build
from leanbayes.posteriors.shared.codes import Codes
from leanbayes.posteriors.shared.shared import SharedPosterior


def model(network: nn.Module, components: int, density: float, outliers: int, blends: int) -> lb.BayesianModel:
    """Return a model with a random shared posterior; labels are Gaussian around the middle of the codebook."""
    generator = torch.Generator().manual_seed(0)
    bnn = lb.bayesianize(network, lb.WeightSharing(components=None))
    assert isinstance(bnn.posterior, SharedPosterior)
    count, codes = bnn.layout.numel, components + outliers
    mean, std = (
        0.05 * torch.randn(codes, generator=generator),
        torch.rand(codes, generator=generator).add(0.1).mul(0.01),
    )
    labels = (components / 8 * torch.randn(count, generator=generator) + components / 2).long().clamp(0, components - 1)
    order = torch.randperm(count, generator=generator)
    labels[order[:outliers]] = components + torch.arange(outliers)
    blended = order[outliers : outliers + blends].sort().values
    labels[torch.rand(count, generator=generator) > density] = codes
    partners = torch.randint(components, (blends, 5), generator=generator)
    alpha = torch.rand(blends, 5, generator=generator).softmax(1)
    covariance = torch.zeros(codes, 2, 2)
    bnn.posterior.share(Codes(mean, std, covariance, labels, blended, partners, alpha))
    return bnn


def entropy_bytes(bnn: lb.BayesianModel) -> float:
    """Return the entropy of the labels in bytes, including zeros; all outliers count as one symbol."""
    counts = torch.bincount(bnn.posterior.get_buffer("labels")).double()
    counts = torch.cat([counts[counts > 1], counts[counts == 1].sum()[None]])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum() * counts.sum() / 8)


def measure(network: nn.Module, repeats: int, **settings: Any) -> dict[str, Any]:
    """Time writing and reading a file."""
    bnn = model(network, **settings)
    writing, reading = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.lbc"
        for _ in range(repeats):
            start = time.perf_counter()
            made = lb.compress(bnn, path)
            middle = time.perf_counter()
            lb.load(path, network)
            writing.append(middle - start)
            reading.append(time.perf_counter() - middle)
    return {
        **settings,
        "weights": bnn.layout.numel,
        "bytes": made.bytes,
        "parts": made.parts,
        "entropy_of_labels_bytes": math.ceil(entropy_bytes(bnn)),
        "compress_seconds": writing,
        "load_seconds": reading,
    }


def main() -> None:
    """Measure both files and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    machine = machine_of("cpu")
    print(f"torch {torch.__version__}, {machine}\n", flush=True)
    network = build("resnet-18", (3, 32, 32), 10, seed=0)
    record: dict[str, Any] = {"machine": machine}
    record["sparse"] = measure(network, args.repeats, components=256, density=0.05, outliers=0, blends=0)
    print(json.dumps(record["sparse"], indent=1), flush=True)
    record["dense"] = measure(network, args.repeats, components=6000, density=1.0, outliers=111_000, blends=20_000)
    print(json.dumps(record["dense"], indent=1), flush=True)
    write(args.out, record)


if __name__ == "__main__":
    main()
