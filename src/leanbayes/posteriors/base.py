"""What every posterior offers; a new one is a subclass in a file of its own."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes import noise
from leanbayes.layout import Layout


class Posterior(nn.Module):
    """A distribution q(w) over the flat vector of a layout's weights.

    A subclass stores what it needs and gives `mean`, `variance`, `sample` and `kl`; the rules need nothing else.
    All tensors have `layout.numel` entries, and all noise comes from the key.
    """

    sizes_vary: bool = False  # whether its tensors may have other lengths in a file than a new one has
    kl_is_mean: bool = False  # whether `kl` is a mean, which stands beside the mean loss as it is
    _steady_std: Tensor | None = None  # what draws share, while it is steady

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def mean(self) -> Tensor:
        """E[w]."""
        raise NotImplementedError  # abstract

    def variance(self) -> Tensor:
        """Var[w], elementwise."""
        raise NotImplementedError  # abstract

    def sample(self, key: Tensor) -> Tensor:
        """One draw of all weights, differentiable in the parameters of q."""
        raise NotImplementedError  # abstract

    def draw(self, key: Tensor) -> Sequence[Any]:
        """One draw as a value for each slot; a subclass may give some that layers multiply by faster than tensors."""
        if self._steady_std is None:
            return self.layout.split(self.sample(key))
        mean = self.mean()
        epsilon = noise.normal(mean, key)
        return self.layout.split(torch.addcmul(mean, self._steady_std, epsilon, out=epsilon))

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Promise draws that no parameter changes inside the block, and that no gradient is asked for."""
        before, self._steady_std = self._steady_std, self.std_of_draws()
        try:
            yield
        finally:
            self._steady_std = before

    def std_of_draws(self) -> Tensor | None:
        """Return σ of all weights if that saves time, and a draw is E[w] + σ·ε(key) to the last bit; else None."""
        return None

    def centre(self) -> Sequence[Any]:
        """The mean as a value for each slot, as `draw` gives them."""
        return self.layout.split(self.mean())

    def random_slots(self) -> Sequence[bool]:
        """Whether each slot has any variance; rules hand the others to the network as plain tensors."""
        return [True] * len(self.layout)

    @property
    def random_weights(self) -> int:
        """How many weights are Bayesian."""
        return self.layout.numel

    def kl(self, key: Tensor) -> Tensor:
        """KL(q ‖ prior), summed over the weights; the key is used where it has to be sampled."""
        raise NotImplementedError  # abstract

    @property
    def kl_kind(self) -> str:
        """Whether `kl` is "exact" (a closed form) or "monte-carlo" (from one draw)."""
        return "exact"

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """A draw and the KL; a subclass may do both in one pass."""
        return self.sample(key), self.kl(key)

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The variance and the KL; a subclass may do both in one pass."""
        return self.variance(), self.kl(key)

    def perturbation(self, key: Tensor) -> Tensor:
        """A draw less the mean, for flipout; the noise is symmetric around 0."""
        return self.sample(key) - self.mean()

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """A perturbation and the KL; a subclass may do both in one pass."""
        return self.perturbation(key), self.kl(key)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that hold spreads rather than means: they want an adaptive optimiser."""
        return iter(())

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a file holds of its state; a subclass may write some tensors in fewer bytes."""
        return tensors

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Undo `to_file`; raises ValueError for what it could not have written."""
        return tensors

    def size(self) -> int:
        """How many numbers are stored: parameters and buffers."""
        return sum(t.numel() for t in [*self.parameters(), *self.buffers()])
