"""The JSON header of a model file: its limits, the types of its values, and a digest of the header and all tensors.

Headers of untrusted files are checked here, before memory is allocated for the sizes that they declare.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.json_values import parse_untrusted
from leanbayes.core.layout import Layout, Report, ReportRow
from leanbayes.errors import FileFormatError, LeanBayesError, MissingPackageError
from leanbayes.rules import MarginFit

_MOST_NAME, _MOST_DIMENSIONS, _MOST_SIZE = 1000, 16, 1 << 48
_SHOWN = 300  # characters of an error message after the path
_WRONG_VALUES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_SIGNATURE = re.compile(r', "digest": "([0-9a-f]{64})"\}\Z')
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# -- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusing_damage(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Convert what wrong values in a file can raise to a `FileFormatError` of one line."""
    try:
        yield
    except (MissingPackageError, torch.OutOfMemoryError):
        raise
    except FileFormatError as error:
        raise FileFormatError(one_line(error, len(str(path)) + _SHOWN)) from None
    except _WRONG_VALUES as error:
        raise damaged(path, error, remedy) from None


def damaged(path: str | os.PathLike[str], reason: object, remedy: str) -> FileFormatError:
    """Return the error of a damaged file."""
    return FileFormatError(f"{path} is damaged ({one_line(reason).rstrip('.')}): {remedy}.")


def one_line(text: object, most: int = 200) -> str:
    """Return a text without line breaks and control characters, which a file may have put into it."""
    line = "".join(one if one.isprintable() else "?" for one in " ".join(str(text).split()))
    return line if len(line) <= most else f"{line[:most]}…"


# -- text and digest --------------------------------------------------------------------------------------------------


def header_text(header: Mapping[str, Any], separators: tuple[str, str] = (", ", ": ")) -> str:
    """Write a header as JSON; raise an error if it exceeds the limits of reading."""
    text = json.dumps(header, separators=separators)
    try:
        parse_untrusted(text)
    except ValueError as error:
        raise LeanBayesError(f"The settings of the model cannot be saved ({one_line(error)}): change them.") from None
    return text


def signed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Append a digest of the header and all tensors to a header.

    The digest is in the header, because safetensors writes several metadata entries in random order.
    """
    return f'{text[:-1]}, "digest": "{_digest(text, tensors)}"}}'


def is_intact(text: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether header and tensors have their digest."""
    found = _SIGNATURE.search(text)
    return found is not None and _digest(f"{text[: found.start()]}}}", tensors) == found[1]


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- values -----------------------------------------------------------------------------------------------------------


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is an integer, and neither negative nor absurdly large."""
    return type(value) is int and least <= value <= _MOST_SIZE


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_NAME and value.isprintable()


def _is_list(value: Any, one: Any) -> bool:
    return isinstance(value, list) and all(map(one, value))


def _is_shape(value: Any) -> bool:
    return _is_list(value, is_count) and len(value) <= _MOST_DIMENSIONS and math.prod(value) <= _MOST_SIZE


def names_of(header: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names."""
    if not _is_list(header[key], _is_name):
        raise ValueError(f"its header has wrong names in {key}")
    return header[key]


def aliases_of(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tensors that are stored under another name."""
    aliases = header["aliases"]
    if not isinstance(aliases, dict) or not _is_list([*aliases, *aliases.values()], _is_name):
        raise ValueError("its header has wrong names in aliases")
    return aliases


def layout_of(header: Mapping[str, Any]) -> Layout:
    """Return the layout."""
    rows = header["layout"]
    for row in rows if isinstance(rows, list) else [None]:
        if not (
            isinstance(row, dict)
            and _is_list(row["names"], _is_name)
            and _is_shape(row["shape"])
            and _is_shape(row["order"])
            and isinstance(row["dtype"], str)
            and is_count(row["fan_in"], 1)
            and is_count(row.get("input_dim", 1))
        ):
            raise ValueError(f"its header has a wrong layout {row}")
    layout = Layout.from_json(rows)
    names = [name for slot in layout for name in slot.names]
    if len(names) != len({*names}) or layout.numel > _MOST_SIZE:
        raise ValueError("its header has a layout with a parameter twice, or with too many weights")
    return layout


def report_of(header: Mapping[str, Any]) -> Report:
    """Return the report."""
    rows = header["report"]
    for row in rows if isinstance(rows, list) else [None]:
        if not (
            isinstance(row, list)
            and len(row) == 4
            and _is_name(row[0])
            and _is_shape(row[1])
            and isinstance(row[2], bool)
            and isinstance(row[3], str)
            and row[3].isprintable()
        ):
            raise ValueError(f"its header has a wrong report {row}")
    return Report(tuple(ReportRow(name, tuple(shape), bayesian, reason) for name, shape, bayesian, reason in rows))


def moment_scale_of(header: Mapping[str, Any]) -> tuple[float, float]:
    """Return the factors of one-pass prediction; older files have none."""
    scale = header.get("moment_scale", [1.0, 1.0])
    if not (_is_list(scale, lambda one: type(one) in (int, float) and 0 < one < math.inf) and len(scale) == 2):
        raise ValueError("its calibration factors are not two positive numbers")
    return float(scale[0]), float(scale[1])


def moment_margins_of(header: Mapping[str, Any]) -> tuple[MarginFit, ...]:
    """Return how combined predictions weigh margins, for each number of them; older files have one row or none."""
    older = header.get("moment_margin")  # of files before margins were several
    rows = header.get("moment_margins", [] if older is None else [older])
    if not isinstance(rows, list) or not all(map(_is_margin_fit, rows)):
        raise ValueError("its fit of the margins has wrong numbers")
    return tuple(MarginFit(*map(float, row)) for row in rows)


def _is_margin_fit(row: Any) -> bool:
    """Whether a row has weights from 0 to 1 and positive factors, in turns."""
    if not _is_list(row, lambda one: type(one) in (int, float) and 0 <= one < math.inf) or len(row) not in (2, 4):
        return False
    return all(weight <= 1 for weight in row[::2]) and all(factor > 0 for factor in row[1::2])


def moment_layers_of(header: Mapping[str, Any], layout: Layout) -> dict[str, int]:
    """Return the number of channels of each layer that is corrected in one pass, by weight; older files have none."""
    channels, slots = header.get("moment_layers", {}), {slot.name: slot.numel for slot in layout}
    if not isinstance(channels, dict) or not all(
        name in slots and is_count(count, 1) and count <= slots[name] for name, count in channels.items()
    ):
        raise ValueError("its header has wrong corrections of layers")
    return channels


def bayesian_weights_of(header: Mapping[str, Any], layout: Layout) -> int:
    """Return the number of Bayesian weights; older files have all of them."""
    weights = header.get("bayesian_weights", layout.numel)
    if not is_count(weights):
        raise ValueError("its number of Bayesian weights is not a number")
    return int(weights)


def versions_of(header: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the versions of modules that are not 1; older files do not have them."""
    versions = header.get("module_versions")
    if versions is not None and not (
        isinstance(versions, dict) and all(map(_is_name, versions)) and all(map(is_count, versions.values()))
    ):
        raise ValueError("its header has wrong versions of modules")
    return versions


def extra_state_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state of modules that is not a tensor."""
    state = header.get("extra_state", {})
    if not isinstance(state, dict):
        raise ValueError("its header has a wrong extra state")
    return state
