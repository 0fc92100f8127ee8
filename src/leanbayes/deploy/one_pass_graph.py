"""One pass by `moments` or `adjoint` as a plain `nn.Module`, which torch.export can trace: its outputs by name.

For classes and yes/no outputs: `mean`, `variance` (of the logits), `probs` and `expected_entropy` (the noise in the
data; the entropy of `probs` minus it is the mutual information). For regression: `mean`, `variance` (the total) and
`epistemic_variance` (the part of the model). By `adjoint` classes also have `margin_std`, the std of the difference of
the two largest logits.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.network import call_with, check_readable, map_rows, output_tensor
from leanbayes.deploy.gradient_graph import gradient_graph
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from leanbayes.likelihoods.expectations import (
    common_by_class,
    gaussian_means,
    logit_noise,
    logit_samples,
    noise_settings,
    softplus,
)
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.draw import Draw
from leanbayes.posteriors import Posterior
from leanbayes.posteriors.base import SlotMoments
from leanbayes.rules import Adjoint, MomentPropagation, Moments, Rule

TOLERANCE = 1e-4  # of outputs, relative to the largest output
ROWS = 11  # examples to trace with; a prime, so that no other size equals it by chance
_ELEMENTS = 1 << 22  # numbers per example to sample at once


class _KnownMoments(Posterior):
    """Mean and variance of the weights, computed once, so that the graph does not depend on the kind of posterior."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__(posterior.layout)
        self._random = list(posterior.random_slots())
        for name, values in (("mean", posterior.mean()), ("variance", posterior.variance())):
            for number, part in enumerate(self.layout.split(values.detach())):
                if name == "mean" or self._random[number]:
                    self.register_buffer(f"{name}_{number}", part.to("cpu", torch.float32, copy=True))

    def random_slots(self) -> Sequence[bool]:
        """Whether each parameter has any variance."""
        return self._random

    def slot_moments(self) -> SlotMoments:
        """Return mean and variance of each parameter; rules do not read the variance of deterministic ones."""
        means = [getattr(self, f"mean_{number}") for number in range(len(self._random))]
        kinds = ["variance" if random else "mean" for random in self._random]
        return SlotMoments(means, [getattr(self, f"{kind}_{number}") for number, kind in enumerate(kinds)], None)


class OnePassGraph(nn.Module):
    """A copy of a model, on the CPU and in single precision, that returns the outputs of one pass by name."""

    def __init__(self, bnn: BayesianModel, rule: str | Rule, example: Any) -> None:
        super().__init__()
        if not isinstance(bnn, BayesianModel):
            raise LeanBayesError(f"Only a model from lb.bayesianize can be exported, not {type(bnn).__name__}.")
        if not len(bnn.layout):
            raise LeanBayesError(
                f"{type(bnn.method).__name__} has no Bayesian weights, so one pass has no variance to export: "
                "use torch.onnx.export(bnn.to_deterministic(), ...)."
            )
        inputs = example_tensors(example)
        made = bnn.method.make_rule(rule)
        if not isinstance(made, MomentPropagation | Adjoint):
            raise LeanBayesError(
                f"The rule {made.name!r} gives no variance in one pass: export with 'moments' or 'adjoint'."
            )
        made.check(bnn.posterior)
        self.names = list(example) if isinstance(example, Mapping) else None
        with torch.inference_mode(False), torch.no_grad():
            model = copy.deepcopy(bnn, {id(bnn.posterior): _KnownMoments(bnn.posterior)})
        self.model = model.to("cpu").float().eval().requires_grad_(False)
        self.model.rule = made
        self.key = noise.make_key(0)  # one pass uses no noise
        self.gradients: torch.fx.GraphModule | None = None  # the pass, if it computes gradients
        if made.needs_graph:
            self.gradients = self._traced(inputs)
        self.register_buffer("logit_noise", None)
        if isinstance(bnn.likelihood, Categorical):
            with torch.no_grad():
                output = self._moments(*inputs)
                loc, _, common = bnn.likelihood.logit_moments(output)
            directions = common_by_class(loc, common, output.within.coherent)
            self.logit_noise = logit_noise(*noise_settings(loc, directions)).float()

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        likelihood, output = self.model.likelihood, self._moments(*inputs)
        outputs = _outputs(likelihood, output, self.logit_noise)
        if self.gradients is not None and isinstance(likelihood, Categorical):
            outputs["margin_std"] = likelihood.margin_variance(output).sqrt()
        return outputs

    def _moments(self, *inputs: Tensor) -> Moments:
        if self.gradients is None:
            return self._call(*inputs)
        rule, output = self.model.current_rule, Moments(*self.gradients(*inputs))
        if rule.mean_rule is None:
            return output
        with self.model.using(rule.mean_rule):
            first = self._call(*inputs)
        combined: Moments = rule.combined(output, first, self.model.class_dim, self.model.moment_margins)
        return combined

    def _call(self, *inputs: Tensor) -> Moments:
        """Call the network by its current rule."""
        args: Any = inputs if self.names is None else dict(zip(self.names, inputs, strict=True))
        output = output_tensor(call_with(self.model, args, _draw=Draw(self.key)))
        if not isinstance(output, Moments):
            raise LeanBayesError("The output does not depend on a Bayesian weight: there is no variance to export.")
        self.model.likelihood.check_output(output)
        return output

    def _parts(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the mean, the independent variance, and the common noise if there is some, of a call."""
        with torch.no_grad():
            output = self._call(*inputs).plain()
        return output.loc, output.independent, *([] if output.common is None else [output.common])

    def _traced(self, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
        """Return the current pass with its gradients as a graph, after a comparison with the pass itself."""
        inputs = with_rows(inputs, ROWS)
        wanted = self._parts(*inputs)  # raises a clear error for operations that the rule does not know
        try:
            graph = gradient_graph(self._parts, inputs)
        except Exception as error:
            raise LeanBayesError(
                f"The backward pass cannot be traced for any number of examples ({first_line(error)}): export with "
                "rule='moments', or change what depends on the data."
            ) from error
        for found, value in zip(graph(*inputs), wanted, strict=True):
            if not (found - value).abs().max() <= TOLERANCE * value.abs().max():
                raise LeanBayesError(
                    "The traced backward pass differs from the pass itself, so something in the network depends on the "
                    "values of its inputs: export with rule='moments'."
                )
        return graph

    def run(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Compute the outputs without a graph."""
        with torch.no_grad():
            outputs: dict[str, Tensor] = self(*inputs)
        return outputs


def _outputs(likelihood: Likelihood, output: Moments, noise_of_logits: Tensor | None) -> dict[str, Tensor]:
    """Compute what `predict_moments` of the likelihood does, but traceable for any number of examples."""
    loc, variance = output.loc, output.variance.expand_as(output.loc)
    if isinstance(likelihood, Categorical):
        assert noise_of_logits is not None
        probs, entropy = _mean_softmax(likelihood, output, noise_of_logits)
        return {"mean": loc, "variance": variance, "probs": probs, "expected_entropy": entropy}
    if isinstance(likelihood, Bernoulli):
        probs, entropy = torch.vmap(lambda m, v: gaussian_means(_probability_and_entropy, m, v))(loc, variance)
        return {"mean": loc, "variance": variance, "probs": probs, "expected_entropy": entropy}
    if isinstance(likelihood, HeteroscedasticGaussian):
        (mean, raw), (epistemic, raw_variance) = loc.chunk(2, -1), variance.chunk(2, -1)
        (softplus_mean, *_) = torch.vmap(lambda m, v: gaussian_means(softplus, m, v))(raw, raw_variance)
        aleatoric = softplus_mean + likelihood.settings["min_variance"]
        return {"mean": mean, "variance": aleatoric + epistemic, "epistemic_variance": epistemic}
    if isinstance(likelihood, Gaussian):
        aleatoric = likelihood.std.square().to(variance)
        return {"mean": loc, "variance": aleatoric + variance, "epistemic_variance": variance}
    return {"mean": loc, "variance": variance}


def _mean_softmax(likelihood: Categorical, output: Moments, noise_of_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean softmax of the logits and its expected entropy, a few samples of the noise at a time."""
    loc, variance, common = likelihood.logit_moments(output)
    scaled = output.within.coherent
    common = common_by_class(loc, common, scaled)
    std = variance.clamp_min(0).sqrt()
    at_once = max(1, _ELEMENTS // math.prod(loc.shape[1:]))
    probs, entropy = torch.zeros_like(loc), torch.zeros_like(loc[..., 0])
    for part in noise_of_logits.split(at_once):
        logs = logit_samples(loc, std, common, part, scaled).log_softmax(-1)
        found = logs.exp()
        probs = probs + found.sum(0)
        entropy = entropy - (found * logs).sum(-1).sum(0)
    samples = len(noise_of_logits)
    return (probs / samples).movedim(-1, likelihood.class_dim), entropy / samples


def _probability_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sigmoid, and the entropy of a yes with this probability."""
    yes = logits.sigmoid()
    return yes, yes * F.softplus(-logits) + (1 - yes) * F.softplus(logits)


def with_rows(inputs: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Repeat the examples of a batch until there are `rows` of them."""
    return tuple(map_rows(lambda tensor: tensor[torch.arange(rows) % len(tensor)], list(inputs), len(inputs[0])))


def first_line(error: Exception) -> str:
    """Return the first line of the message of an error, without a period."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def example_tensors(example: Any) -> list[Tensor]:
    """Return the tensors of a batch on the CPU, real ones in single precision."""
    values = [example] if isinstance(example, Tensor) else example.values() if isinstance(example, Mapping) else example
    if not isinstance(values, Iterable) or not all(isinstance(value, Tensor) for value in values):
        raise LeanBayesError("The example must be a tensor, or a tuple or dict of tensors.")
    check_readable(values)
    tensors = [t.detach().to("cpu", torch.float32 if t.is_floating_point() else t.dtype) for t in values]
    if not tensors or tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise LeanBayesError("The example is empty: pass a batch of at least one example.")
    return tensors
