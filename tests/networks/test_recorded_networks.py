"""Networks named by files: no name and no option opens another file, contacts a host or allocates much memory."""

import importlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.core.config import encode
from leanbayes.data import reading, unpickling
from leanbayes.networks import build, recorded
from leanbayes.networks.recorded import build_listed, rebuild

SHAPE = (1, 4, 4)
FILE = 1 << 20
Run = Callable[..., Path]


class Library:
    """A stand-in for timm and torchvision that records how networks are built."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.models = SimpleNamespace(
            segmentation=None,
            list_models=lambda module: ["resnet18", "googlenet"] if module else ["fcn_resnet50"],
            get_model_builder=lambda name: lambda *, weights=None: None,
            get_model=self.create_model,
        )

    def is_model(self, name: str) -> bool:
        return True

    def get_pretrained_cfg(self, name: str) -> Any:
        return SimpleNamespace(fixed_input_size=False)

    def create_model(self, name: str, num_classes: int, in_chans: int = 3, **options: Any) -> nn.Module:
        self.calls.append({"name": name, **options})
        return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_chans, num_classes))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stub, original = Library(), importlib.import_module
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name, *rest: stub if name in ("timm", "torchvision") else original(name, *rest),
    )
    return stub


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Write the folder of a run whose record names a network. Connections are refused."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    def write(name: str, options: Any, **changes: Any) -> Path:
        network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        lb.save(lb.bayesianize(network, lb.MeanField()), tmp_path / "model.safetensors")
        model = {"name": name, "input_shape": list(SHAPE), "outputs": 3, "options": options, **changes}
        source = {"name": "digits", "task": "classification", "validation_share": 0.1, "resize": None}
        normalize = {"mean": [0.5], "std": [0.5]}
        settings = {"method": encode(lb.MeanField()), "recipe": encode(lb.Recipe(temperature=1.0)), "precision": "fp32"}
        data = {"data": "digits", "source": source, "classes": [], "normalize": normalize}
        machine = {"system": "Linux", "processor": "x86_64", "cores": 2, "gpus": []}
        record: dict[str, Any] = {
            "status": "finished",
            "config": {**settings, **data, "model": model},
            "command": "leanbayes fit mean-field",
            "versions": {},
            "machine": machine,
            "history": [],
            "scores": {},
            "costs": {"trainable": 51, "stored": 51},
        }
        (tmp_path / "run.json").write_text(json.dumps(record))
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "image.png")
        return tmp_path

    return write


def predict(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["predict", str(folder), str(folder / "image.png"), "--device", "cpu", "--samples", "2"])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


WEIGHT_SOURCES: list[dict[str, Any]] = [
    {"checkpoint_path": "evil.pth"},
    {"pretrained": True},
    {"pretrained": True, "pretrained_cfg_overlay": {"url": "http://192.0.2.1/weights.pth"}},
    {"pretrained": True, "pretrained_cfg_overlay": {"file": "evil.pth"}},
    {"pretrained": True, "pretrained_cfg": {"hf_hub_id": "someone/something"}},
    {"cache_dir": "/elsewhere"},
]


@pytest.mark.parametrize("options", WEIGHT_SOURCES)
def test_predict_opens_a_run_without_the_options_that_load_weights(
    library: Library, run: Run, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    code, printed = predict(run("timm:resnet18", {**options, "drop_rate": 0.1}), capsys)
    assert code == 0, printed
    assert library.calls
    for call in library.calls:
        assert call == {"name": "resnet18", "pretrained": False, "drop_rate": 0.1}


REFUSED: dict[str, tuple[str, Any, str]] = {
    "hub": ("timm:hf_hub:someone/something", {}, "without a path or an address"),
    "hub with a dash": ("timm:hf-hub:someone/something", {}, "without a path or an address"),
    "folder": ("timm:local-dir:/elsewhere", {}, "without a path or an address"),
    "path": ("timm:../resnet18", {}, "without a path or an address"),
    "tag with a path": ("timm:resnet18.tag/../x", {}, "without a path or an address"),
    "backslash": ("timm:a\\resnet18", {}, "without a path or an address"),
    "torchvision path": ("torchvision:quantization/resnet18", {}, "without a path or an address"),
    "unknown option": ("timm:resnet18", {"features_only": True}, "can only be used from Python"),
    "arguments of timm": ("timm:resnet18", {"model_cfg": {"file": "x"}}, "can only be used from Python"),
    "dict": ("timm:resnet18", {"drop_rate": {"file": "x"}}, "must be a number"),
    "path as a value": ("timm:resnet18", {"act_layer": "/elsewhere"}, "must be a number"),
    "word": ("timm:resnet18", {"act_layer": "os.system"}, "must be a number"),
    "list of words": ("timm:resnet18", {"depths": [[["a"]]]}, "must be a number"),
    "huge number": ("timm:resnet18", {"embed_dim": 10**12}, "at most 1048576"),
    "huge float": ("timm:resnet18", {"drop_rate": 1e30}, "at most 1048576"),
    "many layers": ("timm:resnet18", {"layers": [500] * 4}, "at most 1024 layers"),
    "own layers": ("vit-tiny", {"depth": 10**6}, "at most 1024 layers"),
    "seed": ("mlp", {"seed": 1}, "mlp has no option 'seed'"),
    "shape": ("mlp", {"input_shape": [3]}, "mlp has no option 'input_shape'"),
    "list of options": ("mlp", [1], "config.model.options has a wrong type"),
    "number as a name": (3, {}, "config.model.name has a wrong type"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSED)
def test_predict_refuses_names_and_options_that_could_reach_elsewhere(
    library: Library, run: Run, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, options, message = REFUSED[case]
    code, printed = predict(run(name, options), capsys)
    assert code != 0
    assert message in " ".join(printed.split())
    assert "Traceback" not in printed
    assert not library.calls


@pytest.mark.parametrize("shape", [[0], [-1, 4, 4], ["1"], [1.5], [], "abc", 4, None, [1 << 20] * 3, [1] * 9, [10**30]])
def test_shapes_in_a_run_are_checked(shape: Any) -> None:
    with pytest.raises(lb.LeanBayesError, match=r"does not describe its network|takes inputs of shape"):
        rebuild("mlp", shape, 3, {}, file_bytes=FILE)


def test_a_network_larger_than_its_file_is_refused_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    original = nn.Linear.reset_parameters

    def reset(self: nn.Linear) -> None:
        devices.append(self.weight.device.type)
        original(self)

    monkeypatch.setattr(nn.Linear, "reset_parameters", reset)
    with pytest.raises(lb.LeanBayesError, match=r"has \d+ weights, far more than its model file of 1048576 bytes"):
        rebuild("mlp", (1 << 20,), 3, {"hidden": [1 << 20]}, file_bytes=FILE)
    assert set(devices) == {"meta"}
    rebuild("mlp", (4,), 3, {"hidden": [8]}, file_bytes=100)
    assert "cpu" in devices


def test_a_run_is_rebuilt_as_it_was_built() -> None:
    options: dict[str, Any] = {"depth": 2, "patch": 4}
    ours = rebuild("vit-tiny", [3, 8, 8], 5, options, file_bytes=FILE)
    assert str(ours) == str(build("vit-tiny", (3, 8, 8), 5, **options))
    assert all(tensor.device.type == "cpu" for tensor in ours.state_dict().values())
    stem: dict[str, Any] = {"width": 4, "stem": "imagenet"}
    assert str(rebuild("ResNet_18", [3, 8, 8], 5, stem, file_bytes=FILE)) == str(
        build("resnet-18", (3, 8, 8), 5, **stem)
    )


def test_a_pretrained_torchvision_network_still_normalizes_inside(library: Library) -> None:
    rebuild("torchvision:googlenet", [3, 4, 4], 3, {"pretrained": True}, file_bytes=FILE)
    rebuild("torchvision:resnet18", [3, 4, 4], 3, {"pretrained": True, "weights": "DEFAULT"}, file_bytes=FILE)
    assert [call.get("transform_input") for call in library.calls] == [True, True, None, None]
    assert all(call["weights"] is None for call in library.calls)


def test_a_segmentation_network_of_torchvision_may_have_its_prefix(library: Library) -> None:
    rebuild("torchvision:segmentation/fcn_resnet50", [3, 4, 4], 3, {}, file_bytes=FILE)
    assert {call["name"] for call in library.calls} == {"fcn_resnet50"}


def test_fit_takes_pretrained_weights_but_no_paths(library: Library) -> None:
    build_listed("timm:resnet18", SHAPE, 3, {"pretrained": True, "drop_rate": 0.1}, seed=0)
    assert library.calls == [{"name": "resnet18", "pretrained": True, "drop_rate": 0.1}]
    for options in (*WEIGHT_SOURCES[:1], *WEIGHT_SOURCES[2:]):
        with pytest.raises(lb.LeanBayesError, match="can only be used from Python"):
            build_listed("timm:resnet18", SHAPE, 3, options, seed=0)
    with pytest.raises(lb.LeanBayesError, match="must be true or false"):
        build_listed("timm:resnet18", SHAPE, 3, {"pretrained": "/elsewhere"})
    with pytest.raises(lb.LeanBayesError, match="without a path or an address"):
        build_listed("timm:hf-hub:someone/something", SHAPE, 3, {})
    assert len(library.calls) == 1


def test_predict_does_not_read_the_data_of_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the data of the run were read")

    monkeypatch.setattr("leanbayes.cli.runs.load", load)
    folder = run("mlp", {"hidden": []})
    record = json.loads((folder / "run.json").read_text())
    record["config"]["source"]["name"] = str(folder / "elsewhere")
    (folder / "run.json").write_text(json.dumps(record))
    code, printed = predict(folder, capsys)
    assert code == 0, printed


@pytest.mark.parametrize("seed", [2**70, 2**64, -(2**63) - 1, 1.5, "a"])
def test_seeds_that_torch_cannot_use_raise_one_sentence(seed: Any) -> None:
    with pytest.raises(lb.LeanBayesError, match=r"^seed=.* must be a whole number from -2\*\*63 to 2\*\*64 - 1\.$"):
        build("mlp", (1, 8, 8), 3, seed=seed)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63), 0])
def test_all_seeds_of_torch_can_be_used(seed: int) -> None:
    one, same = (build("mlp", (4,), 3, seed=seed).state_dict() for _ in range(2))
    assert torch.equal(one["1.weight"], same["1.weight"])


def test_the_security_page_has_the_limits_of_the_code() -> None:
    page = " ".join((Path(__file__).parents[2] / "SECURITY.md").read_text().split())
    for limit in (
        f"at most {recorded._MOST_NUMBER:,}, lists of them",
        f"at most {recorded._MOST_LAYERS} layers",
        f"at most {recorded._MOST_VALUES:,} values",
        f"more than {recorded._WEIGHTS_PER_BYTE} weights per byte of the model file, plus {recorded._SPARE_WEIGHTS:,}",
        f"{reading._MOST_RATIO} times their compressed size, plus {reading._SPARE_BYTES >> 20} MiB",
        f"{unpickling._BYTES_PER_BYTE} times the size of the file, plus {unpickling._SPARE_BYTES >> 20} MiB",
        f"More than {Image.MAX_IMAGE_PIXELS:,} pixels",
    ):
        assert limit in page
    for option in ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "weights"):
        assert option in recorded._WEIGHT_SOURCES
        assert f"`{option}`" in page
