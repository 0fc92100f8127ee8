"""Sparse variational dropout: its KL against numerical integration, pruning, and files that shrink with it."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import CASES
from prunable_cases import data_of, network_of
from scipy.integrate import quad
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.posteriors import VariationalDropoutPosterior


def posterior_of(bnn: lb.BayesianModel) -> VariationalDropoutPosterior:
    assert isinstance(bnn.posterior, VariationalDropoutPosterior)
    return bnn.posterior


def linear(mean: Tensor, std: Tensor, **settings: Any) -> lb.BayesianModel:
    """A linear layer with one output, these means and these stds."""
    network = nn.Linear(len(mean), 1, bias=False).double()
    bnn = lb.bayesianize(network, lb.SparseVD(**settings), likelihood=lb.Gaussian())
    with torch.no_grad():
        posterior_of(bnn).mu.copy_(mean)
        posterior_of(bnn).rho.copy_(torch.log(torch.expm1(std)))
    return bnn


def exact_kl(log_alpha: float) -> float:
    """-½ log α + E log |1 + √α·ε| by integration, with the constant that makes it 0 for α → ∞."""
    root = math.exp(0.5 * log_alpha)

    def integrand(e: float) -> float:
        return math.exp(-0.5 * e * e) / math.sqrt(2 * math.pi) * math.log(abs(1 + root * e))

    zero = -1 / root  # the logarithm is infinite here
    ends = sorted({-12.0, 12.0, *([zero] if abs(zero) < 12 else [])})
    mean = sum(quad(integrand, a, b, limit=500)[0] for a, b in itertools.pairwise(ends))
    of_a_normal = -0.5 * (math.log(2) + 0.5772156649015329)  # E log |ε|
    return mean - 0.5 * log_alpha - of_a_normal


def test_the_kl_is_the_exact_one_to_the_published_accuracy() -> None:
    """The approximation of the paper was fitted by eye and least squares: it is within 0.02 nats of the integral."""
    for log_alpha in (-8.0, -5.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0):
        mean = torch.tensor([-0.3, 2.0], dtype=torch.float64)
        bnn = linear(mean, mean.abs() * math.exp(0.5 * log_alpha))
        assert bnn.kl().item() == pytest.approx(2 * exact_kl(log_alpha), abs=2 * 0.02)
        log_odds = 1.8732 + 1.48695 * log_alpha  # the formula as the paper prints it
        printed = 0.63576 / (1 + math.exp(-log_odds)) - 0.5 * math.log1p(math.exp(-log_alpha)) - 0.63576
        assert bnn.kl().item() == pytest.approx(-2 * printed, rel=1e-9)


def test_a_mean_of_zero_has_a_finite_gradient() -> None:
    bnn = linear(torch.tensor([0.0, 1e-30], dtype=torch.float64), torch.tensor([0.1, 0.1], dtype=torch.float64))
    kl = bnn.kl()
    kl.backward()
    assert kl.item() == pytest.approx(0.0, abs=1e-12)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters())


def test_outputs_have_the_moments_of_local_reparameterization() -> None:
    """Mean x·μ and variance x²·σ², of many passes by the default rule."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(6, generator=generator, dtype=torch.float64)
    std = torch.rand(6, generator=generator, dtype=torch.float64) + 0.1
    bnn = linear(mean, std)
    assert bnn.rule == "local"
    x = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        outputs = bnn(x.expand(40_000, 6))
    variance = float(x.square() @ std.square())
    assert outputs.mean().item() == pytest.approx(float(x @ mean), abs=5 * math.sqrt(variance / 40_000))
    assert outputs.var().item() == pytest.approx(variance, rel=0.04)


def test_pruned_weights_are_those_with_a_large_log_alpha() -> None:
    """The mean network after pruning is the one before with a mask, and samples of pruned weights are 0."""
    network, x = CASES["cnn"].build().double().eval(), CASES["cnn"].example().double()
    bnn = lb.bayesianize(network, lb.SparseVD(log_alpha=1.0, init_std=0.5)).eval()
    mean, variance = (part.detach().clone() for part in (bnn.posterior.mean(), bnn.posterior.variance()))
    kept = (variance.log() - mean.square().log()) <= 1.0
    assert 0.2 < kept.double().mean() < 0.9
    masked = bnn.to_deterministic()
    with torch.no_grad():
        for slot, part in zip(bnn.layout, bnn.layout.split(torch.where(kept, mean, 0.0)), strict=True):
            masked.get_parameter(slot.name).copy_(part)
    assert posterior_of(bnn).prune() == int(kept.sum())
    torch.testing.assert_close(bnn.posterior.mean(), torch.where(kept, mean, 0.0), rtol=0, atol=0)
    torch.testing.assert_close(bnn.posterior.variance(), torch.where(kept, variance, 0.0))
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(bnn(x), masked(x))
        torch.testing.assert_close(bnn.to_deterministic()(x), masked(x))
    sample = bnn.posterior.sample(bnn.next_draw().key)
    assert (sample[~kept] == 0).all()
    assert (sample[kept] != 0).all()
    before = bnn.kl().item()
    assert posterior_of(bnn).prune() == int(kept.sum())  # nothing more
    assert bnn.kl().item() == before


def test_files_shrink_and_every_rule_predicts_the_same_from_them(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 50))

    sizes, x = [], torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    for limit in (8.0, 0.0, -2.0):
        bnn = lb.bayesianize(build(), lb.SparseVD(log_alpha=limit, init_std=0.5)).eval()
        posterior_of(bnn).prune()
        kept, total = len(posterior_of(bnn).mu), bnn.layout.numel
        path = tmp_path / f"{limit}.safetensors"
        lb.save(bnn, path)
        sizes.append(path.stat().st_size)
        rest = sum(t.numel() * t.element_size() for n, t in bnn.state_dict().items() if not n.startswith("posterior."))
        assert sizes[-1] < 10 * kept + rest + 4000  # two numbers, at most two bytes of a position, and the header
        assert bnn.posterior.size() <= 3 * kept
        assert f"density={kept / total:.3g}" in repr(bnn.posterior)
        other = lb.load(path, build())
        for rule in ("sample", "local", "flipout", "mean", "moments"):
            with bnn.using(rule), other.using(rule):
                probs = [one.predict(x, 3, generator=torch.Generator().manual_seed(0)).probs for one in (bnn, other)]
                assert torch.equal(*probs)
    assert sizes[0] > 1.2 * sizes[1] > 1.4 * sizes[2]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.SparseVD(log_alpha=1.0, init_std=0.5))
    posterior_of(bnn).prune()
    state = posterior_of(bnn).to_file({name: t.detach() for name, t in bnn.posterior.state_dict().items()})
    fresh = lb.bayesianize(CASES["cnn"].build(), lb.SparseVD()).posterior
    assert torch.equal(fresh.from_file(dict(state))["index"], posterior_of(bnn).index)
    with pytest.raises(ValueError, match="positions instead of"):
        fresh.from_file({**state, "mu": state["mu"][1:], "rho": state["rho"][1:]})
    with pytest.raises(ValueError, match="do not fit the network"):
        fresh.from_file({**state, "rho": state["rho"][1:]})


FIT: dict[str, Any] = {"batch_size": 50, "lr": 1e-2, "temperature": 1.0, "progress": False, "seed": 0, "epochs": 60}


def test_fit_prunes_and_keeps_the_accuracy(tmp_path: Path) -> None:
    data = data_of()
    bnn = lb.fit(network_of(32), lb.SparseVD(), data, out=tmp_path / "run", **FIT)
    x, y = data.tensors
    assert (bnn.predict(x).label == y).float().mean() > 0.9
    first = bnn.layout.split(bnn.posterior.mean())[0]
    assert (first[:, 2:] == 0).float().mean() > 0.9  # of the inputs that do not matter
    assert (first[:, :2] != 0).float().mean() > 0.2
    assert bnn.posterior.random_weights < 0.3 * bnn.layout.numel
    loaded = lb.load(tmp_path / "run" / "model.safetensors", network_of(32))
    assert loaded.posterior.random_weights == bnn.posterior.random_weights
    again = lb.fit(network_of(32), lb.SparseVD(), data, out=tmp_path / "run", **FIT)  # from the finished run
    assert torch.equal(again.posterior.mean(), bnn.posterior.mean())


def test_a_loop_of_ones_own_finishes_with_the_hook() -> None:
    method, (x, y) = lb.SparseVD(), data_of().tensors
    bnn = lb.bayesianize(network_of(32), method)
    training = lb.Training(bnn, steps=30, num_data=len(x))
    method.start(training)
    optimizer = torch.optim.Adam(bnn.parameter_groups(), lr=1e-2)
    for training.step in range(30):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=len(x), temperature=1.0).backward()
        optimizer.step()
        method.after_step(training)
    assert len(posterior_of(bnn).mu) == bnn.layout.numel
    method.finish(training)
    assert len(posterior_of(bnn).mu) < bnn.layout.numel
    lb.elbo_loss(bnn, x, y, num_data=len(x)).backward()  # the pruned model can be trained on
    assert posterior_of(bnn).mu.grad is not None


def test_wrong_settings_are_refused() -> None:
    calls: dict[str, Any] = {
        "log_alpha=inf must be": lambda: lb.SparseVD(log_alpha=math.inf),
        "init_std=0.0 must be": lambda: lb.SparseVD(init_std=0.0),
        "samples=0 must be": lambda: lb.SparseVD(samples=0),
    }
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value)
        assert str(error.value).endswith(".")
