"""Two processes train like one: each has its own noise, and the KL is counted once."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from network_cases import CASES
from test_conformance import ROWS
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import leanbayes as lb

STEPS, WORLD = 3, 2
BY_IVON = {
    "MeanField sample, ivon": lb.MeanField(engine="ivon"),
    "SSVI local, ivon": lb.SSVI(0.4, engine="ivon", rule="local"),
    "PBN flipout, ivon": lb.PBN(0.1, engine="ivon", rule="flipout", sensitivity="random"),
}
TRAINED = [
    name
    for name, row in ROWS.items()
    if row.trains and row.prepare is None and "prior" not in name and "cnn" not in row.unsupported
]
TRAINED += BY_IVON


def build(row: str) -> tuple[lb.BayesianModel, Tensor, Tensor, torch.optim.Optimizer]:
    net = CASES["cnn"].build()
    bnn = lb.bayesianize(net, BY_IVON[row] if row in BY_IVON else ROWS[row].method, seed=0)
    x = CASES["cnn"].example()
    y = net.eval()(x).argmax(1)
    if row in BY_IVON:
        return bnn, x, y, lb.IVON(bnn, lr=0.2, num_data=100)
    return bnn, x, y, torch.optim.SGD(bnn.parameters(), lr=0.05)


def state_after(bnn: lb.BayesianModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in bnn.named_parameters()}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    for row in TRAINED:
        torch.save(train(rank, row), f"{folder}/{row}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may abort while the interpreter shuts down, after the test is over


def train(rank: int, row: str) -> dict[str, Any]:
    """Return the parameters of a row after a few steps in both processes, and its losses in this one."""
    bnn, x, y, optimizer = build(row)
    model = DistributedDataParallel(bnn)
    half = slice(rank * len(x) // WORLD, (rank + 1) * len(x) // WORLD)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = lb.elbo_loss(model, x[half], y[half], num_data=100)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"state": state_after(bnn), "losses": torch.stack(losses)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all rows in two processes, one row after the other, because starting processes takes seconds."""
    folder = tmp_path_factory.mktemp("trained")
    spawn(worker, (str(folder),), nprocs=WORLD)
    return folder


@pytest.mark.parametrize("row", TRAINED)
def test_two_processes_train_as_one(row: str, trained: Path) -> None:
    ranks = [torch.load(trained / f"{row}-{rank}.pt") for rank in range(WORLD)]
    bnn, x, y, optimizer = build(row)
    losses = torch.zeros(WORLD, STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            half = slice(rank * len(x) // WORLD, (rank + 1) * len(x) // WORLD)
            # Sample t of rank r among w ranks is sample t·w + r of a single process.
            bnn.noise.state[1] = step * WORLD + rank
            loss = lb.elbo_loss(bnn, x[half], y[half], num_data=100)
            (loss / WORLD).backward()
            losses[rank, step] = loss.detach()
        optimizer.step()
    for rank in range(WORLD):
        torch.testing.assert_close(ranks[rank]["losses"], losses[rank], rtol=1e-4, atol=1e-5)
        for name, value in state_after(bnn).items():
            torch.testing.assert_close(ranks[rank]["state"][name], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(ranks[rank]["state"][name], ranks[0]["state"][name])
    if "sample" in row or "Dropout" in row:
        assert not torch.equal(ranks[0]["losses"], ranks[1]["losses"])
