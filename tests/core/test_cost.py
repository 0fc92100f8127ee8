"""Costs against values computed by hand."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import count_cost
from network_cases import CASES
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leanbayes.core.counters import Cost, CostCounter, PeakMemory
from leanbayes.core.flops import FlopCounter, Flops

N = 1000  # entries of a vector
F4 = 4  # bytes of a float32
I8 = 8  # bytes of an index


def vector() -> Tensor:
    return torch.zeros(N)


def matrix(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns)


def indices(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long)


# Function, arguments, expected bytes, expected kernels.
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, int]] = {
    "add": (torch.add, (vector(), vector()), 3 * N * F4, 1),
    "same tensor twice is read once": (lambda x: x * x, (vector(),), 2 * N * F4, 1),
    "transposed twin is read once": (lambda x: x + x.t(), (matrix(30, 30),), 2 * 900 * F4, 1),
    "flat twin is read once": (lambda x: torch.dot(x.view(-1), x.t()[:, 0]), (matrix(1, N),), (N + 1) * F4, 1),
    "foreach of a tensor and its flat view": (
        lambda x: torch._foreach_add_([x, x.view(-1)], 1.0),
        (matrix(10, N // 10),),
        2 * N * F4,
        1,
    ),
    "halves of one tensor are two": (lambda x: x[: N // 2] + x[N // 2 :], (vector(),), 3 * N // 2 * F4, 1),
    "float64": (torch.add, (vector().double(), vector().double()), 3 * N * 8, 1),
    "in place": (lambda x: x.mul_(2), (vector(),), 2 * N * F4, 1),
    "in place with another": (lambda x, y: x.add_(y), (vector(), vector()), 3 * N * F4, 1),
    "out": (lambda x, y, o: torch.add(x, y, out=o), (vector(), vector(), vector()), 3 * N * F4, 1),
    "foreach": (lambda x, y: torch._foreach_add_([x, y], 1.0), (vector(), vector()), 4 * N * F4, 1),
    "expanded": (lambda x, y: x.expand(10, N) + y, (vector(), matrix(10, N)), (N + 2 * 10 * N) * F4, 1),
    "strided and expanded": (lambda x: x[::2].expand(10, N // 2).sum(), (vector(),), (N // 2 + 1) * F4, 1),
    "scalar expanded": (lambda x: x.expand(N).clone(), (torch.zeros(()),), (1 + N) * F4, 1),
    "overlapping windows": (lambda x: x.unfold(0, 4, 1).clone(), (vector(),), (N + 4 * (N - 3)) * F4, 1),
    "strided": (lambda x: x[::2] + 1, (vector(),), N * F4, 1),
    "cat": (lambda x: torch.cat([x, x]), (vector(),), 3 * N * F4, 1),
    "empty tensor": (lambda x: x[:0] + 1, (vector(),), 0, 0),
    # writes only
    "normal": (lambda x: x.normal_(), (vector(),), N * F4, 1),
    "uniform": (lambda x: x.uniform_(), (vector(),), N * F4, 1),
    "zero": (lambda x: x.zero_(), (vector(),), N * F4, 1),
    "fill": (lambda x: x.fill_(3.0), (vector(),), N * F4, 1),
    "copy": (lambda x, y: x.copy_(y), (vector(), vector()), 2 * N * F4, 1),
    "copy to another type": (lambda x: x.double(), (vector(),), 3 * N * F4, 1),
    "zeros_like": (torch.zeros_like, (vector(),), N * F4, 1),
    "randn": (torch.randn, (N,), N * F4, 1),
    "foreach zero": (lambda x: torch._foreach_zero_([x]), (vector(),), N * F4, 1),
    "foreach copy": (lambda x, y: torch._foreach_copy_([x], [y]), (vector(), vector()), 2 * N * F4, 1),
    # free
    "view": (lambda x: x.view(10, -1).t()[1:].unsqueeze(0).detach(), (vector(),), 0, 0),
    "unsafe view": (lambda x: torch.ops.aten._unsafe_view(x, [10, 100]), (vector(),), 0, 0),
    "reshape that is a view": (lambda x: x.reshape(10, 100), (vector(),), 0, 0),
    "reshape that is a copy": (lambda x: x.t().reshape(-1), (matrix(10, 10),), 200 * F4, 1),
    "split": (lambda x: (x.split(10), x.chunk(3), torch.unbind(x)), (vector(),), 0, 0),
    "in-place view": (lambda x: x.unsqueeze_(0).squeeze_(0), (vector(),), 0, 0),
    "allocation": (lambda x: (torch.empty(N), torch.empty_like(x), x.new_empty(3)), (vector(),), 0, 0),
    "questions": (lambda x: (x.item(), x.shape, x.device, x.is_contiguous()), (torch.zeros(()),), 0, 0),
    # indexing
    "embedding": (F.embedding, (indices(5), matrix(N, 8)), 5 * I8 + 2 * 5 * 8 * F4, 1),
    "index": (lambda x, i: x[i], (vector(), indices(5)), 5 * I8 + 2 * 5 * F4, 1),
    "index_put": (
        lambda x, i, v: torch.index_put_(x, (i,), v),
        (vector(), indices(5), torch.ones(5)),
        5 * I8 + 10 * F4,
        1,
    ),
    "index_put of rows": (
        lambda x, i, v: torch.index_put_(x, (i,), v),
        (matrix(N, 3), indices(5), torch.ones(())),
        5 * I8 + F4 + 15 * F4,
        1,
    ),
    "index_put, accumulating": (
        lambda x, i, v: torch.index_put_(x, (i,), v, accumulate=True),
        (vector(), indices(5), torch.ones(5)),
        5 * I8 + 3 * 5 * F4,
        1,
    ),
    "index_put by a mask, which may choose all": (
        lambda x, m, i, v: torch.index_put_(x, (m, i), v),
        (matrix(10, N // 10), torch.arange(10) < 3, indices(3), torch.ones(())),
        10 + 3 * I8 + F4 + N * F4,
        1,
    ),
    "scatter, multiplying": (
        lambda x, i: x.scatter_(0, i, 2.0, reduce="multiply"),
        (vector(), indices(5)),
        5 * I8 + 2 * 5 * F4,
        1,
    ),
    "scatter": (lambda x, i, v: x.scatter_(0, i, v), (vector(), indices(5), torch.ones(5)), 5 * I8 + 2 * 5 * F4, 1),
    "scatter_add": (
        lambda x, i, v: x.scatter_add_(0, i, v),
        (vector(), indices(5), torch.ones(5)),
        5 * I8 + 3 * 5 * F4,
        1,
    ),
    "index_copy": (
        lambda x, i, v: x.index_copy_(0, i, v),
        (matrix(N, 3), indices(5), matrix(5, 3)),
        5 * I8 + 30 * F4,
        1,
    ),
    "scatter out of place": (
        lambda x, i, v: x.scatter(0, i, v),
        (vector(), indices(5), torch.ones(5)),
        2 * N * F4 + 5 * (I8 + F4),
        1,
    ),
    # networks
    "linear": (
        F.linear,
        (matrix(8, 20), matrix(30, 20), torch.zeros(30)),
        (8 * 20 + 30 * 20 + 30 + 8 * 30) * F4,
        1,
    ),
    "linear and relu": (
        lambda x, w, b: F.linear(x, w, b).relu_(),
        (matrix(8, 20), matrix(30, 20), torch.zeros(30)),
        (8 * 20 + 30 * 20 + 30 + 3 * 8 * 30) * F4,
        2,
    ),
    "batch norm, training": (
        # reads the input, 2 parameters and 2 statistics; writes the output, 2 saved and 2 running statistics
        lambda x, m, v, w, b: torch.native_batch_norm(x, w, b, m, v, True, 0.1, 1e-5),
        (matrix(8, 5), torch.zeros(5), torch.ones(5), torch.ones(5), torch.zeros(5)),
        (2 * 8 * 5 + 8 * 5) * F4,
        1,
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operation(name: str, mode: Callable[[], Any]) -> None:
    function, args, expected_bytes, expected_kernels = OPERATIONS[name]
    with mode():
        cost = count_cost(function, *args)
    assert (cost.bytes, cost.kernels) == (expected_bytes, expected_kernels), str(cost)


def test_backward_is_counted() -> None:
    x, w = matrix(8, 20), torch.zeros(30, 20, requires_grad=True)
    with CostCounter() as counter:
        F.linear(x, w).sum().backward()
    forward = (8 * 20 + 30 * 20 + 8 * 30) + (8 * 30 + 1)  # mm, sum
    # The gradient of the sum is a one, expanded; the weight's is one matrix product with it.
    backward = 1 + (1 + 8 * 20 + 30 * 20)
    assert counter.bytes == (forward + backward) * F4, str(counter.cost)
    assert counter.kernels == 4
    assert counter.by_op["aten.mm"].kernels == 2
    assert counter.by_op["aten.mm"].bytes == (8 * 20 + 30 * 20 + 8 * 30 + 1 + 8 * 20 + 30 * 20) * F4


def test_second_backward_adds_in_place() -> None:
    w = torch.zeros(N, requires_grad=True)
    w.grad = torch.zeros(N)
    cost = count_cost(lambda: (w * 2).sum().backward())
    # forward: mul, sum; backward: one, mul by it (expanded), add to the gradient
    assert cost.bytes == (2 * N + N + 1 + 1 + (1 + N) + 3 * N) * F4, str(cost)


def test_fused_adam_reads_but_does_not_write_the_gradients() -> None:
    w = torch.zeros(N, requires_grad=True)
    w.grad = torch.ones(N)
    optimizer = torch.optim.Adam([w], fused=True)
    optimizer.step()
    cost = count_cost(optimizer.step)
    # parameter and two moments are read and written, the gradient read; the step count goes up by one, then is read
    assert cost.by_op["aten._fused_adam_"].bytes == (7 * N + 1) * F4
    assert cost.bytes == (7 * N + 3) * F4, str(cost)


def test_custom_operation_is_one_kernel() -> None:
    library = torch.library.Library("leanbayes_test", "DEF")
    library.define("scale_and_shift_(Tensor(a!) x, Tensor scale, Tensor shift) -> Tensor")
    library.impl(
        "scale_and_shift_", lambda x, scale, shift: x.mul_(scale).add_(shift).sum(), "CompositeExplicitAutograd"
    )
    cost = count_cost(torch.ops.leanbayes_test.scale_and_shift_, vector(), vector(), vector())
    assert (cost.bytes, cost.kernels) == ((4 * N + 1) * F4, 1), str(cost)
    assert set(cost.by_op) == {"leanbayes_test.scale_and_shift_"}


def test_vmap_is_counted_as_the_batched_kernel() -> None:
    cost = count_cost(torch.func.vmap(torch.dot), matrix(5, 10), matrix(5, 10))
    assert cost.bytes >= (2 * 50 + 5) * F4
    assert cost.kernels <= 2


def test_inference_mode_costs_as_much_as_no_grad() -> None:
    network = nn.LSTM(4, 8, num_layers=2, batch_first=True)
    x = torch.zeros(2, 3, 4)
    with torch.no_grad():
        expected = count_cost(network, x)
    with torch.inference_mode():
        assert count_cost(network, x) == expected


def test_results_do_not_change() -> None:
    x = torch.arange(6.0)
    with CostCounter(), torch.inference_mode():
        result = F.linear(x, torch.ones(2, 6))
    assert result.tolist() == [15.0, 15.0]


def test_table_lists_the_most_expensive_operations_first() -> None:
    cost = count_cost(lambda x: (x + x[:1]).sum(), vector())
    assert isinstance(cost, Cost)
    lines = str(cost).splitlines()
    assert [line.split()[0] for line in lines] == ["operation", "aten.add", "aten.sum", "total"]
    assert "12,008" in lines[-1]


def test_table_of_many_operations_sums_the_rest() -> None:
    unary = [torch.abs, torch.cos, torch.sin, torch.exp, torch.log1p, torch.neg, torch.sqrt, torch.tan, torch.tanh]
    cost = count_cost(lambda x: [f(x) for f in [*unary, torch.erf, torch.sigmoid, torch.ceil]], vector())
    lines = str(cost).splitlines()
    assert len(lines) == 13
    assert lines[-2].split()[:4] == ["2", "others", "2", "16,000"]


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="sparse"):
        count_cost(lambda x: x.to_sparse(), vector())


def of_lengths(*lengths: int, layout: torch.layout) -> Tensor:
    """Return a nested tensor of sequences with 8 channels."""
    return torch.nested.nested_tensor([torch.zeros(length, 8) for length in lengths], layout=layout)


LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@NESTED
@LAYOUTS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_buffer_of_a_nested_tensor_counts(layout: torch.layout, mode: Callable[[], Any]) -> None:
    x, network = of_lengths(2, 4, layout=layout), nn.Linear(8, 3)
    with mode():
        cost = count_cost(lambda: torch.nested.to_padded_tensor(torch.relu(network(x)), 0.0))
    weights, given, made, padded = 8 * 3 + 3, 6 * 8, 6 * 3, 2 * 4 * 3
    assert cost.bytes == ((weights + given + made) + 2 * made + (made + padded)) * F4
    assert cost.kernels == 3
    with torch.no_grad():
        assert peak(lambda: torch.relu(network(x))).peak_bytes == 2 * made * F4


@NESTED
@LAYOUTS
def test_backward_of_nested_tensors_is_counted(layout: torch.layout) -> None:
    x, network = of_lengths(2, 4, layout=layout), nn.Linear(8, 3)
    output = torch.nested.to_padded_tensor(network(x), 0.0)
    cost = count_cost(output.backward, torch.ones_like(output))
    weight, bias, given, made = 8 * 3, 3, 6 * 8, 6 * 3
    assert cost.by_op["aten.linear_backward"].bytes == ((given + made + weight) + (weight + bias)) * F4
    assert cost.kernels == 2  # the other one removes the padding


@NESTED
def test_padding_that_a_transformer_encoder_skips_costs_nothing() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network, x = nn.TransformerEncoder(layer, 1).eval(), torch.zeros(3, 5, 8)
    lengths = torch.tensor([3, 4, 5])
    mask = torch.arange(5) >= lengths[:, None]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            by_op = count_cost(network, x, src_key_padding_mask=mask).by_op
        kept, all_of_it, of_mask = 12 * 8 * F4, 15 * 8 * F4, 15
        assert by_op["aten._nested_tensor_from_mask"].bytes == all_of_it + of_mask + kept
        weights = sum(parameter.nbytes for parameter in layer.parameters())
        assert by_op["aten._transformer_encoder_layer_fwd"].bytes == kept + weights + kept
        assert by_op["aten.to_padded_tensor"].bytes == kept + all_of_it


@NESTED
@LAYOUTS
def test_flops_of_nested_tensors_are_counted_or_refused(layout: torch.layout) -> None:
    x, network = of_lengths(2, 4, layout=layout), nn.Linear(8, 3)
    with torch.no_grad(), FlopCounter(network.parameters()) as counter:
        network(x)
    assert counter.flops.dense == 2 * 6 * 8 * 3
    with pytest.raises(TypeError, match="nested"), torch.no_grad(), FlopCounter():
        torch.bmm(of_lengths(8, 8, layout=layout), torch.zeros(2, 8, 3))


def peak(function: Callable[[], Any]) -> PeakMemory:
    with PeakMemory() as memory:
        function()
    return memory


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x + 1
    return x


def held(x: Tensor) -> None:
    a = x + 1
    b = a.view(10, -1)
    del a  # its view keeps the memory
    c = b * 2
    del b
    chain(c, 1)


@pytest.mark.parametrize(
    ("function", "vectors"),
    [
        (lambda x: None, 0),
        (lambda x: x.view(10, -1).add_(1), 0),
        (lambda x: chain(x, 1), 1),
        (lambda x: chain(x, 9), 2),  # the old and the new one
        (lambda x: [x + 1, x + 2, x + 3], 3),
        (held, 2),
        (lambda x: (torch.tensor([0.0] * N), torch.empty(N)), 2),
        (lambda x: torch.ops.aten.lift_fresh(x + 1), 1),
        (lambda x: x.expand(50, N) + x, 50),
        (lambda x: [part + 1 for part in x.split(N // 2)], 1),
        (lambda x: torch.addcmul(x, x * 2, x * 3).add_(1), 3),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_peak_memory(function: Callable[[Tensor], Any], vectors: int, mode: Callable[[], Any]) -> None:
    x = vector()
    with mode():
        memory = peak(lambda: function(x))
    assert memory.peak_bytes == vectors * N * F4
    assert memory.live_bytes == 0


def test_peak_memory_includes_tensors_saved_for_backward() -> None:
    w = torch.zeros(N, requires_grad=True)

    def step() -> None:
        w.exp().exp().exp().sum().backward()

    memory = peak(step)
    # When the gradient of the third result is computed, three results are saved, beside the sum and its gradient. Each
    # later gradient replaces a result that is no longer needed.
    assert memory.peak_bytes == (4 * N + 2) * F4
    assert memory.live_bytes == N * F4  # the gradient
    w.grad = None
    assert memory.live_bytes == 0


def test_peak_memory_of_inference_mode_sees_inside_composite_operations() -> None:
    x = torch.zeros(4, 3, 8)
    with torch.no_grad():
        expected = peak(lambda: nn.LSTM(8, 8)(x)).peak_bytes
    with torch.inference_mode():
        assert peak(lambda: nn.LSTM(8, 8)(x)).peak_bytes == expected


def test_a_compiled_function_is_counted_like_an_eager_one() -> None:
    # A separate process, because the compiler warns and changes global state.
    program = (
        "import torch; from leanbayes.core.counters import CostCounter\n"
        "f = lambda x: (x + 1).mul_(2); x = torch.zeros(10)\n"
        "with CostCounter() as compiled: torch.compile(f)(x)\n"
        "with CostCounter() as eager: f(x)\n"
        "assert compiled.cost == eager.cost and eager.kernels == 2"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def attention(heads: int = 2, key_heads: int = 2, depth: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return ones(3, heads, 5, 8), ones(3, key_heads, 7, 8), ones(3, key_heads, 7, depth)


_NO_ONEDNN = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
# Function, arguments, and the multiply-adds of its products.
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "linear": (F.linear, (ones(8, 20), ones(30, 20), ones(30)), 8 * 20 * 30),
    "linear on tokens": (F.linear, (ones(2, 4, 20), ones(30, 20)), 8 * 20 * 30),
    "linear on one vector": (F.linear, (ones(20), ones(30, 20)), 20 * 30),
    "addmm in place": (lambda out, a, b: out.addmm_(a, b), (ones(8, 30), ones(8, 20), ones(20, 30)), 8 * 20 * 30),
    "bmm": (torch.bmm, (ones(5, 8, 20), ones(5, 20, 30)), 5 * 8 * 20 * 30),
    "baddbmm": (torch.baddbmm, (ones(5, 8, 30), ones(5, 8, 20), ones(5, 20, 30)), 5 * 8 * 20 * 30),
    "addbmm": (torch.addbmm, (ones(8, 30), ones(5, 8, 20), ones(5, 20, 30)), 5 * 8 * 20 * 30),
    "matrix times vector": (torch.mv, (ones(8, 20), ones(20)), 8 * 20),
    "matrix times vector, added": (torch.addmv, (ones(8), ones(8, 20), ones(20)), 8 * 20),
    "einsum": (lambda x, w: torch.einsum("bld,de->ble", x, w), (ones(2, 4, 20), ones(20, 30)), 8 * 20 * 30),
    "product with nothing": (torch.mm, (ones(8, 0), ones(0, 30)), 0),
    # Each weight is used for every pixel of the output: 16 → 8 by the stride, → 6 without padding.
    "conv1d": (F.conv1d, (ones(2, 3, 16), ones(5, 3, 3)), 2 * 14 * 3 * 5 * 3),
    "strided": (lambda x, w: F.conv2d(x, w, None, 2, 1), (ones(2, 4, 16, 16), ones(6, 4, 3, 3)), 2 * 8 * 8 * 4 * 6 * 9),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (ones(2, 4, 16, 16), ones(6, 2, 3, 3)), 2 * 14 * 14 * 2 * 6 * 9),
    "dilated": (lambda x, w: F.conv2d(x, w, dilation=5), (ones(2, 4, 16, 16), ones(6, 4, 3, 3)), 2 * 36 * 4 * 6 * 9),
    "one image": (F.conv2d, (ones(4, 16, 16), ones(6, 4, 3, 3)), 14 * 14 * 4 * 6 * 9),
    "conv3d": (F.conv3d, (ones(2, 3, 4, 4, 4), ones(5, 3, 2, 2, 2)), 2 * 27 * 3 * 5 * 8),
    # Each weight is used for every pixel of the input.
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
        (ones(2, 4, 8, 8), ones(4, 6, 3, 3)),
        2 * 64 * 4 * 6 * 9,
    ),
    "transposed in groups": (
        lambda x, w: F.conv_transpose1d(x, w, stride=3, groups=2),
        (ones(2, 4, 8), ones(4, 3, 5)),
        2 * 8 * 4 * 3 * 5,
    ),
    # Scores of all pairs, and the mean of the values.
    "attention": (F.scaled_dot_product_attention, attention(), 3 * 2 * 5 * 7 * (8 + 8)),
    "attention to short values": (F.scaled_dot_product_attention, attention(depth=4), 3 * 2 * 5 * 7 * (8 + 4)),
    "attention without a batch": (
        F.scaled_dot_product_attention,
        (ones(2, 5, 8), ones(2, 7, 8), ones(2, 7, 8)),
        2 * 5 * 7 * (8 + 8),
    ),
    "attention with shared keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        attention(heads=4, key_heads=2),
        3 * 4 * 5 * 7 * (8 + 8),
    ),
    "bilinear": (F.bilinear, (ones(8, 3), ones(8, 4), ones(5, 3, 4)), 8 * 3 * 4 * 5),
    # Four gates of 8, from 6 inputs and 8 states; in the second layer from the 16 states of both directions and 8.
    "LSTM": (nn.LSTM(6, 8, 2, bidirectional=True), (ones(5, 3, 6),), 5 * 3 * 2 * 4 * 8 * ((6 + 8) + (16 + 8))),
    "LSTM with projections": (nn.LSTM(6, 8, proj_size=2), (ones(5, 3, 6),), 5 * 3 * (4 * 8 * (6 + 2) + 8 * 2)),
    "GRU": (nn.GRU(6, 8), (ones(5, 3, 6),), 5 * 3 * 3 * 8 * (6 + 8)),
    "RNN cell": (nn.RNNCell(6, 8), (ones(3, 6),), 3 * 8 * (6 + 8)),
    # no products
    "elementwise": (lambda x: (x * x + x).relu().softmax(-1).sum(), (ones(8, 20),), 0),
    "norms and pooling": (lambda x: F.max_pool2d(F.layer_norm(x, (4,)), 2), (ones(2, 3, 4, 4),), 0),
    "lookup": (F.embedding, (indices(5), ones(9, 3)), 0),
    "two vectors": (torch.dot, (ones(20), ones(20)), 0),
}


@_NO_ONEDNN
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_flops_of_a_product(name: str, mode: Callable[[], Any]) -> None:
    function, args, multiply_adds = PRODUCTS[name]
    with mode(), FlopCounter() as counter:
        function(*args)
    assert counter.flops == Flops(2 * multiply_adds, 2 * multiply_adds)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"lstm"}))  # torch does not count an LSTM
def test_flops_equal_those_of_torch(name: str) -> None:
    network, x = CASES[name].build(), CASES[name].example()  # training mode fuses no layer
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as theirs:
        network(x)
    with FlopCounter() as ours:
        network(x)
    assert ours.flops.dense == theirs.get_total_flops() > 0


@_NO_ONEDNN
def test_cudnn_counts_like_the_decomposed_layer() -> None:
    lstm, x = nn.LSTM(6, 8, proj_size=2), ones(5, 3, 6)
    with torch.no_grad(), FlopCounter(lstm.parameters()) as decomposed:
        lstm(x)
    counter = FlopCounter(lstm.parameters())
    arguments = {"input": x, "weight": list(lstm.parameters()), "weight_stride0": 5, "weight_buf": ones(9)}
    counter.observe(torch.ops.aten._cudnn_rnn.default, arguments, ())
    assert counter.flops == decomposed.flops
    counter.observe(torch.ops.aten._cudnn_rnn_backward.default, arguments, ())
    assert counter.flops == decomposed.flops * 3


def test_fused_layers_raise_an_error() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), ones(2, 5, 8)
    with pytest.raises(TypeError, match="set_fastpath_enabled"), torch.no_grad(), FlopCounter():
        layer(x)
    with pytest.raises(TypeError, match="set_fastpath_enabled"), torch.no_grad(), FlopCounter():
        layer.self_attn(x, x, x)


def test_an_operation_of_another_library_called_mm_is_not_a_product() -> None:
    library = torch.library.Library("leanbayes_flops_test", "DEF")
    library.define("mm(Tensor x) -> Tensor")
    library.impl("mm", lambda x: x.clone(), "CompositeExplicitAutograd")
    with FlopCounter() as counter:
        torch.ops.leanbayes_flops_test.mm(vector())
    assert counter.flops == Flops()


# -- effective FLOPs --------------------------------------------------------------------------------------------------


def quarter(*shape: int) -> Tensor:
    """Return a weight with every fourth entry different from zero."""
    weight = torch.zeros(shape)
    weight.view(-1)[::4] = 1
    return weight


X = torch.zeros(8, 20)  # activations; their zeros do not reduce the FLOPs


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda w: F.linear(X, w), quarter(30, 20)),
        (lambda w: X @ w, quarter(20, 30)),
        (lambda w: w @ X.t(), quarter(30, 20)),
        (lambda w: X.view(2, 4, 20) @ w.expand(2, 20, 30), quarter(20, 30)),
        (lambda w: F.conv1d(X.view(2, 4, 20), w, groups=2), quarter(6, 2, 4)),
        (lambda w: F.conv_transpose1d(X.view(2, 4, 20), w), quarter(4, 6, 4)),
        (lambda w: F.bilinear(X, X, w), quarter(3, 20, 20)),
        (lambda w: F.scaled_dot_product_attention(X.view(2, 1, 4, 20), w, w), quarter(2, 1, 7, 20)),
        # a tensor computed from the weight alone is a weight too
        (lambda w: X.double() @ w.double(), quarter(20, 30)),
        (lambda w: X @ w.t().contiguous().reshape(20, 30), quarter(20, 30)),
        (lambda w: X @ (w * 2.0 / 3), quarter(20, 30)),
        (lambda w: X @ (w * torch.tensor(2.0)), quarter(20, 30)),
        (lambda w: X @ torch.cat([w, torch.zeros_like(w) + w], 1), quarter(20, 30)),
        (lambda w: X @ torch.where(torch.arange(20)[:, None] % 2 > 0, w + w, w), quarter(20, 30)),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_effective_flops_are_proportional_to_the_density(
    function: Callable[[Tensor], Tensor], weight: Tensor, mode: Callable[[], Any]
) -> None:
    with mode(), FlopCounter([weight]) as counter:
        function(weight)
    assert counter.flops.dense == 4 * counter.flops.effective > 0


def test_effective_flops_of_an_lstm() -> None:
    lstm = nn.LSTM(6, 8)
    weights = dict(lstm.named_parameters())
    with torch.no_grad(), FlopCounter(lstm.parameters()) as counter:
        weights["weight_ih_l0"].zero_()
        weights["weight_hh_l0"].fill_(1)
        lstm(ones(5, 3, 6))
    assert counter.flops.dense == 2 * 5 * 3 * 4 * 8 * (6 + 8)
    assert counter.flops.effective == 2 * 5 * 3 * 4 * 8 * 8


def test_part_of_a_weight_has_its_own_density() -> None:
    weight = torch.cat([torch.zeros(10, 20), ones(5, 20)])
    with FlopCounter([weight]) as counter:
        for part in weight.chunk(3):
            F.linear(X, part)
    assert counter.flops == Flops(2 * 8 * 20 * 15, 2 * 8 * 20 * 5)


def test_masks_and_parametrizations_count() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(20, 30))
    mask = quarter(30, 20)
    with FlopCounter(layer.parameters(), [mask]) as counter:
        F.linear(X, layer.weight * mask)
    assert counter.flops.dense == 4 * counter.flops.effective
    with FlopCounter(layer.parameters()) as counter:
        F.linear(X, layer.weight * (X[:1] * 0 + mask))  # not a weight, because it depends on the inputs
    assert counter.flops.dense == counter.flops.effective


def test_the_density_of_the_last_of_two_weights_counts_and_their_product_is_not_a_weight() -> None:
    latents, weight = torch.zeros(8, 20), quarter(20, 30)
    with FlopCounter([latents, weight]) as counter:
        product = latents @ weight
        product.relu() @ ones(30, 2)
    assert counter.flops == Flops(2 * 8 * 20 * 30 + 2 * 8 * 30 * 2, 2 * 8 * 20 * 30 // 4 + 2 * 8 * 30 * 2)


def test_constants_are_not_weights() -> None:
    with FlopCounter(constants=[X]) as counter:
        X @ ones(20, 30)
        torch.zeros(8, 20) @ ones(20, 30)
    assert counter.flops == Flops(2 * 2 * 8 * 20 * 30, 2 * 2 * 8 * 20 * 30)


def test_a_weight_that_the_inputs_overwrote_is_no_longer_a_weight() -> None:
    weight = ones(20, 30)
    with FlopCounter([weight]) as counter:
        gated = weight.clone()
        gated.mul_(X[0, :, None])
        X @ gated
    assert counter.flops == Flops(2 * 8 * 20 * 30, 2 * 8 * 20 * 30)


def test_freed_memory_is_forgotten() -> None:
    weight = ones(20, 30)
    with FlopCounter([weight]) as counter:
        for _ in range(20):
            copy = weight.clone()
            assert counter._is_weight(copy) is True
            del copy
            assert not counter._derived
            assert counter._is_weight(X[:, :5] + 0) is None


def test_tied_weight_counts_at_each_use() -> None:
    weight = quarter(20, 20)
    with FlopCounter([weight]) as counter:
        F.linear(F.linear(X, weight), weight)
    assert counter.flops == Flops(2 * 2 * 8 * 20 * 20, 2 * 8 * 20 * 20 // 2)


def test_flops_of_the_backward_pass() -> None:
    layers = (nn.Conv2d(3, 4, 3, stride=2), nn.ConvTranspose2d(4, 4, 3, groups=2), nn.Linear(4 * 5 * 5, 2))
    network = nn.Sequential(*layers[:2], nn.Flatten(), layers[2])
    weights = [layer.weight for layer in layers]
    for weight in weights:
        weight.data.copy_(quarter(*weight.shape))
    forward = [2 * 5 * 9 * w for w in (3 * 4 * 9, 4 * 2 * 9)] + [2 * 5 * 100 * 2]
    with FlopCounter(network.parameters()) as counter:
        output = network(ones(5, 3, 7, 7))
        assert counter.flops == Flops(sum(forward), sum(forward) // 4)
        output.sum().backward()
        torch.optim.SGD(network.parameters(), 0.1).step()
    # The inputs of the first layer need no gradient. That of other inputs is a product with the weight.
    for_inputs = sum(forward[1:])
    assert counter.flops.dense == 2 * sum(forward) + for_inputs
    assert counter.flops.effective == sum(forward) // 4 + sum(forward) + for_inputs // 4
    assert all(counter._is_weight(weight) for weight in weights)  # a step of the optimizer leaves it one


def test_flops_of_attention_backward() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in attention())
    with FlopCounter() as counter:
        output = F.scaled_dot_product_attention(q, k, v)
        forward = counter.flops
        output.sum().backward()
    # The scores once more, and two products for each of the two.
    assert counter.flops.dense - forward.dense == 2 * 3 * 2 * 5 * 7 * (3 * 8 + 2 * 8)


def test_flops_add_up_and_multiply() -> None:
    assert Flops(3, 2) + Flops(10, 5) * 2 == Flops(23, 12)
