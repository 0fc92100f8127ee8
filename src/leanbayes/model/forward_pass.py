"""The forward pass of a network whose weights come from a posterior: what the rule makes of them, and their noise."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from leanbayes.core import checkpointing, noise
from leanbayes.core.arguments import checked
from leanbayes.core.explained import explained_casts, explained_dtypes, explained_gradients
from leanbayes.core.network import quiet_recurrent_layers, returns_maps, tensors_of
from leanbayes.errors import LeanBayesError
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Method
from leanbayes.model.network_traits import NetworkTraits
from leanbayes.model.placed_values import PlacedValues
from leanbayes.model.sharded_pass import PlacedUnit, ShardedValues
from leanbayes.posteriors import Posterior
from leanbayes.rules import MarginFit, PassContext, Rule


class _Forward:
    """The `forward` of one model. `inspect.signature` finds the arguments of its network, as some trainers need."""

    def __init__(self, model: "PosteriorNetwork") -> None:
        self._model = model

    @property
    def __signature__(self) -> inspect.Signature:
        network = self._model.network
        if isinstance(network, StochasticNetwork):
            network = network.described_network()
        return inspect.signature(network.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return PosteriorNetwork.forward(self._model, *args, **kwargs)


class PosteriorNetwork(PlacedValues):
    """A network whose weights come from a posterior by a rule. `BayesianModel` is one, and adds what users call."""

    def __init__(self, network: nn.Module, posterior: Posterior, method: Method, seed: int) -> None:
        super().__init__(network, posterior)
        self.noise = noise.NoiseStream(seed)
        self.method = method
        self.traits = NetworkTraits.of(network, self.layout, self.slot_places)
        self.root_units: Sequence[PlacedUnit] | None = None  # of a sharded posterior: those outside of all blocks
        self._frozen_key: Tensor | None = None
        self._block_draw: Draw | None = None  # inside `drawn`
        self.moment_scale: tuple[float, float] = (1.0, 1.0)
        self.moment_margins: tuple[MarginFit, ...] = ()
        self.forward = _Forward(self)  # type: ignore[method-assign]
        self.rule = method.rule

    @property
    def rule(self) -> str:
        """The name of the current rule. Assign a name, or a rule with its own settings, to change it."""
        return self._rule.name

    @rule.setter
    def rule(self, rule: str | Rule) -> None:
        made = self.method.make_rule(rule)
        made.check(self.posterior)
        for name, make in made.buffers().items():
            if not hasattr(self, f"_{name}"):
                self.register_buffer(f"_{name}", make().to(self.device), persistent=False)
        self._rule = made

    @property
    def moment_layers(self) -> dict[str, Tensor]:
        """The corrections of layers in one-pass prediction, by the names of their weights: (3, channels) each.

        The rows are the gain of the mean, its shift in units of the std, and the factor of the variance. Assign other
        corrections to change them, or an empty dict to remove them.
        """
        found = zip(self.layout, self._corrections(), strict=True)
        return {slot.name: correction for slot, correction in found if correction is not None}

    @moment_layers.setter
    def moment_layers(self, corrections: Mapping[str, Tensor]) -> None:
        names = [slot.name for slot in self.layout]
        unknown = [name for name in corrections if name not in names]
        if unknown:
            raise LeanBayesError(f"{unknown[0]!r} is not a Bayesian parameter of this model, so it has no correction.")
        for number, name in enumerate(names):
            if hasattr(self, f"_correction_{number}"):
                delattr(self, f"_correction_{number}")
            if name in corrections:
                correction = corrections[name].detach().to(self.device, torch.float32, copy=True)
                self.register_buffer(f"_correction_{number}", correction, persistent=False)

    def _corrections(self) -> list[Tensor | None]:
        # Not `getattr`, in which a missing buffer raises an error: for each weight and sample that would take longest.
        return [self._buffers.get(f"_correction_{number}") for number in range(len(self.layout))]

    @property
    def current_rule(self) -> Rule:
        """The current rule with its settings."""
        return self._rule

    @property
    def noise_per_example(self) -> bool:
        """Whether each example of a batch has its own noise."""
        return self._rule.per_example or isinstance(self.network, StochasticNetwork)

    @property
    def convolves(self) -> bool:
        """Whether many positions of an input share Bayesian weights, and so their noise."""
        return self.traits.convolves

    @property
    def batch_first(self) -> bool:
        """Whether recurrent and attention layers take (batch, length, channels)."""
        return self.traits.batch_first

    @property
    def class_dim(self) -> int | None:
        """The dimension of the outputs that counts classes, or None if they are not logits of classes."""
        return None

    @property
    def members(self) -> int | None:
        """The number of distinct samples, if they can be counted, as in an ensemble."""
        return self.network.members if isinstance(self.network, StochasticNetwork) else None

    @property
    def joint(self) -> bool:
        """Whether one pass can compute all members."""
        return isinstance(self.network, StochasticNetwork) and self.network.loss_pass == "joint"

    @property
    def summed_members(self) -> int:
        """The number of members whose losses are added: 1 if they divide the examples of a batch."""
        divided = isinstance(self.network, StochasticNetwork) and self.network.loss_pass == "divided"
        return 1 if divided or self.members is None else self.members

    @property
    def loss_passes(self) -> int:
        """The number of passes of a loss."""
        return 1 if self.joint else self.summed_members

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.noise.state.device

    def forward(self, *args: Any, _draw: Draw | None = None, **kwargs: Any) -> Any:
        """Run the network with one sample of the weights. With `_draw.with_kl`, return (output, KL).

        Inside `drawn`, the sample is the one that the block keeps.
        """
        with self._alone():
            if _draw is None and self._block_draw is not None:
                return self._call_network(self._block_draw, *args, **kwargs)
            draw = self._any_draw() if _draw is None else _draw
            before = self._values
            try:
                kl = self._install(draw)
                output = self._call_network(draw, *args, **kwargs)
            finally:
                self._put(before)
            return (output, kl) if draw.with_kl else output

    def _any_draw(self, generator: torch.Generator | None = None) -> Draw:
        """Return the next draw; its key selects the member of an ensemble."""
        draw = self.next_draw(generator)._replace(training=self.training)
        return draw if self.members is None else draw._replace(number=int(draw.key.sum()) % self.members)

    def next_draw(self, generator: torch.Generator | None = None, number: int = 0, with_kl: bool = False) -> Draw:
        """Return the next draw. Its key is the frozen one, or comes from the generator or the model's own stream.

        Raises:
            LeanBayesError: Activation checkpointing calls the model again, which needs the sample of the first call.
        """
        with self._alone():
            if self._frozen_key is not None:
                return Draw(self._frozen_key.to(self.device), number, with_kl)
            if self._rule.name != "mean" and checkpointing.in_backward_pass():
                raise LeanBayesError(
                    "Activation checkpointing around the model would compute it again with another sample: checkpoint "
                    "parts of bnn.network, or give the sample: checkpoint(bnn, x, _draw=bnn.next_draw(), "
                    "use_reentrant=False)."
                )
            key = self.noise.next(number) if generator is None else noise.key_from(generator, self.device)
            return Draw(key, number, with_kl)

    def _install(self, draw: Draw) -> Tensor | None:
        if self._rule.needs_weights and not len(self.layout):
            raise LeanBayesError(
                f"{type(self.method).__name__} has no Bayesian weights, which the rule {self.rule!r} needs: "
                'use bnn.using("sample").'
            )
        if self.root_units is not None:
            self._put(ShardedValues(self.root_units, self._rule, draw.key))
            return self.posterior.kl(draw.key) if draw.with_kl else None
        key = draw.key if self.members is None else self.posterior.key_of_member(draw.key, draw.number)
        values, kl = self._rule.weights(self.posterior, key, draw.with_kl)
        self._put(self._cast(values))
        return kl

    def _call_network(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        context = self.pass_context((args, kwargs))
        sharded = self._values if isinstance(self._values, ShardedValues) else None
        if sharded is not None:
            sharded.begin(context)
        else:
            self._rule.begin(self.values, context)
        if isinstance(self.network, StochasticNetwork):
            args = (draw if self._rule.random else None, *args)
        if torch.compiler.is_dynamo_compiling():
            return self._rule.finish(self.network(*args, **kwargs), context)
        with contextlib.ExitStack() as around:
            around.enter_context(explained_casts())
            around.enter_context(explained_dtypes(tensors_of((args, kwargs)), self.slot_dtypes()))
            if self.traits.recurrent and self.device.type == "cuda":
                around.enter_context(quiet_recurrent_layers())
            if self._rule.needs_graph:
                around.enter_context(explained_gradients(self._rule.name))
                around.enter_context(torch.enable_grad())
            if torch.is_grad_enabled():  # else nothing is recomputed
                around.enter_context(checkpointing.running(self._snapshot))
            if sharded is not None:
                around.enter_context(sharded.saving())
            output = self.network(*args, **kwargs)
            if self._rule.needs_scores:
                self.check_output(output)
            return self._rule.finish(output, context)

    def check_output(self, output: Any) -> None:
        """Raise an error if the output of the network has nothing that a prediction can score."""

    def _snapshot(self) -> checkpointing.Restore:
        """Remember the weights and the position in the noise, for activation checkpointing."""
        rule, thread = self._rule, threading.get_ident()
        if isinstance(self._values, ShardedValues):
            return self._sharded_snapshot(self._values, thread)
        values = rule.copied(self.values)
        position = rule.position(values)

        @contextlib.contextmanager
        def restore() -> Iterator[None]:
            with self._lock.for_thread(thread), self._holding(rule.copied(values)):
                before = rule.position(values)
                rule.move_to(values, position)
                try:
                    with checkpointing.running(self._snapshot):
                        yield
                finally:
                    rule.move_to(values, before)

        return restore

    def _sharded_snapshot(self, values: ShardedValues, thread: int) -> checkpointing.Restore:
        reopened = values.snapshot()

        @contextlib.contextmanager
        def restore() -> Iterator[None]:
            with (
                self._lock.for_thread(thread),
                self._holding(values),
                reopened(),
                checkpointing.running(self._snapshot),
            ):
                yield

        return restore

    def pass_context(self, inputs: Any) -> PassContext:
        """Return what the current rule may know about a call with these inputs."""
        scale, corrections = (1.0, 1.0), self._corrections()
        calibrated = self.moment_scale != scale or any([correction is not None for correction in corrections])
        if calibrated and not self.training and self._rule.calibrated_like(self.method.make_rule("moments")):
            scale = self.moment_scale
        else:
            corrections = []
        self._learn_outputs(inputs)
        return PassContext(
            inputs,
            training=self.posterior.training,
            random=any(self.posterior.random_slots()),
            batch_first=self.batch_first,
            dense_output=self.traits.dense_output,
            convolutional=self.traits.convolutional,
            output_scale=scale,
            corrections=corrections,
            buffers={name: getattr(self, f"_{name}") for name in self._rule.buffers()},
            class_dim=self.class_dim,
        )

    def learn_outputs(self, *args: Any, **kwargs: Any) -> None:
        """Learn about the outputs what a compiled pass must know."""
        self._learn_outputs((args, kwargs))

    def _learn_outputs(self, inputs: Any) -> None:
        """Learn whether the outputs for these inputs have pixels, if a pass by moments must know it.

        The network runs once at the posterior mean for each size of inputs, of which one may give a map and another
        one a pixel. In training, and while a pass is compiled, it does not run.
        """
        if not self.traits.depends_on_outputs or self._rule.name != "moments" or torch.compiler.is_compiling():
            return
        if self.training or isinstance(self.network, StochasticNetwork) or isinstance(self._values, ShardedValues):
            return
        known, sizes = self.traits.maps_by_size, tuple([tensor.shape[1:] for tensor in tensors_of(inputs)])
        if sizes not in known:
            given = [getattr(value, "loc", value) for value in self.values]
            with self._holding(given or self.layout.split(self.posterior.mean().detach())):
                known[sizes] = returns_maps(self.network, *inputs)
        self.traits.returns_maps = known[sizes]

    @contextlib.contextmanager
    def drawn(self, draw: Draw | None = None, generator: torch.Generator | None = None) -> Iterator[Callable[..., Any]]:
        """Keep one sample of the weights in the network for a block, and yield a function that calls the network.

        Inside the block `bnn(x)` uses that sample, and other methods of the network work too, for example under
        `torch.no_grad()` `bnn.network.generate(...)`. `lb.elbo_loss` and `predict` draw their own samples.

        Example:
            >>> with torch.no_grad(), bnn.drawn() as call:
            ...     first, second = call(x), call(x)  # the same weights in both calls
        """
        draw = self._any_draw(generator) if draw is None else draw
        with self._alone(), explained_casts():
            before, outer = self._values, self._block_draw
            held: list[Sequence[Any] | ShardedValues] = []
            try:
                self._install(draw)
                self._block_draw = draw
                held.append(self._values or ())
                yield functools.partial(self._call_with, held, draw, self._rule)
            finally:
                held.clear()  # the function may live longer, and the weights must not
                self._block_draw = outer
                self._put(before)

    def _call_with(
        self, held: list[Sequence[Any] | ShardedValues], draw: Draw, rule: Rule, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the network with the values and the rule of a `drawn` block, also inside another block."""
        if not held:
            raise LeanBayesError("The block of bnn.drawn() has ended: call the function that it yields inside of it.")
        if rule is self._rule and (held[0] is self._values or not held[0]):
            return self._call_network(draw, *args, **kwargs)
        with self.using(rule), self._holding(held[0]):
            return self._call_network(draw, *args, **kwargs)

    def call_with_values(self, *args: Any, **kwargs: Any) -> Any:
        """Call a network whose weights are in place, as inside `drawn`, and whose only randomness they are."""
        return self._call_network(None, *args, **kwargs)

    @checked()
    @contextlib.contextmanager
    def using(self, rule: str | Rule) -> Iterator[Self]:
        """Use another rule inside the block. A sample that `drawn` holds for the former rule is not used there.

        Example:
            >>> with bnn.using("moments"):
            ...     output = bnn(x)  # mean and variance in one pass
        """
        with self._alone():
            before, outer = self._rule, self._block_draw
            self.rule = rule
            self._block_draw = outer if self._rule == before else None
            try:
                yield self
            finally:
                self._rule, self._block_draw = before, outer

    @checked()
    @contextlib.contextmanager
    def frozen(self, seed: int) -> Iterator[Self]:
        """Use the same noise, that of `seed`, in every pass inside the block, also inside a `drawn` block.

        Example:
            >>> with bnn.frozen(0):
            ...     assert torch.equal(bnn(x), bnn(x))
        """
        with self._alone():
            before, outer = self._frozen_key, self._block_draw
            self._frozen_key, self._block_draw = noise.make_key(seed, device=self.device), None
            try:
                yield self
            finally:
                self._frozen_key, self._block_draw = before, outer
