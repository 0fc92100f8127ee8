"""Import torchvision even if its compiled operators were built for another version of torch."""

import importlib
import sys
import warnings

import torch


def import_torchvision() -> torch.library.Library | None:
    """Import torchvision; if its compiled operators do not load, declare those that its import needs.

    Returns:
        The declarations, which must be kept alive, or None if none are needed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the image reader, which nothing here uses
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            importlib.import_module("torchvision")
            return library
    return None
