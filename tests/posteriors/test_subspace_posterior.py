"""The subspace posterior: mean-field at the active positions, zero elsewhere, and no larger than that."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from posterior_cases import KEY, LAYOUT, PRIORS
from torch import Tensor, distributions, nn

import leanbayes as lb
from leanbayes.core.layout import Layout, Slot
from leanbayes.deploy.loading import describe
from leanbayes.networks import build
from leanbayes.posteriors import MeanFieldPosterior, SparsePointPosterior, SubspacePosterior
from leanbayes.priors import Prior

INDEX = torch.tensor([0, 3, 4, 11, 12, 20, 33, 35, 38, 41])


def make(prior: Prior | None = None, index: Tensor = INDEX) -> SubspacePosterior:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(len(index), generator=generator, dtype=torch.float64)
    std = 0.1 + torch.rand(len(index), generator=generator, dtype=torch.float64)
    center = torch.randn(LAYOUT.numel, generator=generator, dtype=torch.float64)
    return SubspacePosterior(LAYOUT, index, mean, std, (prior or lb.Normal(0.3)).bind(LAYOUT, center))


def test_counts_are_per_layer() -> None:
    posterior = make()
    assert posterior.counts == [4, 4, 1, 1]
    assert posterior.index.dtype == torch.int32
    assert posterior.size() == 3 * len(INDEX)
    assert LAYOUT.slots_of(INDEX).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 3]
    assert LAYOUT.slots_of(INDEX.int()).tolist() == LAYOUT.slots_of(INDEX).tolist()


def test_moments_and_samples_are_zero_elsewhere() -> None:
    posterior = make()
    elsewhere = torch.ones(LAYOUT.numel, dtype=torch.bool).index_fill_(0, INDEX, False)
    tensors = [posterior.mean(), posterior.variance(), posterior.sample(KEY), posterior.perturbation(KEY)]
    for tensor in [*tensors, posterior.variance_and_kl(KEY)[0], posterior.perturbation_and_kl(KEY)[0]]:
        assert tensor.shape == (LAYOUT.numel,)
        assert not tensor[elsewhere].any()
        assert tensor[INDEX].all()
    assert torch.equal(posterior.mean()[INDEX], posterior.mu)
    torch.testing.assert_close(posterior.variance()[INDEX], F.softplus(posterior.rho).square())
    torch.testing.assert_close(posterior.sample(KEY) - posterior.mean(), posterior.perturbation(KEY))


@pytest.mark.parametrize("prior", PRIORS)
def test_all_active_weights_are_mean_field(prior: str) -> None:
    sparse = make(PRIORS[prior], torch.arange(LAYOUT.numel))
    dense = MeanFieldPosterior(LAYOUT, sparse.mu.detach().clone(), sparse.std().detach(), sparse.prior)
    assert sparse.kl_kind == dense.kl_kind
    for name in ("kl", "sample", "perturbation", "sample_and_kl", "variance_and_kl", "perturbation_and_kl"):
        ours, theirs = getattr(sparse, name)(KEY), getattr(dense, name)(KEY)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("prior", ["one scale", "scale per layer", "around the weights"])
def test_the_kl_is_that_of_the_active_weights(prior: str) -> None:
    posterior = make(PRIORS[prior])
    terms: Any = posterior.prior.normal_terms()
    full = (torch.as_tensor(0.0 if term is None else term, dtype=torch.float64) for term in terms)
    loc, scale = (term.expand(LAYOUT.numel)[INDEX] for term in full)

    def by_hand() -> Tensor:
        q = distributions.Normal(posterior.mu, posterior.std())
        return distributions.kl_divergence(q, distributions.Normal(loc, scale)).sum()

    found = [posterior.kl(KEY), posterior.sample_and_kl(KEY)[1], posterior.variance_and_kl(KEY)[1]]
    for kl in [*found, posterior.perturbation_and_kl(KEY)[1]]:
        torch.testing.assert_close(kl, by_hand(), rtol=1e-12, atol=0)
        ours = torch.autograd.grad(kl, posterior.entries())
        torch.testing.assert_close(ours, torch.autograd.grad(by_hand(), posterior.entries()), rtol=1e-10, atol=1e-12)
    weights = torch.randn(len(INDEX), dtype=torch.float64)
    log_prob = distributions.Normal(loc, scale).log_prob(weights).sum()
    torch.testing.assert_close(posterior.prior.log_prob(weights, posterior.index), log_prob, rtol=1e-12, atol=0)


def test_the_kl_of_a_mixture_is_evaluated_at_the_sample() -> None:
    posterior = make(PRIORS["mixture"])
    assert posterior.kl_kind == "monte-carlo"
    weights, kl = posterior.sample_and_kl(KEY)
    log_q = distributions.Normal(posterior.mu, posterior.std()).log_prob(weights[INDEX]).sum()
    expected = log_q - posterior.prior.log_prob(weights[INDEX])
    for found in (kl, posterior.kl(KEY), posterior.variance_and_kl(KEY)[1], posterior.perturbation_and_kl(KEY)[1]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_gradients_of_a_sample_reach_the_active_weights() -> None:
    posterior = make()
    slope = torch.linspace(-1, 1, LAYOUT.numel, dtype=torch.float64)
    weights = posterior.sample(KEY)
    epsilon = ((weights[INDEX] - posterior.mu) / posterior.std()).detach()
    of_mu, of_rho = torch.autograd.grad(weights @ slope, posterior.entries())
    torch.testing.assert_close(of_mu, slope[INDEX])
    by_hand = torch.autograd.grad((posterior.std() * epsilon) @ slope[INDEX], [posterior.rho])[0]
    torch.testing.assert_close(of_rho, by_hand, rtol=1e-10, atol=1e-12)


def test_sparse_deterministic_weights_have_no_variance() -> None:
    posterior = SparsePointPosterior(LAYOUT, INDEX, torch.ones(len(INDEX)))
    assert torch.equal(posterior.sample(KEY), posterior.mean())
    assert not posterior.variance().any()
    assert posterior.kl(KEY) == 0
    assert posterior.mean().sum() == len(INDEX)
    assert list(posterior.scale_parameters()) == []
    assert posterior.kl_kind == "exact"


def test_large_networks_have_64_bit_positions() -> None:
    class Long(Layout):
        def __init__(self) -> None:
            super().__init__([Slot(("w",), (2**16, 2**16), (0, 1), torch.float32, 1)])

    posterior = SparsePointPosterior(Long(), torch.tensor([5, 2**31 + 7]), torch.ones(2))
    assert posterior.index.dtype == torch.int64
    assert posterior.index.tolist() == [5, 2**31 + 7]
    assert posterior.from_file(posterior.to_file(posterior.state_dict()))["index"].tolist() == [5, 2**31 + 7]


@given(st.data())
def test_any_positions_are_saved_and_loaded(data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, LAYOUT.numel - 1), min_size=1))
    index = torch.tensor(sorted(chosen))
    posterior = make(index=index)
    written = posterior.to_file(posterior.state_dict())
    assert written["index"].dtype == torch.uint8
    assert torch.equal(posterior.from_file(written)["index"], posterior.index)


# -- storage ----------------------------------------------------------------------------------------------------------


def persistent_bytes(method: lb.Method) -> int:
    """Return the bytes that persist between steps: parameters, buffers, gradients and optimizer state."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    bnn = lb.bayesianize(network, method)
    weights = set(map(id, [*bnn.posterior.parameters()]))
    groups = [[p for p in bnn.mean_parameters() if id(p) in weights], bnn.scale_parameters()]
    optimizers = [torch.optim.SGD(groups[0], lr=0.01, momentum=0.9), torch.optim.Adam(groups[1], lr=1e-2)]
    for _ in range(2):
        lb.elbo_loss(bnn, torch.randn(4, 16), torch.randint(10, (4,)), num_data=100).backward()
        for optimizer in optimizers:
            optimizer.step()
    held = [*bnn.posterior.parameters(), *bnn.posterior.buffers()]
    held += [p.grad for p in bnn.posterior.parameters() if p.grad is not None]
    state = [value for optimizer in optimizers for known in optimizer.state.values() for value in known.values()]
    if isinstance(method, lb.SSVI):
        assert all(tensor.numel() <= len(bnn.posterior.get_buffer("index")) for tensor in held)
    return sum(t.numel() * t.element_size() for t in [*held, *state] if isinstance(t, Tensor))


@pytest.mark.parametrize("densities", ["erk", "uniform"])
def test_persistent_memory_is_proportional_to_the_active_weights(densities: Any) -> None:
    dense = persistent_bytes(lb.MeanField())
    sparse = persistent_bytes(lb.SSVI(0.05, densities=densities))
    assert 0.05 * dense < sparse <= 0.06 * dense  # 0.05·8/7: seven numbers per active weight, and its position


def test_resnet_18_at_five_percent_takes_five_megabytes(tmp_path: Any) -> None:
    network = build("resnet18", (3, 32, 32), 10)
    bnn = lb.bayesianize(network, lb.SSVI(0.05))
    path = tmp_path / "model.safetensors"
    lb.save(bnn, path)
    assert path.stat().st_size <= 5.5e6
    loaded = lb.load(path, network)
    state, found = bnn.state_dict(), loaded.state_dict()
    assert state.keys() == found.keys()
    assert all(torch.equal(state[name], found[name]) and state[name].dtype == found[name].dtype for name in state)
    parts = describe(path)["parts"]
    assert parts["posterior.index"]["bytes"] < 1.2 * len(bnn.posterior.get_buffer("index"))
