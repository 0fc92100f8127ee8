"""Kronecker factors of the Laplace approximation, where they are exact, against sums by hand, and laplace-torch."""

from typing import Any

import pytest
import torch
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.model.curvature import full_matrix
from leanbayes.model.kronecker_curvature import kronecker_factors
from leanbayes.posteriors import KroneckerPosterior

EXACT: dict[str, Any] = {"covariance": "kronecker", "estimate": "exact"}


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()


def covariance_of(posterior: Any) -> Tensor:
    """Return the covariance of all weights, from the matrices of the file."""
    blocks, start = [], 0
    for number, slot in enumerate(posterior.layout):
        u, v = getattr(posterior, f"left_{number}"), getattr(posterior, f"right_{number}")
        variance = posterior.std[start : start + slot.numel].square()
        vectors = torch.kron(u, v)
        blocks.append(vectors @ torch.diag(variance) @ vectors.mT)
        start += slot.numel
    return torch.block_diag(*blocks)


def fitted(network: nn.Module, x: Tensor, y: Tensor, likelihood: Any = None, **settings: Any) -> lb.BayesianModel:
    method = lb.Laplace(**{**EXACT, "prior": lb.Normal(0.7), **settings})
    return lb.bayesianize(network, method, data=[(x[:4], y[:4]), (x[4:], y[4:])], likelihood=likelihood)


def test_a_linear_regression_is_exact() -> None:
    """All examples have the same Gauss-Newton matrix of the outputs, so the product is that of all weights."""
    x, y = normals(9, 3), normals(9, 2, seed=1)
    bnn = fitted(nn.Linear(3, 2, bias=False).double(), x, y, lb.Gaussian(0.3), temperature=0.5)
    precision = torch.kron(torch.eye(2), x.T @ x / 0.3**2) / 0.5 + torch.eye(6) / 0.7**2
    torch.testing.assert_close(covariance_of(bnn.posterior), torch.linalg.inv(precision))
    with torch.no_grad():
        output = bnn.predict(x, 20_000, generator=torch.Generator().manual_seed(0)).epistemic_variance
    part = torch.linalg.inv(precision)[:3, :3]
    torch.testing.assert_close(output[:, 0], (x @ part * x).sum(1), rtol=0.06, atol=0)


def test_one_example_is_exact_in_every_layer() -> None:
    x, y = normals(1, 3), torch.tensor([1])
    network = mlp()
    method = lb.Laplace(**EXACT, prior=lb.Normal(0.7))
    bnn = lb.bayesianize(network, method, data=[(x, y)], select=lambda name, parameter: True)
    expected = full_matrix(bnn, bnn.posterior.mean().detach(), [(x, y)]).total
    found = torch.linalg.inv(covariance_of(bnn.posterior)) - torch.eye(len(expected)) / 0.7**2
    start = 0
    for slot in bnn.layout:
        part = slice(start, start + slot.numel)
        torch.testing.assert_close(found[part, part], expected[part, part])
        start = part.stop


def test_factors_are_sums_over_examples_and_patches() -> None:
    """A = the mean of a aᵀ, and B = the sum of g gᵀ, by loops over examples, patches and outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1))
        network = nn.Sequential(conv, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 3)).double()
    x, y = normals(4, 2, 5, 4), torch.tensor([0, 2, 1, 1])
    bnn = lb.bayesianize(network, lb.Laplace(**EXACT), select=["0.weight", "0.bias"])
    weight, bias = kronecker_factors(bnn, bnn.posterior.mean().detach(), [(x[:1], y[:1]), (x[1:], y[1:])], None)
    inputs, outputs, count = torch.zeros(12, 12), torch.zeros(3, 3), 0
    padded = nn.functional.pad(x, (0, 0, 1, 1))
    for image in range(4):
        hidden = network[0](x[image : image + 1]).detach().requires_grad_()
        logits = network[3](network[2](hidden.relu()))[0]
        probs = logits.softmax(0).detach()
        root = torch.diag(probs.sqrt()) - torch.outer(probs, probs.sqrt())  # root·rootᵀ = diag(p) - p pᵀ
        torch.testing.assert_close(root @ root.T, torch.diag(probs) - torch.outer(probs, probs))
        gradients = [torch.autograd.grad(logits @ root[:, c], hidden, retain_graph=True)[0][0] for c in range(3)]
        for i in range(hidden.shape[2]):
            for j in range(hidden.shape[3]):
                patch = padded[image, :, i : i + 5 : 2, 2 * j : 2 * j + 2].flatten()
                inputs, count = inputs + torch.outer(patch, patch), count + 1
                outputs = outputs + sum(torch.outer(g[:, i, j], g[:, i, j]) for g in gradients)
    torch.testing.assert_close(weight.inputs, inputs / count)
    for found in (weight.outputs, bias.outputs):
        torch.testing.assert_close(found, outputs)
    assert bias.inputs.tolist() == [[1.0]]


def test_probes_estimate_the_exact_factors() -> None:
    network, x, y = mlp(), normals(40, 3), torch.arange(40) % 3
    bnn = lb.bayesianize(network, lb.Laplace(**EXACT))
    weights = bnn.posterior.mean().detach()
    exact, enough = (kronecker_factors(bnn, weights, [(x, y)], probes) for probes in (None, 3))
    for one, other in zip(exact, enough, strict=True):  # not fewer than outputs: then those are taken
        torch.testing.assert_close(one.outputs, other.outputs)
    batches = [(x, y)] * 400
    close = kronecker_factors(bnn, weights, batches, 1)
    for one, other in zip(exact, close, strict=True):
        torch.testing.assert_close(other.outputs / 400, one.outputs, rtol=0.1, atol=0.05 * float(one.outputs.max()))
        torch.testing.assert_close(other.inputs, one.inputs)


def test_kl_variance_and_samples_are_those_of_the_covariance() -> None:
    bnn = fitted(mlp(), normals(12, 3), torch.arange(12) % 3, prior=lb.Normal("std", center="pretrained"))
    posterior, covariance = bnn.posterior, covariance_of(bnn.posterior)
    assert isinstance(posterior, KroneckerPosterior)
    torch.testing.assert_close(posterior.variance(), covariance.diagonal())
    terms = posterior.prior.normal_terms()
    assert terms is not None
    assert terms.loc is not None
    p = torch.distributions.MultivariateNormal(terms.loc, torch.diag(torch.as_tensor(terms.scale) ** 2))
    q = torch.distributions.MultivariateNormal(posterior.mean(), covariance)
    torch.testing.assert_close(bnn.kl(), torch.distributions.kl_divergence(q, p))
    keys = [bnn.next_draw(torch.Generator().manual_seed(seed)).key for seed in range(4000)]
    with torch.no_grad():
        samples = torch.stack([posterior.sample(key) for key in keys])
    largest = covariance.diagonal().max()
    torch.testing.assert_close(samples.T.cov() / largest, covariance / largest, rtol=0, atol=0.08)
    torch.testing.assert_close(samples.mean(0), posterior.mean().detach(), rtol=0, atol=0.08 * float(largest.sqrt()))


def test_the_prior_maximizes_the_marginal_likelihood_and_can_be_chosen_again() -> None:
    x, y = normals(60, 3), torch.arange(60) % 3
    bnn = fitted(mlp(), x, y, prior=lb.Normal("auto"))
    scale = bnn.posterior.prior.normal_terms().scale  # type: ignore[union-attr, operator]
    weights, curvature = bnn.posterior.mean().detach(), torch.linalg.inv(covariance_of(bnn.posterior))
    curvature = curvature - torch.eye(len(weights)) * scale**-2

    def evidence(precision: float) -> Tensor:
        eye = torch.eye(len(weights), dtype=torch.float64)
        p = torch.distributions.MultivariateNormal(torch.zeros_like(weights), eye / precision)
        q = torch.distributions.MultivariateNormal(weights, precision_matrix=curvature + precision * eye)
        return p.log_prob(weights) - q.log_prob(weights)

    assert evidence(scale**-2) >= max(evidence(scale**-2 * factor) for factor in (0.5, 0.8, 1.25, 2.0))
    found = lb.choose_prior(bnn, [(normals(20, 3, seed=5), torch.arange(20) % 3)])
    changed = torch.linalg.inv(covariance_of(bnn.posterior)) - torch.eye(len(weights)) * found
    torch.testing.assert_close(changed, curvature, rtol=1e-3, atol=1e-5 * found)


def test_layers_without_factors_are_one_sentence() -> None:
    for name, words in (("vit_mha", "in_proj_weight"), ("cnn", "4.weight"), ("lstm", "lstm.weight")):
        network, x = CASES[name].build(), CASES[name].example()
        with pytest.raises(lb.UnsupportedOperation, match=words):
            lb.bayesianize(network, lb.Laplace(covariance="kronecker"), data=[(x, torch.zeros(len(x)).long())])
        last = lb.Laplace("last-layer", "kronecker")
        bnn = lb.bayesianize(network, last, data=[(x, torch.zeros(len(x)).long())])
        assert bnn.posterior.size() < 1000 + 3 * bnn.layout.numel
    for settings in ({"rate": 0.5}, {"rule": "local"}):
        with pytest.raises(lb.LeanBayesError, match="covariance='kronecker'"):
            lb.Laplace(covariance="kronecker", **settings)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_laplace_torch_has_the_same_covariance(likelihood: Any) -> None:
    laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    network, x = mlp().float(), normals(24, 3).float()
    y = torch.arange(24) % 3 if likelihood == "classification" else normals(24, 3, seed=2).float()
    theirs = laplace.Laplace(network, likelihood, "all", "kron", prior_precision=2.0)
    theirs.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=24))
    ours = lb.Laplace(**EXACT, prior=lb.Normal(2.0**-0.5))
    kind = lb.Gaussian(1.0) if likelihood == "regression" else None
    bnn = lb.bayesianize(network, ours, data=[(x, y)], select=lambda name, parameter: True, likelihood=kind)
    wanted = theirs.posterior_precision.to_matrix()
    torch.testing.assert_close(torch.linalg.inv(covariance_of(bnn.posterior)), wanted, rtol=1e-3, atol=1e-3)
