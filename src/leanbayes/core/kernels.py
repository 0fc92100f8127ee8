"""When to use the fused GPU kernels: those that draw weights and sum the KL in one pass, the mean softmax, activations.

Each kernel has an equivalent in plain torch (`gaussian.py`, `noise.py`, `expectations.py`, `exact_moments.py`) for all
other devices.
`torch.compile` launches the same kernels, so a compiled and an eager step use the same noise.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

_INSTALLED = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
ops: Any = importlib.import_module("leanbayes.core._triton") if _INSTALLED else None
softmax_ops: Any = importlib.import_module("leanbayes.core._triton_softmax") if _INSTALLED else None
activation_ops: Any = importlib.import_module("leanbayes.core._triton_activations") if _INSTALLED else None


def usable(tensor: Tensor) -> bool:
    """Whether the fused kernels support a tensor: on a CUDA device, with Triton, not in double precision."""
    return _INSTALLED and tensor.is_cuda and tensor.dtype != torch.float64
