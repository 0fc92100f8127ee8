"""Networks by their names, made to fit the shape of the inputs and the number of outputs."""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leanbayes.errors import LeanBayesError
from leanbayes.models.checks import check_counts, check_image
from leanbayes.models.cnn import lenet5, small_cnn
from leanbayes.models.libraries import from_timm, from_torchvision
from leanbayes.models.mlp import lenet_300_100, mlp
from leanbayes.models.resnet import resnet18, resnet20, resnet50, resnet101
from leanbayes.models.unet import unet
from leanbayes.models.vit import vit_base, vit_small, vit_tiny
from leanbayes.models.wide_resnet import wrn_28_10

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
    """A builder, and what of its arguments follows from the data."""

    build: Callable[..., nn.Module]
    arguments: Callable[[Shape, int], dict[str, Any]]

    def options(self) -> list[str]:
        """The arguments that a user may give."""
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
    "vit-base": _Network(vit_base, _image),
    "vit-small": _Network(vit_small, _image),
    "vit-tiny": _Network(vit_tiny, _image),
    "wrn-28-10": _Network(wrn_28_10, _any_size),
}
_LIBRARIES = {"timm": from_timm, "torchvision": from_torchvision}

NAMES = tuple(sorted(_NETWORKS))


def build(name: str, input_shape: Shape, outputs: int, *, seed: int | None = None, **options: Any) -> nn.Module:
    """Build a network by name: one of `NAMES`, however it is written, or `timm:NAME` or `torchvision:NAME`.

    input_shape: that of one example; an image is (channels, height, width). outputs: classes, or values to predict.
    seed: the same one gives the same weights, and leaves the global random state alone. options: the network's own,
    such as `hidden`, `width`, `stem` or `patch`; the libraries' networks also take `pretrained`.
    """
    if isinstance(input_shape, int) or not input_shape:
        raise LeanBayesError(f"input_shape={input_shape!r} must be that of an example, such as (784,) or (3, 32, 32).")
    shape = tuple(input_shape)
    check_counts(outputs=outputs, **{f"input_shape[{number}]": size for number, size in enumerate(shape)})
    library, _, rest = name.partition(":")
    try:
        with _seeded(seed):
            if rest and library.lower() in _LIBRARIES:
                return _LIBRARIES[library.lower()](rest, shape, outputs, **options)
            return _build_own(name, shape, outputs, options)
    except LeanBayesError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise LeanBayesError(f"{name} cannot be built for {shape} with {given or 'no options'}: {error}") from None


def _build_own(name: str, shape: Shape, outputs: int, options: dict[str, Any]) -> nn.Module:
    known = {_bare(own): own for own in NAMES}
    if _bare(name) not in known:
        close = [known[bare] for bare in difflib.get_close_matches(_bare(name), known, n=3)]
        hint = f"perhaps you mean {' or '.join(close)}; " if close else ""
        raise LeanBayesError(
            f"{name!r} is no network: {hint}there are {', '.join(NAMES)}, timm:NAME and torchvision:NAME."
        )
    own = known[_bare(name)]
    network = _NETWORKS[own]
    for option in options:
        if option not in network.options():
            allowed = ", ".join(network.options()) or "none"
            raise LeanBayesError(f"{own} has no option {option!r}: it has {allowed}.")
    return network.build(**{**network.arguments(shape, outputs), **options})


def _bare(name: str) -> str:
    """A name without its case and its separators."""
    return re.sub(r"[-_ ]", "", name.lower())


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from a seed inside, and put the global random state back."""
    if seed is None:
        yield
        return
    device = torch.get_default_device()
    devices = [device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for generator in [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]:
            generator.manual_seed(seed)
        yield
