"""LP-BNN: the autoencoders of the factors against plain layers, and what they cost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import CASES
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.model.bayesian import BayesianModel


def moved(method: lb.LPBNN) -> BayesianModel:
    """Return a model whose autoencoders have random parameters."""
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), method)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in bnn.posterior.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return bnn


def latent(posterior: Any, slot: int, codes: Tensor) -> Normal:
    """Return the latent distribution by explicit sums, of the factors of one member."""
    hidden = (posterior.encoders[slot] @ codes).clamp_min(0)
    return Normal(posterior.means[slot] @ hidden, (posterior.scales[slot] @ hidden + posterior.biases[slot]).exp())


def test_samples_and_loss_are_those_of_explicit_autoencoders() -> None:
    """One member and one layer after the other: z = m + s·ε, r̂ = D z + c, KL(z ‖ N(0, 1)) + |r̂ - r|²."""
    bnn = moved(lb.LPBNN(3, latent=5))
    posterior: Any = bnn.posterior
    key = noise.make_key(4)
    with torch.no_grad():
        sample, loss = posterior.sample_and_kl(key)
        samples, codes = bnn.layout.split(sample), bnn.layout.split(posterior.codes)
        total = torch.zeros((), dtype=torch.float64)
        for slot in range(2):
            epsilon = noise.normal(torch.zeros(3, 5, dtype=torch.float64), key, slot)
            for member in range(3):
                q = latent(posterior, slot, codes[slot][member])
                z = q.mean + q.stddev * epsilon[member]
                expected = posterior.decoders[slot] @ z + posterior.centers[slot]
                torch.testing.assert_close(samples[slot][member], expected)
                prior = Normal(torch.zeros_like(z), torch.ones_like(z))
                total += kl_divergence(q, prior).sum() + (expected - codes[slot][member]).square().sum()
    torch.testing.assert_close(loss, total / 3)
    torch.testing.assert_close(posterior.kl(key), loss)


def test_mean_and_variance_are_those_of_samples() -> None:
    bnn = moved(lb.LPBNN(2, latent=3))
    with torch.no_grad():
        samples = torch.stack([bnn.posterior.sample(noise.make_key(0, index)) for index in range(4000)])
        mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    assert ((samples.mean(0) - mean).abs() < 5 * (variance / 4000).sqrt()).all()
    torch.testing.assert_close(samples.var(0), variance, rtol=0.15, atol=1e-6)


def test_only_input_factors_are_random(tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.LPBNN(2, latent=4))
    assert [slot.name for slot in bnn.layout] == [f"factors.{number}.inputs" for number in range(3)]
    assert bnn.network.get_parameter("factors.0.outputs").shape == (2, 8)
    plain = sum(
        tensor.numel() for tensor in lb.bayesianize(CASES["cnn"].build(), lb.Deterministic()).state_dict().values()
    )
    inputs, outputs, shifts = 3 + 8 + 12, 8 + 12 + 5, 12 + 5
    autoencoders = inputs * (2 * 4 + 1) + 3 * (2 * 4 * 4 + 4)
    stored = sum(tensor.numel() for tensor in bnn.state_dict().values())
    assert stored - plain == 2 * (inputs + outputs + shifts) + autoencoders


def test_it_learns_by_fit() -> None:
    x = torch.randn(240, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    data = torch.utils.data.TensorDataset(x, y)
    bnn = lb.fit(network, lb.LPBNN(2, samples=6), data, epochs=40, batch_size=24, lr=1e-2, progress=False, seed=0)
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    assert bnn.predict(x).mutual_information.mean() > 1e-4


def test_wrong_settings_are_refused() -> None:
    calls: dict[str, Any] = {
        "members=0 must be": lambda: lb.LPBNN(0),
        "latent=0 must be": lambda: lb.LPBNN(latent=0),
        "init_std=0.0 must be": lambda: lb.LPBNN(init_std=0.0),
        "samples=0 must be": lambda: lb.LPBNN(samples=0),
        "leave select out": lambda: lb.bayesianize(CASES["mlp"].build(), lb.LPBNN(), select="weight"),
        "are correlated": lambda: lb.bayesianize(CASES["mlp"].build(), lb.LPBNN()).predict(
            torch.zeros(1, 6), rule="local"
        ),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).endswith(".")
