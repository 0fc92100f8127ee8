"""ReLU and GELU by one kernel equal the formulas of plain torch, in networks of all kinds, for any order in memory."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moment_networks import with_noise
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import kernels
from leanbayes.likelihoods import expectations
from leanbayes.networks import build
from leanbayes.rules.moments.exact_moments import gelu_moments, relu_moments

RELU, GELU = 0, 1
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _plain(
    m: Tensor,
    v: Tensor,
    kind: int,
    mean_slope: bool,
    mean_variance: bool,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute what the docstring of the kernel says, in double precision."""
    wide, variance = m.double(), v.double().expand(m.shape)
    if running_mean is not None and running_var is not None:
        norm = [None if part is None else part.double() for part in (running_mean, running_var, weight, bias)]
        wide = F.batch_norm(wide.mT, *norm, training=False, eps=eps).mT  # type: ignore[arg-type, misc]
    if added is not None:
        wide = wide + added.double()
    if kind == RELU:
        found = relu_moments(wide, variance)
        loc = F.relu(wide) + found.excess
    else:
        found = gelu_moments(wide, variance)
        loc = found.excess
    slope = found.slope.mean(1, keepdim=True) if mean_slope else found.slope
    variance = found.variance.mean(1, keepdim=True) if mean_variance else found.variance
    loc = loc.to(m.dtype)
    means = [loc.double().pow(power).mean(1, keepdim=True) if mean_slope else slope.new_empty(0) for power in (1, 2)]
    return loc, *(value.float() for value in (slope, variance, *means))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the kernel by plain torch, and return the arguments of all calls."""
    made: list[tuple[Any, ...]] = []

    def kernel(*args: Any) -> tuple[Tensor, ...]:
        made.append(args)
        return _plain(*args)

    monkeypatch.setattr(kernels, "usable", lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(kernels, "activation_ops", SimpleNamespace(RELU=RELU, GELU=GELU, activation_moments=kernel))
    return made


def _conv(activation: nn.Module) -> nn.Module:
    first = (nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), activation)
    return nn.Sequential(*first, nn.Conv2d(6, 5, 3), activation, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4)), (5, 7)),
    "conv": (lambda: _conv(nn.ReLU()), (4, 3, 9, 8)),
    "conv, gelu": (lambda: _conv(nn.GELU()), (4, 3, 9, 8)),
    "resnet": (lambda: build("resnet-20", (3, 16, 16), 4, width=4, seed=0), (3, 3, 16, 16)),
    "maps": (lambda: build("unet", (3, 32, 32), 4, width=2, seed=0), (2, 3, 32, 32)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 3)), (2, 3, 11)),
    "vit": (lambda: build("vit", (3, 16, 16), 4, patch=4, width=12, depth=2, heads=2, seed=0), (3, 3, 16, 16)),
}


def _moments(bnn: lb.BayesianModel, x: Tensor) -> lb.Moments:
    with torch.no_grad(), bnn.using("moments"):
        out = bnn(x)
    assert isinstance(out, lb.Moments)
    return out.plain()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_networks_have_the_same_moments(
    name: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    bnn, x = with_noise(make(), init_std=0.1), torch.randn(shape)
    if channels_last and x.dim() == 4:
        bnn, x = bnn.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = _moments(bnn, x)
    assert calls
    with monkeypatch.context() as context:
        context.setattr(kernels, "usable", lambda tensor: False)
        count = len(calls)
        expected = _moments(bnn, x)
        assert len(calls) == count
    for ours, theirs in ((found.loc, expected.loc), (found.variance, expected.variance)):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5 * theirs.abs().max().item())


def test_the_means_of_pooled_networks_come_from_the_kernel(calls: list[Any]) -> None:
    """Then the next layer reads its input once."""
    _moments(with_noise(_conv(nn.ReLU())), torch.randn(2, 3, 9, 8))
    assert [call[3:] for call in calls] == [(True, True), (True, True)]
    assert [call[1].shape[1] for call in calls] == [1, 1]  # the variance is read once per channel


@pytest.mark.parametrize("settings", [{"approximate": "tanh"}, {"negative_slope": 0.1}])
def test_other_activations_are_computed_as_before(settings: dict[str, Any], calls: list[Any]) -> None:
    activation = nn.GELU(**settings) if "approximate" in settings else nn.LeakyReLU(**settings)
    _moments(with_noise(nn.Sequential(nn.Linear(7, 9), activation, nn.Linear(9, 4))), torch.randn(5, 7))
    assert not calls


@pytest.mark.parametrize("shape", [(0, 7), (0, 5, 7), (3, 0, 7)])
def test_empty_values_are_computed_as_before(shape: tuple[int, ...], calls: list[Any]) -> None:
    bnn = with_noise(nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4)))
    assert _moments(bnn, torch.randn(shape)).shape == (*shape[:-1], 4)
    assert not calls


def test_gradients_are_those_of_plain_torch(calls: list[Any]) -> None:
    bnn = with_noise(_conv(nn.ReLU()))
    with bnn.using("moments"):
        bnn(torch.randn(2, 3, 9, 8)).variance.sum().backward()
    assert not calls


_SCHEMA = (
    "(Tensor m, Tensor v, int kind, bool mean_slope, bool mean_variance, Tensor? running_mean=None, "
    "Tensor? running_var=None, Tensor? weight=None, Tensor? bias=None, float eps=0.0, Tensor? added=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("leanbayes_tests::activation_moments", mutates_args=(), schema=_SCHEMA)
def _operator(*args: Any) -> tuple[Tensor, ...]:
    return tuple(value.clone() for value in _plain(*args))


@_operator.register_fake
def _shapes(*args: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(value) for value in _plain(*args))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> Iterator[list[Any]]:
    """Compile with the operator above in place of the kernel, and return the graphs."""
    found: list[Any] = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        found.append(graph)
        return graph.forward

    operator = torch.ops.leanbayes_tests.activation_moments
    monkeypatch.setattr(kernels, "activation_ops", SimpleNamespace(RELU=RELU, GELU=GELU, activation_moments=operator))
    monkeypatch.setattr(expectations, "is_fused", lambda *args: False)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def _calls_in(graph: Any) -> list[Any]:
    operator = torch.ops.leanbayes_tests.activation_moments
    return [node for node in graph.graph.nodes if node.target in (operator, operator.default)]


def _names_before(node: Any, until: Any) -> set[str]:
    """Return the names of all nodes that a node depends on, back to another one."""
    found, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if one is not until and one.name not in found:
            found.add(one.name)
            waiting += one.all_input_nodes
    return found


def _both(bnn: lb.BayesianModel, x: Tensor) -> None:
    compiled, eager = (bnn.predict(x, rule="moments", compile=compile) for compile in (True, False))
    torch.testing.assert_close(compiled.probs, eager.probs, rtol=1e-4, atol=1e-6)


def _change_norms(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for part in (module.running_mean, module.weight, module.bias):
                nn.init.uniform_(part, 0.3, 1.2)  # type: ignore[arg-type]


class _Block(nn.Module):
    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.stem, self.shift = nn.Conv2d(3, 6, 3), shift
        self.layers = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.layers(x)
        y += x + 0.5 if self.shift else x
        return F.relu(y, inplace=True).mean((2, 3))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_the_kernel_computes_norm_and_sum_of_a_residual_block(
    shift: bool, channels_last: bool, graphs: list[Any]
) -> None:
    torch.manual_seed(0)
    block, x = _Block(shift), torch.randn(2, 3, 9, 8)
    _change_norms(block)
    bnn = with_noise(block, init_std=0.1)
    if channels_last:
        bnn, x = bnn.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _both(bnn, x)
    first, second = _calls_in(graphs[0])
    assert len(first.args) == 5  # a convolution
    assert len(second.args) == 11  # a convolution, its norm, and the sum
    for mean in (second.args[0], second.args[10]):  # what the norm is applied to, and what is added
        assert not any("batch_norm" in name for name in _names_before(mean, until=first))


def test_compiled_passes_call_the_kernel_and_exported_ones_do_not(graphs: list[Any]) -> None:
    bnn, x = with_noise(_conv(nn.ReLU()), init_std=0.1), torch.randn(2, 3, 9, 8)
    _both(bnn, x)
    assert [len(call.args) for call in _calls_in(graphs[0])] == [10, 5]  # the first one after a batch norm
    exported = lb.export_program(bnn, x)
    assert not any("activation_moments" in str(node.target) for node in exported.graph.nodes)


# -- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("varies", ["nowhere", "channels", "everywhere"])
@pytest.mark.parametrize("shape", [(3, 2000, 70), (2, 37, 5), (5, 1, 9), (1, 9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RELU, GELU])
def test_the_kernel_equals_double_precision(
    kind: int, dtype: torch.dtype, shape: tuple[int, int, int], varies: str, channels_last: bool
) -> None:
    source = torch.Generator().manual_seed(0)
    m = (2 * torch.randn(shape, generator=source)).to("cuda", dtype)
    if not channels_last:
        m = m.mT.contiguous().mT
    sizes = {"nowhere": (1, 1, 1), "channels": (shape[0], 1, shape[2]), "everywhere": shape}[varies]
    v = 3 * torch.rand(sizes, generator=source).to("cuda")
    v.view(-1)[0] = 0
    for mean_slope, mean_variance in ((True, sizes[1] == 1), (False, False)):
        found = kernels.activation_ops.activation_moments(m, v, kind, mean_slope, mean_variance)
        expected = _plain(m, v, kind, mean_slope, mean_variance)
        assert found[0].stride() == m.stride()
        rounding = 2**-7 if dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(found[0], expected[0], rtol=rounding, atol=1e-5)
        for one, other in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3 if dtype == torch.bfloat16 else 3e-5, atol=3e-5)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 2000, 70), (2, 37, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_sum_in_the_kernel(dtype: torch.dtype, shape: tuple[int, int, int], channels_last: bool) -> None:
    source = torch.Generator().manual_seed(0)
    m, added = ((2 * torch.randn(shape, generator=source)).to("cuda", dtype) for _ in range(2))
    if not channels_last:
        m = m.mT.contiguous().mT  # the other one may have any order
    v = 3 * torch.rand((shape[0], 1, shape[2]), generator=source).to("cuda")
    center, square, weight, bias = (torch.rand(4, shape[2], generator=source) + 0.5).to("cuda").unbind(0)
    for more in (None, added):
        args = (m, v, RELU, True, True, center, square, weight, bias, 1e-3, more)
        found, expected = kernels.activation_ops.activation_moments(*args), _plain(*args)
        half = dtype == torch.bfloat16
        torch.testing.assert_close(found[0], expected[0], rtol=2**-7 if half else 2e-5, atol=1e-5)
        for one, other in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3 if half else 5e-5, atol=1e-4)


@pytest.mark.gpu
@GPU
def test_norms_and_sums_in_the_kernel_of_a_compiled_network() -> None:
    torch.manual_seed(0)
    net = build("resnet-20", (3, 16, 16), 4, width=8, seed=0)
    _change_norms(net)
    bnn, x = with_noise(net.cuda(), init_std=0.05), torch.randn(8, 3, 16, 16, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        compiled, eager = (bnn.predict(x, rule="moments", compile=compile) for compile in (True, False))
    torch.testing.assert_close(compiled.probs, eager.probs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(compiled.mutual_information, eager.mutual_information, rtol=1e-2, atol=1e-5)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", list(NETWORKS))
def test_networks_on_a_gpu_have_the_moments_of_a_cpu(name: str) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    bnn, x = with_noise(make(), init_std=0.1), torch.randn(shape)
    expected = _moments(bnn, x)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = _moments(bnn.to("cuda"), x.to("cuda"))
    for ours, theirs in ((found.loc, expected.loc), (found.variance, expected.variance)):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.gpu
@GPU
def test_a_relu_with_zero_variance_is_exact_and_nan_stays() -> None:
    m = torch.tensor([[[float("nan"), -1.0, 2.0, float("inf")]]], device="cuda")
    loc, _, variance, *_ = kernels.activation_ops.activation_moments(
        m, torch.zeros(1, 1, 1, device="cuda"), RELU, False, False
    )
    assert loc.isnan().tolist() == [[[True, False, False, False]]]
    assert torch.equal(loc[..., 1:], F.relu(m)[..., 1:])
    assert not variance[..., 1:].any()
