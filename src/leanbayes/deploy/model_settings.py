"""The settings of a model in the header of its file: all that is not a tensor."""

import inspect
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from leanbayes.core import config
from leanbayes.core.layout import Layout, Report
from leanbayes.deploy.header import (
    FLOATS,
    layout_of,
    moment_layers_of,
    moment_margins_of,
    moment_scale_of,
    names_of,
    one_line,
    report_of,
)
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.likelihoods.decisions import Policy
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.conversion import assemble
from leanbayes.model.method import Method
from leanbayes.rules import RULES, MarginFit, Rule, get_rule


def settings_of(bnn: BayesianModel) -> dict[str, Any]:
    """Return everything except the tensors as plain values."""
    corrected = {name: tensor.shape[1] for name, tensor in bnn.moment_layers.items()}
    return {
        "method": config.encode(bnn.method),
        "likelihood": config.encode(bnn.likelihood),
        "rule": _rule(bnn),
        "trained_rule": bnn.trained_rule,
        "layout": bnn.saved_layout().to_json(),
        "bayesian_weights": bnn.posterior.random_weights,
        "report": [[row.name, list(row.shape), row.bayesian, row.reason] for row in bnn.report.rows],
        "moment_scale": bnn.moment_scale,
        **({"moment_layers": corrected} if corrected else {}),
        **({"moment_margins": [list(fit) for fit in bnn.moment_margins]} if bnn.moment_margins else {}),
        "frozen": [name for name, p in bnn.named_parameters() if not p.requires_grad],
    }


def _rule(bnn: BayesianModel) -> Any:
    """Return the name of the rule, or its name and settings if these differ from those of the method."""
    rule = bnn.current_rule
    default = bnn.method.make_rule(rule.name) if rule.name in RULES else None
    same = type(rule) is type(default) and vars(rule) == vars(default)
    return rule.name if same else config.encode(rule)


class Settings(NamedTuple):
    """The settings that `settings_of` wrote; `moment_layers` has the number of channels of each corrected layer."""

    method: Method
    likelihood: Likelihood
    layout: Layout
    report: Report
    rule: str | Rule
    trained_rule: str | None
    moment_scale: tuple[float, float]
    moment_layers: dict[str, int]
    moment_margins: tuple[MarginFit, ...]
    frozen: frozenset[str]

    def give(self, bnn: BayesianModel, corrections: Mapping[str, Tensor]) -> BayesianModel:
        """Apply the settings that need a model with its tensors, and the corrections of its layers."""
        bnn.moment_layers, bnn.moment_margins = corrections, self.moment_margins
        bnn.rule, bnn.trained_rule, bnn.moment_scale = self.rule, self.trained_rule, self.moment_scale
        for name, parameter in bnn.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return bnn


def read_settings(header: dict[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> Settings:
    """Read settings from a header, and check that they fit the network.

    Raises:
        FileFormatError: They are those of another network.
        ValueError: They are damaged. Some mistakes raise a `TypeError`, `KeyError` or `AttributeError`.
    """
    method, likelihood = config.decode(header["method"]), config.decode(header["likelihood"])
    if not isinstance(method, Method) or not isinstance(likelihood, Likelihood):
        raise ValueError("its header has a wrong method or likelihood")
    _check_types(likelihood)
    layout, report = layout_of(header), report_of(header)
    rule, trained_rule = config.decode(header["rule"]), header["trained_rule"]
    if not isinstance(rule, (str, Rule)) or not isinstance(trained_rule, (str, type(None))):
        raise ValueError("its header has a wrong rule")
    get_rule(rule)
    trained_rule = trained_rule and get_rule(trained_rule).name
    settings = Settings(
        method,
        likelihood,
        layout,
        report,
        rule,
        trained_rule,
        moment_scale_of(header),
        moment_layers_of(header, layout),
        moment_margins_of(header),
        frozenset(names_of(header, "frozen")),
    )
    _check_network(layout, _prepared(method, model, path), path)
    return settings


def _check_types(likelihood: Likelihood) -> None:
    """Raise an error for settings of a likelihood that have another type than their defaults."""
    for name, parameter in inspect.signature(type(likelihood)).parameters.items():
        value, default = likelihood.settings.get(name), parameter.default
        fits = type(value) is type(default) or (type(value) is int and type(default) is float)
        if isinstance(default, (bool, int, float)) and not fits:
            raise ValueError(f"its header has a likelihood with {name}={value!r}")


def _check_network(layout: Layout, model: nn.Module, path: str | os.PathLike[str]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for slot in layout:
        for name in slot.names:
            if name not in parameters or tuple(parameters[name].shape) != slot.shape:
                found = f"shape {tuple(parameters[name].shape)}" if name in parameters else "no such parameter"
                raise other_network(path, f"it has {name} of shape {slot.shape}, but this model has {found}")
        if slot.dtype not in (*FLOATS, parameters[slot.name].dtype):
            raise ValueError(f"{slot.name} has the dtype {slot.dtype}")


def other_network(path: str | os.PathLike[str], difference: str) -> FileFormatError:
    """Return the error for a file of another network."""
    return FileFormatError(
        f"{path} was saved from another network: {one_line(difference)}. Pass a model of the same architecture."
    )


def _prepared(method: Method, model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Return the network with the parameters that a method adds to it."""
    try:
        return method.prepare(model)
    except LeanBayesError as error:
        raise FileFormatError(f"{path} does not fit this network: {error}") from None


def assemble_for(settings: Settings, model: nn.Module, path: str | os.PathLike[str]) -> BayesianModel:
    """Build the model that a file will fill."""
    model = _prepared(settings.method, model, path)
    try:
        return assemble(model, settings.method, settings.layout, settings.report, settings.likelihood, 0, None)
    except LeanBayesError as error:
        raise FileFormatError(f"{path} does not fit this network: {error}") from None


def policy_of(header: Mapping[str, Any]) -> Policy | None:
    """Return the policy of a header; most files have none."""
    policy = config.decode(header.get("policy"))
    if not isinstance(policy, (Policy, type(None))):
        raise ValueError("its header has a wrong policy")
    return policy
