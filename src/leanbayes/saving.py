"""One safetensors file a model: tensors, and a versioned JSON header of settings. Nothing in it is ever executed."""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from leanbayes import config
from leanbayes.bayesian import BayesianModel
from leanbayes.compression.container import is_compact
from leanbayes.conversion import assemble
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.files import written_whole
from leanbayes.layout import Layout, Report, ReportRow
from leanbayes.likelihoods import Likelihood
from leanbayes.method import Method
from leanbayes.rules import RULES, Rule, get_rule

VERSION = 1
_HEADER = "leanbayes"
_OWN = "posterior."


def save(bnn: BayesianModel, path: str | os.PathLike[str]) -> None:
    """Write the model to `path`; a crash or a full disk leaves an older file there as it was."""
    tensors, aliases = without_aliases(bnn.state_dict())
    own = {name.removeprefix(_OWN): tensors.pop(name) for name in [*tensors] if name.startswith(_OWN)}
    tensors |= {_OWN + name: tensor for name, tensor in bnn.posterior.to_file(own).items()}
    header = {"version": VERSION, **settings_of(bnn), "aliases": aliases}
    with written_whole(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={_HEADER: json.dumps(header)})
        except SafetensorError as error:
            raise OSError(str(error)) from None


def settings_of(bnn: BayesianModel) -> dict[str, Any]:
    """Write all that is no tensor in plain values."""
    return {
        "method": config.encode(bnn.method),
        "likelihood": config.encode(bnn.likelihood),
        "rule": _rule(bnn),
        "trained_rule": bnn.trained_rule,
        "layout": bnn.saved_layout().to_json(),
        "bayesian_weights": bnn.posterior.random_weights,
        "report": [[row.name, list(row.shape), row.bayesian, row.reason] for row in bnn.report.rows],
        "moment_scale": bnn.moment_scale,
        "frozen": [name for name, p in bnn.named_parameters() if not p.requires_grad],
    }


def _rule(bnn: BayesianModel) -> Any:
    """Write a rule by its name, and one that has other settings than the method gives it with these."""
    rule = bnn.current_rule
    usual = bnn.method.make_rule(rule.name) if rule.name in RULES else None
    same = type(rule) is type(usual) and vars(rule) == vars(usual)
    return rule.name if same else config.encode(rule)


class Settings(NamedTuple):
    """What `settings_of` has written, read again."""

    method: Method
    likelihood: Likelihood
    layout: Layout
    report: Report
    rule: str | Rule
    trained_rule: str | None
    moment_scale: tuple[float, float]
    frozen: frozenset[str]

    def give(self, bnn: BayesianModel) -> BayesianModel:
        """Set what is set once a model has its tensors."""
        bnn.rule, bnn.trained_rule, bnn.moment_scale = self.rule, self.trained_rule, self.moment_scale
        for name, parameter in bnn.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return bnn


def read_settings(header: dict[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> Settings:
    """Read settings from a header, and make sure that they are of this network."""
    try:
        method, likelihood = config.decode(header["method"]), config.decode(header["likelihood"])
        layout = Layout.from_json(header["layout"])
        report = Report(
            tuple(ReportRow(n, tuple(shape), bayesian, why) for n, shape, bayesian, why in header["report"])
        )
        rule, trained_rule = config.decode(header["rule"]), header["trained_rule"]
        get_rule(rule)
        trained_rule = trained_rule and get_rule(trained_rule).name
        frozen = frozenset(header["frozen"])
        scale = moment_scale_of(header)
        if not isinstance(method, Method) or not isinstance(likelihood, Likelihood):
            raise TypeError("method or likelihood")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"The header of {path} is damaged ({error}): save the model again.") from None
    _check_network(layout, model, path)
    return Settings(method, likelihood, layout, report, rule, trained_rule, scale, frozen)


def load(path: str | os.PathLike[str], model: nn.Module) -> BayesianModel:
    """Read a saved or a compact model; `model` is a network of the same architecture, whose weights do not matter."""
    if is_compact(path):
        from leanbayes.compression.file import load_compact

        return load_compact(path, model)
    header, tensors = _read(path)
    settings = read_settings(header, model, path)
    try:
        tensors |= {alias: tensors[name] for alias, name in header["aliases"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"The header of {path} is damaged ({error}): save the model again.") from None
    try:
        bnn = assemble(model, settings.method, settings.layout, settings.report, settings.likelihood, 0, None)
    except LeanBayesError as error:
        raise FileFormatError(f"{path} does not fit this network: {error}") from None
    own = {name.removeprefix(_OWN): tensors.pop(name) for name in [*tensors] if name.startswith(_OWN)}
    try:
        tensors |= {_OWN + name: tensor for name, tensor in bnn.posterior.from_file(own).items()}
    except ValueError as error:
        raise FileFormatError(f"{path} is damaged ({error}): save the model again.") from None
    load_tensors(bnn, tensors, path)
    return settings.give(bnn)


def moment_scale_of(header: Mapping[str, Any]) -> tuple[float, float]:
    """Read the factors of one pass; older files have none."""
    mean, std = map(float, header.get("moment_scale", (1.0, 1.0)))
    return mean, std


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Tell what a saved file holds, from its header alone: settings, Bayesian weights, and the bytes of each part."""
    if is_compact(path):
        from leanbayes.compression.file import describe_compact

        return describe_compact(path)
    header, parts = _read_header(path)
    try:
        layout = Layout.from_json(header["layout"])
        found = {key: header[key] for key in ("version", "method", "likelihood", "rule", "trained_rule")}
        found["moment_scale"] = moment_scale_of(header)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"The header of {path} is damaged ({error}): save the model again.") from None
    found["bytes"] = Path(path).stat().st_size
    found["bayesian_weights"] = header.get("bayesian_weights", layout.numel)  # older files do not tell
    found["weights"] = layout.numel
    found["layers"] = {slot.name: list(slot.shape) for slot in layout}
    found["parts"] = parts
    return found


def _check_network(layout: Layout, model: nn.Module, path: str | os.PathLike[str]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for slot in layout:
        for name in slot.names:
            if name not in parameters or tuple(parameters[name].shape) != slot.shape:
                found = f"shape {tuple(parameters[name].shape)}" if name in parameters else "no such parameter"
                raise _other_network(path, f"it has {name} of shape {slot.shape}, and this model has {found}")


def _other_network(path: str | os.PathLike[str], difference: str) -> FileFormatError:
    return FileFormatError(
        f"{path} was saved from another network: {difference}. Pass a model of the same architecture."
    )


def without_aliases(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one name for tensors that share memory, as tied parameters do; safetensors stores no sharing."""
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
        shared = storage in storages  # a part of another tensor is stored as a tensor of its own
        storages.add(storage)
        kept[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    return kept, aliases


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a safetensors file, and tell what is wrong with it inside the block too."""
    if not Path(path).is_file():
        raise FileFormatError(f"There is no file {path}: check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise FileFormatError(f"{path} is truncated, or no safetensors file ({error}): save the model again.") from None


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with _opened(path) as file:
        header = _header(file, path)
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


def _read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Read the header, and the size of what the file holds: each of the posterior's tensors, and the plain rest."""
    parts: dict[str, dict[str, int]] = {}
    with _opened(path) as file:
        header = _header(file, path)
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
    """Return the size of a safetensors dtype, whose name ends with it: F32, BF16, I64, F8_E4M3; BOOL has 8."""
    digits = "".join(itertools.takewhile(str.isdigit, dtype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    return int(digits or 8)


def _header(file: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    metadata = file.metadata() or {}
    header = json.loads(metadata[_HEADER]) if _HEADER in metadata else None
    if not isinstance(header, dict):
        raise FileFormatError(f"{path} is a safetensors file, but not one that leanbayes saved.")
    if header.get("version") != VERSION:
        raise FileFormatError(
            f"{path} has the format version {header.get('version')}, and this leanbayes reads {VERSION}: update it."
        )
    return header


@torch.no_grad()
def load_tensors(bnn: BayesianModel, tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Copy every tensor into its place, bit by bit: parameters first take the dtype of the file."""
    if bnn.posterior.sizes_vary:
        for name, tensor in [*bnn.posterior.named_parameters(), *bnn.posterior.named_buffers()]:
            saved = tensors.get(f"posterior.{name}")
            if saved is not None and saved.shape != tensor.shape:
                tensor.data = tensor.new_empty(saved.shape)
    state = bnn.state_dict()
    for name in [*state, *tensors]:
        if name not in tensors:
            raise _other_network(path, f"it has no {name}, and this model has")
        if name not in state:
            raise _other_network(path, f"it has {name}, and this model has not")
        saved, present = tensors[name], state[name]
        if saved.shape != present.shape:
            shapes = f"{tuple(saved.shape)}, and this model has {tuple(present.shape)}"
            raise _other_network(path, f"it has {name} of shape {shapes}")
        if saved.is_floating_point() != present.is_floating_point():
            raise FileFormatError(f"{path} has {name} as {saved.dtype}, which cannot be right: save the model again.")
    for name, tensor in [*bnn.named_parameters(), *bnn.named_buffers()]:
        if name in tensors and tensors[name].dtype != tensor.dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)
    bnn.load_state_dict(tensors)
