"""The settings of a training: schedules against torch's own, defaults, and one clear sentence for each mistake."""

import typing
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from network_cases import CASES
from torch import nn
from training_cases import expect

import leanbayes as lb
from leanbayes.training import Recipe, RecipeSettings, fit
from leanbayes.training.recipe import FREE_ON_RESUME, WHOLE_RUN


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    steps, rise = 50, 10
    recipe = Recipe(warmup=rise / steps)
    found = [recipe.lr_factor(step, steps) for step in range(steps)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - rise)
    expected = [(step + 1) / rise for step in range(rise)]
    for _ in range(steps - rise):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert found == pytest.approx(expected)


@given(warmup=st.floats(0, 1), steps=st.integers(1, 300))
def test_the_learning_rate_has_one_maximum_and_is_never_zero(warmup: float, steps: int) -> None:
    recipe = Recipe(warmup=warmup)
    factors = np.array([recipe.lr_factor(step, steps) for step in range(steps)])
    assert factors.max() == 1
    assert factors.min() > 0
    top = int(factors.argmax())
    assert (np.diff(factors[: top + 1]) > 0).all()
    assert (np.diff(factors[top:]) <= 0).all()
    assert top <= max(warmup * steps, 0)


def test_the_temperature_rises_linearly_to_its_setting() -> None:
    recipe = Recipe(temperature=0.3, temperature_warmup=0.4)
    found = [recipe.temperature_at(step, 50) for step in range(50)]
    assert found == pytest.approx(np.interp(np.arange(1, 51), [0, 20], [0, 0.3]))
    assert Recipe(temperature=0.3, temperature_warmup=0).temperature_at(0, 50) == 0.3
    assert Recipe(temperature=0).temperature_at(30, 50) == 0


@pytest.mark.parametrize(
    ("settings", "kind", "lr", "decay"),
    [
        ({}, torch.optim.AdamW, 1e-3, 1e-2),
        ({"optimizer": "sgd"}, torch.optim.SGD, 0.1, 5e-4),
        ({"optimizer": "sgd", "lr": 0.3, "weight_decay": 0}, torch.optim.SGD, 0.3, 0),
    ],
)
def test_the_means_have_the_chosen_optimizer_and_the_stds_adam(
    settings: dict[str, Any], kind: type, lr: float, decay: float
) -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField(), likelihood=lb.Gaussian(learned=True))
    means, stds = Recipe(scale_lr=0.02, **settings).optimizers(bnn, 100)
    assert type(means) is kind
    assert (means.defaults["lr"], means.defaults["weight_decay"]) == (lr, decay)
    assert type(stds) is torch.optim.Adam
    assert (stds.defaults["lr"], stds.defaults["weight_decay"]) == (0.02, 0)
    own = {id(p) for group in stds.param_groups for p in group["params"]}
    assert own == {id(bnn.posterior.rho), id(bnn.likelihood.rho)}
    rest = {id(p) for group in means.param_groups for p in group["params"]}
    assert rest == {id(p) for p in bnn.parameters()} - own


def test_sgd_trains_the_stds_if_it_is_set() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField(), likelihood=lb.Gaussian(learned=True))
    before = bnn.posterior.rho.detach().clone()  # type: ignore[operator]
    _, stds = Recipe(scale_optimizer="sgd", scale_lr=0.02).optimizers(bnn, 100)
    assert type(stds) is torch.optim.SGD
    chosen = {name: stds.defaults[name] for name in ("lr", "momentum", "nesterov", "weight_decay")}
    assert chosen == {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0}
    for parameter in stds.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.5)
    stds.step()  # -lr·(g + 0.9·g)
    torch.testing.assert_close(bnn.posterior.rho.detach(), before - 0.02 * 1.9 * 0.5)  # type: ignore[operator]
    expect(lambda: Recipe(scale_optimizer="adamw"), "scale_optimizer='adamw'")  # type: ignore[arg-type]


def test_frozen_parameters_have_no_optimizer() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    (only,) = Recipe().optimizers(lb.bayesianize(net, lb.Deterministic()), 100)
    assert len(only.param_groups[0]["params"]) == 2
    net.requires_grad_(False)
    expect(lambda: Recipe().optimizers(lb.bayesianize(net, lb.Deterministic()), 100), "trainable")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", "3"),
        ("epochs", True),
        ("batch_size", -1),
        ("accumulate", 0),
        ("samples", 0),
        ("keep", 0),
        ("log_every", 0),
        ("workers", -1),
        ("evaluate_every", -1),
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("weight_decay", -1),
        ("clip", -1.0),
        ("clip", float("inf")),
        ("average", 1.5),
        ("average", -0.1),
        ("scale_lr", -1),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("warmup", 1.1),
        ("temperature_warmup", -0.1),
        ("checkpoint_minutes", -1),
        ("checkpoint_steps", 0),
        ("augment", "random"),
        ("augment", True),
        ("optimizer", "adam"),
        ("precision", "fp8"),
        ("device", "tpu"),
        ("seed", "one"),
        ("seed", 1.5),
        ("compile", "no"),
        ("channels_last", "no"),
        ("refresh_batchnorm", "no"),
    ],
)
def test_a_bad_value_raises_an_error_with_its_name(name: str, value: Any) -> None:
    expect(lambda: Recipe().changed({name: value}), name, repr(value))


def test_an_unknown_setting_raises_an_error_with_a_suggestion() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"'epoch': did you mean epochs\?"):
        Recipe().changed({"epoch": 3})


def test_the_keyword_arguments_of_fit_are_the_settings_of_a_recipe() -> None:
    hints = get_type_hints(Recipe)
    assert get_type_hints(RecipeSettings) == {field.name: hints[field.name] for field in fields(Recipe)}
    assert RecipeSettings.__required_keys__ == frozenset()
    assert typing.get_args(get_type_hints(fit)["settings"]) == (RecipeSettings,)


def test_stages_and_resumed_runs_may_change_some_settings() -> None:
    assert set(WHOLE_RUN) == {
        "accumulate", "augment", "batch_size", "channels_last", "device", "epochs", "keep", "precision",
        "refresh_batchnorm", "seed", "shard", "unused_parameters", "workers",
    }  # fmt: skip
    assert set(FREE_ON_RESUME) == {
        "accumulate", "checkpoint_minutes", "checkpoint_steps", "device", "evaluate_every", "keep", "log_every",
        "precision", "unused_parameters", "workers",
    }  # fmt: skip
