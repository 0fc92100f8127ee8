"""The base class of rules, which decide what the layers of a network get in place of their weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from leanbayes.core import config
from leanbayes.core.names import lookup
from leanbayes.core.setting_text import parse_settings
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.posteriors import Posterior


@dataclass
class PassContext:
    """Information for a rule about one call of a network.

    Attributes:
        inputs: The arguments of the call.
        training: Whether the posterior is in training mode.
        random: Whether any weight has a variance.
        batch_first: Whether recurrent and attention layers take (batch, length, channels).
        dense_output: Whether the network ends in a convolution and its outputs have pixels.
        convolutional: Whether all Bayesian weights are those of convolutions.
        output_scale: Factors of the mean and std of the outputs of one pass, as `lb.calibrate` fitted them.
        corrections: The correction of the layer of each weight, (3, channels), as `lb.calibrate` fitted it, or None.
        buffers: The tensors that `Rule.buffers` asked the model to hold.
        class_dim: The dimension of the outputs that counts classes, or None if the outputs are not logits of classes.
        state: What `Rule.begin` keeps for `Rule.finish`.
    """

    inputs: Any
    training: bool = False
    random: bool = True
    batch_first: bool = True
    dense_output: bool = False
    convolutional: bool = False
    output_scale: tuple[float, float] = (1.0, 1.0)
    corrections: Sequence[Tensor | None] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    class_dim: int | None = None
    state: Any = None


class Rule:
    """Base class of rules, which combine random weights with activations.

    A rule computes one value per Bayesian parameter from a posterior and a noise key: a tensor, or a tensor-like random
    weight. It is independent of methods. To add a rule, write a subclass with `weights` and decorate it with
    `leanbayes.rules.register_rule`. Users then select it by its name, with `rule=` of a method or with `bnn.using`.

    Attributes:
        name: The name of the rule.
        random: Whether two passes differ.
        shared_noise: Whether all positions of an example share one weight sample, as under the posterior.
        per_example: Whether each example of a batch has its own noise.
        needs_factorized: Whether the rule uses only the variance of each weight, and so ignores correlations.
        needs_weights: Whether the rule requires a model with Bayesian weights.
        needs_graph: Whether the network runs with gradients enabled, also under `torch.no_grad`.
        needs_scores: Whether `finish` needs an output that the likelihood of the model can score.

    Example:
        A rule that uses the mean plus one standard deviation:

        >>> @leanbayes.rules.register_rule
        ... class UpperBound(lb.Rule):
        ...     name = "upper"
        ...     random = False
        ...
        ...     def weights(self, posterior, key, with_kl):
        ...         flat = posterior.mean() + posterior.variance().sqrt()
        ...         return posterior.layout.split(flat), posterior.kl(key) if with_kl else None
        >>> with bnn.using("upper"):
        ...     output = bnn(x)
    """

    name: ClassVar[str]
    random: ClassVar[bool] = True
    shared_noise: bool = True
    per_example: ClassVar[bool] = False
    needs_factorized: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    needs_graph: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the value of each parameter for one forward pass.

        Args:
            posterior: The posterior of the weights.
            key: The key of the noise, an int64 tensor (seed, index).
            with_kl: Whether to compute the KL as well.

        Returns:
            One value per parameter of `posterior.layout`, and the KL, or None without `with_kl`.
        """
        raise NotImplementedError  # abstract

    def buffers(self) -> Mapping[str, Callable[[], Tensor]]:
        """Return functions that create constant tensors, which the model stores and moves to its device."""
        return {}

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        """Prepare a call of the network, in which `values` take the place of the weights."""

    def finish(self, output: Any, context: PassContext) -> Any:
        """Return the result of a call, given the output of the network."""
        return output

    def position(self, values: Sequence[Any]) -> int:
        """Return how much noise a call of the network has used so far."""
        return 0

    def move_to(self, values: Sequence[Any], position: int) -> None:
        """Continue from an earlier `position`, to compute a part of the network again."""

    def copied(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return values of the same tensors, so that what a pass caches in one of them is not seen in the other."""
        return values

    @property
    def mean_rule(self) -> "Rule | None":
        """The rule whose mean a prediction uses, or None for the mean of this one."""
        return None

    def combined(self, output: Any, first: Any, class_dim: int | None, fits: Sequence[Any]) -> Any:
        """Return what a prediction uses, given the outputs of this rule and of its `mean_rule`.

        `fits` is what `lb.calibrate` fitted: a `MarginFit` for each number of margins.
        """
        raise NotImplementedError  # only for rules with a `mean_rule`

    def calibrated_like(self, other: "Rule") -> bool:
        """Whether what `lb.calibrate` fitted for `other` is valid for this rule."""
        return False

    def check(self, posterior: Posterior) -> None:
        """Check that this rule does not ignore correlations of a posterior, and that the posterior supports it.

        Raises:
            UnsupportedOperation: The rule needs independent weights, and those of the posterior are correlated; or the
                posterior is sharded, and the rule needs all weights at once.
        """
        if posterior.rules is not None and self.name not in posterior.rules:
            raise UnsupportedOperation(
                f"The rule {self.name!r} does not work with a sharded posterior: use one of "
                f"{', '.join(map(repr, posterior.rules))}, or save the model and load it in one process."
            )
        if self.needs_factorized and not posterior.factorized:
            raise UnsupportedOperation(
                f"The rule {self.name!r} uses only the variance of each weight, but the weights of this "
                f"{type(posterior).__name__} are correlated: use the rule 'sample' or 'mean'."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


RULES: dict[str, Rule] = {}
R = TypeVar("R", bound=type[Rule])


def register_rule(cls: R) -> R:
    """Register a rule class under its name, with its default settings.

    Args:
        cls: A subclass of `Rule` whose constructor needs no arguments.

    Returns:
        The class itself, so that this is a decorator.

    Example:
        >>> @leanbayes.rules.register_rule
        ... class Mean(lb.Rule):
        ...     name = "my_mean"
        ...
        ...     def weights(self, posterior, key, with_kl):
        ...         return posterior.center(), posterior.kl(key) if with_kl else None
    """
    RULES[cls.name] = cls()
    return cls


def get_rule(name: str | Rule, make: Callable[[str], Rule] | None = None) -> Rule:
    """Return the rule of a name, such as "moments", or of a name with settings. A rule itself is returned unchanged.

    Args:
        name: The name, optionally with settings that differ from the defaults.
        make: What returns the rule of a name alone. By default the one with its default settings.

    Example:
        >>> get_rule("adjoint:mean=moments,margins=3")
    """
    if isinstance(name, Rule):
        return name
    base, colon, settings = name.partition(":") if isinstance(name, str) else (name, "", "")
    base = base if base in RULES else lookup("rule", base, RULES)
    known = RULES[base] if make is None else make(base)
    if not colon:
        return known
    if not dataclasses.is_dataclass(known):
        raise LeanBayesError(f"The rule {base!r} has no settings: write rule={base!r}.")
    return config.change(known, parse_settings(settings, name))


def rule_text(rule: Rule, default: Rule | None) -> str:
    """Return the name of a rule with its settings that differ from the default of this name, as `get_rule` reads it.

    Args:
        rule: The rule.
        default: The rule that its name alone means. None if there is none.
    """
    if type(rule) is not type(default) or not dataclasses.is_dataclass(rule):
        return rule.name
    names = [one.name for one in dataclasses.fields(rule) if getattr(rule, one.name) != getattr(default, one.name)]
    return f"{rule.name}:{','.join(f'{name}={getattr(rule, name)}' for name in names)}" if names else rule.name
