"""An average of the parameters of a model in training: exponential, or with equal weights.

The average is kept beside the model. `averaged` puts it into the model for an evaluation, and `adopt` for good.

BatchNorm's running statistics are averaged with the same weights as the parameters, because the statistics of the last
steps do not fit weights from many steps before. The average of the statistics is not the statistics of the average, so
it serves for evaluations during training, where it costs nothing. After training `Recipe.refresh_batchnorm` computes
the exact ones.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from leanbayes.model.bayesian import BayesianModel
from leanbayes.posteriors import SparsePointPosterior


class MovingAverage:
    """Averages the trainable parameters of a model, and the statistics of its BatchNorm layers.

    After step t (from 0), average ← d·average + (1 - d)·parameters with d = min(decay, (1 + t)/(10 + t)), so that the
    initial parameters are soon forgotten. With equal weights, d = t/(t + 1): the mean of the parameters after all
    steps (stochastic weight averaging, SWA). Averages of half-precision parameters are kept in float32.

    If a sparse posterior exchanges weights, the averages of the remaining weights move with them, and that of a new
    weight starts from its current value.

    Args:
        bnn: The model. Its parameters change in place.
        decay: The largest d, or "equal".
        reduce: Returns the mean of a tensor over all processes. Their parameters are equal, but not their statistics.
        saved: The tensors of an earlier average to continue from, or None to start from the current parameters.
    """

    def __init__(
        self,
        bnn: BayesianModel,
        decay: float | str,
        reduce: Callable[[Tensor], Tensor],
        saved: list[Tensor] | None = None,
    ) -> None:
        self._bnn, self._decay, self._reduce = bnn, decay, reduce
        self._start()
        if saved is not None:
            for mine, given in zip(self._averages, saved, strict=True):
                mine.copy_(given)

    def _start(self) -> None:
        """Start from the current values."""
        self._parameters, self._statistics = _trainable(self._bnn), _statistics(self._bnn)
        self._averages = [_accumulator(tensor) for tensor in self._tensors()]
        posterior = self._bnn.posterior
        self._positions = posterior.index.clone() if isinstance(posterior, SparsePointPosterior) else None
        self._version = _version(self._bnn)

    def _tensors(self) -> list[Tensor]:
        return [*self._parameters, *self._statistics]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the current parameters, after the given step and the method's hook."""
        now = _trainable(self._bnn)
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            self._start()  # a hook has replaced parameters
            return
        if _version(self._bnn) != self._version:
            self._follow_exchange()
        decay = step / (step + 1) if isinstance(self._decay, str) else min(self._decay, (1 + step) / (10 + step))
        values = [tensor.to(mine.dtype) for tensor, mine in zip(self._tensors(), self._averages, strict=True)]
        torch._foreach_lerp_(self._averages, values, 1 - decay)

    def _follow_exchange(self) -> None:
        """Move the averages of a sparse posterior's entries to the current positions."""
        posterior, before = self._bnn.posterior, self._positions
        assert isinstance(posterior, SparsePointPosterior)
        assert before is not None
        places = torch.searchsorted(before, posterior.index).clamp_max(len(before) - 1)
        known = before[places] == posterior.index
        entries = {id(parameter) for parameter in posterior.entries()}
        for parameter, mine in zip(self._parameters, self._averages, strict=False):
            if id(parameter) in entries:
                mine.copy_(torch.where(known, mine[places], parameter))
        self._positions, self._version = posterior.index.clone(), _version(self._bnn)

    # -- use ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the average into the model inside the block, and the current values back after it."""
        before = [tensor.detach().clone() for tensor in self._tensors()]
        self.adopt()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._tensors(), before, strict=True):
                    tensor.copy_(value)

    @torch.no_grad()
    def adopt(self) -> None:
        """Put the average into the model."""
        for tensor, value in zip(self._tensors(), self.state(), strict=True):
            tensor.copy_(value)

    def state(self) -> list[Tensor]:
        """Return the averages, equal in all processes. All processes take part."""
        count = len(self._parameters)
        return [*self._averages[:count], *map(self._reduce, self._averages[count:])]


def _trainable(bnn: BayesianModel) -> list[nn.Parameter]:
    return [p for p in bnn.parameters() if p.requires_grad and p.is_floating_point()]


def _statistics(bnn: BayesianModel) -> list[Tensor]:
    norms = (m for m in bnn.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats)
    return [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None]


def _accumulator(tensor: Tensor) -> Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32 if half else tensor.dtype, copy=True)


def _version(bnn: BayesianModel) -> int:
    """Return a number that changes when a sparse posterior exchanges weights."""
    return bnn.posterior.index._version if isinstance(bnn.posterior, SparsePointPosterior) else 0
