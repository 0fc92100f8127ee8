"""Likelihoods of Gaussian outputs: against large samples, product quadrature, and the likelihoods of known outputs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import gaussian
from torch import Tensor

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.likelihoods import Likelihood, expectations
from leanbayes.likelihoods.expectations import expect, gaussian_means, logit_noise, softplus

BATCH, WIDTH, DRAWS = 5, 4, 100_000
few = settings(max_examples=10, deadline=None, derandomize=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels(shape: tuple[int, ...], high: int = WIDTH) -> Tensor:
    return torch.randint(high, shape, generator=generator(5))


def targets(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(6), dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], Likelihood], tuple[int, ...], Tensor]] = {
    "classes": (lb.Categorical, (BATCH, WIDTH), labels((BATCH,))),
    "classes last": (lambda: lb.Categorical(class_dim=-1), (BATCH, 3, WIDTH), labels((BATCH, 3))),
    "pixels": (lambda: lb.Categorical(ignore_index=0), (BATCH, WIDTH, 2, 3), labels((BATCH, 2, 3))),
    "yes or no": (lb.Bernoulli, (BATCH, WIDTH), labels((BATCH, WIDTH), 2)),
    "soft yes": (lb.Bernoulli, (BATCH, WIDTH), targets(BATCH, WIDTH).sigmoid()),
    "real": (lambda: lb.Gaussian(0.7), (BATCH, WIDTH), targets(BATCH, WIDTH)),
    "learned noise": (lambda: lb.Gaussian(0.7, learned=True).double(), (BATCH, WIDTH), targets(BATCH, WIDTH)),
    "own noise": (lb.HeteroscedasticGaussian, (BATCH, WIDTH), targets(BATCH, WIDTH // 2)),
}
every_case = pytest.mark.parametrize("name", CASES)


def make(name: str, std: float = 1.0) -> tuple[Any, lb.Moments, Tensor]:
    build, shape, y = CASES[name]
    return build(), gaussian(shape, std=std), y


def leaves(output: lb.Moments) -> lb.Moments:
    return lb.Moments(output.loc.clone().requires_grad_(), output.variance.clone().requires_grad_())


def sampled_losses(likelihood: Any, output: lb.Moments, y: Tensor, count: int = DRAWS) -> Tensor:
    """Return the loss of a batch for each of many samples."""
    epsilon = torch.randn((count, *output.shape), generator=generator(9), dtype=torch.float64)
    with torch.no_grad():
        return torch.vmap(lambda z: likelihood.nll(z, y).total)(output.loc + output.stddev * epsilon)


# -- the expected loss ------------------------------------------------------------------------------------------------


@every_case
def test_expected_loss_is_the_mean_over_many_samples(name: str) -> None:
    likelihood, output, y = make(name)
    outcomes = sampled_losses(likelihood, output, y)
    total, observations = likelihood.expected_nll(output, y, noise.make_key(3), samples=5000)
    error = outcomes.std().item() * math.sqrt(1 / DRAWS + 1 / 5000)
    assert abs(total.item() - outcomes.mean().item()) < 5 * error
    assert int(observations) == int(likelihood.nll(output.loc, y).observations)


@every_case
@pytest.mark.parametrize("samples", [1, 7, 8])
def test_without_variance_it_is_the_plain_loss(name: str, samples: int) -> None:
    likelihood, output, y = make(name)
    certain = lb.Moments(output.loc, torch.zeros_like(output.loc))
    plain = likelihood.nll(output.loc, y)
    for result in (likelihood.nll(certain, y), likelihood.expected_nll(certain, y, noise.make_key(1), samples)):
        torch.testing.assert_close(result.total, plain.total, rtol=1e-12, atol=1e-12)
        assert int(result.observations) == int(plain.observations)


@every_case
def test_gradients_are_finite_without_variance_and_right_in_the_mean(name: str) -> None:
    likelihood, output, y = make(name)
    certain = lb.Moments(output.loc.clone().requires_grad_(), torch.zeros_like(output.loc).requires_grad_())
    loc = output.loc.clone().requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.nll(loc, y).total, loc)
    of_loc, of_variance = torch.autograd.grad(likelihood.nll(certain, y).total, [certain.loc, certain.independent])
    torch.testing.assert_close(of_loc, expected, rtol=1e-12, atol=1e-12)
    # Half the curvature of the loss: ∂/∂v E f = ½ E f''.
    curvature = torch.autograd.functional.hessian(lambda z: likelihood.nll(z, y).total, output.loc)
    diagonal = curvature.reshape(loc.numel(), -1).diagonal().reshape(loc.shape)
    torch.testing.assert_close(of_variance, 0.5 * diagonal, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["yes or no", "soft yes", "real", "learned noise", "own noise"])
@pytest.mark.parametrize("std", [0.01, 1.0])
def test_gradients_are_those_of_the_loss(name: str, std: float) -> None:
    likelihood, output, y = make(name, std)
    output = leaves(output)

    def loss(loc: Tensor, variance: Tensor) -> Tensor:
        return likelihood.nll(lb.Moments(loc, variance), y).total

    eps = 1e-6 * std**2
    assert torch.autograd.gradcheck(loss, (output.loc, output.independent), eps=eps, atol=1e-4, rtol=1e-4)


@every_case
@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e4])
def test_gradients_are_finite_at_any_variance_in_single_precision(name: str, factor: float) -> None:
    likelihood, output, y = make(name)
    likelihood, y = likelihood.float(), y.float() if y.is_floating_point() else y
    output = leaves(lb.Moments(output.loc.float(), (factor * output.variance).float()))
    total = likelihood.nll(output, y).total
    assert total.isfinite()
    for gradient in torch.autograd.grad(total, [output.loc, output.independent]):
        assert gradient.isfinite().all()


def product_rule(loc: Tensor, variance: Tensor, y: int) -> Tensor:
    """E[-log softmax(z)_y] of three logits, by a grid over all of them."""
    nodes = torch.linspace(-7, 7, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(nodes, nodes, nodes)
    weights = torch.softmax(-0.5 * grid.square().sum(1), 0)
    return -(weights * F.log_softmax(loc + variance.sqrt() * grid, 1)[:, y]).sum()


@pytest.mark.parametrize("dense", [False, True])
def test_cross_entropy_and_its_gradients_are_unbiased(dense: bool) -> None:
    loc, variance = torch.tensor([0.5, -1.0, 0.2]).double(), torch.tensor([0.3, 2.0, 0.8]).double()
    exact_loc, exact_variance = loc.clone().requires_grad_(), variance.clone().requires_grad_()
    exact = product_rule(exact_loc, exact_variance, 1)
    truth = torch.cat([exact.detach().view(1), *torch.autograd.grad(exact, [exact_loc, exact_variance])])
    rows, pixels = (40, 50) if dense else (2000, 1)
    shape = (rows, pixels, 3) if dense else (rows, 3)
    runs = []
    for seed in range(10):
        output = leaves(lb.Moments(loc.expand(shape), variance.expand(shape)))
        likelihood = lb.Categorical(class_dim=-1)
        total, count = likelihood.nll(output, torch.ones(shape[:-1], dtype=torch.long), noise.make_key(seed))
        grads = torch.autograd.grad(total, [output.loc, output.independent])
        runs.append(torch.cat([(total / count).detach().view(1), *(g.reshape(-1, 3).mean(0) for g in grads)]))
    means = torch.stack(runs)
    assert ((means.mean(0) - truth).abs() < 5 * means.std(0) / math.sqrt(len(runs)) + 1e-12).all()
    assert (means.std(0) > 0).all()
    torch.testing.assert_close(means.mean(0), truth, rtol=0.01, atol=1e-3)


def test_keys_decide_the_noise() -> None:
    likelihood, output, y = make("classes")
    first, again, other = (likelihood.nll(output, y, noise.make_key(seed)).total for seed in (1, 1, 2))
    assert first == again != other
    assert likelihood.nll(output, y).total == likelihood.nll(output, y).total


@pytest.mark.parametrize("name", ["classes", "pixels", "yes or no", "real", "own noise"])
def test_common_noise_counts_like_any_other(name: str) -> None:
    build, shape, y = CASES[name]
    value = gaussian(shape, positions=tuple(range(2, len(shape))))
    together = build().nll(value, y).total
    torch.testing.assert_close(together, build().nll(lb.Moments(value.loc, value.variance), y).total)


@every_case
def test_half_precision_means_are_scored_in_single_precision(name: str) -> None:
    likelihood, output, y = make(name)
    likelihood, y = likelihood.float(), y.float() if y.is_floating_point() else y
    output = lb.Moments(output.loc.bfloat16(), output.variance.float())
    total = likelihood.nll(output, y).total
    assert total.dtype == torch.float32
    assert total == likelihood.nll(lb.Moments(output.loc.float(), output.variance), y).total


def test_a_confident_correct_yes_has_a_small_positive_loss() -> None:
    output = lb.Moments(torch.tensor([[40.0, -40.0]]), torch.ones(1, 2))
    total = lb.Bernoulli().nll(output, torch.tensor([[1, 0]])).total
    assert 0 <= total.item() < 1e-12


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    output = leaves(gaussian((2, 3, 4)))
    total, observations = lb.Categorical(class_dim=-1).nll(output, torch.full((2, 3), -100))
    assert total.item() == 0
    assert int(observations) == 6
    assert all((g == 0).all() for g in torch.autograd.grad(total, [output.loc, output.independent]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("name", ["classes", "pixels", "own noise"])
def test_it_compiles_in_one_graph(name: str) -> None:
    likelihood, output, y = make(name)
    key = noise.make_key(2)

    def loss(loc: Tensor, variance: Tensor) -> Tensor:
        return likelihood.nll(lb.Moments(loc, variance), y, key).total

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    results = []
    for function in (loss, compiled):
        value = leaves(output)
        total = function(value.loc, value.independent)
        results.append([total.detach(), *torch.autograd.grad(total, [value.loc, value.independent])])
    torch.testing.assert_close(results[1], results[0])


# -- predictions ------------------------------------------------------------------------------------------------------


def sampled_prediction(likelihood: Any, output: lb.Moments, count: int = 20_000) -> Any:
    accumulator, source = likelihood.accumulator(), generator(4)
    for _ in range(count):
        epsilon = torch.randn(output.shape, generator=source, dtype=output.dtype)
        accumulator.update((output.loc + output.stddev * epsilon).detach())
    return accumulator.finish(count, None)


@every_case
def test_predictions_are_those_of_many_samples(name: str) -> None:
    likelihood, output, _ = make(name)
    with torch.no_grad():
        ours, theirs = likelihood.predict_moments(output), sampled_prediction(likelihood, output)
    assert type(ours) is type(theirs)
    assert ours.samples == 1
    assert ours.outputs is None
    # 128 shared samples of the logits have an error of their own; quadrature and closed forms have none.
    atol = 0.03 if isinstance(ours, lb.ClassPrediction) else 0.012
    for field in vars(theirs):
        if isinstance(getattr(theirs, field), Tensor):
            torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=0.03, atol=atol)


@every_case
def test_predictions_without_variance_are_those_of_one_sample(name: str) -> None:
    likelihood, output, _ = make(name)
    output = lb.Moments(output.loc, torch.zeros_like(output.loc))
    accumulator = likelihood.accumulator()
    accumulator.update(output.loc.clone())
    one = accumulator.finish(1, None)
    ours = likelihood.predict_moments(output)
    for field, value in vars(one).items():
        if field == "margin_std":  # unknown for samples
            assert ours.margin_std.max() == 0
        else:
            torch.testing.assert_close(getattr(ours, field), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3, 6)])
def test_predictions_do_not_depend_on_the_chunk_size(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    output = gaussian(shape)
    results = []
    for elements in (1, 1000, 1 << 22):
        monkeypatch.setattr("leanbayes.likelihoods.expectations._ELEMENTS", elements)
        results.append([lb.Categorical().predict_moments(output).probs, lb.Bernoulli().predict_moments(output).probs])
    torch.testing.assert_close(results[0], results[2], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(results[1], results[2], rtol=1e-12, atol=1e-14)


@few
@given(st.integers(1, 30), st.integers(1, 40))
def test_the_fixed_noise_has_the_moments_of_a_gaussian(classes: int, half: int) -> None:
    epsilon = logit_noise(classes, 2 * half)
    assert epsilon.shape == (2 * half, classes)
    assert torch.equal(epsilon[:half], -epsilon[half:])
    torch.testing.assert_close(epsilon.square().mean(0), torch.ones(classes).double())
    first = epsilon[:, :half]
    torch.testing.assert_close(first.T @ first / (2 * half), torch.eye(first.shape[1]).double())
    assert torch.equal(epsilon, logit_noise(classes, 2 * half))


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_fixed_noise_comes_in_pairs(samples: int) -> None:
    with pytest.raises(lb.LeanBayesError, match="must be even"):
        logit_noise(3, samples)


def test_fixed_noise_gives_the_probabilities() -> None:
    """An exported network computes the same with these constants."""
    output = gaussian((6, 10))
    logits = output.loc + output.stddev * logit_noise(10)[:, None]
    torch.testing.assert_close(lb.Categorical().predict_moments(output).probs, logits.softmax(-1).mean(0))


@pytest.mark.parametrize("shape", [(6, 10), (2, 5, 3, 2)])
def test_probabilities_have_the_covariance_of_the_logits(shape: tuple[int, ...]) -> None:
    """Against 200,000 samples with common noise; independent noise of the same variances is further away."""
    source = generator(5)
    loc, independent = (torch.randn(shape, generator=source).double(), torch.rand(shape, generator=source).double())
    common = torch.randn(64, *shape[:2], *[1] * (len(shape) - 2), generator=source).double() / 8
    common = common + 1.5 * common[:, :, :1]  # so all classes of an example are correlated
    output = lb.Moments(loc, independent, common)
    total = torch.zeros(shape, dtype=torch.float64)
    for _ in range(20):
        noise = torch.einsum("sr,r...->s...", torch.randn(10_000, 64, generator=source).double(), common)
        noise = noise + independent.sqrt() * torch.randn(10_000, *shape, generator=source).double()
        total += (loc + noise).softmax(2).mean(0) / 20
    ours = lb.Categorical().predict_moments(output)
    apart = lb.Categorical().predict_moments(lb.Moments(loc, output.variance))
    error = (ours.probs - total).abs().max()
    assert error < (0.003 if len(shape) == 2 else 0.02)  # maps have fewer samples
    assert (apart.probs - total).abs().max() > 2 * error
    if len(shape) == 2:
        two = loc.topk(2, 1).indices
        drawn = torch.einsum("sr,rnc->snc", torch.randn(20_000, 64, generator=source).double(), common)
        drawn = drawn + independent.sqrt() * torch.randn(20_000, *shape, generator=source).double()
        margin = drawn.gather(-1, two.expand(20_000, *two.shape)).diff(dim=-1)[..., 0].std(0)
        torch.testing.assert_close(ours.margin_std, margin, rtol=0.03, atol=0)


@pytest.mark.parametrize("even", [False, True])
def test_uncorrelated_noise_of_few_columns(even: bool) -> None:
    epsilon = logit_noise(40, 96, even)
    torch.testing.assert_close(epsilon.T @ epsilon / 96, torch.eye(40).double())
    torch.testing.assert_close(epsilon.sum(0), torch.zeros(40).double())
    assert not torch.equal(epsilon, logit_noise(40, 96, not even))


@pytest.mark.parametrize("classes", [2, 10, 21])
def test_fewer_samples_of_maps_are_more_accurate(classes: int) -> None:
    """96 samples in one direction per class against 128 in the 64 directions of the probes, and 100,000 samples."""
    source, shape = generator(3), (4, classes, 4, 4)
    loc, std = (2 * torch.randn(shape, generator=source).double(), torch.rand(shape, generator=source).double())
    common = torch.randn(64, 4, classes, 1, 1, generator=source).double() / 8
    true, former = torch.zeros_like(loc), torch.zeros_like(loc)
    for _ in range(50):
        noise = torch.einsum("sr,r...->s...", torch.randn(2000, 64, generator=source).double(), common)
        noise = noise + std * torch.randn(2000, *shape, generator=source).double()
        true += (loc + noise).softmax(2).mean(0) / 50
    fixed = logit_noise(64 + classes, 128)
    noise = torch.einsum("sr,r...->s...", fixed[:, :64], common) + std * fixed[:, 64:, None, None].unsqueeze(1)
    former = (loc + noise).softmax(2).mean(0)
    ours = lb.Categorical().predict_moments(lb.Moments(loc, std.square(), common)).probs
    assert (ours - true).abs().mean() < 0.75 * (former - true).abs().mean()


def test_common_noise_of_one_direction() -> None:
    """Its covariance is singular: against quadrature, without noise of its own."""
    common = torch.zeros(64, 1, 3, 1, 1).double()
    common[5, 0, :, 0, 0] = torch.tensor([1.0, -0.5, 0.0])
    loc = torch.randn(1, 3, 2, 2, generator=generator(1)).double()
    nodes = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    true = torch.einsum("s,s...->...", weights, (loc + torch.einsum("s,...->s...", nodes, common[5])).softmax(2))
    ours = lb.Categorical().predict_moments(lb.Moments(loc, torch.zeros_like(loc), common)).probs
    torch.testing.assert_close(ours, true, rtol=0, atol=5e-3)


# -- quadrature -------------------------------------------------------------------------------------------------------


@few
@given(st.floats(-5, 5), st.floats(0, 3))
def test_polynomials_have_their_known_means(loc: float, std: float) -> None:
    m, v = torch.tensor([loc]).double(), torch.tensor([std**2]).double()
    means = gaussian_means(lambda z: (torch.ones_like(z), z, z**2, z**4), m, v)
    known = [torch.ones_like(m), m, m**2 + v, m**4 + 6 * m**2 * v + 3 * v**2]
    torch.testing.assert_close(means, known, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("std", "error"), [(0.1, 1e-12), (3.0, 1e-10), (10.0, 1e-3)])
def test_softplus_has_the_documented_error(std: float, error: float) -> None:
    loc = torch.linspace(-15, 15, 31, dtype=torch.float64)
    nodes = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    fine = [weights @ part for part in softplus(loc + std * nodes[:, None])]
    for ours, true in zip(gaussian_means(softplus, loc, torch.full_like(loc, std**2)), fine, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=error)


def test_slightly_negative_variances_are_treated_as_zero() -> None:
    value = expect(softplus, torch.tensor([0.3]), torch.tensor([-1e-9]))
    torch.testing.assert_close(value, F.softplus(torch.tensor([0.3])))


def test_the_noise_of_the_logits_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would take longer than the pass itself."""
    calls: list[tuple[int, ...]] = []

    def counted(columns: int, samples: int, even: bool) -> torch.Tensor:
        calls.append((columns, samples))
        return logit_noise(columns, samples, even)

    monkeypatch.setattr(expectations, "logit_noise", counted)
    output = lb.Moments(torch.zeros(3, 7), torch.ones(3, 7))
    with torch.inference_mode():
        lb.Categorical().predict_moments(output)
    first = lb.Categorical().predict_moments(output)
    assert len(calls) <= 1
    assert not first.probs.is_inference()
    double = lb.Categorical().predict_moments(lb.Moments(output.loc.double(), output.variance.double()))
    assert double.probs.dtype == torch.float64
    torch.testing.assert_close(double.probs, first.probs.double())
