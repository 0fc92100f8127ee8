"""What one forward pass does, and networks whose randomness is not in their weights."""

from typing import Any, NamedTuple

from torch import Tensor, nn


class Draw(NamedTuple):
    """What one forward pass does.

    Attributes:
        key: The key of its noise.
        number: Its number among several.
        with_kl: Whether it returns the KL.
        training: Whether it is a pass of a loss. Members that share weights then divide the examples among them.
    """

    key: Tensor
    number: int = 0
    with_kl: bool = False
    training: bool = False


class StochasticNetwork(nn.Module):
    """A network whose randomness is not in its weights: it is called with the `Draw` before the inputs."""

    members: int | None = None  # how many distinct samples there are, if they can be counted
    shares_weights: bool = False  # whether members have common weights, so that one pass trains all of them

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run the network with the noise of `draw`, or without noise for None."""
        raise NotImplementedError  # abstract

    def plain(self) -> nn.Module:
        """Return the network without randomness."""
        raise NotImplementedError  # abstract

    def member(self, number: int) -> nn.Module:
        """Return a member as a plain network, if members can be counted."""
        raise NotImplementedError  # abstract

    def described_network(self) -> nn.Module:
        """Return a network whose `forward` has the arguments of this one."""
        return next(iter(self.children()))
