"""What a model costs, always beside the deterministic network: size, file, memory, time, FLOPs and bytes moved.

Counts and seconds are never mixed: dense kernels multiply by zeros too, so a sparse network that has fewer effective
FLOPs than the plain one takes as long.
"""

import contextlib
import copy
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from leanbayes import prediction
from leanbayes.bayesian import BayesianModel, Draw
from leanbayes.conversion import bayesianize
from leanbayes.cost import CostCounter, PeakMemory
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.flops import FlopCounter, Flops
from leanbayes.methods.deterministic import Deterministic
from leanbayes.methods.ensemble import Members
from leanbayes.network import call_with, evaluation_mode, output_tensor, tensors_of
from leanbayes.saving import describe


@dataclass(frozen=True)
class Costs:
    """What one model costs: its numbers and its file, and a prediction with `samples` draws.

    FLOPs and bytes moved are those of one example (a share of the batch that was measured), milliseconds those of 1000
    examples, and the peak that of the whole batch: the model and what the prediction allocates, without its input.
    """

    trainable: int
    stored: int
    file_bytes: int
    samples: int
    predict_flops: float
    predict_effective_flops: float
    predict_bytes_moved: float
    predict_peak_bytes: int
    predict_ms_per_1000: float


@dataclass(frozen=True)
class Comparison:
    """The costs of a model and of the deterministic network, measured in turns on a batch of `examples`."""

    examples: int
    ours: Costs
    plain: Costs

    def ratios(self) -> dict[str, float]:
        """Ours over plain, for each cost; nan where both are 0."""
        plain = asdict(self.plain)
        return {name: _ratio(ours, plain[name]) for name, ours in asdict(self.ours).items()}


def costs_of(
    bnn: BayesianModel, x: Any, *, samples: int | None = None, rule: str | None = None, repeats: int = 5
) -> Comparison:
    """Measure a model on the batch x beside the deterministic network of its architecture, in one process.

    samples and rule are those of `predict`. Bytes and peak memory are counted over one whole `predict`, with what it
    does beside the passes; the time is the median of `repeats` predictions, for which both take turns once warm.
    The plain network stands for one that was trained as usual and is called without this library: one pass over the
    whole batch and the same answer made of it, and every weight counts as not zero, whatever zeros our mean has.
    The model's own stream of noise is left as it is.
    """
    if repeats < 1:
        raise LeanBayesError(f"repeats={repeats} must be at least 1.")
    plain = deterministic_of(bnn).eval()
    runs = [lambda: _predict(bnn, x, samples, rule), lambda: _predict_alone(plain, x)]
    with _quiet():
        for run in runs:
            run()  # the first prediction also measures the memory of an example
        counts = [_counted(run) for run in runs]
        flops = [count_flops(bnn, x, samples, rule), count_flops(plain, x)]
        rounds = [[_seconds(run, bnn.device) for run in runs] for _ in range(repeats)]
    flops[1] = Flops(flops[1].dense, flops[1].dense)
    examples = len(next(tensors_of(x)))
    both = []
    for model, counted, products, times in zip((bnn, plain), counts, flops, zip(*rounds, strict=True), strict=True):
        stored, file_bytes = _file(model)
        both.append(
            Costs(
                trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
                stored=stored,
                file_bytes=file_bytes,
                samples=counted.samples,
                predict_flops=products.dense / examples,
                predict_effective_flops=products.effective / examples,
                predict_bytes_moved=counted.bytes_moved / examples,
                predict_peak_bytes=counted.peak_bytes + _bytes_of(model),
                predict_ms_per_1000=1e6 * statistics.median(times) / examples,
            )
        )
    return Comparison(examples, *both)


def count_flops(bnn: BayesianModel, x: Any, samples: int | None = None, rule: str | None = None) -> Flops:
    """Count the FLOPs of the products in a prediction of the batch x: as many passes as it has draws.

    `FlopCounter` says what counts; its weights are what the rule puts into the network, and the network's own. So one
    formula holds for all: a draw with share d of its weights costs d, an ensemble as many networks as it has members,
    and `flipout` and `local`, with their two products a layer, 1 + r where share r of the weights has a spread.
    One draw is run and stands for all of them, but each member of an ensemble for itself.
    """
    with torch.no_grad(), bnn.using(rule or bnn.current_rule), evaluation_mode(bnn), _all_in_sight(), _quiet():
        draws = prediction.draws_of(bnn, samples, torch.Generator().manual_seed(0))
        passes = [_flops_of_pass(bnn, x, draw) for draw in (draws[:1] if bnn.members is None else draws)]
    return sum(passes, Flops()) * (len(draws) // len(passes))


def training_flops(forward: Flops, examples: int, epochs: int, samples: int = 1) -> Flops:
    """FLOPs of a training, from those of one pass over one example: 3 · forward · samples · examples · epochs.

    The backward pass counts twice the forward pass: one product for the inputs, one for the weights (Evci et al. 2020,
    RigL). For the setting of SSVI's table 2 (ResNet-18, `local`, 200 epochs of CIFAR-10) this is 6.7e16 if dense, as
    that table has for VD, and 3.5e15 with 5 % of the weights in all layers but the first. The table's 5.7e15 for SSVI
    is 5 % of the 1.1e17 that its table 1 has for a dense network, whose origin it does not tell.
    """
    return forward * (3 * samples * examples * epochs)


def deterministic_of(bnn: BayesianModel) -> BayesianModel:
    """Return the unit of cost: the plain network of the same architecture, or one member of an ensemble."""
    if isinstance(bnn.network, Members):
        likelihood = copy.deepcopy(bnn.likelihood)
        return bayesianize(bnn.network.networks[0], Deterministic(), likelihood=likelihood)
    return bayesianize(bnn, Deterministic())


@dataclass(frozen=True)
class _Counted:
    samples: int
    bytes_moved: int
    peak_bytes: int


def _predict(bnn: BayesianModel, x: Any, samples: int | None, rule: str | None) -> int:
    return bnn.predict(x, samples, rule=rule, generator=torch.Generator().manual_seed(0)).samples


def _predict_alone(plain: BayesianModel, x: Any) -> int:
    with torch.no_grad():
        accumulator = plain.likelihood.accumulator()
        accumulator.update(output_tensor(call_with(plain.network, x)))
        return accumulator.finish(1, None).samples


def _counted(run: Callable[[], int]) -> _Counted:
    with _all_in_sight(), PeakMemory() as memory, CostCounter() as counter:
        samples = run()
    return _Counted(samples, counter.bytes, memory.peak_bytes)


def _flops_of_pass(bnn: BayesianModel, x: Any, draw: Draw) -> Flops:
    with FlopCounter(bnn.parameters(), bnn.buffers()) as counter, bnn.drawn(draw) as call:
        for value in bnn._values or ():
            # A random weight is an object that holds its tensors: a mean and a spread.
            counter.add_weights(tensors_of(value if isinstance(value, torch.Tensor) else vars(value)))
        call_with(call, x)
    return counter.flops


@contextlib.contextmanager
def _all_in_sight() -> Iterator[None]:
    """Have every operation run in the open: none in a fused encoder layer, and no weight cast before the block."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Do not warn of a rule that gives worse answers: nobody looks at them."""
    return warnings.catch_warnings(action="ignore", category=RuleMismatchWarning)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = perf_counter()
    run()
    _wait(device)
    return perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _file(bnn: BayesianModel) -> tuple[int, int]:
    """How many numbers `save` writes, tied ones once, and the size of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        bnn.save(path)
        found = describe(path)
    return sum(part["numbers"] for part in found["parts"].values()), found["bytes"]


def _bytes_of(bnn: BayesianModel) -> int:
    return sum(tensor.nbytes for tensor in {*bnn.parameters(), *bnn.buffers()})


def _ratio(ours: float, plain: float) -> float:
    if plain == 0:
        return math.nan if ours == 0 else math.inf
    return ours / plain
