"""Measure sharded models on CPU processes: bytes exchanged by a step, and the peak memory of each process.

    python benchmarks/sharded.py --out benchmarks/results/sharded-cpu.json

The network has equal blocks. Bytes are those of a forward and a backward pass, relative to FSDP2 on the plain network.
Peak memory is what the operating system counts while a process trains, relative to the unsharded model in one process;
the memory that a process takes before it makes the model is left out. All processes run on one machine.
"""

import argparse
import ctypes
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.multiprocessing.spawn import start_processes

import leanbayes as lb
from leanbayes.core.collective_bytes import CollectiveBytes

METHODS: dict[str, Any] = {
    "mean-field": lb.MeanField(),
    "mean-field, ivon": lb.MeanField(engine="ivon"),
    "ssvi, density 0.05": lb.SSVI(0.05),
    "ssvi, density 0.05, ivon": lb.SSVI(0.05, engine="ivon"),
    "pbn, rate 0.05": lb.PBN(0.05, sensitivity="magnitude"),
    "pbn, rate 0.05, ivon": lb.PBN(0.05, sensitivity="magnitude", engine="ivon"),
}
NUM_DATA, ROWS, CLASSES = 1000, 8, 10
_MMAP_THRESHOLD = -3  # an option of mallopt


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what two layers make of the normalized input."""
        return x + self.last(torch.relu(self.first(self.norm(x))))


def make(width: int, blocks: int) -> nn.Module:
    """Make a network of equal blocks and a small last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*[Block(width) for _ in range(blocks)], nn.Linear(width, CLASSES))


def batch(width: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(ROWS, width, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def exchanged(name: str, half: bool, width: int, blocks: int) -> dict[str, int]:
    """Count the bytes of one step."""
    x, y = batch(width)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if name == "plain":
        network = make(width, blocks)
        for block in network.children():
            fsdp2(block, mesh=mesh, mp_policy=policy)
        fsdp2(network, mesh=mesh, mp_policy=policy)
        with CollectiveBytes() as counted:
            nn.functional.cross_entropy(network(x), y).backward()
    else:
        bnn = lb.fully_shard(lb.bayesianize(make(width, blocks), METHODS[name]), mesh=mesh, mp_policy=policy)
        with CollectiveBytes() as counted:
            lb.elbo_loss(bnn, x, y, num_data=NUM_DATA).backward()
    return {"gathered": counted.gathered, "reduced": counted.reduced}


def resident(kind: str) -> int:
    """Return the memory of this process in bytes: VmRSS is that of now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def peak(name: str, sharded: bool, width: int, blocks: int) -> int:
    """Return the peak memory of a process in a few training steps."""
    before = resident("VmRSS")
    x, y = batch(width)
    bnn = lb.bayesianize(make(width, blocks), METHODS[name])
    if sharded:
        lb.fully_shard(bnn)
    if bnn.method.engine == "ivon":
        optimizer: torch.optim.Optimizer = lb.IVON(bnn, num_data=NUM_DATA, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(bnn.parameter_groups(), lr=1e-3)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(3):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=NUM_DATA).backward()
        optimizer.step()
    return resident("VmHWM") - before


def worker(rank: int, folder: str, world: int, task: str, name: str, flag: bool, width: int, blocks: int) -> None:
    """Run one task in one process, and write its result."""
    torch.set_num_threads(1)
    # Tensors that are freed go back to the operating system at once, so that the peak is that of tensors in use.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    small = lb.bayesianize(make(8, 2), METHODS["mean-field"])  # so that libraries have allocated what they need
    lb.elbo_loss(lb.fully_shard(small), *batch(8), num_data=NUM_DATA).backward()
    result = (exchanged if task == "exchanged" else peak)(name, flag, width, blocks)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)


def run(world: int, task: str, name: str, flag: bool, width: int, blocks: int) -> list[Any]:
    """Run a task in new processes, and return the result of each."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(worker, (folder, world, task, name, flag, width, blocks), nprocs=world, start_method="fork")
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(world)]


def main() -> None:
    """Measure all methods, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--width", type=int, default=512, help="the width of all layers")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, help="the methods to measure")
    parser.add_argument("--blocks", type=int, default=32, help="the number of blocks")
    args = parser.parse_args()
    sizes = {"width": args.width, "blocks": args.blocks}
    torch.set_num_threads(1)
    communication, memory = [], []
    for half in (False, True):
        plain = run(4, "exchanged", "plain", half, **sizes)[0]
        for name in (name for name in args.methods if "ivon" not in name):
            found = run(4, "exchanged", name, half, **sizes)[0]
            ratio = sum(found.values()) / sum(plain.values())
            dtype = "bfloat16" if half else "float32"
            communication.append({"method": name, "dtype": dtype, "plain": plain, "sharded": found, "ratio": ratio})
            print(f"{name}, {dtype}: {ratio:.3f} of the bytes of FSDP2", flush=True)
    for name in args.methods:
        alone = run(1, "memory", name, False, **sizes)[0]
        most = max(run(4, "memory", name, True, **sizes))
        memory.append({"method": name, "unsharded": alone, "sharded": most, "ratio": most / alone})
        print(f"{name}: {alone / 1e6:.0f} MB unsharded, {most / alone:.3f} of it in each of 4 processes", flush=True)
    weights = sum(p.numel() for p in make(args.width, args.blocks).parameters())
    write(args.out, {**sizes, "weights": weights, "processes": 4, "communication": communication, "memory": memory})


if __name__ == "__main__":
    main()
