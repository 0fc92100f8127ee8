"""Structured Bayesian pruning: the truncated log-normal against SciPy, groups of weights, pruning, and files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network_cases import CASES
from prunable_cases import data_of, network_of
from scipy import integrate, stats
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.core import truncated_log_normal as log_normal
from leanbayes.data import Batches, load
from leanbayes.networks import build
from leanbayes.posteriors import GroupNoisePosterior

LOW, HIGH = -20.0, 0.0
SETTINGS = [(-0.05, 0.01), (-0.05, 0.5), (-3.0, 1.0), (-1e-4, 2.0), (-10.0, 6.0), (-19.5, 0.5), (-7.0, 40.0)]


def posterior_of(bnn: lb.BayesianModel) -> GroupNoisePosterior:
    assert isinstance(bnn.posterior, GroupNoisePosterior)
    return bnn.posterior


def scipy_normal(loc: float, scale: float) -> Any:
    return stats.truncnorm((LOW - loc) / scale, (HIGH - loc) / scale, loc, scale)


def set_noise(bnn: lb.BayesianModel, loc: Tensor, scale: Tensor) -> None:
    """Set m and s of log θ for each group."""
    with torch.no_grad():
        posterior_of(bnn).distance.copy_(torch.log(torch.expm1(-loc)) / 5)
        posterior_of(bnn).rho.copy_(torch.log(torch.expm1(scale)) / 5)


@pytest.mark.parametrize(("loc", "scale"), SETTINGS)
def test_moments_and_kl_are_those_of_scipy(loc: float, scale: float) -> None:
    q = scipy_normal(loc, scale)
    m, s = (torch.tensor(value, dtype=torch.float64) for value in (loc, scale))
    low, high = max(LOW, loc - 12 * scale), min(HIGH, loc + 12 * scale)

    def expected(function: Any) -> float:
        return integrate.quad(lambda z: q.pdf(z) * function(z), low, high, epsabs=1e-13, limit=200)[0]

    mean = expected(math.exp)
    variance = expected(lambda z: (math.exp(z) - mean) ** 2)
    ours = log_normal.mean_and_variance(m, s, LOW, HIGH)
    assert ours[0].item() == pytest.approx(mean, rel=1e-7)
    assert ours[1].item() == pytest.approx(variance, rel=1e-5)
    # -log q(z) is averaged against the uniform density of z = log θ; the Jacobians cancel.
    kl = expected(lambda z: q.logpdf(z) + math.log(HIGH - LOW))
    assert log_normal.log_uniform_kl(m, s, LOW, HIGH).item() == pytest.approx(kl, rel=1e-6, abs=1e-9)
    single = log_normal.log_uniform_kl(m.float(), s.float(), LOW, HIGH)
    assert single.item() == pytest.approx(kl, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("loc", "scale"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_distribution_of_scipy(loc: float, scale: float, dtype: torch.dtype) -> None:
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    m, s = (torch.tensor(value, dtype=dtype, requires_grad=True) for value in (loc, scale))
    theta = log_normal.sample(m, s, LOW, HIGH, normal)
    assert (theta <= 1).all()
    distance = stats.kstest(theta.detach().double().log().numpy(), scipy_normal(loc, scale).cdf).statistic
    assert distance < 1.63 / math.sqrt(20_000)  # 1 % of all seeds exceed it
    gradients = torch.autograd.grad(theta.sum(), (m, s))
    assert all(gradient.isfinite() for gradient in gradients)


def test_gradients_of_samples_are_those_of_the_mean() -> None:
    loc, scale = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (-0.8, 0.7))
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = torch.autograd.grad(log_normal.sample(loc, scale, LOW, HIGH, normal).mean(), (loc, scale))
    exact = torch.autograd.grad(log_normal.mean_and_variance(loc, scale, LOW, HIGH)[0], (loc, scale))
    torch.testing.assert_close(sampled, exact, rtol=0.02, atol=0.0)


def test_samples_of_weights_share_the_factor_of_their_input() -> None:
    """Each input of a layer has one factor: a sample is the network with its weights multiplied by these."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.Unflatten(0, (1, 2, 2)), nn.Conv2d(1, 5, 2)).double()
    bnn = lb.bayesianize(network, lb.SBP(init_std=0.3))
    posterior = posterior_of(bnn)
    assert posterior.groups == 3 + 5  # inputs of the linear layer; the convolution has one input, so its outputs
    with torch.no_grad():
        linear, conv = bnn.layout.split(posterior.sample(noise.make_key(1)) / posterior.mean())
    assert linear.std(0).max() < 1e-12
    assert linear[0].std() > 1e-3
    assert conv.flatten(1).std(1).max() < 1e-12
    assert conv[:, 0, 0, 0].std() > 1e-3


def test_inputs_of_a_transposed_convolution_have_the_factors(tmp_path: Path) -> None:
    """A sample is the network with its inputs multiplied by factors, under both rules and after loading."""

    def square() -> nn.Module:
        return nn.ConvTranspose2d(3, 3, 2, bias=False).double()

    bnn = lb.bayesianize(square(), lb.SBP(init_std=0.3), likelihood=lb.Categorical())
    assert posterior_of(bnn).groups == 3
    with torch.no_grad():
        (factors,) = bnn.layout.split(bnn.posterior.sample(noise.make_key(1)) / bnn.posterior.mean())
    assert factors.flatten(1).std(1).max() < 1e-12
    assert factors[:, 0, 0, 0].std() > 1e-3
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = bnn.to_deterministic()
    with torch.no_grad(), bnn.frozen(0):
        ratios = bnn(x * torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)[:, None, None])
        ratios = ratios / mean(x * torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)[:, None, None])
    assert ratios.flatten(1).std(1).max() < 1e-9  # one factor for each example
    assert ratios[:, 0, 0, 0].std() > 1e-3
    lb.save(bnn, tmp_path / "model")
    assert lb.load(tmp_path / "model", square()).layout.slots == bnn.layout.slots
    assert bnn.layout.slots[0].input_dim == 0


def test_mean_and_variance_are_those_of_samples() -> None:
    bnn = lb.bayesianize(nn.Linear(4, 3).double(), lb.SBP(), likelihood=lb.Gaussian())
    set_noise(bnn, torch.tensor([-0.1, -0.5, -2.0, -8.0]), torch.tensor([0.1, 0.4, 1.0, 5.0]))
    with torch.no_grad():
        samples = torch.stack([bnn.posterior.sample(noise.make_key(0, index)) for index in range(5000)])
        mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    assert ((samples.mean(0) - mean).abs() <= 5 * (variance / 5000).sqrt()).all()
    torch.testing.assert_close(samples.var(0), variance, rtol=0.2, atol=0.0)


def test_the_kl_is_the_sum_over_inputs() -> None:
    bnn = lb.bayesianize(nn.Linear(2, 50).double(), lb.SBP(), likelihood=lb.Gaussian())
    set_noise(bnn, torch.tensor([-0.3, -4.0]), torch.tensor([0.2, 3.0]))
    grid = np.linspace(LOW, HIGH, 200_001)
    expected = 0.0
    for loc, scale in ((-0.3, 0.2), (-4.0, 3.0)):
        density = scipy_normal(loc, scale).pdf(grid)
        log_ratio = np.log(np.maximum(density, 1e-300) * (HIGH - LOW))
        expected += float(integrate.trapezoid(density * log_ratio, grid))
    assert bnn.kl().item() == pytest.approx(expected, rel=1e-4)


def noisy(network: nn.Module) -> lb.BayesianModel:
    """A model whose groups have signal-to-noise ratios from about 20 to 0.3."""
    bnn = lb.bayesianize(network, lb.SBP())
    count = posterior_of(bnn).groups
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    set_noise(bnn, -torch.linspace(0.1, 8.0, count)[order], torch.linspace(0.05, 6.0, count)[order])
    return bnn.eval()


def test_the_pruned_network_is_the_masked_one() -> None:
    network, x = CASES["cnn"].build().double().eval(), CASES["cnn"].example().double()
    bnn = noisy(network)
    mean, variance = bnn.posterior.mean().detach(), bnn.posterior.variance().detach()
    kept = mean.square() >= variance
    assert 0.1 < kept.double().mean() < 0.9
    masked = bnn.to_deterministic()
    with torch.no_grad():
        for slot, part in zip(bnn.layout, bnn.layout.split(torch.where(kept, mean, 0.0)), strict=True):
            masked.get_parameter(slot.name).copy_(part)
    with torch.no_grad():
        before = bnn.posterior.sample(noise.make_key(3))
    groups = posterior_of(bnn).prune()
    assert len(posterior_of(bnn).rho) == groups
    assert len(posterior_of(bnn).mu) == int(kept.sum())
    torch.testing.assert_close(bnn.posterior.mean(), torch.where(kept, mean, 0.0))
    torch.testing.assert_close(bnn.posterior.variance(), torch.where(kept, variance, 0.0))
    sample = bnn.posterior.sample(noise.make_key(3))
    assert ((sample == 0) == ~kept).all()
    assert not torch.equal(sample, before)
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(bnn(x), masked(x))
    posterior_of(bnn).snr = 3.0  # a second time, with a higher limit
    high = bnn.posterior.mean().square() >= 9 * bnn.posterior.variance()
    again = torch.where(high, bnn.posterior.mean(), 0.0).detach()
    assert 0 < posterior_of(bnn).prune() < groups
    torch.testing.assert_close(bnn.posterior.mean(), again)


def test_files_shrink_with_pruned_inputs(tmp_path: Path) -> None:
    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 50))

    bnn, x = noisy(large()), torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    lb.save(bnn, tmp_path / "dense")
    posterior_of(bnn).prune()
    lb.save(bnn, tmp_path / "pruned")
    share = len(posterior_of(bnn).mu) / bnn.layout.numel
    dense, pruned = ((tmp_path / name).stat().st_size for name in ("dense", "pruned"))
    assert dense > 4 * bnn.layout.numel
    assert pruned < 4 * share * bnn.layout.numel + 8000
    assert pruned < 0.7 * dense
    other = lb.load(tmp_path / "pruned", large())
    assert f"of {posterior_of(bnn).groups:,} groups" in repr(other.posterior)
    for rule in ("sample", "mean"):
        probs = [one.predict(x, 3, rule=rule, generator=torch.Generator().manual_seed(0)).probs for one in (bnn, other)]
        assert torch.equal(*probs)
    state = posterior_of(bnn).to_file({name: t.detach() for name, t in bnn.posterior.state_dict().items()})
    fresh = lb.bayesianize(large(), lb.SBP()).posterior
    for change, message in (
        ({"mu": state["mu"][1:]}, "weights, not"),
        ({"rho": state["rho"][1:]}, "do not fit"),
        ({"kept": state["kept"][1:]}, "positions instead of"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.from_file({**state, **change})


def test_fit_prunes_the_inputs_that_do_not_matter() -> None:
    data = data_of()
    settings: dict[str, Any] = {"batch_size": 100, "lr": 1e-2, "temperature": 3.0, "progress": False, "seed": 0}
    bnn = lb.fit(network_of(32), lb.SBP(), data, epochs=60, **settings)
    x, y = data.tensors
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    first = bnn.layout.split(bnn.posterior.mean())[0]
    assert (first[:, :2] != 0).all()
    assert (first[:, 2:] == 0).all(0).float().mean() > 0.25
    assert len(posterior_of(bnn).rho) < 30  # of 20 + 32


def test_convolutions_with_batchnorm_are_trained_and_pruned() -> None:
    """With one factor for a whole batch, this network is at chance at the temperature of the paper."""
    data = load("digits", validation_share=0.25)
    network = build("small-cnn", data.input_shape, data.outputs, seed=0)
    settings: dict[str, Any] = {"batch_size": 64, "lr": 2e-3, "device": "cpu", "progress": False, "seed": 0}
    bnn = lb.fit(network, lb.SBP(), data, epochs=20, evaluate_every=0, **settings)
    x, y = next(Batches(data.validation, 1000, normalize=data.normalize).epoch())
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    assert len(posterior_of(bnn).rho) < 250  # of 384


def test_wrong_settings_and_rules_are_refused() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.SBP())
    calls: dict[str, Any] = {
        "snr=0.0 must be": lambda: lb.SBP(snr=0.0),
        "init_std=-1.0 must be": lambda: lb.SBP(init_std=-1.0),
        "samples=0 must be": lambda: lb.SBP(samples=0),
        "rule='local'": lambda: lb.SBP(rule="local"),  # type: ignore[arg-type]
        "local": lambda: bnn.predict(CASES["cnn"].example(), rule="local"),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).endswith(".")
