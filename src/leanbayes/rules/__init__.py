"""How random weights meet activations. A rule is one small class and one line in `RULES`."""

from typing import Any

from leanbayes.errors import LeanBayesError
from leanbayes.rules.base import Rule
from leanbayes.rules.covariance import Covariance, Covariances
from leanbayes.rules.flipout import Flipout
from leanbayes.rules.local import Local
from leanbayes.rules.mean import Mean
from leanbayes.rules.moments import MomentPropagation, Moments, moment_rule
from leanbayes.rules.sample import Sample
from leanbayes.rules.weights import linear_in_weight

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (Sample(), Flipout(), Local(), MomentPropagation(), Covariance(), Mean())
}


def get_rule(name: str | Rule) -> Rule:
    """Look a rule up by its name; a rule itself is returned as it is."""
    if isinstance(name, Rule):
        return name
    if name not in RULES:
        raise LeanBayesError(f"The rule {name!r} is unknown: use one of {', '.join(RULES)}.")
    return RULES[name]


def moments_of(output: Any) -> Any:
    """Return an output of the rule `covariance` as `Moments`, and any other as it is."""
    return output.moments() if isinstance(output, Covariances) else output


__all__ = [
    "RULES",
    "MomentPropagation",
    "Moments",
    "Rule",
    "get_rule",
    "linear_in_weight",
    "moment_rule",
    "moments_of",
]
