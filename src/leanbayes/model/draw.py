"""What one forward pass does, and networks whose randomness is not in their weights."""

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn


class Draw(NamedTuple):
    """What one forward pass does.

    Attributes:
        key: The key of its noise.
        number: Its number among several.
        with_kl: Whether it returns the KL.
        training: Whether it is a pass of a loss. Members that share weights then divide the examples among them.
        joint: Whether it computes all members of a network whose `loss_pass` is joint. The outputs then have one row
            per example and member, those of one example next to each other.
    """

    key: Tensor
    number: int = 0
    with_kl: bool = False
    training: bool = False
    joint: bool = False


class StochasticNetwork(nn.Module):
    """A network whose randomness is not in its weights: it is called with the `Draw` before the inputs.

    Attributes:
        members: How many distinct samples there are, if they can be counted.
        loss_pass: What one pass of a loss trains: one member with all examples, all members with the examples divided
            among them, or all members with all examples (joint).
        mean_apart: Whether the mean of members has statistics of BatchNorm of its own.
    """

    members: int | None = None
    loss_pass: Literal["member", "divided", "joint"] = "member"
    mean_apart: bool = False

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run the network with the noise of `draw`, or without noise for None."""
        raise NotImplementedError  # abstract

    def plain(self) -> nn.Module:
        """Return the network without randomness."""
        raise NotImplementedError  # abstract

    def member(self, number: int) -> nn.Module:
        """Return a member as a plain network, if members can be counted."""
        raise NotImplementedError  # abstract

    def weight_names(self, name: str) -> list[str]:
        """Return the names that a Bayesian parameter of the user's network has here: several if there are copies."""
        return [name]

    def reference(self) -> nn.Module:
        """Return a plain network of the user's architecture, which costs are compared with: by default a member."""
        return self.member(0)

    def described_network(self) -> nn.Module:
        """Return a network whose `forward` has the arguments of this one."""
        return next(iter(self.children()))
