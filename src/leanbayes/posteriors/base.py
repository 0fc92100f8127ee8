"""The base class of posteriors. A new posterior is a subclass in its own file."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.cached import Cached, Check
from leanbayes.core.gaussian import NormalTerms
from leanbayes.core.layout import Layout


class DiagonalGaussian(NamedTuple):
    """Independent weights w ~ N(μ, softplus(ρ)²) with a Gaussian prior, as the parameters that store them.

    Attributes:
        mean: μ of each stored weight.
        rho: ρ of each Bayesian weight.
        prior: The prior of each Bayesian weight.
        places: The places of the Bayesian weights in `mean`. None if all are Bayesian.
    """

    mean: nn.Parameter
    rho: nn.Parameter
    prior: NormalTerms
    places: Tensor | None = None


class GroupFactors(NamedTuple):
    """Weights w_i = μ_i·θ_g with one random factor for each group g.

    Attributes:
        weights: The flat vector μ.
        groups: For each slot the number of the group of each weight, as a view that varies along one dimension.
        sample: The function that returns θ of all groups for a key and a number of examples, (examples, groups).
    """

    weights: Tensor
    groups: list[Tensor]
    sample: Callable[[Tensor, int], Tensor]


class SlotMoments(NamedTuple):
    """Mean and variance of each slot.

    Attributes:
        means: The means.
        variances: The variances.
        derived: For each slot, what passes have computed from both, by any key; None if passes do not share it.
    """

    means: list[Tensor]
    variances: list[Tensor]
    derived: list[dict[Any, Tensor]] | None


class Posterior(nn.Module):
    """A distribution q(w) over the flat vector of all weights of a layout.

    A subclass stores what it needs and implements `mean`, `variance`, `sample` and `kl`; rules need nothing else. All
    tensors have `layout.numel` entries, and all noise is a function of the key. Override `sample_and_kl`,
    `variance_and_kl` and `perturbation_and_kl` if one pass over the weights can compute both.

    Args:
        layout: The place of each parameter in the flat vector.

    Attributes:
        factorized: Whether the weights are independent, so that `variance` describes their noise completely. Rules that
            read variances only refuse other posteriors.
        sizes_vary: Whether its tensors can have other lengths in a file than in a new posterior.
        kl_is_mean: Whether `kl` is already a mean over weights, which `lb.elbo_loss` does not divide by `num_data`.
        rules: The names of the rules that can use it, None for all.
        has_groups: Whether groups of weights have a common random factor, which `group_factors` returns.
        caches_moments: Whether `mean` and `variance` depend on parameters and buffers only, so that passes without
            gradients can share them until a parameter or buffer changes.

    Example:
        >>> class PointMass(lb.Posterior):
        ...     def __init__(self, layout, mean):
        ...         super().__init__(layout)
        ...         self.mu = torch.nn.Parameter(mean)
        ...
        ...     def mean(self):
        ...         return self.mu
        ...
        ...     def variance(self):
        ...         return torch.zeros_like(self.mu)
        ...
        ...     def sample(self, key):
        ...         return self.mu
        ...
        ...     def kl(self, key):
        ...         return torch.zeros((), device=key.device)
    """

    factorized: bool = True
    sizes_vary: bool = False
    kl_is_mean: bool = False
    has_groups: bool = False
    caches_moments: bool = False
    rules: tuple[str, ...] | None = None
    _steady_std: Tensor | None = None  # σ that samples share inside `steady`

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self._slot_moments: Cached[SlotMoments] = Cached()

    def mean(self) -> Tensor:
        """Return E[w]."""
        raise NotImplementedError  # abstract

    def variance(self) -> Tensor:
        """Return Var[w], elementwise."""
        raise NotImplementedError  # abstract

    def sample(self, key: Tensor) -> Tensor:
        """Return one sample of all weights, differentiable in the parameters of q."""
        raise NotImplementedError  # abstract

    def group_factors(self) -> GroupFactors:
        """Return the random factors of groups of weights, if `has_groups`."""
        raise NotImplementedError  # abstract

    def key_of_member(self, key: Tensor, number: int) -> Tensor:
        """Return the key of the sample that belongs to a member of a network with members; by default any sample."""
        return key

    def draw(self, key: Tensor) -> Sequence[Any]:
        """Return one sample as a value per slot: a tensor, or an object with a faster product."""
        if self._steady_std is None:
            return self.layout.split(self.sample(key))
        mean = self.mean()
        epsilon = noise.normal(mean, key)
        return self.layout.split(torch.addcmul(mean, self._steady_std, epsilon, out=epsilon))

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Promise that inside the block no parameter changes and no gradient is needed, so that samples can share σ."""
        before, self._steady_std = self._steady_std, self.reusable_std()
        try:
            yield
        finally:
            self._steady_std = before

    def reusable_std(self) -> Tensor | None:
        """Return σ of all weights if sharing it saves time and μ + σ·ε(key) is `sample(key)` bit for bit, else None."""
        return None

    def center(self) -> Sequence[Any]:
        """Return the mean as a value per slot, of the same kinds as in `draw`."""
        return self.layout.split(self.mean())

    def slot_moments(self) -> "SlotMoments":
        """Return mean and variance of each slot. Do not change them: they are cached.

        With `caches_moments`, passes without gradients in evaluation mode share them until a parameter changes.
        """
        if self.training or not self.caches_moments or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return SlotMoments(self.layout.split(self.mean()), self.layout.split(self.variance()), None)

        def compute() -> SlotMoments:
            derived: list[dict[Any, Tensor]] = [{} for _ in self.layout]
            return SlotMoments(self.layout.split(self.mean()), self.layout.split(self.variance()), derived)

        if torch.compiler.is_compiling():  # which neither traces the mode nor compares tensors
            return compute()
        return self._slot_moments.get(torch.is_inference_mode_enabled(), (*self.parameters(), *self.buffers()), compute)

    def trusting(self) -> contextlib.AbstractContextManager[list[Check]]:
        """Use cached moments inside a block without waiting for a GPU, see `Cached.trusting`."""
        return self._slot_moments.trusting()

    def forget(self) -> None:
        """Drop cached moments."""
        self._slot_moments.clear()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. In training mode nothing is cached."""
        if mode:
            self.forget()
        return super().train(mode)

    def random_slots(self) -> Sequence[bool]:
        """Return for each slot whether it has any variance. Rules pass the other slots as plain tensors."""
        return [True] * len(self.layout)

    @property
    def random_weights(self) -> int:
        """The number of Bayesian weights."""
        return self.layout.numel

    def mean_std(self) -> Tensor:
        """Return the mean σ of the weights that have any."""
        stds = self.variance().sqrt()
        return stds.sum() / (stds > 0).sum().clamp_min(1)

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior), summed over the weights. The key is used if there is no closed form."""
        raise NotImplementedError  # abstract

    @property
    def kl_kind(self) -> str:
        """Whether `kl` is "exact" (a closed form) or "monte-carlo" (from one sample)."""
        return "exact"

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample and the KL."""
        return self.sample(key), self.kl(key)

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variance and the KL."""
        return self.variance(), self.kl(key)

    def perturbation(self, key: Tensor) -> Tensor:
        """Return a sample minus the mean, for flipout. It is symmetric around 0."""
        return self.sample(key) - self.mean()

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a perturbation and the KL."""
        return self.perturbation(key), self.kl(key)

    def example_key(self, key: Tensor) -> Tensor:
        """Return the key of noise that each example has of its own, beside the noise of the weights."""
        return key

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stds, which need an adaptive optimizer."""
        return iter(())

    def diagonal_gaussian(self) -> DiagonalGaussian | None:
        """Return the parameters of independent Gaussian weights with a Gaussian prior, or None if there are none."""
        return None

    def diagonal_gaussians(self) -> list[DiagonalGaussian]:
        """Return `diagonal_gaussian` in as many pieces as it is stored in; none if there are none."""
        found = self.diagonal_gaussian()
        return [] if found is None else [found]

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state as a file stores it. A subclass can store some tensors in fewer bytes."""
        return tensors

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Invert `to_file`.

        Raises:
            ValueError: If `to_file` cannot have written these tensors.
        """
        return tensors

    def size(self) -> int:
        """Return how many numbers are stored, in parameters and buffers."""
        return sum(t.numel() for t in [*self.parameters(), *self.buffers()])

    def extra_repr(self) -> str:
        """Return the numbers of weights and of Bayesian weights. A subclass adds what it stores."""
        total, random = self.layout.numel, self.random_weights
        return f"{total:,} weights, {'all' if random == total else f'{random:,}'} Bayesian"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
