"""The difference of two logits: its variance, and noise of all logits that is changed to give it another one.

Classes are the last dimension. Logits have independent noise, with a variance each, and common noise: signed
directions, (probes, ..., classes).
"""

import torch
from torch import Tensor

from leanbayes.rules.moments.value import Moments

_LEAST = 1e-30


def margin_variance(variance: Tensor, common: Tensor | None, two: Tensor) -> Tensor:
    """Return the variance of the difference of two logits, given their indices (..., 2); of one class its own."""
    found = variance.gather(-1, two).sum(-1)
    if common is None:
        return found
    shared = common.expand(-1, *variance.shape).gather(-1, two.expand(len(common), *two.shape))
    first, *second = shared.unbind(-1)
    return found + (first - second[0] if second else first).square().sum(0)


def with_margin_variance(
    output: Moments, variance: Tensor, two: Tensor, class_dim: int, margin: tuple[float, float] = (1.0, 1.0)
) -> Moments:
    """Return logits whose difference of two has another variance, and whose other noise stays as it is.

    With the noise n of the logits, its covariance C, and the difference d of two unit vectors, the new noise is

        n + (γ - 1)·C·d·(dᵀn) / (dᵀC·d),      γ² = b²·(v / dᵀC·d)^w.

    Noise that is uncorrelated with dᵀn does not change.

    Args:
        output: The logits.
        variance: The other variance v of the difference, (...,) without classes.
        two: The indices of the two classes, (..., 2).
        class_dim: The dimension of the output that counts classes.
        margin: The weight w of the other variance, and the factor b of the std.
    """
    output = output.plain()
    independent = output.independent.expand_as(output.loc).movedim(class_dim, -1)
    probe_dim = class_dim + 1 if class_dim >= 0 else class_dim
    common = independent.new_zeros(0, *independent.shape)
    if output.common is not None:
        common = output.common.expand(-1, *output.loc.shape).movedim(probe_dim, -1)
    before = margin_variance(independent, common, two)
    signs = torch.tensor([1.0, -1.0], dtype=independent.dtype, device=independent.device).expand(two.shape)
    difference = torch.zeros_like(independent).scatter(-1, two, signs)
    along = (common * difference).sum(-1, keepdim=True)
    covariance = independent * difference + (common * along).sum(0)
    random = before > 0
    weight, factor = margin
    ratio = (variance.to(before) / before.where(random, 1.0)).clamp_min(_LEAST)
    gain = torch.where(random, factor * ratio ** (weight / 2), 1.0)
    change = covariance * ((gain - 1) / before.where(random, 1.0)).unsqueeze(-1)
    stds, units = independent.gather(-1, two).sqrt(), torch.zeros_like(independent)
    own = [  # the independent noise of the two logits, which all logits share now
        stds[..., k : k + 1] * (units.scatter(-1, two[..., k : k + 1], 1.0) + signs[..., k : k + 1] * change)
        for k in (0, 1)
    ]
    common = torch.cat([common + along * change, torch.stack(own)])
    independent = independent.scatter(-1, two, 0.0)
    return output.like(output.loc, independent.movedim(-1, class_dim), common.movedim(-1, probe_dim))
