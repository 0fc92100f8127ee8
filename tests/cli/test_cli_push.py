"""`leanbayes push`: a run on the Hugging Face Hub, with a model card written from its evaluation."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_cases import EVALUATION, Cli, load_run
from hub_cases import hub as hub
from hub_cases import snapshot
from huggingface_hub import ModelCard

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.training import read_record


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a table, with a short evaluation. The data are in a folder of this machine."""
    folder = tmp_path_factory.mktemp("private")
    lines = [f"{x / 10},{x % 3},{x / 10 + x % 3}" for x in range(60)]
    (folder / "table.csv").write_text("\n".join(["a,b,y", *lines, ""]))
    words = ("fit", "mean-field", "--data", folder / "table.csv", "--epochs", 1, "--quiet", "--out", folder / "run")
    assert main([*map(str, words), "--model-options", "hidden=[4]"]) == 0
    assert main([*map(str, ("report", folder / "run", *EVALUATION, "--out", folder / "r.html", "--quiet"))]) == 0
    return folder / "run"


def test_a_run_is_shared_and_loaded_again(cli: Cli, hub: Path, evaluated: Path) -> None:
    output = cli("push", evaluated, "me/table", "--license", "apache-2.0", "--json")
    found = json.loads(output.out)
    assert found["address"].endswith("0123456789abcdef0123456789abcdef01234567")
    folder = snapshot(hub, "me/table")
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == found["files"]
    x = torch.randn(3, 2)
    wanted, shared = load_run(evaluated), lb.from_pretrained("me/table")
    seeded = torch.Generator().manual_seed
    assert torch.equal(
        shared.predict(x, generator=seeded(0)).mean,
        wanted.predict(x, generator=seeded(0)).mean,
    )
    card = ModelCard.load(folder / "README.md")
    assert (card.data.to_dict()["license"], card.data.pipeline_tag) == ("apache-2.0", "tabular-regression")
    stored = json.loads((evaluated / "evaluation.json").read_text())["scores"]
    results = {one.metric_type: one.metric_value for one in card.data.eval_results or ()}
    assert results["rmse"] == stored["rmse"]
    assert results["coverage_95"] == stored["coverage_95"]


def test_a_dry_run_writes_a_folder_that_is_a_run(cli: Cli, evaluated: Path) -> None:
    assert "Nothing was uploaded" in cli("push", evaluated, "me/table", "--dry-run", "shared").out
    Path("rows.csv").write_text("0.5,1\n")
    expected, found = (json.loads(cli("predict", run, "rows.csv", "--json").out) for run in (evaluated, "shared"))
    assert found == expected
    assert "not empty" in cli("push", evaluated, "me/table", "--dry-run", "shared", code=1).err


def test_folders_of_this_machine_are_not_shared(cli: Cli, evaluated: Path) -> None:
    cli("push", evaluated, "me/table", "--dry-run", "shared")
    assert read_record(evaluated)["config"]["source"]["name"] == str(evaluated.parent / "table.csv")
    for path in Path("shared").iterdir():
        assert str(evaluated.parent).encode() not in path.read_bytes()
    assert read_record("shared")["config"]["source"]["name"] == "table.csv"


def test_mistakes_are_one_sentence(cli: Cli, hub: Path, evaluated: Path) -> None:
    assert "There is no run in nowhere" in cli("push", "nowhere", "me/table", code=1).err
    assert "REPO" in cli("push", evaluated, code=2).err
    shutil.copytree(evaluated, "run")
    Path("file").write_text("")
    output = cli("push", "run", "me/table", "--dry-run", "file", code=1)
    assert output.err.count("\n") == 1
    assert "give a new folder" in output.err
