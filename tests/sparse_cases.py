"""Trainings of sparse methods that have begun, for the tests of how their subspace moves."""

from typing import Any

import torch
from networks import CASES

import leanbayes as lb
from leanbayes.posteriors import SubspacePosterior
from leanbayes.sparsity.criteria import REMOVAL

ADDITIONS: Any = ("draw", "mean", "draws")
REMOVALS: Any = (*REMOVAL, "sensitivity")


def subspace(bnn: lb.BayesianModel) -> SubspacePosterior:
    assert isinstance(bnn.posterior, SubspacePosterior)
    return bnn.posterior


def stepped(method: Any, network: str = "cnn", optimiser: str = "adam", steps: int = 3) -> lb.Training:
    """A training that has taken a few steps, so that means, spreads and the optimisers' state are all different."""
    case = CASES[network]
    net, x = case.build(), case.example()
    y = net(x).detach().argmax(1)
    bnn = lb.bayesianize(net, method, seed=5).train()
    scales = bnn.scale_parameters()
    made: list[torch.optim.Optimizer] = [
        torch.optim.Adam(bnn.mean_parameters(), lr=1e-2, amsgrad=True)
        if optimiser == "adam"
        else torch.optim.SGD(bnn.mean_parameters(), lr=0.05, momentum=0.9)
    ]
    if scales:
        made.append(torch.optim.Adam(scales, lr=0.05))
    training = lb.Training(bnn, 1000, 100, lambda: [(x, y), (x.flip(0), y.flip(0))], made, batch=(x, y))
    for _ in range(steps):
        lb.elbo(bnn, x, y, num_data=100).backward()
        for one in made:
            one.step()
            one.zero_grad()
        training.step += 1
    return training
