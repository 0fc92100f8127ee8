"""AEB: latent variables against torch.distributions, the noise of the chain, its support, and its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from prunable_cases import data_of, network_of
from torch import Tensor, nn
from torch.distributions import Laplace, Normal

import leanbayes as lb
from leanbayes.evaluation.pruning import prune
from leanbayes.methods.baselines.snapshots import SparseChain
from leanbayes.posteriors import SpikeSlabPosterior


def posterior_of(bnn: lb.BayesianModel) -> SpikeSlabPosterior:
    assert isinstance(bnn.posterior, SpikeSlabPosterior)
    return bnn.posterior


def model(method: lb.AEB | None = None) -> lb.BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    return lb.bayesianize(network, method or lb.AEB(spike=0.2, slab=1.5))


def per_weight(bnn: lb.BayesianModel) -> tuple[Tensor, Tensor]:
    """σ and δ of each weight."""
    sizes = torch.tensor(bnn.layout.sizes)
    posterior = posterior_of(bnn)
    return posterior.sigma.repeat_interleave(sizes), posterior.delta.repeat_interleave(sizes)


def expected_log_prior(weights: Tensor, sigma: Tensor, probability: Tensor) -> Tensor:
    """E[log p(w | z)] for the given P(z = 1)."""
    slab, spike = Normal(0.0, sigma * 1.5**0.5).log_prob(weights), Laplace(0.0, sigma * 0.2).log_prob(weights)
    return (probability * slab + (1 - probability) * spike).sum()


def test_the_latent_variables_are_those_of_bayes_rule() -> None:
    bnn = model()
    with torch.no_grad():
        posterior_of(bnn).mu[::3] *= 0.01  # some are near 0
    posterior, weights = posterior_of(bnn), bnn.posterior.mean().detach()
    sigma, delta = per_weight(bnn)
    slab = Normal(0.0, sigma * 1.5**0.5).log_prob(weights).exp() * delta
    spike = Laplace(0.0, sigma * 0.2).log_prob(weights).exp() * (1 - delta)
    before = posterior.slab_probability.clone()
    posterior.adapt(0.25)
    expected = 0.75 * before + 0.25 * slab / (slab + spike)
    torch.testing.assert_close(posterior.slab_probability, expected)
    for _ in range(500):
        posterior.adapt(1.0)
    probability = posterior.slab_probability
    torch.testing.assert_close(posterior.delta, torch.stack([p.mean() for p in probability.split(bnn.layout.sizes)]))
    assert 0.1 < posterior.delta.min() <= posterior.delta.max() < 0.9
    # σ is a stationary point of the expected log posterior, with its prior InverseGamma(½, 0.0001/2) for σ².
    found = posterior.sigma.clone().requires_grad_()
    expanded = found.repeat_interleave(torch.tensor(bnn.layout.sizes))
    log_prior = torch.distributions.InverseGamma(torch.tensor(0.5), torch.tensor(0.5e-4)).log_prob(found.square()).sum()
    (slope,) = torch.autograd.grad(expected_log_prior(weights, expanded, probability) + log_prior, found)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-4)


def test_the_loss_has_the_expected_log_prior() -> None:
    """The difference of two weight vectors, because a constant is left out."""
    bnn = model()
    posterior_of(bnn).adapt(1.0)
    sigma, _ = per_weight(bnn)
    values = []
    for _ in range(2):
        log_prior = expected_log_prior(bnn.posterior.mean(), sigma, posterior_of(bnn).slab_probability)
        values.append((bnn.kl() + log_prior).detach())
        with torch.no_grad():
            posterior_of(bnn).mu.mul_(-3.0).add_(0.1)
    torch.testing.assert_close(*values)


def test_the_chain_has_the_variance_of_the_posterior() -> None:
    """With a slab only, a Gaussian likelihood and no pruning the posterior is N(m, 1/h), with h from autograd."""
    method = lb.AEB(1.0, interval=10**6, until=0.01, snapshots=1)
    bnn = lb.bayesianize(nn.Linear(1, 3000, bias=False).double(), method, likelihood=lb.Gaussian(std=1.0))
    posterior = posterior_of(bnn)
    posterior.kappa[0], posterior.kappa[1], posterior.sigma[:] = 0.0, 1.0, 0.5
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 3000), 2.0, dtype=torch.float64)

    def loss() -> Tensor:
        return lb.elbo_loss(bnn, x, y, num_data=50, temperature=1.0)

    (slope,) = torch.autograd.grad(loss(), posterior.mu, create_graph=True)
    curvature = torch.autograd.grad(slope.sum(), posterior.mu)[0][0].item()
    with torch.no_grad():
        posterior.mu.sub_(slope / curvature)  # the mode, at which the chain starts
    training = lb.Training(bnn, steps=400, num_data=50)
    training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=0.02 / curvature, momentum=0.9)]
    for training.step in range(400):
        training.optimizers[0].zero_grad()
        loss().backward()
        training.optimizers[0].step()
        method.after_step(training)
    assert posterior.mu.var().item() == pytest.approx(1 / (50 * curvature), rel=0.1)


FIT: dict[str, Any] = {
    "batch_size": 50, "lr": 5e-2, "temperature": 1.0, "optimizer": "sgd", "progress": False, "seed": 0
}  # fmt: skip


def test_fit_reaches_the_density_and_stores_the_active_weights(tmp_path: Path) -> None:
    data, sizes = data_of(), []
    x, y = data.tensors
    for density in (0.6, 0.1):
        method = lb.AEB(density, snapshots=5)
        bnn = lb.fit(
            network_of(64), method, data, epochs=40 if density == 0.1 else 2, out=tmp_path / str(density), **FIT
        )
        assert int((bnn.posterior.mean() != 0).sum()) == round(density * bnn.layout.numel)
        sizes.append((tmp_path / str(density) / "model.safetensors").stat().st_size)
    assert sizes[0] > 3 * sizes[1]
    active = bnn.posterior.random_weights
    assert sizes[1] < 4 * (5 + 1) * active + 2 * active + 8000  # snapshots and their mean, positions, and the rest
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    assert bnn.predict(x).mutual_information.mean() > 1e-4
    samples = {tuple(bnn.posterior.sample(bnn.next_draw().key).tolist()) for _ in range(60)}
    assert len(samples) == 5
    stacked = torch.tensor(sorted(samples))
    assert torch.equal((stacked != 0).any(0), bnn.posterior.mean() != 0)
    torch.testing.assert_close(stacked.mean(0), bnn.posterior.mean(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(stacked.var(0, unbiased=False), bnn.posterior.variance(), atol=1e-7, rtol=1e-3)
    loaded = lb.load(tmp_path / "0.1" / "model.safetensors", network_of(64))
    probs = [one.predict(x, 3, generator=torch.Generator().manual_seed(0)).probs for one in (bnn, loaded)]
    assert torch.equal(*probs)
    state = posterior_of(bnn).to_file({name: t.detach() for name, t in bnn.posterior.state_dict().items()})
    fresh = lb.bayesianize(network_of(64), method).posterior
    for change in ({"mu": state["mu"][1:]}, {"members": state["members"][:0]}, {"index": state["index"][1:]}):
        with pytest.raises(ValueError, match=r"shape|positions"):
            fresh.from_file({**state, **change})


def test_a_resumed_chain_is_the_uninterrupted_one(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int, values: dict[str, float]) -> None:
        if step == 10:  # of 12; weights have been collected
            raise Stop

    settings: dict[str, Any] = {**FIT, "epochs": 4, "log_every": 1, "checkpoint_steps": 1}
    whole = lb.fit(network_of(64), lb.AEB(0.3, snapshots=3), data_of(200), **settings)
    with pytest.raises(Stop):
        lb.fit(network_of(64), lb.AEB(0.3, snapshots=3), data_of(200), out=tmp_path / "run", on_log=stop, **settings)
    resumed = lb.fit(network_of(64), lb.AEB(0.3, snapshots=3), data_of(200), out=tmp_path / "run", **settings)
    assert torch.equal(whole.posterior.members, resumed.posterior.members)  # type: ignore[arg-type]


def with_batchnorm() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 4)).double()


def chain_of_batchnorm() -> tuple[lb.BayesianModel, list[nn.Module]]:
    """A model after a chain with large steps, and the plain network at the time of each snapshot."""
    bnn = lb.bayesianize(with_batchnorm(), lb.AEB(0.5, snapshots=3, until=0.5, interval=1))
    chain, training = bnn.network, lb.Training(bnn, steps=40, num_data=64)
    assert isinstance(chain, SparseChain)
    training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=1.0, momentum=0.9, weight_decay=0.02)]
    random, found = torch.Generator().manual_seed(1), []
    for training.step in range(40):
        x = torch.randn(16, 20, generator=random, dtype=torch.float64)
        training.optimizers[0].zero_grad()
        lb.elbo_loss(bnn, x, x[:, :4].argmax(1), num_data=64, temperature=0.1).backward()
        training.optimizers[0].step()
        before = chain.collected.item()
        bnn.method.after_step(training)
        if chain.collected.item() > before:
            plain = with_batchnorm()
            plain.load_state_dict(chain.networks[-1].state_dict(), strict=False)  # all but the weights
            with torch.no_grad():
                for slot, part in zip(bnn.layout, bnn.layout.split(bnn.posterior.mean()), strict=True):
                    plain.get_parameter(slot.name).copy_(part)
            found.append(plain.eval())
    bnn.method.finish(training)
    return bnn.eval(), found


def test_members_are_the_networks_of_the_chain() -> None:
    """Each has its own biases, norms and statistics of BatchNorm, not those of another snapshot."""
    bnn, networks = chain_of_batchnorm()
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        expected = [network(x).softmax(1) for network in networks]
    assert (expected[0] - expected[2]).abs().max() > 0.1
    torch.testing.assert_close(bnn.predict(x).probs, torch.stack(expected).mean(0))
    with torch.no_grad():
        for number, one in enumerate(expected):
            torch.testing.assert_close(bnn.member(number).eval()(x).softmax(1), one)
    with torch.no_grad():  # a pruned model has the same members
        same = prune(bnn, 0.0).predict(x).probs
        kept = prune(bnn, 0.7)
        pruned = [torch.where(kept.posterior.get_buffer("dropped"), 0.0, bnn.posterior.sample(torch.tensor([n, 0])))
                  for n in range(3)]  # fmt: skip
        expected = []
        for network, weights in zip(networks, pruned, strict=True):
            for slot, part in zip(bnn.layout, bnn.layout.split(weights), strict=True):
                network.get_parameter(slot.name).copy_(part)
            expected.append(network(x).softmax(1))
    torch.testing.assert_close(same, bnn.predict(x).probs)
    torch.testing.assert_close(kept.predict(x).probs, torch.stack(expected).mean(0))
    with pytest.raises(lb.LeanBayesError, match=r"use bnn\.member\(i\)"):
        bnn.to_deterministic()
    with pytest.raises(lb.LeanBayesError, match="from 0 to 2"):
        bnn.member(3)


def test_the_statistics_of_each_member_are_refreshed() -> None:
    """They are those that torch.optim.swa_utils computes for the plain network."""
    bnn, networks = chain_of_batchnorm()
    random = torch.Generator().manual_seed(3)
    batches = [0.5 + torch.randn(16, 20, generator=random, dtype=torch.float64) for _ in range(4)]
    bnn.refresh_batchnorm(batches)
    for number, network in enumerate(networks):
        torch.optim.swa_utils.update_bn(batches, network)
        torch.testing.assert_close(bnn.member(number).state_dict(), network.state_dict())


def test_wrong_settings_and_optimizers_are_refused() -> None:
    bnn = model()
    training = lb.Training(bnn, steps=100, num_data=1, optimizers=[torch.optim.Adam(bnn.parameters())])
    calls: dict[str, Any] = {
        "density=0.0 must be": lambda: lb.AEB(0.0),
        "until=1.0 must be": lambda: lb.AEB(until=1.0),
        "snapshots=0 must be": lambda: lb.AEB(snapshots=0),
        "interval=0 must be": lambda: lb.AEB(interval=0),
        "spike=0.0 must be": lambda: lb.AEB(spike=0.0),
        "slab=-1.0 must be": lambda: lb.AEB(slab=-1.0),
        "temperature=-1.0 must be": lambda: lb.AEB(temperature=-1.0),
        "lr_low=0.0 must be": lambda: lb.AEB(lr_low=0.0),
        "AEB adds its noise to SGD": lambda: bnn.method.after_step(training),
        " steps after the first part of the training are too few for 10": lambda: lb.fit(
            network_of(64), lb.AEB(), data_of(100), epochs=1, **FIT
        ),
        "AEB has not collected all its snapshots": lambda: bnn.method.finish(training),
        "The chain has collected no weights": lambda: posterior_of(bnn).finish(),
        "need at least one each": lambda: model(lb.AEB(0.01)),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value), str(error.value)
        assert str(error.value).endswith(".")
