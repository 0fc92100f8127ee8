"""Models with codes of every kind, and changes of compact files."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import leanbayes as lb
from leanbayes.posteriors.shared.codes import Codes
from leanbayes.posteriors.shared.schemes import Sampling
from leanbayes.posteriors.shared.shared import SharedPosterior

START = struct.Struct("<8sHHI")


def build() -> nn.Module:
    """A network with a convolution, a norm and biases."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 24), nn.Tanh(), nn.Linear(24, 5)
    )
    net.train()(torch.randn(16, 2, 5, 5))  # so that the norm has statistics
    return net.eval()


X = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1))


def shared(
    sampling: Sampling = "independent", zeros: bool = True, seed: int = 0, net: nn.Module | None = None
) -> lb.BayesianModel:
    """A model with codes of every kind: shared, outliers, both also deterministic, zeros and blends."""
    generator = torch.Generator().manual_seed(seed)
    codes, outliers, points, lone, unused = 12, 7, 3, 2, 1
    method = lb.WeightSharing(components=4, minimum=1, merge_distance=0.0, sampling=sampling)
    bnn = lb.bayesianize(build() if net is None else net, method)
    count = bnn.layout.numel
    stds = codes + outliers + unused
    mean = 0.1 * torch.randn(stds + points + lone, generator=generator)
    std = 0.05 * torch.rand(stds, generator=generator) + 1e-3
    labels = torch.randint(codes, (count,), generator=generator)
    order = torch.randperm(count, generator=generator)
    labels[order[:40]] = stds + torch.randint(points, (40,), generator=generator)
    if zeros:
        labels[order[40 : count // 2]] = len(mean)
    blended = order[-25:].sort().values
    labels[order[-40:-33]] = codes + torch.randperm(outliers, generator=generator)
    labels[order[-33:-31]] = stds + points + torch.arange(lone)
    partners = torch.rand(25, codes, generator=generator).argsort(1)[:, :5]
    alpha = torch.randn(25, 5, generator=generator).mul(2).softmax(1)
    root = 1e-3 * torch.randn(stds, 2, 2, generator=generator)
    book = Codes(mean, std, root @ root.mT, labels, blended, partners, alpha)
    prior = method.prior.bind(bnn.layout, torch.zeros(count))
    bnn.posterior = SharedPosterior(bnn.layout, book, prior, sampling)
    return bnn


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    length = START.unpack_from(data)[-1]
    return json.loads(zlib.decompress(data[START.size : START.size + length]))


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a file, and give it a valid checksum."""
    data = path.read_bytes()
    magic, version, nothing, length = START.unpack_from(data)
    header = header_of(path)
    change(header)
    packed = zlib.compress(json.dumps(header).encode())
    body = START.pack(magic, version, nothing, len(packed)) + packed + data[START.size + length : -32]
    path.write_bytes(body + hashlib.sha256(body).digest())


def signed(body: bytes) -> bytes:
    """Append a valid checksum."""
    return body + hashlib.sha256(body).digest()
