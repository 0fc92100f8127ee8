"""What a run does differently if its model is sharded (`Recipe.shard`)."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from leanbayes.core.parts import is_sharded, whole
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.training.plan import StagePlan


def check_shardable(plans: Sequence[StagePlan], precision: str) -> None:
    """Raise an error for a training that cannot be sharded."""
    if precision == "fp16":
        raise LeanBayesError("shard=True does not work with fp16: use precision='bf16'.")
    if not plans[-1].method.bayesian_weights:
        raise LeanBayesError(
            f"{type(plans[-1].method).__name__} has no Bayesian weights to shard: leave out shard=True."
        )
    if any(plan.method.bayesian_weights for plan in plans[:-1]):
        raise LeanBayesError("shard=True needs a method with one Bayesian stage: train the first one without it.")


@torch.no_grad()
def make_equal(bnn: BayesianModel, device: torch.device) -> None:
    """Give all processes the model of the first one, as DistributedDataParallel does."""
    for tensor in bnn.state_dict().values():
        tensor.copy_(broadcast(tensor.to(device)))


def shard_for_training(bnn: BayesianModel, accelerator: Accelerator) -> None:
    """Shard a model over all processes, which may be one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from leanbayes.model.fsdp import shard

    alone = not torch.distributed.is_initialized()  # without torchrun
    if alone:
        backend = "gloo" if accelerator.device.type == "cpu" else "cuda:nccl,cpu:gloo"
        store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    # Losses run under autocast, which needs norms in their own dtype.
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None)
    mesh = init_device_mesh(accelerator.device.type, (torch.distributed.get_world_size(),))
    try:
        shard(bnn, mesh, None, True, half, MixedPrecisionPolicy())
    except LeanBayesError:
        if alone:
            torch.distributed.destroy_process_group()
        raise


def gathered_state(state: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """Return the state of an optimizer with whole tensors, on the CPU. Only the first process keeps them."""

    def gathered(value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_sharded(value):
            return value
        everything = whole(value)
        return everything.cpu() if is_first else None

    own = {number: {name: gathered(v) for name, v in one.items()} for number, one in state["state"].items()}
    return {**state, "state": own}


def cut_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the tensors of sharded parameters cut as these are."""
    from torch.distributed.tensor import distribute_tensor

    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]

    def cut(number: int, value: Any) -> Any:
        parameter = parameters[number]
        if not is_sharded(parameter) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)

    own = {number: {name: cut(number, v) for name, v in one.items()} for number, one in saved["state"].items()}
    return {**saved, "state": own}
