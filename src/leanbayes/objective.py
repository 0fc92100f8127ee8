"""The evidence lower bound, as a loss to minimise, for the user's own training loop."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError, NotFiniteError
from leanbayes.likelihoods import Likelihood
from leanbayes.network import call_with, map_rows, output_tensor, tensors_of
from leanbayes.rules import Moments, moments_of


def elbo(
    model: nn.Module,
    x: Any,
    y: Tensor,
    *,
    num_data: int | None = None,
    likelihood: Likelihood | None = None,
    temperature: float | Tensor = 1.0,
    samples: int = 1,
    over: Literal["accumulate", "fold"] = "accumulate",
    generator: torch.Generator | None = None,
    check: bool | None = None,
) -> Tensor:
    """Return the negative ELBO per observation: mean NLL of the batch + temperature · KL / num_data.

    model: a `BayesianModel`, or DistributedDataParallel or torch.compile around one.
    num_data: the number of training examples, over which the one KL is shared; one that is a mean, as PBN's may be, is
    not shared, and the temperature is then its weight beside the mean NLL.
    temperature: weight of the KL. As a tensor it may change without a compiled loss being made anew.
    likelihood: what the outputs mean; it is remembered by the model, so that predict() and save() know it. One that
    has parameters to train belongs into `bayesianize`.
    samples: draws to average. over="accumulate" runs them one after the other and keeps the gradient of each instead
    of its graph, so memory does not grow; over="fold" repeats the batch, for rules with noise of its own per example.
    The rule "moments" has no noise in the network, and `samples` then averages that of the expected likelihood.
    check: look for bad labels and a loss that is not finite; by default on the CPU only, where it costs no waiting.
    An ensemble returns the sum over its members, so that each has the gradient that it would have alone, and has no
    use for `samples`.
    """
    bnn = _unwrap(model)
    if likelihood is not None and likelihood is not bnn.likelihood:
        if not isinstance(likelihood, Likelihood):
            raise LeanBayesError("likelihood must be an instance such as lb.Categorical().")
        if any(p.requires_grad for p in likelihood.parameters()):
            raise LeanBayesError(
                f"This {type(likelihood).__name__} has parameters, which an optimiser of the model does not know: pass "
                "it to lb.bayesianize(..., likelihood=...)."
            )
        bnn.likelihood = likelihood.to(bnn.device)
    _check_arguments(bnn, x, y, num_data, temperature, samples, over)
    assert num_data is not None
    members = bnn.members
    if torch.is_grad_enabled():
        bnn.trained_rule = bnn.rule
    if over == "fold" and samples > 1:
        x, y = (map_rows(functools.partial(_repeat, times=samples), batch, len(y)) for batch in (x, y))
        samples = 1
    checked = not torch.compiler.is_compiling() and (y.device.type == "cpu" if check is None else check)

    def loss_of(number: int) -> Tensor:
        with_kl = number == 0 and len(bnn.layout) > 0 and (isinstance(temperature, Tensor) or temperature > 0)
        draw = bnn.next_draw(generator, number, with_kl)
        result = call_with(model, x, _draw=draw)
        output, kl = result if with_kl else (result, None)
        output = moments_of(output_tensor(output))
        by_moments = isinstance(output, Moments)
        known = output.loc if by_moments else output
        bnn.likelihood.check_shape(known, y)
        if checked:
            bnn.likelihood.check_values(known, y)
        if by_moments:
            total, observations = bnn.method.expected_nll(bnn.likelihood, output, y, draw.key)
        else:
            total, observations = bnn.likelihood.nll(output, y)
        loss = total / observations
        if kl is not None:  # counted once, whatever the number of draws
            share = 1 if bnn.posterior.kl_is_mean else num_data * (observations / len(y))
            loss = loss + (samples * temperature) * kl / share
        return loss

    count, weight = (members, 1.0) if members is not None else (samples, 1.0 / samples)
    loss = loss_of(0) if count == 1 else _accumulate(loss_of, count, weight, bnn, x)
    if checked and not torch.isfinite(loss):
        _explain(bnn, x, y, loss)
    return loss


def _repeat(tensor: Tensor, times: int) -> Tensor:
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def _unwrap(model: nn.Module) -> BayesianModel:
    """Find the model inside DistributedDataParallel or torch.compile."""
    inner: Any = model
    while not isinstance(inner, BayesianModel):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        if inner is None:
            raise LeanBayesError(
                f"elbo() needs a BayesianModel, not {type(model).__name__}: call lb.bayesianize first."
            )
    return inner


def _check_arguments(
    bnn: BayesianModel, x: Any, y: Any, num_data: int | None, temperature: float | Tensor, samples: int, over: str
) -> None:
    if num_data is None:
        raise LeanBayesError("elbo() needs num_data, the number of training examples: pass num_data=len(train_set).")
    if not isinstance(y, Tensor):
        raise LeanBayesError(f"The labels must be a tensor, not {type(y).__name__}.")
    batch = len(y) if y.dim() else 0
    if batch == 0 or next(tensors_of(x), None) is None:
        raise LeanBayesError("elbo() got no examples: pass a batch with at least one.")
    if num_data < batch:
        raise LeanBayesError(
            f"num_data={num_data} is smaller than the batch of {batch}: pass the number of training examples."
        )
    if not isinstance(temperature, Tensor) and not 0 <= temperature < math.inf:
        raise LeanBayesError(f"temperature={temperature} must be a finite number and not negative.")
    if not isinstance(samples, int) or samples < 1:
        raise LeanBayesError(f"samples={samples} must be a whole number of at least 1.")
    if over not in ("accumulate", "fold"):
        raise LeanBayesError(f"over={over!r} is unknown: use 'accumulate' or 'fold'.")
    if over == "fold" and samples > 1 and not bnn.noise_per_example:
        raise LeanBayesError(
            f"The rule {bnn.rule!r} gives a batch one draw, so samples cannot be folded into it: "
            "use over='accumulate', or the rule 'local' or 'flipout'."
        )


class _Accumulate(torch.autograd.Function):
    """Sums losses whose graphs are freed one by one; the gradients of the sum are at hand before backward()."""

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
    """Say why a loss is not finite: the first culprit found."""
    for name, tensors in (("inputs", list(tensors_of(x))), ("labels", [y]), ("parameters", list(bnn.parameters()))):
        if any(t.is_floating_point() and not t.isfinite().all() for t in tensors):
            remedy = "lower the learning rate" if name == "parameters" else "clean the data"
            raise NotFiniteError(f"The loss is {loss.item()} because the {name} contain NaN or infinity: {remedy}.")
    raise NotFiniteError(
        f"The loss is {loss.item()} although inputs, labels and parameters are finite: "
        "lower the learning rate or the initial std, or use a wider number format."
    )
