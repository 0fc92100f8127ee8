"""The compact file of a shared posterior: `lb.compress` writes it, and `lb.load` reads it.

Values are rounded to the precision that was asked for, all else is exact: what is loaded
predicts as the rounded model does, bit by bit, and makes the same file again.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes import config
from leanbayes.bayesian import BayesianModel
from leanbayes.compression import container
from leanbayes.compression.container import Part
from leanbayes.compression.labels import GAUSSIAN, MOST_PARTNERS, join, split, value_names
from leanbayes.compression.numbers import Numbers, read_numbers
from leanbayes.compression.quantisation import Precision, check_precision
from leanbayes.conversion import assemble
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.layout import Layout
from leanbayes.posteriors.shared import SharedPosterior
from leanbayes.saving import load_tensors, moment_scale_of, read_settings, settings_of, without_aliases

_CODED = {f"posterior.{name}" for name in (*GAUSSIAN, "labels", "blended", "partners", "logits")}
_CENTRE = "posterior.prior.loc"


@dataclass(frozen=True)
class CompactFile:
    """A file that was written.

    Attributes:
        path: where it is.
        bytes: how long it is.
        parts: the bytes of each part.
        left_out: what the model had that the file has not; predictions do not need it.
    """

    path: Path
    bytes: int
    parts: dict[str, int]
    left_out: tuple[str, ...] = ()


@torch.no_grad()
def compress(
    bnn: BayesianModel, path: str | os.PathLike[str], *, values: Precision = "fp16", rest: Precision = "fp16"
) -> CompactFile:
    """Write a model with shared weights as a compact file, which `lb.load` reads.

    values: precision of codebook and outliers. rest: that of biases and norms; with "int8", variances keep 16 bits.
    A prior centred on pretrained weights is kept without its centre, which is as large as the network.
    """
    check_precision("values", values)
    check_precision("rest", rest)
    posterior = bnn.posterior
    if not isinstance(posterior, SharedPosterior) or not posterior.is_shared:
        raise LeanBayesError(
            f"{type(bnn.method).__name__} has weights that share nothing: compress "
            "lb.bayesianize(bnn, lb.WeightSharing(components=256))."
        )
    kinds, own, coded = split(posterior)
    numbers = Numbers()
    for name, tensor in own.items():
        numbers.add(name, tensor, values)
    tensors, aliases = without_aliases(bnn.state_dict())
    plain = {name: t for name, t in tensors.items() if name not in _CODED and name != _CENTRE}
    for name, tensor in plain.items():
        numbers.add(name, tensor, rest, "rest")
    settings = {
        **settings_of(bnn),
        "method": config.encode(_without_centre(bnn.method)),
        "counts": [kinds.codes, kinds.points, posterior.partners.shape[1]],
        "numbers": numbers.rows,
        "aliases": aliases,
    }
    parts = container.write(path, settings, {**coded, **numbers.parts()})
    return CompactFile(Path(path), sum(parts.values()), parts, ("centre of the prior",) if _CENTRE in tensors else ())


def _without_centre(method: Any) -> Any:
    """Centre a prior on zero in place of pretrained weights."""
    prior: Any = getattr(method, "prior", None)
    if getattr(prior, "center", "zero") == "zero":
        return method
    return dataclasses.replace(method, prior=dataclasses.replace(prior, center="zero"))


# -- reading ----------------------------------------------------------------------------------------------------------


def load_compact(path: str | os.PathLike[str], model: nn.Module) -> BayesianModel:
    """Read a compact file; `model` is a network of the same architecture, whose weights do not matter."""
    header, parts = container.read(path)
    settings = read_settings(header, model, path)
    try:
        bnn = assemble(model, settings.method, settings.layout, settings.report, settings.likelihood, 0, None)
        tensors = _read_tensors(header, parts, bnn)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged ({error}): compress the model again.") from None
    load_tensors(bnn, tensors, path)
    return settings.give(bnn)


def _read_tensors(header: Mapping[str, Any], parts: Mapping[str, Part], bnn: BayesianModel) -> dict[str, Tensor]:
    posterior, counts = bnn.posterior, header["counts"]
    if not isinstance(posterior, SharedPosterior):
        raise ValueError("its method shares no weights")
    if not all(isinstance(count, int) and count >= 0 for count in counts) or counts[2] > MOST_PARTNERS:
        raise ValueError(f"it has {counts} codes")
    kinds, own = join(parts, bnn.layout, *counts)
    shapes = {name: tuple(tensor.shape) for name, tensor in bnn.state_dict().items()}
    names = value_names(posterior)
    for kind, name in names:
        count = getattr(kinds, kind)
        shapes[f"{kind}.{name}"] = (count, 3) if name == "factors" else (count,)
    numbers = read_numbers(header["numbers"], parts, shapes)
    for name in GAUSSIAN:
        values = [numbers.pop(f"{kind}.{value}") for kind, value in names if value == name]
        own[name] = torch.cat(values) if values else torch.zeros(0, 3)
    own |= {name: own[name].to(own["mu"].dtype) for name in ("logits", "factors")}
    numbers |= {alias: numbers[name] for alias, name in header["aliases"].items()}
    return numbers | {f"posterior.{name}": tensor for name, tensor in own.items()}


def describe_compact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Tell what a compact file holds: settings, Bayesian weights, and the bytes of each part."""
    header, parts = container.read(path)
    try:
        layout = Layout.from_json(header["layout"])
        found = {key: header[key] for key in ("method", "likelihood", "rule", "trained_rule", "bayesian_weights")}
        found["moment_scale"] = moment_scale_of(header)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged ({error}): compress the model again.") from None
    length = Path(path).stat().st_size
    around = {"header": {"numbers": 0, "bytes": length - sum(len(part.data) for part in parts.values())}}
    sizes = {name: {"numbers": part.numel, "bytes": len(part.data)} for name, part in parts.items()}
    return {
        "version": container.VERSION,
        **found,
        "bytes": length,
        "weights": layout.numel,
        "layers": {slot.name: list(slot.shape) for slot in layout},
        "parts": around | sizes,
    }
