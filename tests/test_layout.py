"""Which parameters become Bayesian, where they lie, and that the network around them stays as it was."""

import copy
import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import CASES, hf_cases
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.layout import Layout, Slot
from leanbayes.network import places

WEIGHT = re.compile(r"(^|\.)((in|[qkv])_proj_)?weight(_[ih][hr]_l\d+(_reverse)?|_[ih]h)?$")
HF_NAMES = ("hf_bert", "hf_gpt2", "hf_vit")


def bayesian_names(bnn: lb.BayesianModel) -> set[str]:
    return {row.name for row in bnn.report.rows if row.bayesian}


def train(bnn: lb.BayesianModel, x: Tensor, y: Tensor, steps: int = 3) -> None:
    optimiser = torch.optim.SGD([p for p in bnn.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        lb.elbo(bnn, x, y, num_data=100).backward()
        optimiser.step()


def labels_for(name: str) -> Tensor:
    return CASES[name].build().eval()(CASES[name].example()).argmax(1)


# -- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, *HF_NAMES])
def test_weights_are_bayesian_and_biases_and_norms_are_points(name: str) -> None:
    net = (hf_cases() if name in HF_NAMES else CASES)[name].build()
    bnn = lb.bayesianize(net, lb.MeanField())
    expected = {n for n, p in net.named_parameters() if WEIGHT.search(n) and p.dim() >= 2}
    assert bayesian_names(bnn) == expected
    assert {slot.name for slot in bnn.layout} == expected
    assert bnn.layout.numel == sum(p.numel() for n, p in net.named_parameters() if n in expected)
    points = {n for n, _ in bnn.network.named_parameters()}
    assert points == {n for n, _ in net.named_parameters()} - expected


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(2, 3), "weight"),
    "bilinear": (lambda: nn.Bilinear(2, 3, 4), "weight"),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2), "weight"),
    "conv2d": (lambda: nn.Conv2d(2, 4, 2, groups=2), "weight"),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), "weight"),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 3, 2), "weight"),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), "weight"),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), "weight"),
    "embedding": (lambda: nn.Embedding(5, 3), "weight"),
    "embedding_bag": (lambda: nn.EmbeddingBag(5, 3), "weight"),
    "attention": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "in_proj_weight out_proj.weight"),
    "attention with other keys": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        "q_proj_weight k_proj_weight v_proj_weight out_proj.weight",
    ),
    "lstm": (lambda: nn.LSTM(3, 4, proj_size=2), "weight_ih_l0 weight_hh_l0 weight_hr_l0"),
    "gru": (lambda: nn.GRU(3, 4, 2), "weight_ih_l0 weight_hh_l0 weight_ih_l1 weight_hh_l1"),
    "rnn": (lambda: nn.RNN(3, 4), "weight_ih_l0 weight_hh_l0"),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), "weight_ih weight_hh"),
    "gru cell": (lambda: nn.GRUCell(3, 4), "weight_ih weight_hh"),
    "rnn cell": (lambda: nn.RNNCell(3, 4), "weight_ih weight_hh"),
    "batch norm": (lambda: nn.BatchNorm2d(3), ""),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((3, 4)), ""),
    "group norm": (lambda: nn.GroupNorm(1, 3), ""),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), ""),
    "rms norm of two dimensions": (lambda: nn.RMSNorm((3, 4)), ""),
    "prelu": (lambda: nn.PReLU(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_default_weights_of_a_layer(name: str) -> None:
    build, expected = LAYERS[name]
    net = nn.ModuleDict({"layer": build(), "other": nn.Linear(1, 1)})
    names = bayesian_names(lb.bayesianize(net, lb.MeanField())) - {"other.weight"}
    assert names == {f"layer.{n}" for n in expected.split()}


BLOCK = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
ATTENTION = {f"blocks.{i}.self_attn.{n}" for i in (0, 1) for n in ("in_proj_weight", "out_proj.weight")}


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (r"^head\.", {"head.weight", "head.bias"}),
        (["head.weight", "norm.bias", "cls_token"], {"head.weight", "norm.bias", "cls_token"}),
        (["blocks.0", "head"], {"head.weight", *(f"blocks.0.{n}" for n in BLOCK)}),
        (nn.Conv2d, {"patch.weight"}),
        ((nn.Conv2d, nn.MultiheadAttention), {"patch.weight", *ATTENTION}),
        (nn.TransformerEncoderLayer, {f"blocks.{i}.{n}" for i in (0, 1) for n in BLOCK}),
        (lambda name, p: name.startswith("patch") and p.dim() == 1, {"patch.bias"}),
    ],
)
def test_select(select: Any, expected: set[str]) -> None:
    bnn = lb.bayesianize(CASES["vit_mha"].build(), lb.MeanField(init_std=1.0), select=select)
    assert bayesian_names(bnn) == expected
    assert all(row.reason == ("selected" if row.bayesian else "not selected") for row in bnn.report.rows)
    x = CASES["vit_mha"].example()
    assert not torch.equal(bnn(x), bnn(x))


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (["head.wieght"], "head.weight"),
        (["block.0"], "blocks.0"),
        (["zzzzzzzz"], "named_parameters"),
        ("head[", "not a regular expression"),
        ("no such name", "no Bayesian parameter"),
        ([], "no Bayesian parameter"),
        ((), "no Bayesian parameter"),
        (nn.LSTM, "no Bayesian parameter"),
        (lambda name, p: False, "no Bayesian parameter"),
    ],
)
def test_bad_selection_is_told(select: Any, message: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=re.escape(message)):
        lb.bayesianize(CASES["vit_mha"].build(), lb.MeanField(), select=select)


def test_a_module_in_two_places_can_be_selected_by_either_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    for select in (["first"], ["first.weight"], ["second"], ["second.weight"], r"^second\.weight"):
        assert lb.bayesianize(Twice(), lb.MeanField(), select=select).layout.numel == 9


def test_lazy_network_is_told_to_run_first() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"0\.weight is not initialised yet"):
        lb.bayesianize(nn.Sequential(nn.LazyLinear(3)), lb.MeanField())


# -- frozen and tied --------------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_frozen_and_deterministic() -> None:
    net = CASES["mlp"].build()
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    before = {n: p.clone() for n, p in net.named_parameters() if n.startswith("0.")}
    bnn = lb.bayesianize(net, lb.MeanField())
    train(bnn, CASES["mlp"].example(), labels_for("mlp"))
    kept = {n: p for n, p in bnn.network.named_parameters() if n.startswith("0.")}
    assert kept.keys() == before.keys()
    for name, parameter in kept.items():
        assert not parameter.requires_grad
        assert torch.equal(parameter, before[name])
    reasons = {row.name: row for row in bnn.report.rows}
    assert not reasons["0.weight"].bayesian
    assert "frozen" in reasons["0.weight"].reason
    assert reasons["2.weight"].bayesian


def test_all_frozen_says_to_unfreeze() -> None:
    with pytest.raises(lb.LeanBayesError, match="unfreeze"):
        lb.bayesianize(CASES["mlp"].build().requires_grad_(False), lb.MeanField())


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
def test_tied_parameters_are_one_slot_with_one_value_and_one_gradient(rule: str) -> None:
    case = CASES["language_model"]
    bnn = lb.bayesianize(case.build(), lb.MeanField(rule=rule))
    slot = next(slot for slot in bnn.layout if slot.name == "embed.weight")
    assert slot.names == ("embed.weight", "head.weight")
    row = next(row for row in bnn.report.rows if row.name == "embed.weight")
    assert "tied with head.weight" in row.reason
    assert "head.weight" not in {row.name for row in bnn.report.rows}
    with bnn.drawn():
        assert getattr(bnn.network.embed, "weight") is getattr(bnn.network.head, "weight") is not None  # noqa: B009
    if rule == "mean":  # the gradient is the sum over both places, as in the plain network
        net, x = case.build(), case.example()
        y = x.roll(1, 1)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        lb.elbo(bnn, x, y, num_data=100, temperature=0.0).backward()
        assert isinstance(bnn.posterior.mu, Tensor)
        assert bnn.posterior.mu.grad is not None
        grads = dict(zip((s.name for s in bnn.layout), bnn.layout.split(bnn.posterior.mu.grad), strict=True))
        expected = net.get_parameter("embed.weight").grad
        torch.testing.assert_close(grads["embed.weight"], expected)


# -- the user's network, and copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [lb.MeanField(), lb.Deterministic(), lb.Ensemble(2), lb.MCDropout(0.1)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "language_model"])
def test_the_network_itself_is_untouched(name: str, method: Any) -> None:
    net, x, y = CASES[name].build(), CASES[name].example(), labels_for(name)
    ids = [id(p) for p in net.parameters()]
    before = {n: t.clone() for n, t in net.state_dict().items()}
    bnn = lb.bayesianize(net, method)
    train(bnn, x, y)
    assert [id(p) for p in net.parameters()] == ids
    after = net.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], before[n]) for n in before)
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for n, p in bnn.named_parameters() if "weight" in n or "mu" in n)


@pytest.mark.parametrize("name", CASES)
def test_deepcopy_is_independent_and_equal(name: str) -> None:
    bnn, x, y = lb.bayesianize(CASES[name].build(), lb.MeanField()), CASES[name].example(), labels_for(name)
    bnn(x)
    twin, reference = copy.deepcopy(bnn), copy.deepcopy(bnn)
    train(twin, x, y)
    assert all(torch.equal(a, b) for a, b in zip(bnn.parameters(), reference.parameters(), strict=True))
    assert not torch.equal(bnn.posterior.mean(), twin.posterior.mean())
    with twin.drawn():
        assert all(getattr(*places(bnn.network, slot.names)[0]) is None for slot in bnn.layout)
    assert torch.equal(bnn.eval()(x), reference.eval()(x))


def test_report_has_one_line_with_a_reason_for_each_parameter() -> None:
    net = CASES["vit_mha"].build()
    lines = str(lb.bayesianize(net, lb.MeanField()).report).splitlines()
    assert re.match(r"10 of 32 parameters are Bayesian \(4,944 of 5,445 weights, 90.8 %\)$", lines[0])
    assert len(lines) == 1 + len(list(net.parameters()))
    for line, (name, p) in zip(lines[1:], net.named_parameters(), strict=True):
        kind, found, shape, *reason = line.split()
        assert (kind in ("Bayesian", "point"), found, shape) == (True, name, "x".join(map(str, p.shape)))
        assert reason


# -- the flat vector --------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    slots = []
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
        order = draw(st.permutations(range(len(shape))))
        slots.append(Slot((str(number),), tuple(shape), tuple(order), torch.float32, 1))
    return Layout(slots)


@given(layouts())
def test_split_and_join_are_inverse_and_split_does_not_copy(layout: Layout) -> None:
    flat = torch.arange(float(layout.numel))
    parts = layout.split(flat)
    offset = 0
    for slot, part in zip(layout, parts, strict=True):
        assert tuple(part.shape) == slot.shape
        assert part.data_ptr() == flat[offset:].data_ptr()
        assert part.permute(slot.order).is_contiguous()
        assert part.flatten().sort().values.tolist() == flat[offset : offset + slot.numel].tolist()
        offset += slot.numel
    assert torch.equal(layout.join(parts), flat)
    tensors = [torch.randn(slot.shape, generator=torch.Generator().manual_seed(1)) for slot in layout]
    for back, tensor in zip(layout.split(layout.join(tensors)), tensors, strict=True):
        assert torch.equal(back, tensor)
    per_slot = torch.arange(float(len(layout)))
    for number, part in enumerate(layout.split(layout.expand(per_slot))):
        assert (part == number).all()
    assert Layout.from_json(layout.to_json()).slots == layout.slots


def test_channels_last_is_kept() -> None:
    net = CASES["cnn"].build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn = lb.bayesianize(net, lb.MeanField(init_std=1e-7))
    with bnn.drawn():
        for slot in bnn.layout:
            drawn = getattr(*places(bnn.network, slot.names)[0])
            torch.testing.assert_close(drawn, net.get_parameter(slot.name), rtol=1e-5, atol=1e-6)
            assert drawn.stride() == net.get_parameter(slot.name).stride()
            assert drawn._base is not None


# -- number formats ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Three layers, each in a number format of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=d) for d in (torch.float64, torch.float32, torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = layer(x.to(layer.bias.dtype)).tanh()
        return x


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, None])
def test_number_formats_are_kept(dtype: torch.dtype | None, rule: str) -> None:
    net = Mixed() if dtype is None else CASES["mlp"].build().to(dtype)
    x = torch.randn(4, 4 if dtype is None else 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    bnn = lb.bayesianize(net, lb.MeanField(rule=rule))
    assert bnn(x).dtype == net(x).dtype
    assert bnn.posterior.mean().dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
    lb.elbo(bnn, x, torch.zeros(4, dtype=torch.long), num_data=10).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.mean_parameters())


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float64), lambda m: m.double(), lambda m: m.bfloat16()])
def test_number_format_can_change_later(convert: Callable[[Any], Any], rule: str) -> None:
    bnn = convert(lb.bayesianize(CASES["cnn"].build(), lb.MeanField(rule=rule)))
    x = convert(CASES["cnn"].example())
    assert bnn(x).dtype == x.dtype
    assert all(t.dtype == x.dtype for t in bnn.parameters())
    loss = lb.elbo(bnn, x, labels_for("cnn"), num_data=10)
    loss.backward()
    assert math.isfinite(loss.item())


# -- nothing is left behind -------------------------------------------------------------------------------------------


def assert_empty(bnn: lb.BayesianModel) -> None:
    for slot in bnn.layout:
        for name in slot.names:
            ((module, attribute),) = places(bnn.network, [name])
            assert getattr(module, attribute) is None
            assert attribute not in module._parameters
    for module in bnn.network.modules():
        if isinstance(module, nn.RNNBase):
            pairs = zip(module._flat_weights_names, module._flat_weights, strict=True)
            assert all((weight is None) == name.startswith("weight") for name, weight in pairs)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *itertools.product(["mlp", "vit_mha", "language_model"], ["sample", "flipout", "local", "mean"]),
        *itertools.product(["lstm"], ["sample", "mean"]),
    ],
)
def test_nothing_is_left_in_the_network(name: str, rule: str, fails: bool) -> None:
    bnn, x = lb.bayesianize(CASES[name].build(), lb.MeanField(rule=rule)), CASES[name].example()
    seen: list[Any] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.extend(weakref.ref(getattr(*places(bnn.network, slot.names)[0])) for slot in bnn.layout)
        if fails:
            raise RuntimeError("a fault of the network")

    bnn.network.register_forward_pre_hook(look)
    gc.disable()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="a fault"):
                bnn(x)
            with pytest.raises(RuntimeError, match="a fault"), bnn.drawn() as call:
                call(x)
        else:
            bnn(x).sum().backward()
            bnn.predict(x, 2)
        assert_empty(bnn)
        assert len(seen) >= 2 * len(bnn.layout)
        assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


# -- from one posterior to the next -----------------------------------------------------------------------------------


def test_a_bayesian_model_hands_over_its_moments() -> None:
    old = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=0.3), select=["0.weight", "2.weight"])
    train(old, CASES["mlp"].example(), labels_for("mlp"))
    method = lb.MeanField(init_std=0.07, relative=False, prior=lb.Normal(scale=1.0))
    for select, fresh in (
        (["0.weight", "2.weight"], set()),
        (["2.weight", "4.weight", "0.bias"], {"4.weight", "0.bias"}),
    ):
        new = lb.bayesianize(old, method, select=select)
        parameters, variances = dict(old.to_deterministic().named_parameters()), old.weight_variances()
        assert bayesian_names(new) == set(select)
        moments = zip(
            new.layout, new.layout.split(new.posterior.mean()), new.layout.split(new.posterior.variance()), strict=True
        )
        for slot, mean, variance in moments:
            assert torch.equal(mean, parameters[slot.name])
            expected = torch.full_like(mean, 0.07) if slot.name in fresh else variances[slot.name].sqrt()
            torch.testing.assert_close(variance.sqrt(), expected, rtol=1e-5, atol=0)
        for name, point in new.network.named_parameters():
            assert torch.equal(point, parameters[name])
