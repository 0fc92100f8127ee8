"""Functions that are linear in a weight, with noise in the weight, in the input, or in both: which layer a call is.

`layer` has the formulas.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.coherent import CoherentLayer
from leanbayes.rules.moments.layer import Layer
from leanbayes.rules.moments.registry import moment_rule, unsupported
from leanbayes.rules.moments.shape import groups_of
from leanbayes.rules.moments.value import Moments
from leanbayes.rules.random_weight import LinearForm, LinearUse, form_of, linear_in_weight

_MATRICES = {torch.mm, Tensor.mm}


@moment_rule(linear_in_weight)
def linear(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute any function that is registered by `linear_in_weight`, with the correction of its layer."""
    form = form_of(function)
    arguments = {**dict(zip(form.parameters, args, strict=False)), **kwargs}
    correction = getattr(arguments[form.weight], "correction", None)
    random = any([isinstance(arguments[name], Moments) for name in form.inputs])
    result = _uncorrected(function, form, arguments)
    return correction(result, form.channel_dim) if correction is not None and random else result


def _uncorrected(function: Callable[..., Any], form: LinearForm, arguments: dict[str, Any]) -> Any:
    if form.weight == "other":
        from leanbayes.rules.moments.products import matmul

        other = arguments["other"]
        if other.dim() != 2 or (isinstance(other, Moments) and other.common is not None):  # not a weight
            return matmul(arguments["input"], other)
    if arguments.get("max_norm") is not None:
        raise unsupported("an embedding with max_norm", 'remove max_norm, or use bnn.using("sample").')
    if form.bias == "input":
        return _addmm(**arguments)
    if function in _MATRICES:  # they do not take the probes, or tokens, as a third dimension
        function = torch.matmul
    if form.inputs == ("input",) and form.channel_dim == -1:
        tokens = _Tokens.of(arguments["input"], arguments.values())
        if tokens is not None:
            arguments["input"] = tokens.split(arguments["input"])
            layer = Layer(function, LinearUse(arguments, form), positions=[1])
            return tokens.merge(layer.shared())
    coherent = any([isinstance(value, Moments) and value.within.coherent for value in arguments.values()])
    layer = (CoherentLayer if coherent else Layer)(function, LinearUse(arguments, form))
    if not form.inputs:
        return layer.look_up()
    if function is F.bilinear:
        return layer.bilinear()
    return layer.shared() if layer.positions else layer.apart()


def _addmm(input: Any, mat1: Any, mat2: Any, beta: float = 1, alpha: float = 1) -> Any:
    """Compute beta·input + alpha·(mat1 @ mat2), as a linear layer if the input is a bias."""
    if beta == alpha == 1 and input.dim() == 1:
        return F.linear(mat1, mat2.t(), input)
    return beta * input + alpha * torch.matmul(mat1, mat2)


class _Tokens(NamedTuple):
    """How the rows of a matrix are the tokens of examples: a reshape merged (examples, tokens) or the reverse."""

    examples: int
    length: int
    examples_first: bool

    @classmethod
    def of(cls, x: Any, values: Iterable[Any]) -> "_Tokens | None":
        """Return how an input is made up, or None if its rows are the examples or their number is unknown."""
        within = next(value.within for value in values if isinstance(value, Moments))
        if within.correlation == "none" or within.rows is None or x.dim() != 2:
            return None
        if isinstance(x, Moments) and x.copies is not None:  # a weight, whose rows are channels
            return None
        rows, first = within.rows, within.batch_first
        if rows == 0 or x.shape[0] in (1, rows):
            return None
        if x.shape[0] % rows:  # a selection of tokens, or a table of positions
            return cls(1, x.shape[0], True)
        if isinstance(x, Moments) and x.common is not None:
            shared = [x.common.shape[place + 1] == 1 for place in groups_of(x)[0]]
            first = shared[-1] if len(shared) > 1 and any(shared) else first  # tokens share noise, examples do not
        return cls(rows, x.shape[0] // rows, first)

    def split(self, x: Any) -> Any:
        """Return (examples, tokens, channels)."""
        if self.examples_first:
            return x.reshape(self.examples, self.length, x.shape[1])
        return x.reshape(self.length, self.examples, x.shape[1]).transpose(0, 1)

    def merge(self, y: Any) -> Any:
        """Return the rows in their order again."""
        return (y if self.examples_first else y.transpose(0, 1)).reshape(-1, y.shape[2])


@moment_rule(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Moments,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Moments:
    """Sum or average rows of a weight, each with its own noise: Σ_i c_i²·v_i, where c_i is how often row i is in a bag.

    With factors, c_i is the sum of those of row i.
    """
    if (
        max_norm is not None
        or mode == "max"
        or not isinstance(weight, Moments)
        or isinstance(per_sample_weights, Moments)
    ):
        remedy = 'use the mode "sum" or "mean" without max_norm, or bnn.using("sample").'
        raise unsupported("F.embedding_bag with max_norm, mode='max' or random factors", remedy)

    def summed(rows: Tensor, how: str, factors: Tensor | None = None) -> Tensor:
        settings: dict[str, Any] = {"include_last_offset": include_last_offset, "padding_idx": padding_idx}
        return F.embedding_bag(input, rows, offsets, mode=how, per_sample_weights=factors, **settings)

    v = weight.variance
    factors = torch.ones_like(input, dtype=v.dtype) if per_sample_weights is None else per_sample_weights.to(v.dtype)
    variance = summed(v, "sum", factors * _sums_of_equals(factors, input, offsets, len(v)))
    if mode == "mean":
        count = summed(torch.ones_like(v[:, :1]), "sum").clamp_min(1)
        variance = variance / count.square()
    return weight.like(summed(weight.loc, mode, per_sample_weights), variance)


def _sums_of_equals(factors: Tensor, rows: Tensor, offsets: Tensor | None, count: int) -> Tensor:
    """Return for each entry of all bags the sum of the factors of the same row in its bag."""
    places = torch.arange(rows.numel(), device=rows.device)
    bags = places // max(1, rows.shape[-1]) if offsets is None else torch.searchsorted(offsets, places, right=True)
    keys, order = (bags * count + rows.reshape(-1)).sort()
    groups = torch.cat([keys.new_zeros(1), (keys.diff() != 0).long()]).cumsum(0)[: len(keys)]
    sums = torch.zeros_like(factors).reshape(-1).index_add(0, groups, factors.reshape(-1)[order])
    return torch.empty_like(sums).scatter(0, order, sums[groups]).reshape(factors.shape)
