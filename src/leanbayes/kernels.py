"""Where fused GPU kernels serve: draw and KL in one pass over the weights, noise made in registers and never stored.

Each has an equal in plain torch (`gaussian.py`, `noise.py`), which runs everywhere else. `torch.compile` launches them
as its own, and a compiled and an eager step see the same noise.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

_INSTALLED = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
ops: Any = importlib.import_module("leanbayes._triton") if _INSTALLED else None


def usable(tensor: Tensor) -> bool:
    """Whether the fused kernels serve this tensor: on a CUDA device, with Triton, not in double precision."""
    return _INSTALLED and tensor.is_cuda and tensor.dtype != torch.float64
