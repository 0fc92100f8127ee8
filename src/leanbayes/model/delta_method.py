"""`lb.delta_method`: mean and variance of any function of the outputs, by one backward pass for each of its values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.names import shown
from leanbayes.core.network import call_with, evaluation_mode, tensors_of
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.prediction import count_rows
from leanbayes.rules import Adjoint, Moments
from leanbayes.rules.base import PassContext
from leanbayes.rules.moments.value import variance_dtype


@checked(function="a function that takes the output of the network")
def delta_method(bnn: BayesianModel, x: Any, function: Callable[[Any], Any], *, max_passes: int = 16) -> Moments:
    """Return mean and variance of a function of the outputs, such as the area of a segment or the score of a token.

    The mean is the function at the posterior mean. The variance is that of the noise of the weights, to first order:

        Var[s] ≈ Σ_w σ_w² (∂s/∂w)²,

    from one backward pass for each value s of an example, as the rule "adjoint" does it. Nothing is lost on the way:
    pixels and tokens keep their correlations, so a sum over pixels has the right variance too.

    Args:
        bnn: A model whose posterior is factorized. It runs in evaluation mode.
        x: A batch: a tensor, or a tuple or dict of tensors. Memory is that of a training step.
        function: Takes the output of the network, whatever that is, and returns one value per example, (batch,), or
            several, (batch, k). It must have gradients, and use no example of the batch for the value of another one.
        max_passes: The largest number of values per example. More raise an error, because each takes a backward pass.

    Returns:
        The values, with `loc`, `variance` and `stddev`.

    Raises:
        LeanBayesError: The function returns something else, has no gradient, or has too many values.
        UnsupportedOperation: A layer with Bayesian weights has no gradients per example, or weights are correlated.

    Example:
        >>> area = lb.delta_method(bnn, images, lambda logits: logits.softmax(1)[:, 1].sum((1, 2)))
        >>> area.loc, area.stddev  # pixels of class 1 in each image
        >>> lb.delta_method(language_model, ids, lambda out: out.logits[:, -1, [yes, no]].diff())
    """
    if max_passes < 1:
        raise LeanBayesError(f"max_passes={max_passes} must be at least 1.")
    count_rows(x, "delta_method()")  # raises an error if there are no examples
    rule = _OfFunction(max_passes=max_passes, function=function)
    with torch.no_grad(), bnn.using(rule), evaluation_mode(bnn):
        found: Moments = call_with(bnn, x)
    return found


@dataclass(frozen=True)
class _OfFunction(Adjoint):
    """The rule `adjoint` for the values of a function, which take the place of the output."""

    function: Callable[[Any], Any] = lambda output: output
    needs_scores: ClassVar[bool] = False  # the function says what the values are

    def finish(self, output: Any, context: PassContext) -> Any:
        """Return the values of the function, with their variances."""
        within = context.state
        values = self._values(output, len(next(tensors_of(context.inputs))))
        if within is None:
            return Moments(values.detach(), torch.zeros_like(values))
        if not values.requires_grad:
            raise LeanBayesError(
                "The function has no gradient with respect to the output: leave out argmax, comparisons, detach() and "
                "torch.no_grad(), or use a smooth function such as softmax."
            )
        with torch.autocast(values.device.type, enabled=False):
            variance = self.variances(values, within)
        return Moments(values.detach(), variance.to(variance_dtype(values.dtype)))

    def _values(self, output: Any, rows: int) -> Tensor:
        """Call the function, and check what it returns."""
        values = self.function(output)
        if not isinstance(values, Tensor) or values.dim() not in (1, 2) or len(values) != rows or not values.numel():
            found = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else shown(values)
            raise LeanBayesError(
                f"The function must return one value per example, a tensor of shape ({rows},), or several, "
                f"({rows}, k), but it returned {found}."
            )
        if values.is_complex():
            raise LeanBayesError("The function returned complex numbers: return real ones, such as values.abs().")
        if values.numel() > rows * self.max_passes:
            raise LeanBayesError(
                f"The function returned {values.shape[1]:,} values per example, each of which takes a backward pass: "
                f"return fewer, or raise max_passes={self.max_passes}."
            )
        return values
