"""Products of two values, either of which may be random: matmul, bmm, einsum.

For independent elements the variance of a sum of products is exactly

    v = Σ_k m_a² v_b + v_a m_b² + v_a v_b.

The noise of shares that sum to 1 over k cancels in Σ_k, so m_b is measured from its mean over k.

Common noise has the tangent U_a·m_b + m_a·U_b. It is never expanded over the positions of the result: if the tangent
differs between them, its mean stays common, and the rest of its variance becomes independent.
"""

import math
from typing import Any

import torch
from torch import Tensor

from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.registry import copied, moment_rule, named, unsupported
from leanbayes.rules.moments.softmax import Shares
from leanbayes.rules.moments.value import Moments, variance_dtype

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"
_PROBE = "Z"


def matmul(input: Any, other: Any) -> Any:
    """Multiply matrices, as torch.matmul does, with broadcasting and vectors."""
    loc = torch.matmul(loc_of(input), loc_of(other))
    batch = _LETTERS[: max(input.dim(), other.dim(), 2) - 2]
    left = "X" if input.dim() == 1 else batch[len(batch) - input.dim() + 2 :] + "WX"
    right = "X" if other.dim() == 1 else batch[len(batch) - other.dim() + 2 :] + "XY"
    out = batch + ("W" if input.dim() > 1 else "") + ("Y" if other.dim() > 1 else "")
    return _product(input, other, left, right, out, loc)


@moment_rule(*named("bmm", "mv", "dot"))
def _bmm(input: Any, other: Any) -> Any:
    return matmul(input, other)


@moment_rule(torch.Tensor.__rmatmul__)
def _reflected(input: Any, other: Any) -> Any:
    return matmul(other, input)


@moment_rule(*named("baddbmm"))
def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    loc = torch.baddbmm(loc_of(input), loc_of(batch1), loc_of(batch2), beta=beta, alpha=alpha)
    product = matmul(batch1, batch2)
    total = alpha * product + beta * input
    return total.like(loc, total.independent, total.common, total.grid)


@moment_rule(torch.einsum)
def _einsum(equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    loc = torch.einsum(equation, *(loc_of(x) for x in operands))
    if len(operands) > 2:
        remedy = 'multiply them two at a time, or use bnn.using("sample").'
        raise unsupported("torch.einsum of more than two values", remedy)
    inputs, _, out = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if "..." in inputs or _PROBE in inputs:
        labels, out = _spell_out(labels, out, [x.dim() for x in operands], "->" in equation)
    elif "->" not in equation:
        out = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    if any(len(set(own)) != len(own) for own in labels):
        raise unsupported("torch.einsum of a diagonal", 'take the diagonal first, or use bnn.using("sample").')
    if len(operands) == 1:
        one = operands[0].loc.new_ones(())
        return _product(operands[0], one, labels[0], "", out, loc)
    factors = []
    for own, other, x in zip(labels, labels[::-1], operands, strict=True):
        kept = "".join(c for c in own if c in other or c in out)  # sum over the dimensions of one factor first
        factors.append((x if kept == own else torch.einsum(f"{own}->{kept}", x), kept))
    (a, left), (b, right) = factors
    return _product(a, b, left, right, out, loc)


def _spell_out(labels: list[str], out: str, dims: list[int], explicit: bool) -> tuple[list[str], str]:
    """Replace the ellipses in an equation by letters."""
    free = [letter for letter in _LETTERS if all(letter not in own for own in (*labels, out))]
    counts = [dim - len(own.replace("...", "")) for own, dim in zip(labels, dims, strict=True)]
    rest = "".join(free[: max(count for own, count in zip(labels, counts, strict=True) if "..." in own)])
    if not explicit:
        letters = "".join(labels).replace(".", "")
        out = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    labels = [
        own.replace("...", rest[len(rest) - count :] if count else "")
        for own, count in zip(labels, counts, strict=True)
    ]
    return labels, out.replace("...", rest)


def _product(a: Any, b: Any, left: str, right: str, out: str, loc: Tensor) -> Moments:
    """Return the moments of einsum("left,right->out", a, b), whose mean is `loc`."""
    like = a if isinstance(a, Moments) else b
    dtype = variance_dtype(loc.dtype)
    equation = f"{left},{right}->{out}"
    m_a, m_b = (loc_of(x).to(dtype) for x in (a, b))
    parts = [x.plain() if isinstance(x, Moments) else None for x in (a, b)]
    for x, own in ((a, left), (b, right)):
        # In a batch of matrices each example may have its own copy.
        if set(own) - set(out) and not {*left} & {*right} & {*out} and isinstance(x, Moments) and x.copies:
            raise copied("a product")
    terms: list[Any] = []
    if parts[1] is not None:
        terms.append(torch.einsum(equation, m_a.square(), parts[1].independent))
        if parts[0] is not None:
            terms.append(torch.einsum(equation, parts[0].variance, parts[1].variance))
    if parts[0] is not None:
        if isinstance(a, Shares) and a.along == len(left) - 1 and left[-1] in right and left[-1] not in out:
            m_b = m_b - like.within.mean(m_b, [right.index(left[-1])])
        terms.append(torch.einsum(equation, parts[0].independent, m_b.square()))
    common: Tensor | None = None
    if parts[0] is not None and parts[0].common is not None:
        common, energy = _tangent(parts[0], b, m_b, left, right, out)
        terms.append(energy)
    if parts[1] is not None and parts[1].common is not None:
        other, energy = _tangent(parts[1], a, m_a, right, left, out)
        terms.append(energy)
        if common is not None:
            terms.append(2 * torch.einsum(f"{_PROBE}{out},{_PROBE}{out}->{out}", common, other))
            # Average the tangent of `b` where that of `a` is shared: otherwise the sum would have all positions.
            dims = [d for d in range(1, common.dim()) if common.shape[d] == 1 and other.shape[d] != 1]
            other = like.within.mean(other, dims, lead=1) if dims else other
        common = other if common is None else common + other
    total = sum(terms[1:], terms[0]).to(dtype).clamp_min(0).expand(loc.shape)  # low precision under autocast
    return like.like_total(loc, total, None if common is None else common.to(dtype))


def _tangent(value: Moments, other: Any, factor: Tensor, own: str, others: str, out: str) -> tuple[Tensor, Tensor]:
    """Multiply the common part of a value by the mean of another: return the part that stays common, and its variance.

    The variance is that of the whole tangent, before it is averaged over positions.
    """
    assert value.common is not None
    equation = f"{_PROBE}{own},{others}->{_PROBE}{out}"
    shared = {c for c, size, n in zip(own, value.common.shape[1:], value.shape, strict=True) if size == 1 and n != 1}
    sums = [c for c in own if c not in out]
    alone = math.prod([value.shape[own.index(c)] for c in sums if c in shared and c not in others])
    common, energy = alone * value.common, None
    if sums and all(c in shared for c in sums):
        # A sum over positions: only the factor is summed. Its other dimensions are positions again, unless its common
        # part differs along them.
        dims = [i for i, c in enumerate(others) if c in sums]
        factor = factor.sum(dims, keepdim=True) if dims else factor
        full = isinstance(other, Moments) and other.common is not None
        known = other.plain().common.shape[1:] if full else [1] * len(others)
        free = [i for i, c in enumerate(others) if c not in own and c in out and known[i] == 1]
        energy = torch.einsum(f"{own},{others}->{out}", common.square().sum(0), factor.square())
        factor = value.within.mean(factor, free) if free else factor
    mixed = [i for i, c in enumerate(others) if c in shared and c in out]
    if mixed:  # both have these positions, and the factor differs along them
        energy = torch.einsum(equation, common, factor).square().sum(0) if energy is None else energy
        factor = value.within.mean(factor, mixed)
    tangent = torch.einsum(equation, common, factor)
    return tangent, tangent.square().sum(0) if energy is None else energy
