"""The engine `ivon`: its update, against a published implementation, a plain loop and a posterior that is known."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ivon as peer  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import CASES
from test_conformance import ROWS, build
from torch import Tensor, nn
from training_cases import clusters, conv, expect, mlp, run_mlp, stripes, task

import leanbayes as lb
from leanbayes.core import gaussian, noise
from leanbayes.core.gaussian import NormalTerms
from leanbayes.training import fit, read_record

NUM_DATA = 200


def network(bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias)).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 32, 5, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(3, (count, 32), generator=generator), strict=True))


def model(bias: bool = False, **method: Any) -> lb.BayesianModel:
    return lb.bayesianize(network(bias), lb.MeanField(engine="ivon", **method), seed=3)


def take_step(bnn: lb.BayesianModel, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, **settings: Any) -> None:
    optimizer.zero_grad()
    lb.elbo_loss(bnn, x, y, num_data=NUM_DATA, **settings).backward()
    optimizer.step()


def keys_of(bnn: lb.BayesianModel) -> list[Tensor]:
    """Return a list that the keys of all samples are added to from now on."""
    keys: list[Tensor] = []
    original = bnn.next_draw

    def next_draw(*args: Any, **kwargs: Any) -> Any:
        draw = original(*args, **kwargs)
        keys.append(draw.key)
        return draw

    bnn.next_draw = next_draw  # type: ignore[method-assign]
    return keys


# -- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 3])
def test_the_update_is_that_of_the_published_implementation(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decay, second = 0.01, 0.99
    bnn = model(prior=lb.Normal(1 / math.sqrt(NUM_DATA * decay)))
    ours = lb.IVON(bnn, lr=0.3, num_data=NUM_DATA, hess_init=0.5, betas=(0.9, second))
    other = network()
    theirs = peer.IVON(other.parameters(), lr=0.3, ess=NUM_DATA, hess_init=0.5, beta2=second, weight_decay=decay)
    keys = keys_of(bnn)
    for x, y in batches(30):
        keys.clear()
        optimized = [p.detach().clone() for p in bnn.parameters()]
        take_step(bnn, ours, x, y, samples=samples)
        assert len(keys) == samples
        assert not torch.equal(optimized[0], bnn.posterior.mean())
        other.zero_grad()
        for key in keys:
            epsilon = noise.normal(bnn.posterior.mean(), key)
            monkeypatch.setattr(torch, "randn", lambda *args, epsilon=epsilon, **kwargs: epsilon.clone())
            with theirs.sampled_params(train=True):
                other.zero_grad()
                nn.functional.cross_entropy(other(x), y).backward()
        theirs.step()
        monkeypatch.undo()
        expected = torch.cat([p.detach().flatten() for p in other.parameters()])
        torch.testing.assert_close(bnn.posterior.mean().detach(), expected, rtol=1e-11, atol=1e-13)
        variance = 1 / (NUM_DATA * (theirs.param_groups[0]["hess"] + decay))
        torch.testing.assert_close(bnn.posterior.variance().detach(), variance, rtol=1e-11, atol=1e-13)


def expected_step(
    mean: Tensor,
    h: Tensor,
    v: Tensor,
    g: Tensor,
    moved: Tensor,
    t: int,
    loc: Tensor,
    scale: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step as the paper writes it, with the Hessian h and the weight decay δ of the prior."""
    weight, h0, lr, first, second = NUM_DATA / temperature, 0.5, 0.3, 0.9, 0.99
    decay = 1 / (weight * scale**2)
    estimate = g * moved * weight * (h + decay)
    v = first * v + (1 - first) * g
    h = second * h + (1 - second) * estimate + 0.5 * (1 - second) ** 2 * (h - estimate) ** 2 / (h + decay)
    step = lr * (h0 + decay)
    return mean - step * (v / (1 - first**t) + decay * (mean - loc)) / (h + decay), h, v


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("prior", [lb.Normal(0.2), lb.Normal("fan_in", center="pretrained")], ids=["number", "layers"])
def test_the_update_for_any_prior_and_temperature(prior: lb.Normal, temperature: float) -> None:
    bnn = model(prior=prior)
    options: dict[str, Any] = {"num_data": NUM_DATA, "temperature": temperature, "betas": (0.9, 0.99)}
    optimizer = lb.IVON(bnn, lr=0.3, hess_init=0.5, **options)
    terms = bnn.posterior.prior.normal_terms()  # type: ignore[union-attr, operator]
    mean = bnn.posterior.mean().detach().clone()
    loc = torch.zeros_like(mean) if terms.loc is None else terms.loc.clone()
    scale = torch.as_tensor(terms.scale, dtype=mean.dtype).expand_as(mean)
    h, v, weight = torch.full_like(mean, 0.5), torch.zeros_like(mean), NUM_DATA / temperature
    keys = keys_of(bnn)
    for t, (x, y) in enumerate(batches(20), start=1):
        keys.clear()
        take_step(bnn, optimizer, x, y)
        sigma = (weight * (h + 1 / (weight * scale**2))).rsqrt()
        moved = sigma * noise.normal(mean, keys[0])
        flat = (mean + moved).requires_grad_()
        first, second = flat.split([40, 24])
        hidden = torch.tanh(x @ first.view(8, 5).T)
        loss = nn.functional.cross_entropy(hidden @ second.view(3, 8).T, y)
        (g,) = torch.autograd.grad(loss, [flat])
        mean, h, v = expected_step(mean, h, v, g, moved, t, loc, scale, temperature)
        torch.testing.assert_close(bnn.posterior.mean().detach(), mean, rtol=1e-10, atol=1e-13)
        variance = 1 / (weight * h + scale**-2)
        torch.testing.assert_close(bnn.posterior.variance().detach(), variance, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_a_conjugate_model_reaches_its_posterior(temperature: float) -> None:
    """Linear regression with known noise: the best diagonal Gaussian has the posterior's mean and precisions."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(100, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.5, 2.0])
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.5 * torch.randn(
        100, 1, generator=generator, dtype=torch.float64
    )
    net = nn.Linear(3, 1, bias=False).double()
    method = lb.MeanField(prior=lb.Normal(0.7), engine="ivon")
    bnn = lb.bayesianize(net, method, likelihood=lb.Gaussian(0.5), seed=0)
    optimizer = lb.IVON(bnn, lr=0.2, num_data=100, temperature=temperature, betas=(0.9, 0.99), hess_init=4.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    precisions = []
    for _ in range(1000):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=100, temperature=temperature, samples=4).backward()
        optimizer.step()
        schedule.step()
        precisions.append(1 / bnn.posterior.variance().detach())
    expected = x.T @ x / 0.25 / temperature + torch.eye(3, dtype=torch.float64) / 0.49
    mean = torch.linalg.solve(expected, x.T @ y / 0.25 / temperature)[:, 0]
    torch.testing.assert_close(bnn.posterior.mean().detach(), mean, rtol=0.01, atol=0.003)
    average = torch.stack(precisions[-600:]).mean(0)  # the estimate of the curvature is noisy
    torch.testing.assert_close(average, expected.diagonal(), rtol=0.05, atol=0.0)


@given(
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.floats(1e-6, 10.0),
    st.floats(1.0, 1e7),
    st.floats(1e-6, 0.5),
)
@settings(max_examples=200, deadline=None)
def test_stds_stay_positive_for_any_gradient(slope: float, std: float, weight: float, gap: float) -> None:
    mean, momentum = torch.zeros(1), torch.zeros(1)
    rho = gaussian.inverse_softplus(torch.tensor([std]))
    one = torch.ones(())
    gaussian.natural_step_(
        mean, rho, momentum, torch.tensor([1.0]), torch.tensor([slope]), NormalTerms(None, 0.1),
        rate=one, count=one, beta=0.9, gap=gap, precision=100.0, weight=weight,
    )  # fmt: skip
    sigma = nn.functional.softplus(rho)
    assert torch.isfinite(mean).all()
    assert torch.isfinite(rho).all()
    assert (sigma > 0).all()


# -- any loop ---------------------------------------------------------------------------------------------------------


def test_accumulated_gradients_give_the_same_update() -> None:
    (x, y), states = batches(1)[0], []
    for parts in (1, 4):
        bnn = model()
        optimizer = lb.IVON(bnn, num_data=NUM_DATA)
        with bnn.frozen(5):
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (lb.elbo_loss(bnn, xs, ys, num_data=NUM_DATA) / parts).backward()
        optimizer.step()
        states.append(bnn.state_dict())
    for name in ("posterior.mu", "posterior.rho"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-12, atol=1e-14)


def test_other_parameters_take_steps_of_sgd_with_momentum() -> None:
    """Biases, compared with torch's SGD, whose momentum with dampening is the same average of gradients."""
    bnn = model(bias=True)
    optimizer = lb.IVON(bnn, lr=0.2, num_data=NUM_DATA, weight_decay=0.03)
    biases = [p for p in bnn.network.parameters()]
    twins = [p.detach().clone() for p in biases]
    averages = [torch.zeros_like(p) for p in biases]
    for t, (x, y) in enumerate(batches(10), start=1):
        take_step(bnn, optimizer, x, y)
        for twin, average, parameter in zip(twins, averages, biases, strict=True):
            assert parameter.grad is not None
            average.mul_(0.9).add_(parameter.grad, alpha=0.1)
            twin -= 0.2 * (average / (1 - 0.9**t) + 0.03 * twin)
    for twin, parameter in zip(twins, biases, strict=True):
        torch.testing.assert_close(parameter.detach(), twin)


def test_deterministic_weights_of_a_partial_posterior_take_steps_of_sgd() -> None:
    bnn = lb.bayesianize(network(), lb.PBN(0.25, sensitivity="magnitude", engine="ivon"), seed=0)
    optimizer = lb.IVON(bnn, lr=0.2, num_data=NUM_DATA, weight_decay=0.03)
    chosen = bnn.posterior.variance() > 0
    assert 0 < int(chosen.sum()) < len(chosen)
    twin, average = bnn.posterior.mean().detach().clone(), torch.zeros(len(chosen), dtype=torch.float64)
    for t, (x, y) in enumerate(batches(10), start=1):
        take_step(bnn, optimizer, x, y)
        gradient = bnn.posterior.mu.grad
        average.mul_(0.9).add_(gradient, alpha=0.1)  # type: ignore[arg-type]
        twin -= 0.2 * (average / (1 - 0.9**t) + 0.03 * twin)
    mean = bnn.posterior.mean().detach()
    torch.testing.assert_close(mean[~chosen], twin[~chosen])
    assert not torch.allclose(mean[chosen], twin[chosen])


def test_a_learned_noise_is_trained_by_adam() -> None:
    x, _ = batches(1)[0]
    y = 3 * torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bnn = lb.bayesianize(network(), lb.MeanField(engine="ivon"), likelihood=lb.Gaussian(1.0, learned=True), seed=0)
    optimizer = lb.IVON(bnn, lr=0.1, num_data=NUM_DATA, scale_lr=0.05)
    (parameter,) = bnn.likelihood.parameters()
    twin = nn.Parameter(parameter.detach().clone())
    adam = torch.optim.Adam([twin], lr=0.05)
    for _ in range(20):
        take_step(bnn, optimizer, x, y)
        assert parameter.grad is not None
        twin.grad = parameter.grad.clone()
        adam.step()
    torch.testing.assert_close(parameter, twin)


def test_it_stores_one_number_per_weight() -> None:
    bnn = model()
    optimizer = lb.IVON(bnn, num_data=NUM_DATA)
    take_step(bnn, optimizer, *batches(1)[0])
    stored = sum(t.numel() for state in optimizer.state.values() for t in state.values())
    assert stored == bnn.layout.numel


def test_training_continues_bit_by_bit_from_its_state() -> None:
    data = batches(8)
    bnn = model(bias=True)
    optimizer = lb.IVON(bnn, num_data=NUM_DATA, lr=0.5)
    for x, y in data[:4]:
        take_step(bnn, optimizer, x, y)
    saved = copy.deepcopy((bnn.state_dict(), optimizer.state_dict()))
    for x, y in data[4:]:
        take_step(bnn, optimizer, x, y)
    again = model(bias=True)
    resumed = lb.IVON(again, num_data=NUM_DATA, lr=0.9)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for x, y in data[4:]:
        take_step(again, resumed, x, y)
    for name, value in bnn.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_schedulers_clipping_closures_and_copies() -> None:
    bnn = model(bias=True)
    optimizer = lb.IVON(bnn, lr=0.4, num_data=NUM_DATA)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    x, y = batches(1)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, x, y, num_data=NUM_DATA)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bnn.parameters(), 0.1)
        return loss

    losses = []
    for step in range(5):
        assert [group["lr"] for group in optimizer.param_groups] == [0.4 * 0.5**step] * 2
        loss = optimizer.step(closure)
        assert loss is not None
        losses.append(loss.item())
        schedule.step()
    assert all(map(math.isfinite, losses))
    copied = copy.deepcopy(optimizer)
    assert copied.param_groups[0]["hess_init"] == optimizer.param_groups[0]["hess_init"]


def test_accelerate_prepares_it() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    states = []
    for prepared in (False, True):
        bnn = model(bias=True)
        optimizer: Any = lb.IVON(bnn, lr=0.4, num_data=NUM_DATA)
        used: Any = bnn
        if prepared:
            AcceleratorState._reset_state()
            accelerator = Accelerator(cpu=True)
            used, optimizer = accelerator.prepare(bnn, optimizer)
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = lb.elbo_loss(used, x, y, num_data=NUM_DATA)
            accelerator.backward(loss) if prepared else loss.backward()
            optimizer.step()
        states.append({name: value.clone() for name, value in bnn.state_dict().items()})
    AcceleratorState._reset_state()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_bf16_autocast_needs_no_scaler() -> None:
    bnn = lb.bayesianize(mlp(), lb.MeanField(engine="ivon"), seed=0)
    optimizer = lb.IVON(bnn, lr=0.3, num_data=160)
    x, y = clusters()[:]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = lb.elbo_loss(bnn, x, y, num_data=160)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all(p.dtype == torch.float32 for p in bnn.parameters())


def test_a_learning_rate_can_be_a_tensor() -> None:
    states = []
    for lr in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        bnn = model(bias=True)
        optimizer = lb.IVON(bnn, lr=lr, num_data=NUM_DATA)
        for x, y in batches(3):
            take_step(bnn, optimizer, x, y)
        states.append(bnn.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-12, atol=0.0)


# -- every posterior and rule -----------------------------------------------------------------------------------------

METHODS = (lb.MeanField, lb.PBN, lb.SSVI)
TRAINED = [
    name
    for name, row in ROWS.items()
    if row.trains and isinstance(row.method, METHODS) and "mixture" not in name and row.rule != "mean"
]


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_every_posterior_by_every_rule(name: str) -> None:
    row = ROWS[name]
    bnn, x, y = build(row, "cnn")
    expected = lb.elbo_loss(bnn, x, y, num_data=10_000, temperature=1).item()  # the default of ivon
    method = dataclasses.replace(row.method, engine="ivon")  # type: ignore[type-var]
    bnn = lb.bayesianize(CASES["cnn"].build(), method, seed=int(bnn.noise.state[0]))
    optimizer = lb.IVON(bnn, lr=0.5, num_data=10_000, keep_std=True)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, x, y, num_data=10_000)
        if step == 0:
            assert loss.item() == pytest.approx(expected, rel=1e-5)  # the value of the loss has the KL
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    (rho,) = bnn.scale_parameters()
    assert torch.isfinite(rho).all()


def test_the_initial_std_is_that_of_the_curvature() -> None:
    bnn = model(prior=lb.Normal(0.2))
    lb.IVON(bnn, num_data=1000, hess_init=0.5, temperature=0.5)
    torch.testing.assert_close(
        bnn.posterior.variance(), torch.full_like(bnn.posterior.variance(), 1 / (2000 * 0.5 + 25))
    )
    lb.IVON(bnn, num_data=10, hess_init=0.5, keep_std=True)
    assert bnn.posterior.variance()[0].item() == pytest.approx(1 / 1025)
    bnn = model()
    lb.IVON(bnn, num_data=4)  # so few data that a curvature of 0.5 would mean a σ above the size of the weights
    weights = bnn.posterior.mean().detach()
    assert float(bnn.posterior.variance().detach().sqrt().max()) <= 0.2 * float(weights.square().mean().sqrt()) + 1e-9


# -- wrong use --------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "another engine": (lambda: lb.IVON(lb.bayesianize(mlp(), lb.MeanField()), num_data=10), "engine='ivon'"),
    "no Bayesian model": (lambda: lb.IVON(mlp(), num_data=10), "lb.bayesianize"),
    "mixture prior": (lambda: lb.MeanField(engine="ivon", prior=lb.ScaleMixture()), "Gaussian prior"),
    "mean KL": (lambda: lb.PBN(engine="ivon", kl="mean"), "kl='sum'"),
    "unknown engine": (lambda: lb.SSVI(engine="adam"), "'backprop', 'ivon'"),  # type: ignore[arg-type]
    "no data": (lambda: lb.IVON(model(), num_data=0), "num_data=0"),
    "cold": (lambda: lb.IVON(model(), num_data=10, temperature=0.0), "temperature=0.0"),
    "betas": (lambda: lb.IVON(model(), num_data=10, betas=(0.9, 1.0)), "betas"),
    "schedule": (
        lambda: fit(mlp(), lb.MeanField(engine="ivon"), task(clusters()), epochs=1, temperature_end=0.1),
        "temperature_end",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_a_clear_error(name: str) -> None:
    run, words = MISTAKES[name]
    expect(run, words)


def test_a_loss_without_the_optimizer_raises_a_clear_error() -> None:
    bnn, (x, y) = model(), batches(1)[0]
    expect(lambda: lb.elbo_loss(bnn, x, y, num_data=NUM_DATA), "lb.IVON(bnn")
    with torch.no_grad():
        lb.elbo_loss(bnn, x, y, num_data=NUM_DATA)


# -- fit --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [lb.MeanField(engine="ivon"), lb.PBN(0.1, engine="ivon"), lb.SSVI(0.3, engine="ivon", interval=5)],
    ids=["MeanField", "PBN", "SSVI"],
)
def test_fit_trains_by_ivon(method: lb.Method, tmp_path: Any) -> None:
    bnn = fit(conv(), method, task(stripes()), epochs=20, batch_size=16, lr=0.3, seed=0, progress=False, out=tmp_path)
    x, y = stripes()[:]
    assert float((bnn.predict(x).label == y).double().mean()) > 0.9
    assert bnn.posterior.random_weights > 0


def test_fit_logs_the_kl_and_a_constant_temperature(tmp_path: Any) -> None:
    run_mlp(lb.MeanField(engine="ivon"), tmp_path / "run", temperature=0.5)
    entries = [entry for entry in read_record(tmp_path / "run")["history"] if "kl" in entry]
    assert entries
    assert {entry["temperature"] for entry in entries} == {0.5}
    assert all(entry["kl"] > 0 and math.isfinite(entry["kl"]) for entry in entries)


@pytest.mark.parametrize("method", [lb.PBN(rate=0.1, engine="ivon"), lb.Deterministic(engine="ivon")])
def test_a_learned_noise_that_becomes_small_does_not_make_the_training_diverge(method: lb.Method) -> None:
    """Targets without noise: with a constant learning rate the loss of PBN becomes infinite here."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 4, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    likelihood, data = lb.Gaussian(1.0, learned=True), [(x, y)] if method.bayesian_weights else None
    bnn = lb.bayesianize(network, method, likelihood=likelihood, seed=0, data=data)
    optimizer = lb.IVON(bnn, lr=0.2, num_data=256)
    for _ in range(500):
        rows = torch.randint(256, (32,), generator=generator)
        loss = lb.elbo_loss(bnn, x[rows], y[rows], num_data=256)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    error = bnn.predict(x, generator=generator).mean - y
    assert error.square().mean().sqrt() < 0.5  # of 2.3, the std of the targets
    assert likelihood.std < 0.3


def test_the_learning_rate_falls_with_a_learned_noise() -> None:
    """A step at noise s is that of a fixed noise s with s/s₀ times the learning rate."""
    moved = []
    for likelihood, lr in ((lb.Gaussian(2.0, learned=True), 0.1), (lb.Gaussian(0.5), 0.1 * 0.5 / 2.0)):
        network = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            network.weight.fill_(0.5)
            network.bias.zero_()
        bnn = lb.bayesianize(network, lb.MeanField(engine="ivon"), likelihood=likelihood, seed=0)
        optimizer = lb.IVON(bnn, lr=lr, num_data=10, hess_init=0.5)
        if likelihood.rho is not None:
            with torch.no_grad():
                likelihood.rho.copy_(torch.tensor(0.5).expm1().log())
        before = [parameter.detach().clone() for parameter in bnn.mean_parameters()]
        x = torch.arange(6, dtype=torch.float64).reshape(2, 3)
        lb.elbo_loss(bnn, x, torch.ones(2, 1, dtype=torch.float64), num_data=10).backward()
        optimizer.step()
        after = list(bnn.mean_parameters())
        moved.append(torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)][:2]))
    assert moved[0].abs().min() > 0
    torch.testing.assert_close(moved[0], moved[1].to(moved[0]), rtol=1e-5, atol=1e-9)
