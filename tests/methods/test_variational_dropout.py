"""Variational dropout: its KL against the paper and an integral, and both kinds of noise against dropout by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from prunable_cases import data_of, network_of
from scipy.integrate import quad
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.posteriors import GaussianDropoutPosterior


def posterior_of(bnn: lb.BayesianModel) -> GaussianDropoutPosterior:
    assert isinstance(bnn.posterior, GaussianDropoutPosterior)
    return bnn.posterior


def two_layers(method: lb.VariationalDropout) -> lb.BayesianModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    return lb.bayesianize(network, method, likelihood=lb.Gaussian())


def set_alpha(bnn: lb.BayesianModel, alpha: Tensor) -> None:
    with torch.no_grad():
        posterior_of(bnn).rho.copy_(torch.logit(alpha))


def exact_kl(alpha: float) -> float:
    """-½ log α + E log |1 + √α·ε| by integration, with the constant that makes it 0 for α → ∞."""

    def integrand(e: float) -> float:
        return math.exp(-0.5 * e * e) / math.sqrt(2 * math.pi) * math.log(abs(1 + math.sqrt(alpha) * e))

    zero = -1 / math.sqrt(alpha)  # the logarithm is infinite here
    parts = [(-12.0, zero), (zero, 12.0)] if zero > -12 else [(-12.0, 12.0)]
    mean = sum(quad(integrand, *part, limit=500)[0] for part in parts)
    return mean - 0.5 * math.log(alpha) + 0.5 * (math.log(2) + 0.5772156649015329)


def printed_kl(alpha: float) -> float:
    """The polynomial of the paper, which leaves out a constant."""
    return -(0.5 * math.log(alpha) + 1.16145124 * alpha - 1.50204118 * alpha**2 + 0.58629921 * alpha**3)


NOISES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [12, 8]),
    ({"per": "input"}, [4, 4, 4, 2, 2, 2, 2]),
    ({"per": "weight"}, [1] * 20),
    ({"noise": "inputs", "rule": "example"}, [3, 4]),
    ({"noise": "inputs", "rule": "sample", "per": "input"}, [1] * 7),
]


@pytest.mark.parametrize(("settings", "factors"), NOISES)
def test_the_kl_is_that_of_all_independent_factors(settings: dict[str, Any], factors: list[int]) -> None:
    """Each has the polynomial of the paper, and so about the exact KL."""
    bnn = two_layers(lb.VariationalDropout(**settings))
    alpha = torch.linspace(0.03, 0.97, len(factors), dtype=torch.float64)
    set_alpha(bnn, alpha)
    pairs = list(zip(factors, alpha.tolist(), strict=True))
    assert bnn.kl().item() == pytest.approx(sum(count * (0.67 + printed_kl(one)) for count, one in pairs))
    for count, one in pairs:
        assert count * (0.67 + printed_kl(one)) == pytest.approx(count * exact_kl(one), abs=0.03 * count)
    assert sum(factors) == (20 if settings.get("noise") is None else 7)


def dropout_by_hand(bnn: lb.BayesianModel, x: Tensor, alpha: Tensor, passes: int) -> Tensor:
    """Outputs of the first layer with inputs that are multiplied by N(1, α), independent for each output."""
    (weight, _) = bnn.layout.split(bnn.posterior.mean().detach())
    generator = torch.Generator().manual_seed(1)
    xi = 1 + alpha.sqrt() * torch.randn(passes, *weight.shape, generator=generator, dtype=torch.float64)
    return (x * xi * weight).sum(-1)


def test_noise_of_weights_has_the_moments_of_gaussian_dropout() -> None:
    """By local reparameterization and by samples; the factors of inputs have the same variance of each output."""
    x = torch.randn(3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alpha, passes = torch.tensor([0.6, 0.2], dtype=torch.float64), 20_000
    kinds: list[dict[str, Any]] = [{}, {"rule": "sample"}, {"noise": "inputs", "rule": "example"}]
    for settings in kinds:
        bnn = two_layers(lb.VariationalDropout(**settings))
        bnn.network = nn.Sequential(bnn.network[0])  # type: ignore[index]
        set_alpha(bnn, alpha)
        expected = dropout_by_hand(bnn, x, alpha[0], passes)
        with torch.no_grad():
            if bnn.rule == "sample":
                found = torch.stack([bnn(x[None])[0] for _ in range(4000)])
            else:
                found = bnn(x.expand(passes, 3))
        error = (expected.var(0) / len(found)).sqrt()
        assert ((found.mean(0) - expected.mean(0)).abs() < 5 * error).all()
        torch.testing.assert_close(found.var(0), expected.var(0), rtol=0.1, atol=0.0)
        (weight, _) = bnn.layout.split(bnn.posterior.mean())
        torch.testing.assert_close(found.var(0), (alpha[0] * (x * weight).square().sum(1)).detach(), rtol=0.1, atol=0.0)
        independent = settings.get("noise") is None
        correlation = torch.corrcoef(found.T)[0, 1].abs()
        assert (correlation < 0.05) == independent


def test_noise_of_inputs_multiplies_them() -> None:
    """Each example has its own factors; a sample of the weights has one factor per input."""
    bnn = two_layers(lb.VariationalDropout("inputs", "input", rule="example"))
    set_alpha(bnn, torch.linspace(0.1, 0.9, 7, dtype=torch.float64))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, second = bnn.layout.split(bnn.posterior.mean().detach())
    with torch.no_grad(), bnn.frozen(0):
        theta = posterior_of(bnn).group_factors().sample(bnn.next_draw().key, 6)
        expected = ((x * theta[:, :3]) @ first.T * theta[:, 3:]) @ second.T
        torch.testing.assert_close(bnn(x), expected)
    assert theta.std(0).min() > 0.05
    with torch.no_grad():
        ratios = bnn.layout.split(bnn.posterior.sample(noise.make_key(1)) / bnn.posterior.mean())
    assert all(ratio.std(0).max() < 1e-12 for ratio in ratios)
    assert all(ratio[0].std() > 1e-3 for ratio in ratios)


@pytest.mark.parametrize("settings", [{}, {"noise": "inputs", "per": "input", "rule": "example"}])
def test_fit_learns_the_rates(settings: dict[str, Any], tmp_path: Path) -> None:
    """Noise costs nothing on the inputs that do not matter, so it grows there; α stays below 1."""
    data = data_of()
    x, y = data.tensors
    method = lb.VariationalDropout(**{"per": "weight", **settings})
    fit: dict[str, Any] = {"batch_size": 100, "lr": 1e-2, "progress": False, "seed": 0}
    bnn = lb.fit(network_of(32), method, data, epochs=60, out=tmp_path, **fit)
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    alpha = torch.sigmoid(posterior_of(bnn).rho.detach())
    first = alpha[: 20 * 32].view(32, 20).mean(0) if method.per == "weight" else alpha[:20]
    assert first[2:].mean() > 1.2 * first[:2].mean()
    assert alpha.max() < 1
    assert "α per" in repr(bnn.posterior)
    loaded = lb.load(tmp_path / "model.safetensors", network_of(32))
    probs = [one.predict(x, 2, generator=torch.Generator().manual_seed(0)).probs for one in (bnn, loaded)]
    assert torch.equal(*probs)


def test_wrong_settings_and_rules_are_refused() -> None:
    bnn = two_layers(lb.VariationalDropout("inputs", rule="example"))
    calls: dict[str, Any] = {
        "init_alpha=1.0 must be": lambda: lb.VariationalDropout(init_alpha=1.0),
        "init_alpha=0.0 must be": lambda: lb.VariationalDropout(init_alpha=0.0),
        "samples=0 must be": lambda: lb.VariationalDropout(samples=0),
        "noise='units'": lambda: lb.VariationalDropout("units"),  # type: ignore[arg-type]
        "per='unit'": lambda: lb.VariationalDropout(per="unit"),  # type: ignore[arg-type]
        "rule='local' needs independent weights": lambda: lb.VariationalDropout("inputs"),
        "rule='example' is for factors": lambda: lb.VariationalDropout(rule="example"),
        "use per='input' or 'layer'": lambda: lb.VariationalDropout("inputs", "weight", rule="example"),
        "guess": lambda: lb.VariationalDropout(rule="guess"),
        "local": lambda: bnn.predict(torch.ones(1, 3, dtype=torch.float64), rule="local"),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value), str(error.value)
        assert str(error.value).endswith(".")
