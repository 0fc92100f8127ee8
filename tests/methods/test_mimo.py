"""MIMO against a loop over its inputs and outputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.evaluation.cost import count_flops


def mlp() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        ).double()


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 2, 3, generator=generator, dtype=torch.float64), torch.arange(rows) % 3


def by_hand(bnn: lb.BayesianModel, inputs: list[Tensor]) -> Tensor:
    """Return the outputs (members, rows, classes) for one batch of inputs per member."""
    inner: Any = bnn.network.get_submodule("inner")
    weight, bias = inner[1].weight, inner[1].bias
    parts = weight.split(6, 1)
    hidden = torch.tanh(sum(x.flatten(1) @ part.T for x, part in zip(inputs, parts, strict=True)) + bias)
    hidden = torch.tanh(hidden @ inner[3].weight.T + inner[3].bias)
    heads, biases = inner[5].weight.split(3), inner[5].bias.split(3)
    return torch.stack([hidden @ head.T + b for head, b in zip(heads, biases, strict=True)])


def test_a_prediction_repeats_the_input() -> None:
    x, _ = batch()
    bnn = lb.bayesianize(mlp(), lb.MIMO(4))
    outputs = bnn.predict(x, keep_outputs=True).outputs
    with torch.no_grad():
        torch.testing.assert_close(outputs, by_hand(bnn, [x] * 4))
    assert bnn.predict(x).samples == 4
    torch.testing.assert_close(bnn.predict(x, memory_budget=1).probs, outputs.softmax(-1).mean(0))  # type: ignore[union-attr]
    torch.testing.assert_close(bnn.predict(x, samples=2, keep_outputs=True).outputs, outputs[:2])  # type: ignore[index]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("lstm", "language_model")])
def test_members_are_plain_networks_of_the_same_shape(name: str) -> None:
    network, x = CASES[name].build().double(), CASES[name].example().double()
    bnn = lb.bayesianize(network, lb.MIMO(3))
    outputs = bnn.predict(x, keep_outputs=True).outputs
    assert outputs is not None
    for number, output in enumerate(outputs):
        member = bnn.network.member(number).eval()  # type: ignore[operator]
        with torch.no_grad():
            torch.testing.assert_close(output, member(x))
        assert {n: p.shape for n, p in member.state_dict().items()} == {
            n: p.shape for n, p in network.state_dict().items()
        }


@pytest.mark.parametrize(("repetition", "times"), [(0.0, 1), (0.0, 3), (0.6, 1), (0.5, 2), (1.0, 1)])
def test_a_loss_is_the_sum_over_outputs_with_the_labels_of_their_inputs(repetition: float, times: int) -> None:
    x, y = batch()
    bnn = lb.bayesianize(mlp(), lb.MIMO(3, input_repetition=repetition, batch_repetitions=times), seed=1).train()
    seen: list[Tensor] = []
    first = bnn.network.get_submodule("inner.1")
    first.register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    loss = lb.elbo_loss(bnn, x, y, num_data=7)
    gradients = torch.autograd.grad(loss, list(bnn.parameters()))
    (joined,) = seen  # one pass
    slots = joined.split(6, 1)
    numbers = [torch.cdist(slot, x.flatten(1)).argmin(1) for slot in slots]
    for slot, number in zip(slots, numbers, strict=True):
        assert torch.equal(slot, x.flatten(1)[number])
        assert torch.equal(number.bincount(), torch.full((7,), times))  # every example, as often
    same = (numbers[0] == numbers[1]) & (numbers[0] == numbers[2])
    assert same.sum() >= round(repetition * 7 * times)
    assert repetition == 1 or not same.all()
    outputs = by_hand(bnn, [x[number] for number in numbers])
    parts = [F.cross_entropy(output, y[number]) for output, number in zip(outputs, numbers, strict=True)]
    expected = torch.stack(parts).sum()
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, list(bnn.parameters())), strict=True):
        torch.testing.assert_close(found, wanted)


def test_inputs_are_drawn_again_in_every_step_and_follow_from_the_key() -> None:
    x, y = batch()
    bnn = lb.bayesianize(mlp(), lb.MIMO(3))
    losses = [lb.elbo_loss(bnn, x, y, num_data=7).item() for _ in range(5)]
    assert len(set(losses)) == 5
    with bnn.frozen(2):
        assert lb.elbo_loss(bnn, x, y, num_data=7) == lb.elbo_loss(bnn, x, y, num_data=7)


def test_all_members_cost_one_pass() -> None:
    x, _ = batch(2)
    assert count_flops(lb.bayesianize(mlp(), lb.MIMO(3)), x).dense == 2 * 2 * (18 * 8 + 8 * 8 + 8 * 9)


def test_a_fit_learns() -> None:
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    bnn = lb.fit(network, lb.MIMO(2), data, epochs=30, lr=1e-2, batch_size=32, device="cpu", progress=False)
    prediction = bnn.predict(x)
    assert (prediction.label == data.tensors[1]).float().mean() > 0.9
    assert prediction.mutual_information.max() > 0


class Flat(nn.Module):
    """A network that merges the tokens of an example into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.flatten(0, 1)))


def test_what_mimo_cannot_widen_is_one_sentence() -> None:
    for name, layer in (("lstm", "LSTM"), ("language_model", "Embedding")):
        with pytest.raises(lb.UnsupportedOperation, match=f"has a {layer} there"):
            lb.bayesianize(CASES[name].build(), lb.MIMO(2))
    with pytest.raises(lb.UnsupportedOperation, match="without groups and"):
        lb.bayesianize(nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 2, 1)), lb.MIMO(2))
    with pytest.raises(lb.LeanBayesError, match="the network has none"):
        lb.bayesianize(nn.Sequential(nn.LayerNorm(3)), lb.MIMO(2))
    bnn = lb.bayesianize(Flat(), lb.MIMO(2), likelihood=lb.Gaussian())
    with pytest.raises(lb.UnsupportedOperation, match="a row per example"):
        bnn.predict(torch.zeros(2, 3, 4))
    for settings in ({"members": 0}, {"input_repetition": 1.5}, {"batch_repetitions": 0}):
        with pytest.raises(lb.LeanBayesError, match=next(iter(settings))):
            lb.MIMO(**settings)


def test_there_is_no_mean_network() -> None:
    bnn = lb.bayesianize(mlp(), lb.MIMO(2))
    with pytest.raises(lb.LeanBayesError, match="not a single network"):
        bnn.to_deterministic()
    with pytest.raises(lb.LeanBayesError, match="no mean network"):
        bnn.predict(batch()[0], rule="mean")
