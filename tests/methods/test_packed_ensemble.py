"""Packed ensembles against separate small networks, and against one network with grouped convolutions."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.evaluation.cost import costs_of, count_flops


def network(width: int, groups: int = 1, inputs: int = 3, outputs: int = 5) -> nn.Sequential:
    """Return a network with a width. With groups, it is M networks in one, as the paper has it."""
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, padding=1, bias=False, groups=groups),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, groups=groups),
        nn.BatchNorm2d(2 * width),
        nn.Flatten(2),
        nn.Flatten(),
        nn.Linear(18 * width, 2 * width) if groups == 1 else nn.Conv1d(18 * width, 2 * width, 1, groups=groups),
        nn.GELU(),
        nn.Linear(2 * width, outputs) if groups == 1 else nn.Conv1d(2 * width, outputs, 1, groups=groups),
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 7, 7, generator=generator, dtype=torch.float64), torch.arange(6) % 5


def separate(bnn: lb.BayesianModel, members: int, width: int) -> list[nn.Sequential]:
    """Return small networks that are built apart, with the stacked weights of a packed ensemble."""
    state, found = bnn.network.state_dict(), []
    for number in range(members):
        small = network(width)
        own = {name.removeprefix("inner."): tensor for name, tensor in state.items()}
        small.load_state_dict({n: t if n.endswith("tracked") else t[number] for n, t in own.items()})
        found.append(small.train(bnn.training))
    return found


def test_predictions_are_those_of_separate_networks_and_of_grouped_layers() -> None:
    x, _ = batch()
    bnn = lb.bayesianize(network(8).eval(), lb.PackedEnsemble(4, alpha=2))
    outputs = bnn.predict(x, keep_outputs=True).outputs
    assert outputs is not None
    small = separate(bnn, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(outputs, torch.stack([one(x) for one in small]))
        torch.testing.assert_close(outputs, torch.stack([bnn.network.member(n).eval()(x) for n in range(4)]))  # type: ignore[operator]
        # The paper's network: inputs are repeated, and every layer has one group of channels per member.
        packed = network(16, 4, 12, 20).eval()
        for name, tensor in packed.state_dict().items():
            if not name.endswith("tracked"):
                tensor.copy_(torch.cat([one.state_dict()[name] for one in small]).view(tensor.shape))
        layers = list(packed)
        hidden = nn.Sequential(*layers[:7])(x.repeat(1, 4, 1, 1))
        found = nn.Sequential(*layers[7:])(hidden.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(outputs, found.unflatten(1, (4, 5)).transpose(0, 1))
    cut = bnn.predict(x, memory_budget=1)
    torch.testing.assert_close(cut.probs, outputs.softmax(-1).mean(0))
    for number in range(2):  # fewer samples than members
        first = bnn.predict(x, samples=2, keep_outputs=True).outputs
        assert first is not None
        torch.testing.assert_close(first[number], outputs[number])


def test_training_is_that_of_separate_networks() -> None:
    """Loss, weights and BatchNorm statistics after some steps, and after BatchNorm is refreshed."""
    x, y = batch()
    bnn = lb.bayesianize(network(8), lb.PackedEnsemble(2, alpha=1)).train()
    small = separate(bnn, 2, 4)
    calls: list[int] = []
    bnn.network.get_submodule("inner.0").register_forward_hook(lambda *_: calls.append(1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (bnn, *small)]
    for _ in range(3):
        losses = [lb.elbo_loss(bnn, x, y, num_data=6), *(F.cross_entropy(one(x), y) for one in small)]
        torch.testing.assert_close(losses[0], losses[1] + losses[2])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(calls) == 3  # one pass for all members
    for wanted, found in zip(small, separate(bnn, 2, 4), strict=True):
        for name, tensor in wanted.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)
    bnn.refresh_batchnorm([x, 2 * x])
    norm: Any = bnn.network.get_submodule("inner.1")
    with torch.no_grad():
        means = [torch.stack([one[0](data).mean((0, 2, 3)) for data in (x, 2 * x)]).mean(0) for one in small]
    torch.testing.assert_close(norm.running_mean, torch.stack(means))


def test_sizes() -> None:
    """A member has α/M of the channels, and γ divides the weights of all layers but the first and the last."""
    for members, alpha, gamma, width in ((4, 2.0, 1, 4), (2, 2.0, 1, 8), (4, 2.0, 2, 4), (3, 1.0, 2, 4)):
        bnn = lb.bayesianize(network(8), lb.PackedEnsemble(members, alpha, gamma))
        shapes = {name: tuple(p.shape) for name, p in bnn.network.get_submodule("inner").named_parameters()}
        assert shapes["0.weight"] == (members, width, 3, 3, 3)
        outputs = 2 * width if members != 3 else 6  # 16/3, rounded up to a multiple of γ
        assert shapes["3.weight"] == (members, outputs, width // gamma, 3, 3)
        assert shapes["9.weight"] == (members, 5, outputs)
    full = lb.bayesianize(network(8), lb.PackedEnsemble(2, alpha=2))
    member = full.network.member(1)  # type: ignore[operator]
    assert {n: p.shape for n, p in member.state_dict().items()} == {
        n: p.shape for n, p in network(8).state_dict().items()
    }


def test_a_grouped_linear_layer_is_block_diagonal() -> None:
    layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    bnn = lb.bayesianize(layers, lb.PackedEnsemble(2, alpha=2, gamma=4))
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = bnn.predict(x, keep_outputs=True).outputs
    assert outputs is not None
    state = bnn.network.state_dict()
    for number in range(2):
        first, hidden, last = (state[f"inner.{place}.weight"][number] for place in (0, 2, 4))
        biases = [state[f"inner.{place}.bias"][number] for place in (0, 2, 4)]
        h = torch.tanh(x @ first.T + biases[0])
        h = torch.tanh(h @ torch.block_diag(*hidden).T + biases[1])
        torch.testing.assert_close(outputs[number], h @ last.T + biases[2])
    assert state["inner.2.weight"].abs().max() <= 2**-0.5  # the bound of nn.Linear with two inputs


def test_members_differ_and_follow_from_the_seed() -> None:
    plain, before = network(8), torch.random.get_rng_state()
    made = [lb.bayesianize(plain, lb.PackedEnsemble(2, seed=seed)).network.state_dict() for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [state["inner.3.weight"] for state in made]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0][0], weights[0][1])


def test_all_members_cost_one_pass() -> None:
    """With α = √M a packed ensemble has the operations of the network, but for the first and the last layer."""
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    packed = lb.bayesianize(layers, lb.PackedEnsemble(4, alpha=2))
    flops = count_flops(packed, x).dense
    assert flops == 2 * 2 * 4 * (16 * 32 + 32 * 32 + 32 * 4)
    found = costs_of(packed, x)  # relative to the network, not to a member
    assert found.ratios()["predict_flops"] == pytest.approx(4 * (16 * 32 + 32 * 32 + 32 * 4) / (64 * 84), rel=1e-6)


def test_products_of_a_pass_are_in_half_precision_under_autocast() -> None:
    x, y = batch()
    bnn = lb.bayesianize(network(8).float(), lb.PackedEnsemble(2)).train()
    dtypes: list[torch.dtype] = []
    for place in (0, 3, 7):
        layer = bnn.network.get_submodule(f"inner.{place}")
        layer.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = lb.elbo_loss(bnn, x.float(), y, num_data=6)
    assert dtypes == [torch.bfloat16] * 3
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in bnn.parameters())


def test_a_fit_learns_and_the_file_loads(tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 4, generator=generator)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    layers = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    bnn = lb.fit(layers, lb.PackedEnsemble(2), data, epochs=30, lr=1e-2, batch_size=32, device="cpu", progress=False)
    assert (bnn.predict(x).label == data.tensors[1]).float().mean() > 0.85
    lb.save(bnn, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", copy.deepcopy(layers))
    assert torch.equal(again.predict(x).probs, bnn.predict(x).probs)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (CASES["vit_mha"].build, "cannot narrow cls_token"),
        (CASES["lstm"].build, "cannot narrow lstm.weight_ih_l0"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2)), "cannot narrow 1 "),
        (Shared, "two layers share"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((2, 4)), nn.Linear(4, 2)), "cannot narrow 1 "),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(False)), "is frozen"),
        (lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.Conv1d(4, 4, 1, groups=4), nn.GroupNorm(4, 4)), "4 groups"),
        (lambda: nn.Sequential(nn.LayerNorm(3)), "no linear or convolutional"),
    ],
)
def test_what_cannot_be_packed_is_one_sentence(layers: Any, words: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=words):
        lb.bayesianize(layers(), lb.PackedEnsemble(2, alpha=1))


def test_layers_that_do_not_fit_together_are_one_sentence() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(), nn.Linear(5 * 4, 2))
    bnn = lb.bayesianize(layers, lb.PackedEnsemble(2, alpha=1))
    with pytest.raises(lb.UnsupportedOperation, match="do not fit together"):
        bnn.predict(torch.zeros(1, 1, 4, 4))
    fine = lb.bayesianize(layers, lb.PackedEnsemble(5, alpha=2))
    assert fine.predict(torch.zeros(1, 1, 4, 4)).samples == 5


@pytest.mark.parametrize("settings", [{"members": 0}, {"members": 65}, {"alpha": 0.0}, {"alpha": 5.0}, {"gamma": 0}])
def test_bad_settings_are_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(lb.LeanBayesError, match=next(iter(settings))):
        lb.PackedEnsemble(**settings)


def test_there_is_no_mean_network() -> None:
    bnn = lb.bayesianize(network(8), lb.PackedEnsemble(2))
    with pytest.raises(lb.LeanBayesError, match="not a single network"):
        bnn.to_deterministic()
    with pytest.raises(lb.LeanBayesError, match="no mean network"):
        bnn.predict(batch()[0], rule="mean")
    with pytest.raises(lb.LeanBayesError, match="does not exist"):
        bnn.network.member(2)  # type: ignore[operator]


class LikeCudnn(nn.BatchNorm2d):
    """Asks for the memory format of its inputs, as BatchNorm does on a GPU; vmap fails if it is channels_last."""

    def forward(self, x: Tensor) -> Tensor:
        last = x.stride(1) < x.stride(3)
        return super().forward(x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_channels_last_trains_the_same_network(precision: Any) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 6, 6), torch.arange(24) % 4
    layers = nn.Conv2d(3, 8, 3), LikeCudnn(8), nn.ReLU(), nn.Conv2d(8, 8, 3), LikeCudnn(8)
    small = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 4))
    plain, last = (
        lb.fit(
            small, lb.PackedEnsemble(2), TensorDataset(images, labels), epochs=2, batch_size=8, optimizer="sgd",
            lr=0.02, channels_last=channels_last, precision=precision, device="cpu", progress=False,
        )
        for channels_last in (False, True)
    )  # fmt: skip
    torch.testing.assert_close(last.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-3)
    probs = [bnn.predict(images.contiguous(memory_format=torch.channels_last)).probs for bnn in (plain, last)]
    torch.testing.assert_close(*probs, rtol=1e-2, atol=1e-2)


class Strides(nn.Module):
    """Records the strides of its inputs."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012  # of all copies

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.stride())
        return x


def test_gray_images_in_channels_last_do_not_look_like_it() -> None:
    """With one channel both formats have the same order in memory, so that `contiguous` changes nothing.

    The strides say which one it is, and the convolutions of a GPU return the format of their inputs.
    """
    Strides.seen.clear()
    x = torch.randn(4, 1, 6, 6).to(memory_format=torch.channels_last)
    assert x.contiguous().stride() == (36, 1, 6, 1)
    small = nn.Sequential(Strides(), nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    lb.bayesianize(small, lb.PackedEnsemble(2)).predict(x)
    assert set(Strides.seen) == {(36, 36, 6, 1)}
