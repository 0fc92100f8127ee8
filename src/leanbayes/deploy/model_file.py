"""One safetensors file per model: tensors, and a versioned JSON header of settings. No code in it is ever executed."""

import contextlib
import itertools
import math
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from leanbayes.core import config
from leanbayes.core.arguments import checked
from leanbayes.core.files import written_whole
from leanbayes.core.json_values import parse_untrusted
from leanbayes.core.network import is_finite
from leanbayes.core.parts import whole
from leanbayes.deploy.header import (
    FLOATS,
    aliases_of,
    bayesian_weights_of,
    damaged,
    extra_state_of,
    header_text,
    is_intact,
    layout_of,
    moment_layers_of,
    moment_margins_of,
    moment_scale_of,
    one_line,
    refusing_damage,
    signed,
    versions_of,
)
from leanbayes.deploy.model_settings import Settings, assemble_for, other_network, policy_of, read_settings, settings_of
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.methods.baselines.cyclical_sgmcmc import CyclicalSGMCMC
from leanbayes.methods.baselines.ensemble import Ensemble
from leanbayes.methods.baselines.snapshots import SnapshotMethod
from leanbayes.methods.baselines.swag import SWAG
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.draw import StochasticNetwork

if TYPE_CHECKING:
    from leanbayes.posteriors.sharded import ShardedPosterior

VERSION = 1
_HEADER = "leanbayes"
_OWN = "posterior."
CORRECTION = "corrections."  # the start of the names of corrections of layers
_NETWORK, _MEMBERS = "network.", "network.networks."
_COPY = re.compile(rf"^{re.escape(_MEMBERS)}\d+\.")
_MOST_BARE = 1000  # members of which a file need not have tensors: it is without the base, or they share all
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BASE = "base"  # false in the header of a file without the parameters that are not trained
_EXTRA = "_extra_state"  # the end of the name that torch gives to the result of `get_extra_state`
_MOST_START, _MOST_TENSORS = 1 << 24, 1 << 17  # bytes of the list of tensors, and its entries
_REMEDY = "save the model again"


@checked()
def save(bnn: BayesianModel, path: str | os.PathLike[str], base: bool | None = None) -> None:
    """Save a model to one safetensors file, which `lb.load` reads. Nothing in the file is ever executed.

    Args:
        bnn: The model. If it is sharded, all processes must call it, and the first one writes the file.
        path: The file to write. It is replaced at once: a crash or a full disk leaves an older file intact.
        base: Whether to store what training does not change. With False the file has the posterior, other trainable
            parameters and running statistics only, and `lb.load` takes the rest from the network that it is given. By
            default False for networks of peft, whose adapters are small, and True for others.

    Raises:
        LeanBayesError: The file cannot be written, a weight is NaN or infinite, or a module has an extra state that a
            file cannot store.

    Example:
        >>> lb.save(bnn, "model.safetensors")
        >>> bnn = lb.load("model.safetensors", make_network())
    """
    base = not hasattr(bnn.network, "peft_config") if base is None else base
    tensors, rest = split_state(bnn, base)
    parameters = {name for name, _ in bnn.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        if not name.isprintable():
            raise LeanBayesError(f"The name {name} has control characters, so it cannot be saved: rename its module.")
        if _must_be_finite(name, name in parameters) and not is_finite(tensor):
            raise LeanBayesError(
                f"{name} has NaN or infinite values, so the model is not saved: train it again, with a lower rate."
            )
    own = {name.removeprefix(_OWN): tensors.pop(name) for name in [*tensors] if name.startswith(_OWN)}
    tensors |= {_OWN + name: tensor for name, tensor in bnn.posterior.to_file(own).items()}
    tensors |= {CORRECTION + name: tensor.float().contiguous() for name, tensor in bnn.moment_layers.items()}
    policy = {} if bnn.policy is None else {"policy": config.encode(bnn.policy)}
    text = header_text({"version": VERSION, **settings_of(bnn), **policy, **rest})
    with only_first(bnn) as is_first:
        if is_first:
            _write(path, tensors, signed(text, tensors))


def _write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: str) -> None:
    with written_whole(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={_HEADER: header})
        except SafetensorError as error:
            raise OSError(str(error)) from None


@contextlib.contextmanager
def only_first(bnn: BayesianModel) -> Iterator[bool]:
    """Yield whether this process writes a file: of the processes of a sharded model the first, and the others wait."""
    if bnn.root_units is None:
        yield True
        return
    group = _sharded(bnn).group
    try:
        yield group.is_first
    finally:  # also if the file cannot be written, so that the others do not wait forever
        group.wait()


def _sharded(bnn: BayesianModel) -> "ShardedPosterior":
    posterior: Any = bnn.posterior
    return posterior


def _state_of(bnn: BayesianModel) -> dict[str, Any]:
    """Return the state of a model. A sharded one is gathered, on the CPU, to that of the model that was sharded."""
    state = bnn.state_dict()
    if bnn.root_units is None:
        return state
    found = OrderedDict[str, Any]((name, value) for name, value in state.items() if not name.startswith(_OWN))
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = whole(value).cpu()
    found.update({_OWN + name: value for name, value in _sharded(bnn).unsharded_state().items()})
    found._metadata = _metadata(state)  # type: ignore[attr-defined]
    return found


def split_state(bnn: BayesianModel, base: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a model, and the rest of its state for the header of a file.

    The rest is: names of tensors that are stored under another name, versions of modules other than 1, and results of
    `get_extra_state` that are not tensors. Without the base, it is what training changes.
    """
    state = _state_of(bnn)
    if not base:
        parameters = bnn.named_parameters(remove_duplicate=False)
        trained = {_COPY.sub(_NETWORK, name) for name, p in parameters if p.requires_grad}
        for name in [*state]:
            own = not name.startswith(_NETWORK) or name.rpartition(".")[2] in _STATISTICS
            # What a wrapper counts or measures; the networks that it has are behind another dot.
            own |= isinstance(bnn.network, StochasticNetwork) and "." not in name.removeprefix(_NETWORK)
            if not own and _COPY.sub(_NETWORK, name) not in trained:  # a chain trains one of its copies at a time
                del state[name]
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    for name, value in extra.items():
        if not _is_json(value):
            raise LeanBayesError(
                f"{name} is neither a tensor nor made of numbers, strings, lists and dicts, so it cannot be saved: "
                "change get_extra_state of its module."
            )
    tensors, aliases = without_aliases({name: value for name, value in state.items() if name not in extra})
    found = {name: local.get("version") for name, local in _metadata(state).items()}
    versions = {name: version for name, version in found.items() if type(version) is int and version != 1}
    rest = {"aliases": aliases, "module_versions": versions, **({"extra_state": extra} if extra else {})}
    return tensors, rest if base else {**rest, _BASE: False}


def _metadata(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what torch stores about each module beside its state: its version."""
    return getattr(state, "_metadata", {})


def _is_json(value: Any) -> bool:
    """Whether JSON stores a value exactly."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def read_model(path: str | os.PathLike[str], model: nn.Module) -> BayesianModel:
    """Read a file that `save` wrote into a network of the same architecture, whose weights do not matter."""
    with refusing_damage(path, _REMEDY):
        header, tensors = _read(path)
        settings = read_settings(header, model, path)
        _check_members(settings, tensors, model, with_base=header.get(_BASE) is not False)
        bnn = assemble_for(settings, model, path)
        tensors |= {alias: tensors[name] for alias, name in aliases_of(header).items()}
        own = {name.removeprefix(_OWN): tensors.pop(name) for name in [*tensors] if name.startswith(_OWN)}
        tensors |= {_OWN + name: tensor for name, tensor in bnn.posterior.from_file(own).items()}
        corrections = take_corrections(tensors, settings.moment_layers)
        load_tensors(bnn, tensors, header, path)
        bnn.policy = policy_of(header)
        if header.get(_BASE) is False:  # the parameters of the base are not trained, whatever their names are here
            absent = {name for name, _ in bnn.named_parameters() if name not in tensors}
            settings = settings._replace(frozen=settings.frozen | absent)
        return settings.give(bnn, corrections)


def take_corrections(tensors: dict[str, Tensor], channels: Mapping[str, int]) -> dict[str, Tensor]:
    """Remove the corrections of layers from the tensors of a file, check them, and return them by weight."""
    found = {name: tensors.pop(CORRECTION + name) for name in channels}
    for name, tensor in found.items():
        shaped = tensor.shape == (3, channels[name]) and tensor.dtype in FLOATS
        if not shaped or not is_finite(tensor) or not (tensor[2] >= 0).all():
            raise ValueError(f"the correction of {name} is wrong")
    return found


def _check_members(settings: Settings, tensors: Mapping[str, Tensor], model: nn.Module, with_base: bool) -> None:
    """Raise an error unless a file has what all members of an ensemble have alone, before these are allocated."""
    method, bayesian = settings.method, {name for slot in settings.layout for name in slot.names}
    alone = sum(p.numel() for name, p in model.named_parameters() if name not in bayesian)
    if isinstance(method, (Ensemble, CyclicalSGMCMC)):
        expected = method.members
    elif isinstance(method, SnapshotMethod):
        expected = method.snapshots
    elif isinstance(method, SWAG):
        expected, alone = method.copies(model), 0  # which have buffers of their own only
    else:  # other members share their weights
        return
    stored = {name: tensor for name, tensor in tensors.items() if name.startswith(_MEMBERS)}
    members = {name.removeprefix(_MEMBERS).partition(".")[0] for name in stored}
    if expected <= _MOST_BARE and not (with_base and (members or alone)):
        return
    if len(members) != expected or sum(tensor.numel() for tensor in stored.values()) < expected * alone:
        raise ValueError(f"it has the weights of {len(members)} members instead of {expected}")


def describe_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a file from its header: its settings, its number of Bayesian weights, the bytes of each part."""
    with refusing_damage(path, _REMEDY):
        header, parts = _read_header(path)
        layout = layout_of(header)
        found = {key: header[key] for key in ("version", "method", "likelihood", "rule", "trained_rule")}
        if not isinstance(header["method"], dict) or not isinstance(header["likelihood"], dict):
            raise ValueError("its header has a wrong method or likelihood")
        found["moment_scale"] = moment_scale_of(header)
        policy = policy_of(header)
        found["policy"] = None if policy is None else str(policy)
        found["moment_layers"] = moment_layers_of(header, layout)
        found["moment_margins"] = [list(fit) for fit in moment_margins_of(header)]
        found["bayesian_weights"] = bayesian_weights_of(header, layout)
    found["bytes"] = Path(path).stat().st_size
    found["weights"] = layout.numel
    found["layers"] = {slot.name: list(slot.shape) for slot in layout}
    found["parts"] = parts
    return found


def without_aliases(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one name of tensors that share memory, such as tied parameters: safetensors cannot store sharing."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages = set()
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
            continue
        first[place] = name
        storage = tensor.untyped_storage().data_ptr()
        shared = storage in storages  # a view of another tensor is stored separately
        storages.add(storage)
        kept[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    return kept, aliases


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a safetensors file, and convert its errors, also those inside the block."""
    if not os.path.isfile(path):
        raise FileFormatError(f"There is no file {path}: check the path.")
    try:
        with open(path, "rb") as start:
            length = start.read(8)
        if len(length) == 8 and _MOST_START < struct.unpack("<Q", length)[0] < os.path.getsize(path):
            raise FileFormatError(f"{path} has a list of tensors of more than {_MOST_START >> 20} MiB: check the path.")
        with safe_open(path, framework="pt") as file:
            if len(file.keys()) > _MOST_TENSORS:
                raise FileFormatError(f"{path} has more than {_MOST_TENSORS:,} tensors: check the path.")
            yield file
    except (SafetensorError, OSError) as error:
        raise FileFormatError(
            f"{path} is truncated or not a safetensors file ({one_line(error)}): {_REMEDY}."
        ) from None


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and all tensors, and check that no bit has changed. Files of version 0.1 have no digest."""
    with _opened(path) as file:
        text, header = _header(file, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if ("digest" in header or "module_versions" in header) and not is_intact(text, tensors):
        raise ValueError("its digest does not match its content")
    return header, tensors


def _read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Read the header, and the size of each tensor of the posterior and of the rest of the model."""
    parts: dict[str, dict[str, int]] = {}
    with _opened(path) as file:
        _, header = _header(file, path)
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            part = parts.setdefault(
                name if name.startswith("posterior.") else name.partition(".")[0], {"numbers": 0, "bytes": 0}
            )
            numbers = math.prod(view.get_shape())
            part["numbers"] += numbers
            part["bytes"] += numbers * _bits(view.get_dtype()) // 8
    return header, parts


def _bits(dtype: str) -> int:
    """Return the bits of a safetensors dtype, which are in its name: F32, BF16, I64, F8_E4M3; BOOL has 8."""
    digits = "".join(itertools.takewhile(str.isdigit, dtype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    return int(digits or 8)


def _header(file: Any, path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return the header, as text and as values."""
    text: str = (file.metadata() or {}).get(_HEADER, "null")
    try:
        header = parse_untrusted(text)
    except ValueError as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise FileFormatError(f"{path} is a safetensors file, but not one that leanbayes saved: check the path.")
    version = header.get("version")
    if type(version) is not int or version != VERSION:
        raise FileFormatError(
            f"{path} has format version {one_line(version)}, but this leanbayes reads {VERSION}: update leanbayes."
        )
    return text, header


@torch.no_grad()
def load_tensors(
    bnn: BayesianModel, tensors: dict[str, Tensor], header: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    """Copy all tensors into the model, bit by bit; parameters take the dtypes of the file."""
    if bnn.posterior.sizes_vary:
        for name, tensor in [*bnn.posterior.named_parameters(), *bnn.posterior.named_buffers()]:
            saved = tensors.get(f"posterior.{name}")
            if saved is not None and saved.shape != tensor.shape:
                tensor.data = tensor.new_empty(saved.shape)
    state, found = bnn.state_dict(), OrderedDict[str, Any](extra_state_of(header) | tensors)
    parameters = {name for name, _ in bnn.named_parameters(remove_duplicate=False)}
    whole = header.get(_BASE) is not False
    for name in [*state, *found]:
        if name not in found and not whole and name.startswith(_NETWORK):
            continue
        if name not in found:
            raise other_network(path, f"it does not have {name}, but this model does")
        if name not in state:
            raise other_network(path, f"it has {name}, but this model does not")
        if name.rpartition(".")[2] != _EXTRA:
            _check_tensor(name, found[name], state[name], name in parameters, path)
    if len({found[_OWN + name].dtype for name, _ in bnn.posterior.named_parameters()}) > 1:
        raise ValueError("the parameters of its posterior have several dtypes")
    for name, tensor in [*bnn.named_parameters(), *bnn.named_buffers()]:
        if name in tensors and tensors[name].dtype != tensor.dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)
    metadata, versions = _metadata(state), versions_of(header)
    for name, local in metadata.items():
        if versions is not None and type(local.get("version")) is int:
            local["version"] = versions.get(name, 1)
    found._metadata = metadata  # type: ignore[attr-defined]
    bnn.load_state_dict(found, strict=whole)


def _check_tensor(name: str, saved: Any, present: Tensor, is_parameter: bool, path: str | os.PathLike[str]) -> None:
    """Check the shape, dtype and values of a tensor. A buffer of the network, such as a mask, may be infinite."""
    if not isinstance(saved, Tensor):
        raise ValueError(f"{name} is not a tensor")
    if saved.shape != present.shape:
        shapes = f"{tuple(saved.shape)}, but this model has {tuple(present.shape)}"
        raise other_network(path, f"it has {name} of shape {shapes}")
    if saved.dtype != present.dtype and not (saved.dtype in FLOATS and present.dtype in FLOATS):
        raise ValueError(f"{name} has the dtype {saved.dtype}")
    if _must_be_finite(name, is_parameter) and not is_finite(saved):
        raise damaged(path, f"{name} has NaN or infinite values", "train the model again, or load another file")


def _must_be_finite(name: str, is_parameter: bool) -> bool:
    """Whether NaN or infinity in a tensor is a mistake; a buffer of the network, such as a mask, may have them."""
    return is_parameter or name.endswith((".running_mean", ".running_var")) or name.startswith((_OWN, "likelihood."))
