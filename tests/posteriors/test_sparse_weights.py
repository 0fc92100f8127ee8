"""Sparse weights in place of tensors: the results equal dense ones, with both kernels."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.layout import Slot
from leanbayes.networks import build
from leanbayes.posteriors.subspace.sparse_weight import Pattern, SparseWeight


def make(shape: tuple[int, ...], density: float = 0.05, channels_last: bool = False, seed: int = 0) -> Any:
    order = (0, *range(2, len(shape)), 1) if channels_last else tuple(range(len(shape)))
    slot = Slot(("weight",), shape, order, torch.float32, 1)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(slot.numel, generator=generator)[: max(1, int(density * slot.numel))].sort().values
    return SparseWeight(Pattern(positions, slot), torch.randn(len(positions), generator=generator))


@pytest.fixture(params=["sparse", "dense"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Use one kernel in every call."""
    taken: list[str] = []

    def pays(self: Pattern, columns: int) -> bool:
        taken.append(request.param)
        return request.param == "sparse"

    monkeypatch.setattr(Pattern, "pays", pays)
    monkeypatch.setattr(Pattern, "suits", property(lambda self: len(self.slot.shape) >= 2))
    return taken


def test_the_dense_tensor_has_the_values_at_their_positions() -> None:
    for channels_last in (False, True):
        weight = make((6, 5, 3, 3), channels_last=channels_last)
        dense = weight.loc
        assert dense.shape == (6, 5, 3, 3)
        in_memory = dense.permute(0, 2, 3, 1) if channels_last else dense
        assert in_memory.is_contiguous()
        flat = in_memory.reshape(-1)
        assert torch.equal(flat[weight.pattern.positions], weight.values)
        assert int((flat != 0).sum()) == len(weight.values)
        assert torch.equal(weight.matrix.to_dense(), dense.flatten(1))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_linear_layers(outputs: int, inputs: int, leading: list[int], bias: bool) -> None:
    weight = make((outputs, inputs), 0.3)
    x = torch.randn(*leading, 3, inputs)
    b = torch.randn(outputs) if bias else None
    torch.testing.assert_close(F.linear(x, weight, b), F.linear(x, weight.loc, b))


@settings(deadline=None, max_examples=40)
@given(
    dims=st.integers(1, 2),
    taps=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    channels_last=st.booleans(),
)
def test_convolutions(dims: int, taps: int, stride: int, padding: int, dilation: int, channels_last: bool) -> None:
    weight = make((6, 4, *[taps] * dims), 0.3, channels_last)
    x, b = torch.randn(2, 4, *[7] * dims), torch.randn(6)
    function = {1: F.conv1d, 2: F.conv2d}[dims]
    options = (stride, padding, dilation)
    torch.testing.assert_close(function(x, weight, b, *options), function(x, weight.loc, b, *options))


def test_functions_without_a_sparse_kernel_are_dense(kernel: list[str]) -> None:
    weight, x = make((8, 4, 3, 3), 0.3), torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(F.conv_transpose2d(x, weight), F.conv_transpose2d(x, weight.loc))
    grouped = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(
        F.conv2d(grouped, weight, groups=2),
        F.conv2d(grouped, weight.loc, groups=2),
    )
    same = F.conv2d(x[:, :4], weight, padding="same")
    torch.testing.assert_close(same, F.conv2d(x[:, :4], weight.loc, padding="same"))
    assert torch.equal(weight.flatten(1), weight.loc.flatten(1))
    assert torch.equal(torch.stack([weight, weight]), torch.stack([weight.loc] * 2))
    assert not kernel  # none of them has a sparse kernel


def test_layers_accept_sparse_weights() -> None:
    layers = {(12, 8): nn.Linear(8, 12), (6, 4, 3, 3): nn.Conv2d(4, 6, 3, padding=1), (6, 4, 3): nn.Conv1d(4, 6, 3)}
    for shape, layer in layers.items():
        weight = make(shape, 0.3)
        del layer.weight
        x = torch.randn(3, 8) if len(shape) == 2 else torch.randn(3, 4, *[6] * (len(shape) - 2))
        with torch.no_grad():
            layer.weight = weight
            found = layer(x)
            layer.weight = weight.loc
            torch.testing.assert_close(found, layer(x))


def test_tensor_attributes_do_not_need_the_dense_tensor() -> None:
    weight = make((64, 64))
    assert (weight.shape, weight.dim(), weight.dtype) == ((64, 64), 2, torch.float32)
    assert (weight.size(0), weight.ndim, weight.device.type) == (64, 2, "cpu")
    assert weight.to(torch.float64).values.dtype == torch.float64
    assert weight._loc is None


def test_autocast_and_other_dtypes_are_dense(kernel: list[str]) -> None:
    weight, x = make((64, 64)), torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16):
        coarse = weight.to(dtype)
        assert torch.equal(F.linear(x.to(dtype), coarse), F.linear(x.to(dtype), coarse.loc))
    assert not kernel


def test_settings_of_a_convolution_may_be_lists() -> None:
    weight, x = make((6, 4, 3, 3), 0.3), torch.randn(2, 4, 7, 7)
    options: Any = ([2, 2], [1, 0], [1, 2])
    torch.testing.assert_close(F.conv2d(x, weight, None, *options), F.conv2d(x, weight.loc, None, *options))


def pattern_of(shape: tuple[int, ...], active: int) -> Pattern:
    return Pattern(torch.arange(active), Slot(("weight",), shape, tuple(range(len(shape))), torch.float32, 1))


def test_only_large_sparse_matrices_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for shape in ((256, 128), (256, 128, 1), (256, 128, 1, 1)):
        assert pattern_of(shape, 2048).suits
        assert not pattern_of(shape, 2049).suits
        assert not pattern_of((255, *shape[1:]), 1).suits
    assert pattern_of((1024, 1024), 1 << 17).suits
    assert not pattern_of((1024, 1024), (1 << 17) + 1).suits
    assert not pattern_of((100_000,), 1).suits


def test_convolutions_with_windows_are_sparse_for_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pattern = pattern_of((256, 256, 3, 3), 30_000)
    assert pattern.suits
    assert pattern.pays(256)
    assert not pattern.pays(257)
    assert not pattern_of((256, 256, 3, 3), 40_000).suits
    assert not pattern_of((128, 256, 3, 3), 1).suits


def test_the_choice_of_a_kernel_reads_no_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each load of a file predicts the same bits, whatever the machine is busy with."""
    monkeypatch.undo()
    network = nn.Sequential(
        nn.Conv2d(256, 256, 3, padding=1), nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    lb.save(lb.bayesianize(network, lb.SSVI(density=0.04, init_std=0.05)), tmp_path / "a")
    used: list[bool] = []
    pays = Pattern.pays

    def watched(self: Pattern, columns: int) -> bool:
        used.append(pays(self, columns))
        return used[-1]

    def clock(*args: Any) -> float:
        raise AssertionError("a clock is read")

    monkeypatch.setattr(Pattern, "pays", watched)
    for name in ("time", "perf_counter", "perf_counter_ns", "monotonic", "process_time", "thread_time"):
        monkeypatch.setattr(time, name, clock)
    x, found = torch.randn(2, 256, 4, 4), []
    for _ in range(2):
        bnn = lb.load(tmp_path / "a", network).eval()
        with torch.no_grad(), bnn.frozen(3):
            found.append(bnn(x))
    monkeypatch.undo()
    assert any(used)
    assert not all(used)
    assert torch.equal(*found)


# -- in a model -------------------------------------------------------------------------------------------------------


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    attention = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return {
        "mlp": (nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5)), torch.randn(3, 20)),
        "resnet": (build("resnet-18", (3, 8, 8), 10, seed=0, width=4), torch.randn(2, 3, 8, 8)),
        "channels last": (
            _channels_last(build("resnet-18", (3, 8, 8), 10, seed=0, width=4)),
            torch.randn(2, 3, 8, 8),
        ),
        "attention": (nn.Sequential(attention, nn.Flatten(), nn.Linear(160, 3)), torch.randn(2, 5, 32)),
        "lstm": (Last(), torch.randn(2, 5, 12)),
    }


def _channels_last(network: Any) -> nn.Module:
    return network.to(memory_format=torch.channels_last)


class Last(nn.Module):
    """Classify by the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("name", list(networks()))
@pytest.mark.parametrize("rule", ["sample", "mean"])
def test_predictions_equal_those_of_dense_weights(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = networks()[name]
    bnn = lb.bayesianize(network, lb.SSVI(density=0.2, init_std=0.05)).eval()
    found = bnn.predict(x, 3, rule=rule, generator=torch.Generator().manual_seed(1)).probs
    monkeypatch.setattr(Pattern, "suits", False)
    dense = bnn.predict(x, 3, rule=rule, generator=torch.Generator().manual_seed(1)).probs
    torch.testing.assert_close(found, dense)


def test_a_model_in_half_precision_predicts() -> None:
    network, x = networks()["mlp"]
    bnn = lb.bayesianize(network, lb.SSVI(density=0.2)).eval().to(torch.bfloat16)
    assert bnn.predict(x.bfloat16(), 2).probs.isfinite().all()


def test_changed_positions_change_the_weights() -> None:
    network, x = networks()["mlp"]
    bnn = lb.bayesianize(network, lb.SSVI(density=0.2)).eval()
    with torch.no_grad(), bnn.using("mean"):
        before = bnn(x)
        posterior: Any = bnn.posterior
        posterior.index[0] = next(i for i in range(1200) if i not in posterior.index[: posterior.counts[0]])
        after = bnn(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, bnn.to_deterministic()(x))


def test_training_and_compiled_networks_use_tensors() -> None:
    network, x = networks()["mlp"]
    bnn = lb.bayesianize(network, lb.SSVI(density=0.2))
    with bnn.drawn():
        assert isinstance(bnn.network.get_submodule("0").weight, Tensor)
    with torch.no_grad(), bnn.drawn():
        assert isinstance(bnn.network.get_submodule("0").weight, SparseWeight)
    with torch.no_grad(), bnn.frozen(3):
        compiled = torch.compile(bnn, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), bnn(x))
