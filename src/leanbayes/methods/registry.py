"""Methods by name, with the settings that they have by default on the command line."""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from leanbayes import config
from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.method import Method
from leanbayes.methods.deterministic import Deterministic
from leanbayes.methods.ensemble import Ensemble
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.pbn import PBN
from leanbayes.methods.rigl import RigL
from leanbayes.methods.ssvi import SSVI
from leanbayes.methods.vdp import VDP
from leanbayes.methods.weight_sharing import WeightSharing
from leanbayes.priors import Normal, ScaleMixture

METHODS: dict[str, Method] = {
    "deterministic": Deterministic(),
    "mc-dropout": MCDropout(rate=0.1),
    "ensemble": Ensemble(),
    "mean-field": MeanField(),
    "vdp": VDP(),
    "pbn": PBN(),
    "ssvi": SSVI(),
    "rigl": RigL(),
    "weight-sharing": WeightSharing(),
}

_PRIORS: dict[str, Any] = {"Normal": Normal(), "ScaleMixture": ScaleMixture()}


def get_method(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Return the method of that name, with some settings changed: get_method("mean-field", {"rule": "flipout"})."""
    plain = name.lower().replace("_", "-")
    if plain not in METHODS:
        hint = did_you_mean(plain, METHODS, f"there are {', '.join(METHODS)}.")
        raise LeanBayesError(f"There is no method {name!r}: {hint}")
    return config.change(METHODS[plain], settings or {})


def parse_method(text: str) -> Method:
    """Read a method and its settings from a text such as "mean-field:rule=flipout,prior.scale=0.05".

    A prior of another kind is written as in Python: "mean-field:prior=ScaleMixture(pi=0.3, wide=1.0)".
    """
    name, _, rest = text.partition(":")
    return get_method(name, _settings(rest, text))


def _settings(items: str, text: str) -> dict[str, Any]:
    """Read settings, which are a part of that text."""
    settings: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?![^(]*\))", items)):  # but not inside brackets
        path, equals, value = item.partition("=")
        if not equals:
            raise LeanBayesError(f"{item!r} in {text!r} has no value: write it as setting=value.")
        *outer, last = path.strip().replace("-", "_").split(".")
        inner: Any = settings
        for part in outer:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last in inner:
            raise LeanBayesError(f"{path.strip()!r} in {text!r} is set twice: give each setting once.")
        inner[last] = _value(value.strip(), text)
    return settings


def describe_method(method: Method) -> str:
    """Write a method as `parse_method` reads it: its name, and the settings that differ from the usual ones."""
    name = next((name for name, known in METHODS.items() if type(known) is type(method)), type(method).__name__)
    usual = METHODS.get(name)
    changed = ",".join(f"{path}={value}" for path, value in _differences(usual, method)) if usual else ""
    return f"{name}:{changed}" if changed else name


def _differences(usual: Any, value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        old, new = getattr(usual, field.name), getattr(value, field.name)
        if type(old) is type(new) and dataclasses.is_dataclass(new):
            yield from ((f"{field.name}.{path}", inner) for path, inner in _differences(old, new))
        elif old != new:
            yield field.name, new


def _value(word: str, text: str) -> Any:
    """Read a number, True, False, None or a prior; else it is a text."""
    made = re.fullmatch(r"(\w+)\((.*)\)", word)
    if made and made[1] in _PRIORS:
        return config.change(_PRIORS[made[1]], _settings(made[2], text))
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(word.lower(), word)
