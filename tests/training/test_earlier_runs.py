"""Runs that version 0.1 wrote, with its names of settings, are read, evaluated and resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from training_cases import run_mlp, stopped_at

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.core import config
from leanbayes.data import Batches, load
from leanbayes.evaluation import evaluate
from leanbayes.networks import build
from leanbayes.training import Recipe, read_record

FIXTURE = Path(__file__).parents[1] / "fixtures" / "v0.1" / "run"
FORMER = {"optimizer": "optimiser", "normalize": "normalise"}  # the names of version 0.1
MODEL = "model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a finished run of version 0.1."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "run"))


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_a_record_has_current_names(run: Path) -> None:
    before, found = written(run)["config"], read_record(run)["config"]
    assert found["recipe"].keys() == config.encode(Recipe()).keys()
    assert found["recipe"]["optimizer"] == before["recipe"][FORMER["optimizer"]] == "sgd"
    assert found["normalize"] == before[FORMER["normalize"]]
    assert FORMER["normalize"] not in found
    same = found.keys() - {"recipe", "normalize", "method"}
    assert {name: found[name] for name in same} == {name: before[name] for name in same}
    assert found["method"] == {**before["method"], "engine": "backprop"}
    recipe = config.decode(found["recipe"])
    assert (recipe.optimizer, recipe.lr, recipe.temperature) == ("sgd", 0.002, 0.001)


def test_methods_and_the_starting_run_have_current_names(run: Path) -> None:
    values = written(run)
    values["config"]["method"] = {"type": "SSVI", "addition": "draws", "draws": 3}
    values["config"]["start"] = {"recipe": values["config"]["recipe"], "method": {"type": "VDP", "logit_draws": 7}}
    (run / "run.json").write_text(json.dumps(values))
    found = read_record(run)["config"]
    assert found["method"] == {"type": "SSVI", "addition": "samples", "addition_samples": 3, "engine": "backprop"}
    assert found["start"] == {"recipe": found["recipe"], "method": {"type": "VDP", "logit_samples": 7}}


def test_the_model_has_the_scores_of_its_record(run: Path) -> None:
    record, data = read_record(run), load("digits")
    network = build("mlp", (1, 8, 8), 10, hidden=[8])
    batches = Batches(data.validation, 64, shuffle=False, normalize=data.normalize).epoch()
    found = evaluate(lb.load(run / MODEL, network).eval(), batches, seed=0, details=False)
    assert found == pytest.approx(record["scores"]["validation"], rel=1e-5)


def test_a_finished_run_is_not_trained_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    words = "fit mean-field --data digits --model mlp --model-options hidden=[8] --epochs 1 --optimizer sgd"
    words += " --method.prior.scale 0.1 --temperature 0.001"  # the defaults of version 0.1
    assert main([*words.split(), "--out", str(run)]) == 0
    assert "nothing was trained" in capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    weights = [safetensors.torch.load(files.pop(MODEL)) for files in (before, after)]  # the file gets alarms
    assert after == before
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] if not name.startswith("noise"))
    assert main([*words.split(), "--out", str(run), "--lr", "0.5"]) == 1
    assert "lr=0.002" in capsys.readouterr().err


def test_the_commands_read_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    image = tmp_path / "image.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(image)
    for words in (["info"], ["evaluate", "--device", "cpu"], ["predict", str(image), "--device", "cpu"]):
        command, *rest = words
        assert main([command, str(run), *rest]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out
    assert main(["info", str(run)]) == 0
    assert "optimizer=sgd" in capsys.readouterr().out


def rename_as_before(folder: Path) -> None:
    """Give the files of a stopped run the names of version 0.1."""
    values = written(folder)
    recipe = values["config"]["recipe"]
    recipe[FORMER["optimizer"]] = recipe.pop("optimizer")
    (folder / "run.json").write_text(json.dumps(values))
    for path in folder.glob("checkpoints/*/training.pt"):
        state = torch.load(path, weights_only=True)
        state[FORMER["optimizer"] + "s"] = state.pop("optimizers")
        torch.save(state, path)
        (path.parent / "digests.json").unlink()  # version 0.1 wrote none


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_stopped_run_is_resumed_bit_by_bit(optimizer: str, tmp_path: Path) -> None:
    run_mlp(lb.MeanField(), tmp_path / "whole", optimizer=optimizer, lr=1e-2)
    with stopped_at(10):
        run_mlp(lb.MeanField(), tmp_path / "stopped", optimizer=optimizer, lr=1e-2, checkpoint_steps=4)
    rename_as_before(tmp_path / "stopped")
    run_mlp(lb.MeanField(), tmp_path / "stopped", optimizer=optimizer, lr=1e-2, checkpoint_steps=4)
    assert (tmp_path / "stopped" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    assert read_record(tmp_path / "stopped")["status"] == "finished"
    assert FORMER["optimizer"] not in written(tmp_path / "stopped")["config"]["recipe"]
