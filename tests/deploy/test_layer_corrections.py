"""`lb.calibrate(..., layers=True)`: corrections of single layers, measured by samples and stored in the model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.deploy.layer_corrections import correct_layers
from leanbayes.deploy.loading import describe
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.rules import MomentPropagation, Moments
from leanbayes.rules.moments.context import Pass
from leanbayes.rules.moments.correction import Correction


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


CORRECTED = ["2.weight", "6.weight", "8.weight"]  # the input of the first layer is not random


def noisy() -> lb.BayesianModel:
    return lb.bayesianize(network(), lb.MeanField(init_std=0.5)).eval()


def inputs(count: int = 64) -> Tensor:
    return torch.randn((count, 1, 8, 8), generator=generator(1)) + 1


def calibrated(**settings: Any) -> tuple[lb.BayesianModel, Tensor]:
    bnn, x = noisy(), inputs()
    lb.calibrate(bnn, [x[:40], (x[40:], torch.zeros(24))], layers=True, generator=generator(), **settings)
    return bnn, x


def one_pass(bnn: lb.BayesianModel, x: Tensor) -> Moments:
    with bnn.using("moments"), bnn.frozen(0), torch.no_grad():
        output = bnn(x)
    assert isinstance(output, Moments)
    return output


# -- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel_dim", [-1, -3])
def test_a_correction_changes_mean_variance_and_common_noise(channel_dim: int) -> None:
    torch.manual_seed(0)
    shape = (2, 5, 4) if channel_dim == -1 else (2, 4, 5, 5)
    common = torch.randn(7, *(1 if dim in (1, -2) and channel_dim == -1 else size for dim, size in enumerate(shape)))
    y = Moments(torch.randn(shape), torch.rand(shape), common, within=Pass("common"))
    values = torch.rand(3, 4) + 0.5
    found = Correction(*values)(y, channel_dim)
    for channel in range(4):
        gain, shift, factor = values[:, channel]
        own = [part.select(channel_dim, channel) for part in (y.loc, y.variance, found.loc, found.variance)]
        torch.testing.assert_close(own[2], gain * own[0] + shift * own[1].sqrt())
        torch.testing.assert_close(own[3], factor * own[1])
        independent = y.independent.select(channel_dim, channel) * factor
        torch.testing.assert_close(found.independent.select(channel_dim, channel), independent, atol=1e-5, rtol=1e-4)


def layer_means(bnn: lb.BayesianModel, x: Tensor, rule: str, passes: int) -> dict[str, list[Tensor]]:
    """The outputs of conv and linear modules, averaged over inputs and pixels, for each pass."""
    found: dict[str, list[Tensor]] = {}

    def take(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = [output] if isinstance(output, Tensor) else [output.loc, output.variance]
            means = [part.movedim(1, -1).flatten(0, -2).mean(0) for part in parts]
            found.setdefault(name, []).append(torch.stack(means))

        return hook

    handles = [bnn.network.get_submodule(name[:1]).register_forward_hook(take(name)) for name in CORRECTED]
    with bnn.using(rule), torch.no_grad():
        for number in range(passes):
            bnn(x, _draw=bnn.next_draw(generator(100 + number)))
    for handle in handles:
        handle.remove()
    return found


def test_means_of_all_layers_equal_those_of_samples_after_calibration() -> None:
    bnn, x = noisy(), inputs()
    sampled = {name: torch.stack(parts)[:, 0] for name, parts in layer_means(bnn, x, "sample", 2000).items()}

    def errors() -> dict[str, Tensor]:
        """Errors of the means, in units of the std over samples."""
        ours = layer_means(bnn, x, "moments", 1)
        return {name: (ours[name][0][0] - sampled[name].mean(0)) / sampled[name].std(0) for name in CORRECTED}

    before = errors()
    lb.calibrate(bnn, [x], layers=True, factors=False, samples=400, generator=generator())
    after = errors()
    for name in CORRECTED:
        assert after[name].abs().max() < 4 * (1 / 3200 + 1 / 2000) ** 0.5, name  # eight parts of 400 samples, and 2000
    assert before["6.weight"].abs().max() > 1.2 * after["6.weight"].abs().max()


def test_corrected_variances_are_those_of_samples() -> None:
    """A rule that ignores what pixels share finds a part of the variance."""
    bnn, x = lb.bayesianize(network(), lb.VDP(correlation="none", init_std=0.4)).eval(), inputs()
    with bnn.using("sample"), torch.no_grad():
        wanted = torch.stack([bnn(x, _draw=bnn.next_draw(generator(number))) for number in range(2000)]).var(0).mean(0)
    before = one_pass(bnn, x).variance.mean(0) / wanted
    assert lb.calibrate(bnn, [x], layers=True, factors=False, generator=generator()) == (1.0, 1.0)
    after = one_pass(bnn, x).variance.mean(0) / wanted
    assert before.mean() < 0.85
    assert (after - 1).abs().max() < 0.2  # 512 samples


def test_linear_networks_need_no_corrections() -> None:
    """Without nonlinearities the moments of independent inputs are exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 4))
    bnn = lb.bayesianize(net, lb.VDP(correlation="none", init_std=0.3)).eval()
    x = torch.randn(256, 6, generator=generator(2))
    samples = 200
    found = correct_layers(bnn, [x], samples, 256, generator())  # eight parts of 32
    assert list(found) == ["1.weight"]
    gain, shift, factor = found["1.weight"]
    count = samples * 256 / 32
    assert (gain - 1).abs().max() < 5 / count**0.5
    assert shift.abs().max() < 5 / count**0.5
    assert (factor - 1).abs().max() < 5 * (2 / count) ** 0.5 * 2  # the outputs are products, with heavier tails


def test_a_single_input_is_matched_exactly() -> None:
    """With the same samples, the corrected pass has their mean and variance."""
    bnn, x = noisy(), inputs(1)
    state = generator(3)
    lb.calibrate(bnn, [x], layers=True, factors=False, samples=10, generator=state)
    replay = generator(3)
    outputs = []
    with bnn.using("sample"), torch.no_grad():
        for number in range(10):
            outputs.append(bnn(x, _draw=bnn.next_draw(replay, number)))
    drawn, ours = torch.stack(outputs), one_pass(bnn, x)
    torch.testing.assert_close(ours.loc, drawn.mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.variance, drawn.var(0), rtol=1e-3, atol=1e-4)


# -- which layers -----------------------------------------------------------------------------------------------------


def test_attention_is_corrected_and_embeddings_and_shared_weights_are_not() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.twice = nn.Linear(8, 8)
            self.rnn = nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.words(x)
            h = h + self.attention(h, h, h, need_weights=False)[0]
            h = self.twice(torch.relu(self.twice(h)))
            return self.head(self.rnn(h)[0].mean(1))

    torch.manual_seed(0)
    bnn = lb.bayesianize(Net(), lb.MeanField(init_std=0.3)).eval()
    x = torch.randint(11, (8, 5), generator=generator(1))
    lb.calibrate(bnn, [x], layers=True, samples=8, generator=generator())
    assert list(bnn.moment_layers) == ["attention.in_proj_weight", "attention.out_proj.weight", "head.weight"]
    assert bnn.moment_layers["attention.in_proj_weight"].shape == (3, 24)


def test_deterministic_layers_have_no_correction() -> None:
    bnn = lb.bayesianize(network(), lb.MeanField(init_std=0.5), select=["2.weight", "6.weight"]).eval()
    lb.calibrate(bnn, [inputs(8)], layers=True, samples=4, generator=generator())
    assert list(bnn.moment_layers) == ["6.weight"]


# -- when they apply --------------------------------------------------------------------------------------------------


def test_corrections_apply_in_evaluation_and_only_with_the_settings_they_were_fitted_for() -> None:
    bnn, x = calibrated(factors=False)
    fitted = bnn.moment_layers
    assert list(fitted) == CORRECTED
    with_them = one_pass(bnn, x)
    other = MomentPropagation(correlation="none")
    with bnn.using(other):
        plain_rule = bnn(x)
    bnn.train()
    in_training = one_pass(bnn, x)
    bnn.eval()
    bnn.moment_layers = {}
    without = one_pass(bnn, x)
    assert not torch.allclose(with_them.loc, without.loc)
    with bnn.using(other):
        torch.testing.assert_close(bnn(x).loc, plain_rule.loc, rtol=0, atol=0)
    torch.testing.assert_close(one_pass(bnn.train(), x).loc, in_training.loc, rtol=0, atol=0)
    bnn.eval().moment_layers = fitted
    assert torch.equal(one_pass(bnn, x).loc, with_them.loc)


def test_the_same_seed_gives_the_same_corrections_and_the_model_stays_as_it_is() -> None:
    bnn, other = noisy().train(), noisy()
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    for model in (bnn, other):
        lb.calibrate(model, [inputs()], layers=True, samples=4, generator=generator(7))
    assert bnn.training
    assert bnn.moment_scale == other.moment_scale
    assert all(torch.equal(bnn.moment_layers[name], other.moment_layers[name]) for name in CORRECTED)
    assert bnn.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())


def test_only_the_first_inputs_are_used_and_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    bnn, other, x = noisy(), noisy(), inputs(100)
    settings: dict[str, Any] = {"layers": True, "factors": False, "samples": 3, "layer_inputs": 70}
    lb.calibrate(bnn, iter(x.split(50)), progress=lambda *one: seen.append(one), generator=generator(), **settings)
    assert seen == [(9 * number, 70) for number in range(1, 6)] + [(50, 70), (59, 70), (68, 70), (70, 70)]
    lb.calibrate(other, [x[:50], x[50:70]], generator=generator(), **settings)
    assert all(torch.equal(bnn.moment_layers[name], other.moment_layers[name]) for name in CORRECTED)


def test_factors_are_fitted_with_the_corrections_and_keep_them() -> None:
    bnn, x = calibrated(factors=False)
    corrections = bnn.moment_layers
    first = lb.calibrate(bnn, [x], to="samples", generator=generator())
    assert first != (1.0, 1.0)
    assert all(torch.equal(bnn.moment_layers[name], corrections[name]) for name in CORRECTED)
    plain = noisy()
    assert lb.calibrate(plain, [x], to="samples", generator=generator()) != first
    labels = torch.arange(64) % 3
    assert lb.calibrate(bnn, [(x, labels)], to="labels", layers=True, samples=4, generator=generator()) != first


# -- storage ----------------------------------------------------------------------------------------------------------


def test_corrections_are_saved_loaded_copied_and_moved(tmp_path: Path) -> None:
    bnn, x = calibrated()
    wanted = bnn.predict(x, rule="moments").probs
    path = tmp_path / "model.safetensors"
    lb.save(bnn, path)
    loaded = lb.load(path, network())
    for model in (loaded, copy.deepcopy(bnn), copy.deepcopy(bnn).double().float()):
        assert torch.equal(model.predict(x, rule="moments").probs, wanted)
        assert all(torch.equal(model.moment_layers[name], bnn.moment_layers[name]) for name in CORRECTED)
    assert describe(path)["moment_layers"] == {"2.weight": 6, "6.weight": 8, "8.weight": 3}
    assert describe(path)["parts"]["corrections"] == {"numbers": 51, "bytes": 204}
    lb.save(lb.load(path, network()), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    bnn.moment_layers = {}
    lb.save(bnn, path)
    assert lb.load(path, network()).moment_layers == {}


def test_a_file_with_wrong_corrections_is_refused(tmp_path: Path) -> None:
    bnn, _ = calibrated()
    good = bnn.moment_layers["2.weight"].clone()
    for wrong in (good[:2], good[:, :0], -good, good * float("nan")):
        bnn.moment_layers = {"2.weight": wrong}
        lb.save(bnn, tmp_path / "model")
        with pytest.raises(FileFormatError, match="correction"):
            lb.load(tmp_path / "model", network())


def test_compact_files_keep_corrections(tmp_path: Path) -> None:
    bnn, x = calibrated()
    shared = lb.bayesianize(bnn, lb.WeightSharing(components=16)).eval()
    assert shared.moment_layers == {}
    lb.calibrate(shared, [x], layers=True, samples=8, generator=generator())
    lb.compress(shared, tmp_path / "model.lbc", values="fp32", rest="fp32")
    loaded = lb.load(tmp_path / "model.lbc", network()).eval()
    assert all(torch.equal(loaded.moment_layers[name], shared.moment_layers[name]) for name in CORRECTED)
    assert describe(tmp_path / "model.lbc")["moment_layers"] == {"2.weight": 6, "6.weight": 8, "8.weight": 3}
    torch.testing.assert_close(loaded.predict(x, rule="moments").probs, shared.predict(x, rule="moments").probs)


def test_restricted_models_lose_corrections_that_were_fitted_to_more_noise() -> None:
    bnn, _ = calibrated()
    assert lb.restrict(bnn, 0.1).moment_layers == {}


def test_exported_programs_have_the_corrections(tmp_path: Path) -> None:
    bnn, x = calibrated()
    wanted = bnn.predict(x, rule="moments").probs
    ours = one_pass(bnn, x)
    found = lb.export_program(bnn, x).module()(x)
    torch.testing.assert_close(found["probs"], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["mean"], ours.loc, rtol=1e-4, atol=1e-5)
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    file = lb.export_onnx(bnn, tmp_path / "model.onnx", x)
    assert file.error is not None
    session = runtime.InferenceSession(str(file.path), providers=["CPUExecutionProvider"])
    names = ["mean", "variance", "probs"]
    mean, variance, probs = (torch.from_numpy(part) for part in session.run(names, {"input": x.numpy()}))
    torch.testing.assert_close(mean, ours.loc, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(variance, ours.variance.expand_as(variance), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(probs, wanted, rtol=1e-4, atol=1e-5)
    bnn.moment_layers = {}
    assert not torch.allclose(one_pass(bnn, x).loc, mean, rtol=1e-2)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lb.Deterministic(), lb.MCDropout(), lb.Ensemble(2)], ids=str)
def test_models_without_bayesian_weights_are_refused(method: lb.Method) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    bnn = lb.bayesianize(net, method).eval()
    with pytest.raises(LeanBayesError, match="has no random weights, so there is nothing to correct"):
        lb.calibrate(bnn, [torch.randn(4, 4)], layers=True)


def test_mistakes_are_refused_and_change_nothing() -> None:
    bnn, x = calibrated()
    before = bnn.moment_scale, bnn.moment_layers

    def refused(match: str, batches: Any = (x,), **settings: Any) -> None:
        with pytest.raises(LeanBayesError, match=match):
            lb.calibrate(bnn, batches, **{"layers": True, "samples": 2, **settings})
        assert bnn.moment_scale == before[0]
        assert all(torch.equal(bnn.moment_layers[name], before[1][name]) for name in CORRECTED)

    refused("no layer to correct", batches=[])
    refused("NaN", batches=[x * float("nan")])
    refused("layer_inputs=0 must be", layer_inputs=0)
    refused("samples=1 must be", samples=1)
    refused("leaves nothing to fit", layers=False, factors=False)
    refused("needs \\(input, label\\) pairs", to="labels")
    with pytest.raises(LeanBayesError, match=r"'9.weight' is not a Bayesian parameter"):
        bnn.moment_layers = {"9.weight": torch.ones(3, 4)}
    single = lb.bayesianize(network()[:1], lb.MeanField()).eval()
    with pytest.raises(LeanBayesError, match="no layer to correct"):
        lb.calibrate(single, [x], layers=True, samples=2)
