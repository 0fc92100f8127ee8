"""Sharing on a GPU: equal to a CPU up to rounding, and deterministic."""

import pytest
import torch
from sharing_cases import plane

from leanbayes.methods.weight_sharing.clustering import assign
from leanbayes.methods.weight_sharing.codebook import SharingSettings, share_weights
from leanbayes.methods.weight_sharing.tiles import Tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_nearest_centers_are_exact() -> None:
    points, centers = plane(20_000).cuda(), plane(300, 1).cuda()
    expected = (points[:, None] - centers).square().sum(2).argmin(1)
    assert (assign(Tiles(points), centers) == expected).float().mean() > 0.9999  # a GPU can fuse products and sums


def test_sharing_agrees_with_a_cpu_and_is_deterministic() -> None:
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
