"""Every public name has a docstring in Google style, with an example; what is not public is not exported."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import leanbayes as lb

PACKAGES = (
    "data",
    "networks",
    "evaluation",
    "evaluation.decide",
    "evaluation.plot",
    "training",
    "training.sklearn",
    "report",
)
PUBLIC = ("leanbayes", *(f"leanbayes.{name}" for name in PACKAGES))


def public_names() -> Iterator[tuple[str, Any]]:
    """Every class and function that is exported, under the first module that exports it."""
    seen: set[int] = set()
    for module in PUBLIC:
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module}.{name}", value


NAMES = dict(public_names())


def takes_arguments(value: Any) -> bool:
    return any(p.kind is not p.VAR_KEYWORD for p in inspect.signature(value).parameters.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented_with_an_example(name: str) -> None:
    value = NAMES[name]
    text = inspect.getdoc(value) or ""
    assert value.__doc__, f"{name} inherits its docstring"
    first, *rest = text.splitlines()
    assert first.endswith("."), f"the first line of {name} is no sentence: {first!r}"
    assert not rest or not rest[0], f"the summary of {name} is longer than a line"
    error = inspect.isclass(value) and issubclass(value, (Exception, Warning))
    assert error or ">>> " in text.partition("Example:\n")[2], f"{name} has no example"
    if inspect.isfunction(value) and takes_arguments(value):
        assert "Args:" in text, f"{name} does not document its arguments"
        for parameter in inspect.signature(value).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert f"    {parameter.name}: " in text, f"{name} does not document {parameter.name}"


@pytest.mark.parametrize("module", PUBLIC)
def test_exports_exist_and_are_sorted(module: str) -> None:
    package = importlib.import_module(module)
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_verbs_of_a_model_are_functions() -> None:
    for verb in ("save", "calibrate", "restrict", "compress", "load", "export_onnx", "elbo_loss", "evaluate"):
        assert callable(getattr(lb, verb))
        assert not hasattr(lb.BayesianModel, verb)
    for name in ("Posterior", "Rule", "Recipe"):
        assert inspect.isclass(getattr(lb, name))


def test_the_defaults_of_the_temperature_agree() -> None:
    default = inspect.signature(lb.elbo_loss).parameters["temperature"].default
    assert lb.Recipe().temperature is default is None  # that of the engine and the task: see test_defaults.py
    assert inspect.signature(lb.elbo_loss).parameters["num_data"].default is inspect.Parameter.empty


def test_the_public_names_are_listed_and_no_others() -> None:
    listed = [name for name in dir(lb) if not name.startswith("__")]
    assert {"fit", "Recipe", "evaluate", "decide", "save"} <= {*listed}
    extra = {name for name in listed if name not in lb.__all__}
    assert all(inspect.ismodule(getattr(lb, name)) for name in extra)
    assert {name for name in vars(lb) if not name.startswith("_")} <= {*listed}  # nothing leaks from imports
