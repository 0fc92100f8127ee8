"""Coding of the code of each weight: a mask of the nonzero weights, then one symbol for each of them.

Codes of a single weight, the outliers, have one common symbol, and are stored in the order of their weights. So are
blends.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.deploy.compact.coding import Array, pack, pack_symbols, unpack, unpack_symbols
from leanbayes.deploy.compact.container import Part, needed
from leanbayes.deploy.compact.masks import pack_masks, unpack_masks
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors.shared.shared import SharedPosterior

GAUSSIAN, POINT = ("mu", "rho", "factors"), ("mu",)
MOST_PARTNERS = 64
_SHARES = 255  # steps of the share of a code in a blend
_LOGITS = np.array([math.log(max(share / _SHARES, torch.finfo(torch.float32).tiny)) for share in range(_SHARES + 1)])


class Kinds(NamedTuple):
    """The number of codes of each kind: shared and of a single weight, and both again for deterministic codes."""

    codes: int
    outliers: int
    points: int
    lone_points: int


_VALUES = {"codes": GAUSSIAN, "outliers": GAUSSIAN, "points": POINT, "lone_points": POINT}  # names in files


def split(posterior: SharedPosterior) -> tuple[Kinds, dict[str, Tensor], dict[str, Part]]:
    """Separate shared codes from those of a single weight; return their numbers, values, and encoded labels and blends.

    The symbols of an outlier, a deterministic outlier and a blend come after those of the shared codes.
    """
    layout, zero, stds = posterior.layout, len(posterior.mu), len(posterior.rho)
    labels = posterior.labels.cpu().numpy().astype(np.int64)
    blended, partners = posterior.blended.cpu().numpy(), posterior.partners.cpu().numpy()
    if partners.shape[1] > MOST_PARTNERS:
        raise LeanBayesError(f"A compact file holds blends of at most {MOST_PARTNERS} codes: blend fewer.")
    mixed = np.zeros(len(labels), bool)
    mixed[blended] = True
    counts = np.bincount(labels[~mixed], minlength=zero + 1)[:zero]
    several, random = counts > 1, np.arange(zero) < stds
    several[partners.ravel()] = True
    codes, points = np.flatnonzero(several & random), np.flatnonzero(several & ~random)
    shared = np.concatenate([codes, points])
    symbol = np.full(zero + 1, len(shared))
    symbol[stds:] += 1
    symbol[shared] = np.arange(len(shared))
    symbols = np.where(mixed, len(shared) + 2, symbol[labels]).astype(np.int32)
    active = mixed | (labels != zero)
    outliers, lone = (labels[active & (symbols == len(shared) + kind)] for kind in (0, 1))
    sizes = [int(part.sum()) for part in np.split(active, np.cumsum(layout.sizes)[:-1])]
    parts = {
        "mask": Part("bool", active.shape, "mask", pack_masks(active, [slot.memory_shape for slot in layout])),
        "labels": Part("int32", (sum(sizes),), "symbols", pack_symbols(symbols[active], sizes, len(shared) + 3)),
    }
    if len(blended):
        coded = pack_symbols(symbol[partners].ravel().astype(np.int32), [partners.size], len(codes))
        shares = _whole_shares(posterior.logits.double().softmax(1).cpu().numpy())
        parts["blends.partners"] = Part("int32", partners.shape, "symbols", coded)
        parts["blends.shares"] = Part("uint8", shares.shape, "planes", pack(shares.ravel()))
    index = dict(zip(_VALUES, map(torch.from_numpy, (codes, outliers, points, lone)), strict=True))
    values = {f"{kind}.{name}": getattr(posterior, name).cpu()[index[kind]] for kind, name in value_names(posterior)}
    return Kinds(*map(len, index.values())), values, parts


def value_names(posterior: SharedPosterior) -> list[tuple[str, str]]:
    """Return pairs of a kind of code and a value that it has."""
    pairs = [(kind, name) for kind, names in _VALUES.items() for name in names]
    return [pair for pair in pairs if posterior.scheme.has_factors or pair[1] != "factors"]


def _whole_shares(alpha: Array) -> Array:
    """Round shares that sum to 1 to integers that sum to 255: down, and up those that lost most."""
    down = np.floor(alpha * _SHARES + 1e-9)
    missing = np.rint(_SHARES - down.sum(1, keepdims=True))
    rank = np.argsort(np.argsort(-(alpha * _SHARES - down), 1, kind="stable"), 1, kind="stable")
    return (down + (rank < missing)).astype(np.uint8)


def join(
    parts: Mapping[str, Part], layout: Layout, codes: int, points: int, nearest: int
) -> tuple[Kinds, dict[str, Tensor]]:
    """Decode the labels and blends that `split` encoded."""
    active = unpack_masks(needed(parts, "mask", "mask", (layout.numel,)).data, [slot.memory_shape for slot in layout])
    sizes = [int(part.sum()) for part in np.split(active, np.cumsum(layout.sizes)[:-1])]
    shared = codes + points
    symbols = unpack_symbols(needed(parts, "labels", "symbols", (sum(sizes),)).data, sizes, shared + 3)
    alone, lone, mixed = (symbols == shared + kind for kind in range(3))
    kinds = Kinds(codes, int(alone.sum()), points, int(lone.sum()))
    symbols[(symbols >= codes) & (symbols < shared)] += kinds.outliers
    symbols[alone] = codes + np.arange(kinds.outliers)
    symbols[lone] = codes + kinds.outliers + points + np.arange(kinds.lone_points)
    shape = (int(mixed.sum()), nearest)
    partners, shares = np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
    if shape[0]:
        count = math.prod(shape)
        coded = needed(parts, "blends.partners", "symbols", shape)
        partners = unpack_symbols(coded.data, [count], codes).reshape(shape).astype(np.int64)
        shares = unpack(needed(parts, "blends.shares", "planes", shape).data, np.uint8, count).reshape(shape)
        symbols[mixed] = partners[:, 0]  # the label of a blended weight has no effect
    labels, places = np.full(layout.numel, sum(kinds), np.int32), np.flatnonzero(active)
    labels[places] = symbols
    found = {"labels": labels, "blended": places[mixed], "partners": partners, "logits": _LOGITS[shares]}
    return kinds, {name: torch.from_numpy(array) for name, array in found.items()}
