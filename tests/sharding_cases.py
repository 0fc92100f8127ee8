"""Models that tests shard, and what four processes do with them: `python sharding_cases.py FOLDER` writes the results.

The processes are forked after all imports, which take most of the time. Meshes of one and two processes are parts of
the same four.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.multiprocessing.spawn import start_processes
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.core.collective_bytes import CollectiveBytes
from leanbayes.core.parts import local_part, whole

WORLD, STEPS, NUM_DATA = 4, 3, 100
METHODS: dict[str, Any] = {
    "MeanField": lb.MeanField(),
    "MeanField ivon": lb.MeanField(engine="ivon"),
    "MeanField pretrained": lb.MeanField(prior=lb.Normal("fan_in", center="pretrained")),
    "SSVI": lb.SSVI(0.4, interval=2, drop=0.6),
    "SSVI ivon": lb.SSVI(0.4, interval=2, drop=0.6, engine="ivon", removal="sensitivity", addition="samples"),
    "SSVI blocks": lb.SSVI(0.5, interval=2, drop=0.6, pattern="7x1", addition="mean", removal="mean"),
    "PBN": lb.PBN(0.2, sensitivity="magnitude"),
    "PBN ivon": lb.PBN(0.2, sensitivity="magnitude", engine="ivon"),
    "PBN stds": lb.PBN(0.2, sensitivity="magnitude", engine="ivon", train_means=False),
}
RESUMED = ("MeanField", "SSVI ivon", "PBN")
REPLICATED = ("MeanField", "SSVI")
ACCELERATED = ("MeanField", "SSVI ivon") if importlib.util.find_spec("accelerate") else ()


class Block(nn.Module):
    """A residual block, whose inside can be checkpointed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)
        self.is_checkpointed = False

    def inside(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + (checkpoint(self.inside, x, use_reentrant=False) if self.is_checkpointed else self.inside(x))


class Net(nn.Module):
    """Three blocks between two layers. No number of weights is a multiple of the number of processes."""

    def __init__(self, width: int = 11) -> None:
        super().__init__()
        self.start = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.end = nn.Linear(width, 3)
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.end(x)


def build(method: str, **changes: Any) -> lb.BayesianModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Net()
    return lb.bayesianize(network, METHODS[method] if method in METHODS else changes.pop("other"), seed=3, **changes)


def reference(method: str) -> lb.BayesianModel:
    """The unsharded model, with the noise that a sharded one has."""
    bnn = build(method)
    bnn.noise.by_position, bnn.noise.replica = True, (0, 1)
    return bnn


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def optimizer_of(bnn: lb.BayesianModel) -> torch.optim.Optimizer:
    if bnn.method.engine == "ivon":
        return lb.IVON(bnn, lr=0.3, num_data=NUM_DATA)
    # A large eps: else a gradient of rounding alone takes a whole step, and no two computations agree.
    return torch.optim.AdamW(bnn.parameter_groups(), lr=1e-2, eps=1e-3)


def train(
    bnn: lb.BayesianModel,
    optimizer: torch.optim.Optimizer,
    part: slice,
    steps: int = STEPS,
    first: int = 0,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train a few steps with clipped gradients, and yield each loss and the norm of its gradient.

    SSVI exchanges active weights after each second step, by the examples of all processes.
    """
    x, y = (tensor.to(bnn.device) for tensor in data())
    training = lb.Training(bnn, 100, NUM_DATA, lambda: [(x, y)], [optimizer], batch=(x[part], y[part]))
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, x[part], y[part], num_data=NUM_DATA)
        backward(loss)
        norm = whole(nn.utils.clip_grad_norm_(bnn.parameters(), 0.5))
        optimizer.step()
        training.step = step
        bnn.method.after_step(training)
        yield loss.detach(), norm


def summary(losses: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([torch.stack(one) for one in losses])


# -- in four processes ------------------------------------------------------------------------------------------------


class Process:
    """One of the processes, and the meshes that it is in."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (1, 2, 4)}
        self.replicas = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))

    def part(self, size: int) -> slice:
        rows = len(data()[0]) // size
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def write(self, name: str, value: Any) -> None:
        """Write a result of the first process."""
        if self.rank == 0:
            torch.save(value, self.folder / f"{name}.pt")

    def mean(self, value: Tensor, mesh: DeviceMesh) -> Tensor:
        for dim in range(mesh.ndim):
            dist.all_reduce(value, group=mesh.get_group(dim))
        return value / mesh.size()

    def file(self, name: str, bnn: lb.BayesianModel) -> None:
        lb.save(bnn, self.folder / f"{name}.safetensors")

    def training(self, method: str, size: int) -> None:
        bnn = lb.fully_shard(build(method), mesh=self.meshes[size])
        losses = summary(list(train(bnn, optimizer_of(bnn), self.part(size))))
        self.write(f"losses {method} {size}", self.mean(losses, self.meshes[size]))
        self.file(f"{method} {size}", bnn)

    def gradients(self) -> None:
        """Gradients of a loss, of each kind of activation checkpointing, and how predictions differ."""
        x, y = data()
        for kind in ("plain", "blocks", "inside", "kept"):
            bnn = build("MeanField")
            network: Any = bnn.network
            network.is_checkpointed = kind == "blocks"
            for block in network.blocks:
                block.is_checkpointed = kind == "inside"
            lb.fully_shard(bnn, mesh=self.meshes[4], reshard_after_forward=kind != "kept")
            part = self.part(4)
            lb.elbo_loss(bnn, x[part], y[part], num_data=NUM_DATA).backward()
            units: Any = bnn.posterior
            found = {name: torch.cat([whole(getattr(u, name).grad) for u in units.units]) for name in ("mu", "rho")}
            found |= {name: whole(p.grad) for name, p in bnn.named_parameters() if name.startswith("network.")}
            self.write(f"gradients {kind}", found)
        with bnn.frozen(5):
            self.write("prediction", bnn.predict(x, samples=3).probs)
            with torch.no_grad(), bnn.drawn() as call:
                self.write("drawn", torch.stack((call(x), bnn(x))))
        with torch.no_grad(), bnn.using("mean"):
            self.write("mean", bnn(x))
        with torch.no_grad():
            self.write("kl", bnn.kl())
            self.write("moments", (bnn.posterior.mean(), bnn.posterior.variance()))
        self.write("repr", repr(bnn.posterior))
        names = ("local", "moments")
        self.write("refused rules", [message(lambda name=name: setattr(bnn, "rule", name)) for name in names])
        self.write("refused samples", message(lambda: lb.elbo_loss(bnn, x, y, num_data=NUM_DATA, samples=2)))
        self.write("refused copy", message(bnn.to_deterministic))
        self.write("refused twice", message(lambda: lb.fully_shard(bnn)))

    def replicated(self, method: str) -> None:
        """Two replicas of two parts: each replica has its own sample."""
        bnn = lb.fully_shard(build(method), mesh=self.replicas)
        losses = summary(list(train(bnn, optimizer_of(bnn), self.part(4))))
        gathered = [torch.empty_like(losses) for _ in range(WORLD)]
        dist.all_gather(gathered, losses)
        self.write(f"losses of replicas {method}", torch.stack(gathered))
        self.file(f"replicas {method}", bnn)

    def flipout(self) -> None:
        bnn = lb.fully_shard(build("flipout", other=lb.MeanField(rule="flipout")), mesh=self.meshes[4])
        x, _ = data()
        with torch.no_grad(), bnn.frozen(7):
            output = bnn(x[self.part(4)])
        gathered = [torch.empty_like(output) for _ in range(WORLD)]
        dist.all_gather(gathered, output)
        self.write("flipout", torch.stack(gathered))
        losses = summary(list(train(bnn, optimizer_of(bnn), self.part(4))))
        self.write("flipout losses", losses)

    def resumed(self, method: str) -> None:
        """Train two steps in two processes, two in four, and two in one, with a checkpoint in between."""
        losses = []
        for number, size in enumerate((2, 4, 1)):
            if self.rank < size:
                mesh = self.meshes[size]
                bnn = lb.fully_shard(build(method), mesh=mesh)
                optimizer = optimizer_of(bnn)
                path = self.folder / f"checkpoint {method} {number}"
                if number:
                    model, state = get_state_dict(bnn, optimizer)
                    held = {"model": model, "optimizer": state}
                    dcp.state_dict_loader.load(held, checkpoint_id=path, process_group=mesh.get_group())
                    set_state_dict(bnn, optimizer, model_state_dict=model, optim_state_dict=state)
                found = summary(list(train(bnn, optimizer, self.part(size), 2, 2 * number)))
                losses.append(self.mean(found, mesh))
                model, state = get_state_dict(bnn, optimizer)
                path = self.folder / f"checkpoint {method} {number + 1}"
                dcp.state_dict_saver.save(
                    {"model": model, "optimizer": state}, checkpoint_id=path, process_group=mesh.get_group()
                )
                if size == 1:
                    self.file(f"resumed {method}", bnn)
            dist.barrier()
        self.write(f"resumed {method}", losses)

    def accelerated(self) -> None:
        """Train a sharded model with accelerate, and give another one to its plugin for FSDP2 and to FSDP2 itself."""
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
        from accelerate.utils import DistributedType

        rank, world = str(self.rank), str(WORLD)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)  # as torchrun does
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == WORLD
        for method in ACCELERATED:
            bnn = lb.fully_shard(build(method), mesh=self.meshes[4])
            optimizer = accelerator.prepare(optimizer_of(bnn))
            losses = summary(list(train(bnn, optimizer, self.part(4), backward=accelerator.backward)))
            self.write(f"accelerated {method}", self.mean(losses, self.meshes[4]))
            self.file(f"accelerated {method}", bnn)
        whole_model = build("MeanField")
        optimizer = optimizer_of(whole_model)
        # As Accelerator(fsdp_plugin=...) does it on GPUs; on a CPU it ignores the plugin.
        states: list[Any] = [PartialState(), accelerator.state]
        states[0].distributed_type = states[1].distributed_type = DistributedType.FSDP
        states[1].fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        assert accelerator.is_fsdp2
        self.write("refused by accelerate", message(lambda: accelerator.prepare(whole_model, optimizer)))
        self.write("refused by FSDP2", message(lambda: fsdp2(build("MeanField"), mesh=self.meshes[4])))

    def bytes(self) -> None:
        """Count the bytes of a step, of sharded models and of FSDP2 on the plain network."""
        found = {}
        for name in ("plain", "MeanField", "MeanField bf16", "SSVI", "PBN"):
            half = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "bf16" in name else None
            x, y = (tensor[self.part(4)] for tensor in data())
            if name == "plain":
                network = Net()
                for block in network.blocks:
                    fsdp2(block, mesh=self.meshes[4])
                fsdp2(network, mesh=self.meshes[4])
            else:
                bnn = build(name.split()[0])
                lb.fully_shard(bnn, mesh=self.meshes[4], mp_policy=half)
            with CollectiveBytes() as counted:
                if name == "plain":
                    nn.functional.cross_entropy(network(x), y).backward()
                else:
                    lb.elbo_loss(bnn, x, y, num_data=NUM_DATA).backward()
            found[name] = {"gathered": counted.gathered, "reduced": counted.reduced}
            if name != "plain":
                buffers = dict(bnn.posterior.named_buffers())  # spans are one number for 65,536 weights
                held = [*bnn.parameters(), *(b for name, b in buffers.items() if not name.endswith("spans"))]
                found[name]["parameters"] = sum(local_part(tensor).nbytes for tensor in held)
        self.write("bytes", found)


def message(function: Any) -> str:
    try:
        function()
    except lb.LeanBayesError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def worker(rank: int, folder: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # by checkpoints of torch 2.10 itself
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    process = Process(rank, Path(folder))
    for method in METHODS:
        for size in (1, 2, 4):
            if rank < size and (size == 4 or method in ("MeanField", "SSVI ivon", "PBN ivon")):
                process.training(method, size)
    process.gradients()
    for method in REPLICATED:
        process.replicated(method)
    process.flipout()
    for method in RESUMED:
        process.resumed(method)
    process.bytes()
    if ACCELERATED:
        process.accelerated()
    dist.barrier()
    os._exit(0)  # torch's threads may abort while the interpreter shuts down, after the test is over


if __name__ == "__main__":
    torch.set_num_threads(1)
    if ACCELERATED:
        importlib.import_module("accelerate")
    start_processes(worker, (sys.argv[1],), nprocs=WORLD, start_method="fork")
