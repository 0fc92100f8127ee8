"""BatchEnsemble and rank-1 networks against explicit networks for each member, and KLs against other formulas."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.model.bayesian import BayesianModel


def made(name: str, method: lb.Method) -> tuple[BayesianModel, Tensor]:
    case = CASES[name]
    x = case.example()
    network = case.build().double()
    if isinstance(method, lb.BatchEnsemble):
        bnn = lb.bayesianize(network, method)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for part, parameter in bnn.network.named_parameters():
                if part.endswith(".shift"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return bnn, x.double() if x.is_floating_point() else x
    return lb.bayesianize(network, method), x.double() if x.is_floating_point() else x


def member(bnn: BayesianModel, number: int) -> nn.Module:
    return bnn.network.member(number)  # type: ignore[operator]


# -- the members ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["normal", "signs"])
@pytest.mark.parametrize("name", CASES)
def test_each_sample_is_one_member(name: str, init: Any) -> None:
    bnn, x = made(name, lb.BatchEnsemble(3, init=init))
    pred = bnn.predict(x, keep_outputs=True)
    assert pred.samples == 3
    assert pred.outputs is not None
    with torch.no_grad():
        for number, output in enumerate(pred.outputs):
            torch.testing.assert_close(output, member(bnn, number).eval()(x))
    cut = bnn.predict(x, memory_budget=1)
    torch.testing.assert_close(cut.probs, pred.probs)


def test_a_member_is_the_formula_of_the_paper() -> None:
    """y = s ∘ (W (x ∘ r)) + b, channel by channel, in a grouped, a transposed and a linear layer."""
    generator = torch.Generator().manual_seed(0)
    for layer, x in (
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), torch.randn(2, 4, 5, 5, generator=generator)),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), torch.randn(2, 4, 5, generator=generator)),
        (nn.Linear(4, 6), torch.randn(2, 7, 4, generator=generator)),
    ):
        x = x.double()
        bnn = lb.bayesianize(nn.Sequential(layer.double()), lb.BatchEnsemble(2, seed=5), likelihood=lb.Gaussian())
        factors: Any = bnn.network.get_submodule("factors.0")
        with torch.no_grad():
            factors.shift.copy_(torch.randn(2, 6, generator=generator))
            dim = 2 if isinstance(layer, nn.Linear) else 1
            shape = [1] * x.dim()
            shape[dim] = -1
            outputs = bnn.predict(x, keep_outputs=True).outputs
            assert outputs is not None
            for number, output in enumerate(outputs):
                r, s = 1 + factors.inputs[number], 1 + factors.outputs[number]
                bias = layer.bias + factors.shift[number]
                zero = copy.deepcopy(layer)
                assert zero.bias is not None
                zero.bias.zero_()
                expected = zero(x * r.view(shape)) * s.view(shape) + bias.view(shape)
                torch.testing.assert_close(output, expected)
                torch.testing.assert_close(member(bnn, number)(x), expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_divides_the_examples_among_the_members(training: bool) -> None:
    """A step runs the network once. The first example has a random member, the next one the next member, and so on."""
    bnn, x = made("vit_timm", lb.BatchEnsemble(3))
    bnn.train(training)
    y = torch.arange(len(x)) % 5
    with torch.no_grad():
        outputs = torch.stack([member(bnn, number)(x) for number in range(3)])
    expected = {
        offset: F.cross_entropy(outputs[(torch.arange(len(x)) + offset) % 3, torch.arange(len(x))], y).item()
        for offset in range(3)
    }
    calls: list[int] = []
    bnn.network.get_submodule("inner.head").register_forward_hook(lambda *_: calls.append(1))
    found = set()
    for _ in range(20):
        loss = lb.elbo_loss(bnn, x, y, num_data=100).item()
        found |= {offset for offset, value in expected.items() if abs(value - loss) < 1e-9}
    assert found == {0, 1, 2}
    assert len(calls) == 20


def test_batchnorm_sees_the_members_together() -> None:
    """The running statistics are those of batches that are divided, not the mean of the members' own variances."""
    bnn, x = made("cnn", lb.BatchEnsemble(2, init="signs"))
    first: Any = bnn.network.get_submodule("inner.1")
    conv: list[Tensor] = []
    first.register_forward_pre_hook(lambda module, args: conv.append(args[0].detach()))
    assert bnn.refresh_batchnorm([x, 2 * x]) == 2
    assert len(conv) == 2
    means = torch.stack([one.mean((0, 2, 3)) for one in conv]).mean(0)
    variances = torch.stack([one.var((0, 2, 3)) for one in conv]).mean(0)
    torch.testing.assert_close(first.running_mean, means)
    torch.testing.assert_close(first.running_var, variances)


def test_tokens_go_with_their_example() -> None:
    class Windows(nn.Module):
        """A network that merges the tokens of an example into the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).view(*x.shape[:2], -1).mean(1)

    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
    bnn = lb.bayesianize(Windows(), lb.BatchEnsemble(2), likelihood=lb.Gaussian()).train()
    with torch.no_grad():
        outputs = [member(bnn, number)(x) for number in range(2)]
        mixed = [torch.stack([outputs[(row + start) % 2][row] for row in range(4)]) for start in range(2)]
        found = bnn(x)
    assert any(torch.allclose(found, one, atol=1e-6) for one in mixed)


def test_checkpointed_layers_are_recomputed_with_the_same_member() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    x, y = CASES["mlp"].example(), torch.tensor([0, 1, 2, 0])
    for method in (lb.BatchEnsemble(2), lb.RankOne(2)):
        gradients = []
        for network in (nn.Sequential(CASES["mlp"].build()), Checkpointed(CASES["mlp"].build())):
            bnn = lb.bayesianize(network, method, seed=1)
            loss = lb.elbo_loss(bnn, x, y, num_data=4, generator=torch.Generator().manual_seed(2))
            gradients.append(torch.autograd.grad(loss, list(bnn.parameters())))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


# -- costs, files and training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lb.BatchEnsemble(4), lb.RankOne(4), lb.RankOne(4, distribution="cauchy")])
def test_a_file_has_the_weights_once(method: Any, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sizes = {}
    for name, one in (("plain", lb.Deterministic()), ("members", method)):
        bnn = lb.bayesianize(network, one)
        lb.save(bnn, tmp_path / name)
        sizes[name] = sum(tensor.numel() for tensor in bnn.state_dict().values())
    factors, biases = 4 * (64 + 128 + 128 + 10), 4 * (128 + 10)
    numbers = factors * (1 if isinstance(method, lb.BatchEnsemble) else 2) + biases
    assert sizes["members"] - sizes["plain"] == numbers
    header = 4000
    assert (tmp_path / "members").stat().st_size < (tmp_path / "plain").stat().st_size + 4 * numbers + header


@pytest.mark.parametrize("method", [lb.BatchEnsemble(3, factor_std=0.3), lb.RankOne(2, samples=6)])
def test_it_learns_by_fit(method: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 2, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    data = torch.utils.data.TensorDataset(x, y)
    bnn = lb.fit(network, method, data, epochs=40, batch_size=24, lr=1e-2, temperature=0.1, progress=False, seed=0)
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    prediction = bnn.predict(x)
    assert prediction.mutual_information.mean() > 1e-4  # the members differ


# -- rank-1 factors ---------------------------------------------------------------------------------------------------


def moved(method: lb.RankOne) -> BayesianModel:
    """Return a model whose factors have many means and scales."""
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), method)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in bnn.posterior.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return bnn


def test_kl_is_the_mean_over_members() -> None:
    bnn = moved(lb.RankOne(3, prior_scale=0.2))
    posterior: Any = bnn.posterior
    q = torch.distributions.Normal(posterior.mu, F.softplus(posterior.rho))
    p = torch.distributions.Normal(torch.zeros(()), torch.tensor(0.2, dtype=torch.float64))
    torch.testing.assert_close(bnn.kl(), torch.distributions.kl_divergence(q, p).sum() / 3)
    assert posterior.mu.numel() == 3 * (3 + 4 + 4 + 2)
    _, kl = posterior.sample_and_kl(noise.make_key(0))
    torch.testing.assert_close(kl, bnn.kl())


def test_kl_of_cauchy_factors_is_the_integral() -> None:
    bnn = moved(lb.RankOne(1, distribution="cauchy", prior_scale=0.2))
    posterior: Any = bnn.posterior
    total = 0.0
    for loc, scale in zip(posterior.mu.tolist(), F.softplus(posterior.rho).tolist(), strict=True):
        q, p = scipy.stats.cauchy(loc, scale), scipy.stats.cauchy(0, 0.2)
        # Over quantiles of q, where the integrand is smooth.
        total += scipy.integrate.quad(lambda u, q=q, p=p: q.logpdf(q.ppf(u)) - p.logpdf(q.ppf(u)), 0, 1)[0]
    assert bnn.kl().item() == pytest.approx(total, rel=1e-6)


def test_the_bound_is_above_the_kl_of_the_mixture() -> None:
    """For one factor, by integration: KL(½q₁ + ½q₂ ‖ p) ≤ ½KL(q₁ ‖ p) + ½KL(q₂ ‖ p)."""
    for kind in (scipy.stats.norm, scipy.stats.cauchy):
        parts, p = (kind(0.3, 0.1), kind(-0.2, 0.2)), kind(0, 0.1)

        def mixture(x: float, parts: Any = parts) -> float:
            return sum(q.pdf(x) for q in parts) / 2

        def ratio(q: Any, x: float, p: Any = p) -> float:
            return 0.0 if q(x) < 1e-300 else q(x) * (torch.tensor(q(x)).double().log().item() - p.logpdf(x))

        width = {"limit": 500, "points": [-0.2, 0.0, 0.3]}
        of_mixture = scipy.integrate.quad(lambda x: ratio(mixture, x), -50, 50, **width)[0]
        bound = sum(scipy.integrate.quad(lambda x, q=q: ratio(q.pdf, x), -50, 50, **width)[0] for q in parts) / 2
        assert 0 < of_mixture < bound


@pytest.mark.parametrize(("distribution", "exact"), [("gaussian", scipy.stats.norm), ("cauchy", scipy.stats.cauchy)])
def test_samples_have_the_distribution(distribution: Any, exact: Any) -> None:
    bnn = moved(lb.RankOne(2, distribution=distribution, limit=1e4))
    posterior: Any = bnn.posterior
    with torch.no_grad():
        samples = torch.stack([posterior.sample(noise.make_key(7, index)) for index in range(400)])
        standard = (samples - posterior.mu) / F.softplus(posterior.rho)
    distance = scipy.stats.kstest(standard.flatten().numpy(), exact.cdf).statistic
    assert distance < 0.03  # 0.016 has a p-value of 1 %; the distance between both distributions is 0.13


def test_cauchy_factors_are_clamped_and_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard Cauchy is infinite if the normal that it is divided by is 0."""
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.RankOne(2, distribution="cauchy", limit=3.0))
    posterior: Any = bnn.posterior
    monkeypatch.setattr(noise, "normal", lambda like, key, stream=0: torch.full_like(like.detach(), 1.0 - stream))
    sample = posterior.sample(noise.make_key(0))
    assert bool((1 + sample == 3).all())
    sample.sum().backward()
    assert bool(posterior.rho.grad.isfinite().all())


def test_a_sample_of_a_rank_one_network_is_a_member_with_sampled_factors() -> None:
    bnn, x = made("cnn", lb.RankOne(2, init_std=0.3, samples=4))
    bnn.eval()
    found = set()
    for seed in range(8):
        key = noise.make_key(seed)
        with torch.no_grad(), bnn.frozen(seed):
            output = bnn(x)
            plain = copy.deepcopy(bnn)
            plain.posterior.mu.copy_(bnn.posterior.sample(key))  # type: ignore[operator]
            with plain.using("mean"), plain.drawn():
                members = [member(plain, number).eval()(x) for number in range(2)]
        same = [number for number, one in enumerate(members) if torch.allclose(one, output)]
        assert len(same) == 1
        found |= {*same}
    assert found == {0, 1}


def test_the_mean_network_has_the_mean_factors() -> None:
    bnn, x = made("cnn", lb.RankOne(2, factor_std=0.4))
    plain = bnn.eval().to_deterministic()
    assert [name for name, _ in plain.named_parameters()] == [
        name for name, _ in CASES["cnn"].build().named_parameters()
    ]
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(bnn(x), plain(x))
    again = lb.bayesianize(bnn, lb.MeanField())
    assert again.posterior.random_weights == sum(p.numel() for n, p in plain.named_parameters() if p.dim() > 1)


@pytest.mark.parametrize("method", [lb.BatchEnsemble(2), lb.RankOne(2)])
def test_a_file_of_another_network_is_refused(method: Any, tmp_path: Path) -> None:
    lb.save(lb.bayesianize(CASES["mlp"].build(), method), tmp_path / "model")
    with pytest.raises(lb.FileFormatError, match="does not fit this network: The network has no linear"):
        lb.load(tmp_path / "model", nn.LayerNorm(3))
    with pytest.raises(lb.FileFormatError, match="was saved from another network"):
        lb.load(tmp_path / "model", nn.Sequential(nn.Linear(6, 3)))


# -- wrong settings ---------------------------------------------------------------------------------------------------


def test_refusals_are_one_sentence() -> None:
    bnn, x = made("mlp", lb.BatchEnsemble(2))
    rank_one, _ = made("mlp", lb.RankOne(2))
    calls: dict[str, Any] = {
        "members=0 must be": lambda: lb.BatchEnsemble(0),
        "members=2000 must be": lambda: lb.RankOne(2000),
        "factor_std=-1": lambda: lb.BatchEnsemble(factor_std=-1.0),
        "init='ones' is unknown": lambda: lb.BatchEnsemble(init="ones"),  # type: ignore[arg-type]
        "distribution='laplace' is unknown": lambda: lb.RankOne(distribution="laplace"),  # type: ignore[arg-type]
        "prior_scale=0.0 must be": lambda: lb.RankOne(prior_scale=0.0),
        "init_std=-1.0 must be": lambda: lb.RankOne(init_std=-1.0),
        "samples=0 must be": lambda: lb.RankOne(samples=0),
        "limit=1.0 must be": lambda: lb.RankOne(limit=1.0),
        "no mean network": lambda: bnn.predict(x, rule="mean"),
        "not a single network": lambda: bnn.to_deterministic(),
        "the number of members": lambda: bnn.predict(x, samples=3),
        "call the model": lambda: bnn.network.get_submodule("inner")(x),
        "member 2 does not exist": lambda: member(bnn, 2),
        "inside with bnn.drawn()": lambda: member(rank_one, 0),
        "leave select out": lambda: lb.bayesianize(CASES["mlp"].build(), lb.RankOne(), select="weight"),
        "no linear or convolutional layer": lambda: lb.bayesianize(nn.LayerNorm(3), lb.BatchEnsemble()),
        "no Bayesian weights to score": lambda: lb.sensitivity(rank_one, [(x, torch.zeros(4, dtype=torch.long))]),
        "The weights of RankOne cannot be shared": lambda: lb.compress(
            rank_one, "none", data=[(x, torch.zeros(4, dtype=torch.long))]
        ),
        "are correlated": lambda: rank_one.predict(x, rule="local"),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).endswith(".")
        assert "\n" not in str(error.value)


def test_rows_that_are_not_examples_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:3])

    bnn = lb.bayesianize(Odd(), lb.BatchEnsemble(2)).train()
    with pytest.raises(lb.UnsupportedOperation, match=r"got 3 rows for a batch of 4 examples.*lb\.Ensemble"):
        bnn(torch.zeros(4, 4))
    assert bnn.eval()(torch.zeros(4, 4)).shape == (3, 3)


def test_layers_that_count_time_first_train_one_member_per_step() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x.transpose(0, 1))[0])[-1]

    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    bnn = lb.bayesianize(Recurrent(), lb.BatchEnsemble(2)).train()
    with torch.no_grad():
        members = [member(bnn, number)(x) for number in range(2)]
        outputs = [bnn(x) for _ in range(8)]
    chosen = [[torch.allclose(one, output, atol=1e-6) for one in members] for output in outputs]
    assert sorted({*itertools.chain.from_iterable(map(tuple, chosen))}) == [False, True]
    assert {tuple(row) for row in chosen} == {(True, False), (False, True)}
