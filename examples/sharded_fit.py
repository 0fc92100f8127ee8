"""Train a model that is sharded over several processes with `lb.fit`.

    torchrun --nproc-per-node 2 examples/sharded_fit.py

Each process holds a part of every mean and std, of their gradients, and of the optimizer's state. If the training is
stopped, the same command continues it from the last checkpoint, also with another number of processes.
"""

import torch.distributed as dist
from torch import nn

import leanbayes as lb
from leanbayes.data import Batches, load


def main() -> None:
    """Train and save one file, which one process loads."""
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    method = lb.SSVI(density=0.2, interval=20, engine="ivon")
    bnn = lb.fit(network, method, "digits", epochs=10, batch_size=64, shard=True, out="sharded-run", progress=False)
    if dist.get_rank() == 0:
        print(bnn.posterior)
        whole = lb.load("sharded-run/model.safetensors", network)
        data = load("digits")
        x, y = next(Batches(data.test, len(data.test), shuffle=False, normalize=data.normalize).epoch())
        print(f"Test accuracy: {(whole.predict(x).label == y).float().mean():.1%} of {len(y)} digits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
