"""The shared posterior: a codebook's moments, draws, gradients as segment sums, and the KL with multiplicities."""

from typing import Any

import pytest
import torch
from torch import Tensor

import leanbayes as lb
from leanbayes import gaussian
from leanbayes.layout import Layout, Slot
from leanbayes.noise import make_key
from leanbayes.posteriors.shared import SharedPosterior, _Spread

COUNT, CODES = 600, 7
KEY = make_key(0)


def posterior(prior: Any = None, zeros: bool = True, blends: bool = True) -> SharedPosterior:
    generator = torch.Generator().manual_seed(0)
    layout = Layout([Slot((name,), (20, 15), (0, 1), torch.float64, 15) for name in ("a", "b")])
    mean = torch.randn(CODES, generator=generator, dtype=torch.float64)
    std = torch.rand(CODES, generator=generator, dtype=torch.float64) + 0.1
    labels = torch.randint(CODES + zeros, (COUNT,), generator=generator)
    bound = (prior or lb.Normal(0.3)).bind(layout, torch.ones(COUNT, dtype=torch.float64))
    if not blends:
        return SharedPosterior(layout, mean, std, labels, bound)
    index = (labels < CODES).nonzero()[::9, 0]
    partners = torch.randint(CODES, (len(index), 5), generator=generator)
    alpha = torch.rand(len(index), 5, generator=generator).softmax(1)
    return SharedPosterior(layout, mean, std, labels, bound, index, partners, alpha)


def plain_moments(q: SharedPosterior) -> tuple[Tensor, Tensor]:
    """Mean and variance of each weight, one by one."""
    mean, variance = torch.zeros(COUNT, dtype=torch.float64), torch.zeros(COUNT, dtype=torch.float64)
    codes, stds = q.mu.detach(), q.codes_std().detach()
    for i, label in enumerate(q.labels.tolist()):
        if label < CODES:
            mean[i], variance[i] = codes[label], stds[label] ** 2
    for i, near, alpha in zip(q.blended, q.partners, q.logits.detach().softmax(1), strict=True):
        mean[i] = alpha @ codes[near]
        variance[i] = alpha @ (stds[near] ** 2 + codes[near] ** 2) - mean[i] ** 2
    return mean, variance


@pytest.mark.parametrize("blends", [False, True])
def test_moments_are_those_of_the_codes(blends: bool) -> None:
    q = posterior(blends=blends)
    mean, variance = plain_moments(q)
    torch.testing.assert_close(q.mean(), mean)
    torch.testing.assert_close(q.variance(), variance)


def test_draws_have_these_moments_and_noise_of_their_own() -> None:
    q = posterior()
    draws = torch.stack([q.sample(make_key(1, number)) for number in range(3000)]).detach()
    mean, variance = plain_moments(q)
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.1)
    torch.testing.assert_close(draws.var(0), variance, rtol=0.2, atol=0)
    assert (draws[:, q.labels == CODES] == 0).all()
    mates = (q.labels == 0).nonzero()[:, 0]
    mates = mates[~torch.isin(mates, q.blended)][:2]
    assert abs(float(torch.corrcoef(draws[:, mates].T)[0, 1])) < 0.1
    torch.testing.assert_close(q.sample(KEY) - q.mean(), q.perturbation(KEY))


def test_the_gradient_of_a_code_is_the_sum_over_its_weights() -> None:
    q = posterior(blends=False)
    grad = torch.randn(COUNT, dtype=torch.float64)
    (found,) = torch.autograd.grad(q.mean(), q.mu, grad)
    expected = torch.stack([grad[q.labels == code].sum() for code in range(CODES)])
    torch.testing.assert_close(found, expected)
    # The way that a GPU goes, with the weights sorted once.
    values = q.mu.detach().clone().requires_grad_()
    order, sizes = q.labels.argsort(stable=True), torch.bincount(q.labels, minlength=CODES + 1)
    padded = torch.cat([values, values.new_zeros(1)])
    (sorted_way,) = torch.autograd.grad(_Spread.apply(padded, q.labels, order, sizes), values, grad)
    torch.testing.assert_close(sorted_way, expected)


@pytest.mark.parametrize("prior", [lb.Normal(0.3), lb.Normal("fan_in", center="pretrained")])
def test_gradients_of_draw_and_kl(prior: Any) -> None:
    q = posterior(prior)
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
    "prior", [lb.Normal(0.3), lb.Normal("fan_in"), lb.Normal(0.2, center="pretrained")], ids=["one", "layers", "centre"]
)
def test_the_kl_counts_every_weight_but_zeros(prior: Any) -> None:
    q = posterior(prior)
    mean, variance = plain_moments(q)
    inside = (q.labels < CODES).nonzero()[:, 0]
    terms = q.prior.normal_terms(inside)
    assert terms is not None
    expected = gaussian.normal_kl(mean[inside], variance[inside].sqrt(), terms)
    torch.testing.assert_close(q.kl(KEY), expected)


def test_a_prior_without_closed_form() -> None:
    q = posterior(lb.ScaleMixture())
    inside = q.labels < CODES
    mean, variance = plain_moments(q)
    weights = q.sample(KEY)[inside]
    log_q = torch.distributions.Normal(mean[inside], variance[inside].sqrt()).log_prob(weights).sum()
    assert q.kl_kind == "monte-carlo"
    torch.testing.assert_close(q.kl(KEY), log_q - q.prior.log_prob(weights))


def test_counts_leave_out_blends_and_follow_the_labels() -> None:
    q = posterior()
    assert int(q.counts().sum()) == COUNT - len(q.blended)
    q.labels.fill_(2)
    assert q.counts().tolist() == [0, 0, COUNT - len(q.blended), 0, 0, 0, 0, 0]


def test_a_damaged_file() -> None:
    q = posterior()
    state = {name: tensor for name, tensor in q.state_dict().items() if not name.startswith("prior")}
    assert q.from_file(state) is state
    wrong = {"labels": q.labels + 1, "partners": q.partners - 1, "blended": q.blended + COUNT, "rho": q.rho[1:]}
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"beyond|fit"):
            q.from_file({**state, name: tensor})
    with pytest.raises(ValueError, match="blends"):
        q.from_file({**state, "blended": q.blended[1:]})
