"""Files: what was saved comes back bit by bit, and whatever is not such a file gets one clear sentence."""

import copy
import errno
import itertools
import json
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import CASES
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import leanbayes as lb
from leanbayes import config, saving
from leanbayes.rules import MomentPropagation

PRIORS: dict[str, Any] = {
    "normal": lb.Normal(0.3),
    "fan_in": lb.Normal("fan_in", gain=2.0),
    "pretrained": lb.Normal("std", "pretrained"),
    "mixture": lb.ScaleMixture(0.25, 0.4, 0.02),
}
METHODS: dict[str, Any] = {name: lb.MeanField(prior=prior) for name, prior in PRIORS.items()} | {
    "flipout": lb.MeanField(rule="flipout", init_std=0.2, samples=3),
    "absolute std": lb.MeanField(init_std=0.01, relative=False),
    "sparse": lb.SSVI(0.3, prior=lb.Normal("std")),
    "sparse points": lb.RigL(0.3),
    "partial": lb.PBN(0.1, sensitivity="random", prior=lb.Normal("std", "pretrained")),
    "shared": lb.WeightSharing(8, border=2.0, threshold=0.4, sampling="hierarchical", prior=lb.Normal("std")),
    "tied": lb.WeightSharing(8, sampling="tied"),
    "deterministic": lb.Deterministic(),
    "ensemble": lb.Ensemble(3, seed=4),
    "dropout": lb.MCDropout(0.2),
}
NETWORKS = ["mlp", "cnn", "vit_mha", "lstm", "language_model"]


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))


def trained(net: nn.Module, x: Tensor, method: Any, y: Tensor | None = None, **kwargs: Any) -> lb.BayesianModel:
    """A model after two steps, so that nothing in it is as a fresh one has it."""
    bnn = lb.bayesianize(net, method, seed=3, **kwargs)
    y = net.eval()(x).argmax(1) if y is None else y
    net.train()
    optimiser = torch.optim.SGD(bnn.parameters(), lr=0.05)
    for _ in range(2):
        optimiser.zero_grad()
        lb.elbo(bnn, x, y, num_data=100).backward()
        optimiser.step()
    return bnn


def assert_same(bnn: lb.BayesianModel, loaded: lb.BayesianModel, x: Any) -> None:
    state, found = bnn.state_dict(), loaded.state_dict()
    assert state.keys() == found.keys()
    for name, tensor in state.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name]), name
    assert (loaded.rule, loaded.trained_rule, loaded.method) == (bnn.rule, bnn.trained_rule, bnn.method)
    assert str(loaded.report) == str(bnn.report)
    assert loaded.kl_kind == bnn.kl_kind
    assert torch.equal(bnn.kl(), loaded.kl())
    for _ in range(2):  # the stream of noise goes on equally
        assert torch.equal(bnn(x), loaded(x))
    first, second = bnn.predict(x), loaded.predict(x)
    assert type(first) is type(second)
    for field, value in vars(first).items():
        same = (
            torch.equal(value, getattr(second, field)) if isinstance(value, Tensor) else value == getattr(second, field)
        )
        assert same, field


def round_trip(bnn: lb.BayesianModel, net: nn.Module, folder: Path) -> lb.BayesianModel:
    bnn.save(folder / "model.safetensors")
    with torch.no_grad():  # the weights of the network that is passed do not matter
        for p in net.parameters():
            p.fill_(0.5)
    return lb.load(folder / "model.safetensors", net)


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"), [case for case in itertools.product(NETWORKS, METHODS) if case != ("lstm", "flipout")]
)
def test_a_loaded_model_is_bit_equal(name: str, method: str, tmp_path: Path) -> None:
    case = CASES[name]
    bnn = trained(case.build(), case.example(), METHODS[method])
    assert_same(bnn, round_trip(bnn, case.build(), tmp_path), case.example())


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (lb.MeanField(), 1),
        (lb.PBN(0.25, sensitivity="magnitude"), 0.25),
        (lb.SSVI(0.25), 0.25),
        (lb.RigL(0.25), 0),
        (lb.WeightSharing(3, minimum=1), 1),
    ],
)
def test_a_file_tells_how_many_weights_are_bayesian(method: lb.Method, share: float, tmp_path: Path) -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 10)), method)
    bnn.save(tmp_path / "file")
    found = saving.describe(tmp_path / "file")
    assert (found["bayesian_weights"], found["weights"]) == (share * 160, 160)
    assert f"{share * 160:.0f} Bayesian weights" in repr(bnn)


@pytest.mark.parametrize("method", [lb.MeanField(), lb.VDP(), lb.VDP.paper()], ids=["mean-field", "vdp", "paper"])
def test_a_rule_with_settings_comes_back(method: lb.Method, tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    for rule in (MomentPropagation("none", "taylor"), MomentPropagation(maps=True), MomentPropagation()):
        bnn.rule = rule
        assert round_trip(bnn, CASES["mlp"].build(), tmp_path).current_rule == rule
    bnn.rule = "sample"
    assert round_trip(copy.deepcopy(bnn), CASES["mlp"].build(), tmp_path).rule == "sample"
    bnn.rule = "moments"
    assert round_trip(bnn, CASES["mlp"].build(), tmp_path).current_rule == method.make_rule("moments")
    assert saving.describe(tmp_path / "model.safetensors")["rule"] == "moments"


def test_the_networks_own_dropout_comes_back(tmp_path: Path) -> None:
    x = CASES["mlp"].example()
    for method in (lb.MCDropout(), lb.MCDropout(0.1)):
        bnn = trained(with_dropout(), x, method)
        assert_same(bnn, round_trip(bnn, with_dropout(), tmp_path), x)


@pytest.mark.parametrize(
    "likelihood",
    [
        lb.Gaussian(0.3, learned=True),
        lb.Gaussian(2.0),
        lb.HeteroscedasticGaussian(1e-3),
        lb.Bernoulli(),
        lb.Categorical(7),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_the_likelihood_comes_back(likelihood: Any, tmp_path: Path) -> None:
    heteroscedastic, classes = (
        isinstance(likelihood, lb.HeteroscedasticGaussian),
        isinstance(likelihood, lb.Categorical),
    )
    x, build = CASES["mlp"].example(), lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    y = torch.tensor([0, 1, 2, 7]) if classes else torch.full((4, 2 if heteroscedastic else 4), 0.5)
    bnn = trained(build(), x, lb.MeanField(), y, likelihood=likelihood)
    loaded = round_trip(bnn, build(), tmp_path)
    assert type(loaded.likelihood) is type(likelihood)
    assert loaded.likelihood.settings == likelihood.settings
    grads = [p.requires_grad for p in likelihood.parameters()]
    assert [p.requires_grad for p in loaded.likelihood.parameters()] == grads
    assert_same(bnn, loaded, x)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "channels_last": (lambda net: net.to(memory_format=torch.channels_last), lambda bnn: bnn),
    "fp64": (lambda net: net.double(), lambda bnn: bnn),
    "bf16": (lambda net: net.bfloat16(), lambda bnn: bnn),
    "fp64 later": (lambda net: net, lambda bnn: bnn.double()),
    "bf16 later": (lambda net: net, lambda bnn: bnn.bfloat16()),
}


@pytest.mark.parametrize("same_network", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_memory_order_and_number_format_come_back(change: str, same_network: bool, tmp_path: Path) -> None:
    net_change, bnn_change = CHANGES[change]
    net = net_change(CASES["cnn"].build())
    bnn = bnn_change(lb.bayesianize(net, lb.MeanField(prior=PRIORS["pretrained"])))
    x = CASES["cnn"].example().to(next(bnn.parameters()).dtype)
    if change == "bf16":  # here only the network is, and the posterior keeps its precision
        x = x.bfloat16()
    bnn(x)
    loaded = round_trip(bnn, net if same_network else CASES["cnn"].build(), tmp_path)
    assert loaded(x).dtype == x.dtype
    bnn(x)
    assert_same(bnn, loaded, x)


def test_frozen_parameters_come_back_frozen(tmp_path: Path) -> None:
    net = CASES["mlp"].build()
    net[0].requires_grad_(False)  # type: ignore[index]
    bnn = lb.bayesianize(net, lb.MeanField())
    loaded = round_trip(bnn, CASES["mlp"].build(), tmp_path)
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in bnn.named_parameters()
    }


def test_buffers_that_share_memory_can_be_saved(tmp_path: Path) -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 3))
        net.register_buffer("table", torch.arange(8.0))
        net.register_buffer("part", net.get_buffer("table")[:4])
        return net

    bnn = lb.bayesianize(build(), lb.MeanField())
    assert_same(bnn, round_trip(bnn, build(), tmp_path), CASES["mlp"].example())


def test_loading_leaves_the_passed_network_alone(tmp_path: Path) -> None:
    lb.bayesianize(CASES["cnn"].build(), lb.MeanField()).save(tmp_path / "a")
    net = CASES["cnn"].build()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    ids = [id(p) for p in net.parameters()]
    loaded = lb.load(tmp_path / "a", net)
    loaded(CASES["cnn"].example()).sum().backward()
    assert ids == [id(p) for p in net.parameters()]
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_file_is_plain_small_safetensors_with_json(method: str, tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["language_model"].build(), METHODS[method])
    path = tmp_path / "model.safetensors"
    bnn.save(str(path))
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["leanbayes"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert header["version"] == saving.VERSION
    assert header["method"]["type"] == type(METHODS[method]).__name__
    assert {name: t for name, t in bnn.state_dict().items() if name in stored}.keys() == stored.keys()
    distinct = {t.data_ptr(): t.numel() for t in bnn.state_dict().values()}
    assert path.stat().st_size <= 4 * sum(distinct.values()) + 20_000
    assert list(tmp_path.iterdir()) == [path]


@given(
    scale=st.one_of(st.floats(1e-6, 1e6), st.sampled_from(["fan_in", "std"])),
    center=st.sampled_from(["zero", "pretrained"]),
    gain=st.floats(1e-3, 1e3),
    std=st.floats(1e-9, 10),
    samples=st.integers(1, 1000),
    rule=st.sampled_from(["sample", "flipout", "local", "mean"]),
    mixture=st.booleans(),
)
def test_settings_survive_json(
    scale: Any, center: Any, gain: float, std: float, samples: int, rule: str, mixture: bool
) -> None:
    prior = lb.ScaleMixture(pi=0.1, wide=gain, narrow=std) if mixture else lb.Normal(scale, center, gain)
    method = lb.MeanField(prior=prior, init_std=std, relative=mixture, rule=rule, samples=samples)
    assert config.decode(json.loads(json.dumps(config.encode(method)))) == method


# -- bad files --------------------------------------------------------------------------------------------------------


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    return text


def refused(path: Path, net: nn.Module | None = None) -> str:
    with pytest.raises(lb.FileFormatError) as caught:
        lb.load(path, CASES["mlp"].build() if net is None else net)
    return one_sentence(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    bnn = trained(CASES["mlp"].build(), CASES["mlp"].example(), METHODS["fan_in"])
    bnn.save(path)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Save the file again with another header."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["leanbayes"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header)
    save_file(tensors, path, metadata={"leanbayes": json.dumps(header)})


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown type": (lambda h: h["method"].update(type="os.system"), "os.system"),
    "unknown prior": (lambda h: h["method"]["prior"].update(type="Cauchy"), "Cauchy"),
    "no type": (lambda h: h["method"].pop("type"), "type"),
    "type that is a list": (lambda h: h["method"].update(type=["MeanField"]), "header"),
    "likelihood for a method": (lambda h: h.update(method=h["likelihood"]), "header"),
    "unknown setting": (lambda h: h["method"].update(colour=3), "colour"),
    "impossible setting": (lambda h: h["method"].update(init_std=-1.0), "init_std"),
    "setting of another type": (lambda h: h["method"].update(init_std="big"), "init_std|header|settings"),
    "future version": (lambda h: h.update(version=99), "99"),
    "no version": (lambda h: h.pop("version"), "version"),
    "unknown rule": (lambda h: h.update(rule="guess"), "guess"),
    "rule of another type": (lambda h: h.update(rule=h["method"]), "unknown|header"),
    "unknown trained rule": (lambda h: h.update(trained_rule="guess"), "guess"),
    "no layout": (lambda h: h.pop("layout"), "layout"),
    "no names": (lambda h: h["layout"][0].update(names=[]), "header"),
    "bad order": (lambda h: h["layout"][0].update(order=[0, 0]), "header"),
    "longer order": (lambda h: h["layout"][0].update(order=[0, 1, 2]), "header"),
    "bad dtype": (lambda h: h["layout"][0].update(dtype="float33"), "float33"),
    "dtype that is a function": (lambda h: h["layout"][0].update(dtype="zeros"), "zeros"),
    "fan_in of zero": (lambda h: h["layout"][0].update(fan_in=0), "header"),
    "alias of nothing": (lambda h: h.update(aliases={"a": "b"}), "header"),
    "bad report": (lambda h: h.update(report=[["a"]]), "header"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_does_not_fit_is_refused(name: str, saved: Path) -> None:
    change, message = HEADERS[name]
    rewrite(saved, change)
    text = refused(saved)
    assert any(part in text for part in message.split("|")), text


def test_a_layout_that_no_file_has_is_not_described(saved: Path) -> None:
    rewrite(saved, HEADERS["bad dtype"][0])
    with pytest.raises(lb.FileFormatError, match="float33") as caught:
        saving.describe(saved)
    one_sentence(caught.value)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.zeros(3)}, path)
    assert "not one that leanbayes saved" in refused(path)
    save_file({"a": torch.zeros(3)}, path, metadata={"leanbayes": "[1]"})
    assert "not one that leanbayes saved" in refused(path)
    for content in (b"", b"PK\x03\x04", b"{}", b"\x80\x04" * 500, random.Random(0).randbytes(5000), b"\xff" * 100):
        path.write_bytes(content)
        assert "no safetensors file" in refused(path)
    assert "no file" in refused(tmp_path / "nowhere")
    assert "no file" in refused(tmp_path)


def test_every_truncation_is_told(saved: Path) -> None:
    whole = saved.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in {
        *range(20),
        *range(20, header + 40, 37),
        header - 1,
        header,
        *range(header, len(whole), 101),
        len(whole) - 1,
    }:
        saved.write_bytes(whole[:length])
        assert "truncated" in refused(saved)


@pytest.mark.parametrize("tensor", ["posterior.mu", "network.0.bias", "noise.state"])
def test_a_tensor_of_another_kind_of_number_is_refused(tensor: str, saved: Path) -> None:
    whole = saved.read_bytes()
    old, new = (b'"I64"', b'"F64"') if tensor == "noise.state" else (b'"F32"', b'"I32"')
    at = whole.index(old, whole.index(f'"{tensor}"'.encode()))
    saved.write_bytes(whole[:at] + new + whole[at + len(new) :])
    assert tensor.removeprefix("network.") in refused(saved)


def test_a_damaged_header_is_told(saved: Path) -> None:
    # A changed byte may also spell another valid file (a digit of a setting, a letter of a reason): then it loads.
    whole, numbers, net = saved.read_bytes(), random.Random(1), CASES["mlp"].build()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    told, wrong = 0, {}
    for offset in range(header):
        flipped, anything = whole[offset] ^ (1 << numbers.randrange(8)), numbers.randrange(256)
        byte = bytes([numbers.choice([flipped, anything, ord(numbers.choice('0123456789IF"'))])])
        saved.write_bytes(whole[:offset] + byte + whole[offset + 1 :])
        try:
            lb.load(saved, net)
        except lb.FileFormatError as error:
            one_sentence(error)
            told += 1
        except Exception as error:
            before, after = whole[max(offset - 30, 0) : offset], whole[offset + 1 : offset + 20]
            wrong[f"{type(error).__name__}: {error}"] = f"{before!r} {byte!r} {after!r}"
    assert wrong == {}
    assert told > header / 2


OTHERS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "missing parameter": (lambda net: net.pop(4), r"4.weight"),
    "other shape": (lambda net: net.__setitem__(0, nn.Linear(6, 17)), "0.weight"),
    "missing bias": (lambda net: net.__setitem__(2, nn.Linear(16, 16, bias=False)), "2.bias"),
    "other bias": (lambda net: setattr(net[2], "bias", nn.Parameter(torch.zeros(15))), "2.bias"),
    "extra layer": (lambda net: net.append(nn.Linear(3, 3)), "5.weight"),
    "extra buffer": (lambda net: net.register_buffer("table", torch.zeros(3)), "table"),
    "norm with buffers": (lambda net: net.append(nn.BatchNorm1d(3)), "5.weight"),
    "many extra layers": (lambda net: net.extend(nn.Linear(3, 3) for _ in range(100)), "5.weight"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_is_refused_by_its_first_difference(name: str, saved: Path) -> None:
    change, message = OTHERS[name]
    net = CASES["mlp"].build()
    assert isinstance(net, nn.Sequential)
    change(net)
    text = refused(saved, net)
    assert message in text
    assert "another network" in text


def test_a_network_without_the_saved_ones_dropout_is_refused(tmp_path: Path) -> None:
    lb.bayesianize(with_dropout(), lb.MCDropout()).save(tmp_path / "a")
    net = with_dropout()
    net.get_submodule("2").p = 0.0  # type: ignore[assignment]
    with pytest.raises(lb.LeanBayesError, match="dropped nothing"):
        lb.load(tmp_path / "a", net).predict(torch.randn(2, 6))


# -- writing that fails -----------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField())
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "model.safetensors", tmp_path / "file" / "model.safetensors", tmp_path):
        with pytest.raises(lb.LeanBayesError, match="Cannot write") as caught:
            bnn.save(path)
        one_sentence(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert not list(tmp_path.parent.glob("*.part"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=str)
def test_a_failed_write_leaves_the_old_file(error: BaseException, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def half(tensors: dict[str, Tensor], filename: str, metadata: Any = None) -> None:
        Path(filename).write_bytes(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(saving, "save_file", half)
    with pytest.raises(lb.LeanBayesError if isinstance(error, OSError) else KeyboardInterrupt):
        lb.bayesianize(CASES["mlp"].build(), lb.MeanField()).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_is_open_to_whom_the_user_wishes(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        lb.bayesianize(nn.Linear(2, 2), lb.MeanField()).save(tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
