"""Errors of torch in a forward pass that Bayesian weights cause, as sentences that name the operation and a remedy."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from leanbayes.core.tensor_like import TensorLike
from leanbayes.errors import LeanBayesError, UnsupportedOperation

_CAST = re.compile(r"([\w.]+)\(\) Expected a value of type '[^']*' for argument '(\w+)' but instead found type '(\w+)'")
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# What torch says if a function has no gradient: a name is its first group.
_WITHOUT_GRADIENT = {
    re.compile(r"derivative for (?:aten::|')?(\w+)\S*(?: \w+')? is not implemented"): "torch.{}",
    re.compile(r"(\w+)\(\): functions with out=\.\.\. arguments"): "torch.{} with out=",
    re.compile(r"modified by an inplace operation.*output \d+ of (\w+?)(?:Backward\d*)?[, ]", re.DOTALL): (
        "a change in place of the result of {}"
    ),
    re.compile(r"Can't call (numpy)\(\) on Tensor that requires grad"): "torch.Tensor.{}",
    re.compile(r"support the (deepcopy) protocol"): "copy.{} of an activation",
}
_OTHER_DTYPE = re.compile(r"(?:same dtype, but got|Input type|scalar type) \(?(?:torch\.)?(\w+)")
_DTYPES = {
    "bool": torch.bool,
    "int": torch.int32,
    "long": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "complexfloat": torch.complex64,
    "complexdouble": torch.complex128,
}


@contextlib.contextmanager
def explained_casts() -> Iterator[None]:
    """Replace the error of a function that got a tensor-like value but takes plain tensors only by a sentence.

    Such are functions that were compiled with `torch.jit.script`, transforms of `torch.func`, and `torch.tensor`.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, LeanBayesError):
            raise
        kinds = [one.__name__ for one in _all_kinds(TensorLike)]
        cast = _CAST.match(str(error))
        if cast is not None and cast[3] in kinds:
            raise scripted(cast[1], f"{cast[2]} is a {cast[3]}") from None
        got = next((kind for kind in kinds if re.search(rf"\b{kind}['(]", str(error))), None)
        if got is None and _reads_numbers(error):
            got = "random numbers"
        if got is None:
            raise
        raise UnsupportedOperation(
            f'{_code_of(error)} takes plain tensors only, and got {got}: use bnn.using("sample"), or another operation.'
        ) from error


def _reads_numbers(error: BaseException) -> bool:
    """Whether a function reads a tensor-like value as a sequence of numbers, down to the last dimension."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is TensorLike.__len__.__code__ for frame, _ in frames)


def _code_of(error: BaseException) -> str:
    """Return the expression in the network that raised an error, or its function if there is no source code."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_PACKAGES)]
    last = (outside or frames)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).rstrip()
    columns = (last.colno, last.end_colno) if last.lineno == last.end_lineno else (None, None)
    text = line.encode()[slice(*columns)].decode(errors="replace").strip()
    return f"The operation {text[:100]}" if text else f"An operation in {last.name}"


@contextlib.contextmanager
def explained_gradients(rule: str) -> Iterator[None]:
    """Replace the error of a network without gradients, under a rule that needs them, by a sentence."""
    try:
        yield
    except RuntimeError as error:
        for pattern, operation in _WITHOUT_GRADIENT.items():
            found = pattern.search(str(error))
            if found is not None:
                raise UnsupportedOperation(
                    f"The rule {rule!r} needs a gradient that torch does not have, that of "
                    f'{operation.format(found[1])}: use bnn.using("sample"), or replace the operation.'
                ) from error
        raise


@contextlib.contextmanager
def explained_dtypes(inputs: Iterable[Tensor], weights: Iterable[torch.dtype]) -> Iterator[None]:
    """Replace the error of a layer whose input has another dtype than its weight by a sentence, if the inputs do."""
    try:
        yield
    except RuntimeError as error:
        found = _OTHER_DTYPE.search(str(error))
        got = None if found is None else _DTYPES.get(found[1].lower())
        needed = next((dtype for dtype in weights if dtype != got), None)
        if needed is None or got not in [tensor.dtype for tensor in inputs]:
            raise
        got_name, needed_name = (str(dtype).removeprefix("torch.") for dtype in (got, needed))
        raise LeanBayesError(
            f"The inputs are {got_name}, but the weights are {needed_name}: convert one of them, for example by "
            f"x.to(torch.{needed_name})."
        ) from error


def scripted(name: str, got: str) -> UnsupportedOperation:
    """Return the error for a function that was compiled with `torch.jit.script`."""
    return UnsupportedOperation(
        f"The torch.jit.script function {name} takes plain tensors only ({got}): start Python with PYTORCH_JIT=0 in "
        'the environment, which turns torch.jit.script off, or use bnn.using("sample").'
    )


def _all_kinds(kind: type[TensorLike]) -> Iterator[type[TensorLike]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _all_kinds(one)
