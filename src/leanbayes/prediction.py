"""What `predict` returns: a predictive distribution with its uncertainty taken apart, and the loop that makes it.

Probabilities are averaged over the draws, never logits. Total uncertainty is split as
    classification: H[E p] = E H[p] (aleatoric) + mutual information (epistemic);
    regression:     Var[y] = E[noise variance] (aleatoric) + Var[mean] (epistemic).
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from leanbayes import noise
from leanbayes.cost import PeakMemory
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.network import call_with, evaluation_mode, map_rows, output_tensor, tensors_of
from leanbayes.rules import Moments, Rule, moments_of

if TYPE_CHECKING:
    from leanbayes.bayesian import BayesianModel, Draw


@dataclass(frozen=True)
class Prediction:
    """A predictive distribution from `samples` draws; `outputs` (draw, ...) are the raw ones where they were kept."""

    samples: int
    outputs: Tensor | None


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """Classes with probabilities along `class_dim` (dense predictions have one distribution a pixel)."""

    probs: Tensor
    expected_entropy: Tensor
    class_dim: int

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty in nats: the entropy of the mean probability."""
        return torch.special.entr(self.probs).sum(self.class_dim)

    @property
    def mutual_information(self) -> Tensor:
        """Epistemic uncertainty: how much the draws disagree."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @property
    def label(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(self.class_dim)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class."""
        return self.probs.amax(self.class_dim)


@dataclass(frozen=True)
class BinaryPrediction(Prediction):
    """Independent yes/no outputs; `probs` are those of yes."""

    probs: Tensor
    expected_entropy: Tensor

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty of each output, in nats."""
        return binary_entropy(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """Epistemic uncertainty of each output."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @property
    def label(self) -> Tensor:
        """Yes where it is at least as probable as no."""
        return self.probs >= 0.5


@dataclass(frozen=True)
class RegressionPrediction(Prediction):
    """Real outputs with the noise of the data and the doubt of the model."""

    mean: Tensor
    aleatoric_variance: Tensor
    epistemic_variance: Tensor

    @property
    def variance(self) -> Tensor:
        """Total variance: the sum of both parts."""
        return self.aleatoric_variance + self.epistemic_variance

    @property
    def std(self) -> Tensor:
        """Total standard deviation."""
        return self.variance.sqrt()


def binary_entropy(probs: Tensor) -> Tensor:
    """Entropy of yes/no probabilities, in nats."""
    return torch.special.entr(probs) + torch.special.entr(1 - probs)


class Accumulator(Protocol):
    """Takes the network's outputs draw by draw, so that memory does not grow with the number of draws."""

    def update(self, output: Tensor) -> None:
        """Take in one draw's output for the whole batch."""
        ...

    def finish(self, samples: int, outputs: Tensor | None) -> Prediction:
        """Return the distribution over all draws."""
        ...


class ProbabilityAccumulator:
    """Sums of probabilities and of their entropies."""

    def __init__(self, probs: Callable[[Tensor], Tensor], entropy: Callable[[Tensor], Tensor], kind: Any) -> None:
        self._probs, self._entropy, self._kind = probs, entropy, kind
        self._sums: tuple[Tensor, Tensor] | None = None

    def update(self, output: Tensor) -> None:
        """Add one draw."""
        probs = self._probs(output)
        entropy = self._entropy(probs)
        if self._sums is None:
            self._sums = probs, entropy
        else:
            self._sums = self._sums[0].add_(probs), self._sums[1].add_(entropy)

    def finish(self, samples: int, outputs: Tensor | None) -> Prediction:
        """Divide by the number of draws."""
        assert self._sums is not None
        return self._kind(samples=samples, outputs=outputs, probs=self._sums[0] / samples,
                          expected_entropy=self._sums[1] / samples)  # fmt: skip


class Running:
    """Mean of the draws so far, and sum of their squared distances from it (Welford 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros(())

    def update(self, values: Tensor) -> None:
        """Add one draw."""
        self.count += 1
        change = values - self.mean
        self.mean = self.mean + change / self.count
        self.squares = self.squares + change * (values - self.mean)


class MomentAccumulator:
    """Running mean and variance of the outputs, and the mean of the noise variance."""

    def __init__(self, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._split = split
        self._outputs, self._noise = Running(), torch.zeros(())

    def update(self, output: Tensor) -> None:
        """Add one draw."""
        mean, noise = self._split(output)
        self._outputs.update(mean)
        self._noise = self._noise + noise

    def finish(self, samples: int, outputs: Tensor | None) -> Prediction:
        """Return mean and both variances; the epistemic one divides by the number of draws, as a mixture does."""
        found = self._outputs
        noise = (self._noise / found.count).expand_as(found.mean).clone()
        return RegressionPrediction(samples, outputs, found.mean, noise, found.squares / found.count)


def predict(
    bnn: "BayesianModel",
    x: Any,
    samples: int | None,
    rule: str | Rule | None,
    generator: torch.Generator | None,
    memory_budget: int | None,
    keep_outputs: bool,
) -> Prediction:
    """Run the draws one after the other, each over the whole batch in as few passes as the memory budget allows."""
    rows = _count_rows(x)
    outputs = []
    with torch.no_grad(), bnn.using(rule or bnn.current_rule), evaluation_mode(bnn), _steady(bnn):
        draws = draws_of(bnn, samples, generator)
        step = _rows_within_budget(bnn, x, draws[0], rows, memory_budget)
        accumulator = bnn.likelihood.accumulator()
        for draw in draws:
            output = moments_of(_one_draw(bnn, x, draw, rows, step))
            parts = (output.loc, output.variance) if isinstance(output, Moments) else (output,)
            if not all(part.isfinite().all() for part in parts):
                raise LeanBayesError("The outputs contain NaN or infinity: look for such numbers in the parameters.")
            if isinstance(output, Moments):  # one pass says it all
                prediction = bnn.likelihood.predict_moments(output)
                return replace(prediction, outputs=output.loc.unsqueeze(0)) if keep_outputs else prediction
            accumulator.update(output)
            if keep_outputs:
                outputs.append(output)
        return accumulator.finish(len(draws), torch.stack(outputs) if keep_outputs else None)


def _count_rows(x: Any) -> int:
    tensors = list(tensors_of(x))
    if not tensors or tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise LeanBayesError("predict() got no examples: pass a batch with at least one.")
    if any(t.is_floating_point() and not t.isfinite().all() for t in tensors):
        raise LeanBayesError("The inputs contain NaN or infinity: clean them before predict().")
    return len(tensors[0])


def draws_of(bnn: "BayesianModel", samples: int | None, generator: torch.Generator | None) -> "list[Draw]":
    """Take the draws of a prediction, by default as many as the method says."""
    members = bnn.members
    if samples is None:
        samples = (members or bnn.method.samples) if bnn.current_rule.random else 1
    if not isinstance(samples, int) or samples < 1 or (members is not None and samples > members):
        allowed = "a whole number of at least 1" if members is None else f"from 1 to {members}, the number of members"
        raise LeanBayesError(f"samples={samples} must be {allowed}.")
    _warn_of_other_noise(bnn)
    return [bnn.next_draw(generator, number) for number in range(samples)]


def _steady(bnn: "BayesianModel") -> contextlib.AbstractContextManager[None]:
    """Let draws of the weights share what they can; a rule without noise, or with noise of examples, draws none."""
    draws = bnn.current_rule.random and not bnn.noise_per_example
    return bnn.posterior.steady() if draws else contextlib.nullcontext()


def _warn_of_other_noise(bnn: "BayesianModel") -> None:
    if bnn.trained_rule is None or not bnn.convolves:
        return
    trained, used = bnn.method.make_rule(bnn.trained_rule), bnn.current_rule
    if "mean" not in (trained.name, used.name) and trained.shared_noise != used.shared_noise:
        warnings.warn(
            f"This network was trained with the rule {trained.name!r} and predicts with {used.name!r}, whose noise is "
            "of another kind in convolutions: expect worse accuracy, or train with the rule that you predict with.",
            RuleMismatchWarning,
            stacklevel=5,
        )


def _cut(x: Any, rows: int, start: int, end: int) -> Any:
    return map_rows(lambda tensor: tensor[start:end], x, rows)


def _one_draw(bnn: "BayesianModel", x: Any, draw: "Draw", rows: int, step: int) -> Any:
    starts = range(0, rows, step)
    chunks = (_cut(x, rows, start, start + step) for start in starts)
    if bnn.noise_per_example:  # each chunk has noise of its own
        keys = (noise.of_chunk(draw.key, number) for number in range(len(starts)))
        passes = zip(chunks, keys, strict=True)
        outputs = [output_tensor(call_with(bnn, chunk, _draw=draw._replace(key=key))) for chunk, key in passes]
    else:  # the draw is made once, and serves all chunks
        with bnn.drawn(draw) as call:
            outputs = [output_tensor(call_with(call, chunk)) for chunk in chunks]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _rows_within_budget(bnn: "BayesianModel", x: Any, draw: "Draw", rows: int, budget: int | None) -> int:
    """How many examples fit the memory budget, by the peak memory of one."""
    if budget is None:
        budget = _default_budget(bnn.device)
    if budget <= 0:
        raise LeanBayesError(f"memory_budget={budget} must be a positive number of bytes.")
    if rows == 1:
        return 1
    return max(1, min(rows, budget // max(_memory_of_a_row(bnn, x, draw, rows), 1)))


def _memory_of_a_row(bnn: "BayesianModel", x: Any, draw: "Draw", rows: int) -> int:
    """Measure the peak memory of one example, once for each kind of input: a pass of its own is not free."""
    inputs = tuple((tensor.dtype, tensor.shape[1:]) for tensor in tensors_of(x))
    model = tuple({parameter.dtype: None for parameter in bnn.parameters()})
    key = (bnn.current_rule, bnn.device, torch.is_autocast_enabled(bnn.device.type), model, inputs)
    if key not in bnn.row_memory:
        with bnn.drawn(draw) as call, PeakMemory() as memory:
            call_with(call, _cut(x, rows, 0, 1))
        bnn.row_memory[key] = memory.peak_bytes
    return bnn.row_memory[key]


def _default_budget(device: torch.device) -> int:
    """A quarter of the free memory of a GPU; 1 GiB elsewhere."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return 1 << 30
