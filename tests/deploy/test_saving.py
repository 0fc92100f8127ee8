"""`lb.save` and `lb.load`: round trips are exact bit by bit, and other files are refused in one clear sentence."""

import copy
import errno
import itertools
import json
import math
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from file_cases import replaced, rewritten, with_header
from hypothesis import given
from hypothesis import strategies as st
from network_cases import CASES
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import config
from leanbayes.deploy import model_file as saving
from leanbayes.deploy.loading import describe
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
    "sparse deterministic": lb.RigL(0.3),
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
    """A model after two training steps, so that all of its state has changed."""
    bnn = lb.bayesianize(net, method, seed=3, **kwargs)
    y = net.eval()(x).argmax(1) if y is None else y
    net.train()
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=100).backward()
        optimizer.step()
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
    for _ in range(2):  # the noise streams continue equally
        assert torch.equal(bnn(x), loaded(x))
    first, second = bnn.predict(x), loaded.predict(x)
    assert type(first) is type(second)
    for field, value in vars(first).items():
        same = (
            torch.equal(value, getattr(second, field)) if isinstance(value, Tensor) else value == getattr(second, field)
        )
        assert same, field


def round_trip(bnn: lb.BayesianModel, net: nn.Module, folder: Path) -> lb.BayesianModel:
    lb.save(bnn, folder / "model.safetensors")
    with torch.no_grad():  # the weights of the given network do not matter
        for p in net.parameters():
            p.fill_(0.5)
    return lb.load(folder / "model.safetensors", net)


# -- round trips ------------------------------------------------------------------------------------------------------


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
def test_describe_counts_the_bayesian_weights(method: lb.Method, share: float, tmp_path: Path) -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 10)), method)
    lb.save(bnn, tmp_path / "file")
    found = describe(tmp_path / "file")
    assert (found["bayesian_weights"], found["weights"]) == (share * 160, 160)
    assert f"{share * 160:.0f} Bayesian weights" in repr(bnn)


@pytest.mark.parametrize("method", [lb.MeanField(), lb.VDP(), lb.VDP.paper()], ids=["mean-field", "vdp", "paper"])
def test_a_rule_with_settings_is_restored(method: lb.Method, tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    for rule in (MomentPropagation("none", "taylor"), MomentPropagation(maps="independent"), MomentPropagation()):
        bnn.rule = rule
        assert round_trip(bnn, CASES["mlp"].build(), tmp_path).current_rule == rule
    bnn.rule = "sample"
    assert round_trip(copy.deepcopy(bnn), CASES["mlp"].build(), tmp_path).rule == "sample"
    bnn.rule = "moments"
    assert round_trip(bnn, CASES["mlp"].build(), tmp_path).current_rule == method.make_rule("moments")
    assert describe(tmp_path / "model.safetensors")["rule"] == "moments"


def test_the_dropout_of_the_network_is_restored(tmp_path: Path) -> None:
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
def test_the_likelihood_is_restored(likelihood: Any, tmp_path: Path) -> None:
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
def test_memory_order_and_dtype_are_restored(change: str, same_network: bool, tmp_path: Path) -> None:
    net_change, bnn_change = CHANGES[change]
    net = net_change(CASES["cnn"].build())
    bnn = bnn_change(lb.bayesianize(net, lb.MeanField(prior=PRIORS["pretrained"])))
    x = CASES["cnn"].example().to(next(bnn.parameters()).dtype)
    if change == "bf16":  # only the network is in bf16, and the posterior keeps its precision
        x = x.bfloat16()
    bnn(x)
    loaded = round_trip(bnn, net if same_network else CASES["cnn"].build(), tmp_path)
    assert loaded(x).dtype == x.dtype
    bnn(x)
    assert_same(bnn, loaded, x)


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
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


def test_loading_does_not_change_the_given_network(tmp_path: Path) -> None:
    lb.save(lb.bayesianize(CASES["cnn"].build(), lb.MeanField()), tmp_path / "a")
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
def test_the_file_is_small_and_plain_safetensors_with_json(method: str, tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["language_model"].build(), METHODS[method])
    path = tmp_path / "model.safetensors"
    lb.save(bnn, str(path))
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
def test_round_trip_of_settings(
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
    lb.save(bnn, path)
    return path


def deep(levels: int) -> Any:
    """Lists in lists."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown type": (lambda h: h["method"].update(type="os.system"), "os.system"),
    "unknown prior": (lambda h: h["method"]["prior"].update(type="Cauchy"), "Cauchy"),
    "no type": (lambda h: h["method"].pop("type"), "type"),
    "type that is a list": (lambda h: h["method"].update(type=["MeanField"]), "header"),
    "likelihood for a method": (lambda h: h.update(method=h["likelihood"]), "header"),
    "unknown setting": (lambda h: h["method"].update(color=3), "color"),
    "impossible setting": (lambda h: h["method"].update(init_std=-1.0), "init_std"),
    "setting of another type": (lambda h: h["method"].update(init_std="big"), "init_std|header|settings"),
    "future version": (lambda h: h.update(version=99), "99"),
    "version that is true": (lambda h: h.update(version=True), "version True"),
    "version that is 1.0": (lambda h: h.update(version=1.0), "version 1.0"),
    "version that is a list": (lambda h: h.update(version=[1]), "version"),
    "negative factor": (lambda h: h.update(moment_scale=[1.0, -1.0]), "calibration factors"),
    "factor of zero": (lambda h: h.update(moment_scale=[0.0, 1.0]), "calibration factors"),
    "factor that is infinite": (lambda h: h.update(moment_scale=[math.inf, 1.0]), "calibration factors"),
    "factor that is NaN": (lambda h: h.update(moment_scale=[1.0, math.nan]), "NaN"),
    "three factors": (lambda h: h.update(moment_scale=[1.0, 1.0, 1.0]), "calibration factors"),
    "factors that are strings": (lambda h: h.update(moment_scale=["1", "1"]), "calibration factors"),
    "lists in lists": (lambda h: h["layout"][0].update(shape=[[16], [6]]), "layout"),
    "a parameter twice": (lambda h: h["layout"].append(h["layout"][0]), "twice"),
    "float8 layout": (lambda h: h["layout"][0].update(dtype="float8_e4m3fn"), "float8"),
    "huge shape": (lambda h: h["layout"][0].update(shape=[10**18, 10**18]), "layout"),
    "line break in a name": (lambda h: h["layout"][0].update(names=["a\n"]), "layout"),
    "frozen that is a string": (lambda h: h.update(frozen="0.bias"), "frozen"),
    "likelihood with a string": (lambda h: h["likelihood"].update(ignore_index="1"), "ignore_index"),
    "deep nesting": (lambda h: h.update(more=deep(200)), "nested too deeply"),
    "very deep nesting": (lambda h: h["method"].update(prior=deep(900)), "nested too deeply"),
    "too many values": (lambda h: h.update(more=[[]] * 200_000), "too many values"),
    "too long": (lambda h: h.update(more="a" * (5 << 20)), "characters"),
    "huge number": (lambda h: h["method"].update(samples=10**40), "too large"),
    "versions of modules that are strings": (lambda h: h.update(module_versions={"network": "1"}), "versions"),
    "wrong extra state": (lambda h: h.update(extra_state=[1]), "extra state"),
    "extra state for a tensor": (lambda h: h.update(extra_state={"network.9.bias": 3}), "network.9.bias"),
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
    "inputs in no dimension": (lambda h: h["layout"][0].update(input_dim=2), "header"),
    "inputs in a dimension below 0": (lambda h: h["layout"][0].update(input_dim=-1), "header"),
    "alias of nothing": (lambda h: h.update(aliases={"a": "b"}), "header"),
    "bad report": (lambda h: h.update(report=[["a"]]), "header"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_headers_are_refused(name: str, saved: Path) -> None:
    change, message = HEADERS[name]
    with_header(saved, change)
    text = refused(saved)
    assert any(part in text for part in message.split("|")), text


def test_describe_refuses_an_invalid_layout(saved: Path) -> None:
    with_header(saved, HEADERS["bad dtype"][0])
    with pytest.raises(lb.FileFormatError, match="float33") as caught:
        describe(saved)
    one_sentence(caught.value)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.zeros(3)}, path)
    assert "not one that leanbayes saved" in refused(path)
    save_file({"a": torch.zeros(3)}, path, metadata={"leanbayes": "[1]"})
    assert "not one that leanbayes saved" in refused(path)
    for content in (b"", b"PK\x03\x04", b"{}", b"\x80\x04" * 500, random.Random(0).randbytes(5000), b"\xff" * 100):
        path.write_bytes(content)
        assert "not a safetensors file" in refused(path)
    assert "no file" in refused(tmp_path / "nowhere")
    assert "no file" in refused(tmp_path)


def test_truncated_files_are_refused(saved: Path) -> None:
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


DTYPES = [
    ("posterior.mu", torch.int32),
    ("posterior.mu", torch.float8_e4m3fn),
    ("posterior.rho", torch.float8_e5m2),
    ("network.0.bias", torch.int32),
    ("noise.state", torch.float64),
    ("noise.state", torch.int32),
]


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_a_tensor_of_another_kind_of_dtype_is_refused(name: str, dtype: torch.dtype, saved: Path) -> None:
    rewritten(saved, replaced(name, lambda tensor: tensor.to(dtype)))
    text = refused(saved)
    assert name in text
    assert str(dtype) in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["posterior.mu", "posterior.rho", "network.0.bias"])
def test_weights_that_are_not_finite_are_refused(name: str, value: float, saved: Path) -> None:
    rewritten(saved, replaced(name, lambda tensor: tensor.index_fill(0, torch.tensor([1]), value)))
    assert f"{name} has NaN or infinite values" in refused(saved)


def test_statistics_of_norms_must_be_finite_and_masks_need_not(tmp_path: Path) -> None:
    def build(mask: float, mean: float) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
        net.register_buffer("mask", torch.full((2,), mask))
        net.get_buffer("1.running_mean").fill_(mean)
        return net

    lb.save(lb.bayesianize(build(-math.inf, 0.0), lb.MeanField()), tmp_path / "a")
    assert lb.load(tmp_path / "a", build(0.0, 0.0)).network.get_buffer("mask").isinf().all()
    with pytest.raises(lb.LeanBayesError, match="running_mean has NaN or infinite values, so the model is not saved"):
        lb.save(lb.bayesianize(build(0.0, math.nan), lb.MeanField()), tmp_path / "a")
    rewritten(tmp_path / "a", replaced("network.1.running_mean", lambda tensor: tensor * math.nan))
    assert "running_mean" in refused(tmp_path / "a", build(0.0, 0.0))


# -- the digest -------------------------------------------------------------------------------------------------------


def test_every_changed_bit_is_detected(tmp_path: Path) -> None:
    path, build = tmp_path / "a", lambda: nn.Linear(3, 2)
    bnn = lb.bayesianize(build(), lb.MeanField())
    lb.save(bnn, path)
    whole, net = bytearray(path.read_bytes()), build()
    state = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    first, loaded = 8 + struct.unpack("<Q", whole[:8])[0], 0
    for place in range(8, len(whole)):
        for bit in range(8) if place >= first else (place % 8,):
            whole[place] ^= 1 << bit
            path.write_bytes(whole)
            whole[place] ^= 1 << bit
            try:
                found = lb.load(path, net).state_dict()
            except lb.FileFormatError as error:
                one_sentence(error)
            else:  # a changed space between two values
                loaded += 1
                assert place < first
                assert all(torch.equal(tensor, found[name]) for name, tensor in state.items())
    assert loaded < 10


def test_a_changed_value_of_the_header_is_detected(saved: Path) -> None:
    whole = saved.read_bytes()
    assert whole.count(b"init_std") == 1
    place = whole.index(b"0.05", whole.index(b"init_std"))
    saved.write_bytes(whole[:place] + b"0.06" + whole[place + 4 :])
    assert "digest does not match" in refused(saved)


def test_a_digest_cannot_be_left_out(saved: Path) -> None:
    with_header(saved, lambda header: header.pop("digest"))
    assert "digest does not match" in refused(saved)


def test_a_file_without_versions_of_modules_needs_no_digest(saved: Path) -> None:
    """Version 0.1 has written neither."""
    with_header(saved, lambda header: [header.pop(name) for name in ("digest", "module_versions")])
    lb.load(saved, CASES["mlp"].build())


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_saved_to_the_same_bytes_in_every_process(method: str, tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), METHODS[method], seed=1)
    lb.save(bnn, tmp_path / "a")
    lb.save(lb.load(tmp_path / "a", CASES["mlp"].build()), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert [*file.metadata()] == ["leanbayes"]  # safetensors writes several entries in random order


# -- versions and extra state of modules ------------------------------------------------------------------------------


class Migrating(nn.Module):
    """A module that changes the values of older versions, and refuses a state without a version, as torchvision's."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version") not in (2, 3):
            raise ValueError("a state without a version")
        if local_metadata["version"] == 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("kind", ["safetensors", "compact"])
def test_versions_of_modules_are_restored(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Migrating(), nn.Linear(3, 3))

    bnn = lb.bayesianize(build(), lb.WeightSharing(components=2, minimum=1))
    write = lb.save if kind == "safetensors" else lb.compress
    write(bnn, tmp_path / "new")
    assert torch.equal(lb.load(tmp_path / "new", build()).network.get_parameter("1.scale"), torch.ones(3))
    monkeypatch.setattr(Migrating, "_version", 2)
    write(bnn, tmp_path / "old")
    monkeypatch.undo()
    assert torch.equal(lb.load(tmp_path / "old", build()).network.get_parameter("1.scale"), torch.full((3,), 0.5))


def test_a_file_of_version_0_1_has_the_current_versions_of_modules(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), Migrating())

    lb.save(lb.bayesianize(build(), lb.MeanField()), tmp_path / "a")
    with_header(tmp_path / "a", lambda header: [header.pop(name) for name in ("digest", "module_versions")])
    assert torch.equal(lb.load(tmp_path / "a", build()).network.get_parameter("1.scale"), torch.ones(3))


class Remembering(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__(6, 3)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("kind", ["safetensors", "compact"])
@pytest.mark.parametrize("extra", [None, 3, {"a": [1.5, "b", None, True]}, torch.arange(4)], ids=str)
def test_extra_state_is_restored(extra: Any, kind: str, tmp_path: Path) -> None:
    net = nn.Sequential(Remembering(extra), nn.Linear(3, 3))
    bnn = lb.bayesianize(net, lb.WeightSharing(components=2, minimum=1))
    (lb.save if kind == "safetensors" else lb.compress)(bnn, tmp_path / "a")
    other = torch.zeros(4, dtype=torch.int64) if isinstance(extra, Tensor) else None
    layer: Any = lb.load(tmp_path / "a", nn.Sequential(Remembering(other), nn.Linear(3, 3))).network.get_submodule("0")
    assert torch.equal(layer.extra, extra) if isinstance(extra, Tensor) else layer.extra == extra


@pytest.mark.parametrize("extra", [object(), {1: 2}, (1, 2), [torch.zeros(2)], math.nan, lambda: None], ids=range(6))
def test_other_extra_state_cannot_be_saved(extra: Any, tmp_path: Path) -> None:
    bnn = lb.bayesianize(nn.Sequential(Remembering(extra)), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match=r"0\._extra_state is neither a tensor nor made of numbers") as caught:
        lb.save(bnn, tmp_path / "a")
    one_sentence(caught.value)
    assert not [*tmp_path.iterdir()]


# -- any change -------------------------------------------------------------------------------------------------------


def test_a_damaged_header_raises_only_file_format_errors(saved: Path) -> None:
    # A changed byte may give another valid file (a digit of a setting, a letter of a reason), which loads.
    whole, numbers, net = saved.read_bytes(), random.Random(1), CASES["mlp"].build()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    refusals, wrong = 0, {}
    for offset in range(header):
        flipped, anything = whole[offset] ^ (1 << numbers.randrange(8)), numbers.randrange(256)
        byte = bytes([numbers.choice([flipped, anything, ord(numbers.choice('0123456789IF"'))])])
        saved.write_bytes(whole[:offset] + byte + whole[offset + 1 :])
        try:
            lb.load(saved, net)
        except lb.FileFormatError as error:
            one_sentence(error)
            refusals += 1
        except Exception as error:
            before, after = whole[max(offset - 30, 0) : offset], whole[offset + 1 : offset + 20]
            wrong[f"{type(error).__name__}: {error}"] = f"{before!r} {byte!r} {after!r}"
    assert wrong == {}
    assert refusals > header / 2


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
def test_another_architecture_is_refused_with_its_first_difference(name: str, saved: Path) -> None:
    change, message = OTHERS[name]
    net = CASES["mlp"].build()
    assert isinstance(net, nn.Sequential)
    change(net)
    text = refused(saved, net)
    assert message in text
    assert "another network" in text


def test_a_network_without_the_saved_dropout_is_refused(tmp_path: Path) -> None:
    lb.save(lb.bayesianize(with_dropout(), lb.MCDropout()), tmp_path / "a")
    net = with_dropout()
    net.get_submodule("2").p = 0.0  # type: ignore[assignment]
    with pytest.raises(lb.LeanBayesError, match="applied no dropout"):
        lb.load(tmp_path / "a", net).predict(torch.randn(2, 6))


# -- failed writes ----------------------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path: Path) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField())
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "model.safetensors", tmp_path / "file" / "model.safetensors", tmp_path):
        with pytest.raises(lb.LeanBayesError, match="Cannot write") as caught:
            lb.save(bnn, path)
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
        lb.save(lb.bayesianize(CASES["mlp"].build(), lb.MeanField()), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_file_permissions_follow_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        lb.save(lb.bayesianize(nn.Linear(2, 2), lb.MeanField()), tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
