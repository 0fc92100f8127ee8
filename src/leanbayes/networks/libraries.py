"""Build networks of timm and torchvision by their own names."""

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from leanbayes.core.names import suggestion
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_image

NORMALIZE_INSIDE = ("googlenet", "inception_v3")  # as their pretrained weights require


def from_timm(
    name: str, input_shape: tuple[int, ...], outputs: int, *, pretrained: bool = False, **options: Any
) -> nn.Module:
    """Build a network of timm for these images and classes; `options` are those of timm.create_model."""
    channels, *sides = check_image(input_shape)
    timm = _library("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    settings = timm.get_pretrained_cfg(name)
    if settings.fixed_input_size and list(settings.input_size[1:]) != sides:
        options.setdefault("img_size", tuple(sides))
    return timm.create_model(name, pretrained=pretrained, num_classes=outputs, in_chans=channels, **options)


def from_torchvision(
    name: str, input_shape: tuple[int, ...], outputs: int, *, pretrained: bool = False, **options: Any
) -> nn.Module:
    """Build a classification or segmentation network of torchvision; `options` are those of its own builder."""
    channels, height, _ = check_image(input_shape)
    models = _library("torchvision").models
    name = name.removeprefix("segmentation/")
    known = [*models.list_models(module=models), *models.list_models(module=models.segmentation)]
    if name not in known:
        raise _unknown("torchvision", name, known)
    if channels != 3:
        raise LeanBayesError(
            f"torchvision:{name} takes 3 input channels, not {channels}: repeat the channel, or use timm:NAME."
        )
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options.setdefault("weights_backbone", None)
    if name.startswith("vit_") and height != 224:
        options.setdefault("image_size", height)
    if pretrained and name in NORMALIZE_INSIDE:
        options.setdefault("transform_input", True)
    network = models.get_model(name, weights=None, num_classes=outputs, **options)
    if pretrained:
        _load(network, models.get_model_weights(name).DEFAULT, name)
    return network


def _load(network: nn.Module, weights: Any, name: str) -> None:
    """Load pretrained weights, except for an output layer with another number of classes."""
    classes = len(weights.meta["categories"])
    new = network.state_dict()
    state = {key: tensor for key, tensor in weights.get_state_dict().items() if key in new}
    for key, tensor in list(state.items()):
        if tensor.shape == new[key].shape:
            continue
        if tensor.shape[:1] != (classes,):
            raise LeanBayesError(
                f"The pretrained {key} of torchvision:{name} does not fit images of this size: use pretrained=False."
            )
        del state[key]
    network.load_state_dict({**new, **state})


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise LeanBayesError(f"{name} is not installed: pip install {name}.") from None
    except RuntimeError as error:  # compiled for another torch
        raise LeanBayesError(
            f"{name} does not work with this version of torch ({error}): install the matching version."
        ) from error


def _unknown(library: str, name: str, known: Iterable[str]) -> LeanBayesError:
    hint = suggestion(name, known, f"see {library}'s list_models().")
    return LeanBayesError(f"{library} has no network {name!r} for images: {hint}")
