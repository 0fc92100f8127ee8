"""Lets torchvision be imported beside a torch that its compiled operators were not built for."""

import importlib
import sys
import warnings

import torch


def _import_torchvision() -> torch.library.Library | None:
    """Import torchvision; where its compiled operators do not load, declare those that its import asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the image reader, which fails to load too and no test uses
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


LIBRARY = _import_torchvision()  # kept: the declarations live as long as it does
