"""`BayesianModel` = network + posterior + rule.

No layer is replaced. The chosen parameters leave the network for the flat vector of a posterior; for one forward pass
the network's own modules see the values that the rule gives in their place, and then these are gone again.
"""

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from leanbayes import noise, prediction
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout, Report
from leanbayes.likelihoods import Likelihood
from leanbayes.method import Method
from leanbayes.network import call_with, evaluation_mode, in_first_order, places
from leanbayes.posteriors import Posterior
from leanbayes.rules import Rule


class Draw(NamedTuple):
    """What one forward pass is to do: the key of its noise, its number among several, and whether to sum the KL."""

    key: Tensor
    number: int = 0
    with_kl: bool = False


class StochasticNetwork(nn.Module):
    """A network whose randomness is not in its weights: it is called with the draw in front of the inputs."""

    members: int | None = None  # how many distinct draws there are, if they can be counted

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one draw, or for None the network without noise."""
        raise NotImplementedError  # abstract

    def plain(self) -> nn.Module:
        """Return the network without randomness."""
        raise NotImplementedError  # abstract


class BayesianModel(nn.Module):
    """A network with a distribution over its weights. Call it like the network; each call is one draw."""

    probe_signs: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        posterior: Posterior,
        method: Method,
        likelihood: Likelihood,
        report: Report,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.network = network
        self.posterior = posterior
        self.likelihood = likelihood
        self.noise = noise.NoiseStream(seed)
        self.method = method
        self.report = report
        self.trained_rule: str | None = None
        self._rule = method.make_rule(method.rule)
        self._frozen_key: Tensor | None = None
        self._values: Sequence[Any] | None = None  # what stands in the network now, in place of the parameters
        self.row_memory: dict[Any, int] = {}  # bytes that one example takes, as `predict` has measured
        # Factors of the mean and of the std of what one pass by moments gives: see calibrate_moments.
        self.moment_scale: tuple[float, float] = (1.0, 1.0)
        self.register_buffer("probe_signs", None, persistent=False)  # the rule `moments` puts them here
        self.batch_first = all(getattr(module, "batch_first", True) for module in network.modules())
        # An empty buffer per dtype of the network: it follows .to(dtype), so weights are always cast as they should.
        dtypes = sorted({slot.dtype for slot in self.layout}, key=str)
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"_dtype_{number}", torch.empty(0, dtype=dtype), persistent=False)
        self._slot_dtypes = [f"_dtype_{dtypes.index(slot.dtype)}" for slot in self.layout]
        self._places = [places(network, slot.names) for slot in self.layout]
        last = self._places[-1][0][0] if self._places else None  # outputs of dense prediction have pixels
        self.ends_in_convolution = isinstance(last, nn.modules.conv._ConvNd)
        self._rule.prepare(self)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where each Bayesian parameter lies in the flat vector."""
        return self.posterior.layout

    @property
    def rule(self) -> str:
        """The rule by which weights meet activations; assign a name to change it."""
        return self._rule.name

    @rule.setter
    def rule(self, rule: str | Rule) -> None:
        self._rule = self.method.make_rule(rule)
        self._rule.prepare(self)

    @property
    def current_rule(self) -> Rule:
        """The rule itself."""
        return self._rule

    @property
    def noise_per_example(self) -> bool:
        """Whether each example of a batch has noise of its own."""
        return self._rule.per_example or isinstance(self.network, StochasticNetwork)

    @property
    def convolves(self) -> bool:
        """Whether Bayesian weights serve many positions of an input, so that these share their noise."""
        modules = (module for places_of_slot in self._places for module, _ in places_of_slot)
        return any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)

    @property
    def members(self) -> int | None:
        """How many distinct draws there are, if they can be counted, as in an ensemble."""
        return self.network.members if isinstance(self.network, StochasticNetwork) else None

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.noise.state.device

    @property
    def kl_kind(self) -> str:
        """Whether `kl` is "exact" or "monte-carlo"."""
        return self.posterior.kl_kind

    def scale_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the posterior's spread: give them Adam, at about 1e-2."""
        return list(self.posterior.scale_parameters())

    def mean_parameters(self) -> list[nn.Parameter]:
        """Return every other trainable parameter: means, norms, biases."""
        scales = {id(p) for p in self.posterior.scale_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in scales]

    def extra_repr(self) -> str:
        """Describe the model in the line that print() begins with."""
        return f"{type(self.method).__name__}, rule={self.rule!r}, {self.posterior.random_weights:,} Bayesian weights"

    # -- one forward pass ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, _draw: Draw | None = None, **kwargs: Any) -> Any:
        """Run the network with one draw; with `_draw.with_kl`, return (output, KL)."""
        draw = self._any_draw() if _draw is None else _draw
        before = self._values
        kl = self._install(draw)
        try:
            output = self._call_network(draw, *args, **kwargs)
        finally:
            self._put(before)
        return (output, kl) if draw.with_kl else output

    def _any_draw(self, generator: torch.Generator | None = None) -> Draw:
        """Take the next draw; of an ensemble, a member that goes by its key."""
        draw = self.next_draw(generator)
        return draw if self.members is None else draw._replace(number=int(draw.key.sum()) % self.members)

    def next_draw(self, generator: torch.Generator | None = None, number: int = 0, with_kl: bool = False) -> Draw:
        """Take the next key: of the frozen draw, of a generator, or of the model's own stream."""
        if self._frozen_key is not None:
            key = self._frozen_key.to(self.device)
        elif generator is not None:
            key = noise.key_from(generator, self.device)
        else:
            key = self.noise.next(number)
        return Draw(key, number, with_kl)

    def _dtypes(self) -> list[torch.dtype]:
        """Return the dtype that each slot's weights must have now."""
        return [getattr(self, name).dtype for name in self._slot_dtypes]

    def _install(self, draw: Draw) -> Tensor | None:
        values, kl = self._rule.weights(self.posterior, draw.key, draw.with_kl)
        dtyped = zip(values, self._dtypes(), strict=True)
        self._put([value if value.dtype == dtype else value.to(dtype) for value, dtype in dtyped])
        return kl

    def _put(self, values: Sequence[Any] | None) -> None:
        """Put one value per slot in the places of the parameters, or None."""
        self._values = values
        for number, places_of_slot in enumerate(self._places):
            for module, attribute in places_of_slot:
                setattr(module, attribute, None if values is None else values[number])

    def _call_network(self, draw: Draw, *args: Any, **kwargs: Any) -> Any:
        self._rule.begin(self, self._values or (), (args, kwargs))
        if isinstance(self.network, StochasticNetwork):
            return self.network(draw if self._rule.random else None, *args, **kwargs)
        return self._rule.finish(self, self.network(*args, **kwargs))

    @contextlib.contextmanager
    def drawn(self, draw: Draw | None = None, generator: torch.Generator | None = None) -> Iterator[Callable[..., Any]]:
        """Keep one draw in the network for a block, for many calls or other methods of it; yields what to call.

        `with bnn.drawn(): bnn.network.generate(...)` works under no_grad. With activation checkpointing, which runs
        parts of the network again, take the loss and its backward pass inside such a block.
        """
        draw = self._any_draw(generator) if draw is None else draw
        before = self._values
        self._install(draw)
        try:
            yield lambda *args, **kwargs: self._call_network(draw, *args, **kwargs)
        finally:
            self._put(before)

    @contextlib.contextmanager
    def holding(self, weights: Tensor) -> Iterator[nn.Module]:
        """Keep given weights, one flat vector, in the network for a block; yields the network."""
        with self.with_values(self.layout.split(weights)) as network:
            yield network

    @contextlib.contextmanager
    def with_values(self, values: Sequence[Any]) -> Iterator[nn.Module]:
        """Keep given values, one per slot, in the network for a block; yields the network."""
        before = self._values
        dtyped = zip(values, self._dtypes(), strict=True)
        self._put([value if value.dtype == dtype else value.to(dtype) for value, dtype in dtyped])
        try:
            yield self.network
        finally:
            self._put(before)

    @contextlib.contextmanager
    def using(self, rule: str | Rule) -> Iterator[Self]:
        """Use another rule inside the block: its name, or one with settings of its own."""
        before = self._rule
        self.rule = rule
        try:
            yield self
        finally:
            self._rule = before

    @contextlib.contextmanager
    def frozen(self, seed: int) -> Iterator[Self]:
        """Use the same noise in every pass inside the block: the draw that belongs to `seed`."""
        before, self._frozen_key = self._frozen_key, noise.make_key(seed, device=self.device)
        try:
            yield self
        finally:
            self._frozen_key = before

    def kl(self, generator: torch.Generator | None = None) -> Tensor:
        """KL(q ‖ prior), summed over all weights; see `kl_kind` for how it is computed."""
        exact = self.kl_kind == "exact"  # then no noise is spent on it
        return self.posterior.kl(self.noise.state if exact else self.next_draw(generator).key)

    # -- prediction ---------------------------------------------------------------------------------------------------

    def predict(
        self,
        x: Any,
        samples: int | None = None,
        *,
        rule: str | Rule | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int | None = None,
        keep_outputs: bool = False,
    ) -> Any:
        """Predict with several draws, in evaluation mode: a `ClassPrediction`, or what else the likelihood makes.

        x: a batch (tensor, or tuple or dict of tensors). samples: by default what the method says, and 1 without noise.
        memory_budget: bytes that the activations may take; large batches are cut to fit.
        keep_outputs: keep every draw's raw output, (samples, batch, ...).
        The rule `moments` takes one pass, whatever `samples` says, and its raw output is the mean.
        """
        return prediction.predict(self, x, samples, rule, generator, memory_budget, keep_outputs)

    # -- after training -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_batchnorm(self, batches: Iterable[Any], generator: torch.Generator | None = None) -> int:
        """Recompute the statistics of all BatchNorm layers under the posterior, one draw a batch.

        batches: inputs, or (input, label) pairs. Returns how many BatchNorm layers there are.
        """
        norms = [m for m in self.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
        iterator = iter(batches)
        first = next(iterator, None) if norms else None
        if first is None:
            if norms:
                raise LeanBayesError("refresh_batchnorm() got no batches: pass some training inputs.")
            return 0
        momenta = [norm.momentum for norm in norms]
        try:
            with evaluation_mode(self):
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # a plain average over all batches
                    norm.train()
                for batch in itertools.chain([first], iterator):
                    x = batch[0] if isinstance(batch, (tuple, list)) else batch
                    for number in range(self.members or 1):
                        call_with(self, x, _draw=self.next_draw(generator, number))
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return len(norms)

    @torch.no_grad()
    def calibrate_moments(
        self,
        batches: Iterable[Any],
        samples: int = 30,
        generator: torch.Generator | None = None,
        *,
        to: Literal["draws", "labels"] = "draws",
    ) -> tuple[float, float]:
        """Fit two factors, of the mean and of the std that one pass gives; `save` keeps them. Returns the two.

        batches: inputs, or (input, label) pairs; some hundred held-out examples do.
        to: draws, whose probabilities are come near where outputs are logits, and whose mean and std where they are
            not; or labels, where outputs are logits: these must be held out, and make up for draws that are too sure
            or too unsure. samples: how many draws.
        """
        from leanbayes.calibration import fit_moment_scale

        return fit_moment_scale(self, batches, samples, generator, to)

    def restrict(self, rate: float, data: Iterable[Any] | None = None) -> "BayesianModel":
        """Return a copy in which only a share of all weights keeps its spread, those that matter most; none is trained.

        data: batches (x, y) to see what matters; without, it is how far each spread has shrunk from the prior.
        """
        from leanbayes.restriction import restrict

        return restrict(self, rate, data)

    @torch.no_grad()
    def to_deterministic(self) -> nn.Module:
        """Return a plain network at the posterior mean, with ordinary parameters; tied ones are tied."""
        network = copy.deepcopy(self.network)
        network = network.plain() if isinstance(network, StochasticNetwork) else network
        values = self.layout.split(self.posterior.mean())
        for slot, value, dtype in zip(self.layout, values, self._dtypes(), strict=True):
            parameter = nn.Parameter(value.to(dtype).clone())
            for module, attribute in places(network, slot.names):
                setattr(module, attribute, parameter)
        return in_first_order(network)

    @torch.no_grad()
    def weight_variances(self) -> dict[str, Tensor]:
        """Return the variance of each Bayesian parameter, by every name it goes by."""
        parts = self.layout.split(self.posterior.variance())
        return {name: part for slot, part in zip(self.layout, parts, strict=True) for name in slot.names}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically; `lb.load` reads it."""
        from leanbayes.saving import save

        save(self, path)

    def saved_layout(self) -> Layout:
        """Return the layout with the dtypes that the weights have now."""
        return Layout([replace(slot, dtype=dtype) for slot, dtype in zip(self.layout, self._dtypes(), strict=True)])
