"""Quantization of numbers to a few bits.

A scale has 12 significant bits, so its multiples are exact: quantizing values twice changes nothing.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError

Precision = Literal["fp16", "int8", "fp32"]
_SIGNIFICANT = 12


def check_precision(name: str, precision: str) -> None:
    """Raise an error for an unknown precision."""
    if precision not in get_args(Precision):
        raise LeanBayesError(f"{name}={precision!r} is unknown: use 'fp16', 'int8' or 'fp32'.")


def quantize(values: Tensor, bits: int = 8) -> tuple[Tensor, float]:
    """Round to integer multiples of one scale, at most 2^(bits-1) - 1 in absolute value."""
    most = 2 ** (bits - 1) - 1
    if not values.isfinite().all():
        raise LeanBayesError("Some values are NaN or infinite: check the training for NaN.")
    scale = _rounded_up(float(values.abs().max()) / most) if values.numel() else 0.0
    codes = (values.double() / (scale or 1.0)).round()
    return codes.to(torch.int8 if bits <= 8 else torch.int32), scale


def dequantize(codes: Tensor, scale: float) -> Tensor:
    """Undo `quantize`, in double precision."""
    return codes.double() * scale


def _rounded_up(scale: float) -> float:
    fraction, exponent = math.frexp(scale)
    return math.ldexp(math.ceil(math.ldexp(fraction, _SIGNIFICANT)), exponent - _SIGNIFICANT)
