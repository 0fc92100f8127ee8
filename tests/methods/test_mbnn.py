"""mBNN: masks and moves against enumeration, the loss against torch.distributions, its chain, and its files."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import CASES
from prunable_cases import data_of, network_of
from torch import Tensor, nn
from torch.distributions import Cauchy

import leanbayes as lb
from leanbayes.methods.baselines import mbnn
from leanbayes.methods.baselines.mask_moves import Evidence, MaskPrior, log_prob_of_set, moved
from leanbayes.methods.baselines.snapshots import SparseChain
from leanbayes.posteriors import MaskedPosterior

NODES = 5  # of the hidden layer of `model`


def posterior_of(bnn: lb.BayesianModel) -> MaskedPosterior:
    assert isinstance(bnn.posterior, MaskedPosterior)
    return bnn.posterior


def chain_of(bnn: lb.BayesianModel) -> nn.Module:
    """The copy of the network that is in training."""
    assert isinstance(bnn.network, SparseChain)
    return bnn.network.networks[-1]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hidden(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, NODES), nn.Tanh(), nn.Linear(NODES, 2)).double()


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 3, generator=seeded(1), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def log_likelihood(network: nn.Module, factors: Tensor) -> Tensor:
    """The log likelihood of the batch, with the outputs of the hidden nodes multiplied by the factors."""
    first, activation, last = network.children()
    x, y = batch()
    return -nn.functional.cross_entropy(last(activation(first(x)) * factors), y, reduction="sum")


def evidence_of(network: nn.Module) -> Callable[[Tensor], Evidence]:
    """The log likelihood at a mask of the hidden nodes, behind the three inputs, and its slopes by autograd."""

    def evidence(mask: Tensor) -> Evidence:
        factors = mask[3:].double().requires_grad_()
        value = log_likelihood(network, factors)
        (slopes,) = torch.autograd.grad(value, factors)
        return Evidence(value.item(), torch.cat([torch.full((3,), torch.nan, dtype=torch.float64), slopes]))

    return evidence


# -- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_probability_of_a_set_is_that_of_draws_without_replacement(size: int) -> None:
    logits = torch.tensor([0.3, -2.0, -math.inf, 1.1, 0.0, -40.0], dtype=torch.float64)
    expected: defaultdict[frozenset[int], float] = defaultdict(float)
    for order in itertools.permutations(range(len(logits)), size):
        weights, probability = logits.exp(), 1.0
        for node in order:
            probability *= float(weights[node] / weights.sum())
            weights[node] = 0.0
        expected[frozenset(order)] += probability
    for nodes, probability in expected.items():
        found = math.exp(log_prob_of_set(logits, torch.tensor(sorted(nodes))))
        assert found == pytest.approx(probability, rel=1e-9, abs=1e-300)
    assert sum(expected.values()) == pytest.approx(1.0)


def test_the_prior_of_masks_is_that_of_the_paper() -> None:
    """Summed over the C(n, s) masks with s of n nodes, a layer has exp(-λ's²) for s from 1 to n."""
    prior = MaskPrior([slice(1, 4), slice(4, 9)], 0.07)
    totals: defaultdict[tuple[int, int], float] = defaultdict(float)
    for mask in itertools.product([False, True], repeat=8):
        found = math.exp(prior.log_prob(torch.tensor([True, *mask])))
        totals[sum(mask[:3]), sum(mask[3:])] += found
    for (first, second), total in totals.items():
        expected = math.exp(-0.07 * (first**2 + second**2)) if first and second else 0.0
        assert total == pytest.approx(expected)


def test_moves_have_the_posterior_of_masks_as_their_distribution() -> None:
    """Against all 31 masks of the hidden nodes, of which each has its prior times its likelihood."""
    evidence = evidence_of(hidden())
    known = {nodes: evidence(as_mask(nodes)) for nodes in itertools.product([False, True], repeat=NODES) if any(nodes)}
    prior = MaskPrior([slice(3, 3 + NODES)], 0.02)
    logits = torch.tensor([prior.log_prob(as_mask(nodes)) + one.log_likelihood for nodes, one in known.items()])
    expected, steps = logits.softmax(0).tolist(), 12_000
    maskable = as_mask((True,) * NODES).index_fill(0, torch.arange(3), False)
    visits: Counter[tuple[bool, ...]] = Counter()

    def evidence_at(mask: Tensor, with_slopes: bool) -> Evidence:
        one = known[tuple(mask[3:].tolist())]
        return one if with_slopes else Evidence(one.log_likelihood, torch.zeros(0))

    mask, generator = as_mask((True,) * NODES), seeded(0)
    for _ in range(steps):
        mask = moved(mask, maskable, prior, evidence_at, 3, generator)
        assert mask[:3].all()
        visits[tuple(mask[3:].tolist())] += 1
    distance = 0.5 * sum(abs(visits[nodes] / steps - p) for nodes, p in zip(known, expected, strict=True))
    assert distance < 0.05
    assert max(expected) < 0.5  # else most of the masks would hardly count


def as_mask(nodes: tuple[bool, ...]) -> Tensor:
    return torch.tensor([True, True, True, *nodes])


def test_moves_see_the_likelihood_of_all_data_and_its_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch stands for all data, and the mask of a node multiplies its output."""
    network, seen = hidden(), []

    def spy(mask: Tensor, maskable: Tensor, prior: MaskPrior, evidence: Any, most: int, generator: Any) -> Tensor:
        proposal = as_mask((True, False, True, True, False))
        seen.extend([(one.clone(), evidence(one, True)) for one in (mask, proposal)])
        for one, found in seen:
            assert evidence(one, False).log_likelihood == pytest.approx(found.log_likelihood, rel=1e-12)
            assert not len(evidence(one, False).slopes)
        assert maskable.tolist() == [False] * 3 + [True] * NODES
        full = math.exp(prior.log_prob(mask) - prior.log_prob(proposal))
        assert full == pytest.approx(math.comb(5, 3) * math.exp(-((0.05 * math.log(60)) ** 5) * (25 - 9)))
        return proposal

    monkeypatch.setattr(mbnn, "moved", spy)
    bnn = lb.bayesianize(network, lb.MBNN(interval=1, temperature=0.0))
    bnn.method.after_step(lb.Training(bnn, steps=10, num_data=60, batch=batch()))
    for mask, found in seen:
        expected = evidence_of(network)(mask)
        assert found.log_likelihood == pytest.approx(60 / 12 * expected.log_likelihood)
        torch.testing.assert_close(found.slopes[3:], 60 / 12 * expected.slopes[3:])
    assert posterior_of(bnn).mask.tolist() == seen[1][0].tolist()
    x, _ = batch()
    with torch.no_grad():
        factors = seen[1][0][3:].double()
        expected = network[2](network[:2](x) * factors)  # type: ignore[index]
        torch.testing.assert_close(bnn(x), expected)


def test_processes_share_what_a_move_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has a part of the batch, and the means over all parts decide."""
    x, y = batch()
    bnn, seen = lb.bayesianize(hidden(), lb.MBNN(interval=1, temperature=0.0)), []

    def spy(mask: Tensor, maskable: Tensor, prior: MaskPrior, evidence: Any, most: int, generator: Any) -> Tensor:
        seen.append(evidence(mask, True))
        return mask

    monkeypatch.setattr(mbnn, "moved", spy)
    sent: list[Tensor] = []
    for part in (slice(0, 4), slice(4, 12)):
        training = lb.Training(bnn, steps=10, num_data=60, batch=(x[part], y[part]))
        training.average = lambda values: (sent.append(values), values)[1]  # type: ignore[func-returns-value]
        bnn.method.after_step(training)
    training.average = lambda values: (sent[0] + 2 * sent[1]) / 3  # the parts have 4 and 8 examples
    bnn.method.after_step(training)
    training = lb.Training(bnn, steps=10, num_data=60, batch=(x, y))
    bnn.method.after_step(training)
    assert seen[2].log_likelihood == pytest.approx(seen[3].log_likelihood)
    torch.testing.assert_close(seen[2].slopes, seen[3].slopes)


def test_a_mask_removes_the_output_of_a_node() -> None:
    """Weights of an inactive node are zero in the network, also for channels of convolutions; the others stay."""
    network, x = CASES["cnn"].build().double().eval(), CASES["cnn"].example().double()
    bnn = lb.bayesianize(network, lb.MBNN())
    posterior = posterior_of(bnn)
    assert posterior.nodes.counts == [3, 4, 12]  # the second convolution has two groups of four channels
    assert posterior.masked_layers() == [slice(3, 7), slice(7, 19)]
    with torch.no_grad():
        posterior.mask[3 + 1] = posterior.mask[7 + 5] = False
        found = bnn(x)
        early = network[:4](x)  # type: ignore[index]
        early[:, [1, 5]] = 0.0  # the same input channel of both groups
        late = network[4:9](early)  # type: ignore[index]
        late[:, 5] = 0.0
        torch.testing.assert_close(found, network[9](late))  # type: ignore[index]


# -- the chain --------------------------------------------------------------------------------------------------------


def test_the_loss_has_the_log_prior() -> None:
    """The difference of two weight vectors, because a constant is left out; inactive weights count, too."""
    bnn = lb.bayesianize(hidden(), lb.MBNN(prior_scale=0.3))
    posterior_of(bnn).mask[4] = False
    prior, values = Cauchy(0.0, torch.tensor(0.3, dtype=torch.float64)), []
    for _ in range(2):
        values.append((bnn.kl() + prior.log_prob(posterior_of(bnn).mu).sum()).detach())
        with torch.no_grad():
            posterior_of(bnn).mu.mul_(-3.0).add_(0.1)
    torch.testing.assert_close(*values)


def test_inactive_weights_follow_the_prior() -> None:
    """The chain moves the weights of an inactive node by their prior and the noise alone: they get its distribution."""
    method = lb.MBNN(prior_scale=0.5, interval=10**6, temperature=1.0)
    network = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh(), nn.Linear(2, 4000, bias=False)).double()
    bnn = lb.bayesianize(network, method, likelihood=lb.Gaussian(std=1.0))
    posterior = posterior_of(bnn)
    posterior.mask[2] = False
    inactive = posterior.nodes.expand(posterior.mask) == 0
    with torch.no_grad():
        posterior.mu[inactive] = 0.4
    assert int(inactive.sum()) == 4000
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 4000, dtype=torch.float64)
    training = lb.Training(bnn, steps=10**6, num_data=10)
    training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=0.05, momentum=0.5)]
    for training.step in range(1000):
        training.optimizers[0].zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=10, temperature=1.0).backward()
        training.optimizers[0].step()
        method.after_step(training)
    found = posterior.mu[inactive].detach()
    for probability in (0.25, 0.5, 0.75):
        quantile = Cauchy(0.0, 0.5).icdf(torch.tensor(probability)).item()
        assert (found < quantile).double().mean().item() == pytest.approx(probability, abs=0.04)


FIT: dict[str, Any] = {"batch_size": 50, "lr": 5e-2, "optimizer": "sgd", "progress": False, "seed": 0}


def test_fit_prunes_nodes_and_stores_those_that_are_left(tmp_path: Path) -> None:
    """A denser prior of masks leaves fewer nodes, and the file has only what a snapshot uses."""
    data, sizes, left = data_of(), [], []
    x, y = data.tensors
    for sparsity, epochs in ((0.0, 2), (0.12, 60)):
        method = lb.MBNN(sparsity, interval=1)
        out = tmp_path / str(sparsity)
        bnn = lb.fit(network_of(64), method, data, epochs=epochs, out=out, **FIT)
        sizes.append((out / "model.safetensors").stat().st_size)
        left.append(bnn.posterior.random_weights)
    assert bnn.members == 5
    assert (bnn.predict(x).label == y).float().mean() > 0.95
    assert bnn.predict(x).mutual_information.mean() > 1e-5
    members = torch.stack([bnn.posterior.sample(torch.tensor([number, 0])) for number in range(5)])
    first, last = (torch.stack(parts) for parts in zip(*map(bnn.layout.split, members), strict=True))
    assert (first != 0).all()  # inputs of the network have no masks
    active = (last != 0).any(1)
    assert torch.equal(last != 0, active[:, None].expand_as(last))  # whole nodes
    assert 3 <= active.any(0).sum() < 25  # of 64
    assert left[1] == first[0].numel() + 2 * int(active.any(0).sum()) < left[0]
    assert sizes[1] < sizes[0]
    assert f"density={left[1] / bnn.layout.numel:.3g}, 5 collected" in repr(bnn.posterior)
    torch.testing.assert_close(members.mean(0), bnn.posterior.mean(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(members.var(0, unbiased=False), bnn.posterior.variance(), atol=1e-7, rtol=1e-3)
    loaded = lb.load(tmp_path / "0.12" / "model.safetensors", network_of(64))
    probs = [one.predict(x, 3, generator=seeded(0)).probs for one in (bnn, loaded)]
    assert torch.equal(*probs)
    state = posterior_of(bnn).to_file({name: t.detach() for name, t in bnn.posterior.state_dict().items()})
    fresh = lb.bayesianize(network_of(64), method).posterior
    for change in (
        {"mu": state["mu"][1:]},
        {"members": state["members"][:0]},
        {"index": state["index"][1:]},
        {"mask": torch.ones(7, dtype=torch.bool)},
        {"mask": torch.zeros(0)},
    ):
        with pytest.raises(ValueError, match=r"shape|positions|masks of"):
            fresh.from_file({**state, **change})


def with_batchnorm() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 4)
        return nn.Sequential(*layers).double()


def test_members_are_the_networks_of_the_chain() -> None:
    """In a loop of one's own, with moves of the masks: each member has its own masks, norms and statistics."""
    bnn = lb.bayesianize(with_batchnorm(), lb.MBNN(interval=1, snapshots=3, sparsity=0.1, temperature=1.0))
    training = lb.Training(bnn, steps=40, num_data=64)
    training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=0.5, momentum=0.9)]
    random, networks, masks = seeded(1), [], []
    for training.step in range(40):
        x = torch.randn(16, 20, generator=random, dtype=torch.float64)
        training.batch = x, x[:, :4].argmax(1)
        training.optimizers[0].zero_grad()
        lb.elbo_loss(bnn, *training.batch, num_data=64).backward()
        training.optimizers[0].step()
        statistics = [buffer.clone() for buffer in chain_of(bnn).buffers()]
        bnn.method.after_step(training)
        left = list(chain_of(bnn).buffers())
        assert all(torch.equal(*pair) for pair in zip(left, statistics, strict=True))  # no pass of a move counts
        if training.step + 1 in (27, 34, 40):
            networks.append(bnn.to_deterministic() if training.step < 39 else None)
            masks.append(posterior_of(bnn).mask.clone())
    bnn.method.finish(training)
    assert not torch.equal(masks[0], masks[2])
    x = torch.randn(50, 20, generator=random, dtype=torch.float64)
    with torch.no_grad():
        for number, network in enumerate(networks[:2]):
            assert network is not None
            torch.testing.assert_close(bnn.member(number).eval()(x), network.eval()(x))
        outputs = torch.stack([bnn.member(number).eval()(x).softmax(1) for number in range(3)])
    torch.testing.assert_close(bnn.eval().predict(x).probs, outputs.mean(0))
    for number, mask in enumerate(masks):
        weights = bnn.posterior.sample(torch.tensor([number, 0]))
        assert torch.equal(weights != 0, posterior_of(bnn).nodes.expand(mask))
    with pytest.raises(lb.LeanBayesError, match=r"use bnn\.member\(i\)"):
        bnn.to_deterministic()


@pytest.mark.parametrize("method", [lb.MBNN(interval=1, snapshots=2), lb.AEB(1.0, interval=1, snapshots=2)])
def test_a_chain_that_has_ended_stays_as_it_is(method: lb.MBNN | lb.AEB) -> None:
    """A second `finish` would store the mean of differences, which is 0, as the mean of the weights."""
    bnn = lb.fit(network_of(8), method, data_of(100), epochs=6, **FIT)
    before, (x, y) = bnn.posterior.mean().detach().clone(), data_of(10).tensors
    training = lb.Training(bnn, steps=10, num_data=100, batch=(x, y))
    training.optimizers = [torch.optim.SGD(bnn.parameters(), lr=0.1)]
    for hook in (method.start, method.after_step, method.finish):
        with pytest.raises(lb.LeanBayesError, match=r"The chain of this \w+ model has ended: make a new model"):
            hook(training)
    assert torch.equal(bnn.posterior.mean(), before)


def test_wrong_settings_and_optimizers_are_refused() -> None:
    bnn = lb.bayesianize(hidden(), lb.MBNN(interval=1))
    training = lb.Training(bnn, steps=100, num_data=12)
    adam = lb.Training(bnn, steps=100, num_data=12, optimizers=[torch.optim.Adam(bnn.parameters())], batch=batch())
    calm = lb.MBNN(interval=1, temperature=0.0)
    calls: dict[str, Callable[[], Any]] = {
        "sparsity=-1.0 must be": lambda: lb.MBNN(-1.0),
        "prior_scale=0.0 must be": lambda: lb.MBNN(prior_scale=0.0),
        "interval=0 must be": lambda: lb.MBNN(interval=0),
        "largest_move=6 must be from 1 to 5": lambda: lb.MBNN(largest_move=6),
        "until=1.0 must be": lambda: lb.MBNN(until=1.0),
        "snapshots=0 must be": lambda: lb.MBNN(snapshots=0),
        "temperature=-1.0 must be": lambda: lb.MBNN(temperature=-1.0),
        "lr_low=0.0 must be": lambda: lb.MBNN(lr_low=0.0),
        "MBNN masks the inputs of all Bayesian layers": lambda: lb.bayesianize(hidden(), lb.MBNN(), select="2.weight"),
        "MBNN adds its noise to SGD": lambda: bnn.method.after_step(adam),
        "The masks of MBNN need a batch": lambda: calm.after_step(training),
        " steps after the first part of the training are too few for 5": lambda: lb.fit(
            network_of(8), lb.MBNN(), data_of(100), epochs=1, **FIT
        ),
        "MBNN has not collected all its snapshots": lambda: bnn.method.finish(training),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value), str(error.value)
        assert str(error.value).endswith(".")
