"""Sharing on a GPU: as on a CPU but for rounding, and the same from run to run."""

import pytest
import torch
from compression_cases import plane

from leanbayes.compression.clustering import assign
from leanbayes.compression.sharing import SharingSettings, share_weights
from leanbayes.compression.tiles import Tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_nearest_centres_are_those_of_all_distances() -> None:
    points, centres = plane(20_000).cuda(), plane(300, 1).cuda()
    expected = (points[:, None] - centres).square().sum(2).argmin(1)
    assert (assign(Tiles(points), centres) == expected).float().mean() > 0.9999  # it may fuse products and sums


def test_a_gpu_shares_as_a_cpu_does_and_repeats_exactly() -> None:
    points, settings = plane(100_000), SharingSettings(200, threshold=0.05)
    device = points.cuda()
    first, again = (share_weights(device[:, 0], device[:, 1], settings) for _ in range(2))
    assert torch.equal(first.labels, again.labels)
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.alpha, again.alpha)
    cpu = share_weights(points[:, 0], points[:, 1], settings)
    errors = []
    for sharing, at in ((first, device), (cpu, points)):
        errors.append(float((sharing.weights(at[:, 0], at[:, 1])[0] - at[:, 0]).std()))
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
