"""What a rule is: the values that a network's layers see in place of their weights, for one forward pass."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from leanbayes.posteriors import Posterior


class Rule:
    """Turns a posterior and a key into one value per slot: tensors, or tensor-like random weights."""

    name: ClassVar[str]
    random: ClassVar[bool] = True  # whether two passes differ
    shared_noise: bool = True  # one weight draw for all positions of an example, as the posterior says
    per_example: ClassVar[bool] = False  # whether each example of a batch has noise of its own

    def prepare(self, model: Any) -> None:
        """Give a model what it needs to use this rule; called when the rule is chosen."""

    def begin(self, model: Any, values: Sequence[Any], inputs: Any) -> None:
        """Start a call of the network with some inputs, in which `values` stand in the places of the weights."""

    def finish(self, model: Any, output: Any) -> Any:
        """Return what a call of the network gives, from what the network gave."""
        return output

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the slots' values, and the KL if it is asked for."""
        raise NotImplementedError  # abstract
