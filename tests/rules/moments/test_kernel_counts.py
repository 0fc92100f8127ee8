"""How many kernels a pass by moments launches: on a GPU in eager mode, its time is about proportional to that."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import leanbayes as lb


class _Kernels(TorchDispatchMode):
    """Counts calls that compute or allocate something, not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        self.count += not any(views) and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


class _Step(nn.Module):
    """Two steps of an LSTM cell: the second has a random state."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.cell, self.steps = nn.LSTMCell(4, 8), steps

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for _ in range(self.steps):
            state = self.cell(x, state)
        assert state is not None
        return state[0]


def _maps(blocks: int) -> nn.Sequential:
    parts = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*(module for block in parts for module in block))


def _conv(blocks: int) -> nn.Module:
    return _maps(blocks).append(nn.AdaptiveAvgPool2d(1))


def _attention(blocks: int) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, nn.functional.gelu, batch_first=True) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(8, 8), *layers)


def _kernels(network: nn.Module, x: Tensor) -> int:
    bnn = lb.bayesianize(network, lb.MeanField()).eval()
    with torch.no_grad(), bnn.using("moments"):
        bnn(x)  # computes what passes share
        with _Kernels() as kernels:
            bnn(x)
    return kernels.count


@pytest.mark.parametrize(
    ("build", "shape", "most"),
    [(_conv, (2, 8, 6, 6), 74), (_maps, (2, 8, 6, 6), 137), (_attention, (2, 5, 8), 423), (_Step, (2, 4), 306)],
    ids=["conv", "conv, maps", "attention", "lstm"],
)
def test_one_more_block_launches_few_kernels(build: Any, shape: tuple[int, ...], most: int) -> None:
    x = torch.ones(shape)
    assert _kernels(build(3), x) - _kernels(build(2), x) <= most


def test_weights_are_not_read_again() -> None:
    """The second pass computes nothing from the weights alone: its kernels do not include sums over windows."""
    bnn, x = lb.bayesianize(_conv(2), lb.MeanField()).eval(), torch.ones(2, 8, 6, 6)
    with torch.no_grad(), bnn.using("moments"):
        with _Kernels() as first:
            bnn(x)
        with _Kernels() as second:
            bnn(x)
    assert second.count <= first.count - 10
