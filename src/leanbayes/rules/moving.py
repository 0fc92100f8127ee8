"""Functions that only move the elements of a weight about, or scale them, and whether they leave copies of one.

Copies share their noise, and a layer would take them for weights of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _named(names: str) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in (torch, Tensor) for name in names.split() if hasattr(owner, name)}


_BY_NUMBER = _named("index_select gather take_along_dim repeat_interleave")
MOVING = _BY_NUMBER | _named(
    "t transpose permute movedim moveaxis swapaxes swapdims reshape reshape_as view view_as ravel flatten unflatten "
    "squeeze unsqueeze chunk split split_with_sizes tensor_split narrow select unbind __getitem__ flip roll diagonal "
    "expand expand_as broadcast_to repeat tile contiguous to type_as float half bfloat16 double clone detach"
)
KEEPING = MOVING | _named("mul multiply div divide true_divide neg negative __mul__ __rmul__ __truediv__ __neg__")
_PARTS = (int, slice, type(None), type(Ellipsis))  # of an index, which take no element twice


def copies_in(
    result: Tensor, function: Callable[..., Any], weight: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool | Tensor:
    """Whether a function that only moves or scales elements has put one of a weight into its result more than once.

    args: those after the weight. Where the values of an index decide, the answer is a tensor: nobody waits for it yet.
    """
    if result.numel() > weight.numel():
        return True
    if function is Tensor.__getitem__:
        key = args[0] if isinstance(args[0], tuple) else (args[0],)
        by_number = not all(isinstance(part, _PARTS) for part in key)
    else:
        by_number = function in _BY_NUMBER
    if not by_number:
        return False
    places = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
    taken = function(places, *args, **kwargs).flatten().sort().values
    return (taken[1:] == taken[:-1]).any()
