"""The shared posterior: moments, samples, gradients as segment sums, and the KL with multiplicities."""

from typing import Any

import pytest
import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.core import gaussian
from leanbayes.core.layout import Layout, Slot
from leanbayes.core.noise import make_key
from leanbayes.posteriors.shared.codes import Codes
from leanbayes.posteriors.shared.shared import SharedPosterior, _Expand

COUNT, CODES = 600, 7
KEY = make_key(0)


def covariances(count: int) -> Tensor:
    """Return covariances of (μ, σ) over the members of each code."""
    root = 0.4 * torch.randn(count, 2, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return root @ root.mT


def posterior(
    prior: Any = None, zeros: bool = True, blends: bool = True, fixed: int = 0, sampling: Any = "independent"
) -> SharedPosterior:
    """Return a posterior whose last codes are deterministic; blended weights mix the others."""
    generator = torch.Generator().manual_seed(0)
    layout = Layout([Slot((name,), (20, 15), (0, 1), torch.float64, 15) for name in ("a", "b")])
    mean = torch.randn(CODES, generator=generator, dtype=torch.float64)
    std = torch.rand(CODES, generator=generator, dtype=torch.float64)[: CODES - fixed] + 0.1
    labels = torch.randint(CODES + zeros, (COUNT,), generator=generator)
    bound = (prior or lb.Normal(0.3)).bind(layout, torch.ones(COUNT, dtype=torch.float64))
    if not blends:
        codes = Codes.without_blends(mean, std, labels, covariances(len(std)))
        return SharedPosterior(layout, codes, bound, sampling)
    index = (labels < CODES - fixed).nonzero()[::9, 0]
    partners = torch.randint(CODES - fixed, (len(index), 5), generator=generator)
    alpha = torch.rand(len(index), 5, generator=generator).softmax(1)
    codes = Codes(mean, std, covariances(len(std)), labels, index, partners, alpha)
    return SharedPosterior(layout, codes, bound, sampling)


def plain_moments(q: SharedPosterior) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each weight, computed one by one."""
    mean, variance = torch.zeros(COUNT, dtype=torch.float64), torch.zeros(COUNT, dtype=torch.float64)
    codes, stds = q.mu.detach(), q.codes_std().detach()
    if q.sampling == "hierarchical":
        traces = covariances(len(q.rho)).diagonal(dim1=1, dim2=2).sum(1)
        stds[: len(q.rho)] = (stds[: len(q.rho)].square() + traces).sqrt()
    for i, label in enumerate(q.labels.tolist()):
        if label < CODES:
            mean[i], variance[i] = codes[label], stds[label] ** 2
    for i, near, alpha in zip(q.blended, q.partners, q.logits.detach().softmax(1), strict=True):
        mean[i] = alpha @ codes[near]
        variance[i] = alpha @ (stds[near] ** 2 + codes[near] ** 2) - mean[i] ** 2
    return mean, variance


@pytest.mark.parametrize("sampling", ["independent", "hierarchical", "tied"])
@pytest.mark.parametrize("blends", [False, True])
def test_moments_equal_those_of_the_codes(blends: bool, sampling: Any) -> None:
    q = posterior(blends=blends, sampling=sampling)
    mean, variance = plain_moments(q)
    torch.testing.assert_close(q.mean(), mean)
    torch.testing.assert_close(q.variance(), variance)


def test_samples_have_these_moments_and_independent_noise() -> None:
    q = posterior()
    samples = torch.stack([q.sample(make_key(1, number)) for number in range(3000)]).detach()
    mean, variance = plain_moments(q)
    torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=0.1)
    torch.testing.assert_close(samples.var(0), variance, rtol=0.2, atol=0)
    assert (samples[:, q.labels == CODES] == 0).all()
    members = (q.labels == 0).nonzero()[:, 0]
    members = members[~torch.isin(members, q.blended)][:2]
    assert abs(float(torch.corrcoef(samples[:, members].T)[0, 1])) < 0.1
    torch.testing.assert_close(q.sample(KEY) - q.mean(), q.perturbation(KEY))


def samples_of(q: SharedPosterior, number: int = 20_000) -> Tensor:
    with torch.no_grad():
        return torch.stack([q.sample(make_key(1, index)) for index in range(number)])


def test_a_hierarchical_sample_has_its_own_mean_and_std() -> None:
    q = posterior(sampling="hierarchical")
    code, stds = 0, q.codes_std().detach()
    index = (q.labels == code).nonzero()[:, 0]
    index = index[~torch.isin(index, q.blended)]
    found = samples_of(q, 4000)[:, index].flatten() - q.mu[code].detach()
    # The reference samples (μ, σ) first, and then the weight.
    root = torch.linalg.cholesky(covariances(CODES)[code])
    center = torch.tensor([0.0, float(stds[code])], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    pairs = center + torch.randn(len(found), 2, generator=generator, dtype=torch.float64) @ root.T
    by_hand = pairs[:, 0] + pairs[:, 1] * torch.randn(len(found), generator=generator, dtype=torch.float64)
    for power in (1, 2, 3, 4):  # the third and fourth moments differ from those of a Gaussian
        errors = [values.pow(power).std() / len(found) ** 0.5 for values in (found, by_hand)]
        assert abs(found.pow(power).mean() - by_hand.pow(power).mean()) < 5 * sum(errors)
    torch.testing.assert_close(found.var(), q.variance()[index[0]].detach(), rtol=0.03, atol=0)
    gaussian_fourth = 3 * found.var().square()
    assert found.pow(4).mean() > 1.1 * gaussian_fourth


def test_samples_of_all_schemes_have_the_variance_of_the_weights() -> None:
    for sampling in ("hierarchical", "tied"):
        q = posterior(sampling=sampling, fixed=2)
        samples = samples_of(q, 3000)
        mean, variance = plain_moments(q)
        torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=0.12)
        torch.testing.assert_close(samples.var(0), variance, rtol=0.25, atol=1e-12)
        torch.testing.assert_close(q.sample(KEY) - q.mean(), q.perturbation(KEY))


def test_tied_weights_share_one_noise_per_code_and_count_once() -> None:
    q = posterior(sampling="tied")
    weights = q.sample(KEY).detach()
    plain = torch.ones(COUNT, dtype=torch.bool).index_fill_(0, q.blended, False)
    for code in range(CODES):
        assert len(weights[plain & (q.labels == code)].unique()) == 1
    assert len(weights[q.blended].unique()) == len(q.blended)
    own = torch.distributions.Normal(q.mu.detach(), q.codes_std().detach())
    kl = torch.distributions.kl_divergence(own, torch.distributions.Normal(0.0, 0.3)).sum()
    mean, variance = plain_moments(q)
    mixes = torch.distributions.Normal(mean[q.blended], variance[q.blended].sqrt())
    kl = kl + torch.distributions.kl_divergence(mixes, torch.distributions.Normal(0.0, 0.3)).sum()
    torch.testing.assert_close(q.kl(KEY), kl)
    with pytest.raises(lb.LeanBayesError, match="one prior for all weights"):
        posterior(lb.Normal("fan_in"), sampling="tied").kl(KEY)


@pytest.mark.parametrize("prior", [lb.Normal(0.3), lb.Normal("fan_in", center="pretrained")])
def test_deterministic_codes_have_no_noise_and_no_kl(prior: Any) -> None:
    q = posterior(prior, fixed=3)
    fixed = (q.labels >= CODES - 3) & (q.labels < CODES)
    assert fixed.any()
    assert torch.equal(q.sample(KEY)[fixed], q.mu[q.labels[fixed]])
    assert (q.variance()[fixed] == 0).all()
    assert q.random_weights == int((q.labels < CODES - 3).sum())
    mean, variance = plain_moments(q)
    random = (variance > 0).nonzero()[:, 0]
    terms = q.prior.normal_terms(random)
    assert terms is not None
    expected = gaussian.normal_kl(mean[random], variance[random].sqrt(), terms)
    torch.testing.assert_close(q.kl(KEY), expected)
    (gradient,) = torch.autograd.grad(q.kl(KEY), q.mu)
    assert (gradient[-3:] == 0).all()


def test_a_deterministic_layer_is_not_random() -> None:
    q = posterior(blends=False, fixed=CODES)
    assert q.random_slots() == [False, False]
    assert list(q.scale_parameters()) == []
    assert q.kl(KEY) == 0
    labels = torch.cat([torch.zeros(300), torch.ones(300)]).long()
    one = SharedPosterior(q.layout, Codes.without_blends(torch.ones(2), torch.ones(1), labels), q.prior)
    assert one.random_slots() == [True, False]


def test_the_gradient_of_a_code_is_the_sum_over_its_weights() -> None:
    q = posterior(blends=False)
    grad = torch.randn(COUNT, dtype=torch.float64)
    (found,) = torch.autograd.grad(q.mean(), q.mu, grad)
    expected = torch.stack([grad[q.labels == code].sum() for code in range(CODES)])
    torch.testing.assert_close(found, expected)
    # A GPU uses weights that are sorted once.
    values = q.mu.detach().clone().requires_grad_()
    order, sizes = q.labels.argsort(stable=True), torch.bincount(q.labels, minlength=CODES + 1)
    padded = torch.cat([values, values.new_zeros(1)])
    (from_sorted,) = torch.autograd.grad(_Expand.apply(padded, q.labels, order, sizes), values, grad)
    torch.testing.assert_close(from_sorted, expected)


@pytest.mark.parametrize(
    ("prior", "sampling"),
    [
        (lb.Normal(0.3), "independent"),
        (lb.Normal("fan_in", center="pretrained"), "independent"),
        (lb.Normal(0.3), "hierarchical"),
        (lb.Normal(0.3), "tied"),
    ],
)
def test_gradients_of_sample_and_kl(prior: Any, sampling: Any) -> None:
    q = posterior(prior, fixed=2, sampling=sampling)
    parameters = [q.mu, q.rho, q.logits]

    def loss(mu: Tensor, rho: Tensor, logits: Tensor) -> Tensor:
        named = {"mu": mu, "rho": rho, "logits": logits}
        sample, kl = torch.func.functional_call(_Both(q), {f"q.{k}": v for k, v in named.items()}, (KEY,))
        return (sample * torch.linspace(-1, 1, COUNT, dtype=torch.float64)).sum() + kl

    assert torch.autograd.gradcheck(loss, [p.detach().requires_grad_() for p in parameters])


class _Both(torch.nn.Module):
    def __init__(self, q: SharedPosterior) -> None:
        super().__init__()
        self.q = q

    def forward(self, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.q.sample_and_kl(key)


@pytest.mark.parametrize(
    "prior", [lb.Normal(0.3), lb.Normal("fan_in"), lb.Normal(0.2, center="pretrained")], ids=["one", "layers", "center"]
)
def test_the_kl_counts_all_weights_except_zeros(prior: Any) -> None:
    q = posterior(prior)
    mean, variance = plain_moments(q)
    inside = (q.labels < CODES).nonzero()[:, 0]
    terms = q.prior.normal_terms(inside)
    assert terms is not None
    expected = gaussian.normal_kl(mean[inside], variance[inside].sqrt(), terms)
    torch.testing.assert_close(q.kl(KEY), expected)


def test_the_kl_without_a_closed_form_is_sampled() -> None:
    q = posterior(lb.ScaleMixture())
    inside = q.labels < CODES
    mean, variance = plain_moments(q)
    weights = q.sample(KEY)[inside]
    log_q = torch.distributions.Normal(mean[inside], variance[inside].sqrt()).log_prob(weights).sum()
    assert q.kl_kind == "monte-carlo"
    torch.testing.assert_close(q.kl(KEY), log_q - q.prior.log_prob(weights))


def test_counts_exclude_blends() -> None:
    q = posterior()
    plain = torch.ones(COUNT, dtype=torch.bool).index_fill_(0, q.blended, False)
    assert q.counts().tolist() == [int((plain & (q.labels == code)).sum()) for code in range(CODES + 1)]


def test_a_damaged_file_raises_an_error() -> None:
    q = posterior()
    state = {name: tensor for name, tensor in q.state_dict().items() if not name.startswith("prior")}
    assert all(torch.equal(tensor, state[name]) for name, tensor in q.from_file(q.to_file(state)).items())
    wrong = {"labels": q.labels + 1, "partners": q.partners - 1, "blended": q.blended + COUNT, "rho": q.rho[1:]}
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"outside|shape"):
            q.from_file({**state, name: tensor})
    with pytest.raises(ValueError, match="blended has the shape"):
        q.from_file({**state, "blended": q.blended[1:]})
