"""One call of `fit`: it learns, does not change what belongs to the user, and follows its settings."""

import copy
import functools
import inspect
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from network_cases import seeded
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import Dataset, TensorDataset
from training_cases import (
    Jittered,
    Staged,
    assert_equal_models,
    clusters,
    conv,
    curve,
    expect,
    mlp,
    mlp_for,
    models_equal,
    stripes,
    task,
)

import leanbayes as lb
from leanbayes.core import config
from leanbayes.core.config import change, configurable
from leanbayes.data import Batches, Data, from_datasets, load
from leanbayes.evaluation import evaluate
from leanbayes.methods import METHODS
from leanbayes.methods.sparse_training.base import SparseMethod
from leanbayes.training import Recipe, RecipeSettings, fit, read_record
from leanbayes.training.record import Record

SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 32, "temperature": 0.01, "device": "cpu", "progress": False}


def train(
    network: nn.Module | None = None, method: lb.Method | None = None, data: Any = None, **settings: Any
) -> lb.BayesianModel:
    """Train a small network on a small task, without progress."""
    network = mlp_for(method or lb.MeanField()) if network is None else network
    data = task(clusters()) if data is None else data
    return fit(network, method or lb.MeanField(), data, **{**SETTINGS, **settings})


def weights(bnn: lb.BayesianModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in bnn.parameters()])


# -- it learns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    if isinstance(method, SparseMethod):
        method = change(method, {"density": 0.5})  # the default leaves seven of these weights
    bnn = train(method=method, out=tmp_path, epochs=12, lr=1e-2)
    record = read_record(tmp_path)
    losses = [entry["loss"] for entry in record["history"]]
    assert losses[-1] < 0.5 * losses[0]
    assert record["scores"]["validation"]["accuracy"] > 0.8  # chance is 1/3
    assert record["status"] == "finished"
    assert not bnn.training
    assert type(bnn.method) is type(METHODS[name])


def test_the_stds_are_trained(tmp_path: Path) -> None:
    bnn = train(out=tmp_path, epochs=4)
    first = lb.bayesianize(mlp(), lb.MeanField()).posterior.variance()
    assert (bnn.posterior.variance() / first - 1).abs().median() > 0.05
    sigmas = [entry["sigma"] for entry in read_record(tmp_path)["history"]]
    assert len(set(sigmas)) == 4
    assert sigmas[-1] == pytest.approx(bnn.posterior.variance().sqrt().mean().item())
    assert read_record(tmp_path)["history"][-1]["kl"] == pytest.approx(bnn.kl().item())


def test_the_command_in_a_record_has_no_folders_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", "/home/me/pets", "--config=/home/me/a.yaml", "--start", "~/runs/first", "--root", "/data"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/leanbayes", "fit", "mean-field", *words, "--epochs", "1"])
    train(out=tmp_path)
    command = read_record(tmp_path)["command"]
    assert command == "leanbayes fit mean-field --data pets --config=a.yaml --start first --epochs 1"


def test_a_data_set_can_be_given_by_name(tmp_path: Path) -> None:
    from leanbayes.networks import build

    fit(build("mlp", (1, 8, 8), 10, seed=0), lb.MeanField(), "digits", out=tmp_path, **{**SETTINGS, "lr": 1e-2})
    record = read_record(tmp_path)
    assert record["config"]["data"] == "digits"
    assert record["scores"]["validation"]["accuracy"] > 0.8


def test_a_torch_data_set_has_a_tenth_held_out(tmp_path: Path) -> None:
    data = clusters(200)
    first = train(data=data, out=tmp_path / "1")
    second = train(data=from_datasets(data), out=tmp_path / "2")
    assert_equal_models(first, second)
    held_out = from_datasets(data).validation
    assert len(held_out) == 20  # type: ignore[arg-type]
    expected = evaluate(first, Batches(held_out, 32, shuffle=False).epoch(), seed=0, details=False)
    assert read_record(tmp_path / "1")["scores"]["validation"] == pytest.approx(expected)


class Raising(Dataset[Any]):
    """A test split, which no training may read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the test split was read")


def test_the_test_split_is_never_read(tmp_path: Path) -> None:
    data = task(clusters())
    train(data=from_datasets(data.train, data.validation, Raising()), out=tmp_path)
    assert read_record(tmp_path)["status"] == "finished"


def test_scores_are_of_the_held_out_split(tmp_path: Path) -> None:
    data = task(clusters())
    x, y = data.validation[:]
    wrong = from_datasets(data.train, TensorDataset(x, (y + 1) % 3))
    train(data=wrong, out=tmp_path, epochs=8, lr=1e-2)
    assert read_record(tmp_path)["scores"]["validation"]["accuracy"] < 0.2


# -- it changes nothing else -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [task(stripes()), Jittered(stripes())], ids=["in memory", "streamed"])
@pytest.mark.parametrize("method", [lb.MeanField(), lb.Ensemble(2), lb.MCDropout()], ids=lambda m: type(m).__name__)
def test_the_network_and_the_random_states_of_the_user_do_not_change(method: lb.Method, data: Any) -> None:
    network = conv().eval()
    before = copy.deepcopy(network)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    data = from_datasets(data, outputs=4) if isinstance(data, Jittered) else data
    train(network, method, data, epochs=1, channels_last=True)
    assert_equal_models(network, before)
    assert [p.stride() for p in network.parameters()] == [p.stride() for p in before.parameters()]
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert not network.training
    assert vars(network).keys() == vars(before).keys()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]
    assert random.getstate() == states[2]


@pytest.mark.parametrize("name", METHODS)
def test_a_result_depends_only_on_the_seed(name: str) -> None:
    few_steps = {
        "csgmcmc": lb.CyclicalSGMCMC(cycles=1, per_cycle=2, exploration=0.0),
        "aeb": lb.AEB(snapshots=1, until=0.5),
        "mbnn": lb.MBNN(snapshots=1, interval=1, sparsity=0.3),
    }
    method = few_steps.get(name, METHODS[name])
    stages = len(method.stages())
    first = train(conv(), method, task(stripes(), augment=True), epochs=stages)
    torch.manual_seed(5)
    again = train(conv(), method, task(stripes(), augment=True), epochs=stages)
    assert_equal_models(first, again)
    other = train(conv(), method, task(stripes(), augment=True), epochs=stages, seed=1)
    assert not models_equal(first, other)
    # The noise depends on it, and not only the order of the data.
    assert [int(bnn.noise.state[0]) for bnn in (first, other)] == [stages - 1, stages]


def test_dropout_is_active_and_differs_between_steps() -> None:
    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                masks.append(F.dropout(torch.ones(30), 0.5, self.training))
            return self.layer(x)

    masks: list[Tensor] = []
    train(Spy(), lb.Deterministic(), epochs=2, accumulate=2)
    assert len(masks) == 2 * 2 * 4
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_matches_a_loop_in_plain_torch(optimizer: str) -> None:
    data, recipe = task(clusters()), Recipe(epochs=3, lr=0.02, weight_decay=0.1, warmup=0.2)
    bnn = train(mlp(), lb.Deterministic(), data, epochs=3, lr=0.02, weight_decay=0.1, warmup=0.2, optimizer=optimizer)
    network, batches = mlp(), Batches(data.train, 32, seed=0)
    made: torch.optim.Optimizer
    if optimizer == "sgd":
        made = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1)
    else:
        made = torch.optim.AdamW(network.parameters(), lr=0.02, weight_decay=0.1)
    step, steps = 0, 3 * len(batches)
    for epoch in range(3):
        for x, y in batches.epoch(epoch):
            made.param_groups[0]["lr"] = 0.02 * recipe.lr_factor(step, steps)
            made.zero_grad()
            F.cross_entropy(network(x), y).backward()
            made.step()
            step += 1
    assert step == 12
    for mine, theirs in zip(bnn.to_deterministic().parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_mean_field_training_matches_a_custom_loop() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "scale_lr": 0.05, "weight_decay": 0, "warmup": 0, "temperature": 0.5}
    data = task(clusters())
    found = train(mlp(), lb.MeanField(), data, epochs=2, temperature_warmup=0, samples=2, **settings)
    bnn, recipe, batches = lb.bayesianize(mlp(), lb.MeanField(), seed=0), Recipe(warmup=0), Batches(data.train, 32)
    made = torch.optim.AdamW(
        [
            {"params": bnn.mean_parameters(), "lr": 0.01, "full": 0.01},
            {"params": bnn.scale_parameters(), "lr": 0.05, "full": 0.05},
        ],
        weight_decay=0,
    )
    step, steps = 0, 2 * len(batches)
    for epoch in range(2):
        for x, y in batches.epoch(epoch):
            for group in made.param_groups:
                group["lr"] = group["full"] * recipe.lr_factor(step, steps)
            loss = lb.elbo_loss(bnn, x, y, num_data=len(data.train), temperature=0.5, samples=2)  # type: ignore[arg-type]
            made.zero_grad()
            loss.backward()
            made.step()
            step += 1
    torch.testing.assert_close(weights(found), weights(bnn), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.noise.state, bnn.noise.state)


def test_a_gradient_is_clipped_to_its_norm() -> None:
    data, clip, lr = task(clusters()), 0.01, 0.5
    settings: dict[str, Any] = {"lr": lr, "weight_decay": 0, "warmup": 0, "optimizer": "sgd", "epochs": 1}
    start = torch.cat([p.detach().flatten() for p in mlp().parameters()])

    def moved(**more: Any) -> Tensor:
        bnn = train(mlp(), lb.Deterministic(), data, batch_size=128, **settings, **more)
        return torch.cat([p.detach().flatten() for p in bnn.to_deterministic().parameters()]) - start

    # The first step of SGD with Nesterov's momentum of 0.9 is 1.9 · lr · gradient.
    free, clipped = moved(), moved(clip=clip)
    assert free.norm() > 10 * clipped.norm()
    assert clipped.norm().item() == pytest.approx(1.9 * lr * clip, rel=1e-4)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm())
    torch.testing.assert_close(moved(clip=1e3), free)


@pytest.mark.parametrize("data", [task(clusters()), Jittered(clusters())], ids=["in memory", "streamed"])
def test_accumulation_changes_memory_and_not_the_result(data: Any) -> None:
    data = from_datasets(data, outputs=3) if isinstance(data, Jittered) else data
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}  # AdamW would not mind a gradient four times as large
    whole = train(mlp(), lb.Deterministic(), data, **settings)
    parts = train(mlp(), lb.Deterministic(), data, accumulate=4, **settings)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-4, atol=1e-5)


def test_the_loss_in_the_record_is_the_mean_over_accumulated_parts(tmp_path: Path) -> None:
    for parts in (1, 4):
        train(mlp(), lb.Deterministic(), accumulate=parts, out=tmp_path / str(parts), log_every=1)
    one, four = (curve(read_record(tmp_path / str(parts))) for parts in (1, 4))
    assert [entry["loss"] for entry in four] == pytest.approx([entry["loss"] for entry in one], rel=1e-4)
    assert len(one) == 8


def test_precisions_in_turn(tmp_path: Path) -> None:
    plain = train(conv(), data=task(stripes()))
    bf16 = train(conv(), data=task(stripes()), precision="bf16")
    again = train(conv(), data=task(stripes()), precision="fp32")
    assert_equal_models(plain, again)
    assert not models_equal(plain, bf16)
    torch.testing.assert_close(weights(bf16), weights(plain), rtol=0.2, atol=0.05)
    assert all(p.dtype == torch.float32 for p in bf16.parameters())
    own = lb.bayesianize(conv(), lb.MeanField()).forward
    assert type(bf16.forward) is type(own)  # not the one of accelerate
    assert inspect.signature(bf16.forward) == inspect.signature(own)
    assert "_original_forward" not in vars(bf16)
    lb.save(bf16, tmp_path / "model.safetensors")
    assert_equal_models(lb.load(tmp_path / "model.safetensors", conv()), bf16)
    x = stripes()[:8][0]
    prediction = copy.deepcopy(bf16).predict(x, 2, generator=torch.Generator().manual_seed(0))
    assert prediction.probs.dtype == torch.float32
    assert torch.equal(prediction.probs, bf16.predict(x, 2, generator=torch.Generator().manual_seed(0)).probs)


def test_an_error_while_training_in_bf16_does_not_change_the_next_training() -> None:
    @configurable
    class Failing(lb.Deterministic):
        def after_step(self, training: lb.Training) -> None:
            raise RuntimeError("an error of the user")

    plain = train()
    with pytest.raises(RuntimeError, match="an error of the user"):
        train(method=Failing(), precision="bf16")
    assert_equal_models(train(), plain)


def test_a_compiled_loss_is_compiled_once_and_gives_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")  # the default backend takes as long as many tests
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    plain = train(epochs=2)
    assert counter.frame_count == 0
    torch.testing.assert_close(weights(train(epochs=2, compile=True)), weights(plain), rtol=1e-3, atol=1e-4)
    assert counter.frame_count == 1


class Untraceable(nn.Module):
    """A network that works, but not while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x = x @ x.new_zeros(1000, 1)  # an error of a tensor operation
        return self.layers(x)


def test_a_network_that_cannot_be_compiled_is_trained_without(capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(Untraceable(), epochs=2)
    found = train(Untraceable(), epochs=2, compile=True, progress=True)
    torch.testing.assert_close(weights(found), weights(plain), rtol=0, atol=0)
    output = "".join(capsys.readouterr())
    assert output.count("The loss is not compiled: ") == 1


class Broken(Untraceable):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x @ x.new_zeros(1000, 1))


def test_errors_of_a_network_are_its_own_also_with_compile() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(Broken(), epochs=1, compile=True)


@pytest.mark.parametrize("method", [lb.BatchEnsemble(2), lb.RankOne(2), lb.LPBNN(2), lb.MIMO(members=2)])
def test_the_loss_of_members_is_compiled_once(method: lb.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    train(method=method, epochs=2, compile=True)
    assert counter.frame_count == 1


class Formats(nn.Module):
    """Records the memory format of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = conv()
        self.seen: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.is_contiguous(memory_format=torch.channels_last))
        return self.layers(x)


def colored(count: int = 96) -> Data:
    x, y = stripes(count)[:]
    return task(TensorDataset(x.repeat(1, 2, 1, 1), y))


def test_channels_last_changes_the_memory_format_and_not_the_result() -> None:
    def network() -> nn.Module:
        made = Formats()
        made.layers[0] = seeded(lambda: nn.Conv2d(2, 6, 3, padding=1, bias=False))()
        made.layers[3].p = made.layers[9].p = 0.0  # dropout samples its masks in memory order
        return made

    plain, last = (
        train(network(), lb.Deterministic(), colored(), channels_last=c, optimizer="sgd", lr=0.02)
        for c in (False, True)
    )
    assert plain.network.seen == {False}
    assert last.network.seen == {True}
    torch.testing.assert_close(weights(last), weights(plain), rtol=1e-3, atol=1e-4)
    bayesian = train(network(), lb.MeanField(), colored(), channels_last=True).to_deterministic()
    assert bayesian.get_parameter("layers.0.weight").is_contiguous(memory_format=torch.channels_last)


def test_batch_norm_has_the_statistics_of_the_plain_training_data() -> None:
    data = task(clusters(), held_out=32)  # 128 examples are four whole batches
    network = nn.Sequential(nn.BatchNorm1d(6), mlp())
    x = data.train[:][0]
    refreshed = train(network, data=data)
    norm = refreshed.network.get_submodule("0")
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    torch.testing.assert_close(norm.running_var, x.var(0), rtol=0.1, atol=0.0)
    assert norm.momentum == 0.1
    stale = train(network, data=data, refresh_batchnorm=False)
    assert torch.equal(stale.posterior.mean(), refreshed.posterior.mean())
    before = stale.network.get_submodule("0").running_mean
    assert isinstance(before, Tensor)
    assert not torch.isclose(before, x.mean(0), rtol=1e-3).all()
    # A prediction uses them: it does not depend on the other examples of its batch.
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    alone = refreshed.predict(x[:1], 3, generator=generators[0]).probs
    torch.testing.assert_close(alone, refreshed.predict(x[:9], 3, generator=generators[1]).probs[:1])


def test_batch_norm_is_refreshed_on_batches_augmented_as_in_training() -> None:
    data = task(stripes(), augment=True)
    bnn = train(nn.Sequential(nn.BatchNorm2d(1), conv()), data=data, epochs=1)
    batches = [x for x, _ in Batches(data.train, 32, seed=0, augment=data.augment).epoch()]
    found = bnn.network.get_submodule("0")
    torch.testing.assert_close(found.running_mean, torch.stack([x.mean() for x in batches]).mean()[None])
    torch.testing.assert_close(found.running_var, torch.stack([x.var() for x in batches]).mean()[None])


@pytest.mark.parametrize(("every", "epochs"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_the_held_out_split_is_evaluated_every_few_epochs(every: int, epochs: list[int], tmp_path: Path) -> None:
    bnn = train(conv(), data=task(stripes()), epochs=5, evaluate_every=every, out=tmp_path)
    record = read_record(tmp_path)
    assert [entry["epoch"] for entry in record["history"] if "validation" in entry] == epochs
    assert "accuracy" in record["scores"]["validation"]
    assert_equal_models(bnn, train(conv(), data=task(stripes()), epochs=5))


def test_batches_have_the_requested_size_and_the_rest_of_an_epoch_is_dropped() -> None:
    sizes: list[int] = []

    class Sizes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                sizes.append(len(x))
            return super().forward(x)

    train(Sizes(6, 3), lb.Deterministic(), batch_size=50, accumulate=2, epochs=1)
    assert sizes == [25] * 4
    sizes.clear()
    train(Sizes(6, 3), lb.Deterministic(), batch_size=1000, epochs=1)
    assert sizes == [128]


def test_the_record_describes_the_training(tmp_path: Path) -> None:
    bnn = train(out=tmp_path, epochs=3, log_every=3, notes={"network": "a small one"})
    record = read_record(tmp_path)
    assert record["config"]["network"] == "a small one"
    assert record["config"]["method"]["type"] == "MeanField"
    assert record["config"]["recipe"]["epochs"] == 3
    assert [entry["step"] for entry in record["history"]] == [3, 4, 6, 8, 9, 12]
    assert record["costs"]["file_bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert record["costs"]["trainable"] == len(weights(bnn))
    assert len(record["costs"]["epoch_seconds"]) == 3
    assert record["versions"]["torch"] == torch.__version__
    assert list((tmp_path / "tensorboard").iterdir())
    assert_equal_models(lb.load(tmp_path / "model.safetensors", mlp()), bnn)


def test_progress_is_shown_or_not(capfd: pytest.CaptureFixture[str]) -> None:
    train(progress=True)
    assert "Held-out split: accuracy" in capfd.readouterr().err
    train()
    assert capfd.readouterr() == ("", "")


def test_settings_change_a_recipe(tmp_path: Path) -> None:
    recipe = Recipe(epochs=1, batch_size=64, device="cpu", lr=1e-2, temperature=0.3)
    bnn = fit(mlp(), lb.MeanField(), task(clusters()), recipe=recipe, epochs=2, out=tmp_path, progress=False)
    assert read_record(tmp_path)["config"]["recipe"] == config.encode(replace(recipe, epochs=2))
    assert recipe.epochs == 1
    settings: RecipeSettings = {"epochs": 2, "batch_size": 64, "device": "cpu", "lr": 1e-2, "temperature": 0.3}
    assert_equal_models(bnn, fit(mlp(), lb.MeanField(), task(clusters()), progress=False, **settings))


# -- other tasks ------------------------------------------------------------------------------------------------------


def test_regression_is_scored_in_the_unit_of_its_targets(tmp_path: Path) -> None:
    data = load("toy")
    network = seeded(lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))()
    bnn = fit(network, lb.MeanField(), data, out=tmp_path, epochs=15, lr=2e-2, batch_size=32, temperature=0.01,
              progress=False, device="cpu")  # fmt: skip
    scores = read_record(tmp_path)["scores"]["validation"]
    x, y = data.validation.x, data.validation.y  # type: ignore[attr-defined]
    error = (bnn.predict(x, generator=torch.Generator().manual_seed(0)).mean - y) * data.target_std[0]
    assert scores["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    assert 2.5 < scores["rmse"] < 10  # the noise has a std of 3, and the targets one of about 27
    assert isinstance(bnn.likelihood, lb.Gaussian)
    assert 0.05 < bnn.likelihood.std.item() < 0.4  # it started at 0.5, and 3 / 27 is the true value


def test_segmentation_does_not_count_ignored_pixels(tmp_path: Path) -> None:
    x, _ = stripes()[:]
    y = (x[:, 0] > 0).long()
    y[:, :2] = 255
    data = task(TensorDataset(x, y), ignore_index=255)
    assert (data.task, data.outputs) == ("segmentation", 2)
    network = seeded(lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)))()
    train(network, data=data, epochs=20, lr=5e-2, out=tmp_path)
    scores = read_record(tmp_path)["scores"]["validation"]
    assert scores["accuracy"] > 0.9
    assert scores["miou"] > 0.8


class Named(Dataset[Any]):
    """Inputs as a dict of tensors, as networks of transformers expect them."""

    def __init__(self) -> None:
        self.x, self.targets = clusters().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"values": self.x[index], "mask": torch.ones(6)}, self.targets[index]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(values * mask)}


def test_inputs_by_name(tmp_path: Path) -> None:
    named = train(Masked(), lb.Deterministic(), Named(), epochs=8, lr=1e-2, out=tmp_path, accumulate=2)
    assert read_record(tmp_path)["scores"]["validation"]["accuracy"] > 0.8
    plain = train(mlp(), lb.Deterministic(), clusters(), epochs=8, lr=1e-2, accumulate=2)
    assert torch.equal(weights(named), weights(plain))


def test_a_given_likelihood_and_selection_of_weights(tmp_path: Path) -> None:
    x, y = clusters()[:]
    data = task(TensorDataset(x, F.one_hot(y, 3).float()))
    bnn = train(mlp(), data=data, likelihood=lb.Bernoulli(), select="2.weight", epochs=8, lr=1e-2, out=tmp_path)
    assert isinstance(bnn.likelihood, lb.Bernoulli)
    assert [slot.name for slot in bnn.layout] == ["2.weight"]
    assert read_record(tmp_path)["scores"]["validation"]["accuracy"] > 0.8


def test_a_given_likelihood_types_the_prediction() -> None:
    x, _ = clusters()[:]
    data = task(TensorDataset(x, x.sum(1, keepdim=True)))
    recipe = Recipe(epochs=1, device="cpu")
    bnn = fit(nn.Linear(6, 1), lb.Deterministic(), data, likelihood=lb.Gaussian(), recipe=recipe, progress=False)
    assert_type(bnn, lb.BayesianModel[lb.RegressionPrediction])
    assert bnn.predict(x).mean.shape == (160, 1)


def test_a_given_likelihood_does_not_change() -> None:
    x, _ = clusters()[:]
    likelihood = lb.Gaussian(0.7, learned=True)
    bnn = train(nn.Linear(6, 1), data=task(TensorDataset(x, x.sum(1, keepdim=True))), likelihood=likelihood)
    assert likelihood.std.item() == pytest.approx(0.7)
    assert isinstance(bnn.likelihood, lb.Gaussian)
    assert bnn.likelihood.std.item() != pytest.approx(0.7)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, ["epochs=0"]),
        ({"epocks": 3}, ["'epocks'"]),
        ({"batch_size": 31, "accumulate": 2}, ["batch_size=31", "2 equal"]),
        ({"accumulate": 200, "batch_size": 200}, ["128 examples", "200"]),
        ({"precision": "fp16"}, ["fp16", "GPU"]),
        ({"method": lb.MeanField}, ["method", "lb.MeanField()"]),
        ({"data": "no-such-data"}, ["no-such-data"]),
        ({"data": [(1, 2)]}, []),
        ({"seed": "one"}, ["seed"]),
        ({"recipe": {"epochs": 3}}, ["recipe", "lb.Recipe("]),
    ],
)
def test_a_mistake_raises_a_clear_error(settings: dict[str, Any], words: list[str]) -> None:
    expect(lambda: train(**settings), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_raises_an_error() -> None:
    expect(lambda: train(device="cuda"), "device='cuda'")


def test_too_few_epochs_for_the_stages_raise_an_error() -> None:
    expect(lambda: train(method=Staged(), epochs=1), "epochs=1", "2 stages")


def test_a_method_that_cannot_be_saved_raises_an_error_with_a_remedy() -> None:
    class Unregistered(lb.Deterministic):
        pass

    expect(lambda: train(method=Unregistered()), "configurable")


# -- special cases ----------------------------------------------------------------------------------------------------


class Own(Dataset[Any]):
    """A data set without a list of its classes."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = clusters()[index]
        return x, int(y)


def test_a_data_set_needs_no_list_of_classes() -> None:
    assert train(data=Own()).predict(torch.zeros(2, 6)).probs.shape == (2, 3)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_scaled_gradients_of_half_precision_train_both_optimizers_alike(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(clip=clip)
    module = sys.modules["leanbayes.training.fit"]
    make = vars(module)["_accelerator"]

    def with_scaler(*args: Any) -> Any:
        accelerator = make(*args)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # a power of two changes no digit
        return accelerator

    monkeypatch.setattr(module, "_accelerator", with_scaler)
    assert_equal_models(train(clip=clip), plain)


def test_a_stage_cannot_change_settings_of_the_whole_run() -> None:
    @configurable
    class Greedy(lb.Deterministic):
        def stages(self) -> tuple[lb.Stage, ...]:
            return (lb.Stage(self, 1.0, {"batch_size": 2}),)

    expect(lambda: train(method=Greedy()), "batch_size", "stage")


def test_start_may_replace_the_model() -> None:
    made = []

    @configurable
    class Replacing(lb.MeanField):
        def start(self, training: lb.Training) -> None:
            training.model = lb.bayesianize(mlp(), lb.MeanField(init_std=0.5))
            made.append(training.model)

    assert train(method=Replacing()) is made[0]


def test_fit_is_imported_when_first_used() -> None:
    code = "import sys, leanbayes as lb; before = 'accelerate' in sys.modules; lb.fit; assert not before"
    subprocess.run([sys.executable, "-c", code], check=True)
    missing = "import sys; sys.modules['accelerate'] = None; import leanbayes as lb; lb.fit"
    printed = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, check=False).stderr
    remedy = "run pip install '.[train]' in the folder of the leanbayes repository."
    assert printed.splitlines()[-1].endswith(f"lb.fit needs accelerate: {remedy}")
    absent = "import sys; sys.modules['accelerate'] = None; from leanbayes import *; import leanbayes as lb; MeanField"
    subprocess.run([sys.executable, "-c", f"{absent}; assert not hasattr(lb, 'fit')"], check=True)
    without_data = "import sys; sys.modules |= {'sklearn': None, 'PIL': None}; import leanbayes as lb; lb.fit"
    subprocess.run([sys.executable, "-c", without_data], check=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fit_works_inside_a_block_without_gradients(mode: Any) -> None:
    with mode():
        inside = train()
    assert_equal_models(inside, train())


def test_the_environment_and_state_of_accelerate_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # of other tests in this process
    plain = train()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    mine = Accelerator(mixed_precision="bf16", cpu=True)
    assert_equal_models(train(), plain)
    assert mine.mixed_precision == "bf16"
    AcceleratorState._reset_state()


def test_a_launcher_that_starts_one_process_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.warns(UserWarning, match="use torchrun"):
        train()


def test_a_bayesian_model_is_trained_further_and_resumed(tmp_path: Path) -> None:
    first = train()
    found = train(first, lb.MeanField(), out=tmp_path)
    assert not models_equal(found, first)
    assert_equal_models(train(first, lb.MeanField(), out=tmp_path), found)


def test_a_model_is_saved_before_it_is_scored(tmp_path: Path) -> None:
    x, y = clusters()[:]
    data = from_datasets(TensorDataset(x, y), TensorDataset(x[:8], torch.full((8,), -100)))
    expect(lambda: train(data=data, out=tmp_path, evaluate_every=0), "nothing to score")
    assert lb.load(tmp_path / "model.safetensors", mlp()).trained_rule == "sample"


@pytest.mark.parametrize("share", [-1.0, float("inf"), float("nan")])
def test_the_share_of_a_stage_cannot_be_negative(share: float) -> None:
    expect(lambda: lb.Stage(lb.Deterministic(), share), "share")


def test_settings_of_a_later_stage_are_checked_at_once() -> None:
    @configurable
    class Misspelled(lb.Deterministic):
        def stages(self) -> tuple[lb.Stage, ...]:
            return (lb.Stage(lb.Deterministic()), lb.Stage(self, settings={"lrr": 1}))

        def start(self, training: lb.Training) -> None:
            raise AssertionError("the training has started")

    expect(lambda: train(method=Misspelled()), "'lrr'", "lr")


def test_notes_cannot_replace_settings() -> None:
    expect(lambda: train(notes={"recipe": 1}), "'recipe'")
    expect(lambda: train(notes={"path": Path("a")}), "JSON")


def test_a_record_in_memory_shows_its_state() -> None:
    assert repr(Record(None, {})) == "Record(folder=None, status='starting', 0 log entries)"
