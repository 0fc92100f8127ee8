"""Which parameters become Bayesian, and their positions in the flat vector."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from network_cases import CASES, hf_cases
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.layout import Layout, Slot
from leanbayes.core.network import places

WEIGHT = re.compile(r"(^|\.)((in|[qkv])_proj_)?weight(_[ih][hr]_l\d+(_reverse)?|_[ih]h)?$")
HF_NAMES = ("hf_bert", "hf_gpt2", "hf_vit")


def bayesian_names(bnn: lb.BayesianModel) -> set[str]:
    return {row.name for row in bnn.report.rows if row.bayesian}


@pytest.mark.parametrize("name", [*CASES, *HF_NAMES])
def test_weights_are_bayesian_and_biases_and_norms_are_deterministic(name: str) -> None:
    net = (hf_cases() if name in HF_NAMES else CASES)[name].build()
    bnn = lb.bayesianize(net, lb.MeanField())
    expected = {n for n, p in net.named_parameters() if WEIGHT.search(n) and p.dim() >= 2}
    assert bayesian_names(bnn) == expected
    assert {slot.name for slot in bnn.layout} == expected
    assert bnn.layout.numel == sum(p.numel() for n, p in net.named_parameters() if n in expected)
    deterministic = {n for n, _ in bnn.network.named_parameters()}
    assert deterministic == {n for n, _ in net.named_parameters()} - expected


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
        ("head[", "not a valid regular expression"),
        ("no such name", "no Bayesian parameter"),
        ([], "no Bayesian parameter"),
        ((), "no Bayesian parameter"),
        (nn.LSTM, "no Bayesian parameter"),
        (lambda name, p: False, "no Bayesian parameter"),
    ],
)
def test_a_bad_selection_raises_an_error(select: Any, message: str) -> None:
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


def test_a_lazy_network_raises_an_error() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"0\.weight is not initialized yet"):
        lb.bayesianize(nn.Sequential(nn.LazyLinear(3)), lb.MeanField())


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
def test_join_inverts_split_and_split_does_not_copy(layout: Layout) -> None:
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


def test_repr_of_a_layout_lists_its_parameters() -> None:
    net = nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 4), nn.Linear(4, 26))
    assert repr(lb.bayesianize(net, lb.MeanField()).layout) == (
        "Layout: 3 parameters, 2,104 weights\n"
        "  0.weight  200x6  float32\n"
        "  2.weight  4x200  float32\n"
        "  3.weight  26x4   float32"
    )
    assert repr(Layout([Slot(("scale",), (), (), torch.float64, 1)])) == (
        "Layout: 1 parameter, 1 weight\n  scale  1  float64"
    )
    assert repr(Layout([])) == "Layout: 0 parameters, 0 weights"


def test_repr_of_a_long_layout_stops_after_ten_parameters() -> None:
    layout = Layout([Slot((f"{number}",), (100, 10), (0, 1), torch.float32, 1) for number in range(1012)])
    lines = repr(layout).splitlines()
    assert lines[0] == "Layout: 1,012 parameters, 1,012,000 weights"
    assert [line.split()[0] for line in lines[1:11]] == [f"{number}" for number in range(10)]
    assert lines[11:] == ["  ... and 1,002 more"]


def test_repr_of_a_report_is_its_table() -> None:
    report = lb.bayesianize(nn.Sequential(nn.Linear(2, 10)), lb.MeanField()).report
    assert repr(report) == (
        "1 of 2 parameters are Bayesian (20 of 30 weights, 66.7 %)\n"
        "  Bayesian       0.weight  10x2  weight of Linear\n"
        "  deterministic  0.bias    10    bias of Linear"
    )
    assert str(report) == repr(report)


def test_channels_last_is_preserved() -> None:
    net = CASES["cnn"].build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn = lb.bayesianize(net, lb.MeanField(init_std=1e-7))
    with bnn.drawn():
        for slot in bnn.layout:
            drawn = getattr(*places(bnn.network, slot.names)[0])
            torch.testing.assert_close(drawn, net.get_parameter(slot.name), rtol=1e-5, atol=1e-6)
            assert drawn.stride() == net.get_parameter(slot.name).stride()
            assert drawn._base is not None
