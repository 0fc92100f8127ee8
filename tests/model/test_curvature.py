"""The Gauss-Newton matrix against Hessians by autograd, and the Fisher information of each likelihood."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.model.curvature import estimated_diagonal, exact_diagonal, full_matrix
from leanbayes.posteriors import UnfittedPosterior


def seeded(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
    return network.double().eval()


def normals(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS = normals(3, 4)
Y = torch.tensor([0, 3, -100])


def hessian_of_expected_nll(likelihood: lb.Categorical | Any, output: Tensor) -> Tensor:
    """E_y[-∂² log p(y | output)] by autograd, for classes by their exact sum, else by many samples of y."""

    def nll(values: Tensor, y: Tensor) -> Tensor:
        return likelihood.nll(values.expand(len(y), -1), y).total

    if isinstance(likelihood, lb.Categorical):
        hessian = torch.autograd.functional.hessian
        each = [hessian(lambda values, y=y: nll(values, torch.tensor([y])), output) for y in range(4)]
        return torch.einsum("y,yij->ij", output.softmax(0), torch.stack(each))
    if isinstance(likelihood, lb.Bernoulli):
        y = torch.bernoulli(output.sigmoid().expand(10, -1), generator=torch.Generator().manual_seed(0))
    elif isinstance(likelihood, lb.Gaussian):
        y = output + 0.5 * normals(10, len(output))
    else:
        mean, variance = likelihood.split(output)
        y = mean + variance.sqrt() * normals(400_000, len(mean))
    return torch.autograd.functional.hessian(lambda v: nll(v, y), output) / len(y)


@pytest.mark.parametrize(
    ("likelihood", "tolerance"),
    [(lb.Categorical(), 1e-9), (lb.Bernoulli(), 1e-9), (lb.Gaussian(0.5), 1e-9), (lb.HeteroscedasticGaussian(), 2e-2)],
    ids=lambda one: type(one).__name__,
)
def test_the_root_of_the_fisher_information_is_that_of_the_expected_hessian(likelihood: Any, tolerance: float) -> None:
    output = LOGITS[0]
    columns = [likelihood.fisher_root(output[None], torch.zeros(1), unit[None])[0] for unit in torch.eye(4).double()]
    root = torch.stack(columns, 1)
    expected = hessian_of_expected_nll(likelihood, output)
    torch.testing.assert_close(root @ root.mT, expected, atol=tolerance, rtol=tolerance)


def test_ignored_labels_have_no_information() -> None:
    root = lb.Categorical().fisher_root(LOGITS, Y, torch.ones_like(LOGITS))
    assert root[:2].abs().min() > 0
    assert (root[2] == 0).all()


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)),
    "cnn": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 4)),
    "lstm": lambda: Recurrent(),
}


class Recurrent(nn.Module):
    """torch.vmap does not support it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_matrix_is_the_sum_over_examples(name: str) -> None:
    network = seeded(NETWORKS[name]())
    bnn = lb.bayesianize(network, lb.MeanField())
    weights, x = bnn.posterior.mean().detach(), normals(5, 3)
    y = torch.tensor([0, 1, 2, 3, 0])

    def outputs(flat: Tensor) -> Tensor:
        with bnn.holding(flat) as inner:
            return inner(x)

    jacobian = torch.autograd.functional.jacobian(outputs, weights)  # (5, 4, weights)
    probs = network(x).softmax(1)
    fisher = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
    expected = torch.einsum("noa,nop,npb->ab", jacobian, fisher, jacobian).detach()
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    full = full_matrix(bnn, weights, batches)
    torch.testing.assert_close(full.total, expected)
    assert full.examples == 5
    torch.testing.assert_close(exact_diagonal(bnn, weights, batches).total, expected.diagonal())
    index = torch.tensor([1, 4, 7])
    torch.testing.assert_close(full_matrix(bnn, weights, batches, index).total, expected[index][:, index])
    estimate = estimated_diagonal(bnn, weights, batches, probes=4000).total
    torch.testing.assert_close(estimate, expected.diagonal(), rtol=0.2, atol=1e-3)


def test_for_a_linear_network_it_is_the_hessian_of_the_loss() -> None:
    network, x, y = seeded(nn.Linear(3, 4)), normals(6, 3), torch.tensor([0, 1, 2, 3, 1, 1])
    bnn = lb.bayesianize(network, lb.MeanField(), select=".*")
    weights = bnn.posterior.mean().detach()

    def loss(flat: Tensor) -> Tensor:
        weight, bias = bnn.layout.split(flat)
        return F.cross_entropy(x @ weight.T + bias, y, reduction="sum")

    expected = torch.autograd.functional.hessian(loss, weights)
    torch.testing.assert_close(full_matrix(bnn, weights, [(x, y)]).total, expected)


def test_the_model_does_not_change_and_the_estimate_repeats() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    bnn, batches = lb.bayesianize(network.train(), lb.MeanField()), [(normals(6, 3).float(), torch.zeros(6).long())]
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    weights = bnn.posterior.mean().detach()
    one, two = (estimated_diagonal(bnn, weights, iter(batches), 2).total for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, estimated_diagonal(bnn, weights, batches, 2, seed=1).total)
    assert bnn.training
    assert all(torch.equal(before[name], value) for name, value in bnn.state_dict().items())


def test_bad_data_get_one_sentence() -> None:
    bnn = lb.bayesianize(nn.Linear(3, 4), lb.MeanField())
    weights = bnn.posterior.mean().detach()
    for batches, words in (([], "needs data"), ([torch.zeros(2, 3)], "batches \\(x, y\\)")):
        with pytest.raises(lb.LeanBayesError, match=words):
            estimated_diagonal(bnn, weights, batches, 4)
    sequences = nn.Sequential(nn.LSTM(3, 4))
    other = lb.bayesianize(sequences, lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="batch_first=True"):
        exact_diagonal(other, other.posterior.mean(), [(torch.zeros(2, 1, 3), torch.zeros(2).long())])


def test_a_posterior_before_its_fit_has_weights_only() -> None:
    network = nn.Linear(3, 4)
    bnn = lb.bayesianize(network, lb.Laplace())
    assert isinstance(bnn.posterior, UnfittedPosterior)
    assert torch.equal(bnn.to_deterministic().weight, network.weight)  # type: ignore[arg-type]
    for use in (bnn, bnn.predict, lambda x: lb.elbo_loss(bnn, x, torch.zeros(2).long(), num_data=2)):
        with pytest.raises(lb.LeanBayesError, match="not fitted yet"):
            use(torch.zeros(2, 3))
