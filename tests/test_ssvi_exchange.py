"""An exchange of weights keeps the density and all that is known of the others, and looks without touching."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CASES
from sparse_cases import ADDITIONS, REMOVALS, stepped, subspace
from torch import Tensor, nn
from training_cases import (
    conv,
    pictures,
    task,
)

import leanbayes as lb
from leanbayes.gradients import mean_squared_gradient, weight_gradient
from leanbayes.ranking import highest
from leanbayes.sparsity.replacement import replace_weights

# -- an exchange ------------------------------------------------------------------------------------------------------


def by_position(posterior: Any, values: Tensor) -> dict[int, float]:
    return dict(zip(posterior.index.tolist(), values.tolist(), strict=True))


@settings(max_examples=20)
@given(
    removal=st.sampled_from(REMOVALS),
    addition=st.sampled_from(ADDITIONS),
    density=st.floats(0.05, 1.0),
    drop=st.floats(0, 0.99),
    network=st.sampled_from(["cnn", "language_model", "lstm", "autoencoder"]),
    optimiser=st.sampled_from(["adam", "sgd"]),
)
def test_an_exchange_keeps_the_density_and_all_that_is_known_of_the_others(
    removal: Any, addition: Any, density: float, drop: float, network: str, optimiser: str
) -> None:
    method = lb.SSVI(density, removal=removal, addition=addition, drop=drop, interval=4, init_std=0.02, draws=2)
    training = stepped(method, network, optimiser)
    bnn, posterior = training.model, subspace(training.model)
    scores = by_position(posterior, method.scores(training, posterior))
    wishes = method.wishes(training, posterior)
    parameters = posterior.entries()
    states = [(one.state[p], p) for one in training.optimisers for p in parameters if p in one.state]
    tensors = [t for state, p in states for t in state.values() if isinstance(t, Tensor) and t.shape == p.shape]
    assert len(tensors) == (5 if optimiser == "adam" else 3)
    steps = [state["step"].item() for state, _ in states if "step" in state]
    before = [by_position(posterior, t.detach()) for t in [*parameters, *tensors]]
    counts, old = posterior.counts, set(posterior.index.tolist())
    places = [tensor.data_ptr() for tensor in [posterior.index, *parameters, *tensors]]
    sigma = by_position(posterior, posterior.std().detach())

    method.after_step(training)

    index = posterior.index.tolist()
    assert index == sorted(set(index))
    assert torch.bincount(bnn.layout.slots_of(posterior.index), minlength=len(bnn.layout)).tolist() == counts
    assert len(index) == round(density * bnn.layout.numel)
    assert [tensor.data_ptr() for tensor in [posterior.index, *parameters, *tensors]] == places
    assert [state["step"].item() for state, _ in states if "step" in state] == steps
    after = [by_position(posterior, t.detach()) for t in [*parameters, *tensors]]
    share = 0.5 * drop * (1 + math.cos(math.pi * 4 / 750))
    start = 0
    for size, count in zip(bnn.layout.sizes, counts, strict=True):
        inside = set(range(start, start + size))
        kept, gone, new = old & set(index) & inside, (old - set(index)) & inside, (set(index) - old) & inside
        assert len(gone) == len(new) == min(int(share * count), size - count)
        assert max((scores[i] for i in gone), default=-math.inf) <= min(scores[i] for i in kept)
        left_out = inside - old - new
        assert min((wishes[i] for i in new), default=math.inf) >= max((wishes[i] for i in left_out), default=-math.inf)
        for position in kept:
            assert all(one[position] == other[position] for one, other in zip(before, after, strict=True))
        for position in new:
            assert after[0][position] == 0
            assert F.softplus(torch.tensor(after[1][position])) == pytest.approx(
                sum(sigma[i] for i in kept) / len(kept), rel=1e-4
            )
            assert not any(state[position] for state in after[2:])
        start += size


def test_among_equals_the_first_go_and_come() -> None:
    training = stepped(lb.SSVI(0.5), "mlp", steps=0)
    posterior = subspace(training.model)
    first, size = posterior.counts[0], training.model.layout.sizes[0]
    old = posterior.index[:first].tolist()
    replace_weights(posterior, [], 0.2, torch.zeros(len(posterior.index)), torch.zeros(training.model.layout.numel))
    number = int(0.2 * first)
    free = [position for position in range(size) if position not in old]
    assert posterior.index[:first].tolist() == sorted(old[number:] + free[:number])


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan]), min_size=1), st.data())
def test_the_highest_are_those_of_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-(0.0 if math.isnan(values[i]) else values[i]), i))
    assert highest(torch.tensor(values), number).tolist() == order[:number]


def test_a_gradient_that_was_left_behind_moves_too() -> None:
    training = stepped(lb.SSVI(0.3, interval=4, drop=0.5))
    posterior = subspace(training.model)
    for parameter in posterior.entries():
        parameter.grad = posterior.index.float().clone() + 1
    old = posterior.index.clone()
    training.model.method.after_step(training)
    new = ~torch.isin(posterior.index, old)
    assert new.any()
    for parameter in posterior.entries():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.where(new, 0, posterior.index.float() + 1))


def test_the_share_falls_as_a_cosine_and_ends() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 30))
    bnn = lb.bayesianize(net, lb.SSVI(0.5, interval=10, until=0.6, drop=0.4))
    x, y = torch.randn(8, 50), torch.arange(8)
    training, posterior, counts = lb.Training(bnn, 100, 1000, batch=(x, y)), subspace(bnn), {}
    for step in range(100):
        old, training.step = posterior.index.clone(), step
        bnn.method.after_step(training)
        gone = int((~torch.isin(old, posterior.index)).sum())
        if gone:
            counts[step + 1] = gone
    shares = {step: 0.2 * (1 + math.cos(math.pi * step / 60)) for step in range(10, 60, 10)}
    assert counts == {step: sum(int(share * k) for k in posterior.counts) for step, share in shares.items()}


def test_a_loop_without_a_batch_is_told() -> None:
    training = stepped(lb.SSVI(0.3, interval=4))
    training.batch = None
    with pytest.raises(lb.LeanBayesError, match=r"set training\.batch"):
        training.model.method.after_step(training)
    training = stepped(lb.SSVI(0.3, interval=4, removal="sensitivity"))
    training.batches = lambda: ()
    with pytest.raises(lb.LeanBayesError, match=r"training\.batches"):
        training.model.method.after_step(training)


def test_a_dense_subspace_has_nothing_to_exchange() -> None:
    training = stepped(lb.SSVI(1.0, interval=4))
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.batch = None  # not even a gradient is taken
    training.model.method.after_step(training)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())


# -- what an exchange looks at ----------------------------------------------------------------------------------------


def network_gradient(net: nn.Module, bnn: lb.BayesianModel, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of a plain network with these weights."""
    for slot, value in zip(bnn.layout, bnn.layout.split(weights), strict=True):
        net.get_parameter(slot.name).data = value.detach().clone()
    parameters = [net.get_parameter(slot.name) for slot in bnn.layout]
    return bnn.layout.join(torch.autograd.grad(F.cross_entropy(net(x), y), parameters))


@pytest.mark.parametrize("network", ["cnn", "vit_mha", "lstm", "language_model"])
def test_the_gradient_is_that_of_the_plain_network(network: str) -> None:
    training = stepped(lb.SSVI(0.4, init_std=0.05), network)
    bnn, (x, y) = training.model, training.batch  # type: ignore[misc]
    net = CASES[network].build().train()
    net.load_state_dict(bnn.to_deterministic().state_dict())
    weights = bnn.posterior.sample(bnn.next_draw().key).detach()
    expected = network_gradient(net, bnn, weights, x, y)
    found = weight_gradient(bnn, weights, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    inactive = torch.ones(bnn.layout.numel, dtype=torch.bool).index_fill_(0, subspace(bnn).index.long(), False)
    assert found[inactive].any()


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("removal", ["snr", "sensitivity"])
def test_looking_changes_nothing(addition: Any, removal: Any) -> None:
    """Neither BatchNorm's statistics, nor gradients, nor the noise of the model and of torch."""
    data = task(pictures())
    bnn = lb.bayesianize(conv(), lb.SSVI(0.3, addition=addition, removal=removal)).train()
    batch = data.train[:16]
    training = lb.Training(bnn, 100, 64, lambda: [batch], batch=batch)
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    state = torch.get_rng_state()
    method: Any = bnn.method
    first = method.scores(training, bnn.posterior), method.wishes(training, bnn.posterior)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
    assert all(p.grad is None for p in bnn.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert bnn._values is None
    again = method.scores(training, bnn.posterior), method.wishes(training, bnn.posterior)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    training.step += 1
    assert torch.equal(method.wishes(training, bnn.posterior), first[1]) == (addition == "mean")


def test_the_addition_criteria() -> None:
    training = stepped(lb.SSVI(0.4, init_std=0.1, draws=3))
    bnn, posterior, (x, y) = training.model, subspace(training.model), training.batch  # type: ignore[misc]

    def wishes(addition: Any) -> Tensor:
        return lb.SSVI(0.4, addition=addition, draws=3).wishes(training, posterior)

    method: Any = lb.SSVI(0.4, addition="draws", draws=3)
    points = [point.detach() for point in method.points(training, posterior)]
    assert len({tuple(point.tolist()) for point in points}) == 3
    gradients = [weight_gradient(bnn, point, x, y).abs() for point in points]
    torch.testing.assert_close(wishes("mean"), weight_gradient(bnn, posterior.mean(), x, y).abs())
    torch.testing.assert_close(wishes("draw"), gradients[0])
    torch.testing.assert_close(wishes("draws"), torch.stack(gradients).mean(0))


def test_sensitivity_is_the_mean_squared_gradient_times_the_second_moment() -> None:
    training = stepped(lb.SSVI(0.4, removal="sensitivity", init_std=0.1))
    bnn, posterior = training.model, subspace(training.model)
    gradients = [weight_gradient(bnn, posterior.mean(), x, y) for x, y in training.batches()]
    squares = torch.stack(gradients).square().mean(0)
    mean = posterior.mean().detach()
    torch.testing.assert_close(mean_squared_gradient(bnn, mean, training.batches()), squares)
    expected = squares[posterior.index] * (posterior.mu.square() + posterior.std().square())
    method: Any = bnn.method
    torch.testing.assert_close(method.scores(training, posterior), expected.detach())


def test_gradients_are_averaged_before_their_size_is_taken() -> None:
    training = stepped(lb.SSVI(0.4))
    calls = []

    def average(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return -2 * tensor

    plain = training.model.method.wishes(training, training.model.posterior)  # type: ignore[attr-defined]
    training.average = average
    averaged = training.model.method.wishes(training, training.model.posterior)  # type: ignore[attr-defined]
    torch.testing.assert_close(averaged, 2 * plain)
    assert (calls[0] < 0).any()


@pytest.mark.parametrize(("addition", "passes"), [("draw", 1), ("mean", 1), ("draws", 4)])
def test_an_exchange_costs_a_pass_and_a_few_operations_a_layer(addition: Any, passes: int) -> None:
    training = stepped(lb.SSVI(0.4, addition=addition, draws=4, interval=4), "resnet")
    called = []
    training.model.network.register_forward_hook(lambda *args: called.append(1))
    posterior, old = subspace(training.model), subspace(training.model).index.clone()
    training.model.method.after_step(training)
    assert len(called) == passes
    assert not torch.equal(posterior.index, old)
    wishes, scores = torch.rand(posterior.layout.numel), torch.rand(len(posterior.index))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        replace_weights(posterior, training.optimisers, 0.3, scores, wishes)
    operations = [event for event in profile.events() if event.name.startswith("aten::") and event.cpu_parent is None]
    assert len(operations) <= 45 * len(posterior.layout) + 60
    for _ in range(2):
        training.step += 1
        training.model.method.after_step(training)
    assert len(called) == passes
