"""Mean and variance of the weights are computed once for all passes, until a parameter changes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import leanbayes as lb
from leanbayes.posteriors import MeanFieldPosterior


def _model() -> lb.BayesianModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return lb.bayesianize(net, lb.MeanField(init_std=0.1)).eval()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def _weights(bnn: lb.BayesianModel) -> MeanFieldPosterior:
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    return bnn.posterior


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count how often the variances are computed."""
    found: list[str] = []
    original = MeanFieldPosterior.variance

    def variance(self: MeanFieldPosterior) -> torch.Tensor:
        found.append("variance")
        return original(self)

    monkeypatch.setattr(MeanFieldPosterior, "variance", variance)
    return found


def _step(bnn: lb.BayesianModel) -> None:
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.5)
    lb.elbo_loss(bnn, X, torch.zeros(5, dtype=torch.long), num_data=5).backward()
    optimizer.step()


def _load(bnn: lb.BayesianModel) -> None:
    other = {name: value * 0.5 if value.is_floating_point() else value for name, value in bnn.state_dict().items()}
    bnn.load_state_dict(other)


def _numpy(bnn: lb.BayesianModel) -> None:
    _weights(bnn).rho.detach().numpy()[:] = -1.0


def _fill(bnn: lb.BayesianModel) -> None:
    _weights(bnn).rho.data.fill_(-1.0)  # equal elements before and after: their XOR is 0 both times


def _one(bnn: lb.BayesianModel) -> None:
    _weights(bnn).rho.data[7] += 0.5


def _swap(bnn: lb.BayesianModel) -> None:
    with torch.no_grad():
        _weights(bnn).mu.copy_(_weights(bnn).mu.flip(0))


def _replace(bnn: lb.BayesianModel) -> None:
    _weights(bnn).rho = nn.Parameter(_weights(bnn).rho.detach() + 1)


CHANGES = [
    _step,
    _load,
    _numpy,
    _fill,
    _one,
    _swap,
    _replace,
    lambda bnn: bnn.double(),
    lambda bnn: _weights(bnn).rho.data.add_(1.0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_parameter_is_seen(change: Callable[[lb.BayesianModel], None]) -> None:
    bnn = _model()
    before = bnn.predict(X, rule="moments")
    change(bnn)
    x = X.to(_weights(bnn).mu.dtype)
    fresh = lb.bayesianize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), lb.MeanField())
    fresh.to(x.dtype).load_state_dict(bnn.state_dict())
    now, expected = bnn.predict(x, rule="moments"), fresh.predict(x, rule="moments")
    torch.testing.assert_close(now.probs, expected.probs, rtol=0, atol=0)
    torch.testing.assert_close(now.entropy, expected.entropy, rtol=0, atol=0)
    assert x.dtype == torch.float64 or not torch.equal(now.entropy, before.entropy)


def test_passes_share_the_variances(computed: list[str]) -> None:
    bnn = _model()
    first = bnn.predict(X, rule="moments")
    second = bnn.predict(X, rule="moments")
    with torch.no_grad(), bnn.using("moments"):
        bnn(X)
    assert computed == ["variance"]
    assert torch.equal(first.entropy, second.entropy)
    with bnn.using("moments"):
        bnn(X).variance.sum().backward()  # gradients need their own
    assert computed == ["variance"] * 2
    assert _weights(bnn).rho.grad is not None


def test_copies_and_files_have_no_cache(computed: list[str]) -> None:
    bnn = _model()
    names = list(bnn.state_dict())
    expected = bnn.predict(X, rule="moments")
    assert list(bnn.state_dict()) == names
    for other in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        computed.clear()
        torch.testing.assert_close(other.predict(X, rule="moments").entropy, expected.entropy, rtol=0, atol=0)
        assert computed == ["variance"]
        with torch.no_grad():
            _weights(other).rho.add_(1.0)
        assert not torch.equal(other.predict(X, rule="moments").entropy, expected.entropy)
    assert torch.equal(bnn.predict(X, rule="moments").entropy, expected.entropy)


def test_training_mode_drops_the_cache(computed: list[str]) -> None:
    bnn = _model()
    bnn.predict(X, rule="moments")
    bnn.train()
    bnn.predict(X, rule="moments")
    assert computed == ["variance"] * 2


def test_inference_mode_and_later_passes() -> None:
    bnn = _model()
    with torch.inference_mode():
        first = bnn.predict(X, rule="moments")
    second = bnn.predict(X, rule="moments")
    torch.testing.assert_close(first.probs.clone(), second.probs, rtol=0, atol=0)


def test_a_posterior_with_other_state_is_not_cached() -> None:
    """By default nothing is cached: a posterior may depend on more than its tensors."""

    class Scaled(lb.Posterior):
        scale = 1.0

        def __init__(self, inner: lb.Posterior) -> None:
            super().__init__(inner.layout)
            self.inner = inner

        def mean(self) -> torch.Tensor:
            return self.inner.mean()

        def variance(self) -> torch.Tensor:
            return self.inner.variance() * self.scale

    bnn = _model()
    bnn.posterior = scaled = Scaled(bnn.posterior)
    first = bnn.predict(X, rule="moments")
    scaled.scale = 4.0
    assert not torch.equal(first.entropy, bnn.predict(X, rule="moments").entropy)


def test_a_kernel_that_two_functions_share() -> None:
    """What passes share depends on the function that uses a weight: tied weights of an autoencoder."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(nn.functional.conv2d(x, self.weight, padding=1))
            return nn.functional.conv_transpose2d(y, self.weight, stride=2).flatten(1)

    bnn = lb.bayesianize(Network(), lb.MeanField(init_std=0.1), likelihood=lb.Gaussian()).eval()
    rule = lb.rules.MomentPropagation(maps="independent")
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    with bnn.using(rule):
        expected = bnn(x)  # with gradients nothing is shared
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(bnn(x).variance, expected.variance.detach())
        with torch.no_grad():
            _weights(bnn).rho.add_(1.0)
        expected = bnn(x)
        with torch.no_grad():
            torch.testing.assert_close(bnn(x).variance, expected.variance.detach())


def test_weights_are_compared_behind_the_pass() -> None:
    """On a GPU the pass runs while Python starts the kernels that compare them."""
    bnn, x = lb.bayesianize(nn.Linear(3, 2), lb.MeanField()).eval(), torch.randn(4, 3)
    bnn.predict(x, rule="moments")
    order: list[str] = []

    class Order(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in ("addmm", "linear"):
                order.append("pass")
            elif name == "sum" and args[0].dtype == torch.int32:  # the bits of the weights
                order.append("compared")
            return func(*args, **(kwargs or {}))

    with Order():
        bnn.predict(x, rule="moments")
    assert order.count("compared") == 2
    assert order.index("compared") > order.index("pass")
