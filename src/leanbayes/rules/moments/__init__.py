"""`moments`: mean and variance in one pass (VDP++), for any network, with a rule for each function of torch.

`Moments`, `moment_rule` and `MomentPropagation` are public, as names of `leanbayes.rules`; the modules are internal.
"""

from leanbayes.rules.moments import (  # noqa: F401 (each registers its rules)
    arithmetic,
    attention,
    dropout,
    elementwise,
    linear,
    norms,
    pooling,
    products,
    recurrent,
    reductions,
    shape,
    softmax,
)
from leanbayes.rules.moments.registry import moment_rule
from leanbayes.rules.moments.rule import MomentPropagation
from leanbayes.rules.moments.value import Moments

__all__ = ["MomentPropagation", "Moments", "moment_rule"]
