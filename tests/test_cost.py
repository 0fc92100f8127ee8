"""Costs against answers worked out by hand."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.cost import Cost, CostCounter, PeakMemory, count_cost

N = 1000  # entries of a vector
F4 = 4  # bytes of a float32
I8 = 8  # bytes of an index


def vector() -> Tensor:
    return torch.zeros(N)


def matrix(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns)


def indices(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long)


# What is run, on what, the bytes it moves and the kernels it takes.
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


def test_inference_mode_costs_what_no_grad_does() -> None:
    network = nn.LSTM(4, 8, num_layers=2, batch_first=True)
    x = torch.zeros(2, 3, 4)
    with torch.no_grad():
        expected = count_cost(network, x)
    with torch.inference_mode():
        assert count_cost(network, x) == expected


def test_results_are_those_of_the_function() -> None:
    x = torch.arange(6.0)
    with CostCounter(), torch.inference_mode():
        result = F.linear(x, torch.ones(2, 6))
    assert result.tolist() == [15.0, 15.0]


def test_table_names_the_dearest_first() -> None:
    cost = count_cost(lambda x: (x + x[:1]).sum(), vector())
    assert isinstance(cost, Cost)
    lines = str(cost).splitlines()
    assert [line.split()[0] for line in lines] == ["operation", "aten.add", "aten.sum", "total"]
    assert "12,008" in lines[-1]


def test_table_of_many_operations_adds_up_the_rest() -> None:
    unary = [torch.abs, torch.cos, torch.sin, torch.exp, torch.log1p, torch.neg, torch.sqrt, torch.tan, torch.tanh]
    cost = count_cost(lambda x: [f(x) for f in [*unary, torch.erf, torch.sigmoid, torch.ceil]], vector())
    lines = str(cost).splitlines()
    assert len(lines) == 13
    assert lines[-2].split()[:4] == ["2", "others", "2", "16,000"]


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="sparse"):
        count_cost(lambda x: x.to_sparse(), vector())


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
    del a  # its view keeps it
    c = b * 2
    del b
    chain(c, 1)


@pytest.mark.parametrize(
    ("function", "vectors"),
    [
        (lambda x: None, 0),
        (lambda x: x.view(10, -1).add_(1), 0),
        (lambda x: chain(x, 1), 1),
        (lambda x: chain(x, 9), 2),  # the old and the new
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


def test_peak_memory_holds_what_backward_needs() -> None:
    w = torch.zeros(N, requires_grad=True)

    def step() -> None:
        w.exp().exp().exp().sum().backward()

    memory = peak(step)
    # Three results are kept for backward, beside the sum and its gradient, when the gradient of the third is made; each
    # gradient after it takes the place of a result that is then no longer needed.
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


def test_compiled_function_is_counted_as_if_it_were_not() -> None:
    # In a process of its own: what the compiler warns of and leaves behind is not the matter here.
    program = (
        "import torch; from leanbayes.cost import count_cost\n"
        "f = lambda x: (x + 1).mul_(2); x = torch.zeros(10)\n"
        "assert count_cost(torch.compile(f), x) == count_cost(f, x)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
