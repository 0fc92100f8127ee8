"""Groups of weights with a common random factor (Neklyudov et al. 2017): w_i = μ_i·θ_g for all weights i of group g.

A group is an input of a layer: all weights of one feature or channel. θ has a truncated log-normal distribution between
e⁻²⁰ and 1, whose prior is uniform in log θ. Groups with little signal are pruned: only the others are stored.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian, noise
from leanbayes.core import truncated_log_normal as log_normal
from leanbayes.core.layout import Layout
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import GroupFactors, Posterior
from leanbayes.posteriors.input_groups import InputGroups

LOW, HIGH = -20.0, 0.0  # of log θ, as in the paper
_START = 0.05  # the initial distance of log θ from HIGH
_UNIT = 5.0  # of the parameters of log θ: it has a range of 20, and Adam moves a parameter by 0.01 in a step


class GroupNoisePosterior(Posterior):
    """One number per weight, μ, and two per group: log θ ~ N(-softplus(5·distance), softplus(5·ρ)²), truncated.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        std: The initial std of log θ.
        snr: The smallest E[θ]/std[θ] of groups that `prune` keeps.
    """

    factorized = False  # the weights of a group have the same factor
    has_groups = True
    sizes_vary = True
    caches_moments = True
    kept: Tensor

    def __init__(self, layout: Layout, mean: Tensor, std: float, snr: float) -> None:
        super().__init__(layout)
        self.snr = snr
        self._inputs = InputGroups(layout)
        self.groups = self._inputs.total
        self.distance, self.rho = (
            nn.Parameter(gaussian.inverse_softplus(mean.new_full((self.groups,), start)) / _UNIT)
            for start in (_START, std)
        )
        factor, _ = self._moments()
        self.mu = nn.Parameter(
            mean / self._inputs.expand(factor.detach())
        )  # the mean network is that of the given weights
        self.register_buffer("kept", torch.zeros(0, dtype=torch.int64, device=mean.device))  # empty if all are kept
        self._places: tuple[Tensor, Tensor] | None = None

    # -- groups -------------------------------------------------------------------------------------------------------

    @property
    def is_dense(self) -> bool:
        """Whether no group is pruned."""
        return len(self.rho) == self.groups

    @property
    def random_weights(self) -> int:
        """The number of weights that are not pruned; all have noise."""
        return len(self.mu)

    def _located(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the weights that are not pruned, and the place of their groups among those kept."""
        if self._places is None or self._places[0].device != self.kept.device:
            place = self.kept.new_full((self.groups,), -1)
            place[self.kept] = torch.arange(len(self.kept), device=place.device)
            each = self._inputs.expand(place)
            index = (each >= 0).nonzero()[:, 0]
            self._places = index, each[index]
        return self._places

    def _scaled(self, per_group: Tensor, values: Tensor) -> Tensor:
        """Return the flat vector of each weight's value times that of its group, 0 for pruned weights."""
        if self.is_dense:
            return values * self._inputs.expand(per_group)
        index, place = self._located()
        return values.new_zeros(self.layout.numel).index_put_((index,), values * per_group[place])

    @torch.no_grad()
    def prune(self) -> int:
        """Set groups with a low signal-to-noise ratio to zero, store only the others, and return how many these are.

        The parameters become shorter: make new optimizers if the training continues.
        """
        mean, variance = self._moments()
        chosen = (mean >= self.snr * variance.sqrt()).nonzero()[:, 0]
        if len(chosen) < len(self.rho):
            before = None if self.is_dense else self._located()[1]
            self.kept = chosen if self.is_dense else self.kept[chosen]
            self._places = None
            trained = self.mu.requires_grad
            kept = self._located()[0] if before is None else torch.isin(before, chosen)
            self.mu = nn.Parameter(self.mu[kept], trained)
            self.distance = nn.Parameter(self.distance[chosen], trained)
            self.rho = nn.Parameter(self.rho[chosen], trained)
        return len(chosen)

    # -- moments, samples and the KL ----------------------------------------------------------------------------------

    def _settings(self) -> tuple[Tensor, Tensor]:
        """Return m and s of log θ, in single precision at least."""
        half = self.rho.dtype in (torch.float16, torch.bfloat16)
        distance, rho = (p.float() if half else p for p in (self.distance, self.rho))
        return (-F.softplus(_UNIT * distance)).clamp_min(LOW), F.softplus(_UNIT * rho)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return E[θ] and Var[θ] of each group."""
        return log_normal.mean_and_variance(*self._settings(), LOW, HIGH)

    def mean(self) -> Tensor:
        """Return μ·E[θ]."""
        return self._scaled(self._moments()[0].to(self.mu.dtype), self.mu)

    def variance(self) -> Tensor:
        """Return μ²·Var[θ]."""
        return self._scaled(self._moments()[1].to(self.mu.dtype), self.mu.square())

    def sample(self, key: Tensor) -> Tensor:
        """Return μ·θ, with one θ per group."""
        loc, scale = self._settings()
        theta = log_normal.sample(loc, scale, LOW, HIGH, noise.normal(loc, key))
        return self._scaled(theta.to(self.mu.dtype), self.mu)

    def group_factors(self) -> GroupFactors:
        """Return μ, 0 for pruned weights, the groups, and samples of θ, which is 1 for pruned groups."""
        weights = self._scaled(torch.ones_like(self.rho, dtype=self.mu.dtype), self.mu)
        return GroupFactors(
            weights, self._inputs.views(torch.arange(self.groups, device=self.mu.device)), self._factors
        )

    def _factors(self, key: Tensor, examples: int) -> Tensor:
        loc, scale = (values.expand(examples, -1) for values in self._settings())
        theta = log_normal.sample(loc, scale, LOW, HIGH, noise.normal(loc.contiguous(), key))
        if self.is_dense:
            return theta
        return torch.ones(examples, self.groups, dtype=theta.dtype, device=theta.device).index_copy(1, self.kept, theta)

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q(θ) ‖ p(θ)), summed over the groups that are not pruned."""
        return log_normal.log_uniform_kl(*self._settings(), LOW, HIGH).sum()

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of θ."""
        yield self.distance
        yield self.rho

    def extra_repr(self) -> str:
        """Add the number of groups."""
        return f"{super().extra_repr()}, noise in {len(self.rho):,} of {self.groups:,} groups"

    # -- files --------------------------------------------------------------------------------------------------------

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode the numbers of the groups by their gaps."""
        return {**tensors, "kept": positions.encode(tensors["kept"])}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the groups, and check that there are as many weights as they have."""
        if not {"kept", "mu", "rho", "distance"} <= tensors.keys():
            return tensors
        count = tensors["rho"].numel()
        if tensors["rho"].shape != (count,) or tensors["distance"].shape != (count,) or count > self.groups:
            raise ValueError(f"{count} groups do not fit the network")
        kept = positions.decode(tensors["kept"], 0 if count == self.groups else count, self.groups)
        weights = self.layout.numel
        if count < self.groups:
            inside = torch.zeros(self.groups).index_fill_(0, kept, 1.0)
            weights = int(self._inputs.expand(inside).sum(dtype=torch.float64))
        if tensors["mu"].shape != (weights,):
            raise ValueError(f"the groups have {weights} weights, not {tuple(tensors['mu'].shape)}")
        return {**tensors, "kept": kept}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._places = None
