"""Quantized values are within half a step of the originals, and quantizing them again changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import leanbayes as lb
from leanbayes.core.quantization import dequantize, quantize

FLOATS = st.floats(-1e6, 1e6, width=32).filter(lambda value: value == 0 or abs(value) > 1e-20)


@given(st.lists(FLOATS, max_size=30), st.integers(2, 8))
def test_values_are_within_half_a_step_and_quantize_to_themselves(values: list[float], bits: int) -> None:
    original = torch.tensor(values, dtype=torch.float32)
    codes, scale = quantize(original, bits)
    most = 2 ** (bits - 1) - 1
    assert codes.dtype == torch.int8
    assert codes.abs().amax() <= most if len(values) else scale == 0
    rounded = dequantize(codes, scale).float()
    assert ((rounded - original).abs() <= 0.5001 * scale).all()
    again, same = quantize(rounded, bits)
    assert same == scale
    assert torch.equal(again, codes)


def test_values_that_are_not_finite_raise_an_error() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(lb.LeanBayesError, match="NaN or infinite"):
            quantize(torch.tensor([1.0, value]))
