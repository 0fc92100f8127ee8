"""A task of which only two inputs matter, so that most weights of its network can go."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def data_of(count: int = 600) -> TensorDataset:
    """Only 2 of 20 inputs matter."""
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def network_of(hidden: int) -> nn.Module:
    """Return a network for the task."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 2))
