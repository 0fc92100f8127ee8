"""Build networks by name for the shape of the inputs and the number of outputs."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn

from leanbayes.core.arguments import checked
from leanbayes.core.names import find, suggestion
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_counts, check_image
from leanbayes.networks.cnn import lenet5, small_cnn
from leanbayes.networks.libraries import from_timm, from_torchvision
from leanbayes.networks.mlp import lenet_300_100, mlp
from leanbayes.networks.resnet import resnet18, resnet20, resnet50, resnet101
from leanbayes.networks.unet import unet
from leanbayes.networks.vit import VisionTransformer, vit_base, vit_small, vit_tiny
from leanbayes.networks.wide_resnet import wrn_28_10

Shape = tuple[int, ...]


def _flat(shape: Shape, outputs: int) -> dict[str, Any]:
    return {"inputs": math.prod(shape), "outputs": outputs}


def _image(shape: Shape, outputs: int) -> dict[str, Any]:
    return {"input_shape": check_image(shape), "num_classes": outputs}


def _any_size(shape: Shape, outputs: int) -> dict[str, Any]:
    return {"channels": check_image(shape)[0], "num_classes": outputs}


def _with_stem(shape: Shape, outputs: int) -> dict[str, Any]:
    return {**_any_size(shape, outputs), "stem": "small" if min(shape[1:]) < 64 else "imagenet"}


def _halved_four_times(shape: Shape, outputs: int) -> dict[str, Any]:
    if min(check_image(shape)[1:]) < 16:
        raise LeanBayesError(f"The U-Net needs images of at least 16×16 pixels, not {shape[1]}×{shape[2]}.")
    return _any_size(shape, outputs)


@dataclass(frozen=True)
class _Network:
    """A builder, and its arguments that follow from the data."""

    build: Callable[..., nn.Module]
    arguments: Callable[[Shape, int], dict[str, Any]]

    def options(self) -> list[str]:
        """Return the arguments that a user may pass."""
        from_data = {"inputs", "outputs", "input_shape", "channels", "num_classes"}
        return sorted(set(inspect.signature(self.build).parameters) - from_data)


_NETWORKS = {
    "lenet-300-100": _Network(lenet_300_100, _flat),
    "lenet-5": _Network(lenet5, _image),
    "mlp": _Network(mlp, _flat),
    "resnet-101": _Network(resnet101, _with_stem),
    "resnet-18": _Network(resnet18, _with_stem),
    "resnet-20": _Network(resnet20, _any_size),
    "resnet-50": _Network(resnet50, _with_stem),
    "small-cnn": _Network(small_cnn, _image),
    "unet": _Network(unet, _halved_four_times),
    "vit": _Network(VisionTransformer, _image),
    "vit-base": _Network(vit_base, _image),
    "vit-small": _Network(vit_small, _image),
    "vit-tiny": _Network(vit_tiny, _image),
    "wrn-28-10": _Network(wrn_28_10, _any_size),
}
_LIBRARIES = {"timm": from_timm, "torchvision": from_torchvision}

_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1  # of torch's generators

NAMES = tuple(sorted(_NETWORKS))


@checked(
    input_shape="that of one example, such as (784,)",
    seed="a whole number from -2**63 to 2**64 - 1",
)
def build(name: str, input_shape: Shape, outputs: int, *, seed: int | None = None, **options: Any) -> nn.Module:
    """Build a network by name.

    Args:
        name: one of `NAMES` (case, hyphens and underscores do not matter), `timm:NAME` or `torchvision:NAME`.
        input_shape: shape of one example; (channels, height, width) for images.
        outputs: number of classes, or of values to predict.
        seed: seed of the initial weights. With a seed the global random state is left unchanged; None uses it.
        options: settings of the network itself, such as `hidden`, `width`, `stem` or `patch`. Networks of timm and
            torchvision also take `pretrained`.

    Returns:
        The network, with newly initialized weights unless `pretrained` is set.

    Raises:
        LeanBayesError: The name or an option is unknown, the network does not take inputs of this shape, the seed is
            too large, or the library is not installed.

    Example:
        >>> from leanbayes.networks import build
        >>> build("mlp", (4,), 2, seed=0, hidden=[8])
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=4, out_features=8, bias=True)
          (2): ReLU()
          (3): Linear(in_features=8, out_features=2, bias=True)
        )
    """
    if isinstance(input_shape, int) or not input_shape:
        raise LeanBayesError(f"input_shape={input_shape!r} must be that of one example, such as (784,) or (3, 32, 32).")
    shape = tuple(input_shape)
    check_counts(outputs=outputs, **{f"input_shape[{number}]": size for number, size in enumerate(shape)})
    if seed is not None and (not isinstance(seed, Integral) or not _LEAST_SEED <= seed <= _MOST_SEED):
        raise LeanBayesError(f"seed={seed!r} must be a whole number from -2**63 to 2**64 - 1.")
    library, rest = library_of(name)
    try:
        with _seeded(seed):
            if library:
                return _LIBRARIES[library](rest, shape, outputs, **options)
            return _build_own(name, shape, outputs, options)
    except LeanBayesError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError, ArithmeticError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise LeanBayesError(f"{name} cannot be built for {shape} with {given or 'no options'}: {error}") from None


def library_of(name: str) -> tuple[str, str]:
    """Split a name into the library, or "" for our own networks, and the name of the network in it."""
    library, _, rest = name.partition(":")
    return (library.lower(), rest) if rest and library.lower() in _LIBRARIES else ("", name)


def own_options(name: str) -> list[str]:
    """Return the options of one of our own networks."""
    return _NETWORKS[_own_name(name)].options()


def _own_name(name: str) -> str:
    own = find(name, NAMES)
    if own is None:
        listed = f"use {', '.join(NAMES)}, timm:NAME or torchvision:NAME."
        raise LeanBayesError(f"There is no network {name!r}: {suggestion(name, NAMES, listed)}")
    return own


def _build_own(name: str, shape: Shape, outputs: int, options: dict[str, Any]) -> nn.Module:
    own = _own_name(name)
    network = _NETWORKS[own]
    for option in options:
        if option not in network.options():
            allowed = ", ".join(network.options()) or "none"
            raise LeanBayesError(f"{own} has no option {option!r}: it has {allowed}.")
    return network.build(**{**network.arguments(shape, outputs), **options})


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the global random state inside the block, and restore it afterwards."""
    if seed is None:
        yield
        return
    device = torch.get_default_device()
    devices = [device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for generator in [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]:
            generator.manual_seed(seed)
        yield
