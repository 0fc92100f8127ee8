"""A call that tensors support works on `Moments`, or raises `UnsupportedOperation` with the name of the function."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import leanbayes as lb


def _value() -> lb.Moments:
    generator = torch.Generator().manual_seed(0)
    return lb.Moments(torch.rand(3, 4, 4, generator=generator), torch.full((3, 4, 4), 0.01))


WITHOUT_FORMULA: dict[str, tuple[Callable[[Any], Any], str]] = {
    "clamp by a bool": (lambda x: x.clamp(True), "clamp"),
    "power of bools": (lambda x: torch.pow(x, torch.ones(4, dtype=torch.bool)), "pow"),
    "no copies": (lambda x: x.repeat(0, 1, 2), "repeat"),
    "division by 0": (lambda x: x / 0, "div"),
    "and": (lambda x: x & True, "__and__"),
    "remainder in place": (lambda x: x.__imod__(2), "__imod__"),
    "reverse remainder": (lambda x: 2 % x, "__rmod__"),
    "numpy": (lambda x: np.asarray(x), "__array__"),
    "in": (lambda x: 1 in x, "__contains__"),
}


@pytest.mark.parametrize(("call", "name"), WITHOUT_FORMULA.values(), ids=list(WITHOUT_FORMULA))
def test_the_function_is_named(call: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(lb.UnsupportedOperation, match=name):
        call(_value())


def test_wrong_calls_raise_the_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        _value().reshape(5, 5)
    with pytest.raises(IndexError):
        _value().sum(7)
    with pytest.raises(TypeError):
        operator.add(_value(), "x")


def test_plus() -> None:
    x = _value()
    assert (+x) is x
