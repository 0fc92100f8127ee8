"""The Laplace approximation against closed forms: Bayesian linear regression, its evidence, and Hessians."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.data import from_datasets
from leanbayes.model.validation_nll import validation_nll
from leanbayes.posteriors import FullPosterior, MeanFieldPosterior, PartialPosterior
from leanbayes.training.record import read_record

NOISE = 0.3


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regression() -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear network at the maximum of the likelihood, with its data."""
    x = normals(40, 3)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]], dtype=torch.float64) + NOISE * normals(40, 1, seed=1)
    network = nn.Linear(3, 1, bias=False).double()
    network.weight.data = torch.linalg.lstsq(x, y).solution.T
    return network, x, y


def classes() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small trained network on three noisy clusters."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    x = torch.randn(120, 4, generator=generator) + 1.2 * torch.eye(4)[y]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(100):
        loss = nn.functional.cross_entropy(network(x[:90]), y[:90])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network, [(x[:30], y[:30]), (x[30:90], y[30:90]), (x[90:], y[90:])]


NETWORK, BATCHES = classes()
TRAIN, HELD_OUT = BATCHES[:2], BATCHES[2:]


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_full_covariance_is_that_of_bayesian_linear_regression() -> None:
    network, x, y = regression()
    method = lb.Laplace(covariance="full", prior=lb.Normal(2.0))
    bnn = lb.bayesianize(network, method, data=[(x[:10], y[:10]), (x[10:], y[10:])], likelihood=lb.Gaussian(NOISE))
    expected = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(3) / 4)
    assert isinstance(bnn.posterior, FullPosterior)
    torch.testing.assert_close(bnn.posterior.root @ bnn.posterior.root.mT, expected)
    torch.testing.assert_close(bnn.posterior.variance(), expected.diagonal())
    found = bnn.predict(x[:5], 20_000, generator=torch.Generator().manual_seed(0))
    wanted = (x[:5] @ expected * x[:5]).sum(1, keepdim=True)
    torch.testing.assert_close(found.epistemic_variance, wanted, rtol=0.05, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_a_diagonal_is_the_inverse_of_the_curvature(temperature: float) -> None:
    network, x, y = regression()
    method = lb.Laplace(estimate="exact", prior=lb.Normal(2.0), temperature=temperature)
    bnn = lb.bayesianize(network, method, data=[(x, y)], likelihood=lb.Gaussian(NOISE))
    expected = 1 / (x.square().sum(0) / NOISE**2 / temperature + 1 / 4)
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    torch.testing.assert_close(bnn.posterior.variance().detach(), expected)
    assert torch.equal(bnn.posterior.mean(), network.weight.flatten())
    linearized = bnn.predict(x[:4], rule="adjoint").epistemic_variance
    torch.testing.assert_close(linearized, x[:4].square() @ expected[:, None])


def test_the_prior_maximizes_the_evidence_of_linear_regression() -> None:
    network, x, y = regression()
    bnn = lb.bayesianize(network, lb.Laplace(covariance="full"), data=[(x, y)], likelihood=lb.Gaussian(NOISE))
    grid = torch.logspace(-3, 3, 601, dtype=torch.float64)

    def evidence(precision: Tensor) -> Tensor:
        """log N(y; 0, noise² + x·xᵀ/δ), which for a quadratic loss around its minimum has the same maximum."""
        covariance = NOISE**2 * torch.eye(40, dtype=torch.float64) + x @ x.T / precision
        zero = torch.zeros(40, dtype=torch.float64)
        return torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0])

    # At the minimum of the loss w*, the Laplace evidence has δ‖w*‖² where the exact one has the posterior mean.
    expected = grid[torch.stack([evidence(one) for one in grid]).argmax()]
    found = bnn.posterior.prior.normal_terms().scale ** -2  # type: ignore[union-attr, operator]
    assert found == pytest.approx(float(expected), rel=0.15)


def test_the_marginal_likelihood_of_a_diagonal() -> None:
    bnn = lb.bayesianize(NETWORK, lb.Laplace(estimate="exact"), data=TRAIN)
    scale = bnn.posterior.prior.normal_terms().scale  # type: ignore[union-attr, operator]
    curvature = bnn.posterior.variance().detach().double().reciprocal() - scale**-2
    weights = bnn.posterior.mean().detach().double()

    def evidence(precision: float) -> Tensor:
        prior = torch.distributions.Normal(0.0, precision**-0.5)
        posterior = torch.distributions.Normal(weights, (curvature + precision).rsqrt())
        return (prior.log_prob(weights) - posterior.log_prob(weights)).sum()  # log p(w*) + log of the Gaussian integral

    best = evidence(scale**-2)
    assert best >= max(evidence(scale**-2 * factor) for factor in (0.5, 0.8, 1.25, 2.0))


# -- held-out data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"rate": 0.3}, {"over": "last-layer", "covariance": "full"}], ids=str)
def test_choose_prior_takes_the_best_held_out_likelihood(settings: dict[str, Any]) -> None:
    bnn = lb.bayesianize(NETWORK, lb.Laplace(**settings), data=TRAIN)
    before = bnn.posterior.variance().detach().double()
    old = bnn.posterior.prior.normal_terms().scale ** -2  # type: ignore[union-attr, operator]
    found = lb.choose_prior(bnn, iter(HELD_OUT))
    assert bnn.posterior.prior.normal_terms().scale == pytest.approx(found**-0.5)  # type: ignore[union-attr, operator]
    best = validation_nll(bnn, HELD_OUT, 10)
    after = bnn.posterior.variance().detach().double()
    if "covariance" not in settings:
        random = before > 0
        expected = 1 / (1 / before[random] - old + found)
        torch.testing.assert_close(after[random], expected, rtol=1e-4, atol=1e-12)
    for factor in (10.0, 0.1) if 1e-2 < found < 1e7 else ():
        fixed = lb.Laplace(**settings, prior=lb.Normal((found * factor) ** -0.5))
        assert best <= validation_nll(lb.bayesianize(NETWORK, fixed, data=TRAIN), HELD_OUT, 10) + 1e-6


def test_choose_prior_by_one_pass() -> None:
    bnn = lb.bayesianize(NETWORK, lb.Laplace(rule="adjoint"), data=TRAIN)
    assert lb.choose_prior(bnn, HELD_OUT) > 0


# -- subsets ----------------------------------------------------------------------------------------------------------


def test_a_subnetwork_by_variance_or_sensitivity() -> None:
    exact = lb.bayesianize(NETWORK, lb.Laplace(estimate="exact", prior=lb.Normal(1.0)), data=TRAIN).posterior
    method = lb.Laplace(rate=0.25, estimate="exact", prior=lb.Normal(1.0))
    partial = lb.bayesianize(NETWORK, method, data=TRAIN).posterior
    assert isinstance(partial, PartialPosterior)
    number = exact.layout.numel // 4
    expected = exact.variance().topk(number).indices.sort().values
    assert partial.index.tolist() == expected.tolist()
    torch.testing.assert_close(partial.std(), exact.variance()[expected].sqrt())
    scores = lb.sensitivity(NETWORK, TRAIN)
    method = lb.Laplace(rate=0.25, subnetwork="jacobian", covariance="full")
    full = lb.bayesianize(NETWORK, method, data=TRAIN).posterior
    assert isinstance(full, FullPosterior)
    assert full.index.tolist() == scores.top(0.25).tolist()


def test_the_last_layer_has_its_bias() -> None:
    bnn = lb.bayesianize(NETWORK, lb.Laplace(over="last-layer", covariance="full"), data=TRAIN)
    assert [slot.name for slot in bnn.layout] == ["2.weight", "2.bias"]
    chosen = lb.bayesianize(NETWORK, lb.Laplace(over="last-layer"), data=TRAIN, select="0.weight")
    assert [slot.name for slot in chosen.layout] == ["0.weight"]


@pytest.mark.parametrize("rule", ["local", "flipout", "moments", "adjoint"])
def test_a_full_covariance_predicts_by_samples_only(rule: str) -> None:
    bnn = lb.bayesianize(NETWORK, lb.Laplace(over="last-layer", covariance="full"), data=TRAIN)
    with pytest.raises(lb.LeanBayesError, match=r"correlated|independent"):
        bnn.predict(HELD_OUT[0][0], rule=rule)


# -- language models --------------------------------------------------------------------------------------------------


def test_an_adapter_of_a_language_model() -> None:
    """The labels of a causal language model are shifted, and those at padding do not count."""
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = transformers.GPT2LMHeadModel(config).eval()
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    ids = torch.randint(3, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 4:] = -100
    method = lb.Laplace(prior=lb.Normal(1.0), estimate="exact")
    bnn = lb.bayesianize(adapted, method, data=[({"input_ids": ids}, labels)], select="lora_B")
    assert isinstance(bnn.likelihood, lb.CausalLM)
    assert all("lora_B" in slot.name for slot in bnn.layout)
    assert bnn.posterior.variance().max() <= 1.0
    assert bnn.posterior.variance().min() < 0.999
    # Padding after the last label changes nothing, because attention is causal.
    short = lb.bayesianize(adapted, method, data=[({"input_ids": ids[:, :4]}, ids[:, :4])], select="lora_B")
    torch.testing.assert_close(bnn.posterior.variance(), short.posterior.variance(), rtol=1e-4, atol=1e-6)
    estimated = lb.Laplace(prior=lb.Normal(1.0), probes=2000)
    close = lb.bayesianize(adapted, estimated, data=[({"input_ids": ids}, labels)], select="lora_B")
    torch.testing.assert_close(close.posterior.variance(), bnn.posterior.variance(), rtol=0.1, atol=1e-3)
    assert bnn.predict({"input_ids": ids}, 3).probs.shape == (4, 6, 20)


# -- training ---------------------------------------------------------------------------------------------------------


def train_set() -> Any:
    x, y = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))
    return from_datasets(TensorDataset(x[:90], y[:90]), TensorDataset(x[90:], y[90:]))


def test_fit_trains_the_plain_network_and_then_the_posterior(tmp_path: Path) -> None:
    settings: Any = {"epochs": 3, "progress": False, "refresh_batchnorm": False, "device": "cpu"}
    plain = lb.fit(NETWORK, lb.Deterministic(), train_set(), **settings)
    bnn = lb.fit(NETWORK, lb.Laplace(prior_from="held-out"), train_set(), out=tmp_path, **settings)
    expected = plain.to_deterministic()
    for ours, theirs in zip(bnn.to_deterministic().parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert bnn.posterior.variance().min() > 0
    record = read_record(tmp_path)
    assert record["status"] == "finished"
    assert record["costs"]["train_seconds"] > 0
    again = lb.fit(NETWORK, lb.Laplace(prior_from="held-out"), train_set(), out=tmp_path, **settings)
    assert torch.equal(again.posterior.variance(), bnn.posterior.variance())


def test_fit_from_a_trained_network_takes_no_step(tmp_path: Path) -> None:
    method = lb.Laplace(pretrain=False, prior=lb.Normal(0.5), probes=64)
    bnn = lb.fit(NETWORK, method, train_set(), out=tmp_path, progress=False, device="cpu")
    assert torch.equal(bnn.posterior.mean(), torch.cat([NETWORK[0].weight.flatten(), NETWORK[2].weight.flatten()]))  # type: ignore[index]
    assert bnn.posterior.variance().max() < 0.25
    assert read_record(tmp_path)["history"] == []
    loaded = lb.load(tmp_path / "model.safetensors", NETWORK)
    assert torch.equal(loaded.posterior.variance(), bnn.posterior.variance())
    assert not lb.fit(NETWORK, method, train_set(), out=tmp_path, progress=False, device="cpu").training


@pytest.mark.parametrize("batch_size", [64, 30])
def test_fit_uses_all_training_examples(batch_size: int) -> None:
    method = lb.Laplace(pretrain=False, prior=lb.Normal(0.5), estimate="exact")
    fitted = lb.fit(NETWORK, method, train_set(), batch_size=batch_size, progress=False, device="cpu")
    expected = lb.bayesianize(NETWORK, method, data=TRAIN)
    torch.testing.assert_close(fitted.posterior.variance(), expected.posterior.variance())


def test_a_resumed_run_fits_the_posterior_again(tmp_path: Path) -> None:
    settings: Any = {"epochs": 2, "progress": False, "device": "cpu", "checkpoint_steps": 1}
    whole = lb.fit(NETWORK, lb.Laplace(), train_set(), **settings)

    class Stop(Exception):
        pass

    def stop(step: int, values: dict[str, float]) -> None:
        if any(name.startswith("final") for name in values):
            raise Stop

    with pytest.raises(Stop):
        lb.fit(NETWORK, lb.Laplace(), train_set(), out=tmp_path, on_log=stop, **settings)
    resumed = lb.fit(NETWORK, lb.Laplace(), train_set(), out=tmp_path, **settings)
    assert torch.equal(resumed.posterior.variance(), whole.posterior.variance())


# -- mistakes ---------------------------------------------------------------------------------------------------------


Y = torch.zeros(1).long()
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "rate": (lambda: lb.Laplace(rate=0.0), "above 0"),
    "probes": (lambda: lb.Laplace(probes=0), "at least 1"),
    "temperature": (lambda: lb.Laplace(temperature=0.0), "positive"),
    "prior": (lambda: lb.Laplace(prior=lb.ScaleMixture()), "Gaussian prior"),
    "rule": (lambda: lb.Laplace(covariance="full", rule="local"), "by samples"),
    "too large": (
        lambda: lb.bayesianize(nn.Linear(200, 200), lb.Laplace(covariance="full"), data=[(torch.ones(1, 200), Y)]),
        "40,000 weights",
    ),
    "held-out": (lambda: lb.bayesianize(NETWORK, lb.Laplace(prior_from="held-out"), data=TRAIN), "lb.choose_prior"),
    "other method": (lambda: lb.choose_prior(lb.bayesianize(NETWORK, lb.MeanField()), HELD_OUT), "lb.Laplace"),
    "fixed prior": (
        lambda: lb.choose_prior(
            lb.bayesianize(NETWORK, lb.Laplace(prior=lb.Normal(1.0)), data=TRAIN), HELD_OUT
        ),
        "auto",
    ),
    "no layer": (lambda: lb.bayesianize(nn.Conv2d(1, 1, 1), lb.Laplace(over="last-layer")), "no linear layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_one_sentence(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(lb.LeanBayesError) as error:
        call()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
