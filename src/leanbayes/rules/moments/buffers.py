"""Memory and precision of results: where to reuse memory, where compiled code has to use it, where not to round."""

import contextlib

import torch
from torch import Tensor

from leanbayes.core import noise


def spent(x: Tensor) -> Tensor | None:
    """Return a tensor that is not needed any more as `out=` of the next operation, if gradients do not need it either.

    New memory is expensive on a CPU: half of the time of a ReLU would be page faults.
    """
    needed = torch.is_grad_enabled() or torch.compiler.is_compiling() or noise.in_transform()
    return None if needed else x


def is_exporting() -> bool:
    """Whether `torch.export` traces a pass: then it calls no kernels of ours, and has no choices for the compiler.

    Inside of `torch.compile`, `torch.compiler.is_exporting()` is True up to torch 2.11. It returns this variable.
    """
    return torch.compiler._is_exporting_flag


def stored(x: Tensor) -> Tensor:
    """Return a tensor that compiled code computes once and stores, if each of its elements is used several times.

    Compiled passes compute most results again wherever they are needed (`compiled_passes`). That is right for a sum,
    which reads an element once, but an interpolation reads each element of a small map many times. The compiler stores
    a tensor before it takes a view of its memory.
    """
    if not torch.compiler.is_compiling() or is_exporting() or torch.is_grad_enabled():
        return x
    if 0 in x.stride():  # expanded from a small tensor
        return x
    return x.as_strided(x.shape, x.stride())


def exact_products(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Compute matrix products in a block in the precision of their factors, also under autocast."""
    device = like.device.type
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()  # to leave and enter autocast takes longer than a small product
    return torch.autocast(device, enabled=False)
