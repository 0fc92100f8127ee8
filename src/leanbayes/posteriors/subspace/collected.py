"""Sparse weights that a chain leaves behind: some vectors with their common support, stored without its zeros."""

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import Posterior


class CollectedPosterior(Posterior):
    """The weights of a chain; after `finish` the vectors that were collected, each with the same probability.

    A subclass has the state of its chain. It overrides `is_finished`, `current` and `energy`, calls `begin` before the
    first `collect`, and its `finish` drops that state.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights to start from.

    Attributes:
        mu: The weights of the chain, and after `finish` the mean of those that were collected, at `index`.
        index: The positions of the columns of `members`.
        members: The collected weights, one vector per row; after `finish` their differences to `mu`.
    """

    factorized = False  # the weights of a collected vector belong together
    sizes_vary = True
    index: Tensor
    members: Tensor

    def __init__(self, layout: Layout, mean: Tensor) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.register_buffer("index", torch.zeros(0, dtype=torch.int64, device=mean.device))
        self.register_buffer("members", mean.new_zeros(0, 0))

    # -- the chain ----------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether only the collected weights are left."""
        raise NotImplementedError  # abstract

    def current(self) -> Tensor:
        """Return the weights that the network has now, before `finish`."""
        return self.mu

    def energy(self) -> Tensor:
        """Return the negative log prior of the current weights, up to a constant."""
        raise NotImplementedError  # abstract

    @torch.no_grad()
    def begin(self, index: Tensor) -> None:
        """Collect the weights at these positions from now on."""
        self.index, self.members = index, self.mu.new_zeros(0, len(index))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the current weights."""
        self.members = torch.cat([self.members, self.current()[self.index][None]])

    @torch.no_grad()
    def finish(self) -> None:
        """Store the mean of the collected weights and the difference of each to it."""
        if not len(self.members):
            raise LeanBayesError("The chain has collected no weights: train longer, or set until to a smaller share.")
        mean = self.members.mean(0)
        self.mu = nn.Parameter(mean, self.mu.requires_grad)
        self.members = self.members - mean

    # -- the posterior ------------------------------------------------------------------------------------------------

    def _place(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.layout.numel).index_put_((self.index,), values)

    def mean(self) -> Tensor:
        """Return the current weights, or the mean of those that were collected."""
        return self._place(self.mu) if self.is_finished else self.current()

    def variance(self) -> Tensor:
        """Return the variance of the collected weights, 0 before `finish`."""
        if not self.is_finished:
            return torch.zeros_like(self.mu)
        return self._place(self.members.square().mean(0))

    def sample(self, key: Tensor) -> Tensor:
        """Return the current weights, or collected weights that the key chooses."""
        if not self.is_finished:
            return self.current()
        chosen = self.members.index_select(0, (key[:2].sum() % len(self.members))[None])[0]
        return self._place(self.mu + chosen)

    def key_of_member(self, key: Tensor, number: int) -> Tensor:
        """Return the key of the collected weights with this number."""
        return noise.of_member(key, number)

    @property
    def random_weights(self) -> int:
        """The number of weights that are not zero for good."""
        return len(self.index) if self.is_finished else self.layout.numel

    def kl(self, key: Tensor) -> Tensor:
        """Return the negative log prior of the current weights, up to a constant; 0 after `finish`.

        It takes the place of a KL in the loss, so that the loss is the energy that the chain samples from.
        """
        return torch.zeros((), device=key.device) if self.is_finished else self.energy()

    def extra_repr(self) -> str:
        """Add the density, and how many weights are collected."""
        density = f"density={len(self.index) / max(self.layout.numel, 1):.3g}, " if self.is_finished else ""
        return f"{super().extra_repr()}, {density}{len(self.members)} collected"

    # -- files --------------------------------------------------------------------------------------------------------

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode the positions by their gaps."""
        return {**tensors, "index": positions.encode(tensors["index"])}

    def decoded(self, tensors: dict[str, Tensor], finished: bool) -> dict[str, Tensor]:
        """Decode the positions, and check the shapes.

        Args:
            tensors: The state as a file stores it.
            finished: Whether it is that of a chain that has ended.
        """
        members, size = tensors["members"], self.layout.numel
        if members.dim() != 2:
            raise ValueError(f"the collected weights have the shape {tuple(members.shape)}")
        count = members.shape[1]
        if tensors["mu"].shape != ((count,) if finished else (size,)) or (finished and not len(members)):
            raise ValueError(f"the weights have the shape {tuple(tensors['mu'].shape)}, and {count} are collected")
        return {**tensors, "index": positions.decode(tensors["index"], count, size)}
