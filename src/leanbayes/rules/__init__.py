"""Rules: how random weights are combined with activations. A rule is one small class with `@register_rule`.

For authors of extensions `Rule`, `register_rule`, `Moments`, `moment_rule`, `MomentPropagation` and `linear_in_weight`
are public; everything else in this package is internal.
"""

from typing import Any

from leanbayes.rules.adjoint import Adjoint
from leanbayes.rules.base import RULES, PassContext, Rule, get_rule, register_rule, rule_text
from leanbayes.rules.covariance import Covariances
from leanbayes.rules.example import Example
from leanbayes.rules.flipout import Flipout
from leanbayes.rules.local import Local
from leanbayes.rules.margins import MarginFit
from leanbayes.rules.mean import Mean
from leanbayes.rules.moments import MomentPropagation, Moments, moment_rule
from leanbayes.rules.random_weight import linear_in_weight
from leanbayes.rules.sample import Sample


def moments_of(output: Any) -> Any:
    """Return an output of the rule `covariance` as `Moments`, and any other output unchanged."""
    return output.moments() if isinstance(output, Covariances) else output


__all__ = [
    "RULES",
    "Adjoint",
    "Example",
    "Flipout",
    "Local",
    "MarginFit",
    "Mean",
    "MomentPropagation",
    "Moments",
    "PassContext",
    "Rule",
    "Sample",
    "get_rule",
    "linear_in_weight",
    "moment_rule",
    "moments_of",
    "register_rule",
    "rule_text",
]
