"""PBN: the selection of weights, every rule, training in two stages, and files."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from file_cases import Change, assert_damage_is_refused, replaced
from network_cases import CASES
from partial_cases import BATCHES, partial, train
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from training_cases import (
    SETTINGS,
    assert_equal_models,
    clusters,
    conv,
    curve,
    expect,
    finish,
    mlp,
    models_equal,
    stopped_at,
    stripes,
    task,
    together,
)

import leanbayes as lb
from leanbayes.data import Batches
from leanbayes.deploy.loading import describe
from leanbayes.posteriors import PartialPosterior
from leanbayes.rules import MomentPropagation
from leanbayes.rules.random_weight import RandomWeight
from leanbayes.training import Recipe, fit, read_record

RULES = ["sample", "flipout", "local", "moments", "mean"]


def last_layer(rule: str = "sample", **settings: Any) -> lb.BayesianModel:
    """An MLP of three layers, of which only the last is Bayesian."""
    net = CASES["mlp"].build()
    with torch.no_grad():
        net[4].weight.mul_(100)  # type: ignore[index]
    method = lb.PBN(0.12, sensitivity="magnitude", per="layer", rule=rule, init_std=0.5, **settings)
    return lb.bayesianize(net, method)


# -- the selection ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jacobian", "moment", "fisher", "paper", "magnitude", "random"])
def test_weights_with_the_highest_scores_are_bayesian(kind: Any) -> None:
    method = lb.PBN(0.2, sensitivity=kind, init_std=0.1, relative=False)
    bnn = lb.bayesianize(mlp(), method, data=BATCHES)
    expected = lb.sensitivity(mlp(), BATCHES, kind).top(0.2)
    assert torch.equal(partial(bnn).index, expected.int())
    assert len(expected) == 28
    plain = mlp()
    assert torch.equal(bnn.posterior.mean(), bnn.layout.join([plain.get_parameter(s.name) for s in bnn.layout]))
    torch.testing.assert_close(partial(bnn).std(), torch.full((28,), 0.1))
    assert "PBN, rule='sample', 28 Bayesian weights" in str(bnn)


@pytest.mark.parametrize(("per", "count"), [("weight", 57), ("row", 54), ("layer", 48)])
def test_weights_rows_or_layers_are_selected(per: Any, count: int) -> None:
    bnn = lb.bayesianize(mlp(), lb.PBN(0.4, per=per), data=BATCHES)
    assert len(partial(bnn).index) == count
    mask = bnn.posterior.variance() > 0
    rows = [row for part in bnn.layout.split(mask) for row in part]
    if per != "weight":
        assert all(row.all() or not row.any() for row in rows)
    if per == "layer":
        assert all(part.all() or not part.any() for part in bnn.layout.split(mask))


def test_a_model_whose_weights_are_not_selected_raises_an_error_when_used() -> None:
    bnn, (x, y) = lb.bayesianize(mlp(), lb.PBN()), BATCHES[0]
    calls: list[Callable[[], Any]] = [
        lambda: bnn(x),
        lambda: bnn.predict(x),
        lambda: lb.elbo_loss(bnn, x, y, num_data=100),
        lambda: bnn.kl(),
        lambda: lb.save(bnn, "never.safetensors"),
        lambda: lb.restrict(bnn, 0.01),
        lambda: lb.bayesianize(bnn, lb.MeanField()),
    ]
    for call in calls:
        expect(call, "not chosen yet", "data=batches")
    for kind in ("magnitude", "random"):
        lb.bayesianize(mlp(), lb.PBN(sensitivity=kind))(x)


def test_methods_that_select_nothing_reject_data() -> None:
    for method in (lb.MeanField(), lb.Deterministic(), lb.SSVI(0.3)):
        expect(lambda method=method: lb.bayesianize(mlp(), method, data=BATCHES), "leave data out")  # type: ignore[misc]


def test_invalid_settings_raise_an_error() -> None:
    wrong: Any
    for wrong in (-0.1, 1.5, float("nan")):
        expect(lambda wrong=wrong: lb.PBN(wrong), "rate=", "from 0 to 1")  # type: ignore[misc]
    expect(lambda: lb.PBN(True), "rate=True must be a number")
    for settings, words in (
        ({"sensitivity": "fischer"}, ("'fischer'", "fisher")),
        ({"per": "channel"}, ("per='channel'", "'weight', 'row', 'layer'")),
        ({"kl": "median"}, ("kl='median'",)),
        ({"pretrain": 1.0}, ("pretrain=1.0", "less than 1")),
        ({"pretrain": -0.5}, ("pretrain=-0.5",)),
        ({"init_std": 0.0}, ("init_std=0.0",)),
        ({"rho_noise": -1.0}, ("rho_noise=-1.0",)),
        ({"samples": 0}, ("samples=0",)),
        ({"rule": "guess"}, ("'guess'",)),
        ({"prior": lb.ScaleMixture(), "kl": "mean"}, ("kl='mean'", "lb.Normal")),
    ):
        expect(lambda given=settings: lb.PBN(**given), *words)  # type: ignore[misc]
    expect(lambda: lb.bayesianize(mlp(), lb.PBN(0.001), data=BATCHES), "less than one weight")
    expect(lambda: lb.bayesianize(mlp(), lb.PBN(0.02, per="row"), data=BATCHES), "smallest row has 6")


def test_stds_of_an_earlier_posterior_are_kept() -> None:
    dense = lb.bayesianize(mlp(), lb.MeanField(init_std=0.3, relative=False))
    bnn = lb.bayesianize(dense, lb.PBN(0.2, init_std=0.1, relative=False), data=BATCHES)
    torch.testing.assert_close(partial(bnn).std(), torch.full((28,), 0.3))
    wider = lb.bayesianize(bnn, lb.PBN(0.4, init_std=0.1, relative=False), data=BATCHES)
    old = torch.isin(partial(wider).index, partial(bnn).index)
    torch.testing.assert_close(partial(wider).std(), torch.where(old, 0.3, 0.1))
    dense = lb.bayesianize(bnn, lb.MeanField())
    assert torch.equal(dense.posterior.mean(), bnn.posterior.mean())


# -- from deterministic to mean-field ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_rate_of_0_is_the_plain_network(rule: str) -> None:
    bnn, (x, y) = lb.bayesianize(mlp().eval(), lb.PBN(0.0, rule=rule)), BATCHES[0]
    for _ in range(2):
        output = bnn(x)
        torch.testing.assert_close(output.loc if isinstance(output, lb.Moments) else output, mlp()(x))
    assert bnn.kl() == 0
    prediction = bnn.predict(x)
    torch.testing.assert_close(prediction.probs, mlp()(x).softmax(1))
    assert prediction.mutual_information.abs().max() < 1e-5
    loss = lb.elbo_loss(bnn, x, y, num_data=100)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(mlp()(x), y))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters() if p.requires_grad)
    assert train(lb.PBN(0.0, rule=rule), epochs=2).kl() == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_rate_of_1_is_mean_field(rule: str) -> None:
    x, y = BATCHES[0]
    results = []
    for method in (lb.PBN(1.0, rule=rule), lb.MeanField(rule=rule)):
        bnn = lb.bayesianize(mlp(), method, seed=0).eval()
        loss = lb.elbo_loss(bnn, x, y, num_data=100)
        results.append([loss, *torch.autograd.grad(loss, list(bnn.parameters()), allow_unused=True)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# -- rules skip deterministic layers ----------------------------------------------------------------------------------


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("rule", ["flipout", "local", "moments", "covariance"])
def test_layers_without_bayesian_weights_cost_no_more(rule: str) -> None:
    bnn, x = last_layer(rule), torch.randn(4, 6)
    assert partial(bnn).random_slots() == [False, False, True]
    assert bnn.posterior.variance().count_nonzero() == 48
    with bnn.drawn():
        kinds = [type(bnn.network[place].weight) for place in (0, 2, 4)]  # type: ignore[index]
    assert [issubclass(kind, Tensor) for kind in kinds] == [True, True, False]
    assert issubclass(kinds[2], (RandomWeight, lb.Moments))
    with torch.no_grad():
        plain, everywhere = flops(lambda: mlp_of(bnn)(x)), lb.bayesianize(mlp_of(bnn), lb.MeanField(rule=rule))
        last = 2 * 4 * 16 * 3  # only one more product, with the variance or perturbation of the last layer
        if rule != "covariance":
            assert flops(lambda: bnn(x)) == plain + last
        assert flops(lambda: everywhere(x)) > flops(lambda: bnn(x))


def mlp_of(bnn: lb.BayesianModel) -> nn.Module:
    return bnn.to_deterministic().eval()


@pytest.mark.parametrize("network", ["cnn", "vit_mha", "language_model", "autoencoder"])
def test_one_pass_equals_mean_field_with_tiny_stds_elsewhere(network: str) -> None:
    case = CASES[network]
    net, x = case.build().double().eval(), case.example()
    x = x.double() if x.is_floating_point() else x
    bnn = lb.bayesianize(net, lb.PBN(0.3, sensitivity="magnitude", per="layer", rule="moments", init_std=0.2))
    assert set(partial(bnn).random_slots()) == {True, False}
    dense = lb.bayesianize(bnn, lb.MeanField(rule="moments"))  # deterministic weights get a std of 1e-8
    none = MomentPropagation("none")  # the signs of common noise would be assigned to other channels
    with torch.no_grad(), bnn.using(none), dense.using(none):
        found, expected = bnn(x), dense(x)
    torch.testing.assert_close(found.loc, expected.loc, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-4, atol=1e-10)
    assert found.variance.mean() > 1e-6


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_samples_have_the_exact_variance_of_one_layer(rule: str) -> None:
    bnn, x = last_layer(rule).eval(), torch.randn(3, 6)
    with torch.no_grad():
        samples = torch.stack([bnn(x) for _ in range(2000)])
        exact = last_layer("moments").eval()(x)
    torch.testing.assert_close(samples.mean(0), exact.loc, rtol=0, atol=0.15 * exact.stddev.max().item())
    torch.testing.assert_close(samples.var(0), exact.variance, rtol=0.15, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.12])
def test_one_pass_can_be_exported(rate: float) -> None:
    bnn, x = last_layer().eval(), torch.randn(4, 6)
    bnn = lb.restrict(bnn, rate)
    program = lb.export_program(bnn, x)
    found, expected = program.module()(x), bnn.predict(x, rule="moments")
    torch.testing.assert_close(found["probs"], expected.probs, rtol=1e-4, atol=1e-5)
    variances = [name for name in program.state_dict if "variance_" in name]
    assert len(variances) == (1 if rate else 0)
    assert bool(found["variance"].any()) == (rate > 0)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains(rule: str) -> None:
    bnn = train(lb.PBN(0.2, rule=rule), epochs=12, lr=2e-2, scale_lr=0.05)
    x, y = task(clusters()).validation[:]
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    assert len(partial(bnn).index) == 28
    first = lb.bayesianize(mlp_of(bnn), lb.PBN(0.2), data=BATCHES)
    assert not torch.allclose(partial(bnn).std().mean(), partial(first).std().mean(), rtol=0.05)  # σ has changed


def test_weights_are_selected_after_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    choose = PartialPosterior.choose

    def recorded(self: PartialPosterior, index: Tensor) -> None:
        choose(self, index)
        seen.extend([self.mean().detach().clone(), self.index.clone()])

    monkeypatch.setattr(PartialPosterior, "choose", recorded)
    bnn = train(lb.PBN(0.2), epochs=4, lr=1e-2)
    mean, index = seen
    plain = train(lb.Deterministic(), epochs=2, lr=1e-2).to_deterministic()  # the first stage alone
    assert torch.equal(mean, bnn.layout.join([plain.get_parameter(slot.name) for slot in bnn.layout]).detach())
    batches = Batches(task(clusters()).train, 16)
    assert torch.equal(index, lb.sensitivity(plain, batches.epoch()).top(0.2).int())
    assert torch.equal(partial(bnn).index, index)
    assert not torch.equal(index, lb.sensitivity(mlp(), batches.epoch()).top(0.2).int())


def test_a_trained_network_needs_no_first_stage() -> None:
    assert [type(stage.method) for stage in lb.PBN().stages()] == [lb.Deterministic, lb.PBN]
    assert [stage.share for stage in lb.PBN(pretrain=0.25).stages()] == [0.25, 0.75]
    method = lb.PBN(0.2, pretrain=0.0)
    assert [stage.method for stage in method.stages()] == [method]
    bnn = train(method, epochs=1)
    expected = lb.sensitivity(mlp(), Batches(task(clusters()).train, 16).epoch()).top(0.2)
    assert torch.equal(partial(bnn).index, expected.int())
    expect(lambda: train(lb.PBN(), epochs=1), "too few for 2 stages")


@pytest.mark.parametrize("step", [9, 16, 23])
def test_training_resumes_exactly(step: int, tmp_path: Path) -> None:
    method = lb.PBN(0.2, prior=lb.Normal("std", "pretrained"))
    whole = train(method, tmp_path / "whole", lr=1e-2)
    with stopped_at(step):
        train(method, tmp_path / "stopped", lr=1e-2, checkpoint_steps=7)
    assert_equal_models(train(method, tmp_path / "stopped", lr=1e-2, checkpoint_steps=7), whole)
    assert curve(read_record(tmp_path / "stopped")) == curve(read_record(tmp_path / "whole"))


def test_batchnorm_dropout_and_bf16_resume_exactly(tmp_path: Path) -> None:
    def run(out: Path) -> lb.BayesianModel:
        changes: dict[str, Any] = {"precision": "bf16", "checkpoint_steps": 3, "epochs": 3}
        return fit(conv(), lb.PBN(0.1, rule="local"), task(stripes()), out=out, **{**SETTINGS, **changes})

    whole = run(tmp_path / "whole")
    with stopped_at(7):
        run(tmp_path / "stopped")
    assert_equal_models(run(tmp_path / "stopped"), whole)


def test_only_stds_are_trained() -> None:
    method = lb.PBN(0.2, pretrain=0.0, train_means=False)
    bnn = train(method, epochs=3, scale_lr=0.1)
    plain, found = mlp().state_dict(), mlp_of(bnn).state_dict()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    trainable = [name for name, p in bnn.named_parameters() if p.requires_grad]
    assert trainable == ["posterior.rho"]
    first = lb.bayesianize(mlp(), method, data=Batches(task(clusters()).train, 16).epoch())
    assert torch.equal(partial(first).index, partial(bnn).index)
    assert not torch.allclose(partial(first).rho, partial(bnn).rho, rtol=0.05)
    assert not models_equal(train(lb.PBN(0.2, pretrain=0.0), epochs=3).to_deterministic(), mlp())


def write_state(folder: Path, method: lb.Method) -> None:
    """Train as one of several processes, and write the final state of this one."""
    bnn = train(method, epochs=2, refresh_batchnorm=False)
    torch.save(bnn.state_dict(), folder / f"{os.environ['RANK']}.pt")


@pytest.mark.parametrize("method", [lb.PBN(0.2, sensitivity="fisher"), lb.PBN(0.0)])
def test_two_processes_select_the_same_weights(method: lb.Method, tmp_path: Path) -> None:
    assert [finish(process) for process in together(write_state, 2, tmp_path, method)] == [0, 0]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert len(one["posterior.index"]) == int(method.rate * 144)  # type: ignore[attr-defined]


def test_scores_are_averaged_over_processes() -> None:
    bnn = lb.bayesianize(mlp(), lb.PBN(0.2))
    calls: list[Tensor] = []

    def average(scores: Tensor) -> Tensor:
        calls.append(scores)
        return torch.arange(144.0)

    training = lb.Training(bnn, 10, 100, lambda: BATCHES, average=average)
    bnn.method.start(training)
    assert partial(bnn).index.tolist() == list(range(116, 144))
    torch.testing.assert_close(calls[0], lb.sensitivity(mlp(), BATCHES).scores)
    bnn.method.start(training)  # the selection does not change
    assert len(calls) == 1


# -- the settings of the paper ----------------------------------------------------------------------------------------


def test_the_initial_rho_of_the_paper_is_random() -> None:
    network = nn.Linear(200, 100)
    paper = replace(lb.PBN.paper(), rate=1.0)
    rho = partial(lb.bayesianize(network, paper)).rho.detach()
    assert scipy.stats.kstest(rho.double().numpy(), "norm", (-3.0, 1.0)).pvalue > 0.01
    assert torch.equal(rho, partial(lb.bayesianize(network, paper)).rho)
    assert not torch.equal(rho, partial(lb.bayesianize(network, replace(paper, seed=1))).rho)
    trained = lb.bayesianize(network, lb.MeanField(init_std=0.01, relative=False))
    kept = partial(lb.bayesianize(trained, paper)).std()
    torch.testing.assert_close(kept, torch.full_like(kept, 0.01))  # σ of an earlier posterior is not random


def test_the_loss_of_the_paper_is_the_mean_loss_plus_the_weighted_mean_kl() -> None:
    method = lb.PBN.paper()
    bnn, (x, y) = lb.bayesianize(mlp(), method, data=BATCHES), BATCHES[0]
    assert torch.equal(partial(bnn).index, lb.sensitivity(mlp(), BATCHES, "paper").top(0.05).int())
    recipe = Recipe(temperature=0.2, temperature_end=0.01, temperature_warmup=0.0)
    training = lb.Training(bnn, 100, 128, temperature=recipe.temperature_at(0, 100))
    with bnn.frozen(0):
        loss = lb.elbo_loss(bnn, x, y, num_data=128, temperature=training.temperature)
        nll = nn.functional.cross_entropy(bnn(x), y)
    index = partial(bnn).index.long()
    q = torch.distributions.Normal(bnn.posterior.mean()[index], partial(bnn).std())
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0))
    slots = bnn.layout.slots_of(index)
    expected = torch.stack([kl[slots == slot].mean() for slot in slots.unique()]).sum()
    torch.testing.assert_close(loss, nll + 0.2 * expected)


def test_the_mean_kl_has_the_same_weight_for_dense_prediction() -> None:
    network = nn.Conv2d(2, 3, 3, padding=1)
    x, y = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    bnn = lb.bayesianize(network, lb.PBN(1.0, kl="mean", prior=lb.Normal(1.0)))
    with bnn.frozen(0):
        loss = lb.elbo_loss(bnn, x, y, num_data=100, temperature=0.2, likelihood=lb.Categorical())
        torch.testing.assert_close(loss, nn.functional.cross_entropy(bnn(x), y) + 0.2 * bnn.kl())


def test_the_temperature_of_the_paper_falls() -> None:
    recipe = Recipe(temperature=0.2, temperature_end=0.01, temperature_warmup=0.0)
    found = [recipe.temperature_at(step, 100) for step in (0, 50, 99)]
    assert found == pytest.approx([0.2, 0.105, 0.0119])
    rising = Recipe(temperature=0.2, temperature_end=0.1, temperature_warmup=0.5)
    assert [rising.temperature_at(step, 100) for step in (24, 49, 75)] == pytest.approx([0.1, 0.2, 0.15])
    expect(lambda: Recipe(temperature_end=-1.0), "temperature_end=-1.0")


def test_the_recipe_of_the_paper_runs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01, "samples": 5, "temperature": 0.2}
    train(lb.PBN.paper(), tmp_path, epochs=2, temperature_end=0.01, temperature_warmup=0.0, log_every=1, **settings)
    temperatures = [entry["temperature"] for entry in read_record(tmp_path)["history"][8:]]
    assert temperatures == pytest.approx([0.2 - 0.19 * step / 8 for step in range(8)])


# -- files ------------------------------------------------------------------------------------------------------------


END = torch.tensor([0xFF, 0x01]).byte()
DAMAGES: dict[str, tuple[Change, str]] = {
    "beyond the end": (replaced("posterior.index", lambda t: torch.cat([t[:-1], END])), "beyond the 144"),
    "one position too few": (replaced("posterior.index", lambda t: t[:-1]), "27 positions instead of 28"),
    "not bytes": (replaced("posterior.index", lambda t: t.long()), "vector of bytes"),
    "no positions": (lambda tensors: tensors.pop("posterior.index"), "posterior.index"),
    "one std too many": (
        replaced("posterior.rho", lambda t: torch.cat([t, t[:1]])),
        "prior.loc has the shape",
    ),
    "a matrix of stds": (replaced("posterior.rho", lambda t: t.view(4, 7).clone()), "rho has the shape"),
    "no stds": (lambda tensors: tensors.pop("posterior.rho"), "posterior.rho"),
    "too few means": (replaced("posterior.mu", lambda t: t[:-1].clone()), "mu has the shape"),
    "too few centers": (replaced("posterior.prior.loc", lambda t: t[:-1].clone()), "prior.loc has the shape"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_raises_an_error(name: str, tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.PBN(0.2, prior=lb.Normal(center="pretrained")), data=BATCHES)
    assert_damage_is_refused(bnn, mlp(), *DAMAGES[name], tmp_path / "model.safetensors")


def test_a_file_has_few_bytes_per_std(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))
    path = tmp_path / "model.safetensors"
    data = [(torch.randn(64, 64), torch.arange(64) % 4)]
    bnn = lb.bayesianize(network, lb.PBN(0.05, prior=lb.Normal(center="pretrained"), train_means=False), data=data)
    lb.save(bnn, path)
    parts, count = describe(path)["parts"], len(partial(bnn).index)
    assert parts["posterior.mu"]["numbers"] == bnn.layout.numel
    assert parts["posterior.rho"]["numbers"] == parts["posterior.prior.loc"]["numbers"] == count
    assert parts["posterior.index"]["bytes"] < 1.3 * count
    loaded = lb.load(path, network)
    assert_equal_models(loaded, bnn)
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in bnn.parameters()]
    assert partial(loaded).random_slots() == partial(bnn).random_slots()
