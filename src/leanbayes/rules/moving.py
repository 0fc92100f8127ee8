"""Functions that only move or scale the elements of a weight, and whether their results contain copies of an element.

Copies share their noise, but a layer would treat them as separate weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _named(names: str) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in (torch, Tensor) for name in names.split() if hasattr(owner, name)}


_INDEXING = _named("index_select gather take_along_dim repeat_interleave")
MOVING = _INDEXING | _named(
    "t transpose permute movedim moveaxis swapaxes swapdims reshape reshape_as view view_as ravel flatten unflatten "
    "squeeze unsqueeze chunk split split_with_sizes tensor_split narrow select unbind __getitem__ flip roll diagonal "
    "expand expand_as broadcast_to repeat tile contiguous to type_as float half bfloat16 double clone detach"
)
KEEPING = MOVING | _named("mul multiply div divide true_divide neg negative __mul__ __rmul__ __truediv__ __neg__")
MIXING = _named(
    "sum mean var std var_mean std_mean batch_norm layer_norm group_norm instance_norm rms_norm softmax"
) | {
    F.batch_norm,
    F.layer_norm,
    F.group_norm,
    F.instance_norm,
    F.interpolate,
    F.rms_norm,
    F.softmax,
}
_PARTS = (int, slice, type(None), type(Ellipsis))  # parts of an index that select no element twice


def copies_in(
    result: Tensor, function: Callable[..., Any], weight: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool | Tensor:
    """Whether the result of a function that only moves or scales elements contains an element more than once.

    Args:
        result: The result of the function.
        function: The function.
        weight: Its first argument.
        args: Its other arguments.
        kwargs: Its keyword arguments.

    Returns:
        A bool, or a tensor if it depends on the values of an index, so that the device is not synchronized.
    """
    if result.numel() > weight.numel():
        return True
    if function is Tensor.__getitem__:
        key = args[0] if isinstance(args[0], tuple) else (args[0],)
        by_index = not all(isinstance(part, _PARTS) for part in key)
    else:
        by_index = function in _INDEXING
    if not by_index:
        return False
    numbers = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
    selected = function(numbers, *args, **kwargs).flatten().sort().values
    return (selected[1:] == selected[:-1]).any()
