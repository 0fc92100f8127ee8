"""`lb.fully_shard`: shard a Bayesian model over many devices, as FSDP2 does with a plain network."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_module

from leanbayes.core.arguments import checked
from leanbayes.core.sharding import ShardGroup
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.draw import StochasticNetwork
from leanbayes.model.sharded_pass import PlacedUnit, run_with_units
from leanbayes.posteriors.sharded import ShardedPosterior

Model = TypeVar("Model", bound=BayesianModel)


@checked("blocks", "mesh", "mp_policy")
def fully_shard(
    bnn: Model,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module | str] | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Model:
    """Shard a model over the processes of a device mesh, in place: each holds a part of every parameter.

    The means and stds of the posterior, their gradients and the state of their optimizers are cut into equal parts.
    Each process samples its part, with noise by position: the sample does not depend on the number of processes. A
    block gathers its sampled weights when it runs, in the forward pass and again in the backward pass, and the gradient
    is reduced and scattered. So a step communicates what FSDP2 does for a plain network. All other parameters of the
    network are sharded by FSDP2 itself.

    All processes must call it with the same model, before they make optimizers. Then train as usual: parameters are
    DTensors, and `lb.elbo_loss`, any optimizer, `lb.IVON` and `torch.nn.utils.clip_grad_norm_` work. All processes
    that share parts use the same sample, each with its own examples. `lb.save` still writes one file; all processes
    must call it.

    Args:
        bnn: A model of `lb.MeanField`, `lb.SSVI` or `lb.PBN`, with the rule "sample" or "flipout".
        mesh: A mesh of one dimension, or of two: then the first one counts replicas, which have their own samples
            (HSDP). By default all processes.
        blocks: The blocks of `bnn.network`, as modules or names, which are gathered one at a time. By default the
            members of each `nn.ModuleList` and `nn.Sequential` of the network. What is in none is gathered once.
        reshard_after_forward: Whether blocks free their weights after the forward pass, and gather them again in the
            backward pass. False saves communication and takes more memory.
        mp_policy: The dtypes of the gathered weights and of the reduced gradients, as for FSDP2. Means and stds keep
            their own.

    Returns:
        The model itself.

    Raises:
        UnsupportedOperation: The method or the rule does not work with a sharded posterior.
        LeanBayesError: The model cannot be sharded as asked.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField())
        >>> lb.fully_shard(bnn, blocks=bnn.network.layers)  # with torchrun, after init_process_group
        >>> optimizer = torch.optim.AdamW(bnn.parameter_groups(), lr=1e-3)
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    return shard(bnn, mesh, blocks, reshard_after_forward, policy, policy)


def shard(
    bnn: Model,
    mesh: DeviceMesh | None,
    blocks: Iterable[nn.Module | str] | None,
    reshard_after_forward: bool,
    policy: MixedPrecisionPolicy,
    policy_of_others: MixedPrecisionPolicy,
) -> Model:
    """Shard a model as `fully_shard` does, with another policy for parameters that are not Bayesian."""
    if bnn.root_units is not None:
        raise LeanBayesError("This model is sharded already.")
    if isinstance(bnn.network, StochasticNetwork) or not len(bnn.layout):
        raise LeanBayesError(
            f"{type(bnn.method).__name__} has no Bayesian weights to shard: use FSDP2 for its network."
        )
    if any(p.requires_grad for p in bnn.likelihood.parameters()):
        raise LeanBayesError("The noise of the data cannot be learned by a sharded model: use a fixed std.")
    if not torch.distributed.is_initialized():
        raise LeanBayesError("lb.fully_shard needs processes: call torch.distributed.init_process_group first.")
    kind = "cuda" if torch.cuda.is_available() and "nccl" in torch.distributed.get_backend() else "cpu"
    mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),)) if mesh is None else mesh
    if mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise LeanBayesError(
            "mesh must have one dimension, or two with names: init_device_mesh('cuda', (replicas, parts), "
            "mesh_dim_names=('replicate', 'shard'))."
        )
    given = outermost_blocks(bnn.network) if blocks is None else [_module(bnn.network, block) for block in blocks]
    modules = sorted(given, key=lambda module: len(list(module.modules())))  # FSDP2 needs inner blocks first
    owners = owners_of(bnn.slot_places, modules)
    group = ShardGroup(mesh, policy.param_dtype, policy.reduce_dtype)
    dtypes = bnn.slot_dtypes()
    runs = _runs(list(zip(owners, dtypes, strict=True)))
    posterior = ShardedPosterior(bnn.posterior, runs, dtypes, group)
    bnn.current_rule.check(posterior)
    placed = [PlacedUnit(unit, bnn.slot_places[a:b]) for unit, (a, b) in zip(posterior.units, runs, strict=True)]  # type: ignore[arg-type]
    bnn.posterior = posterior
    bnn.noise.replica = group.replica
    bnn.to(mesh.device_type)
    owner_of = [owners[start] for start, _ in runs]
    for number, module in enumerate(modules):
        own = [one for one, owner in zip(placed, owner_of, strict=True) if owner == number]
        for one in own:
            one.unit.keeps = not reshard_after_forward
        if not own and next(module.parameters(), None) is None:
            continue
        run_with_units(module, own, lambda: bnn.installed)
        shard_module(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy_of_others)
    bnn.root_units = [one for one, owner in zip(placed, owner_of, strict=True) if owner is None]
    for one in bnn.root_units:
        one.unit.keeps = True
    shard_module(bnn.network, mesh=mesh, mp_policy=policy_of_others)
    return bnn


def _module(network: nn.Module, block: nn.Module | str) -> nn.Module:
    if isinstance(block, str):
        try:
            return network.get_submodule(block)
        except AttributeError:
            raise LeanBayesError(f"The network has no module {block!r}: see bnn.network.named_modules().") from None
    if block is network or all(block is not module for module in network.modules()):
        raise LeanBayesError(
            "blocks must be modules inside bnn.network, which is a copy of the network that it came from."
        )
    return block


def outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists and sequences of modules."""
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outermost_blocks(child)


def owners_of(slot_places: Iterable[Sequence[tuple[nn.Module, str]]], modules: Sequence[nn.Module]) -> list[int | None]:
    """Return for each slot the number of the innermost block that has all its places, or None."""
    inside = [set(map(id, module.modules())) for module in modules]
    owners: list[int | None] = []
    for places in slot_places:
        around = [n for n, members in enumerate(inside) if all(id(module) in members for module, _ in places)]
        owners.append(min(around, key=lambda number: len(inside[number]), default=None))
    return owners


def _runs(kinds: Sequence[object]) -> list[tuple[int, int]]:
    """Return the first and last index (not included) of each run of equal kinds."""
    runs, start = [], 0
    for _, members in groupby(kinds):
        stop = start + len(list(members))
        runs.append((start, stop))
        start = stop
    return runs
