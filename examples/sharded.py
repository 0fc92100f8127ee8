"""Train a model that is sharded over several processes, with checkpoints that any number of processes can continue.

    torchrun --nproc-per-node 2 examples/sharded.py

Each process holds a part of every mean and std, of their gradients, and of the optimizer's state. The second run of
the same command continues from the last checkpoint, also with another number of processes.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import leanbayes as lb
from leanbayes.data import Batches, load

EPOCHS, FOLDER = 6, Path("sharded")


def main() -> None:
    """Train and save one file, which one process loads."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    else:  # without torchrun
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    data = load("digits")
    batches = Batches(data.train, 64, normalize=data.normalize, parts=world, mine=[rank])
    torch.manual_seed(0)  # all processes must make the same model
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    bnn = lb.bayesianize(network, lb.MeanField(), seed=0)
    lb.fully_shard(bnn)  # by default, the members of lists and sequences of modules are blocks
    optimizer = torch.optim.AdamW(bnn.parameter_groups(), lr=2e-3)
    first = 0
    for epoch in range(EPOCHS):
        if (FOLDER / f"epoch-{epoch}" / ".metadata").exists():
            first = epoch + 1
    if first:
        model, state = get_state_dict(bnn, optimizer)
        dcp.load({"model": model, "optimizer": state}, checkpoint_id=FOLDER / f"epoch-{first - 1}")
        set_state_dict(bnn, optimizer, model_state_dict=model, optim_state_dict=state)

    for epoch in range(first, EPOCHS):
        for x, y in batches.epoch(epoch):
            loss = lb.elbo_loss(bnn, x, y, num_data=len(data.train), temperature=1e-3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model, state = get_state_dict(bnn, optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=FOLDER / f"epoch-{epoch}")
        if rank == 0:
            print(f"Epoch {epoch + 1}/{EPOCHS}: loss {loss.item():.4f}")

    lb.save(bnn, FOLDER / "model.safetensors")  # all processes call it, and the first one writes
    if rank == 0:
        whole = lb.load(FOLDER / "model.safetensors", network)
        x, y = next(Batches(data.test, len(data.test), shuffle=False, normalize=data.normalize).epoch())
        prediction = whole.predict(x, samples=30, generator=torch.Generator().manual_seed(0))
        print(f"Test accuracy: {(prediction.label == y).float().mean():.1%} of {len(y)} digits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
