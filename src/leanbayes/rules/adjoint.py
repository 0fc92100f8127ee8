"""`adjoint`: variances of a few scalars of the output, by a backward pass of each.

For a scalar s of the output of one example, such as the difference of its two largest logits, to first order in the
noise of the weights

    Var[s] ≈ Σ_w σ_w² (∂s/∂w)².
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leanbayes.core.config import check_choices, configurable
from leanbayes.core.network import map_outputs, output_tensor, tensors_of
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.posteriors import Posterior
from leanbayes.rules.adjoint_weight import AdjointPass, AdjointWeight
from leanbayes.rules.base import PassContext, Rule, register_rule
from leanbayes.rules.margins import MarginFit, margin_variances, with_margin_variances
from leanbayes.rules.moments.rule import MomentPropagation
from leanbayes.rules.moments.value import Moments, variance_dtype

Outputs = Literal["margin", "each"]
Mean = Literal["plain", "moments"]


@register_rule
@configurable
@dataclass(frozen=True)
class Adjoint(Rule):
    """The rule `adjoint`: the network at the posterior mean, and first-order variances by backward passes.

    Its outputs are `Moments`. With "margin", all logits of an example have half of the variance of the difference of
    its two largest logits, so that this difference has the right variance. It works in evaluation mode, for
    predictions; a network cannot be trained by it. The first dimension of an input of a layer must be the batch, or
    the batch merged with its tokens, as under `flipout`.

    Attributes:
        outputs: For logits of classes: "margin" takes one backward pass, of the difference of the two largest logits
            (one per position if there are several); "each" takes one per logit. Other outputs take one per output.
        margins: For "margin": the number of differences that take a backward pass, of the largest logit and each of the
            next ones. 3 are closer to samples than 1.
        mean: "plain" predicts with the outputs at the posterior mean. "moments" predicts with the mean of a pass by the
            rule `moments`, and for "margin" also with its covariance of the logits, in which the margins get the
            variances of this rule. This is closer to samples, and costs that pass. (`bnn(x)` is "plain".)
        max_passes: The largest number of backward passes. More raise an error.

    Example:
        >>> prediction = bnn.predict(x, rule="adjoint")
        >>> prediction.probs, prediction.mutual_information, prediction.margin_std
        >>> bnn.predict(x, rule=leanbayes.rules.Adjoint(mean="moments", margins=3))
    """

    outputs: Outputs = "margin"
    margins: int = 1
    mean: Mean = "plain"
    max_passes: int = 16
    name: ClassVar[str] = "adjoint"
    random: ClassVar[bool] = False
    needs_factorized: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True
    needs_graph: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True  # its backward pass starts at what a prediction scores

    def __post_init__(self) -> None:
        check_choices(self, outputs=Outputs, mean=Mean)
        for name in ("margins", "max_passes"):
            if getattr(self, name) < 1:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be at least 1.")

    @property
    def mean_rule(self) -> Rule | None:
        """The rule whose mean a prediction uses, or None for the mean of this one."""
        return _WithoutFactors() if self.mean == "moments" else None

    def combined(self, output: Any, first: Any, class_dim: int | None, fits: Sequence[MarginFit]) -> Any:
        """Return the mean of `moments`, with the variances of this rule where it has them."""
        if not self._has_margins(output, class_dim):
            return Moments(first.loc, output.variance)
        assert class_dim is not None
        classes = self._classes(output.loc, class_dim)
        variances = margins_of(output, classes, class_dim)
        fit = MarginFit.of(fits, classes.shape[-1] - 1)
        return with_margin_variances(first, variances, classes, class_dim, fit)

    def _has_margins(self, output: Any, class_dim: int | None) -> bool:
        return class_dim is not None and self.outputs == "margin" and output.shape[class_dim] > 1

    def _classes(self, loc: Tensor, class_dim: int) -> Tensor:
        """Return the indices of the largest logits, (..., classes of all margins)."""
        return loc.movedim(class_dim, -1).topk(min(self.margins + 1, loc.shape[class_dim]), -1).indices

    @torch.no_grad()
    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the mean and std of each parameter."""
        self.check(posterior)
        if with_kl:
            raise _unsupported("a training loss", 'give rule="adjoint" to predict after training')
        known = posterior.slot_moments()
        values: list[Any] = []
        for number, (mean, variance) in enumerate(zip(known.means, known.variances, strict=True)):
            if not posterior.random_slots()[number]:
                values.append(mean)
                continue
            derived = {} if known.derived is None else known.derived[number]
            if "std" not in derived:
                derived["std"] = variance.sqrt()
            values.append(AdjointWeight(mean, derived["std"], posterior.layout.slots[number].name, variance))
        return values, None

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        """Record the calls of layers from now on."""
        if context.training:
            raise _unsupported("training mode, in which examples can depend on each other", "call bnn.eval()")
        if torch.is_inference_mode_enabled():
            raise _unsupported("torch.inference_mode, which allows no gradients", "use torch.no_grad()")
        random = [value for value in values if isinstance(value, AdjointWeight)]
        tensors = list(tensors_of(context.inputs))
        if not random or not tensors or tensors[0].dim() == 0:
            return
        if not context.batch_first and tensors[0].dim() in (2, 3):  # images have their batch first in any case
            raise _unsupported(
                "sequences as inputs of layers with batch_first=False, whose batch dimension is unclear",
                "build the layers with batch_first=True",
            )
        root = torch.zeros((), device=tensors[0].device, requires_grad=True)
        memory = {tensor.untyped_storage()._cdata for tensor in tensors}
        context.state = within = AdjointPass(tensors[0].shape[0], context.batch_first, memory, root)
        for value in random:
            value.begin(within)

    def finish(self, output: Any, context: PassContext) -> Any:
        """Return the output with its mean and variance."""
        main, within = output_tensor(output), context.state
        loc = main.detach()
        moments = Moments(loc, torch.zeros((), dtype=variance_dtype(loc.dtype), device=loc.device).expand(loc.shape))
        if within is not None:
            if loc.dim() == 0 or loc.shape[0] != within.rows:
                raise _unsupported(
                    f"an output of shape {tuple(loc.shape)} for {within.rows} examples",
                    "return one output per example",
                )
            with torch.autocast(loc.device.type, enabled=False):
                moments = self._moments(main, within, context.class_dim)
        return map_outputs(
            lambda value: moments if value is main else value.detach() if isinstance(value, Tensor) else value, output
        )

    def _moments(self, output: Tensor, within: AdjointPass, class_dim: int | None) -> Moments:
        """Return the output with the variances of the backward passes."""
        loc, output = output.detach(), output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        if not self._has_margins(output, class_dim):
            return Moments(loc, self.variances(output, within).to(variance_dtype(loc.dtype)))
        assert class_dim is not None
        classes = self._classes(output.detach(), class_dim)
        largest, others = output.movedim(class_dim, -1).gather(-1, classes).split([1, classes.shape[-1] - 1], -1)
        variances = self.variances(largest - others, within).to(variance_dtype(loc.dtype))
        half = (variances[..., :1] / 2).movedim(-1, class_dim)
        moments = Moments(loc, half.expand(loc.shape))
        return moments if variances.shape[-1] == 1 else with_margin_variances(moments, variances, classes, class_dim)

    def variances(self, scalars: Tensor, within: AdjointPass) -> Tensor:
        """Return the variance of each scalar, (examples, ...), by a backward pass for each scalar of an example."""
        rows = scalars.reshape(within.rows, -1)
        if rows.shape[1] > self.max_passes:
            raise _unsupported(
                f"{rows.shape[1]:,} scalars per example", f"raise max_passes={self.max_passes} of Adjoint"
            )
        return within.variances(rows).reshape(scalars.shape)


def margins_of(output: Moments, classes: Tensor, class_dim: int) -> Tensor:
    """Return the variances of margins, given the indices of their classes (..., K + 1)."""
    output = output.plain()
    probe_dim = class_dim + 1 if class_dim >= 0 else class_dim
    common = None if output.common is None else output.common.expand(-1, *output.shape).movedim(probe_dim, -1)
    return margin_variances(output.independent.expand(output.shape).movedim(class_dim, -1), common, classes)


class _WithoutFactors(MomentPropagation):
    """The rule `moments` with corrected layers, but without the two factors, which belong to its own variances."""

    def finish(self, output: Any, context: PassContext) -> Any:
        """Return the output as it is."""
        return super().finish(output, replace(context, output_scale=(1.0, 1.0)))


def _unsupported(operation: str, remedy: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"The rule 'adjoint' has no formula for {operation}: {remedy}, or use bnn.using(\"sample\")."
    )
