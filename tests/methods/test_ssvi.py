"""SSVI: its settings, its initial subspace, training in every kind of loop, and files."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from file_cases import Change, assert_damage_is_refused, replaced, rewritten
from network_cases import CASES
from safetensors import safe_open
from sparse_cases import REMOVALS, stepped, subspace
from torch import Tensor, nn
from training_cases import (
    SETTINGS,
    assert_equal_models,
    clusters,
    conv,
    curve,
    finish,
    mlp,
    models_equal,
    stopped_at,
    stripes,
    task,
    together,
)

import leanbayes as lb
from leanbayes.methods.ssvi.criteria import REMOVAL
from leanbayes.model.gradients import weight_gradient
from leanbayes.posteriors import SparsePointPosterior, positions
from leanbayes.training import fit, read_record

# -- settings ---------------------------------------------------------------------------------------------------------


def test_defaults_and_settings_of_the_paper() -> None:
    method, paper = lb.SSVI(), lb.SSVI.paper()
    assert (method.density, method.densities, method.removal, method.addition) == (
        0.05,
        "erk",
        "absolute_snr",
        "sample",
    )
    assert (method.interval, method.until, method.drop, method.rule) == (100, 0.75, 0.3, "sample")
    assert (paper.densities, paper.rule, paper.init_std, paper.samples) == ("uniform", "local", 6e-4, 5)
    assert paper.prior == lb.Normal(0.005)
    assert (paper.removal, paper.addition, paper.new_std) == ("absolute_snr", "sample", "mean")


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "density of 0": ({"density": 0.0}, "density=0.0"),
    "density above 1": ({"density": 1.1}, "density=1.1"),
    "density that is not a number": ({"density": math.nan}, "density=nan"),
    "unknown densities": ({"densities": "even"}, "'erk', 'uniform'"),
    "drop of 1": ({"drop": 1.0}, "drop=1.0"),
    "negative drop": ({"drop": -0.1}, "drop=-0.1"),
    "no interval": ({"interval": 0}, "interval=0"),
    "until too late": ({"until": 1.5}, "until=1.5"),
    "unknown subspace": ({"subspace": "best"}, "'random', 'magnitude'"),
    "unknown removal": ({"removal": "magnitude"}, "'absolute_snr'"),
    "unknown addition": ({"addition": "random"}, "'sample', 'mean', 'samples'"),
    "no addition samples": ({"addition_samples": 0}, "addition_samples=0"),
    "zero std of new weights": ({"new_std": 0.0}, "new_std=0.0"),
    "no exponent": ({"exponent": 0.0}, "exponent=0.0"),
    "no std": ({"init_std": 0.0}, "init_std=0.0"),
    "no prior": ({"prior": lb.Normal}, "prior must be an instance"),
    "pretrained prior": ({"prior": lb.Normal(center="pretrained")}, "center='zero'"),
    "unknown rule": ({"rule": "guess"}, "guess"),
    "no samples": ({"samples": 0}, "samples=0"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_settings_raise_an_error(name: str) -> None:
    settings, message = INVALID[name]
    with pytest.raises(lb.LeanBayesError, match=message):
        lb.SSVI(**settings)


def test_a_network_too_small_for_its_density_raises_an_error() -> None:
    with pytest.raises(lb.LeanBayesError, match="need at least one each"):
        lb.bayesianize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), lb.SSVI(0.05))


# -- the initial subspace ---------------------------------------------------------------------------------------------


def flat(bnn: lb.BayesianModel, net: nn.Module) -> Tensor:
    return bnn.layout.join([net.get_parameter(slot.name) for slot in bnn.layout]).detach()


def test_a_random_subspace_preserves_the_scale_of_activations() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(400, 400, bias=False), nn.Linear(400, 300, bias=False))
    bnn = lb.bayesianize(net, lb.SSVI(0.1, init_std=1e-6))
    posterior, weights = subspace(bnn), flat(bnn, net)
    density = torch.tensor(posterior.counts) / torch.tensor(bnn.layout.sizes)
    expected = weights / bnn.layout.expand(density.sqrt())
    torch.testing.assert_close(posterior.mu.detach(), expected[posterior.index])
    x = torch.randn(50, 400)
    assert bnn(x).std().item() == pytest.approx(net(x).std().item(), rel=0.1)
    torch.testing.assert_close(posterior.std(), torch.full_like(posterior.mu, 1e-6))


def test_the_largest_weights_of_a_trained_network_are_unchanged() -> None:
    net = CASES["resnet"].build()
    bnn = lb.bayesianize(net, lb.SSVI(0.3, subspace="magnitude"))
    mean, weights = bnn.posterior.mean().detach(), flat(bnn, net)
    for part, whole, count in zip(bnn.layout.split(mean), bnn.layout.split(weights), subspace(bnn).counts, strict=True):
        limit = whole.abs().flatten().topk(count).values[-1]
        assert torch.equal(part, torch.where(whole.abs() >= limit, whole, 0.0))


def test_the_subspace_depends_on_the_network_and_the_seed() -> None:
    def index(seed: int, shift: float = 0.0) -> Tensor:
        net = CASES["resnet"].build()
        with torch.no_grad():
            next(net.parameters()).add_(shift)
        return subspace(lb.bayesianize(net, lb.SSVI(0.2, seed=seed))).index

    assert torch.equal(index(0), index(0))
    assert not torch.equal(index(0), index(1))
    assert not torch.equal(index(0), index(0, 1e-3))


@pytest.mark.parametrize("removal", REMOVALS)
def test_the_most_important_weights_of_an_earlier_posterior_stay_active(removal: Any) -> None:
    first = lb.bayesianize(CASES["resnet"].build(), lb.MeanField())
    with torch.no_grad():
        first.posterior.get_parameter("rho").add_(torch.randn(first.layout.numel))
    bnn = lb.bayesianize(first, lb.SSVI(0.3, removal=removal))
    index = subspace(bnn).index
    mean, std = first.posterior.mean().detach(), first.posterior.variance().detach().sqrt()
    torch.testing.assert_close(bnn.posterior.mean()[index], mean[index])
    torch.testing.assert_close(subspace(bnn).std(), std[index])
    importance = REMOVAL.get(removal, REMOVAL["snr"])(mean, std, 1.0)
    parts = zip(importance.split(bnn.layout.sizes), bnn.posterior.mean().split(bnn.layout.sizes), strict=True)
    for scores, active in parts:
        assert scores[active != 0].min() >= max(scores[active == 0].tolist(), default=-math.inf)


def test_an_earlier_subspace_stays_active() -> None:
    training = stepped(lb.SSVI(0.2, init_std=0.02))
    first = training.model
    same = lb.bayesianize(first, lb.SSVI(0.2))
    assert torch.equal(subspace(same).index, subspace(first).index)
    torch.testing.assert_close(same.posterior.mean(), first.posterior.mean())
    torch.testing.assert_close(same.posterior.variance(), first.posterior.variance())
    wider = lb.bayesianize(first, lb.SSVI(0.4, init_std=0.03))
    assert set(subspace(first).index.tolist()) < set(subspace(wider).index.tolist())
    new = ~torch.isin(subspace(wider).index, subspace(first).index)
    assert not subspace(wider).mu[new].any()
    torch.testing.assert_close(subspace(wider).std()[new], torch.full((int(new.sum()),), 0.03))
    dense = lb.bayesianize(first, lb.MeanField())
    torch.testing.assert_close(dense.posterior.mean(), first.posterior.mean())


@pytest.mark.parametrize("pattern", ["weight", "2x2"])
def test_a_larger_subspace_is_filled_with_random_weights(pattern: str) -> None:
    first = lb.bayesianize(nn.Linear(40, 40), lb.SSVI(0.1, pattern=pattern))
    kept = subspace(first).index

    def added(seed: int) -> Tensor:
        index = subspace(lb.bayesianize(first, lb.SSVI(0.5, pattern=pattern, seed=seed))).index
        assert torch.isin(kept, index).all()
        return index[~torch.isin(index, kept)]

    new = added(0)
    assert len(new) == 640
    assert torch.equal(new, added(0))
    assert not torch.equal(new, added(1))
    rows = torch.bincount(new // 40, minlength=40)  # the first free positions would leave the last rows empty
    assert rows.min() > 0


def test_weights_of_rigl_get_the_initial_std() -> None:
    rigl = lb.bayesianize(CASES["cnn"].build(), lb.RigL(0.3))
    bnn = lb.bayesianize(rigl, lb.SSVI(0.3, init_std=0.01))
    assert torch.equal(bnn.posterior.mean(), rigl.posterior.mean())
    torch.testing.assert_close(subspace(bnn).std(), torch.full_like(subspace(bnn).mu, 0.01))


# -- training ---------------------------------------------------------------------------------------------------------

MOVING = lb.SSVI(0.3, interval=3, until=1.0, init_std=0.02)


def train(method: Any, out: Path | None = None, **changes: Any) -> lb.BayesianModel:
    return fit(mlp(), method, task(clusters()), out=out, **{**SETTINGS, **changes})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_moving_subspace_resumes_exactly(optimizer: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint_steps": 4, "optimizer": optimizer, "lr": 1e-2}
    whole = train(MOVING, tmp_path / "whole", **changes)
    still = train(lb.SSVI(0.3, until=0.0, init_std=0.02), **changes)
    assert not torch.equal(subspace(whole).index, subspace(still).index)
    for step in (5, 6, 20):
        with stopped_at(step):
            train(MOVING, tmp_path / "stopped", **changes)
    assert_equal_models(train(MOVING, tmp_path / "stopped", **changes), whole)
    assert curve(read_record(tmp_path / "stopped")) == curve(read_record(tmp_path / "whole"))


@pytest.mark.parametrize("method", [lb.SSVI(0.3, interval=2, removal="sensitivity"), lb.RigL(0.3, interval=2)])
def test_batchnorm_dropout_and_bf16_resume_exactly(method: lb.Method, tmp_path: Path) -> None:
    def run(out: Path) -> lb.BayesianModel:
        changes: dict[str, Any] = {"precision": "bf16", "checkpoint_steps": 3, "epochs": 3}
        return fit(conv(), method, task(stripes()), out=out, **{**SETTINGS, **changes})

    whole = run(tmp_path / "whole")
    with stopped_at(5):
        run(tmp_path / "stopped")
    assert_equal_models(run(tmp_path / "stopped"), whole)


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "moments"])
def test_every_rule_trains_a_moving_subspace(rule: str) -> None:
    method = lb.SSVI(0.3, interval=5, rule=rule)
    bnn = train(method, epochs=12, lr=2e-2)
    first = subspace(lb.bayesianize(mlp(), method)).index
    assert not torch.equal(subspace(bnn).index, first)
    x, y = task(clusters()).validation[:]
    assert (bnn.predict(x).label == y).float().mean() > 0.85


def test_hooks_run_under_the_autocast_of_the_training() -> None:
    enabled = []

    def recorded(*args: Any) -> Tensor:
        enabled.append(torch.is_autocast_enabled("cpu"))
        return weight_gradient(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanbayes.methods.sparse_training.base.weight_gradient", recorded)
        for precision in ("bf16", "fp32"):
            train(MOVING, epochs=1, precision=precision)
    assert enabled == [True, True, False, False]


def write_state(folder: Path, method: lb.Method) -> None:
    """Train as one of several processes, and write the final state of this one."""
    bnn = train(method, epochs=2, refresh_batchnorm=False)
    torch.save(bnn.state_dict(), folder / f"{os.environ['RANK']}.pt")


@pytest.mark.parametrize(
    "method", [MOVING, lb.SSVI(0.3, interval=3, removal="sensitivity", addition="samples"), lb.RigL(0.3, interval=3)]
)
def test_two_processes_agree_on_the_subspace(method: lb.Method, tmp_path: Path) -> None:
    assert [finish(process) for process in together(write_state, 2, tmp_path, method)] == [0, 0]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    first = lb.bayesianize(mlp(), method).posterior
    assert isinstance(first, SparsePointPosterior)
    assert not torch.equal(one["posterior.index"], first.index)


def trained_at(temperature: float) -> tuple[Tensor, float]:
    """The stds after a training, and its accuracy."""
    bnn = train(lb.SSVI(0.5, interval=10), epochs=40, lr=1e-2, scale_lr=0.05, temperature=temperature)
    x, y = task(clusters()).validation[:]
    return subspace(bnn).std().detach(), (bnn.predict(x).label == y).float().mean().item()


def test_sigma_learns_and_does_not_collapse_to_the_prior() -> None:
    sigma, accuracy = trained_at(0.01)
    assert ((sigma / 1e-3).log() > 1).all()  # all have changed
    assert sigma.mean() < 0.8 * 0.05
    assert sigma.min() < 0.3 * 0.05
    assert sigma.std() > 0.2 * sigma.mean()  # weights have different stds
    assert accuracy > 0.9
    hot, accuracy = trained_at(1.0)  # too high for 128 examples: σ collapses to the prior
    assert hot.mean() > 0.9 * 0.05
    assert hot.std() < 0.05 * hot.mean()
    assert accuracy < 0.6


@pytest.fixture
def _compiler() -> Iterator[None]:
    """Reset the compiler before and after, because other tests count what they compile."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_compiler")
def test_compiled_code_sees_an_exchange_without_recompiling() -> None:
    training = stepped(lb.SSVI(0.4, interval=4, drop=0.6, prior=lb.Normal("fan_in")), "mlp")
    bnn, (x, y) = training.model, training.batch  # type: ignore[misc]

    def loss() -> Tensor:
        return lb.elbo_loss(bnn, x, y, num_data=100)

    def results(function: Callable[[], Tensor]) -> list[Tensor]:
        with bnn.frozen(1):
            value = function()
            return [value, *torch.autograd.grad(value, list(bnn.parameters()))]

    compiled = torch.compile(loss, fullgraph=True)
    before = results(compiled)
    old = subspace(bnn).index.clone()
    bnn.method.after_step(training)
    assert not torch.equal(subspace(bnn).index, old)
    with torch.compiler.set_stance("fail_on_recompile"):
        after = results(compiled)
    for graph, eager, earlier in zip(after, results(loss), before, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-5)
        assert not torch.equal(graph, earlier)


@pytest.mark.usefixtures("_compiler")
def test_fit_compiles_the_loss() -> None:
    changes: dict[str, Any] = {"epochs": 2, "lr": 1e-2}
    compiled, plain = train(MOVING, compile=True, **changes), train(MOVING, **changes)
    assert torch.equal(subspace(compiled).index, subspace(plain).index)
    torch.testing.assert_close(compiled.posterior.mean(), plain.posterior.mean(), rtol=1e-3, atol=1e-4)


# -- RigL -------------------------------------------------------------------------------------------------------------


def test_rigl_exchanges_deterministic_weights() -> None:
    method = lb.RigL(0.3, interval=4, drop=0.5)
    training = stepped(method)
    posterior = training.model.posterior
    assert type(posterior) is SparsePointPosterior
    assert training.model.scale_parameters() == []
    old, counts, mean = posterior.index.clone(), posterior.counts, posterior.mean().detach().clone()
    addition = method.addition_scores(training, posterior)
    method.after_step(training)
    gone, new = old[~torch.isin(old, posterior.index)], posterior.index[~torch.isin(posterior.index, old)]
    assert len(gone) == len(new) > 0
    assert torch.bincount(training.model.layout.slots_of(posterior.index)).tolist() == counts
    assert not posterior.mean()[new].any()
    stay = posterior.index[torch.isin(posterior.index, old)]
    assert torch.equal(posterior.mean()[stay], mean[stay])
    slots = training.model.layout.slots_of
    for slot in slots(gone).unique():
        kept = stay[slots(stay) == slot]
        assert mean[gone[slots(gone) == slot]].abs().max() <= mean[kept].abs().min()
        assert addition[new[slots(new) == slot]].min() > 0


def test_rigl_trains() -> None:
    bnn = train(lb.RigL(0.3, interval=5), epochs=10, lr=2e-2)
    x, y = task(clusters()).validation[:]
    assert (bnn.predict(x).label == y).float().mean() > 0.85
    assert not models_equal(bnn, train(lb.RigL(0.3, until=0.0), epochs=10, lr=2e-2))


# -- files ------------------------------------------------------------------------------------------------------------


def moved_to_another_layer(encoded: Tensor) -> Tensor:
    index = positions.decode(encoded, 43, 144)
    free = sorted(set(range(144)) - set(index.tolist()))
    index[-1 if free[0] < 96 else 0] = free[0] if free[0] < 96 else free[-1]
    return positions.encode(index.sort().values)


DAMAGES: dict[str, tuple[Change, str]] = {
    "beyond the end": (
        replaced("posterior.index", lambda t: torch.cat([t[:-1], torch.tensor([0xFF, 0x01]).byte()])),
        "beyond the 144",
    ),
    "one too few": (replaced("posterior.index", lambda t: t[:-1]), "42 positions instead of 43"),
    "one too many": (replaced("posterior.index", lambda t: torch.cat([t, t[:1]])), "44 positions instead of 43"),
    "overlong": (
        replaced("posterior.index", lambda t: torch.cat([t[:-1], torch.tensor([0x81, 0]).byte()])),
        "more bytes than it needs",
    ),
    "endless": (replaced("posterior.index", lambda t: torch.full((43,), 0xFF).byte()), "0 positions instead of 43"),
    "not bytes": (replaced("posterior.index", lambda t: torch.arange(43)), "vector of bytes"),
    "missing": (lambda tensors: tensors.pop("posterior.index"), "posterior.index"),
    "too few means": (lambda tensors: tensors.update({"posterior.mu": torch.zeros(42)}), "posterior.mu"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_raises_an_error(name: str, tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.SSVI(0.3))
    assert_damage_is_refused(bnn, mlp(), *DAMAGES[name], tmp_path / "model.safetensors")


def test_the_densities_of_layers_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    bnn = lb.bayesianize(mlp(), lb.SSVI(0.3))
    lb.save(bnn, path)
    rewritten(path, replaced("posterior.index", moved_to_another_layer))
    loaded: Any = lb.load(path, mlp()).eval()
    before, after = cast(Any, bnn.posterior).counts, loaded.posterior.counts
    assert sum(before) == sum(after)
    assert before != after
    x = torch.randn(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded.predict(x, rule="mean").probs, loaded.to_deterministic()(x).softmax(-1))


@pytest.mark.parametrize("method", [lb.SSVI(0.3, densities="erk", prior=lb.Normal("std")), lb.RigL(0.3)])
def test_a_trained_subspace_survives_a_round_trip(method: Any, tmp_path: Path) -> None:
    training = stepped(method)
    training.step = 99
    training.model.method.after_step(training)
    path = tmp_path / "model.safetensors"
    lb.save(training.model, path)
    loaded = lb.load(path, CASES["cnn"].build())
    assert_equal_models(loaded, training.model)
    assert loaded.method == training.model.method
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["leanbayes"])["method"]["type"] == type(method).__name__
        assert file.get_tensor("posterior.index").dtype == torch.uint8
