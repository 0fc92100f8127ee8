"""How much memory a pass by moments needs, in multiples of a plain pass."""

import pytest
import torch

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.networks import build


@pytest.mark.parametrize(
    ("name", "options", "most"), [("resnet-20", {}, 1.7), ("vit-tiny", {"depth": 2}, 2.45)], ids=["resnet", "vit"]
)
@torch.no_grad()
def test_one_pass_needs_little_memory(name: str, options: dict[str, int], most: float) -> None:
    network = build(name, (3, 32, 32), 10, seed=0, **options).eval()
    bnn = lb.bayesianize(network, lb.MeanField()).eval()
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    bnn.predict(x, rule="moments", compile=False)  # computes what passes share
    with PeakMemory() as plain:
        network(x)
    with PeakMemory() as one_pass:
        bnn.predict(x, rule="moments", compile=False)
    assert one_pass.peak_bytes <= most * plain.peak_bytes
