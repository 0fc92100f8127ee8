"""Files that version 0.1 wrote load bit by bit, with settings that have been renamed since."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.deploy.loading import describe

FOLDER = Path(__file__).parents[1] / "fixtures" / "v0.1"
FILES: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())["files"]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 24), nn.Tanh(), nn.Linear(24, 5)
    )


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def state_of(bnn: lb.BayesianModel) -> dict[str, list[Any]]:
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest(tensor)[:16]]
        for name, tensor in bnn.state_dict().items()
    }


def settings_of(bnn: lb.BayesianModel) -> dict[str, Any]:
    return {
        "rule": bnn.rule,
        "trained_rule": bnn.trained_rule,
        "moment_scale": list(bnn.moment_scale),
        "method": type(bnn.method).__name__,
        "likelihood": type(bnn.likelihood).__name__,
        "likelihood_settings": bnn.likelihood.settings,
        "bayesian_weights": bnn.posterior.random_weights,
        "samples": bnn.method.samples,
        "layout": bnn.saved_layout().to_json(),
    }


def test_every_file_has_an_expected_state() -> None:
    assert FILES.keys() == {path.name for path in FOLDER.iterdir() if path.suffix in (".safetensors", ".lbc")}
    assert len(FILES) >= 24


@pytest.mark.parametrize("name", FILES)
def test_a_file_loads_bit_by_bit(name: str) -> None:
    expected = dict(FILES[name])
    bnn = lb.load(FOLDER / name, network())
    assert state_of(bnn) == expected.pop("state")
    assert settings_of(bnn) == expected


@pytest.mark.parametrize("name", FILES)
def test_a_loaded_model_is_saved_and_loaded_without_change(name: str, tmp_path: Path) -> None:
    bnn = lb.load(FOLDER / name, network())
    lb.save(bnn, tmp_path / "again.safetensors")
    again = lb.load(tmp_path / "again.safetensors", network())
    assert state_of(again) == FILES[name]["state"]
    assert settings_of(again) == settings_of(bnn)
    assert again.method == bnn.method


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".lbc")])
def test_a_loaded_model_is_compressed_and_loaded_without_change(name: str, tmp_path: Path) -> None:
    precision: Any = name.removesuffix(".lbc").rpartition("_")[2]
    bnn = lb.load(FOLDER / name, network())
    lb.compress(bnn, tmp_path / "again.lbc", values=precision, rest=precision)
    again = lb.load(tmp_path / "again.lbc", network())
    assert state_of(again) == FILES[name]["state"]
    assert settings_of(again) == settings_of(bnn)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ssvi.safetensors", {"addition": "samples", "addition_samples": 3}),
        ("vdp.safetensors", {"logit_samples": 5}),
        ("sharing.safetensors", {"pretrain_std": 0.25}),
    ],
)
def test_renamed_settings_have_their_values(name: str, settings: dict[str, Any]) -> None:
    method = lb.load(FOLDER / name, network()).method
    assert {setting: getattr(method, setting) for setting in settings} == settings


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_described(name: str) -> None:
    found, expected = describe(FOLDER / name), FILES[name]
    assert found["method"]["type"] == expected["method"]
    assert found["bayesian_weights"] == expected["bayesian_weights"]
    assert list(found["moment_scale"]) == expected["moment_scale"]
    assert found["bytes"] == (FOLDER / name).stat().st_size


@pytest.mark.filterwarnings("ignore::leanbayes.RuleMismatchWarning")
@pytest.mark.parametrize("name", FILES)
def test_a_loaded_model_predicts(name: str) -> None:
    bnn = lb.load(FOLDER / name, network())
    prediction = bnn.predict(torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0)), 2)
    values = prediction.mean if isinstance(prediction, lb.RegressionPrediction) else prediction.probs
    assert values.shape == (3, 5)
    assert values.isfinite().all()
