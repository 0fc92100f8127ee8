"""`lb.compress`: a loaded model equals the rounded model, and compresses to the same file again."""

import builtins
import contextlib
import copy
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compact_cases import START, X, build, header_of, rewritten, shared, signed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.quantization import Precision
from leanbayes.deploy.loading import describe
from leanbayes.posteriors.shared.codes import Codes
from leanbayes.posteriors.shared.shared import SharedPosterior

PRECISIONS: list[Precision] = ["fp32", "fp16", "int8"]
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def moments(bnn: lb.BayesianModel) -> tuple[Tensor, Tensor]:
    return bnn.posterior.mean().detach(), bnn.posterior.variance().detach()


def assert_equal(first: lb.BayesianModel, second: lb.BayesianModel) -> None:
    """Check that all tensors, samples and settings are equal, bit by bit."""
    state, found = first.state_dict(), second.state_dict()
    assert state.keys() == found.keys()
    for name, tensor in state.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name]), name
    assert (first.rule, first.trained_rule, first.moment_scale) == (
        second.rule,
        second.trained_rule,
        second.moment_scale,
    )
    assert torch.equal(first.predict(X, 3).probs, second.predict(X, 3).probs)
    assert torch.equal(first.kl(), second.kl())


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["independent", "hierarchical", "tied"])
def test_in_full_precision_everything_is_exact_except_shares_of_blends(sampling: Any, tmp_path: Path) -> None:
    bnn = shared(sampling)
    lb.compress(bnn, tmp_path / "a", values="fp32", rest="fp32")
    loaded = lb.load(tmp_path / "a", build())
    assert isinstance(bnn.posterior, SharedPosterior)
    assert isinstance(loaded.posterior, SharedPosterior)
    blended = bnn.posterior.blended
    plain = torch.ones(bnn.layout.numel, dtype=torch.bool)
    plain[blended] = False
    for before, after in zip(moments(bnn), moments(loaded), strict=True):
        assert torch.equal(before[plain], after[plain])
    assert torch.equal(loaded.posterior.blended, blended)
    alpha, found = (q.logits.softmax(1) for q in (bnn.posterior, loaded.posterior))
    torch.testing.assert_close(found, alpha, rtol=0, atol=1 / 255)
    first, second = ({n: t for n, t in m.state_dict().items() if not n.startswith("posterior.")} for m in (bnn, loaded))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rest", PRECISIONS)
@pytest.mark.parametrize("values", PRECISIONS)
@pytest.mark.parametrize("sampling", ["independent", "hierarchical", "tied"])
def test_a_loaded_model_compresses_to_the_same_file(sampling: Any, values: Any, rest: Any, tmp_path: Path) -> None:
    lb.compress(shared(sampling), tmp_path / "a", values=values, rest=rest)
    loaded = lb.load(tmp_path / "a", build())
    lb.compress(loaded, tmp_path / "b", values=values, rest=rest)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert_equal(loaded, lb.load(tmp_path / "b", build()))


@pytest.mark.parametrize(("values", "most"), [("fp16", 2**-11), ("int8", 1 / 254)])
def test_values_are_rounded_to_their_precision(values: Any, most: float, tmp_path: Path) -> None:
    bnn = shared(zeros=False)
    lb.compress(bnn, tmp_path / "a", values=values)
    loaded = lb.load(tmp_path / "a", build())
    assert isinstance(bnn.posterior, SharedPosterior)
    assert isinstance(loaded.posterior, SharedPosterior)
    plain = torch.ones(bnn.layout.numel, dtype=torch.bool)
    plain[bnn.posterior.blended] = False  # the shares of these are rounded, too
    for name in ("mu", "rho"):
        before, after = (q.expand(getattr(q, name)).detach()[plain] for q in (bnn.posterior, loaded.posterior))
        assert 0 < (before - after).abs().max() <= 1.001 * most * before.abs().max()


@pytest.mark.parametrize("rest", PRECISIONS)
def test_the_rest_is_rounded_to_its_precision(rest: Any, tmp_path: Path) -> None:
    net = build()
    norm: Any = net[1]  # type: ignore[index]
    norm.running_var[0], norm.running_var[1], norm.running_mean[0] = 1e-4, 1e6, -3.0
    bnn = shared(net=net)
    lb.compress(bnn, tmp_path / "a", rest=rest)
    loaded = lb.load(tmp_path / "a", build())
    for name, tensor in net.state_dict().items():
        if name not in {slot.name for slot in bnn.layout}:
            found = loaded.network.state_dict()[name]
            scale = tensor.abs() if name.endswith("running_var") else tensor.abs().max()
            exact = rest == "fp32" or not tensor.is_floating_point()
            assert ((tensor - found).abs() <= (0 if exact else 2**-11 if rest == "fp16" else 1 / 250) * scale).all()


def test_a_sparse_posterior_can_be_compressed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, 200), nn.ReLU(), nn.Linear(200, 10))
    x = torch.randn(5, 60)
    bnn = lb.bayesianize(lb.bayesianize(net, lb.SSVI(0.05)), lb.WeightSharing(components=16))
    made = lb.compress(bnn, tmp_path / "a")
    loaded = lb.load(tmp_path / "a", net)
    zero = bnn.posterior.mean() == 0
    assert torch.equal(loaded.posterior.mean() == 0, zero)
    assert torch.equal(loaded.posterior.variance() == 0, zero)
    torch.testing.assert_close(loaded.predict(x, 3).probs, bnn.predict(x, 3).probs, rtol=0, atol=2e-3)
    active, count = 700, bnn.layout.numel
    share = active / count
    mask = count * -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert made.parts["mask"] * 8 < 1.02 * mask + 8 * 40
    assert made.parts["labels"] * 8 < active * 4 + 8 * 60
    assert made.bytes == (tmp_path / "a").stat().st_size == sum(made.parts.values())


@pytest.mark.parametrize("name", ["mlp", "cnn", "vit_mha", "lstm", "language_model"])
def test_networks_of_many_kinds(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    bnn = lb.bayesianize(case.build(), lb.WeightSharing(components=8))
    bnn.rule, bnn.moment_scale = "mean", (0.9, 1.1)
    lb.compress(bnn, tmp_path / "a", values="fp32", rest="fp32")
    loaded = lb.load(tmp_path / "a", case.build())
    assert (loaded.rule, loaded.moment_scale, loaded.method) == ("mean", (0.9, 1.1), bnn.method)
    assert str(loaded.report) == str(bnn.report)
    bnn.eval()
    assert torch.equal(bnn(case.example()), loaded.eval()(case.example()))


@pytest.mark.parametrize("change", [lambda net: net.double(), lambda net: net.to(memory_format=torch.channels_last)])
def test_dtype_and_memory_order_are_restored(change: Any, tmp_path: Path) -> None:
    net = change(build())
    bnn = lb.bayesianize(net, lb.WeightSharing(components=8))
    lb.compress(bnn, tmp_path / "a", values="fp32", rest="fp32")
    loaded = lb.load(tmp_path / "a", build())
    x = X.to(next(net.parameters()).dtype)
    torch.testing.assert_close(loaded(x), copy.deepcopy(bnn)(x), rtol=0, atol=1e-5)
    assert loaded(x).dtype == x.dtype


def test_frozen_parameters_and_likelihood_are_restored(tmp_path: Path) -> None:
    net = CASES["mlp"].build()
    net[0].requires_grad_(False)  # type: ignore[index]
    bnn = lb.bayesianize(net, lb.WeightSharing(components=4, minimum=1), likelihood=lb.Gaussian(0.3, learned=True))
    lb.compress(bnn, tmp_path / "a")
    loaded = lb.load(tmp_path / "a", CASES["mlp"].build())
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in bnn.named_parameters()
    }
    assert loaded.likelihood.settings == bnn.likelihood.settings


def test_a_prior_on_pretrained_weights_loses_its_center(tmp_path: Path) -> None:
    net = build()
    bnn = lb.bayesianize(net, lb.WeightSharing(components=8, prior=lb.Normal(0.2, "pretrained")))
    made = lb.compress(bnn, tmp_path / "a")
    assert made.left_out == ("center of the prior",)
    loaded = lb.load(tmp_path / "a", net)
    assert loaded.method.prior == lb.Normal(0.2)  # type: ignore[attr-defined]
    assert lb.compress(loaded, tmp_path / "b").left_out == ()


def test_a_loaded_model_can_be_trained(tmp_path: Path) -> None:
    lb.compress(shared(), tmp_path / "a")
    loaded = lb.load(tmp_path / "a", build())
    before = lb.elbo_loss(loaded, X, torch.arange(6) % 5, num_data=100)
    optimizer = torch.optim.Adam(loaded.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        lb.elbo_loss(loaded, X, torch.arange(6) % 5, num_data=100).backward()
        optimizer.step()
    assert lb.elbo_loss(loaded, X, torch.arange(6) % 5, num_data=100) < before


def test_describe_has_the_bytes_of_every_part(tmp_path: Path) -> None:
    made = lb.compress(shared(), tmp_path / "a")
    found = describe(tmp_path / "a")
    assert {name: part["bytes"] for name, part in found["parts"].items()} == made.parts
    assert found["bytes"] == made.bytes
    assert found["method"]["type"] == "WeightSharing"
    assert found["parts"]["mask"]["numbers"] == found["weights"] == shared().layout.numel
    assert found["bayesian_weights"] == shared().posterior.random_weights < found["weights"]


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lb.MeanField(), lb.SSVI(0.2), lb.Deterministic()])
def test_models_without_shared_weights_are_refused(method: Any, tmp_path: Path) -> None:
    with pytest.raises(lb.LeanBayesError, match=r"lb\.bayesianize\(bnn, lb\.WeightSharing\(components=256\)\)"):
        lb.compress(lb.bayesianize(build(), method), tmp_path / "a")
    assert not [*tmp_path.iterdir()]


def test_unknown_precisions_are_refused(tmp_path: Path) -> None:
    for name in ("values", "rest"):
        with pytest.raises(lb.LeanBayesError, match=f"{name}='fp8' is unknown: use 'fp16', 'int8' or 'fp32'"):
            lb.compress(shared(), tmp_path / "a", **{name: "fp8"})  # type: ignore[arg-type]


def test_without_constriction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lb.compress(shared(), tmp_path / "a")
    usual = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "constriction":
            raise ModuleNotFoundError(name=name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    remedy = r"^Compact files need constriction: run pip install '\.\[compress\]' in the folder"
    with pytest.raises(lb.MissingPackageError, match=remedy):
        lb.compress(shared(), tmp_path / "b")
    with pytest.raises(lb.MissingPackageError, match=remedy):
        lb.load(tmp_path / "a", build())


def test_another_network_is_refused(tmp_path: Path) -> None:
    lb.compress(shared(), tmp_path / "a")
    wider = build()
    wider[6] = nn.Linear(24, 6)  # type: ignore[operator]
    with pytest.raises(lb.FileFormatError, match=r"saved from another network: it has 6\.weight of shape"):
        lb.load(tmp_path / "a", wider)
    without_norm = build()
    without_norm[1] = nn.Identity()  # type: ignore[operator]
    with pytest.raises(lb.FileFormatError):
        lb.load(tmp_path / "a", without_norm)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compact") / "file"
    lb.compress(shared("hierarchical"), path, rest="int8")
    return path


@given(st.data())
def test_flipped_truncated_and_longer_files_are_refused(written: Path, data: st.DataObject) -> None:
    whole = written.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place] ^= data.draw(st.integers(1, 255))
    for changed in (bytes(flipped), whole[:place], whole + whole[:place] + b"\0"):
        path = written.with_name("changed")
        path.write_bytes(changed)
        with pytest.raises(lb.FileFormatError) as caught:
            lb.load(path, build())
        assert "\n" not in str(caught.value)


@given(st.data())
def test_wrong_bytes_with_a_valid_checksum_are_harmless(written: Path, data: st.DataObject) -> None:
    """They give an error, or a model of the right size with valid labels."""
    whole = bytearray(written.read_bytes()[:-32])
    first = START.size + START.unpack_from(whole)[-1]
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(first, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = written.with_name("signed")
    path.write_bytes(signed(bytes(whole)))
    try:
        loaded = lb.load(path, build())
    except lb.FileFormatError:
        return
    assert isinstance(loaded.posterior, SharedPosterior)
    assert loaded.posterior.mean().shape == (loaded.layout.numel,)


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(0, 2**62), st.integers(-2, 3), st.sampled_from([None, 1.5, "1", [], {}])
)


@given(
    st.sampled_from(["counts", "numbers", "parts", "layout", "frozen", "aliases", "moment_scale", "method"]),
    st.integers(0, 9),
    st.integers(0, 5),
    NUMBERS,
)
def test_headers_with_wrong_numbers_are_refused_and_take_no_memory(
    written: Path, key: str, row: int, field: int, value: Any
) -> None:
    path = written.with_name("header")
    path.write_bytes(written.read_bytes())

    def change(header: dict[str, Any]) -> None:
        place = header if key == "parts" else header["settings"]
        if not isinstance(place[key], list) or not place[key]:
            place[key] = value
            return
        rows = place[key]
        inner = rows[row % len(rows)]
        if isinstance(inner, list):
            place_in = inner[field % len(inner)]
            inner[field % len(inner)] = [value] * len(place_in) if isinstance(place_in, list) else value
        elif isinstance(inner, dict):
            inner["shape"] = [value] * len(inner["shape"])
        else:
            rows[row % len(rows)] = value

    before = header_of(path)
    rewritten(path, change)
    if header_of(path) == before:
        return
    network = build()
    tracemalloc.start()
    with contextlib.suppress(lb.FileFormatError):
        lb.load(path, network)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 22


@pytest.mark.parametrize("codes", [2**20, 2**31, 2**62])
def test_headers_with_huge_numbers_of_codes_take_no_memory(written: Path, codes: int) -> None:
    path = written.with_name("bomb")
    path.write_bytes(written.read_bytes())
    rewritten(path, lambda header: header["settings"]["counts"].__setitem__(0, codes))
    tracemalloc.start()
    with pytest.raises(lb.FileFormatError, match="damaged"):
        lb.load(path, build())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 22


@same_folder
@given(st.integers(1, 40), st.integers(0, 5), st.floats(0, 1), st.sampled_from(PRECISIONS), st.integers(0, 2**16))
def test_small_layers_of_any_kind(
    tmp_path: Path, size: int, codes: int, density: float, values: Any, seed: int
) -> None:
    """These include a single weight, only zeros, only one code, and only outliers."""
    random = np.random.default_rng(seed)
    net = nn.Linear(size, 1, bias=False)
    method = lb.WeightSharing(components=None)
    bnn = lb.bayesianize(net, method)
    labels = torch.from_numpy(np.where(random.random(size) < density, random.integers(0, codes + 1, size), codes))
    mean, std = (
        torch.from_numpy(random.normal(size=codes)).float(),
        torch.from_numpy(random.random(codes) + 0.1).float(),
    )
    stds = random.integers(0, codes + 1)
    prior = method.prior.bind(bnn.layout, torch.zeros(size))
    bnn.posterior = SharedPosterior(bnn.layout, Codes.without_blends(mean, std[:stds], labels), prior)
    lb.compress(bnn, tmp_path / "a", values=values)
    loaded = lb.load(tmp_path / "a", net)
    if values == "fp32":
        assert torch.equal(loaded.posterior.mean(), bnn.posterior.mean())
        assert torch.equal(loaded.posterior.variance(), bnn.posterior.variance())
    lb.compress(loaded, tmp_path / "b", values=values)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
