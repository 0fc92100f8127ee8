"""The ELBO and its gradients against plain autograd with the same noise, in double precision."""

import copy
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, distributions, nn

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.draw import Draw

N = 50
PRIOR = 0.3


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_case(name: str) -> tuple[nn.Module, BayesianModel, Tensor, Tensor]:
    """Return a network in double precision, its Bayesian model, inputs, and labels, some of them missing if dense."""
    case = CASES[name]
    model, x = case.build().double(), case.example()
    x = x.double() if x.is_floating_point() else x
    batch, classes, *positions = copy.deepcopy(model)(x).shape
    y = torch.randint(classes, (batch, *positions), generator=generator())
    if positions:
        y[0, ..., :2] = -100
    return model, lb.bayesianize(model, lb.MeanField(lb.Normal(PRIOR), init_std=0.2)), x, y


class Reference:
    """Return the ELBO by plain autograd over separate leaves, with the noise of the model."""

    def __init__(self, model: nn.Module, bnn: BayesianModel) -> None:
        self.model, self.bnn = copy.deepcopy(model), bnn
        self.points = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        rhos = bnn.layout.split(bnn.posterior.get_parameter("rho").detach())
        self.rhos = {s.name: r.clone().requires_grad_() for s, r in zip(bnn.layout, rhos, strict=True)}

    def kl(self) -> Tensor:
        prior = distributions.Normal(torch.tensor(0.0).double(), PRIOR)
        posteriors = [distributions.Normal(self.points[name], F.softplus(rho)) for name, rho in self.rhos.items()]
        return torch.stack([distributions.kl_divergence(q, prior).sum() for q in posteriors]).sum()

    def output(self, x: Tensor, draw: Draw) -> Tensor:
        parameters = dict(self.points)
        with torch.no_grad(), self.bnn.drawn(draw):
            drawn = {name: operator.attrgetter(name)(self.bnn.network).clone() for name in self.rhos}
        for name, rho in self.rhos.items():
            sigma = F.softplus(rho)
            epsilon = ((drawn[name] - self.points[name]) / sigma).detach()
            parameters[name] = self.points[name] + sigma * epsilon
        return torch.func.functional_call(self.model, parameters, (x,))

    def loss(self, x: Tensor, y: Tensor, draws: list[Draw], temperature: float = 1.0) -> Tensor:
        nlls = [F.cross_entropy(self.output(x, draw), y) for draw in draws]
        labeled_an_image = (y != -100).sum() / len(y)
        return torch.stack(nlls).mean() + temperature * self.kl() / (N * labeled_an_image)

    def check_gradients(self) -> None:
        bnn, grads = self.bnn, []
        for part in ("mu", "rho"):
            grad = bnn.posterior.get_parameter(part).grad
            assert grad is not None
            grads.append(bnn.layout.split(grad))
        for slot, mu, rho in zip(bnn.layout, *grads, strict=True):
            torch.testing.assert_close(mu, self.points[slot.name].grad, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(rho, self.rhos[slot.name].grad, rtol=1e-8, atol=1e-10)
        rest = {name: p.grad for name, p in bnn.network.named_parameters()}
        assert {*rest, *self.rhos} == {*self.points}
        for name, grad in rest.items():
            torch.testing.assert_close(grad, self.points[name].grad, rtol=1e-8, atol=1e-10)


def draws_of(bnn: BayesianModel, count: int, seed: int = 7) -> list[Draw]:
    source = generator(seed)
    return [bnn.next_draw(source) for _ in range(count)]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_autograd(name: str, samples: int) -> None:
    model, bnn, x, y = make_case(name)
    loss = lb.elbo_loss(bnn, x, y, num_data=N, samples=samples, temperature=1.5, generator=generator())
    loss.backward()
    reference = Reference(model, bnn)
    expected = reference.loss(x, y, draws_of(bnn, samples), temperature=1.5)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    reference.check_gradients()


@pytest.mark.parametrize("samples", [1, 3])
def test_gradients_compose_with_other_losses_and_reach_the_input(samples: int) -> None:
    model, bnn, x, y = make_case("cnn")
    reference = Reference(model, bnn)
    raw = x.clone().requires_grad_()
    loss = lb.elbo_loss(bnn, raw.tanh(), y, num_data=N, temperature=1, samples=samples, generator=generator())
    penalty = bnn.posterior.mean().square().sum() + raw.square().sum()
    (0.5 * loss + penalty).backward()
    raw_too = x.clone().requires_grad_()
    expected = 0.5 * reference.loss(raw_too.tanh(), y, draws_of(bnn, samples))
    means = torch.stack([reference.points[name].square().sum() for name in reference.rhos])
    (expected + means.sum() + raw_too.square().sum()).backward()
    reference.check_gradients()
    torch.testing.assert_close(raw.grad, raw_too.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("samples", [1, 2])
def test_two_losses_before_one_backward(samples: int) -> None:
    """A library that overwrites its noise in place gives σ the gradient of the last sample only."""
    model, bnn, x, y = make_case("mlp")
    source = generator()
    first = lb.elbo_loss(bnn, x, y, num_data=N, temperature=1, samples=samples, generator=source)
    second = lb.elbo_loss(bnn, x.flip(0), y, num_data=N, temperature=1, samples=samples, generator=source)
    (first + 2 * second).backward()
    reference, draws = Reference(model, bnn), draws_of(bnn, 2 * samples)
    expected = reference.loss(x, y, draws[:samples]) + 2 * reference.loss(x.flip(0), y, draws[samples:])
    expected.backward()
    reference.check_gradients()


def test_samples_average_single_losses() -> None:
    _, bnn, x, y = make_case("mlp")
    source = generator()
    single = [lb.elbo_loss(bnn, x, y, num_data=N, generator=source) for _ in range(3)]
    together = lb.elbo_loss(bnn, x, y, num_data=N, samples=3, generator=generator())
    torch.testing.assert_close(together, torch.stack(single).mean(), rtol=1e-12, atol=0)
    assert len({round(loss.item(), 9) for loss in single}) == 3


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
def test_temperature_scales_one_kl(rule: str, samples: int) -> None:
    _, bnn, x, y = make_case("mlp")
    bnn.rule = rule
    cold, one, hot = (
        lb.elbo_loss(bnn, x, y, num_data=N, samples=samples, temperature=t, generator=generator())
        for t in (0.0, 1.0, 2.0)
    )
    share = bnn.kl() / N
    torch.testing.assert_close(one - cold, share)
    torch.testing.assert_close(hot - cold, 2 * share)


@pytest.mark.parametrize(
    ("prior", "center", "scale"),
    [
        (lb.Normal(0.2), 0.0, 0.2),
        (lb.Normal(0.2, center="pretrained"), 1.0, 0.2),
        (lb.Normal("fan_in", gain=2.0), 0.0, 2 / 6**0.5),
    ],
)
def test_kl_is_the_exact_sum(prior: lb.Normal, center: float, scale: float) -> None:
    model = nn.Linear(6, 4).double()
    bnn = lb.bayesianize(model, lb.MeanField(prior, init_std=0.3, relative=False))
    with torch.no_grad():
        bnn.posterior.get_parameter("mu").add_(0.1)
    q = distributions.Normal(model.weight + 0.1, torch.tensor(0.3, dtype=torch.float64))
    expected = distributions.kl_divergence(q, distributions.Normal(center * model.weight, scale)).sum()
    assert bnn.kl_kind == "exact"
    torch.testing.assert_close(bnn.kl(), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_no_grad_gives_the_same_number(samples: int) -> None:
    _, bnn, x, y = make_case("mlp")
    with torch.no_grad():
        silent = lb.elbo_loss(bnn, x, y, num_data=N, samples=samples, generator=generator())
    assert not silent.requires_grad
    assert bnn.trained_rule is None
    torch.testing.assert_close(silent, lb.elbo_loss(bnn, x, y, num_data=N, samples=samples, generator=generator()))
    assert bnn.trained_rule == "sample"


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
def test_the_rule_of_training_is_recorded(rule: str) -> None:
    _, bnn, x, y = make_case("mlp")
    with bnn.using(rule):
        lb.elbo_loss(bnn, x, y, num_data=N)
    assert bnn.trained_rule == rule
    assert bnn.rule == "sample"


def test_memory_does_not_grow_with_samples() -> None:
    bnn = lb.bayesianize(CASES["resnet"].build(), lb.MeanField())
    x, y = torch.randn(32, 3, 16, 16), torch.randint(5, (32,))

    def peak(samples: int) -> int:
        bnn.zero_grad(set_to_none=True)
        with PeakMemory() as memory:
            lb.elbo_loss(bnn, x, y, num_data=N, samples=samples).backward()
        return memory.peak_bytes

    assert peak(8) <= 1.15 * peak(2)
    assert peak(8) <= 1.5 * peak(1)


@pytest.mark.parametrize(
    "method", [lb.MeanField(init_std=0.5, rule="local"), lb.MeanField(init_std=0.5, rule="flipout"), lb.MCDropout(0.3)]
)
def test_folding_is_unbiased(method: Any) -> None:
    """Over 400 seeds, loss and gradient of both have the same mean within 5 standard errors."""
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    x, y = CASES["mlp"].example(), torch.tensor([0, 1, 2, 1])
    weight = next(bnn.parameters())
    runs: dict[str, list[Tensor]] = {"accumulate": [], "fold": []}
    for seed in range(400):
        for over in ("accumulate", "fold"):
            loss = lb.elbo_loss(bnn, x, y, num_data=N, samples=3, over=over, generator=generator(seed))
            (grad,) = torch.autograd.grad(loss, weight)
            runs[over].append(torch.stack([loss.detach(), grad.sum(), grad.flatten()[3]]))
    one, other = (torch.stack(runs[over]).double() for over in runs)
    error = ((one.var(0) + other.var(0)) / 400).sqrt()
    assert (one.std(0) > 0).all()
    assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()


def test_folding_refuses_one_sample_per_batch() -> None:
    _, bnn, x, y = make_case("mlp")
    with pytest.raises(lb.LeanBayesError, match="accumulate"):
        lb.elbo_loss(bnn, x, y, num_data=N, samples=2, over="fold")


class Wrapper(nn.Module):
    """A wrapper with the interface of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("wrap", [Wrapper, lambda bnn: torch.compile(bnn, backend="eager")], ids=["ddp", "compile"])
def test_wrapped_models_are_called_through_their_wrapper(wrap: Any, samples: int) -> None:
    _, bnn, x, y = make_case("mlp")
    wrapped = wrap(bnn)
    loss = lb.elbo_loss(wrapped, x, y, num_data=N, samples=samples, generator=generator())
    torch.testing.assert_close(loss, lb.elbo_loss(bnn, x, y, num_data=N, samples=samples, generator=generator()))
    loss.backward()
    assert bnn.posterior.get_parameter("rho").grad is not None
    if isinstance(wrapped, Wrapper):
        assert wrapped.calls == samples


def test_another_likelihood_is_for_one_loss_and_leaves_the_model_unchanged() -> None:
    bnn = lb.bayesianize(nn.Linear(6, 2), lb.MeanField())
    likelihood, x, y = lb.Gaussian(0.5), torch.randn(4, 6), torch.randn(4, 2)
    own = bnn.likelihood
    with bnn.frozen(0):
        loss = lb.elbo_loss(bnn, x, y, num_data=N, likelihood=likelihood, temperature=0.0)
        expected = -torch.distributions.Normal(bnn(x), 0.5).log_prob(y).sum(1).mean()
    torch.testing.assert_close(loss, expected)
    assert bnn.likelihood is own
    assert isinstance(bnn.predict(x), lb.ClassPrediction)


def test_the_models_own_learned_likelihood_is_trained() -> None:
    likelihood, x, y = lb.Gaussian(0.5, learned=True), torch.randn(4, 6), torch.randn(4, 2)
    bnn = lb.bayesianize(nn.Linear(6, 2), lb.MeanField(), likelihood=likelihood)
    lb.elbo_loss(bnn, x, y, num_data=N, likelihood=bnn.likelihood, samples=2).backward()
    assert isinstance(bnn.likelihood, lb.Gaussian)
    assert bnn.likelihood.rho is not None
    assert bnn.likelihood.rho.grad is not None


def test_ensemble_members_train_as_if_alone() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build().double(), lb.Ensemble(members=3))
    x, y = CASES["cnn"].example().double(), torch.tensor([0, 1, 4, 2])
    members = copy.deepcopy(list(bnn.network.get_submodule("networks").children()))
    loss = lb.elbo_loss(bnn, x, y, num_data=N)
    loss.backward()
    alone = torch.stack([F.cross_entropy(member(x), y) for member in members])
    torch.testing.assert_close(loss, alone.sum())
    alone.sum().backward()
    for parameter, expected in zip(bnn.parameters(), nn.ModuleList(members).parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_frozen_models_have_a_loss() -> None:
    _, bnn, x, y = make_case("mlp")
    bnn.requires_grad_(False)
    losses = [lb.elbo_loss(bnn, x, y, num_data=N, samples=samples) for samples in (1, 2)]
    assert all(loss.isfinite() and not loss.requires_grad for loss in losses)


def test_a_temperature_may_be_a_tensor() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField())
    x = CASES["mlp"].example()
    y = torch.zeros(len(x), dtype=torch.long)
    for temperature in (0.0, 0.3):
        with bnn.frozen(0):
            number, tensor = (
                lb.elbo_loss(bnn, x, y, num_data=100, temperature=value)
                for value in (temperature, torch.tensor(temperature))
            )
        torch.testing.assert_close(tensor, number)
