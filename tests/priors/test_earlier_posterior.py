"""The posterior of a model as the prior of the next one, compared with torch.distributions and conjugate answers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.deploy.model_file import save


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def moved(bnn: lb.BayesianModel, seed: int) -> lb.BayesianModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in bnn.posterior.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return bnn


@pytest.fixture
def first() -> lb.BayesianModel:
    return moved(lb.bayesianize(net(), lb.MeanField()), 1)


def distribution(bnn: lb.BayesianModel) -> Normal:
    mean, variance = bnn.posterior.mean().detach().clone(), bnn.posterior.variance().detach()
    return Normal(mean, variance.sqrt(), validate_args=False)


@pytest.mark.parametrize("method", [lb.MeanField, lb.VDP], ids=str)
def test_the_kl_is_that_to_the_earlier_posterior(first: lb.BayesianModel, method: Any) -> None:
    before = distribution(first)
    second = moved(lb.bayesianize(net(3), method(prior=lb.Normal.from_posterior(first))), 2)
    moved(first, 7)  # the prior is a copy
    expected = kl_divergence(distribution(second), before).sum()
    assert second.kl_kind == "exact"
    torch.testing.assert_close(second.kl(), expected)
    key = second.next_draw().key
    for _, kl in (second.posterior.sample_and_kl(key), second.posterior.perturbation_and_kl(key)):
        torch.testing.assert_close(kl, expected)


def test_a_model_that_continues_starts_at_its_prior(first: lb.BayesianModel) -> None:
    second = lb.bayesianize(first, lb.MeanField(prior=lb.Normal.from_posterior(first)))
    assert second.kl().item() == pytest.approx(0, abs=1e-9)


def test_a_partial_posterior_keeps_the_prior_of_its_weights(first: lb.BayesianModel, tmp_path: Path) -> None:
    method = lb.PBN(rate=0.4, sensitivity="magnitude", prior=lb.Normal.from_posterior(first))
    second = moved(lb.bayesianize(net(3), method), 2)
    random = second.posterior.variance().detach() > 0
    assert 0 < random.sum() < len(random)
    now, before = distribution(second), distribution(first)
    expected = kl_divergence(
        Normal(now.loc[random], now.scale[random]), Normal(before.loc[random], before.scale[random])
    )
    torch.testing.assert_close(second.kl(), expected.sum())
    lb.save(second, tmp_path / "partial.safetensors")
    torch.testing.assert_close(lb.load(tmp_path / "partial.safetensors", net()).kl(), expected.sum())


def test_a_file_stores_the_prior(first: lb.BayesianModel, tmp_path: Path) -> None:
    second = moved(lb.bayesianize(net(3), lb.MeanField(prior=lb.Normal.from_posterior(first))), 2)
    path = tmp_path / "second.safetensors"
    lb.save(second, path)
    loaded = lb.load(path, net(9))
    assert loaded.kl().item() == second.kl().item()
    again = moved(lb.bayesianize(net(3), loaded.method), 2)  # the method of a loaded model has the prior too
    assert again.kl().item() == second.kl().item()
    with torch.no_grad():
        second.posterior.prior.scales[0] = 0  # type: ignore[union-attr, operator]
    save(second, path)
    with pytest.raises(lb.FileFormatError, match="scale of the prior is not positive"):
        lb.load(path, net())


def test_settings_tell_two_priors_apart(first: lb.BayesianModel) -> None:
    prior, same = lb.Normal.from_posterior(first), lb.Normal.from_posterior(copy.deepcopy(first))
    assert prior == same
    assert prior != lb.Normal.from_posterior(moved(first, 3))
    alone = type(prior)(prior.digest)  # as from the record of a run, without tensors
    with pytest.raises(lb.LeanBayesError, match="make the prior again"):
        lb.bayesianize(net(), lb.MeanField(prior=alone)).kl()


def test_what_does_not_fit_is_refused(first: lb.BayesianModel) -> None:
    prior = lb.Normal.from_posterior(first)
    wide = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(lb.LeanBayesError, match=r"0\.weight of shape \(5, 3\), but this network has \(6, 3\)"):
        lb.bayesianize(wide, lb.MeanField(prior=prior))
    with pytest.raises(lb.LeanBayesError, match=r"in which 0\.bias is not Bayesian"):
        lb.bayesianize(net(), lb.MeanField(prior=prior), select=".*")
    with pytest.raises(lb.LeanBayesError, match="does not store a center"):
        lb.SSVI(prior=prior)
    sources = {
        "are deterministic": lb.PBN(rate=0.5, sensitivity="magnitude"),
        "has no Bayesian weights": lb.MCDropout(),
        "are correlated": lb.WeightSharing(components=4, sampling="tied"),
    }
    for message, method in sources.items():
        model = lb.bayesianize(nn.Sequential(nn.Dropout(), *net()), method)
        with pytest.raises(lb.LeanBayesError, match=message):
            lb.Normal.from_posterior(model)
    with pytest.raises(lb.LeanBayesError, match="needs a Bayesian model, not Sequential"):
        lb.Normal.from_posterior(net())


# -- Bayes' rule, one half of the data after the other ----------------------------------------------------------------

NOISE, FEATURES = 0.5, 4


def halves() -> list[tuple[Tensor, Tensor]]:
    """Two halves of a linear regression with orthogonal inputs, for which the exact posterior is independent."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        x = torch.linalg.qr(torch.randn(30, FEATURES, generator=generator, dtype=torch.float64)).Q * 4
        weights = torch.tensor([1.0, -0.5, 0.2, 0.0], dtype=torch.float64)
        y = x @ weights + NOISE * torch.randn(30, generator=generator, dtype=torch.float64)
        found.append((x, y[:, None]))
    return found


def conjugate(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Mean and std of the exact posterior of a linear model with the prior N(0, scale²)."""
    precision = x.T @ x / NOISE**2 + torch.eye(FEATURES, dtype=torch.float64) / scale**2
    return torch.linalg.solve(precision, x.T @ y[:, 0] / NOISE**2), precision.inverse().diagonal().sqrt()


def learned(start: Any, prior: Any, x: Tensor, y: Tensor, engine: str) -> lb.BayesianModel:
    method = lb.MeanField(prior=prior, rule="moments", engine=engine)  # type: ignore[arg-type]
    bnn = lb.bayesianize(start, method, likelihood=lb.Gaussian(std=NOISE), seed=0)
    optimizer: torch.optim.Optimizer
    if engine == "ivon":
        optimizer = lb.IVON(bnn, lr=0.2, num_data=len(x), betas=(0.9, 0.9), keep_std=True)
    else:
        optimizer = torch.optim.Adam(bnn.parameters(), lr=0.02)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 600)
    for _ in range(600):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=len(x), temperature=1).backward()
        optimizer.step()
        rates.step()
    return bnn


@pytest.mark.parametrize("engine", ["backprop", "ivon"])
def test_two_halves_give_the_posterior_of_all_data(engine: str) -> None:
    layer = nn.Linear(FEATURES, 1, bias=False).double()
    (x1, y1), (x2, y2) = halves()
    first = learned(layer, lb.Normal(0.7), x1, y1, engine)
    second = learned(first, lb.Normal.from_posterior(first), x2, y2, engine)
    for bnn, x, y in ((first, x1, y1), (second, torch.cat([x1, x2]), torch.cat([y1, y2]))):
        mean, std = conjugate(x, y, 0.7)
        found = distribution(bnn)
        torch.testing.assert_close(found.loc, mean, atol=2e-3, rtol=0)
        torch.testing.assert_close(found.scale, std, atol=0, rtol=0.01)


def test_a_run_with_such_a_prior_resumes_and_refuses_another_prior(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    first = moved(lb.bayesianize(net(), lb.MeanField()), 1)
    method = lb.MeanField(prior=lb.Normal.from_posterior(first))
    settings: dict[str, Any] = {"epochs": 1, "progress": False, "device": "cpu", "out": tmp_path / "run"}
    second = lb.fit(first, method, data, **settings)
    again = lb.fit(first, method, data, **settings)  # the finished run
    assert again.kl().item() == second.kl().item()
    other = lb.MeanField(prior=lb.Normal.from_posterior(moved(first, 3)))
    with pytest.raises(lb.LeanBayesError, match=r"method\.prior\.digest"):
        lb.fit(first, other, data, **settings)
