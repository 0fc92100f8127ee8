"""The largest std within a tolerance: against the closed form of linear regression, and on real adapters."""

import copy
from typing import Any

import peft
import pytest
import torch
from network_cases import seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.data import from_datasets


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = normals(64, 3), torch.arange(64) % 2
NETWORK = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))()
FAR = [(1e3 * X, normals(64, 1))]
BATCHES = [(X[:32], Y[:32]), (X[32:], Y[32:])]


def expected_loss(bnn: lb.BayesianModel, samples: int = 4000) -> float:
    """The loss by many samples of the weights."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        outputs = bnn.predict(X, samples, generator=generator, keep_outputs=True).outputs
        assert outputs is not None
        return nn.functional.cross_entropy(outputs.movedim(0, -1), Y[:, None].expand(-1, samples)).item()


@pytest.mark.parametrize("relative", [True, False])
def test_linear_regression_has_a_closed_form(relative: bool) -> None:
    """With noise f·s on the weights, the expected loss rises by ½ f² Σ_i s_i² mean(x_i²) / noise²."""
    network: Any = seeded(lambda: nn.Linear(3, 1, bias=False))().double()
    x = normals(5000, 3, seed=1).double()
    y = network(x).detach() + 0.5 * normals(5000, 1, seed=2)
    method = lb.StdSearch(tolerance=0.02, relative=relative, draws=400)
    bnn = lb.bayesianize(network, method, data=[(x, y)], likelihood=lb.Gaussian(0.5))
    scale = network.weight.detach().std() if relative else 1.0
    expected = (0.02 * 2 * 0.25 / x.square().mean(0).sum()).sqrt() / scale
    found = bnn.posterior.variance().sqrt().mean() / scale
    assert found.item() == pytest.approx(expected.item(), rel=0.06)
    assert torch.equal(bnn.posterior.mean(), network.weight.flatten())


def test_the_loss_is_within_the_tolerance_and_a_larger_std_is_not() -> None:
    plain = nn.functional.cross_entropy(NETWORK(X), Y).item()
    found = [lb.bayesianize(NETWORK, lb.StdSearch(t, max_std=16.0, draws=50), data=BATCHES) for t in (0.01, 0.1)]
    assert expected_loss(found[0]) == pytest.approx(plain + 0.01, abs=0.004)
    assert expected_loss(found[1]) == pytest.approx(plain + 0.1, abs=0.03)
    assert (found[1].posterior.variance() > found[0].posterior.variance()).all()
    larger: Any = copy.deepcopy(found[0])
    larger.posterior.rho.data += 0.5
    assert expected_loss(larger) > plain + 0.012


def test_a_std_is_at_most_the_largest_one() -> None:
    bnn = lb.bayesianize(NETWORK, lb.StdSearch(tolerance=10.0, relative=False, max_std=0.03), data=BATCHES)
    assert bnn.posterior.variance().max().sqrt().item() == pytest.approx(0.03, rel=0.02)


def test_the_search_repeats() -> None:
    one, two = (lb.bayesianize(NETWORK, lb.StdSearch(), data=iter(BATCHES)).posterior.variance() for _ in range(2))
    assert torch.equal(one, two)


def test_an_adapter_of_peft() -> None:
    base = copy.deepcopy(NETWORK)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    bnn = lb.bayesianize(adapted, lb.StdSearch(0.02, max_std=16.0, draws=50), data=BATCHES, select="lora_A")
    assert {slot.name.split(".")[-3] for slot in bnn.layout} == {"lora_A"}
    assert bnn.posterior.random_weights == 2 * 3 + 2 * 8
    plain = nn.functional.cross_entropy(adapted.eval()(X), Y).item()
    assert expected_loss(bnn) == pytest.approx(plain + 0.02, abs=0.008)
    assert bnn.predict(X).mutual_information.max() > 0


def test_fit_uses_the_held_out_split() -> None:
    data = from_datasets(TensorDataset(X[:48], Y[:48]), TensorDataset(X[48:], Y[48:]))
    bnn = lb.fit(NETWORK, lb.StdSearch(pretrain=False), data, progress=False, device="cpu")
    direct = lb.bayesianize(NETWORK, lb.StdSearch(), data=[(X[48:], Y[48:])])
    torch.testing.assert_close(bnn.posterior.variance(), direct.posterior.variance())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lb.StdSearch(tolerance=0.0), "positive"),
        (lambda: lb.StdSearch(draws=0), "at least 1"),
        (lambda: lb.StdSearch(max_std=-1.0), "positive"),
        (lambda: lb.bayesianize(NETWORK, lb.StdSearch(), data=[]), "needs data"),
        (
            lambda: lb.bayesianize(nn.Linear(3, 1), lb.StdSearch(), data=FAR, likelihood=lb.Gaussian(1e-9)),
            "increase it",
        ),
        (lambda: lb.bayesianize(NETWORK, lb.StdSearch()).predict(X), "not fitted yet"),
    ],
)
def test_mistakes_get_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=words):
        call()
