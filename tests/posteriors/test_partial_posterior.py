"""The partial posterior: mean-field at the chosen positions, deterministic elsewhere, and no larger than that."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from posterior_cases import KEY, LAYOUT, PRIORS
from torch import Tensor, distributions, nn

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.core.layout import Layout, Slot
from leanbayes.posteriors import MeanFieldPosterior, PartialPosterior
from leanbayes.posteriors.partial import KLSum
from leanbayes.priors import Prior

INDEX = torch.tensor([0, 3, 4, 11, 12, 20, 33, 35, 38])
ELSEWHERE = torch.ones(LAYOUT.numel, dtype=torch.bool).index_fill_(0, INDEX, False)


def make(prior: Prior | None = None, index: Tensor | None = INDEX, kl: KLSum = "sum") -> PartialPosterior:
    generator = torch.Generator().manual_seed(0)
    mean, center = (torch.randn(LAYOUT.numel, generator=generator, dtype=torch.float64) for _ in range(2))
    std = 0.1 + torch.rand(LAYOUT.numel, generator=generator, dtype=torch.float64)
    return PartialPosterior(LAYOUT, mean, std, (prior or lb.Normal(0.3)).bind(LAYOUT, center), index, kl)


def dense_twin(prior: Prior) -> MeanFieldPosterior:
    other = make(prior, None)
    assert other._stds is not None
    return MeanFieldPosterior(LAYOUT, other.mu.detach().clone(), other._stds, other.prior)


METHODS = ("kl", "sample", "perturbation", "sample_and_kl", "variance_and_kl", "perturbation_and_kl")


def test_deterministic_weights_are_identical_in_all_samples() -> None:
    posterior = make()
    keys = [noise.make_key(seed) for seed in range(5)]
    samples = [*(posterior.sample(key) for key in keys), *(posterior.sample_and_kl(key)[0] for key in keys)]
    for sample in samples:
        assert torch.equal(sample[ELSEWHERE], posterior.mu[ELSEWHERE])
    assert len({sample[INDEX[0]].item() for sample in samples}) == 5
    tensors = [posterior.variance(), posterior.perturbation(KEY)]
    tensors += [posterior.variance_and_kl(KEY)[0], posterior.perturbation_and_kl(KEY)[0]]
    for tensor in tensors:
        assert not tensor[ELSEWHERE].any()
        assert tensor[INDEX].all()
    torch.testing.assert_close(posterior.variance()[INDEX], F.softplus(posterior.rho).square())
    torch.testing.assert_close(posterior.sample(KEY) - posterior.mean(), posterior.perturbation(KEY))


@pytest.mark.parametrize("prior", PRIORS)
def test_choosing_all_weights_is_mean_field(prior: str) -> None:
    partial, dense = make(PRIORS[prior], torch.arange(LAYOUT.numel)), dense_twin(PRIORS[prior])
    assert partial.kl_kind == dense.kl_kind
    for name in METHODS:
        ours, theirs = getattr(partial, name)(KEY), getattr(dense, name)(KEY)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    slope = torch.linspace(-1, 1, LAYOUT.numel, dtype=torch.float64)
    found = []
    for posterior in (partial, dense):
        weights, kl = posterior.sample_and_kl(KEY)
        found.append(torch.autograd.grad(weights @ slope + 0.3 * kl, [posterior.mu, posterior.rho]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prior", PRIORS)
def test_choosing_no_weights_is_deterministic(prior: str) -> None:
    posterior = make(PRIORS[prior], INDEX[:0])
    assert torch.equal(posterior.sample(KEY), posterior.mu)
    assert not posterior.variance().any()
    for name in METHODS:
        found = getattr(posterior, name)(KEY)
        kl = found[1] if isinstance(found, tuple) else found
        if name.endswith("kl"):
            assert kl == 0
    assert not posterior.rho.requires_grad
    assert posterior.random_slots() == [False] * 4
    assert posterior.size() == LAYOUT.numel + sum(buffer.numel() for buffer in posterior.prior.buffers())


@pytest.mark.parametrize("kl", ["sum", "mean"])
@pytest.mark.parametrize("prior", ["one scale", "scale per layer", "around the weights"])
def test_the_kl_is_that_of_the_bayesian_weights(prior: str, kl: Any) -> None:
    posterior, whole = make(PRIORS[prior], kl=kl), dense_twin(PRIORS[prior])
    terms: Any = whole.prior.normal_terms()
    full = (torch.as_tensor(0.0 if term is None else term, dtype=torch.float64) for term in terms)
    loc, scale = (term.expand(LAYOUT.numel)[INDEX] for term in full)
    counts = torch.tensor([4.0] * 4 + [4.0] * 4 + [1.0]) if kl == "mean" else torch.ones(9)

    def by_hand() -> Tensor:
        q = distributions.Normal(posterior.mu[INDEX], posterior.std())
        return (distributions.kl_divergence(q, distributions.Normal(loc, scale)) / counts).sum()

    found = [posterior.kl(KEY), posterior.sample_and_kl(KEY)[1], posterior.variance_and_kl(KEY)[1]]
    parameters = [posterior.mu, posterior.rho]
    for value in [*found, posterior.perturbation_and_kl(KEY)[1]]:
        torch.testing.assert_close(value, by_hand(), rtol=1e-12, atol=0)
        ours, theirs = (torch.autograd.grad(part, parameters) for part in (value, by_hand()))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert not ours[0][ELSEWHERE].any()


def test_the_kl_of_a_mixture_is_evaluated_at_the_sample() -> None:
    posterior = make(PRIORS["mixture"])
    assert posterior.kl_kind == "monte-carlo"
    weights, kl = posterior.sample_and_kl(KEY)
    log_q = distributions.Normal(posterior.mu[INDEX], posterior.std()).log_prob(weights[INDEX]).sum()
    expected = log_q - posterior.prior.log_prob(weights[INDEX])
    for found in (kl, posterior.kl(KEY), posterior.variance_and_kl(KEY)[1], posterior.perturbation_and_kl(KEY)[1]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_gradients_of_a_sample_reach_all_means_and_stds() -> None:
    posterior = make()
    slope = torch.linspace(-1, 1, LAYOUT.numel, dtype=torch.float64)
    weights = posterior.sample(KEY)
    epsilon = (posterior.perturbation(KEY)[INDEX] / posterior.std()).detach()
    of_mu, of_rho = torch.autograd.grad(weights @ slope, [posterior.mu, posterior.rho])
    torch.testing.assert_close(of_mu, slope)
    by_hand = torch.autograd.grad((posterior.std() * epsilon) @ slope[INDEX], [posterior.rho])[0]
    torch.testing.assert_close(of_rho, by_hand, rtol=1e-10, atol=1e-12)


def test_a_prior_around_the_weights_stores_bayesian_weights_only() -> None:
    posterior = make(PRIORS["around the weights"])
    assert posterior.prior.get_buffer("loc").shape == (len(INDEX),)
    assert posterior.size() == LAYOUT.numel + 3 * len(INDEX) + len(LAYOUT)


def test_slots_with_a_bayesian_weight_are_random() -> None:
    assert make().random_slots() == [True, True, True, False]
    assert make(index=INDEX[:2]).random_slots() == [True, False, False, False]
    assert dense_twin(lb.Normal()).random_slots() == [True] * 4


def test_before_the_choice_only_the_mean_works() -> None:
    posterior = make(index=None)
    assert not posterior.is_chosen
    assert torch.equal(posterior.mean(), posterior.mu)
    for name in METHODS:
        with pytest.raises(lb.LeanBayesError, match="not chosen yet"):
            getattr(posterior, name)(KEY)
    with pytest.raises(lb.LeanBayesError, match="not chosen yet"):
        posterior.to_file(posterior.state_dict())
    posterior.choose(INDEX)
    twin = make()
    assert torch.equal(posterior.sample(KEY), twin.sample(KEY))
    assert posterior.random_slots() == twin.random_slots()


def test_large_networks_have_64_bit_positions() -> None:
    assert make().index.dtype == torch.int32
    layout = Layout([Slot(("w",), (2**16, 2**16), (0, 1), torch.float32, 1)])
    small = torch.zeros(1)
    posterior = PartialPosterior(layout, small, small, lb.Normal().bind(layout, small))
    assert posterior.index.dtype == torch.int64


@given(st.data())
def test_any_positions_are_saved_and_loaded(data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, LAYOUT.numel - 1)))
    posterior = make(index=torch.tensor(sorted(chosen), dtype=torch.int64))
    written = posterior.to_file(posterior.state_dict())
    assert written["index"].dtype == torch.uint8
    assert torch.equal(posterior.from_file(written)["index"], posterior.index)


def test_a_copy_and_a_loaded_state_have_the_same_random_slots() -> None:
    posterior = make(index=INDEX[:2])
    assert copy.deepcopy(posterior).random_slots() == [True, False, False, False]
    other = make(index=INDEX[-2:])
    other.load_state_dict(posterior.state_dict())
    assert other.random_slots() == [True, False, False, False]
    assert torch.equal(other.sample(KEY), posterior.sample(KEY))


# -- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05, 1.0])
def test_parameters_and_optimizer_state_have_the_size_one_plus_rate(rate: float) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    batches = [(torch.randn(32, 16), torch.arange(32) % 10)]
    bnn = lb.bayesianize(network, lb.PBN(rate), data=batches)
    posterior, size = bnn.posterior, 16 * 64 + 64 * 64 + 640
    assert isinstance(posterior, PartialPosterior)
    chosen = int(rate * size)
    assert sum(p.numel() for p in posterior.parameters()) == size + chosen
    assert len(posterior.index) == chosen
    assert posterior.size() == size + 2 * chosen + 1  # and the scale of the prior
    optimizer = torch.optim.Adam([p for p in posterior.parameters() if p.requires_grad], lr=1e-2)
    lb.elbo_loss(bnn, *batches[0], num_data=100).backward()
    optimizer.step()
    state = [t for known in optimizer.state.values() for t in known.values() if t.dim()]
    assert sum(t.numel() for t in state) == 2 * (size + chosen)  # two moments of each
    assert sum(p.grad.numel() for p in posterior.parameters() if p.grad is not None) == size + chosen
