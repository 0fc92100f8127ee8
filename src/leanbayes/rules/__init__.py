"""How random weights meet activations. A rule is one small class and one line in `RULES`."""

from leanbayes.errors import LeanBayesError
from leanbayes.rules.base import Rule
from leanbayes.rules.covariance import Covariance
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


__all__ = ["RULES", "MomentPropagation", "Moments", "Rule", "get_rule", "linear_in_weight", "moment_rule"]
