"""The command line as a newcomer meets it: train, score, predict, compare, look into; each from what it prints."""

import contextlib
import io
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import leanbayes as lb
from leanbayes import config
from leanbayes.cli import main
from leanbayes.cli.options import Task, parse, read_config
from leanbayes.cli.runs import prepare
from leanbayes.cli.tables import COST, QUALITY, comparison, scores_table, show
from leanbayes.data import ArrayDataset, load
from leanbayes.methods import METHODS
from leanbayes.models import build
from leanbayes.training import Recipe, read_record
from leanbayes.training.loop import Loop
from leanbayes.training.run import Run

RANDOM = np.random.default_rng(0)
TOY = ("--data", "toy", "--epochs", 1, "--quiet")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": ""}


class Told(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Told]


pytestmark = pytest.mark.usefixtures("imported", "at_home")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command that should succeed, unless another code is expected."""

    def run(*words: object, code: int = 0) -> Told:
        capsys.readouterr()
        found = main([str(word) for word in words])
        told = Told(found, *capsys.readouterr())
        assert found == code, told.err
        return told

    return run


def must_not_train(self: Loop) -> None:
    raise AssertionError("it trains again")


def load_run(folder: Path) -> lb.BayesianModel:
    model = read_record(folder)["config"]["model"]
    network = build(model["name"], tuple(model["input_shape"]), model["outputs"], **model["options"])
    return lb.load(folder / "model.safetensors", network).eval()


def picture(path: Path, *shape: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on pictures."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    assert main(["fit", "mean-field", "--epochs", "2", "--quiet", "--method.samples", "3", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a table."""
    folder = tmp_path_factory.mktemp("toy") / "run"
    assert main([str(word) for word in ("fit", "mean-field", *TOY, "--out", folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in one folder a class."""
    folder = tmp_path_factory.mktemp("pets") / "pets"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for number in range(4):
                picture(folder / split / name / f"{number}.png", 12, 14, 3)
    return folder


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with a label for each pixel, twice as wide as high."""
    folder = tmp_path_factory.mktemp("scenes") / "scenes"
    for split in ("train", "val", "test"):
        (folder / f"{split}annot").mkdir(parents=True)
        for number in range(4):
            picture(folder / split / f"{number}.png", 20, 40, 3)
            labels = RANDOM.integers(0, 12, (20, 40), dtype=np.uint8)
            Image.fromarray(labels).save(folder / f"{split}annot" / f"{number}.png")
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A csv file of a linear function."""
    x = RANDOM.normal(size=(80, 3))
    y = 50 * (x @ [1, 2, 3]) + RANDOM.normal(size=80)
    np.savetxt(tmp_path / "table.csv", np.c_[x, y], delimiter=",", header="a,b,c,y", comments="")
    return tmp_path / "table.csv"


# -- help -------------------------------------------------------------------------------------------------------------

COMMANDS = [("evaluate",), ("predict",), ("compare",), ("info",), *(("fit", name) for name in METHODS)]


def described(text: str) -> dict[str, str]:
    """Read a help text into its flags and positional arguments, and what is said on each."""
    found: dict[str, str] = {}
    name, section, margin = "", "", 0
    for line in text.replace("│", " ").splitlines():
        plain, indent = line.strip(" ╭╮╰╯─"), len(line) - len(line.lstrip())
        if header := re.fullmatch(r"(positional arguments|[\w.]* ?options)[ ─-]*", plain):
            name, section, margin = "", header.group(1), 0
        elif section and plain.strip("-"):
            margin = margin or indent
            if indent == margin and (plain.startswith("-") or section == "positional arguments"):
                name, *rest = re.split(r" {2,}", plain, maxsplit=1)
                found[name] = " ".join(rest)
            elif name:
                found[name] += " " + plain
    return {key: re.sub(r"\((default: .*|required)\)", "", value).strip() for key, value in found.items()}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_flag_is_described(words: tuple[str, ...], cli: Cli) -> None:
    text = cli(*words, "--help").out
    assert text.startswith(f"usage: leanbayes {' '.join(words)} ")
    flags = described(text)
    assert len(flags) >= 3
    assert [name for name, meaning in flags.items() if len(meaning) < 5] == []


@pytest.mark.parametrize("name", METHODS)
def test_fit_has_a_flag_for_every_setting(name: str, cli: Cli) -> None:
    flags = " ".join(described(cli("fit", name, "--help").out))
    for field in (*fields(Task), *fields(Recipe)):
        assert f"--{field.name.replace('_', '-')}" in flags
    for setting in config.encode(METHODS[name]).keys() - {"type"}:
        assert f"--method.{setting.replace('_', '-')}" in flags


def test_the_program_says_what_it_can_do(cli: Cli) -> None:
    text = cli("--help").out
    for name in ("fit", "evaluate", "predict", "compare", "info", *METHODS):
        assert name in text
    assert max(map(len, text.splitlines())) <= 110
    assert cli("-h").out == cli("help").out == cli(code=2).out == text
    assert cli("--version").out == f"leanbayes {lb.__version__}\n"


def test_fit_says_which_methods_there_are(cli: Cli) -> None:
    text = cli("fit", "--help").out
    for name in METHODS:
        assert re.search(rf"^  {name} +\S", text, re.MULTILINE)
    assert cli("fit", code=2).out == text


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("digits", ("small-cnn", "40", "64")),
        ("mnist", ("lenet-5", "20", "128")),
        ("Fashion_MNIST", ("lenet-5", "20", "128")),
        ("cifar10", ("resnet-18", "80", "256")),
        ("CIFAR-100", ("resnet-18", "80", "256")),
        ("svhn", ("resnet-18", "80", "256")),
        ("toy", ("mlp", "200", "32")),
        ("uci:yacht", ("mlp", "200", "32")),
        ("table.csv", ("mlp", "200", "32")),
        ("PETS", ("resnet-18", "90", "256")),
        ("SCENES", ("unet", "60", "8")),
    ],
)
def test_the_help_shows_what_suits_the_data(
    data: str, shown: tuple[str, ...], cli: Cli, pets: Path, scenes: Path
) -> None:
    data = {"PETS": str(pets), "SCENES": str(scenes)}.get(data, data)
    for words in (("--data", data), (f"--data={data}",)):
        text = " ".join(cli("fit", "mean-field", *words, "--help").out.replace("│", " ").split())
        for flag, value in zip(("model", "epochs", "batch-size"), shown, strict=True):
            assert re.search(rf"--{flag} [^-].*?\(default: (.*?)\)", text).group(1) == value  # type: ignore[union-attr]


# -- fit --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name: str, cli: Cli, tmp_path: Path) -> None:
    told = cli("fit", name, *TOY, "--model-options", "hidden=[8]", "--out", tmp_path / "run")
    assert told.err == ""
    assert f"leanbayes evaluate {tmp_path / 'run'}" in told.out
    record = read_record(tmp_path / "run")
    assert record["status"] == "finished"
    assert record["config"]["method"] == config.encode(METHODS[name])
    assert load_run(tmp_path / "run").method == METHODS[name]


def test_a_run_is_named_after_what_it_is(cli: Cli, tmp_path: Path, table: Path) -> None:
    cli("fit", "deterministic", *TOY, "--seed", 3)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["toy-mlp-deterministic-3"]
    told = cli("fit", "mean_field", "--data", table, "--epochs", 1, "--quiet")
    made = {path.name for path in (tmp_path / "runs").iterdir()} - {"toy-mlp-deterministic-3"}
    assert made == {"table-mlp-mean-field-0"}
    assert "leanbayes evaluate runs/table-mlp-mean-field-0\n" in told.out


def test_progress_goes_to_stderr_and_can_be_left_out(cli: Cli) -> None:
    told = cli("fit", "deterministic", "--data", "toy", "--epochs", 1, "--out", "run")
    first, last = told.err.splitlines()
    assert first == "Deterministic on toy: 810 examples, 25 steps in run"
    assert re.fullmatch(r"Held-out split: RMSE [\d.]+, NLL [\d.]+", last)
    assert told.out == "The run is in run. Score it on the test data: leanbayes evaluate run\n"
    assert cli("fit", "deterministic", *TOY, "--out", "other").err == ""


def test_flags_reach_the_method_and_the_recipe(cli: Cli) -> None:
    words = (
        "--method.prior.scale",
        "fan_in",
        "--method.prior.gain",
        2,
        "--method.rule",
        "local",
        "--method.samples",
        2,
    )
    cli("fit", "mean-field", *TOY, *words, "--method.no-relative", "--clip", 1.5, "--lr", "None", "--out=run")
    settings = read_record("run")["config"]
    prior = lb.Normal("fan_in", gain=2.0)
    assert config.decode(settings["method"]) == lb.MeanField(prior=prior, relative=False, rule="local", samples=2)
    assert (settings["recipe"]["clip"], settings["recipe"]["lr"]) == (1.5, None)


def test_a_flag_beats_the_file_and_the_file_beats_the_preset(cli: Cli) -> None:
    Path("a.yaml").write_text("method: mean-field\ndata: toy\nepochs: 1\nbatch_size: 100\nlr: 1e-3\nquiet: true\n")
    told = cli("fit", "--config", "a.yaml", "--lr", 5e-4, "--out", "run")
    assert told.err == ""
    recipe = read_record("run")["config"]["recipe"]
    assert (recipe["lr"], recipe["batch_size"], recipe["epochs"]) == (5e-4, 100, 1)
    assert (recipe["temperature"], recipe["weight_decay"]) == (0.1, 0.0)  # the preset of tables
    assert recipe["warmup"] == Recipe().warmup  # nobody says anything
    cli("fit", "mean-field", "--config=a.yaml", "--out", "other")  # the same method may be named twice
    assert read_record("other")["config"]["recipe"]["lr"] == 1e-3


def test_the_preset_is_that_of_the_files_data_set(cli: Cli) -> None:
    Path("a.yaml").write_text("data: toy\n")
    assert "(default: 200)" in cli("fit", "mean-field", "--config", "a.yaml", "--help").out
    assert "(default: 40)" in cli("fit", "mean-field", "--config", "a.yaml", "--data", "digits", "--help").out


def test_a_file_sets_the_method_to_any_depth(cli: Cli) -> None:
    Path("a.yaml").write_text(
        "method:\n  name: mean_field\n  samples: 2\n  init_std: 1e-2\n  prior: {scale: 5e-2, gain: 2}\n"
        "data: toy\nepochs: 1\nquiet: true\nout: run\nmodel_options: {hidden: [4, 4]}\n"
    )
    cli("fit", "--config", "a.yaml", "--method.prior.gain", 3)
    settings = read_record("run")["config"]
    assert config.decode(settings["method"]) == lb.MeanField(prior=lb.Normal(0.05, gain=3), init_std=0.01, samples=2)
    assert settings["model"]["options"] == {"hidden": [4, 4]}


@pytest.mark.parametrize("line", ["lr: 1e-3", "scale_lr: 1E-2", "clip: 1.e+1", "weight_decay: 5e-4"])
def test_numbers_are_read_as_people_write_them(line: str, cli: Cli) -> None:
    Path("a.yaml").write_text(f"{line}\n")
    cli("fit", "deterministic", *TOY, "--config", "a.yaml", "--out", "run", "--model-options", "hidden=[4]")
    name, _, value = line.partition(": ")
    assert read_record("run")["config"]["recipe"][name] == float(value)


def test_the_share_for_validation_is_read_as_people_write_it(cli: Cli) -> None:
    Path("a.yaml").write_text("validation_share: 2e-1\n")
    cli("fit", "deterministic", *TOY, "--config", "a.yaml", "--out", "run")
    assert read_record("run")["config"]["source"]["validation_share"] == 0.2


@pytest.mark.parametrize("name", ["batch-size", "batch_size"])
def test_a_setting_may_be_written_with_hyphens(name: str, cli: Cli) -> None:
    Path("a.yaml").write_text(f"{name}: 405\nmodel-options: {{hidden: [4]}}\nrefresh-batchnorm: false\n")
    cli("fit", "deterministic", *TOY, "--config", "a.yaml", "--out", "run")
    settings = read_record("run")["config"]
    assert (settings["recipe"]["batch_size"], settings["recipe"]["refresh_batchnorm"]) == (405, False)
    assert settings["model"]["options"] == {"hidden": [4]}


def test_switches_of_a_file_can_be_turned_back(cli: Cli) -> None:
    Path("a.yaml").write_text("quiet: true\ncompile: false\nmethod: {name: mean-field, relative: false}\n")
    words = ("fit", "mean-field", "--data", "toy", "--epochs", 1, "--config", "a.yaml")
    cli(*words, "--method.relative", "--out", "a")
    assert config.decode(read_record("a")["config"]["method"]) == lb.MeanField()
    assert cli(*words, "--no-quiet", "--out", "b").err.startswith("MeanField on toy")
    assert config.decode(read_record("b")["config"]["method"]) == lb.MeanField(relative=False)


@pytest.mark.parametrize("value", ["0.1", "1e-1", "1.e-1", "0.00001"])
def test_options_of_a_network_are_read_as_people_write_them(value: str) -> None:
    Path("a.yaml").write_text(f"model_options: {{depth: 10, widen: 1, dropout: {value}}}\n")
    from_file = parse(Task, [], "fit", Task(), read_config(Path("a.yaml"))).model_options
    for options in (from_file, ("depth=10", "widen=1", f"dropout={value}")):
        prepared = prepare(Task(model="wrn-28-10", model_options=options), seed=0)
        assert prepared.notes["model"]["options"] == {"depth": 10, "widen": 1, "dropout": float(value)}


def test_the_seed_decides_and_the_same_seed_repeats(cli: Cli) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        cli("fit", "mean-field", *TOY, "--seed", seed, "--out", name)
    a, b, c = (Path(name, "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_csv_table_is_fitted_and_scored_in_its_own_unit(cli: Cli, table: Path) -> None:
    cli("fit", "deterministic", "--data", table, "--epochs", 30, "--quiet", "--out", "run")
    scores = json.loads(cli("evaluate", "run", "--json").out)["scores"]
    data = load(table)
    assert isinstance(data.test, ArrayDataset)
    error = (load_run(Path("run")).predict(data.test.x).mean - data.test.y) * data.target_std[0]
    assert scores["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    assert scores["examples"] == len(data.test)


def test_a_folder_of_pictures_gives_labels_by_name(cli: Cli, pets: Path) -> None:
    words = ("--resize", 16, 16, "--model", "small-cnn", "--workers", 0, "--epochs", 1, "--quiet")
    cli("fit", "deterministic", "--data", pets, *words, "--out", "run")
    assert read_record("run")["config"]["model"]["input_shape"] == [3, 16, 16]
    assert json.loads(cli("evaluate", "run", "--json").out)["scores"]["examples"] == 8
    files = [pets / "val" / "cat" / "0.png", picture(Path("grey.png"), 30, 9), picture(Path("large.jpg"), 80, 90, 3)]
    rows = json.loads(cli("predict", "run", *files, "--json").out)
    assert {row["label"] for row in rows} <= {"cat", "dog"}
    assert [row["image"] for row in rows] == [str(path) for path in files]


def test_a_folder_of_pictures_needs_no_flags_for_a_small_machine(cli: Cli, pets: Path) -> None:
    # More workers than cores would make torch warn, which is an error in these tests.
    words = ("--resize", 16, 16, "--model", "small-cnn", "--epochs", 1, "--quiet")
    assert cli("fit", "deterministic", "--data", pets, *words, "--out", "run").err == ""


@pytest.fixture(scope="session")
def scenes_run(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes_run") / "run"
    words = ("--resize", 16, 16, "--model-options", "width=4", "--workers", 0, "--epochs", 1, "--quiet")
    assert main([str(word) for word in ("fit", "deterministic", "--data", scenes, *words, "--out", folder)]) == 0
    return folder


def test_scenes_are_segmented(cli: Cli, scenes_run: Path) -> None:
    assert read_record(scenes_run)["config"]["model"]["options"] == {"width": 4}
    told = cli("evaluate", scenes_run)
    assert re.search(r"^ mIoU +\d+\.\d\d%", told.out, re.MULTILINE)
    scores = read_record(scenes_run)["scores"]["test"]
    assert 0 <= scores["miou"] <= scores["accuracy"] <= 1


def test_a_scene_is_predicted_as_it_was_trained(cli: Cli, scenes_run: Path, scenes: Path) -> None:
    # It is stretched to the size, where other pictures lose their edges.
    (row,) = json.loads(cli("predict", scenes_run, scenes / "test" / "0.png", "--json").out)
    data = load(scenes, resize=(16, 16))
    assert data.test is not None
    assert data.normalise is not None
    expected = load_run(scenes_run).predict(data.normalise(data.test[0][0][None]))
    assert isinstance(expected, lb.ClassPrediction)
    assert row["probability"] == pytest.approx(expected.confidence.mean().item(), rel=1e-4)


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["toy", "digits"])
def test_a_finished_run_is_not_trained_again(data: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("fit", "deterministic", "--data", data, "--model", "mlp", "--epochs", 1, "--out", "run")
    cli(*words)
    files = [Path("run/model.safetensors"), Path("run/run.json")]
    before = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files]
    monkeypatch.setattr(Loop, "run", must_not_train)
    told = cli(*words)
    assert told.err == "The run in run is finished: nothing was trained. --overwrite starts anew.\n"
    assert "leanbayes evaluate run" in told.out
    assert cli(*words, "--quiet").err == ""
    assert [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files] == before


@pytest.mark.parametrize("data", ["toy", "digits"])
def test_a_stopped_run_goes_on_where_it_was(data: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ("--epochs", 2, "--checkpoint-steps", 10, "--batch-size", 64)
    words = ("fit", "mean-field", "--data", data, "--model", "mlp", "--model-options", "hidden=[8]", *recipe)
    step = Loop._step

    def stopped(self: Loop, parts: Any) -> None:
        if self._run.steps_done == 12:
            raise KeyboardInterrupt
        step(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", stopped)
        told = cli(*words, "--out", "run", code=130)
    assert re.fullmatch(r"MeanField on [^\n]*\nleanbayes: Stopped\.\n", told.err)
    assert read_record("run")["status"] == "stopped"
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000000010"]
    assert "going on from step 10 of" in cli(*words, "--out", "run").err
    cli(*words, "--out", "whole")
    assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_overwriting_starts_anew(cli: Cli) -> None:
    cli("fit", "mean-field", *TOY, "--out", "run")
    cli("evaluate", "run")
    told = cli("fit", "deterministic", *TOY, "--out", "run", code=1)
    assert "--overwrite" in told.err
    assert read_record("run")["config"]["method"]["type"] == "MeanField"
    cli("fit", "deterministic", *TOY, "--out", "run", "--overwrite")
    record = read_record("run")
    assert record["config"]["method"]["type"] == "Deterministic"
    assert list(record["scores"]) == ["validation"]


def test_settings_that_change_no_result_may_differ(cli: Cli, toy: Path) -> None:
    cli("fit", "mean-field", *TOY, "--out", toy, "--device", "cpu", "--keep", 5, "--checkpoint-minutes", 1)


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_test_data(cli: Cli, digits: Path) -> None:
    scores = json.loads(cli("evaluate", digits, "--json").out)["scores"]
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    assert data.normalise is not None
    generator = torch.Generator().manual_seed(0)
    prediction = load_run(digits).predict(data.normalise(data.test.x), generator=generator)
    assert isinstance(prediction, lb.ClassPrediction)
    assert scores["accuracy"] == pytest.approx((prediction.label == data.test.y).float().mean().item(), abs=1e-6)
    chosen = prediction.probs.gather(1, data.test.y[:, None])
    assert scores["nll"] == pytest.approx(-chosen.log().mean().item(), rel=1e-4)
    assert scores["examples"] == len(data.test) == 599
    assert scores["predict_ms_per_1000"] > 0


def without_times(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scores.items() if name != "predict_ms_per_1000"}


def test_scores_are_repeatable_and_written_into_the_run(cli: Cli, digits: Path) -> None:
    first = json.loads(cli("evaluate", digits, "--json").out)
    assert read_record(digits)["scores"]["test"] == first["scores"]
    assert first["run"] == str(digits)
    assert first["costs"] == read_record(digits)["costs"]
    second = json.loads(cli("evaluate", digits, "--json").out)
    assert without_times(first["scores"]) == without_times(second["scores"])
    record = read_record(digits)
    assert record["status"] == "finished"
    assert "validation" in record["scores"]


@pytest.mark.parametrize("words", [("--samples", 2), ("--rule", "mean"), ("--split", "validation"), ("--seed", 5)])
def test_other_ways_of_scoring_leave_the_run_as_it_is(words: tuple[Any, ...], cli: Cli, digits: Path) -> None:
    usual = json.loads(cli("evaluate", digits, "--json").out)["scores"]
    before = (digits / "run.json").read_bytes()
    other = json.loads(cli("evaluate", digits, *words, "--json").out)["scores"]
    assert without_times(other) != without_times(usual)
    assert (digits / "run.json").read_bytes() == before


def test_scores_are_written_however_they_are_shown_and_wherever_they_are_made(cli: Cli, toy: Path) -> None:
    for words in ((), ("--json",), ("--device", "cpu"), ("--root", "."), ("--split", "test", "--seed", 0)):
        record = read_record(toy)
        record["scores"].pop("test", None)
        (toy / "run.json").write_text(json.dumps(record))
        cli("evaluate", toy, *words)
        assert read_record(toy)["scores"]["test"]["examples"] == 100


def test_scores_are_shown_even_where_they_cannot_be_written(
    cli: Cli, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, values: Any) -> None:
        raise lb.LeanBayesError(f"Cannot write {path}: the disk is full.")

    monkeypatch.setattr("leanbayes.cli.evaluate.write_json", full)
    told = cli("evaluate", toy, code=1)
    assert re.search(r"^ RMSE +[\d.]+ *$", told.out, re.MULTILINE)
    assert told.err == f"leanbayes: Cannot write {toy / 'run.json'}: the disk is full.\n"
    assert "rmse" in json.loads(cli("evaluate", toy, "--json", code=1).out)["scores"]


def test_other_splits_and_rules_are_scored(cli: Cli, digits: Path) -> None:
    held_out = json.loads(cli("evaluate", digits, "--split", "validation", "--json").out)["scores"]
    assert held_out["examples"] == 120
    recorded = read_record(digits)["scores"]["validation"]
    assert held_out["nll"] == pytest.approx(recorded["nll"], rel=1e-4)
    mean = json.loads(cli("evaluate", digits, "--rule", "mean", "--json").out)["scores"]
    assert mean["mutual_information"] == pytest.approx(0, abs=1e-6)


def test_the_table_shows_every_score(cli: Cli, digits: Path, toy: Path) -> None:
    for folder, names in ((digits, ("accuracy", "NLL", "ECE", "Brier", "mutual information")), (toy, ("RMSE", "NLL"))):
        text = cli("evaluate", folder).out
        for name in (*names, "numbers ×1000", "file kB", "train ms/epoch", "predict ms/1000", "examples"):
            assert re.search(rf"^ {name} +[\d.,e+%]+ *$", text, re.MULTILINE), name
    record = read_record(digits)
    assert f"{record['scores']['test']['accuracy']:.2%}" in cli("evaluate", digits).out


def test_the_table_names_the_run_in_one_line(cli: Cli, digits: Path) -> None:
    assert cli("evaluate", digits).out.splitlines()[0] == f"{digits}, test data"
    assert cli("evaluate", digits, "--split", "validation").out.splitlines()[0] == f"{digits}, validation data"


def test_a_score_that_is_not_there_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"accuracy": 1.0, "entropy_wrong": math.nan, "examples": 1234}  # nothing is wrong
    show("", scores_table(scores, {"trainable": 2500}))
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()] == [
        ["accuracy", "100.00%"],
        ["entropy", "if", "wrong", "–"],
        ["numbers", "×1000", "2.5"],
        ["examples", "1,234"],
    ]


def test_rules_of_another_noise_are_warned_of_once_and_in_plain_words(cli: Cli, digits: Path) -> None:
    told = cli("evaluate", digits, "--rule", "local", "--samples", 2)
    assert re.fullmatch(r"leanbayes: [^\n]*was trained with the rule[^\n]*\.\n", told.err)
    assert ".py" not in told.err


# -- predict ----------------------------------------------------------------------------------------------------------


def check_row(row: dict[str, Any], classes: int) -> None:
    assert 1 / classes <= row["probability"] <= 1
    assert -1e-6 <= row["epistemic_uncertainty"] <= row["total_uncertainty"] <= math.log(classes) + 1e-6


@pytest.mark.parametrize(
    ("name", "shape"),
    [("a.png", (8, 8)), ("a.png", (9, 30, 3)), ("a.jpg", (40, 20, 3)), ("a.jpeg", (8, 8)), ("a.png", (5, 5, 4))],
    ids=str,
)
def test_any_picture_is_predicted(name: str, shape: tuple[int, ...], cli: Cli, digits: Path) -> None:
    (row,) = json.loads(cli("predict", digits, picture(Path(name), *shape), "--json").out)
    assert row["label"] in list("0123456789")
    check_row(row, 10)


def test_a_picture_is_predicted_as_the_library_does(cli: Cli, digits: Path) -> None:
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    files = [Path(f"{number}.png") for number in range(4)]
    for number, path in enumerate(files):
        Image.fromarray(data.test.x[number, 0].numpy()).save(path)
    rows = json.loads(cli("predict", digits, *files, "--json").out)
    bnn, normalise = load_run(digits), data.normalise
    assert normalise is not None
    for number, row in enumerate(rows):
        x = normalise(data.test.x[number : number + 1])
        expected = bnn.predict(x, generator=torch.Generator().manual_seed(0))
        assert isinstance(expected, lb.ClassPrediction)
        assert row["label"] == str(int(expected.label))
        assert row["probability"] == pytest.approx(expected.confidence.item(), rel=1e-5)
        assert row["total_uncertainty"] == pytest.approx(expected.entropy.item(), rel=1e-4, abs=1e-6)
        check_row(row, 10)


def test_draws_of_a_prediction_follow_the_seed(cli: Cli, digits: Path) -> None:
    path = picture(Path("a.png"), 8, 8)
    same = {cli("predict", digits, path, "--json", "--seed", 4).out for _ in range(2)}
    assert len(same) == 1
    assert cli("predict", digits, path, "--json", "--seed", 5).out not in same
    (row,) = json.loads(cli("predict", digits, path, "--json", "--samples", 1).out)
    assert row["epistemic_uncertainty"] == pytest.approx(0, abs=1e-6)  # one draw cannot disagree with itself


def test_the_table_of_predictions_has_a_line_a_picture(cli: Cli, digits: Path) -> None:
    files = [picture(Path(name), 8, 8) for name in ("one.png", "two.png")]
    rows = json.loads(cli("predict", digits, *files, "--json").out)
    above, head, *lines = cli("predict", digits, *files).out.splitlines()
    assert above.split() == ["total", "epistemic"]
    assert head.split() == ["image", "label", "probability", "uncertainty", "uncertainty"]
    for line, row in zip(lines, rows, strict=True):
        image, label, *figures = line.split()
        assert (image, label) == (row["image"], row["label"])
        shown = [f"{row[key]:.3f}" for key in ("probability", "total_uncertainty", "epistemic_uncertainty")]
        assert figures == shown


@pytest.mark.parametrize(
    "name",
    [
        "a folder with a long name/in a folder with a long name/in a folder with a long name/a.png",
        "cat[bold].png",  # what looks like markup
    ],
)
def test_a_file_is_named_in_full(name: str, cli: Cli, digits: Path) -> None:
    assert name in cli("predict", digits, picture(Path(name), 8, 8)).out


# -- compare ----------------------------------------------------------------------------------------------------------

LONG = "mean-field:rule=flipout,prior.scale=0.05,samples=4,init-std=0.02,prior.gain=1.0,relative=True,prior.center=zero"
SPECS = ["deterministic", "ensemble:members=2", LONG]


class Comparison(NamedTuple):
    folder: Path
    words: list[str]
    out: str
    figures: dict[str, Any]


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared")
    words = ["compare", *SPECS, *map(str, TOY), "--out", str(folder / "all"), f"--json={folder / 'copy.json'}"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return Comparison(folder / "all", words, out.getvalue(), json.loads((folder / "all/compare.json").read_text()))


def test_the_table_stars_the_best_of_each_column_and_names_it_below(compared: Comparison) -> None:
    lines = compared.out.splitlines()
    rows = {spec: next(line for line in lines if line.startswith(f"{spec} ")) for spec in SPECS}
    cells = {spec: line.removeprefix(spec).split() for spec, line in rows.items()}
    titles = ["RMSE", "NLL", "numbers ×1000", "file kB", "train ms/epoch", "predict ms/1000"]
    columns = {column.title.replace("\n", " "): column for column in (*QUALITY, *COST)}
    values = {result["name"]: {**result["scores"], **result["costs"]} for result in compared.figures["results"]}
    for name in values:
        values[name]["file_kb"] = values[name]["file_bytes"] / 1e3
        values[name]["kilo_trained"] = values[name]["trainable"] / 1e3
        values[name]["epoch_ms"] = 1e3 * statistics.median(values[name]["epoch_seconds"])
    assert {len(row) for row in cells.values()} == {len(titles)}
    for number, title in enumerate(titles):
        starred = [spec for spec in SPECS if cells[spec][number].endswith("*")]
        assert starred
        below = next(line for line in lines if line.startswith(f"  {title}:"))
        assert below.partition(":")[2].strip() == ", ".join(starred)
        column = columns[title]
        shown = {spec: column.form.format(values[spec][column.key]) for spec in SPECS}
        assert {spec: cells[spec][number].rstrip("*") for spec in SPECS} == shown
        best = min(values[spec][column.key] for spec in SPECS)
        assert starred == [spec for spec in SPECS if shown[spec] == column.form.format(best)]
    assert lines[0] == "toy, mlp: 100 test examples"
    assert lines[-1] == f"The figures are those of one run. Runs and figures are in {compared.folder}."
    assert "…" not in compared.out


def test_the_figures_are_complete(compared: Comparison) -> None:
    figures = compared.figures
    place = compared.folder.parent
    assert json.loads((place / "copy.json").read_text()).keys() == figures.keys()
    assert (
        figures["command"] == f"leanbayes compare deterministic ensemble:members=2 {LONG} --data toy --epochs 1 --quiet"
    )
    assert str(place) not in json.dumps(figures)
    assert figures["seed"] == 0
    assert figures["recipe"]["epochs"] == 1
    assert figures["model"]["name"] == "mlp"
    assert figures["source"]["name"] == "toy"
    assert figures["versions"]["leanbayes"] == lb.__version__
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["machine"]["cores"] == os.cpu_count()
    assert [result["name"] for result in figures["results"]] == SPECS
    for result in figures["results"]:
        assert {"rmse", "nll", "examples", "predict_ms_per_1000"} <= result["scores"].keys()
        assert {"trainable", "file_bytes", "epoch_seconds", "train_seconds"} <= result["costs"].keys()
    assert config.decode(figures["results"][1]["method"]) == lb.Ensemble(2)
    assert figures["results"][0]["costs"]["trainable"] * 2 - 1 == figures["results"][1]["costs"]["trainable"]


def test_a_comparison_is_not_trained_again(compared: Comparison, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    told = cli(*compared.words)
    assert told.err == ""  # --quiet
    again = json.loads((compared.folder / "compare.json").read_text())
    assert json.loads((compared.folder.parent / "copy.json").read_text()) == again
    for old, new in zip(compared.figures["results"], again["results"], strict=True):
        assert without_times(old["scores"]) == without_times(new["scores"])
        assert old["costs"] == new["costs"]


def test_each_run_of_a_comparison_can_be_looked_at(compared: Comparison, cli: Cli) -> None:
    runs = sorted(path.parent for path in compared.folder.glob("*/run.json"))
    assert len(runs) == len(SPECS)
    found = {json.loads(cli("evaluate", run, "--json").out)["scores"]["rmse"] for run in runs}
    assert found == {result["scores"]["rmse"] for result in compared.figures["results"]}


def test_a_comparison_of_one_has_no_winner_and_is_not_trained_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", "deterministic", "--model", "lenet-300-100", "--epochs", 1)
    told = cli(*words)
    assert "digits, lenet-300-100: 599 test examples" in told.out
    for missing in ("*", "Best", "Brier"):
        assert missing not in told.out
    error = re.search(r"on 599 examples an accuracy has a standard error of ([\d.]+)%", told.out)
    folder = Path("runs/digits-lenet-300-100-compare-0")
    scores = json.loads((folder / "compare.json").read_text())["results"][0]["scores"]
    assert re.search(rf"^deterministic +{scores['accuracy']:.2%} +{scores['nll']:.4f} ", told.out, re.MULTILINE)
    expected = 100 * math.sqrt(scores["accuracy"] * (1 - scores["accuracy"]) / 599)
    assert error is not None
    assert float(error.group(1)) == pytest.approx(expected, abs=0.006)
    assert "brier" in scores  # in the figures, as it follows from accuracy and calibration
    # The progress, and then the same again from what is there.
    begin, end = told.err.splitlines()
    assert re.fullmatch(rf"Deterministic on digits: 1,078 examples, \d+ steps in {folder}/deterministic", begin)
    assert re.fullmatch(r"Held-out split: accuracy [\d.]+%, NLL [\d.]+, ECE [\d.]+", end)
    monkeypatch.setattr(Loop, "run", must_not_train)
    finished = f"The run in {folder}/deterministic is finished: nothing was trained. --overwrite starts anew.\n"
    assert cli(*words).err == finished


FIGURES = {
    **dict.fromkeys(("accuracy", "nll", "ece", "brier", "entropy_right", "entropy_wrong"), 0.125),
    **{"kilo_trained": 117.0, "file_kb": 472.0, "epoch_ms": 1234.0, "predict_ms_per_1000": 1234.0},
}


@pytest.mark.parametrize("columns", [None, "20", "80", "400"])
@pytest.mark.parametrize("colour", [False, True])
def test_a_comparison_is_not_cut_off(
    columns: str | None, colour: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if colour:  # as in a terminal
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    view, winners = comparison({name: FIGURES for name in ("deterministic", LONG)})
    show("digits", view)
    out = capsys.readouterr().out
    assert ("\x1b[" in out) == colour
    title, above, head, *rows = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert title == "digits"
    assert above.split() == ["entropy", "numbers", "file", "train", "predict"]
    assert head.split() == "method accuracy NLL ECE if wrong ×1000 kB ms/epoch ms/1000".split()
    cells = ["12.50%*", "0.1250*", "0.1250*", "0.125*", "117.0*", "472*", "1234*", "1234*"]
    assert [row.split() for row in rows] == [["deterministic", *cells], [LONG, *cells]]
    assert len({len(row) for row in (above, head, *rows)}) == 1
    assert len(head) < len(LONG) + 80  # no wider than need be
    first, *lines = winners.splitlines()
    assert first == "* Best in its column:"
    assert [line.partition(":")[0].strip() for line in lines] == [
        *("accuracy", "NLL", "ECE", "entropy if wrong", "numbers ×1000", "file kB", "train ms/epoch"),
        "predict ms/1000",
    ]
    assert {line.partition(":")[2].strip() for line in lines} == {f"deterministic, {LONG}"}


def test_a_score_that_is_not_there_wins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    perfect = {**FIGURES, "entropy_wrong": math.nan}
    view, winners = comparison({"a": perfect, "b": FIGURES})
    show("", view)
    out = capsys.readouterr().out
    assert [line.split()[4] for line in out.splitlines()[2:]] == ["–", "0.125*"]
    assert re.search(r"^  entropy if wrong: +b$", winners, re.MULTILINE)
    view, winners = comparison({"a": perfect, "b": perfect})
    show("", view)
    assert [line.split()[4] for line in capsys.readouterr().out.splitlines()[2:]] == ["–", "–"]
    assert re.search(r"^  entropy if wrong: +–$", winners, re.MULTILINE)


def test_figures_that_look_alike_win_together_and_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "a": FIGURES,
        "b": {**FIGURES, "accuracy": 0.12501, "nll": 0.2},
        "c": {**FIGURES, "accuracy": 0.1, "nll": 0},
    }
    view, winners = comparison(rows)
    show("", view)
    cells = [line.split()[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert cells == [["12.50%*", "0.1250"], ["12.50%*", "0.2000"], ["10.00%", "0.0000*"]]
    assert re.search(r"^  accuracy: +a, b$", winners, re.MULTILINE)
    assert re.search(r"^  NLL: +c$", winners, re.MULTILINE)


def test_one_method_alone_wins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view, winners = comparison({"a": FIGURES})
    show("", view)
    assert winners == ""
    assert "*" not in capsys.readouterr().out


def test_methods_may_stand_in_a_file(cli: Cli) -> None:
    Path("a.yaml").write_text("methods: [deterministic, 'mean-field:samples=2']\ndata: toy\nepochs: 1\nquiet: true\n")
    text = cli("compare", "--config", "a.yaml", "--out", "a").out
    assert re.search(r"^mean-field:samples=2 ", text, re.MULTILINE)
    assert "ensemble" not in text
    assert "ensemble" in cli("compare", "ensemble:members=1", "--config", "a.yaml", "--out", "b").out  # flags win
    assert [path.name for path in Path("b").iterdir() if path.is_dir()] == ["ensemble-members=1"]


@pytest.mark.parametrize("line", ["model_options: {hidden: [4]}", "model_options: ['hidden=[4]']", "resize: [8, 8]"])
def test_a_file_takes_no_methods_away(line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text(f"quiet: true\n{line}\n")
    found: list[Any] = []
    monkeypatch.setattr("leanbayes.cli.compare._compare", lambda *args: found.extend(args))
    cli("compare", "deterministic", "--data", "toy", "--config", "a.yaml")
    assert found[0].methods == ("deterministic",)
    assert list(found[1]) == ["deterministic"]


# -- info -------------------------------------------------------------------------------------------------------------


def test_a_run_is_described(cli: Cli, digits: Path) -> None:
    found = json.loads(cli("info", digits, "--json").out)
    record = read_record(digits)
    for name in ("status", "config", "scores", "costs", "versions", "machine"):
        assert found["run"][name] == record[name]
    text = cli("info", digits).out
    for word in ("finished", "digits", "small-cnn", "MeanField", "Normal(scale=0.1", "epochs=2", "58,144 in 4"):
        assert word in text


def test_a_file_is_described(cli: Cli, digits: Path) -> None:
    path = digits / "model.safetensors"
    found = json.loads(cli("info", path, "--json").out)
    assert list(found) == ["file"]
    bnn = load_run(digits)
    file = found["file"]
    assert file["bytes"] == path.stat().st_size
    assert file["bayesian_weights"] == len(bnn.posterior.mean())
    assert config.decode(file["method"]) == bnn.method
    assert (file["rule"], file["trained_rule"]) == (bnn.rule, bnn.trained_rule)
    assert sum(part["numbers"] for part in file["parts"].values()) == sum(t.numel() for t in bnn.state_dict().values())
    assert f"{file['bytes']:,} bytes" in cli("info", path).out


def test_the_file_is_named_in_one_line(cli: Cli, digits: Path) -> None:
    assert str(digits / "model.safetensors") in cli("info", digits / "model.safetensors").out


def test_a_run_that_is_not_finished_is_described(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: Loop) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "run", stopped)
    cli("fit", "mean-field", *TOY, "--out", "run", code=130)
    assert re.search(r"^ status +stopped", cli("info", "run").out, re.MULTILINE)
    assert list(json.loads(cli("info", "run", "--json").out)) == ["run"]


# -- as a program -----------------------------------------------------------------------------------------------------


PROGRAM = [str(Path(sys.executable).with_name("leanbayes"))]
MODULE = [sys.executable, "-m", "leanbayes"]


def program(how: list[str], *words: object) -> Told:
    """Run the installed program."""
    command = [*how, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    return Told(done.returncode, done.stdout, done.stderr)


def test_the_program_is_installed_and_warns_of_nothing(digits: Path, cli: Cli) -> None:
    told = program(PROGRAM, "info", digits, "--json")
    assert (told.code, told.err) == (0, "")
    assert told.out == cli("info", digits, "--json").out


def test_the_program_tells_mistakes_by_its_code() -> None:
    told = program(MODULE, "info", "nowhere")
    assert told == (1, "", "leanbayes: There is no file or folder nowhere: check the path.\n")
    told = program(PROGRAM, "info", "nowhere", "--what")
    assert (told.code, told.out) == (2, "")
    assert "--what" in told.err
    assert "Traceback" not in told.err


# The program in four processes whose output nobody reads; each is a copy of one that has imported everything.
UNREAD = """
import io, os, sys
import leanbayes.cli.compare
from leanbayes.cli import main

cases = [(["--help"], 1), (["--help"], 0), (["info", sys.argv[1], "--json"], 1), (["fit", "ensemble", "-h"], 0)]
for words, buffered in cases:
    child = os.fork()
    if child == 0:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        sys.stdout = io.TextIOWrapper(open(1, "wb", -1 if buffered else 0), write_through=not buffered)
        sys.__stdout__ = sys.stdout
        sys.exit(main(words))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(words[0], code, flush=True)
"""


def test_a_reader_that_leaves_is_no_trouble(digits: Path) -> None:
    told = program([sys.executable, "-c", UNREAD], digits)
    assert told == (0, "--help 1\n--help 1\ninfo 1\nfit 1\n", "")


# -- stopping ---------------------------------------------------------------------------------------------------------

STOPPED = ("fit", "mean-field", "--data", "toy", "--epochs", 2, "--model-options", "hidden=[8]", "--log-every", 4)
STEPS = 50

# The program, with a seventh step that lasts until a signal has come.
SLOW = """
import runpy, sys, time
from pathlib import Path
from leanbayes.training.loop import Loop

step = Loop._step

def slow(self, parts):
    step(self, parts)
    if self._run.steps_done == 7:
        Path("seventh").touch()
        while not self._run.stop.came:
            time.sleep(0.01)

Loop._step = slow
sys.argv[0] = "leanbayes"
runpy.run_module("leanbayes", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, not stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([str(word) for word in (*STOPPED, "--quiet", "--out", folder)]) == 0
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    first, second = read_record(one), read_record(other)
    assert first["status"] == second["status"] == "finished"
    assert first["scores"] == second["scores"]
    assert first["config"] == second["config"]
    curves = [
        [{key: entry[key] for key in entry.keys() - {"seconds", "examples_per_second"}} for entry in record["history"]]
        for record in (first, second)
    ]
    assert curves[0] == curves[1]


def check_stopped(folder: Path, told: Told, step: int) -> None:
    assert told.code == 130
    assert told.out == ""
    assert re.fullmatch(
        rf"MeanField on toy: 810 examples, [^\n]* in {folder}\n"
        rf"leanbayes: Stopped at step {step}; the same command goes on from there\.\n",
        told.err,
    ), told.err
    assert read_record(folder)["status"] == "stopped"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{step:09d}"]
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_program_with_a_checkpoint_and_it_goes_on(
    number: signal.Signals, cli: Cli, whole: Path
) -> None:
    words = [sys.executable, "-c", SLOW, *map(str, STOPPED), "--out", "a"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        end = time.monotonic() + 60
        while not Path("seventh").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert not Path("a/checkpoints").exists()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    check_stopped(Path("a"), Told(process.returncode, out, err), 7)
    told = cli(*STOPPED, "--out", "a")
    assert told.err.startswith(f"MeanField on toy: 810 examples, going on from step 7 of {STEPS} in a\n")
    assert_same_run(Path("a"), whole)


class Signals:
    """Sends signals to this process: within a step of a training, or when its steps are done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._step, self._finish = patch, Loop._step, Run._finish
        assert threading.current_thread() is threading.main_thread()  # where Python meets signals

    def within(self, step: int, *numbers: int) -> None:
        def interrupted(loop: Loop, parts: Any) -> None:
            if loop._run.steps_done == step - 1:
                for number in numbers:
                    signal.raise_signal(number)
            self._step(loop, parts)

        self._patch.setattr(Loop, "_step", interrupted)

    def when_finishing(self, number: int) -> None:
        def interrupted(run: Run, bnn: lb.BayesianModel) -> lb.BayesianModel:
            signal.raise_signal(number)
            return self._finish(run, bnn)

        self._patch.setattr(Run, "_finish", interrupted)

    def no_more(self) -> None:
        self._patch.undo()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    """Signals to a program with Python's own handlers, which must be put back; SIGTERM must not end pytest."""

    def uncaught(number: int, frame: Any) -> None:
        raise AssertionError("SIGTERM was not caught")

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: uncaught}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    with monkeypatch.context() as patch:
        yield Signals(patch)
    left = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert left == usual


@pytest.mark.parametrize(
    ("step", "number"),
    # The first step, the last of an epoch, one within, and the very last.
    [(1, signal.SIGTERM), (25, signal.SIGINT), (33, signal.SIGTERM), (STEPS, signal.SIGINT)],
)
def test_a_signal_is_met_after_the_step(step: int, number: int, cli: Cli, whole: Path, signals: Signals) -> None:
    signals.within(step, number)
    check_stopped(Path("a"), cli(*STOPPED, "--out", "a", code=130), step)
    signals.no_more()
    assert f"going on from step {step} of {STEPS} in a\n" in cli(*STOPPED, "--out", "a").err
    assert_same_run(Path("a"), whole)


def test_a_run_may_be_stopped_again_and_again(cli: Cli, whole: Path, signals: Signals) -> None:
    for step in (3, 4, 40):
        signals.within(step, signal.SIGINT)
        assert f"Stopped at step {step};" in cli(*STOPPED, "--out", "a", "--quiet", code=130).err
        assert (Path("a/checkpoints") / f"step-{step:09d}").is_dir()
    signals.no_more()
    cli(*STOPPED, "--out", "a", "--quiet")
    assert_same_run(Path("a"), whole)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(second: int, cli: Cli, whole: Path, signals: Signals) -> None:
    signals.within(20, signal.SIGINT, second)
    told = cli(*STOPPED, "--out", "a", "--quiet", "--checkpoint-steps", 8, code=130)
    assert told.err == "leanbayes: Stopped.\n"
    assert [path.name for path in sorted(Path("a/checkpoints").iterdir())] == ["step-000000008", "step-000000016"]
    signals.no_more()
    assert f"going on from step 16 of {STEPS}" in cli(*STOPPED, "--out", "a").err
    assert_same_run(Path("a"), whole)


def test_a_signal_stops_a_comparison_and_it_goes_on(cli: Cli, signals: Signals) -> None:
    words = ("compare", "deterministic", "ensemble:members=2", *TOY, "--out", "a")
    signals.within(5, signal.SIGINT)
    assert cli(*words, code=130).err == "leanbayes: Stopped at step 5; the same command goes on from there.\n"
    assert json.loads(Path("a/compare.json").read_text())["results"] == []
    signals.no_more()
    assert "* Best in its column:" in cli(*words).out
    assert len(json.loads(Path("a/compare.json").read_text())["results"]) == 2


def test_a_signal_between_two_methods_is_not_lost(cli: Cli, signals: Signals) -> None:
    signals.when_finishing(signal.SIGINT)
    told = cli("compare", "deterministic", "ensemble:members=2", *TOY, "--out", "a", code=130)
    assert re.fullmatch(r"leanbayes: Stopped[^\n]*\.\n", told.err)
    assert not Path("a/ensemble-members=2").exists()


def test_a_signal_while_a_run_is_finished_loses_nothing(cli: Cli, whole: Path, signals: Signals) -> None:
    signals.when_finishing(signal.SIGINT)
    told = cli(*STOPPED, "--quiet", "--out", "a", code=130)
    assert re.fullmatch(r"leanbayes: Stopped[^\n]*\.\n", told.err)
    signals.no_more()
    assert f"going on from step {STEPS} of {STEPS}" in cli(*STOPPED, "--out", "a").err
    assert_same_run(Path("a"), whole)


def test_rows_of_a_table_are_predicted_in_the_unit_of_the_target(cli: Cli) -> None:
    rows = RANDOM.normal(50, 10, (200, 2))
    table = np.column_stack([rows, 3 * rows[:, 0] - rows[:, 1] + 1000])
    np.savetxt("a.csv", table, delimiter=",")
    cli("fit", "mean-field", "--data", "a.csv", "--epochs", 60, "--quiet", "--out", "run")
    np.savetxt("new.csv", table[:5, :2], delimiter=",")
    found = json.loads(cli("predict", "run", "new.csv", "--json").out)
    assert [row["row"] for row in found] == [1, 2, 3, 4, 5]
    for row, truth in zip(found, table[:, 2], strict=False):
        assert abs(row["mean"] - truth) < 15  # of a spread of 32
        assert 0 < row["epistemic_std"] <= row["std"] < 32
    assert len(cli("predict", "run", "new.csv").out.splitlines()) == 7
