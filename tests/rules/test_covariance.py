"""Full covariances against exact values from Jacobians and against weight samples, and unsupported operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.noise import NoiseSource, make_key
from leanbayes.errors import UnsupportedOperation
from leanbayes.networks import build
from leanbayes.rules.covariance import Covariances, CovarianceWeight, covariance_shape

SAMPLES = 100_000


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_value(*shape: int) -> Any:
    """Return a value with correlations between all elements that may be correlated."""
    root = 0.5 * rand(*covariance_shape(shape), seed=1)
    return Covariances(rand(*shape, seed=2), root @ root.mT)


def random_weight(*shape: int, seed: int = 3) -> Any:
    return CovarianceWeight(
        rand(*shape, seed=seed), 0.3 * rand(*shape, seed=seed + 10).square(), NoiseSource(make_key(0)), "weight"
    )


def value_samples(x: Any) -> Tensor:
    """Sample the only example of a value: (samples, *shape)."""
    root = torch.linalg.cholesky(x.covariance[0])
    noise = torch.randn(SAMPLES, *root.shape[:-1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x.loc + (root @ noise).reshape(SAMPLES, *x.shape[1:])


def weight_samples(w: Any) -> Tensor:
    noise = torch.randn(SAMPLES, *w.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return w.loc + w.noise_part.sqrt() * noise


def assert_covariance(covariance: Tensor, samples: Tensor, errors: float = 6) -> None:
    """Compare a covariance (n, n) with that of samples (samples, n), up to a number of standard errors."""
    centered = samples - samples.mean(0)
    products = centered[:, :, None] * centered[:, None, :]
    assert ((products.mean(0) - covariance).abs() <= errors * products.std(0) / len(samples) ** 0.5).all()


def test_linear_layer_agrees_with_samples() -> None:
    x, w, b = random_value(1, 4), random_weight(3, 4), random_weight(3, seed=4)
    y: Any = F.linear(x, w, b)
    samples = torch.einsum("doi,di->do", weight_samples(w), value_samples(x)) + weight_samples(b)
    assert_covariance(y.covariance[0], samples)
    assert ((y.loc[0] - samples.mean(0)).abs() < 6 * samples.std(0) / SAMPLES**0.5).all()


def test_convolution_agrees_with_samples() -> None:
    x, w, b = random_value(1, 2, 4, 4), random_weight(2, 2, 3, 3), random_weight(2, seed=4)
    y: Any = F.conv2d(x, w, b, stride=2, padding=1)
    patches = F.unfold(value_samples(x), 3, padding=1, stride=2)
    samples = weight_samples(w).flatten(2) @ patches + weight_samples(b)[..., None]
    for channel in range(2):
        assert_covariance(y.covariance[0, channel], samples[:, channel])


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, (1, 0), 2, "same", "valid"]),
    random=st.sampled_from(["input", "weight", "both"]),
)
def test_any_convolution_is_exact(kernel: Any, stride: int, dilation: int, padding: Any, random: str) -> None:
    stride = 1 if padding == "same" else stride
    x, w = random_value(2, 2, 5, 6), random_weight(3, 2, *kernel)

    def conv(x: Any, w: Any) -> Any:
        return F.conv2d(x, w, None, stride, padding, dilation)

    y = conv(x.loc if random == "weight" else x, w.loc if random == "input" else w)
    assert torch.equal(y.loc, conv(x.loc, w.loc))
    # The output is bilinear: in a basis of images and weights it is y = Σ_w w A_w x.
    images = torch.eye(60, dtype=torch.float64).reshape(60, 2, 5, 6)
    basis = torch.eye(w.numel(), dtype=torch.float64).reshape(-1, *w.shape)
    by_input = conv(images, w.loc).flatten(1).T
    by_weight = torch.stack([conv(images, one).flatten(1).T for one in basis])
    for b in range(2):
        covariance = torch.block_diag(*x.covariance[b]) * (random != "weight")
        w_variance = w.noise_part.flatten() * (random != "input")
        second_moment = x.loc[b].flatten().outer(x.loc[b].flatten()) + covariance
        own = (w_variance[:, None, None] * (by_weight @ second_moment @ by_weight.mT)).sum(0)
        expected = by_input @ covariance @ by_input.T + own
        pixels = y.loc[b, 0].numel()
        for channel in range(3):
            block = slice(channel * pixels, (channel + 1) * pixels)
            torch.testing.assert_close(y.covariance[b, channel], expected[block, block])


class Small(nn.Module):
    """A network with every operation that the rule supports."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 3, 3, padding="same", bias=False)
        self.last = nn.Linear(12, 5)
        self.drop = nn.Dropout()

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 2)
        x = x + self.second(x).relu() + 1.0
        x = F.adaptive_avg_pool2d(F.avg_pool2d(x, 2, padding=1), 2)
        return self.last(self.drop(x.view(x.size(0), -1)))


def small() -> Small:
    torch.manual_seed(0)
    net = Small().double().eval()
    for statistic, value in (("running_mean", 0.1 * rand(3)), ("running_var", rand(3).square() + 0.5)):
        net.norm.get_buffer(statistic).copy_(value)
    return net


def test_without_a_nonlinearity_one_bayesian_layer_is_exact() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, 2, padding=1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)).double()
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.3, relative=False), select="0.weight")
    x = rand(2, 2, 8, 8)
    with bnn.using("covariance"), torch.no_grad():
        y = bnn(x)
    with torch.no_grad():
        samples = torch.stack([bnn(x) for _ in range(5000)])
    for b in range(2):
        assert_covariance(y.covariance[b], samples[:, b])
    assert (y.covariance.triu(1).abs() > 0.1 * y.variance.mean()).any()  # some covariances are large


def test_lenet_5_agrees_with_weight_samples() -> None:
    bnn = lb.bayesianize(build("lenet-5", (1, 28, 28), 10, seed=0), lb.MeanField(init_std=0.01, relative=False))
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        samples = torch.stack([bnn(x) for _ in range(1000)])
        with bnn.using("covariance"):
            y = bnn(x)
    ratio = y.variance.sqrt() / samples.std(0)
    assert abs(ratio.median() - 1) < 0.15
    assert (ratio - 1).abs().max() < 0.25


def test_means_equal_those_of_the_plain_network() -> None:
    net, x = small(), rand(2, 1, 6, 6)
    for dtype in (torch.float64, torch.float32):
        net, x = net.to(dtype), x.to(dtype)
        bnn = lb.bayesianize(net, lb.MeanField(init_std=0.1, relative=False))
        with bnn.using("covariance"):
            assert torch.equal(bnn(x).loc, net(x))
        value = net(Covariances(x, torch.zeros(covariance_shape(x.shape), dtype=dtype)))
        assert torch.equal(value.loc, net(x))
        assert value.covariance.count_nonzero() == 0


def test_covariances_are_positive_semidefinite() -> None:
    net = small()
    values: list[Covariances] = []
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.3, relative=False))
    for module in bnn.network.modules():
        module.register_forward_hook(lambda module, inputs, output: values.append(output))
    with bnn.using("covariance"), torch.no_grad():
        bnn(rand(3, 1, 6, 6))
    assert len(values) == 6
    for value in values:
        torch.testing.assert_close(value.covariance, value.covariance.mT)
        assert (torch.linalg.eigvalsh(value.covariance) >= -1e-10).all()
        assert value.variance.shape == value.shape
        assert (value.variance > 0).any()


def test_gradients_of_a_small_network() -> None:
    source = NoiseSource(make_key(0))

    def network(x: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        weights: Any = [CovarianceWeight(m, v, source, "") for m, v in zip(parts[::2], parts[1::2], strict=True)]
        first, second, last = weights
        y: Any = F.max_pool2d(F.relu(F.conv2d(x, first, padding=1)), 2)
        y = F.linear(F.avg_pool2d(F.conv2d(y, second), 2).flatten(1), last)
        return y.loc, y.covariance

    weights = [random_weight(*shape, seed=n) for n, shape in enumerate([(2, 1, 2, 2), (2, 2, 2, 2), (2, 2)])]
    inputs = [rand(1, 1, 5, 5), *(part for w in weights for part in (w.loc, w.noise_part))]
    assert torch.autograd.gradcheck(network, [part.requires_grad_() for part in inputs])


def test_training_reaches_every_parameter() -> None:
    bnn = lb.bayesianize(small(), lb.MeanField(init_std=0.1, relative=False))
    draw = bnn.next_draw(with_kl=True)
    with bnn.using("covariance"):
        y, kl = bnn(rand(4, 1, 6, 6), _draw=draw)
    torch.testing.assert_close(kl, bnn.kl())
    y.moments().variance.sum().backward()
    for parameter in (*bnn.scale_parameters(), *bnn.mean_parameters()):
        assert parameter.grad is None or parameter.grad.isfinite().all()
    (scales,) = bnn.scale_parameters()
    assert scales.grad is not None
    assert all(part.count_nonzero() > 0 for part in bnn.layout.split(scales.grad))


def test_moments_of_a_value() -> None:
    x = random_value(2, 3, 2, 2)
    moments = x.moments()
    assert isinstance(moments, lb.Moments)
    assert moments.loc is x.loc
    assert torch.equal(moments.variance, torch.stack([x.covariance[..., i, i] for i in range(4)], -1).view(2, 3, 2, 2))


def test_max_pooling_keeps_the_winners() -> None:
    x = random_value(1, 1, 4, 4)
    y: Any = F.max_pool2d(x, 2)
    winners = [int((x.loc.flatten() == m).nonzero()) for m in y.loc.flatten()]
    assert torch.equal(y.covariance[0, 0], x.covariance[0, 0][winners][:, winners])


def test_sums_treat_their_terms_as_independent() -> None:
    x, y = random_value(2, 3), random_value(2, 3)
    torch.testing.assert_close(x.add(y, alpha=2).covariance, 5 * x.covariance)
    before = x.covariance
    x += rand(3)
    assert torch.equal(x.covariance, before)
    assert torch.equal(x.loc, y.loc + rand(3))


def test_covariances_stay_precise_under_autocast() -> None:
    net, x = small().float(), rand(2, 1, 6, 6).float()
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.1, relative=False)).using("covariance")
    with bnn as model:
        plain = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x)
            assert torch.equal(half.loc, net(x))
    assert half.covariance.dtype == torch.float32
    torch.testing.assert_close(half.variance, plain.variance, rtol=0.05, atol=0)


UNSUPPORTED: dict[str, Callable[[Any], Any]] = {
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(1),
    "mul": lambda x: x * 2,
    "mean": lambda x: x.mean((2, 3)),
    "groups": lambda x: F.conv2d(x, rand(2, 1, 1, 1), groups=2),
    "shape": lambda x: x.flatten(2),
    "broadcasts": lambda x: x + rand(3, 2, 4, 4),
    "Bayesian weight 'weight'": lambda x: torch.matmul(rand(2, 3), random_weight(3, 4)),
    "only batches of vectors and images": lambda x: F.linear(rand(2, 3, 4), random_weight(3, 4)),
    "training mode": lambda x: F.dropout(x),
    "statistics of a batch": lambda x: nn.BatchNorm2d(2).double()(x),
    "__getitem__": lambda x: x[:, 0],
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_operations_raise_an_error(reason: str) -> None:
    with pytest.raises(UnsupportedOperation, match=r"baseline for networks of the size of LeNet.*moments") as error:
        UNSUPPORTED[reason](random_value(1, 2, 4, 4))
    assert reason in str(error.value)


def test_a_covariance_that_is_too_large_raises_an_error() -> None:
    bnn = lb.bayesianize(nn.Conv2d(1, 1, 3, padding=1), lb.MeanField())
    with bnn.using("covariance"), pytest.raises(lb.LeanBayesError, match=r"need 30\.2 GiB.*moments"):
        bnn(torch.zeros(1, 1, 300, 300))
    value: Any = Covariances(torch.zeros(1, 64, 16, 16), torch.zeros(1, 1, 1, 1).expand(1, 64, 256, 256))
    with pytest.raises(lb.LeanBayesError, match=r"need 1[56]\.\d GiB"):
        F.conv2d(value, torch.zeros(1024, 64, 1, 1))


def test_a_covariance_of_the_wrong_shape_raises_an_error() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"needs a covariance of shape \(2, 3, 3\), not \(2, 3\)"):
        Covariances(rand(2, 3), rand(2, 3))
