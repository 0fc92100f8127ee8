"""`leanbayes plan MODEL`: the memory and communication of a sharded model on each process."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch
import tyro
from rich.table import Table

from leanbayes.cli.console import cell
from leanbayes.cli.options import parse
from leanbayes.cli.text_tables import show
from leanbayes.core.json_values import json_text
from leanbayes.errors import LeanBayesError
from leanbayes.methods import PBN, SSVI, MeanField
from leanbayes.methods.shard_plan import ShardPlan, shard_plan
from leanbayes.model.method import Method
from leanbayes.networks import build


@dataclass(frozen=True)
class PlanOptions:
    """Compute what each GPU holds and sends if a model is sharded by `lb.fully_shard`. Nothing is trained.

    The memory is that of parameters, gradients, the state of the optimizer and the gathered weights of one block.
    Activations come on top of it.

    Attributes:
        model: name of the network, such as resnet-50 or timm:vit_huge_patch14_224.
        method: how the weights become Bayesian.
        share: fraction of the weights that ssvi keeps, or that pbn makes Bayesian; 0.05 if it is not given.
        engine: backprop with AdamW, or ivon.
        processes: numbers of GPUs that share one copy of the model.
        shape: channels, height and width of an image.
        outputs: number of outputs.
        dtype: the dtype of gathered weights and reduced gradients.
        json: print JSON instead of a table.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    method: Literal["mean-field", "ssvi", "pbn"] = "mean-field"
    share: float | None = None
    engine: Literal["backprop", "ivon"] = "backprop"
    processes: tuple[int, ...] = (1, 8, 64)
    shape: tuple[int, int, int] = (3, 224, 224)
    outputs: int = 1000
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(PlanOptions, words, "plan")
    if min(options.processes, default=0) < 1:
        raise LeanBayesError("--processes must be whole numbers of at least 1.")
    if options.share is not None and options.method == "mean-field":
        raise LeanBayesError("--share is for --method ssvi or pbn: with mean-field, all weights are Gaussian.")
    if options.share is not None and not 0 < options.share <= 1:
        raise LeanBayesError(f"--share {options.share:g} must be a fraction above 0 and at most 1.")
    method = _method(options)
    return lambda: _plan(options, method)


def _method(options: PlanOptions) -> Method:
    share = 0.05 if options.share is None else options.share
    if options.method == "ssvi":
        return SSVI(share, engine=options.engine)
    if options.method == "pbn":
        return PBN(share, engine=options.engine)
    return MeanField(engine=options.engine)


def _plan(options: PlanOptions, method: Method) -> None:
    with torch.device("meta"):  # the shapes of a network need no memory
        network = build(options.model, options.shape, options.outputs)
    plans = [shard_plan(network, method, one, getattr(torch, options.dtype)) for one in options.processes]
    if options.json:
        print(json_text([{**asdict(plan), "memory": plan.memory, "exchanged": plan.exchanged} for plan in plans]))
        return
    weights = f"{plans[0].weights:,} weights, {plans[0].gaussian:,} of them Gaussian"
    table = Table(box=None)
    titles = ("GPUs", "parameters", "gradients", "optimizer", "gathered", "memory each", "sent per step")
    for title in titles:
        table.add_column(title, justify="right")
    for plan in plans:
        table.add_row(f"{plan.processes}", *map(cell, _columns(plan)))
    show(f"{options.model}: {weights}", table)


def _columns(plan: ShardPlan) -> list[str]:
    sizes = (plan.parameters, plan.gradients, plan.optimizer, plan.gathered, plan.memory, plan.exchanged)
    return [_text(size) for size in sizes]


def _text(size: int) -> str:
    if size >= 1e8:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 or not size else f"{size / 1e3:.1f} kB"
