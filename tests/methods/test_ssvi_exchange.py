"""An exchange of weights preserves the density and the state of all other weights, and its criteria change nothing."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import CASES
from sparse_cases import ADDITIONS, REMOVALS, stepped, subspace
from torch import Tensor, nn
from training_cases import (
    conv,
    stripes,
    task,
)

import leanbayes as lb
from leanbayes.core.ranking import highest
from leanbayes.methods.sparse_training.exchange import replace_weights
from leanbayes.model.gradients import mean_squared_gradient, weight_gradient

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
    optimizer=st.sampled_from(["adam", "sgd"]),
)
def test_an_exchange_preserves_the_density_and_the_state_of_other_weights(
    removal: Any, addition: Any, density: float, drop: float, network: str, optimizer: str
) -> None:
    method = lb.SSVI(
        density, removal=removal, addition=addition, drop=drop, interval=4, init_std=0.02, addition_samples=2
    )
    training = stepped(method, network, optimizer)
    bnn, posterior = training.model, subspace(training.model)
    scores = by_position(posterior, method.removal_scores(training, posterior))
    addition = method.addition_scores(training, posterior)
    parameters = posterior.entries()
    states = [(one.state[p], p) for one in training.optimizers for p in parameters if p in one.state]
    tensors = [t for state, p in states for t in state.values() if isinstance(t, Tensor) and t.shape == p.shape]
    assert len(tensors) == (5 if optimizer == "adam" else 3)
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
        most = max((addition[i] for i in left_out), default=-math.inf)
        assert min((addition[i] for i in new), default=math.inf) >= most
        for position in kept:
            assert all(one[position] == other[position] for one, other in zip(before, after, strict=True))
        for position in new:
            assert after[0][position] == 0
            assert F.softplus(torch.tensor(after[1][position])) == pytest.approx(
                sum(sigma[i] for i in kept) / len(kept), rel=1e-4
            )
            assert not any(state[position] for state in after[2:])
        start += size


def test_ties_go_to_the_first_weights() -> None:
    training = stepped(lb.SSVI(0.5), "mlp", steps=0)
    posterior = subspace(training.model)
    first, size = posterior.counts[0], training.model.layout.sizes[0]
    old = posterior.index[:first].tolist()
    replace_weights(posterior, [], 0.2, torch.zeros(len(posterior.index)), torch.zeros(training.model.layout.numel))
    number = int(0.2 * first)
    free = [position for position in range(size) if position not in old]
    assert posterior.index[:first].tolist() == sorted(old[number:] + free[:number])


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan]), min_size=1), st.data())
def test_highest_equals_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-(0.0 if math.isnan(values[i]) else values[i]), i))
    assert highest(torch.tensor(values), number).tolist() == order[:number]


def test_gradients_move_with_their_weights() -> None:
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


def test_the_exchanged_share_falls_along_a_cosine_and_ends() -> None:
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


def test_a_loop_without_a_batch_raises_an_error() -> None:
    training = stepped(lb.SSVI(0.3, interval=4))
    training.batch = None
    with pytest.raises(lb.LeanBayesError, match=r"set training\.batch"):
        training.model.method.after_step(training)
    training = stepped(lb.SSVI(0.3, interval=4, removal="sensitivity"))
    training.batches = lambda: ()
    with pytest.raises(lb.LeanBayesError, match=r"training\.batches"):
        training.model.method.after_step(training)


def test_a_dense_subspace_exchanges_nothing() -> None:
    training = stepped(lb.SSVI(1.0, interval=4))
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.batch = None  # no gradient is needed
    training.model.method.after_step(training)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())


# -- criteria ---------------------------------------------------------------------------------------------------------


def network_gradient(net: nn.Module, bnn: lb.BayesianModel, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of a plain network with these weights."""
    for slot, value in zip(bnn.layout, bnn.layout.split(weights), strict=True):
        net.get_parameter(slot.name).data = value.detach().clone()
    parameters = [net.get_parameter(slot.name) for slot in bnn.layout]
    return bnn.layout.join(torch.autograd.grad(F.cross_entropy(net(x), y), parameters))


@pytest.mark.parametrize("network", ["cnn", "vit_mha", "lstm", "language_model"])
def test_the_gradient_equals_that_of_the_plain_network(network: str) -> None:
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
def test_criteria_change_nothing(addition: Any, removal: Any) -> None:
    """Neither BatchNorm statistics, nor gradients, nor the random state of the model and of torch."""
    data = task(stripes())
    bnn = lb.bayesianize(conv(), lb.SSVI(0.3, addition=addition, removal=removal)).train()
    batch = data.train[:16]
    training = lb.Training(bnn, 100, 64, lambda: [batch], batch=batch)
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    state = torch.get_rng_state()
    method: Any = bnn.method
    first = method.removal_scores(training, bnn.posterior), method.addition_scores(training, bnn.posterior)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
    assert all(p.grad is None for p in bnn.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert bnn._values is None
    again = method.removal_scores(training, bnn.posterior), method.addition_scores(training, bnn.posterior)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    training.step += 1
    assert torch.equal(method.addition_scores(training, bnn.posterior), first[1]) == (addition == "mean")


def test_addition_criteria() -> None:
    training = stepped(lb.SSVI(0.4, init_std=0.1, addition_samples=3))
    bnn, posterior, (x, y) = training.model, subspace(training.model), training.batch  # type: ignore[misc]

    def scores(addition: Any) -> Tensor:
        return lb.SSVI(0.4, addition=addition, addition_samples=3).addition_scores(training, posterior)

    method: Any = lb.SSVI(0.4, addition="samples", addition_samples=3)
    samples = [weights.detach() for weights in method.addition_weights(training, posterior)]
    assert len({tuple(weights.tolist()) for weights in samples}) == 3
    gradients = [weight_gradient(bnn, weights, x, y).abs() for weights in samples]
    training.batches = lambda: [(x[:1], y[:1]), (x[1:], y[1:])]
    others = [weight_gradient(bnn, w, *batch).abs() for w, batch in zip(samples[1:], training.batches(), strict=True)]
    torch.testing.assert_close(scores("mean"), weight_gradient(bnn, posterior.mean(), x, y).abs())
    torch.testing.assert_close(scores("sample"), gradients[0])
    torch.testing.assert_close(scores("samples"), torch.stack([gradients[0], *others]).mean(0))
    training.batches = lambda: [(x[1:], y[1:])]  # fewer batches than samples
    others = [weight_gradient(bnn, w, x[1:], y[1:]).abs() for w in samples[1:]]
    torch.testing.assert_close(scores("samples"), torch.stack([gradients[0], *others]).mean(0))
    training.batches = lambda: ()
    with pytest.raises(lb.LeanBayesError, match=r"batches=\.\.\."):
        scores("samples")


@pytest.mark.parametrize("new_std", ["mean", 0.003])
def test_std_of_new_weights(new_std: Any) -> None:
    training = stepped(lb.SSVI(0.4, drop=0.6, interval=4, new_std=new_std))
    posterior = subspace(training.model)
    before = by_position(posterior, posterior.std().detach())
    training.model.method.after_step(training)
    after, layout = by_position(posterior, posterior.std().detach()), training.model.layout
    slots = {p: int(layout.slots_of(torch.tensor([p]))) for p in {*before, *after}}
    new = after.keys() - before.keys()
    assert new
    for position in new:
        stayed = [before[p] for p in before.keys() & after.keys() if slots[p] == slots[position]]
        expected = sum(stayed) / len(stayed) if new_std == "mean" else new_std
        assert float(after[position]) == pytest.approx(float(expected), rel=1e-5)


def test_sensitivity_is_the_mean_squared_gradient_times_the_second_moment() -> None:
    training = stepped(lb.SSVI(0.4, removal="sensitivity", init_std=0.1))
    bnn, posterior = training.model, subspace(training.model)
    gradients = [weight_gradient(bnn, posterior.mean(), x, y) for x, y in training.batches()]
    squares = torch.stack(gradients).square().mean(0)
    mean = posterior.mean().detach()
    torch.testing.assert_close(mean_squared_gradient(bnn, mean, training.batches()), squares)
    expected = squares[posterior.index] * (posterior.mu.square() + posterior.std().square())
    method: Any = bnn.method
    torch.testing.assert_close(method.removal_scores(training, posterior), expected.detach())


def test_gradients_are_averaged_over_processes_before_the_absolute_value() -> None:
    training = stepped(lb.SSVI(0.4))
    calls = []

    def average(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return -2 * tensor

    plain = training.model.method.addition_scores(training, training.model.posterior)  # type: ignore[attr-defined]
    training.average = average
    averaged = training.model.method.addition_scores(training, training.model.posterior)  # type: ignore[attr-defined]
    torch.testing.assert_close(averaged, 2 * plain)
    assert (calls[0] < 0).any()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # by torch 2.10 itself
@pytest.mark.parametrize(("addition", "passes"), [("sample", 1), ("mean", 1), ("samples", 4)])
def test_an_exchange_costs_one_pass_and_a_few_operations_per_layer(addition: Any, passes: int) -> None:
    training = stepped(lb.SSVI(0.4, addition=addition, addition_samples=4, interval=4), "resnet")
    called = []
    training.model.network.register_forward_hook(lambda *args: called.append(1))
    posterior, old = subspace(training.model), subspace(training.model).index.clone()
    training.model.method.after_step(training)
    assert len(called) == passes
    assert not torch.equal(posterior.index, old)
    addition_scores, removal_scores = torch.rand(posterior.layout.numel), torch.rand(len(posterior.index))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        replace_weights(posterior, training.optimizers, 0.3, removal_scores, addition_scores)
    operations = [event for event in profile.events() if event.name.startswith("aten::") and event.cpu_parent is None]
    assert len(operations) <= 45 * len(posterior.layout) + 60
    for _ in range(2):
        training.step += 1
        training.model.method.after_step(training)
    assert len(called) == passes
