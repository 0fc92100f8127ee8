"""The hooks of a method implement what papers add to a plain training loop, in any loop that calls them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import (
    SETTINGS,
    Staged,
    Swapping,
    assert_equal_models,
    clusters,
    conv,
    curve,
    mlp,
    models_equal,
    stopped_at,
    stripes,
    task,
)

import leanbayes as lb
from leanbayes.core.config import configurable
from leanbayes.core.layout import Layout
from leanbayes.data import Batches
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.priors import BoundPrior
from leanbayes.training import Recipe, fit, read_record

EPOCH = 8  # steps: 128 examples in batches of 16


seen: list[Any] = []
on_call: list[Callable[[str, lb.Training], None]] = []


@pytest.fixture(autouse=True)
def _reset() -> None:
    seen.clear()
    on_call.clear()


def note(name: str, training: lb.Training) -> None:
    seen.append((name, training.step))
    for call in on_call:
        call(name, training)


@configurable
@dataclass(frozen=True)
class Noted(lb.MeanField):
    """Records its calls."""

    def start(self, training: lb.Training) -> None:
        note("start", training)

    def after_step(self, training: lb.Training) -> None:
        note("after", training)


@configurable
@dataclass(frozen=True)
class NotedInStages(Noted):
    """Three stages. The second has no Bayesian weights."""

    def stages(self) -> tuple[lb.Stage, ...]:
        return (
            lb.Stage(self, 0.25),
            lb.Stage(lb.Deterministic(), 0.25, {"lr": 1e-4}),
            lb.Stage(self, 0.5, {"optimizer": "sgd", "lr": 1e-2, "temperature": 0.5}),
        )


def train(method: lb.Method, out: Path | None = None, **settings: Any) -> lb.BayesianModel:
    return fit(mlp(), method, task(clusters()), out=out, **{**SETTINGS, **settings})


def after(steps: range) -> list[tuple[str, int]]:
    return [("after", step) for step in steps]


# -- when they are called ---------------------------------------------------------------------------------------------


def test_hooks_are_called_in_order_with_the_number_of_the_step() -> None:
    train(Noted(), epochs=2, accumulate=2)
    assert seen == [("start", 0), *after(range(2 * EPOCH))]


def test_every_stage_counts_its_own_steps() -> None:
    train(NotedInStages(), epochs=4)
    assert seen == [("start", 0), *after(range(EPOCH)), ("start", 0), *after(range(2 * EPOCH))]


def test_a_resumed_training_does_not_start_again(tmp_path: Path) -> None:
    with stopped_at(6):
        train(Noted(), tmp_path, epochs=2, checkpoint_steps=5)
    seen.clear()
    train(Noted(), tmp_path, epochs=2, checkpoint_steps=5)
    assert seen == after(range(5, 2 * EPOCH))


def test_a_training_resumed_in_a_later_stage_starts_no_stage_again(tmp_path: Path) -> None:
    with stopped_at(14):  # eight steps are those of the first two stages
        train(NotedInStages(), tmp_path, epochs=4, checkpoint_steps=5, batch_size=32)
    assert seen[0] == ("start", 0)
    assert seen[5] == ("start", 0)
    seen.clear()
    train(NotedInStages(), tmp_path, epochs=4, checkpoint_steps=5, batch_size=32)
    # The last checkpoint is that of step 10.
    assert seen == after(range(2, 8))


# -- what they see ----------------------------------------------------------------------------------------------------


def test_hooks_see_the_schedules() -> None:
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.02, "scale_lr": 0.03, "warmup": 0.3, "temperature": 0.4}
    lrs: list[list[float]] = []
    temperatures: list[float] = []

    def check(name: str, training: lb.Training) -> None:
        if name != "start":
            lrs.append([group["lr"] for optimizer in training.optimizers for group in optimizer.param_groups])
            temperatures.append(training.temperature)

    on_call.append(check)
    train(Noted(), temperature_warmup=0.6, **settings)
    recipe, steps = Recipe(temperature_warmup=0.6, **settings), 2 * EPOCH
    factors = [recipe.lr_factor(step, steps) for step in range(steps)]
    assert lrs == [pytest.approx([0.02 * factor, 0.03 * factor]) for factor in factors]
    expected = [0.4 * min(1, (step + 1) / (0.6 * steps)) for step in range(steps)]
    assert temperatures == pytest.approx(expected)


def test_a_stage_has_its_own_settings_and_schedules(tmp_path: Path) -> None:
    kinds: list[tuple[str, float]] = []

    def check(name: str, training: lb.Training) -> None:
        if name == "after":
            kinds.append((type(training.optimizers[0]).__name__, training.temperature))

    on_call.append(check)
    train(NotedInStages(), tmp_path, epochs=4, temperature=0.1, log_every=1, warmup=0.0)
    assert [kind for kind, _ in kinds] == ["AdamW"] * EPOCH + ["SGD"] * 2 * EPOCH
    assert kinds[EPOCH - 1][1] == pytest.approx(0.1)
    assert kinds[EPOCH][1] == pytest.approx(0.5 / EPOCH)
    history = read_record(tmp_path)["history"]
    assert [history[i]["lr"] for i in (0, EPOCH, 2 * EPOCH)] == pytest.approx([1e-3, 1e-4, 1e-2])
    assert ["kl" in entry for entry in history] == [True] * EPOCH + [False] * EPOCH + [True] * 2 * EPOCH
    assert [entry["step"] for entry in history] == list(range(1, 4 * EPOCH + 1))


def test_hooks_see_the_training() -> None:
    data = task(clusters())

    def check(name: str, training: lb.Training) -> None:
        assert training.steps == 2 * EPOCH
        assert training.num_data == 128
        assert torch.equal(training.average(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0]))
        assert isinstance(training.model, lb.BayesianModel)
        assert training.model.training
        if name == "start":
            assert training.optimizers == []
            assert training.batch is None
            rows = [tuple(row.tolist()) for x, _ in training.batches() for row in x]
            assert len(rows) == 128
            assert set(rows) == {tuple(row.tolist()) for row in data.train[:][0]}
            again = [x for x, _ in training.batches()]
            assert torch.equal(torch.cat(again), torch.tensor(rows))
        else:
            assert len(training.optimizers) == 2
        if name == "after":
            assert training.batch is not None
            steps.append(training.batch)

    steps: list[tuple[Tensor, Tensor]] = []
    on_call.append(check)
    train(Noted(), epochs=2)
    expected = [batch for epoch in range(2) for batch in Batches(data.train, 16).epoch(epoch)]
    assert len(steps) == len(expected)
    for (x, y), (x2, y2) in zip(steps, expected, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


@pytest.mark.parametrize(("batch_size", "rows"), [(24, 128), (100, 128), (127, 127)])
def test_the_batches_for_hooks_have_the_last_examples_too(batch_size: int, rows: int) -> None:
    def check(name: str, training: lb.Training) -> None:
        if name == "start":
            assert sum(len(x) for x, _ in training.batches()) == rows  # a batch of one example is left out

    on_call.append(check)
    train(Noted(), epochs=1, batch_size=batch_size)
    assert seen[0] == ("start", 0)


def test_the_batches_for_hooks_are_not_augmented() -> None:
    data = task(stripes(), augment=True)

    def check(name: str, training: lb.Training) -> None:
        if name == "start":
            images = torch.cat([x for x, _ in training.batches()])
            assert sorted(images.sum((1, 2, 3)).tolist()) == sorted(data.train[:][0].sum((1, 2, 3)).tolist())

    on_call.append(check)
    fit(conv(), Noted(), data, **{**SETTINGS, "epochs": 1})
    assert seen[0] == ("start", 0)


def test_hooks_that_only_read_change_nothing() -> None:
    on_call.append(lambda name, training: None)
    noted, plain = train(Noted(), epochs=2), train(lb.MeanField(), epochs=2)
    assert_equal_models(noted, plain)


# -- methods with hooks -----------------------------------------------------------------------------------------------


@configurable
@dataclass(frozen=True)
class StagedAndNoted(Staged):
    """Records the means before and after its start, and the stds after it."""

    def start(self, training: lb.Training) -> None:
        seen.append(training.model.posterior.mean().detach().clone())
        super().start(training)
        seen.append(training.model.posterior.mean().detach().clone())
        seen.append(training.model.posterior.variance().sqrt().detach().clone())


def test_a_second_stage_starts_from_the_means_of_the_first_with_its_own_posterior(tmp_path: Path) -> None:
    bnn = train(StagedAndNoted(), tmp_path, epochs=8, lr=1e-2)
    before, after, std = seen
    point = train(lb.Deterministic(), epochs=4, lr=1e-2).to_deterministic()  # the first stage alone
    assert torch.equal(before, bnn.layout.join([point.get_parameter(slot.name) for slot in bnn.layout]).detach())
    assert torch.equal(after, before)
    size = task(clusters()).train[:][0].abs().mean()
    torch.testing.assert_close(std, (0.02 + 0.05 * before.abs()) / (1 + size))
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    assert not torch.equal(bnn.posterior.mean(), after)
    assert isinstance(bnn.method, StagedAndNoted)
    record = read_record(tmp_path)
    assert record["scores"]["validation"]["accuracy"] > 0.8
    first = [next(e["lr"] for e in record["history"] if e["step"] > step) for step in (0, 32)]
    assert first == pytest.approx([1e-2, 3e-4], rel=0.1)
    assert_equal_models(lb.load(tmp_path / "model.safetensors", mlp()), bnn)


@pytest.mark.parametrize("step", [9, 16, 21, 30])
def test_a_staged_training_is_resumed_bit_by_bit(step: int, tmp_path: Path) -> None:
    whole = train(Staged(), tmp_path / "whole")

    with stopped_at(step):
        train(Staged(), tmp_path / "stopped", checkpoint_steps=7)
    assert_equal_models(train(Staged(), tmp_path / "stopped", checkpoint_steps=7), whole)
    assert curve(read_record(tmp_path / "stopped")) == curve(read_record(tmp_path / "whole"))


@configurable
@dataclass(frozen=True)
class SwappingAndNoted(Swapping):
    """Records after each step how many means, and how many entries of their optimizer state, are zero."""

    def after_step(self, training: lb.Training) -> None:
        super().after_step(training)
        mean = training.model.posterior.mean()
        state = training.optimizers[0].state[mean]
        seen.append((training.step, int((mean == 0).sum()), int((state["exp_avg"] == 0).sum())))


def test_entries_can_be_swapped_in_place_between_steps() -> None:
    train(SwappingAndNoted(every=3, share=0.25), epochs=2)
    zeros = 144 // 4
    assert [entry for entry in seen if entry[1]] == [(step, zeros, zeros) for step in range(2, 16, 3)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_swapped_entries_are_resumed_bit_by_bit(optimizer: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_steps": 4, "optimizer": optimizer, "lr": 1e-2}
    whole = train(Swapping(), tmp_path / "whole", **settings)
    assert not models_equal(whole, train(Swapping(every=1000), **settings))
    for step in (5, 6, 20):
        with stopped_at(step):
            train(Swapping(), tmp_path / "stopped", **settings)
    assert_equal_models(train(Swapping(), tmp_path / "stopped", **settings), whole)
    assert curve(read_record(tmp_path / "stopped")) == curve(read_record(tmp_path / "whole"))


class Supported(MeanFieldPosterior):
    """Stores in a buffer the indices of some weights."""

    support: Tensor
    sizes_vary = True

    def __init__(self, layout: Layout, mean: Tensor, std: Tensor, prior: BoundPrior, support: Tensor) -> None:
        super().__init__(layout, mean, std, prior)
        self.register_buffer("support", support)


@configurable
@dataclass(frozen=True)
class Shaped(lb.MeanField):
    """A posterior whose shape depends on data that it sees at the start."""

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Supported:
        return Supported(
            layout, mean, torch.full_like(mean, 0.01), self.prior.bind(layout, mean), torch.arange(len(mean))
        )

    def start(self, training: lb.Training) -> None:
        size = training.average(torch.stack([x.abs().mean() for x, _ in training.batches()]).mean())
        training.model.posterior.support = torch.arange(int(10 * size))


def test_a_posterior_that_changed_its_shape_at_the_start_is_resumed(tmp_path: Path) -> None:
    whole = train(Shaped(), tmp_path / "whole", epochs=2)
    assert isinstance(whole.posterior, Supported)
    assert 0 < len(whole.posterior.support) < 144
    with stopped_at(9):
        train(Shaped(), tmp_path / "stopped", epochs=2, checkpoint_steps=7)
    assert_equal_models(train(Shaped(), tmp_path / "stopped", epochs=2, checkpoint_steps=7), whole)


# -- the same hooks in a custom loop ----------------------------------------------------------------------------------


def custom_loop(method: lb.Method, recipe: Recipe) -> lb.BayesianModel:
    """Train as a user would who writes every step."""
    data = task(clusters())
    batches = Batches(data.train, recipe.batch_size, seed=recipe.seed)
    epochs, model = iter(range(recipe.epochs)), mlp()
    for number, stage in enumerate(method.stages()):
        model = lb.bayesianize(model, stage.method, seed=recipe.seed + number)
        bnn, settings = model.train(), recipe.changed(stage.settings)
        own = round(stage.share * recipe.epochs)
        plain = Batches(data.train, recipe.batch_size, seed=recipe.seed)
        training = lb.Training(bnn, own * len(batches), len(data.train), plain.epoch)  # type: ignore[arg-type]
        stage.method.start(training)
        training.optimizers = settings.optimizers(bnn, training.num_data)
        full = [group["lr"] for optimizer in training.optimizers for group in optimizer.param_groups]
        for _ in range(own):
            for batch in batches.epoch(next(epochs)):
                factor = settings.lr_factor(training.step, training.steps)
                groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
                for group, lr in zip(groups, full, strict=True):
                    group["lr"] = lr * factor
                training.temperature = settings.temperature_at(training.step, training.steps)
                training.batch = batch
                loss = lb.elbo_loss(bnn, *batch, num_data=training.num_data, temperature=training.temperature)
                loss.backward()
                for optimizer in training.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                stage.method.after_step(training)
                training.step += 1
    assert isinstance(model, lb.BayesianModel)
    return model


@pytest.mark.parametrize(
    "method",
    [lb.MeanField(), Staged(), Swapping(), lb.SSVI(0.3, interval=3), lb.PBN(0.2), lb.WeightSharing(gradient_share=0.1)],
    ids=lambda method: type(method).__name__,
)
def test_a_custom_loop_with_the_hooks_trains_the_same_model(method: lb.Method) -> None:
    found = custom_loop(method, Recipe(epochs=4, batch_size=16, temperature=0.01))
    for (name, mine), (other, theirs) in zip(
        found.named_parameters(), train(method, epochs=4).named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
