"""Partly trained sparse models, for tests of how their subspace changes."""

from typing import Any

import torch
from network_cases import CASES

import leanbayes as lb
from leanbayes.methods.ssvi.criteria import REMOVAL
from leanbayes.posteriors import SubspacePosterior

ADDITIONS: Any = ("sample", "mean", "samples")
REMOVALS: Any = (*REMOVAL, "sensitivity")


def subspace(bnn: lb.BayesianModel) -> SubspacePosterior:
    assert isinstance(bnn.posterior, SubspacePosterior)
    return bnn.posterior


def stepped(method: Any, network: str = "cnn", optimizer: str = "adam", steps: int = 3) -> lb.Training:
    """Return a training after a few steps, so that means, stds and optimizer state all differ."""
    case = CASES[network]
    net, x = case.build(), case.example()
    y = net(x).detach().argmax(1)
    bnn = lb.bayesianize(net, method, seed=5).train()
    scales = bnn.scale_parameters()
    made: list[torch.optim.Optimizer] = [
        torch.optim.Adam(bnn.mean_parameters(), lr=1e-2, amsgrad=True)
        if optimizer == "adam"
        else torch.optim.SGD(bnn.mean_parameters(), lr=0.05, momentum=0.9)
    ]
    if scales:
        made.append(torch.optim.Adam(scales, lr=0.05))
    training = lb.Training(bnn, 1000, 100, lambda: [(x, y), (x.flip(0), y.flip(0))], made, batch=(x, y))
    for _ in range(steps):
        lb.elbo_loss(bnn, x, y, num_data=100).backward()
        for one in made:
            one.step()
            one.zero_grad()
        training.step += 1
    return training
