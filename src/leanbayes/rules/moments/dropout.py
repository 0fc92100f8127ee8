"""Dropout of a Gaussian value in training mode: the mask is a constant factor."""

from collections.abc import Callable

import torch
from torch import Tensor

from leanbayes.rules.moments.registry import moment_rule, named
from leanbayes.rules.moments.value import Moments, variance_dtype

_DROPOUTS = named("dropout", "dropout_", "feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d")
_ALPHA_DROPOUTS = named("alpha_dropout", "feature_alpha_dropout", "alpha_dropout_", "feature_alpha_dropout_")


def _drawn(function: Callable[..., Tensor], p: float, like: Tensor) -> tuple[Tensor, Tensor | float]:
    """Draw a mask with a dropout function, and return the factor and constant of x ↦ factor·x + constant."""
    ones = function(torch.ones_like(like), p, True)
    if function not in _ALPHA_DROPOUTS:
        return ones, 0.0
    # Alpha dropout is a·k·x + a·α·(k - 1 + p) with a mask k: where x = 1 was kept, the result is above a·α·p.
    alpha = 1.7580993408473766
    a = ((1 - p) * (1 + p * alpha**2)) ** -0.5 if p < 1 else 0.0
    factor = torch.where(ones > a * alpha * p, a, 0.0).to(ones.dtype)
    return factor, ones - factor


def _register_dropout(function: Callable[..., Tensor]) -> None:
    by_default, in_place = function not in _ALPHA_DROPOUTS, function.__name__.endswith("_")

    def rule(
        input: Moments,
        p: float = 0.5,
        training: bool = by_default,
        inplace: bool = in_place,
        *,
        train: bool | None = None,  # the name in torch.dropout
    ) -> Moments:
        if not (training if train is None else train) or p == 0:
            return input
        factor, constant = _drawn(function, p, input.loc)
        loc = input.loc * factor + constant
        result = input.follow(loc, factor.to(variance_dtype(loc.dtype)))
        return input.assign(result) if inplace else result

    moment_rule(function)(rule)


for _function in (*_DROPOUTS, *_ALPHA_DROPOUTS):
    _register_dropout(_function)
