"""The mean softmax by one kernel equals the chunked one, for every layout of logits and common noise."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from leanbayes.core import kernels
from leanbayes.likelihoods.expectations import softmax_means


def _plain(loc: Tensor, std: Tensor, shift: Tensor | None, noise: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
    """Compute what the docstring of the kernel says."""
    z = loc + std * (0.0 if scaled else noise[:, None, None])
    if shift is not None and scaled:
        z = z + std * shift.unsqueeze(2)
    elif shift is not None:
        z = z + shift.unsqueeze(2)
    sampled = z.softmax(-1)
    return sampled.mean(0), torch.special.entr(sampled).sum(-1).mean(0)


def _logits(shape: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    loc = 3 * torch.randn(shape, generator=source)
    return loc.to(device), torch.rand(shape, generator=source).to(device), torch.randn(64, *shape, generator=source)


# Images have their classes before the pixels in memory. Examples may share common noise, or have none.
CASES = {
    "one": ((10,), (10,)),
    "batch": ((6, 10), (6, 10)),
    "shared": ((6, 10), (1, 10)),
    "maps": ((2, 3, 5, 7), (2, 1, 1, 7)),
    "shared maps": ((2, 3, 5, 7), (1, 1, 1, 7)),
    "apart": ((2, 3, 5, 7), None),
    "many": ((2, 1000), (2, 1000)),
}


def _check(name: str, device: str, scaled: bool = False) -> None:
    shape, common_shape = CASES[name]
    loc, variance, noise = _logits(shape, device)
    if name == "maps":
        loc = loc.movedim(-1, 1).contiguous().movedim(1, -1)
        variance = variance[:, :1, :1].expand(shape)
    common = None
    if common_shape is not None:
        common = 0.3 * noise[(slice(None), *(slice(size) for size in common_shape))].to(device)
    wide = [None if part is None else part.cpu().double() for part in (loc, variance, common)]
    expected = softmax_means(wide[0], wide[1], wide[2], scaled)  # type: ignore[arg-type]
    with torch.no_grad():
        found = softmax_means(loc, variance, common, scaled)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_logits_of_all_shapes_reach_the_kernel(name: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        called.append(args)
        return _plain(*args)

    monkeypatch.setattr(kernels, "usable", lambda tensor: tensor.dtype != torch.float64)
    monkeypatch.setattr(kernels, "softmax_ops", SimpleNamespace(mean_softmax=kernel))
    _check(name, "cpu", scaled)
    assert len(called) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_the_kernel_equals_double_precision(name: str, scaled: bool) -> None:
    _check(name, "cuda", scaled)
