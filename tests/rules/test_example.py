"""The rule `example`: the output of each example is that of the network with its own sample of the weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.model.draw import Draw
from leanbayes.posteriors import GroupNoisePosterior


class Attention(nn.Module):
    """Attention, whose weight is cut into those of queries, keys and values."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Product(nn.Module):
    """A product by operators, with a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.T


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), (5, 8)),
    "one input": (lambda: nn.Linear(1, 4), (5, 1)),
    "tokens": (lambda: nn.Linear(8, 6), (5, 7, 8)),
    "merged tokens": (lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 6), nn.Unflatten(0, (5, 7))), (5, 7, 8)),
    "product": (Product, (5, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3)), (5, 1, 7, 7)),
    "convolution in groups": (lambda: nn.Conv2d(8, 4, 3, groups=2), (5, 8, 7, 7)),
    "depthwise convolution": (lambda: nn.Conv1d(8, 8, 3, groups=8), (5, 8, 9)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (5, 4, 5, 5)),
    "attention": (lambda: Attention(True), (5, 7, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pruned", [False, True])
def test_each_example_has_its_own_sample_of_the_weights(name: str, pruned: bool) -> None:
    build, shape = CASES[name]
    bnn = lb.bayesianize(build().double(), lb.SBP(), likelihood=lb.Gaussian()).eval()
    posterior = bnn.posterior
    assert isinstance(posterior, GroupNoisePosterior)
    with torch.no_grad():  # noise of different sizes
        posterior.distance.copy_(torch.linspace(-0.5, 0.6, posterior.groups))
        posterior.rho.copy_(torch.linspace(-0.5, 0.3, posterior.groups).flip(0))
    if pruned and posterior.groups > 4:
        posterior.snr = (posterior.mean().square() / posterior.variance()).nanmedian().sqrt().item()
        assert 0 < posterior.prune() < posterior.groups
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    key = noise.make_key(7)
    with torch.no_grad():
        weights, slot_groups, sample = posterior.group_factors()
        factors = sample(key, 5)
        assert (factors - factors[0]).abs().amax() > 1e-3
        expected = []
        for number, row in enumerate(factors):
            each = [part * row[groups] for part, groups in zip(
                bnn.layout.split(weights), slot_groups, strict=True
            )]  # fmt: skip
            with bnn.with_values(each) as network:
                # Five copies, because a network may need that many examples.
                expected.append(network(x[number].expand(shape).clone())[number])
        torch.testing.assert_close(bnn(x, _draw=Draw(key)), torch.stack(expected))


def test_factors_have_the_moments_of_the_posterior() -> None:
    bnn = lb.bayesianize(nn.Linear(4, 3, bias=False).double(), lb.SBP(init_std=0.5), likelihood=lb.Gaussian()).eval()
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).expand(40_000, 4)
    with torch.no_grad():
        outputs = bnn(x)
        mean, variance = (part.view(3, 4) for part in (bnn.posterior.mean(), bnn.posterior.variance()))
        expected = mean @ x[0], variance @ x[0].square()
    torch.testing.assert_close(
        outputs.mean(0), expected[0], atol=float(5 * (expected[1].max() / 40_000).sqrt()), rtol=0.0
    )
    torch.testing.assert_close(outputs.var(0), expected[1], rtol=0.05, atol=0.0)


def test_what_has_no_formula_is_refused() -> None:
    x = torch.ones(4, 6)
    calls: dict[str, Callable[[], object]] = {
        "The rule 'example' is for groups": lambda: lb.bayesianize(nn.Linear(6, 2), lb.MeanField()).predict(
            x, rule="example"
        ),
        "cannot tell which of 4 examples the 6 rows": lambda: lb.bayesianize(
            nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Flatten(0, 1), nn.Unflatten(0, (6, 4)), nn.Flatten(1, 2),
                          nn.Linear(4, 2)), lb.SBP()
        )(x),
        "no formula for": lambda: lb.bayesianize(nn.LSTM(6, 3, batch_first=True), lb.SBP(), likelihood=lb.Gaussian())(
            x[None]
        ),
    }  # fmt: skip
    for expected, call in calls.items():
        with pytest.raises(lb.LeanBayesError) as error:
            call()
        assert expected in str(error.value), str(error.value)
        assert str(error.value).endswith(".")
