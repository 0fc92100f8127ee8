"""Writing and reading the compact file of a shared posterior.

Values are rounded to the requested precision, and everything else is exact: a loaded model makes the same predictions
as the rounded model, bit by bit, and compresses to the same file again.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core import config
from leanbayes.core.quantization import Precision, check_precision
from leanbayes.deploy.compact import container
from leanbayes.deploy.compact.code_labels import GAUSSIAN, MOST_PARTNERS, join, split, value_names
from leanbayes.deploy.compact.coding import MOST_SYMBOLS
from leanbayes.deploy.compact.container import Part
from leanbayes.deploy.compact.numbers import Numbers, read_numbers
from leanbayes.deploy.header import (
    aliases_of,
    bayesian_weights_of,
    is_count,
    layout_of,
    moment_layers_of,
    moment_margins_of,
    moment_scale_of,
    refusing_damage,
)
from leanbayes.deploy.model_file import CORRECTION, load_tensors, split_state, take_corrections
from leanbayes.deploy.model_settings import assemble_for, read_settings, settings_of
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.posteriors.shared.shared import SharedPosterior
from leanbayes.priors import Normal

_CODED = {f"posterior.{name}" for name in (*GAUSSIAN, "labels", "blended", "partners", "logits")}
_PRIOR = ("posterior.prior.loc", "posterior.prior.scales")  # one number per weight, which training needs only
_REMEDY = "compress the model again"


@dataclass(frozen=True)
class Trial:
    """One way to compress.

    Attributes:
        components: The number of Gaussians that the weights share. None if they are written as they are.
        bit_price: The price of one bit of a label, in nats of the ELBO. None if bits have no price.
        precision: The precision of all numbers in the file.
    """

    components: int | None
    bit_price: float | None
    precision: Precision

    def __str__(self) -> str:
        if self.components is None:
            return f"as it is, {self.precision}"
        price = "" if self.bit_price is None else f", {self.bit_price:g} nats per bit"
        return f"{self.components} components{price}, {self.precision}"


@dataclass(frozen=True)
class TrialResult:
    """The size of the file that one trial gave, and the validation NLL of the model in it."""

    trial: Trial
    bytes: int
    nll: float


@dataclass(frozen=True)
class CompactFile:
    """A compact file that `lb.compress` wrote.

    Attributes:
        path: The file.
        bytes: Its size.
        parts: The bytes of each of its parts.
        left_out: What the model has that the file does not. Predictions do not need it; a policy was fitted to
            predictions before rounding.
        chosen: The trial that the search chose, with its size and validation NLL. None if there was no search.
        tried: All trials of the search, in order.
        nll_before: The validation NLL of the model before compression. None if there was no search.

    Example:
        >>> file = lb.compress(bnn, "model.lbc", max_nll_increase=0.01, data=validation_loader)
        >>> file.bytes
        >>> print(file.chosen.trial, [result.bytes for result in file.tried])
    """

    path: Path
    bytes: int
    parts: dict[str, int]
    left_out: tuple[str, ...] = ()
    chosen: TrialResult | None = None
    tried: tuple[TrialResult, ...] = ()
    nll_before: float | None = None


@torch.no_grad()
def write_compact(
    bnn: BayesianModel, path: str | os.PathLike[str], *, values: Precision = "fp16", rest: Precision = "fp16"
) -> CompactFile:
    """Write a model with shared weights, with codebook and outliers in one precision, and the rest in another."""
    check_precision("values", values)
    check_precision("rest", rest)
    posterior = bnn.posterior
    if not isinstance(posterior, SharedPosterior) or not posterior.is_shared:
        raise LeanBayesError(
            f"The weights of {type(bnn.method).__name__} are not shared: pass data=validation_batches, or compress "
            "lb.bayesianize(bnn, lb.WeightSharing(components=256))."
        )
    kinds, own, coded = split(posterior)
    numbers = Numbers()
    for name, tensor in own.items():
        numbers.add(name, tensor, values)
    tensors, state = split_state(bnn)
    plain = {name: t for name, t in tensors.items() if name not in (*_CODED, *_PRIOR)}
    for name, tensor in plain.items():
        numbers.add(name, tensor, rest, "rest")
    for name, tensor in bnn.moment_layers.items():
        numbers.add(CORRECTION + name, tensor, rest, "rest")
    settings = {
        **settings_of(bnn),
        "method": config.encode(_without_center(bnn.method)),
        "counts": [kinds.codes, kinds.points, posterior.partners.shape[1]],
        "numbers": numbers.rows,
        **state,
    }
    parts = container.write(path, settings, {**coded, **numbers.parts()})
    left_out = {"center of the prior": _PRIOR[0] in tensors, "policy": bnn.policy is not None}
    names = tuple(name for name, there in left_out.items() if there)
    return CompactFile(Path(path), sum(parts.values()), parts, names)


def _without_center(method: Any) -> Any:
    """Center the prior on zero instead of pretrained weights or an earlier posterior."""
    prior: Any = getattr(method, "prior", None)
    if getattr(prior, "center", "zero") == "zero":
        return method
    centered = dataclasses.replace(prior, center="zero") if isinstance(prior, Normal) else Normal()
    return dataclasses.replace(method, prior=centered)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_compact(path: str | os.PathLike[str], model: nn.Module) -> BayesianModel:
    """Read a compact file into a network of the same architecture, whose weights do not matter."""
    with refusing_damage(path, _REMEDY):
        header, parts = container.read(path)
        settings = read_settings(header, model, path)
        bnn = assemble_for(settings, model, path)
        tensors = _read_tensors(header, parts, bnn, settings.moment_layers)
        corrections = take_corrections(tensors, settings.moment_layers)
        load_tensors(bnn, tensors, header, path)
        return settings.give(bnn, corrections)


def _read_tensors(
    header: Mapping[str, Any], parts: Mapping[str, Part], bnn: BayesianModel, corrected: Mapping[str, int]
) -> dict[str, Tensor]:
    posterior, counts = bnn.posterior, header["counts"]
    if not isinstance(posterior, SharedPosterior):
        raise ValueError("its method does not share weights")
    if not isinstance(counts, list) or len(counts) != 3 or not all(map(is_count, counts)):
        raise ValueError(f"its header has {counts} codes")
    codes, points, nearest = counts
    if codes + points + 3 > MOST_SYMBOLS or nearest > MOST_PARTNERS:
        raise ValueError(f"its header has {counts} codes")
    kinds, own = join(parts, bnn.layout, codes, points, nearest)
    shapes = {name: tuple(tensor.shape) for name, tensor in bnn.state_dict().items() if isinstance(tensor, Tensor)}
    shapes |= {CORRECTION + name: (3, channels) for name, channels in corrected.items()}
    names = value_names(posterior)
    for kind, name in names:
        count = getattr(kinds, kind)
        shapes[f"{kind}.{name}"] = (count, 3) if name == "factors" else (count,)
    numbers = read_numbers(header["numbers"], parts, shapes)
    for name in GAUSSIAN:
        values = [numbers.pop(f"{kind}.{value}") for kind, value in names if value == name]
        own[name] = torch.cat(values) if values else torch.zeros(0, 3)
    own |= {name: own[name].to(own["mu"].dtype) for name in ("logits", "factors")}
    numbers |= {alias: numbers[name] for alias, name in aliases_of(header).items()}
    return numbers | {f"posterior.{name}": tensor for name, tensor in own.items()}


def describe_compact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a compact file: its settings, its number of Bayesian weights, the bytes of each part."""
    with refusing_damage(path, _REMEDY):
        header, parts = container.read(path)
        layout = layout_of(header)
        found = {key: header[key] for key in ("method", "likelihood", "rule", "trained_rule")}
        if not isinstance(header["method"], dict) or not isinstance(header["likelihood"], dict):
            raise ValueError("its header has a wrong method or likelihood")
        found["moment_scale"] = moment_scale_of(header)
        found["moment_layers"] = moment_layers_of(header, layout)
        found["moment_margins"] = [list(fit) for fit in moment_margins_of(header)]
        found["bayesian_weights"] = bayesian_weights_of(header, layout)
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
