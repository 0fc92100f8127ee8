"""`lb.elbo_loss`: the negative evidence lower bound, for any training loop."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanbayes.core.arguments import checked
from leanbayes.core.network import call_with, map_rows, output_tensor, tensors_of
from leanbayes.core.parts import local_part
from leanbayes.errors import LeanBayesError, NotFiniteError
from leanbayes.likelihoods import Categorical, Likelihood
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.defaults import defaults_for
from leanbayes.model.prediction import MOST_SAMPLES
from leanbayes.rules import Moments, moments_of


@checked(num_data="the number of training examples, such as len(train_set)")
def elbo_loss(
    model: nn.Module,
    x: Any,
    y: Tensor,
    *,
    num_data: int,
    likelihood: Likelihood[Any] | None = None,
    temperature: float | Tensor | None = None,
    samples: int = 1,
    over: Literal["accumulate", "fold"] = "accumulate",
    generator: torch.Generator | None = None,
    check: bool | None = None,
) -> Tensor:
    """Return the negative ELBO per observation, mean NLL of the batch + temperature · KL / num_data, to minimize.

    With `engine="ivon"` the value is the same, but the KL has no gradient: `lb.IVON` takes it into account.

    An ensemble returns the sum over its members, so that each member has the gradient it would have alone. It ignores
    `samples`. Members that share weights, as those of `lb.BatchEnsemble`, divide the examples of the batch among them.
    Those of `lb.PackedEnsemble` and `lb.MIMO` are trained in one pass.

    Args:
        model: A `BayesianModel`, or DistributedDataParallel or torch.compile around one.
        x: A batch of inputs: a tensor, or a tuple or dict of tensors. An entry "labels" that is `y` itself is left out.
        y: The labels.
        num_data: The number of training examples, by which the KL is divided. If the loss is a mean over several labels
            of an example, such as the tokens of a sequence or the pixels of an image, the KL is also divided by their
            mean number in the batch: sequences are counted here, not tokens. A KL that is a mean, as
            `lb.PBN(kl="mean")` has it, is not divided: the temperature is then its weight relative to the mean NLL.
        likelihood: Another likelihood for this loss than the model's own. It may not have parameters.
        temperature: The weight of the KL; 1 is the ELBO. None means the default of the model's engine, as in `lb.fit`
            and on the command line: 1 for "ivon"; for "backprop" 0.003 for classes and 0.1 for a regression, because
            networks with more weights than examples are far too uncertain at 1. A tensor may change without
            recompilation.
        samples: The number of Monte Carlo samples to average. Under the rule "moments", which has no noise in the
            network, they are samples of the expected likelihood.
        over: "accumulate" runs the samples one after the other and keeps the gradient of each instead of its graph, so
            memory does not grow. "fold" repeats the batch, for rules with noise per example.
        generator: The source of the noise. By default the model's own stream.
        check: Check the labels, and that the loss is finite. By default only on the CPU, where nothing waits for it.

    Returns:
        A scalar tensor. Call `backward()` on it.

    Raises:
        NotFiniteError: The loss is NaN or infinite; the message names the cause.
        LeanBayesError: The labels do not fit the outputs, or an argument is out of range.

    Example:
        >>> for x, y in loader:
        ...     loss = lb.elbo_loss(bnn, x, y, num_data=len(train_set))
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    """
    bnn = unwrap(model)
    used = bnn.likelihood if likelihood is None else _checked_likelihood(bnn, likelihood)
    if temperature is None:
        temperature = defaults_for(bnn.method, used).temperature
    _check_arguments(bnn, x, y, num_data, temperature, samples, over)
    if isinstance(x, Mapping) and x.get("labels") is y:  # a network of transformers would compute a loss of its own
        x = {name: value for name, value in x.items() if name != "labels"}
    by_optimizer = bnn.method.engine == "ivon"  # which the gradient of the KL is left to
    if torch.is_grad_enabled():
        bnn.trained_rule = bnn.rule
        if by_optimizer and bnn.optimized_by != "ivon":
            raise LeanBayesError(
                f"{type(bnn.method).__name__} has engine='ivon': make optimizer = lb.IVON(bnn, num_data=...) before "
                "the loss, or use engine='backprop' for other optimizers."
            )
        if by_optimizer and bnn.labels_per_example is None and isinstance(used, Categorical) and y.numel() > len(y):
            raise LeanBayesError(
                "The loss is a mean over several labels per example, and lb.IVON was not told how many: pass "
                "labels_per_example, the mean number of labeled tokens or pixels of an example."
            )
    if over == "fold" and samples > 1:
        x, y = (map_rows(functools.partial(_repeat, times=samples), batch, len(y)) for batch in (x, y))
        samples = 1
    checked = not torch.compiler.is_compiling() and (y.device.type == "cpu" if check is None else check)

    def loss_of(number: int) -> Tensor:
        with_kl = number == 0 and len(bnn.layout) > 0 and (isinstance(temperature, Tensor) or temperature > 0)
        draw = bnn.next_draw(generator, number, with_kl)._replace(training=True, joint=bnn.joint)
        result = call_with(model, x, _draw=draw)
        output, kl = result if with_kl else (result, None)
        output = moments_of(output_tensor(output))
        by_moments = isinstance(output, Moments)
        known = output.loc if by_moments else output
        labels = y.repeat_interleave(len(known) // len(y), 0) if draw.joint else y
        used.check_shape(known, labels)
        if checked:
            used.check_values(known, labels)
        if by_moments:
            total, observations = bnn.method.expected_nll(used, output, labels, draw.key)
        else:
            total, observations = used.nll(output, labels)
        loss = total / observations
        if draw.joint:
            loss = loss * bnn.summed_members
        if kl is not None:  # counted once, whatever the number of samples
            share = 1 if bnn.posterior.kl_is_mean else num_data * (observations / len(y))
            kl = kl.detach() if by_optimizer else kl
            loss = loss + (samples * temperature) * kl / share
        return loss

    many = bnn.summed_members > 1 or bnn.joint
    count, weight = (bnn.loss_passes, 1.0) if many else (samples, 1.0 / samples)
    loss = loss_of(0) if count == 1 else _accumulate(loss_of, count, weight, bnn, x)
    if checked and not torch.isfinite(loss):
        _explain(bnn, x, y, loss)
    return loss


def _checked_likelihood(bnn: BayesianModel, likelihood: Likelihood[Any]) -> Likelihood[Any]:
    """Refuse a likelihood that could not be trained: the model's optimizer does not know its parameters."""
    if likelihood is not bnn.likelihood and any(p.requires_grad for p in likelihood.parameters()):
        raise LeanBayesError(
            f"This {type(likelihood).__name__} has parameters, which an optimizer of the model does not know: pass it "
            "to lb.bayesianize(..., likelihood=...)."
        )
    return likelihood


def _repeat(tensor: Tensor, times: int) -> Tensor:
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def unwrap(model: nn.Module) -> BayesianModel:
    """Return the model inside DistributedDataParallel or torch.compile."""
    inner: Any = model
    while not isinstance(inner, BayesianModel):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        if inner is None:
            raise LeanBayesError(
                f"elbo_loss() needs a BayesianModel, not {type(model).__name__}: call lb.bayesianize first."
            )
    return inner


def _check_arguments(
    bnn: BayesianModel, x: Any, y: Tensor, num_data: int, temperature: float | Tensor, samples: int, over: str
) -> None:
    batch = len(y) if y.dim() else 0
    if batch == 0 or next(tensors_of(x), None) is None:
        raise LeanBayesError("elbo_loss() got no examples: pass a batch with at least one.")
    if num_data < batch:
        raise LeanBayesError(
            f"num_data={num_data} is smaller than the batch of {batch}: pass the number of training examples."
        )
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise LeanBayesError(f"temperature must be one number, not a tensor of shape {tuple(temperature.shape)}.")
    if not isinstance(temperature, Tensor) and not 0 <= temperature < math.inf:
        raise LeanBayesError(f"temperature={temperature} must be a finite number and not negative.")
    if not 1 <= samples <= MOST_SAMPLES:
        raise LeanBayesError(f"samples={samples} must be at least 1 and at most {MOST_SAMPLES:,}.")
    if over not in ("accumulate", "fold"):
        raise LeanBayesError(f"over={over!r} is unknown: use 'accumulate' or 'fold'.")
    if samples > 1 and over == "accumulate" and bnn.root_units is not None:
        raise LeanBayesError(
            f"A sharded model takes one sample per loss, not samples={samples}: call elbo_loss and backward once per "
            "sample, so that their gradients add up."
        )
    if over == "fold" and samples > 1 and not bnn.noise_per_example:
        raise LeanBayesError(
            f"The rule {bnn.rule!r} draws the weights once per batch, so samples cannot be folded into it: "
            "use over='accumulate', or the rule 'local' or 'flipout'."
        )


class _Accumulate(torch.autograd.Function):
    """Sums losses and frees their graphs one by one. The gradients of the sum are ready before backward()."""

    @staticmethod
    def forward(ctx: Any, loss_of: Callable[[int], Tensor], count: int, weight: float, *inputs: Tensor) -> Tensor:
        total: Tensor | None = None
        gradients: list[Tensor | None] = [None] * len(inputs)
        for number in range(count):
            with torch.enable_grad():
                loss = weight * loss_of(number)
                fresh = torch.autograd.grad(loss, inputs, allow_unused=True)
            total = loss.detach() if total is None else total + loss.detach()
            gradients = [_plus(old, new) for old, new in zip(gradients, fresh, strict=True)]
        ctx.gradients = gradients
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, *(None if g is None else g * grad.to(g.dtype) for g in ctx.gradients)


def _plus(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old + new


def _accumulate(loss_of: Callable[[int], Tensor], count: int, weight: float, bnn: BayesianModel, x: Any) -> Tensor:
    inputs = [p for p in bnn.parameters() if p.requires_grad] + [t for t in tensors_of(x) if t.requires_grad]
    if not torch.is_grad_enabled() or not inputs:
        return weight * torch.stack([loss_of(number) for number in range(count)]).sum()
    return _Accumulate.apply(loss_of, count, weight, *inputs)


def _explain(bnn: BayesianModel, x: Any, y: Tensor, loss: Tensor) -> None:
    """Raise the error for a loss that is not finite, with the first cause found."""
    for name, tensors in (("inputs", list(tensors_of(x))), ("labels", [y]), ("parameters", list(bnn.parameters()))):
        if any(t.is_floating_point() and not local_part(t).isfinite().all() for t in tensors):
            remedy = "lower the learning rate" if name == "parameters" else "clean the data"
            raise NotFiniteError(f"The loss is {loss.item()} because the {name} contain NaN or infinity: {remedy}.")
    raise NotFiniteError(
        f"The loss is {loss.item()} although inputs, labels and parameters are finite: "
        "lower the learning rate or the initial std, or use a wider number format."
    )
