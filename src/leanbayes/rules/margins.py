"""Margins, the differences of the largest logit and the next ones: their variances, and noise that gets other ones.

Classes are the last dimension. Logits have independent noise, with a variance each, and common noise: signed
directions, (probes, ..., classes). `classes` are the indices of the largest logit and of K others, (..., K + 1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.value import Moments

_LEAST = 1e-30
_LARGEST_CORRELATION = 0.999  # of two margins: regressions on both need an inverse


class MarginFit(NamedTuple):
    """How the variances of margins by two ways are combined, and what they say about all other noise.

    With the variance g of a margin by one pass and v by a backward pass, the margin gets b²·g^(1 - w)·v^w, and all
    logits first get the noise of one pass times c·(v/g)^(u/2), with the geometric mean of v/g over the margins.

    Attributes:
        weight: w, from 0 to 1.
        factor: b.
        total_weight: u, from 0 to 1.
        total_factor: c.
    """

    weight: float = 1.0
    factor: float = 1.0
    total_weight: float = 0.0
    total_factor: float = 1.0

    @classmethod
    def of(cls, fits: "Sequence[MarginFit]", margins: int) -> "MarginFit":
        """Return the fit for a number of margins from those for 1, 2, ... of them; the default if there are none."""
        return fits[min(margins, len(fits)) - 1] if fits else cls()


def margin_covariance(variance: Tensor, common: Tensor | None, classes: Tensor) -> Tensor:
    """Return the covariance of the margins, (..., K, K)."""
    own = variance.gather(-1, classes)
    found = own[..., :1, None] + torch.diag_embed(own[..., 1:])
    if common is None:
        return found
    shared = _margins(common.expand(-1, *variance.shape), classes)
    return found + torch.einsum("z...k,z...l->...kl", shared, shared)


def margin_variances(variance: Tensor, common: Tensor | None, classes: Tensor) -> Tensor:
    """Return the variance of each margin, (..., K)."""
    own = variance.gather(-1, classes)
    found = own[..., :1] + own[..., 1:]
    return found if common is None else found + _margins(common.expand(-1, *variance.shape), classes).square().sum(0)


def _margins(values: Tensor, classes: Tensor) -> Tensor:
    """Return the margins of values, (probes, ..., K)."""
    chosen = values.gather(-1, classes.expand(len(values), *classes.shape))
    return chosen[..., :1] - chosen[..., 1:]


def with_margin_variances(
    output: Moments, variances: Tensor, classes: Tensor, class_dim: int, fit: MarginFit | None = None
) -> Moments:
    """Return logits whose margins have other variances, and whose other noise follows.

    With the noise n of the logits, its covariance C, and the margins Dᵀn, the new noise is

        n + C·D·(DᵀC·D)⁻¹·(S - 1)·Dᵀn,

    where the diagonal matrix S has the ratio of the stds. Noise that is uncorrelated with all margins does not change.

    Args:
        output: The logits.
        variances: The other variances of the margins, (..., K).
        classes: The indices of the largest logit and of the K others, (..., K + 1).
        class_dim: The dimension of the output that counts classes.
        fit: How the two variances are combined. By default the margins get the other ones.
    """
    fit = fit or MarginFit()
    output = output.plain()
    independent = output.independent.expand_as(output.loc).movedim(class_dim, -1)
    probe_dim = class_dim + 1 if class_dim >= 0 else class_dim
    common = None
    if output.common is not None:
        common = output.common.expand(-1, *output.loc.shape).movedim(probe_dim, -1).to(independent.dtype)
    with torch.autocast(independent.device.type, enabled=False):
        independent, common = _changed(independent, common, variances, classes, fit)
    return output.like(output.loc, independent.movedim(-1, class_dim), common.movedim(-1, probe_dim))


def _changed(
    independent: Tensor, common: Tensor | None, variances: Tensor, classes: Tensor, fit: MarginFit
) -> tuple[Tensor, Tensor]:
    """Return the independent variance and the common noise of `with_margin_variances`."""
    covariance = margin_covariance(independent, common, classes)
    before = covariance.diagonal(dim1=-2, dim2=-1)
    random = before > 0
    ratios = torch.where(random, variances.to(before) / before.where(random, 1.0), 1.0).clamp_min(_LEAST)
    scale = fit.total_factor * (0.5 * fit.total_weight * ratios.log().mean(-1, keepdim=True)).exp()
    gains = torch.where(random, fit.factor * ratios ** (fit.weight / 2) / scale, 1.0)

    own = independent.gather(-1, classes).unsqueeze(-1)
    units = F.one_hot(classes, independent.shape[-1]).to(own)  # (..., K + 1, classes)
    margins = None if common is None else _margins(common, classes)
    with_margins = (own[..., :1, :] * units[..., :1, :] - own[..., 1:, :] * units[..., 1:, :]).mT  # C·D
    if common is not None and margins is not None:
        with_margins = with_margins + torch.einsum("z...c,z...k->...ck", common, margins)
    change = with_margins @ (_inverse(covariance) * (gains - 1).unsqueeze(-2))
    # The independent noise of the logits of the margins is shared by all logits now.
    noise = own.sqrt() * (units + torch.cat([change.sum(-1, keepdim=True), -change], -1).mT)
    parts = [noise.movedim(-2, 0)]
    if common is not None and margins is not None:
        parts.insert(0, common + torch.einsum("...ck,z...k->z...c", change, margins))
    independent = independent.scatter(-1, classes, 0.0) * scale.square()
    return independent, torch.cat(parts) * scale


def _inverse(covariance: Tensor) -> Tensor:
    """Invert a covariance whose correlations are a little reduced; a margin without noise has no covariance."""
    stds = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    inverse = torch.where(stds > 0, 1 / stds.where(stds > 0, 1.0), 0.0)
    scale = inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    identity = torch.eye(covariance.shape[-1]).to(covariance)
    correlation = torch.where(identity > 0, identity, _LARGEST_CORRELATION * scale * covariance)
    return scale * _inverse_of_few(correlation)


def _inverse_of_few(matrix: Tensor) -> Tensor:
    """Invert small positive definite matrices by elimination, which no GPU waits for, and which ONNX can express."""
    inverse = identity = torch.eye(matrix.shape[-1]).to(matrix)
    for column in range(matrix.shape[-1]):
        own = slice(column, column + 1)
        pivot, others = matrix[..., own, own], matrix[..., :, own] - identity[:, own]
        inverse = inverse - others * (inverse[..., own, :] / pivot)
        matrix = matrix - others * (matrix[..., own, :] / pivot)
    return inverse
