"""`lb.export_onnx` and `lb.export_program` by the rule `adjoint`: graphs with backward passes, but without autograd."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from export_cases import NETWORKS, lenet, mlp, onnx_outputs, resnet
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.deploy.gradient_graph import gradient_graph
from leanbayes.rules import Adjoint


def assert_predicts(outputs: dict[str, Tensor], bnn: lb.BayesianModel, x: Tensor, rule: str) -> None:
    """Compare the outputs for classes with `predict`."""
    made = bnn.predict(x, rule=rule)
    assert list(outputs) == ["mean", "variance", "probs", "expected_entropy", "margin_std"]
    for name in ("probs", "expected_entropy", "margin_std"):
        torch.testing.assert_close(outputs[name], getattr(made, name), rtol=1e-4, atol=1e-6)
    assert outputs["margin_std"].min() > 0


@pytest.mark.parametrize(("name", "rule"), [("lenet", "adjoint:mean=moments,margins=2"), ("vit", "adjoint")])
def test_a_file_predicts_as_predict_does(name: str, rule: str, tmp_path: Path) -> None:
    build, shape, argument = NETWORKS[name]
    bnn = lb.bayesianize(build(), lb.MeanField(init_std=0.2)).eval()
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randn(3, *shape), rule=rule)
    assert made.inputs == (argument,)
    assert made.error is not None
    assert made.error < 1e-5
    for rows in (1, 5):
        x = torch.randn(rows, *shape)
        assert_predicts(onnx_outputs(made.path, x), bnn, x, rule)


def test_a_file_has_the_calibration_and_the_policy(tmp_path: Path) -> None:
    rule, x = "adjoint:mean=moments,margins=2", torch.randn(64, 3)
    bnn = lb.bayesianize(mlp(4), lb.MeanField(init_std=0.3)).eval()
    before = bnn.predict(x, rule=rule).probs
    lb.calibrate(bnn, [x], layers=True, layer_inputs=64, samples=16)
    bnn.policy = lb.decide.fit(bnn, [(x, torch.arange(64) % 4)], false_alarms=0.1, rule=rule)
    program = lb.export_program(bnn, x, rule=rule)
    outputs = program.module()(x)
    assert_predicts(outputs, bnn, x, rule)
    assert (outputs["probs"] - before).abs().max() > 1e-4
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", x, rule=rule)
    entries = {entry.key: entry.value for entry in onnx.load(made.path).metadata_props}
    assert '"margin_std": "logits"' in entries["units"]
    assert "margins=2" in entries["policy"]


class Pooled(nn.Module):
    """Convolutions of several kinds, and all poolings that have a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, padding="same", dilation=2, groups=2)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.first(x)), 3, 2, padding=1)
        x = F.avg_pool2d(F.pad(self.norm(self.grouped(x)), (1, 0, 0, 2)), 2, 1)
        return self.head(F.adaptive_avg_pool2d(F.gelu(self.up(x)), 2).flatten(1))


class Tokens(nn.Module):
    """An embedding whose weight the head uses again, positions, attention and a sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(9, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return F.linear(x.mean(1), self.embed.weight)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "resnet": (resnet, lambda rows: torch.randn(rows, 3, 8, 8)),
    "pooled": (Pooled, lambda rows: torch.randn(rows, 2, 13, 14)),
    "tokens": (Tokens, lambda rows: torch.randint(9, (rows, 6))),
    "lines": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.Tanh(), nn.MaxPool1d(2), nn.AvgPool1d(2), nn.Flatten(), mlp_head()
        ),
        lambda rows: torch.randn(rows, 2, 14),
    ),
}


def mlp_head() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.LeakyReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("name", CASES)
def test_a_program_predicts_as_predict_does(name: str) -> None:
    torch.manual_seed(0)
    rule = "adjoint:margins=2" if name == "resnet" else "adjoint"
    build, make = CASES[name]
    bnn = lb.bayesianize(build(), lb.MeanField(init_std=0.2)).eval()
    program = lb.export_program(bnn, make(3), rule=rule)
    for rows in (1, 5):
        x = make(rows)
        assert_predicts(program.module()(x), bnn, x, rule)


@pytest.mark.parametrize("likelihood", [lb.Gaussian(0.3), lb.HeteroscedasticGaussian(), lb.Bernoulli()])
def test_the_outputs_follow_the_likelihood(likelihood: lb.Gaussian) -> None:
    bnn, x = lb.bayesianize(mlp(), lb.MeanField(init_std=0.2), likelihood=likelihood).eval(), torch.randn(4, 3)
    outputs = lb.export_program(bnn, x, rule="adjoint").module()(x)
    made = bnn.predict(x, rule="adjoint")
    names = ("mean", "variance", "epistemic_variance")
    if not isinstance(made, lb.RegressionPrediction):
        names = ("probs", "expected_entropy")
    for name in names:
        torch.testing.assert_close(outputs[name], getattr(made, name), rtol=1e-4, atol=1e-6)
    assert "margin_std" not in outputs


@pytest.mark.parametrize("method", [lb.SSVI(density=0.3), lb.PBN(rate=0.3)])
def test_only_random_weights_count(method: lb.SSVI | lb.PBN) -> None:
    x = torch.randn(8, 1, 8, 8)
    data = [(x, torch.arange(8) % 3)] if isinstance(method, lb.PBN) else None
    bnn = lb.bayesianize(lenet(), method, data=data).eval()
    outputs = lb.export_program(bnn, x, rule="adjoint").module()(x)
    assert_predicts(outputs, bnn, x, "adjoint")


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    volume = nn.Sequential(nn.Conv3d(1, 2, 1), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(16, 3))
    bnn = lb.bayesianize(volume, lb.MeanField(init_std=0.2)).eval()
    with pytest.raises(
        lb.UnsupportedOperation, match="gradient of max_pool3d_with_indices: export with rule='moments'"
    ):
        lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randn(2, 1, 4, 4, 4), rule="adjoint")
    assert not list(tmp_path.iterdir())

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x if x.sum() > 0 else -x)

    bnn = lb.bayesianize(Choice(), lb.MeanField(init_std=0.2)).eval()
    with pytest.raises(lb.LeanBayesError, match="The backward pass cannot be traced for any number of examples"):
        lb.export_program(bnn, torch.randn(2, 3), rule="adjoint")
    with pytest.raises(lb.LeanBayesError, match="'sample' gives no variance in one pass: export with 'moments' or"):
        lb.export_program(bnn, torch.randn(2, 3), rule="sample")


def test_dense_outputs_have_too_many_scalars() -> None:
    bnn = lb.bayesianize(nn.Conv2d(1, 3, 3), lb.MeanField(init_std=0.2)).eval()
    with pytest.raises(lb.UnsupportedOperation, match="18 scalars per example"):
        lb.export_program(bnn, torch.randn(2, 1, 5, 8), rule=Adjoint())


def _kernel(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


KERNEL, WIDE, SMALL = _kernel(4, 4, 3, 2), _kernel(4, 2, 3, 3), _kernel(4, 4, 2, 2)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: F.conv2d(x, KERNEL, None, (2, 1), (1, 0), (1, 2)),
    "convolution, pixels left over": lambda x: F.conv2d(x, SMALL, None, 3),
    "convolution, groups": lambda x: F.conv2d(x, WIDE, None, 2, 1, 1, 2),
    "convolution, transposed": lambda x: F.conv_transpose2d(x, WIDE, None, 2, 1, 1, 2),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool, dilation": lambda x: F.max_pool2d(x, 2, 1, 0, 2),
    "max pool, ceil": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average pool, windows": lambda x: F.avg_pool2d(x, (2, 3)),
    "average pool, divisor": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False, divisor_override=4),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "padding": lambda x: F.pad(x, (1, -2, 0, 3), value=0.7),
    "average pool, without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average pool, ceil": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "adaptive pool, windows that overlap": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    operation = OPERATIONS[name]

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = operation(x)
        (found,) = torch.autograd.grad((y * y.sin()).sum(), x)
        return found

    graph = gradient_graph(gradient, [torch.randn(7, 4, 9, 8, dtype=torch.float64)])
    for rows in (1, 3):
        x = torch.randn(rows, 4, 9, 8, dtype=torch.float64)
        torch.testing.assert_close(graph(x), gradient(x))
    backward = [str(node.target) for node in graph.graph.nodes if "_backward" in str(node.target)]
    assert bool(backward) == (name in list(OPERATIONS)[-3:])  # which stay as they are
