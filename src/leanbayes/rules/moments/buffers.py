"""Memory of results that are not needed any more."""

import torch
from torch import Tensor

from leanbayes.core import noise


def spent(x: Tensor) -> Tensor | None:
    """Return a tensor that is not needed any more as `out=` of the next operation, if gradients do not need it either.

    New memory is expensive on a CPU: half of the time of a ReLU would be page faults.
    """
    needed = torch.is_grad_enabled() or torch.compiler.is_compiling() or noise.in_transform()
    return None if needed else x
