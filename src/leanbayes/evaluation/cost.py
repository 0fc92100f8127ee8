"""The costs of a model compared with the deterministic network: size, file, memory, time, FLOPs and bytes moved.

Counts are no measure of time: dense kernels also multiply by zeros, so a sparse network with fewer effective FLOPs
takes as long as the deterministic one.
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

from leanbayes.core.arguments import checked
from leanbayes.core.counters import CostCounter, PeakMemory
from leanbayes.core.flops import FlopCounter, Flops
from leanbayes.core.network import call_with, evaluation_mode, output_tensor, tensors_of
from leanbayes.deploy.loading import describe
from leanbayes.deploy.model_file import save
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.model import prediction
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.conversion import bayesianize
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.rules import Rule


@dataclass(frozen=True)
class Costs:
    """The costs of one model and of its predictions.

    Attributes:
        trainable: Trainable numbers.
        stored: Numbers in the model file.
        file_bytes: Size of the model file.
        samples: Monte Carlo samples per prediction.
        predict_flops: FLOPs to predict one example.
        predict_effective_flops: The same, without products with weights that are exactly zero.
        predict_bytes_moved: Bytes that operations read and write to predict one example.
        predict_peak_bytes: Peak memory to predict the batch: the model and all allocations, without the input.
        predict_ms_per_1000: Milliseconds to predict 1000 examples.
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
    """The costs of a model and of the deterministic network, measured alternately on the same batch.

    Attributes:
        examples: Number of examples in the batch.
        ours: Costs of the model.
        plain: Costs of the deterministic network of the same architecture.
    """

    examples: int
    ours: Costs
    plain: Costs

    def ratios(self) -> dict[str, float]:
        """Return ours / plain for each cost; nan if both are 0."""
        plain = asdict(self.plain)
        return {name: _ratio(ours, plain[name]) for name, ours in asdict(self.ours).items()}


@checked()
def costs_of(
    bnn: BayesianModel, x: Any, *, samples: int | None = None, rule: str | Rule | None = None, repeats: int = 5
) -> Comparison:
    """Measure the costs of a model and of the deterministic network of the same architecture.

    Bytes and peak memory are counted over one whole call of `predict`. The time is the median of `repeats` predictions,
    for which the two networks alternate after a warm-up. The deterministic network represents a conventionally trained
    one that is called without this library: one forward pass over the whole batch, and every weight counts as nonzero.
    The random stream of the model is not changed.

    Args:
        bnn: The model.
        x: A batch of inputs.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: How random weights are combined with activations: a name, or a rule with its own settings. None means
            the model's own rule.
        repeats: Number of timed predictions.

    Returns:
        A `Comparison` with the costs of both networks, and `ratios()`.

    Raises:
        LeanBayesError: If repeats is less than 1.

    Example:
        >>> from leanbayes.evaluation import costs_of
        >>> found = costs_of(bnn, x)
        >>> found.ours.file_bytes, found.ratios()["predict_ms_per_1000"]
    """
    if repeats < 1:
        raise LeanBayesError(f"repeats={repeats} must be at least 1.")
    plain = deterministic_of(bnn).eval()
    runs = [lambda: _predict(bnn, x, samples, rule), lambda: _predict_alone(plain, x)]
    with _quiet():
        for run in runs:
            run()  # the first prediction also measures the memory per example
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


def count_flops(bnn: BayesianModel, x: Any, samples: int | None = None, rule: str | Rule | None = None) -> Flops:
    """Count the FLOPs of the products to predict the batch x with all samples.

    `FlopCounter` defines what counts; the weights are those that the rule puts into the network, and the network's own.
    So one formula holds for all methods: relative to the deterministic network, a sample with a share d of nonzero
    weights costs d, an ensemble costs its number of members, and `flipout` and `local`, with two products per layer,
    cost 1 + r if a share r of the weights has a std. One sample is counted for all, but every member of an ensemble.
    """
    used = bnn.current_rule if rule is None else rule
    with torch.no_grad(), bnn.using(used), evaluation_mode(bnn), _unfused(), _quiet():
        draws = prediction.draws_of(bnn, samples, torch.Generator().manual_seed(0))
        draws = prediction.passes_of(bnn, draws)
        if not bnn.current_rule.random and bnn.rule != "mean":  # moments, adjoint
            draws = draws[:1]  # one pass, whatever the number of samples
        passes = [_flops_of_pass(bnn, x, draw) for draw in (draws[:1] if bnn.members is None else draws)]
        also = bnn.current_rule.mean_rule
    found = sum(passes, Flops()) * (len(draws) // len(passes))
    return found if also is None else found + count_flops(bnn, x, samples, also)


def training_flops(forward: Flops, examples: int, epochs: int, samples: int = 1) -> Flops:
    """Return the FLOPs of training, from those of one forward pass: 3 · forward · samples · examples · epochs.

    The backward pass counts as two forward passes: one product for the inputs and one for the weights (Evci et al.
    2020, RigL). For the setting of table 2 in the SSVI paper (ResNet-18, `local`, 200 epochs of CIFAR-10) this gives
    6.7e16 for a dense network, as that table has for VD, and 3.5e15 with 5 % of the weights in all layers but the
    first. The 5.7e15 that the table has for SSVI are 5 % of the 1.1e17 in its table 1 for a dense network, which the
    paper does not derive.
    """
    return forward * (3 * samples * examples * epochs)


def deterministic_of(bnn: BayesianModel) -> BayesianModel:
    """Return the reference for costs: the deterministic network of the same architecture, or one ensemble member."""
    if isinstance(bnn.network, StochasticNetwork) and bnn.members is not None:
        likelihood = copy.deepcopy(bnn.likelihood)
        network = bnn.member(0) if len(bnn.layout) else bnn.network.reference()
        return bayesianize(network, Deterministic(), likelihood=likelihood)
    return bayesianize(bnn, Deterministic())


@dataclass(frozen=True)
class _Counted:
    samples: int
    bytes_moved: int
    peak_bytes: int


def _predict(bnn: BayesianModel, x: Any, samples: int | None, rule: str | Rule | None) -> int:
    return bnn.predict(x, samples, rule=rule, generator=torch.Generator().manual_seed(0)).samples


def _predict_alone(plain: BayesianModel, x: Any) -> int:
    with torch.no_grad():
        accumulator = plain.likelihood.accumulator()
        accumulator.update(output_tensor(call_with(plain.network, x)))
        return accumulator.finish(1, None).samples


def _counted(run: Callable[[], int]) -> _Counted:
    with _unfused(), PeakMemory() as memory, CostCounter() as counter:
        samples = run()
    return _Counted(samples, counter.bytes, memory.peak_bytes)


def _flops_of_pass(bnn: BayesianModel, x: Any, draw: Draw) -> Flops:
    with FlopCounter(bnn.parameters(), bnn.buffers()) as counter, bnn.drawn(draw) as call:
        for value in bnn.values:
            # A random weight is an object that holds two tensors: a mean and a std.
            counter.add_weights(tensors_of(value if isinstance(value, torch.Tensor) else vars(value)))
        call_with(call, x)
    return counter.flops


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Make every operation visible to counters: no fused encoder layers, and no weight casts cached before."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Ignore warnings about a rule that predicts worse: only its cost matters here."""
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
    """Return how many numbers `save` writes, with tied weights counted once, and the size of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(bnn, path)
        found = describe(path)
    return sum(part["numbers"] for part in found["parts"].values()), found["bytes"]


def _bytes_of(bnn: BayesianModel) -> int:
    return sum(tensor.nbytes for tensor in {*bnn.parameters(), *bnn.buffers()})


def _ratio(ours: float, plain: float) -> float:
    if plain == 0:
        return math.nan if ours == 0 else math.inf
    return ours / plain
