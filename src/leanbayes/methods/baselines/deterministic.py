"""The plain network: the reference for quality and cost."""

from dataclasses import dataclass, field

from leanbayes.core.config import check_choices
from leanbayes.methods.gaussian_settings import EngineName
from leanbayes.model.method import Method, register_method


@register_method("deterministic")
@dataclass(frozen=True)
class Deterministic(Method):
    """A plain network, for comparison.

    It predicts with one forward pass and has no weight uncertainty.

    Attributes:
        engine: backprop trains with the optimizer of the recipe. ivon trains with `lb.IVON`, which without Bayesian
            weights is SGD with an averaged momentum.

    Example:
        >>> bnn = lb.fit(network, lb.Deterministic(), train_set, epochs=30)
    """

    engine: EngineName = field(default="backprop", metadata={"former_default": "backprop"})
    rule = "mean"
    samples = 1
    bayesian_weights = False

    def __post_init__(self) -> None:
        check_choices(self, engine=EngineName)
