"""Weight sharing: initial models, choices that need data, stages of training, and uses of a shared model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from file_cases import Change, assert_damage_is_refused, replaced
from network_cases import seeded
from partial_cases import BATCHES, train
from torch import Tensor, nn
from training_cases import assert_equal_models, clusters, curve, expect, mlp, stopped_at

import leanbayes as lb
from leanbayes.core.config import decode, encode
from leanbayes.data import load
from leanbayes.deploy.loading import describe
from leanbayes.methods.weight_sharing import weight_sharing
from leanbayes.model.gradients import weight_gradient
from leanbayes.posteriors import SharedPosterior
from leanbayes.training import fit, read_record


@seeded
def wide() -> nn.Module:
    """Return a network for `clusters` with 1,960 weights."""
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))


X = clusters()[:8][0]
STARTS: dict[str, Any] = {
    "mean-field": lb.MeanField(init_std=0.2),
    "partial": lb.PBN(0.3, sensitivity="random", init_std=0.2),
    "sparse": lb.SSVI(0.3, init_std=0.02),
    "sparse deterministic": lb.RigL(0.3),
    "by rows": lb.VDP(variance="row"),
}


def shared(bnn: lb.BayesianModel) -> SharedPosterior:
    assert isinstance(bnn.posterior, SharedPosterior)
    return bnn.posterior


def check_close(found: Tensor, expected: Tensor, share: float) -> None:
    """Check that the error of sharing is a small fraction of the std."""
    assert (found - expected).std() < share * expected.std()


# -- initial models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("start", STARTS)
def test_it_starts_from_any_model(start: str, scope: Any) -> None:
    before = lb.bayesianize(wide(), STARTS[start])
    mean, variance = before.posterior.mean().detach(), before.posterior.variance().detach()
    bnn = lb.bayesianize(before, lb.WeightSharing(120, minimum=2, scope=scope))
    q = shared(bnn)
    found, after = q.mean().detach(), q.variance().detach()
    zero, fixed = (mean == 0) & (variance == 0), (mean != 0) & (variance == 0)
    assert torch.equal(q.labels == len(q.mu), zero)
    assert torch.equal((after == 0) & (q.labels < len(q.mu)), fixed)
    assert (found[zero] == 0).all()
    assert len(q.mu) < 300
    for kind in (fixed, variance > 0):
        if kind.any():
            check_close(found[kind], mean[kind], 0.25)
    slots = bnn.layout.slots_of(torch.arange(bnn.layout.numel))
    together = any(len(slots[q.labels == code].unique()) > 1 for code in range(len(q.mu)))
    if scope == "layer" or start.startswith("sparse"):  # others have one σ per layer, which separates the layers
        assert together == (scope == "global")
    assert bnn.predict(X, 2).probs.isfinite().all()


def test_a_plain_network_gets_the_initial_std() -> None:
    for network in (wide(), lb.bayesianize(wide(), lb.Deterministic())):
        bnn = lb.bayesianize(network, lb.WeightSharing(50, minimum=2, init_std=0.1))
        stds = [p.std() for name, p in wide().named_parameters() if name.endswith("weight")]
        expected = bnn.layout.expand(0.1 * torch.stack(stds))
        torch.testing.assert_close(bnn.posterior.variance().sqrt(), expected, rtol=0.5, atol=0)
        weights = [wide().get_parameter(slot.name) for slot in bnn.layout]
        check_close(bnn.posterior.mean().detach(), bnn.layout.join(weights).detach(), 0.2)


def test_zeros_of_a_subspace_stay_zero() -> None:
    sparse = lb.bayesianize(wide(), lb.SSVI(0.2))
    bnn = lb.bayesianize(sparse, lb.WeightSharing(components=16))
    q, y = shared(bnn), clusters()[:8][1]
    active = sparse.posterior.variance() > 0
    assert int(q.counts()[:-1].sum()) == int(active.sum())
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    lb.elbo_loss(bnn, X, y, num_data=100).backward()
    optimizer.step()
    for weights in (bnn.posterior.mean(), bnn.posterior.sample(bnn.next_draw().key)):
        assert torch.equal(weights != 0, active)


def test_other_methods_start_from_a_shared_model() -> None:
    bnn = lb.bayesianize(lb.bayesianize(wide(), lb.SSVI(0.2)), lb.WeightSharing(16))
    dense = lb.bayesianize(bnn, lb.MeanField())
    torch.testing.assert_close(dense.posterior.mean(), bnn.posterior.mean())
    active = bnn.posterior.variance() > 0
    torch.testing.assert_close(dense.posterior.variance()[active], bnn.posterior.variance()[active])
    again = lb.bayesianize(bnn, lb.WeightSharing(8))
    assert len(shared(again).mu) <= 8
    assert torch.equal(again.posterior.mean() != 0, active)


# -- choices on data --------------------------------------------------------------------------------------------------


def test_weights_with_the_largest_gradients_are_outliers() -> None:
    bnn = lb.bayesianize(wide(), lb.WeightSharing(20, gradient_share=0.05), data=BATCHES)
    plain = lb.bayesianize(wide(), lb.MeanField())
    weights = plain.posterior.mean().detach()
    magnitudes = torch.stack([weight_gradient(plain, weights, *batch).abs() for batch in BATCHES]).mean(0)
    number = int(0.05 * len(weights))
    own = shared(bnn).counts()[:-1][shared(bnn).labels] == 1
    top = magnitudes.argsort(descending=True)[:number]
    assert own[top].all()
    assert torch.equal(bnn.posterior.mean()[top], weights[top])


def test_gradients_limit_merging() -> None:
    settings: dict[str, Any] = {"components": 60, "minimum": 2, "merge_distance": 1e-3}
    free, held = (
        lb.bayesianize(wide(), lb.WeightSharing(**settings, merge_gradient=limit), data=BATCHES)
        for limit in (1e9, 1e-12)
    )
    assert len(shared(free).mu) < len(shared(held).mu)


def test_sensitive_weights_have_smaller_errors() -> None:
    def error(method: lb.Method) -> float:
        bnn = lb.bayesianize(wide(), method, data=BATCHES)
        plain = lb.bayesianize(wide(), lb.MeanField())
        weights = plain.posterior.mean().detach()
        squares = torch.stack([weight_gradient(plain, weights, *batch).square() for batch in BATCHES]).mean(0)
        return float((squares * (bnn.posterior.mean().detach() - weights).square()).sum())

    assert error(lb.WeightSharing(12, metric="sensitivity")) < error(lb.WeightSharing(12))


def test_a_model_that_needs_data_cannot_be_used_without() -> None:
    y = clusters()[:8][1]
    for settings in ({"gradient_share": 0.01}, {"metric": "sensitivity"}, {"merge_gradient": 1.0}):
        bnn = lb.bayesianize(wide(), lb.WeightSharing(20, **settings))
        for call in (
            lambda bnn=bnn: bnn(X),
            lambda bnn=bnn: bnn.predict(X),
            lambda bnn=bnn: lb.elbo_loss(bnn, X, y, num_data=100),
            lambda bnn=bnn: bnn.kl(),
            lambda bnn=bnn: lb.save(bnn, "never.safetensors"),
            lambda bnn=bnn: lb.bayesianize(bnn, lb.MeanField()),
        ):
            expect(call, "not chosen yet", "data=batches")
        expect(lambda bnn=bnn: bnn.method.choose(bnn, []), "needs data")  # type: ignore[misc]
        expect(lambda bnn=bnn: bnn.method.choose(bnn, [X]), "pairs (x, y)")  # type: ignore[misc]
        bnn.method.start(lb.Training(bnn, 10, 100, lambda: BATCHES))
        assert len(shared(bnn).mu) < 100
        bnn(X)


def test_all_processes_use_the_same_gradients() -> None:
    method = lb.WeightSharing(20, gradient_share=0.05)
    bnn = lb.bayesianize(wide(), method)
    size = bnn.layout.numel
    training = lb.Training(bnn, 10, 100, lambda: BATCHES, average=lambda tensor: torch.arange(1.0 * size))
    bnn.method.start(training)
    labels = shared(bnn).labels.clone()
    own = shared(bnn).counts()[:-1][labels] == 1
    assert own[-int(0.05 * size) :].all()
    bnn.method.start(training)  # labels stay
    assert torch.equal(shared(bnn).labels, labels)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_the_paper() -> None:
    paper = lb.WeightSharing.paper()
    assert (paper.components, paper.threshold, paper.gradient_share, paper.minimum) == (6000, 0.2, 0.01, 20)
    assert (paper.border, paper.nearest, paper.merge_distance, paper.prior) == (5.991, 5, 1.5e-7, lb.Normal(0.1))
    assert (paper.init_std, paper.relative, paper.samples) == (0.05, True, 30)
    assert paper.sampling == "hierarchical"
    before = lb.bayesianize(wide(), lb.MeanField())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in before.posterior.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    bnn = lb.bayesianize(before, paper, data=BATCHES)
    assert len(shared(bnn).blended) > 0
    assert bnn.predict(X).samples == 30


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no components": ({"components": 0}, "components=0"),
    "no members": ({"minimum": 0}, "minimum=0"),
    "unknown metric": ({"metric": "round"}, "'plain', 'whitened', 'sensitivity'"),
    "unknown scope": ({"scope": "block"}, "'global', 'layer'"),
    "unknown sampling": ({"sampling": "twice"}, "'independent', 'hierarchical', 'tied'"),
    "negative price": ({"bit_price": -0.1}, "bit_price=-0.1"),
    "price is nan": ({"bit_price": math.nan}, "bit_price=nan"),
    "price and blends": ({"bit_price": 0.1, "border": 5.991}, "leave out border"),
    "price and sensitivity": ({"bit_price": 0.1, "metric": "sensitivity"}, "leave out border and metric"),
    "share of all": ({"gradient_share": 1.0}, "gradient_share=1.0"),
    "no epochs left": ({"pretrain": 0.5, "pretrain_std": 0.5}, "a sum below 1"),
    "rounds without epochs for single weights": ({"rounds": 2, "pretrain_std": 0.0}, "set pretrain_std above 0"),
    "negative epochs": ({"pretrain": -0.1}, "a sum below 1"),
    "no std": ({"init_std": 0.0}, "init_std=0.0"),
    "unknown rule": ({"rule": "guess"}, "'guess'"),
    "tied with many priors": ({"sampling": "tied", "prior": lb.Normal("fan_in")}, "one prior for all"),
    "tied with a mixture": ({"sampling": "tied", "prior": lb.ScaleMixture()}, "one prior for all"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_settings_raise_an_error(name: str) -> None:
    settings, words = MISTAKES[name]
    expect(lambda: lb.WeightSharing(**settings), words)


def test_settings_of_older_files_are_renamed() -> None:
    method = lb.WeightSharing(dissolve="neighbors", pretrain_std=0.25)
    settings = encode(method)
    former = {name: value for name, value in settings.items() if name != "pretrain_std"}
    assert decode({**former, "dissolve": "neighbours", "pretrain_spreads": 0.25}) == decode(settings) == method


def test_too_few_weights_raise_an_error() -> None:
    expect(lambda: lb.bayesianize(nn.Linear(3, 3), lb.WeightSharing()), "Too few weights can share")
    fixed = lb.bayesianize(wide(), lb.RigL(0.5))
    expect(lambda: lb.bayesianize(fixed, lb.WeightSharing(8, bit_price=0.1)), "leave bit_price out")


def test_a_price_on_bits_reduces_the_entropy_of_labels() -> None:
    def bits(price: float) -> float:
        counts = shared(lb.bayesianize(wide(), lb.WeightSharing(30, init_std=0.5, bit_price=price))).counts()[:-1]
        share = counts.double() / counts.sum()
        return float(-(share * share.log2()).sum())

    assert bits(1.0) < bits(0.0) - 1


# -- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["independent", "hierarchical", "tied"])
def test_samples_have_the_variances_of_the_weights(sampling: Any) -> None:
    before = lb.bayesianize(wide(), lb.MeanField(init_std=0.3))
    bnn = lb.bayesianize(before, lb.WeightSharing(8, sampling=sampling))
    with torch.no_grad():
        samples = torch.stack([bnn.posterior.sample(bnn.next_draw().key) for _ in range(800)])
    variances = bnn.layout.join([bnn.weight_variances()[slot.name] for slot in bnn.layout])
    torch.testing.assert_close(samples.var(0), variances, rtol=0.3, atol=0)
    torch.testing.assert_close(samples.mean(0), bnn.posterior.mean(), rtol=0, atol=0.02)
    if sampling == "hierarchical":  # then it includes the variance of μ over the members
        total = before.posterior.mean().detach().var()
        torch.testing.assert_close(bnn.posterior.mean().var() + _variance_within_codes(bnn), total, rtol=0.02, atol=0)


def _variance_within_codes(bnn: lb.BayesianModel) -> Tensor:
    """Return the variance of μ within codes, averaged over the weights."""
    return shared(bnn).expand(shared(bnn).factors[:, 0].square()).mean()


def test_tied_weights_refuse_rules_for_independent_weights() -> None:
    bnn = lb.bayesianize(wide(), lb.WeightSharing(8, sampling="tied"))
    for rule in ("moments", "local", "flipout", "covariance"):
        expect(lambda rule=rule: bnn.predict(X, rule=rule), "correlated", kind=lb.UnsupportedOperation)  # type: ignore[misc]
        method = lb.WeightSharing(8, sampling="tied", rule=rule)
        expect(lambda method=method: lb.bayesianize(wide(), method), "correlated", kind=lb.UnsupportedOperation)  # type: ignore[misc]
    expect(lambda: lb.export_program(bnn, X), "correlated", kind=lb.UnsupportedOperation)
    bnn.predict(X, 2, rule="mean")


def test_moments_equal_those_of_many_samples() -> None:
    before = lb.bayesianize(wide(), lb.MeanField(init_std=0.2))
    for sampling in ("independent", "hierarchical"):
        bnn = lb.bayesianize(before, lb.WeightSharing(16, sampling=sampling)).eval()
        with bnn.using("moments"), torch.no_grad():
            output = bnn(X)
        with torch.no_grad():
            samples = torch.stack([bnn(X) for _ in range(3000)])
        torch.testing.assert_close(output.loc, samples.mean(0), rtol=0, atol=0.05)
        torch.testing.assert_close(output.variance, samples.var(0), rtol=0.25, atol=0.002)


# -- training ---------------------------------------------------------------------------------------------------------


def test_stages_of_training() -> None:
    method = lb.WeightSharing(pretrain=0.25, pretrain_std=0.5, sampling="hierarchical")
    plain, own, last = method.stages()
    assert [stage.share for stage in (plain, own, last)] == [0.25, 0.5, 0.25]
    assert isinstance(plain.method, lb.Deterministic)
    assert isinstance(own.method, lb.WeightSharing)
    assert own.method.components is None
    assert last.method is method
    alone = lb.WeightSharing(pretrain_std=0.0)
    assert [stage.method for stage in alone.stages()] == [alone]
    twice = lb.WeightSharing(pretrain_std=0.5, rounds=2).stages()
    assert [getattr(stage.method, "components", 0) for stage in twice] == [None, 256, None, 256]
    assert [stage.share for stage in twice] == [0.25] * 4


def test_every_weight_has_its_own_std_before_it_shares() -> None:
    own = lb.WeightSharing(8).stages()[0].method
    plain, sparse = lb.bayesianize(mlp(), own), lb.bayesianize(lb.bayesianize(mlp(), lb.SSVI(0.3)), own)
    assert torch.equal(plain.posterior.mean(), lb.bayesianize(mlp(), lb.MeanField()).posterior.mean())
    torch.testing.assert_close(plain.kl(), lb.bayesianize(mlp(), lb.MeanField()).kl())
    assert shared(sparse).random_weights == len(shared(sparse).mu) == round(0.3 * 144)


@pytest.mark.parametrize("step", [9, 17, 23])
def test_a_resumed_training_is_identical(step: int, tmp_path: Path) -> None:
    method = lb.WeightSharing(6, gradient_share=0.05, minimum=2, border=2.0, sampling="hierarchical")
    whole = train(method, tmp_path / "whole", lr=1e-2)
    with stopped_at(step):
        train(method, tmp_path / "stopped", lr=1e-2, checkpoint_steps=7)
    assert_equal_models(train(method, tmp_path / "stopped", lr=1e-2, checkpoint_steps=7), whole)
    assert curve(read_record(tmp_path / "stopped")) == curve(read_record(tmp_path / "whole"))


def test_a_network_for_digits_is_shared_and_trained(tmp_path: Path) -> None:
    network = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))()
    settings: dict[str, Any] = {"batch_size": 64, "temperature": 0.01, "device": "cpu", "progress": False, "lr": 5e-3}
    sparse = fit(network, lb.SSVI(0.3, interval=10), load("digits"), epochs=6, **settings)
    method = lb.WeightSharing(12, pretrain_std=0.0, bit_price=0.2)
    first = lb.bayesianize(sparse, method)
    bnn = fit(sparse, method, load("digits"), out=tmp_path, epochs=3, **settings)
    history = read_record(tmp_path)["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert read_record(tmp_path)["scores"]["validation"]["accuracy"] > 0.8
    assert torch.equal(shared(bnn).labels, shared(first).labels)
    assert not torch.allclose(shared(bnn).mu, shared(first).mu, rtol=1e-3)
    assert torch.equal(bnn.posterior.mean() != 0, sparse.posterior.mean() != 0)
    again = fit(bnn, replace(method, pretrain_std=0.5, rounds=2), load("digits"), epochs=4, **settings)
    assert len(shared(again).mu) < 0.1 * shared(again).random_weights  # codes and outliers
    moved = shared(again).labels[:, None] == shared(again).labels
    assert not torch.equal(moved, shared(bnn).labels[:, None] == shared(bnn).labels)  # other weights share now
    assert torch.equal(again.posterior.mean() != 0, sparse.posterior.mean() != 0)


# -- files and other uses ---------------------------------------------------------------------------------------------


def saved() -> lb.BayesianModel:
    before = lb.bayesianize(wide(), lb.PBN(0.6, sensitivity="random"))
    return lb.bayesianize(before, lb.WeightSharing(30, minimum=2, border=0.5, sampling="hierarchical"))


def test_a_loaded_model_is_equal_and_loading_clusters_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = saved()
    assert len(shared(bnn).blended) > 0
    lb.save(bnn, tmp_path / "model.safetensors")

    def never(*args: Any) -> None:
        raise AssertionError("loading has clustered")

    monkeypatch.setattr(weight_sharing, "share_codes", never)
    loaded = lb.load(tmp_path / "model.safetensors", wide())
    assert_equal_models(loaded, bnn)
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in bnn.parameters()]
    assert shared(loaded).random_slots() == shared(bnn).random_slots()
    assert torch.equal(shared(loaded).counts(), shared(bnn).counts())
    assert torch.equal(bnn.predict(X, 3).probs, loaded.predict(X, 3).probs)
    with monkeypatch.context() as patch:
        patch.undo()
        parts = describe(tmp_path / "model.safetensors")["parts"]
    assert parts["posterior.labels"]["bytes"] == bnn.layout.numel


DAMAGES: dict[str, tuple[Change, str]] = {
    "label beyond the codes": (replaced("posterior.labels", lambda t: t.fill_(255)), "labels has values outside"),
    "deterministic partner": (replaced("posterior.partners", lambda t: t + 30), "partners has values outside"),
    "positions out of order": (replaced("posterior.blended", lambda t: t.flip(0).clone()), "blended does not increase"),
    "too few labels": (replaced("posterior.labels", lambda t: t[1:].clone()), "labels has the shape"),
    "more stds than codes": (replaced("posterior.rho", lambda t: t.repeat(5)), "rho has the shape"),
    "no covariances": (replaced("posterior.factors", lambda t: t[:0].clone()), "factors has the shape"),
    "labels that are not integers": (replaced("posterior.labels", lambda t: t.float()), "not integers"),
    "a matrix of means": (replaced("posterior.mu", lambda t: t[None].clone()), "mu has the shape"),
    "no means": (lambda tensors: tensors.pop("posterior.mu"), "posterior.mu"),
    "no labels": (lambda tensors: tensors.pop("posterior.labels"), "posterior.labels"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_raises_an_error(name: str, tmp_path: Path) -> None:
    assert_damage_is_refused(saved(), wide(), *DAMAGES[name], tmp_path / "model.safetensors")


def test_a_shared_model_is_converted_and_exported() -> None:
    bnn = lb.bayesianize(wide(), lb.WeightSharing(20)).eval()
    plain = bnn.to_deterministic()
    with bnn.using("mean"):
        torch.testing.assert_close(plain(X), bnn(X))
    assert {name: tensor.shape for name, tensor in bnn.weight_variances().items()} == {
        name: p.shape for name, p in wide().named_parameters() if name.endswith("weight")
    }
    program = lb.export_program(bnn, X)
    torch.testing.assert_close(program.module()(X)["probs"].sum(1), torch.ones(len(X)))
    expect(lambda: lb.restrict(bnn, 0.1), "WeightSharing has no std per weight")
