"""`leanbayes fit`: flags, config files, data, networks, and continuing a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_cases import TOY, Cli, load_run, must_not_train, write_image

import leanbayes as lb
from leanbayes.cli import fit as fit_command
from leanbayes.cli import main
from leanbayes.cli.options import Task, parse, read_config
from leanbayes.cli.runs import prepare
from leanbayes.core import config
from leanbayes.data import ArrayDataset, load
from leanbayes.methods import METHODS
from leanbayes.model.defaults import with_engine
from leanbayes.training import Recipe, read_record
from leanbayes.training.loop import Loop

# -- fit --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name: str, cli: Cli, tmp_path: Path) -> None:
    epochs = ("--epochs", 8 if name in ("csgmcmc", "aeb", "mbnn") else len(METHODS[name].stages()))
    if name == "abnn":
        refused = cli("fit", name, *TOY, *epochs, "--out", tmp_path / "run", code=1)
        assert "ABNN needs normalization layers" in refused.err
        return
    output = cli("fit", name, *TOY, *epochs, "--model-options", "hidden=[32]", "--out", tmp_path / "run")
    assert output.err == ""
    assert f"leanbayes evaluate {tmp_path / 'run'}" in output.out
    record = read_record(tmp_path / "run")
    assert record["status"] == "finished"
    assert config.decode(record["config"]["method"]) == with_engine(METHODS[name])
    assert load_run(tmp_path / "run").method == with_engine(METHODS[name])


def test_the_default_folder_is_named_after_the_run(cli: Cli, tmp_path: Path, table: Path) -> None:
    cli("fit", "deterministic", *TOY, "--seed", 3)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["toy-mlp-deterministic-3"]
    output = cli("fit", "mean_field", "--data", table, "--epochs", 1, "--quiet")
    made = {path.name for path in (tmp_path / "runs").iterdir()} - {"toy-mlp-deterministic-3"}
    assert made == {"table-mlp-mean-field-0"}
    assert "leanbayes evaluate runs/table-mlp-mean-field-0\n" in output.out


def test_progress_goes_to_stderr_unless_quiet(cli: Cli) -> None:
    output = cli("fit", "deterministic", "--data", "toy", "--epochs", 1, "--out", "run")
    first, last = output.err.splitlines()
    assert first == "Deterministic on toy: 810 examples, 25 steps in run"
    assert re.fullmatch(r"Held-out split: RMSE [\d.]+, NLL [\d.]+", last)
    assert output.out == "The run is in run. To score it on the test data: leanbayes evaluate run\n"
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
    assert config.decode(settings["method"]) == lb.MeanField(
        prior=prior, relative=False, engine="backprop", rule="local", samples=2
    )
    assert (settings["recipe"]["clip"], settings["recipe"]["lr"]) == (1.5, None)


def test_flags_override_the_file_and_the_file_overrides_the_preset(cli: Cli) -> None:
    Path("a.yaml").write_text("method: mean-field\ndata: toy\nepochs: 1\nbatch_size: 100\nlr: 1e-3\nquiet: true\n")
    output = cli("fit", "--config", "a.yaml", "--lr", 5e-4, "--out", "run")
    assert output.err == ""
    recipe = read_record("run")["config"]["recipe"]
    assert (recipe["lr"], recipe["batch_size"], recipe["epochs"]) == (5e-4, 100, 1)
    assert (recipe["temperature"], recipe["weight_decay"]) == (0.1, 0.0)  # the preset of tables
    assert recipe["warmup"] == Recipe().warmup  # the default
    cli("fit", "mean-field", "--config=a.yaml", "--out", "other")  # the same method may be given twice
    assert read_record("other")["config"]["recipe"]["lr"] == 1e-3


def test_the_preset_is_that_of_the_data_in_the_file(cli: Cli) -> None:
    Path("a.yaml").write_text("data: toy\n")
    assert "(default: 200)" in cli("fit", "mean-field", "--config", "a.yaml", "--help").out
    assert "(default: 40)" in cli("fit", "mean-field", "--config", "a.yaml", "--data", "digits", "--help").out


def test_a_file_may_have_nested_settings_of_the_method(cli: Cli) -> None:
    Path("a.yaml").write_text(
        "method:\n  name: mean_field\n  samples: 2\n  init_std: 1e-2\n  prior: {scale: 5e-2, gain: 2}\n"
        "data: toy\nepochs: 1\nquiet: true\nout: run\nmodel_options: {hidden: [4, 4]}\n"
    )
    cli("fit", "--config", "a.yaml", "--method.prior.gain", 3)
    settings = read_record("run")["config"]
    assert config.decode(settings["method"]) == lb.MeanField(
        prior=lb.Normal(0.05, gain=3), init_std=0.01, engine="backprop", samples=2
    )
    assert settings["model"]["options"] == {"hidden": [4, 4]}


@pytest.mark.parametrize("line", ["lr: 1e-3", "scale_lr: 1E-2", "clip: 1.e+1", "weight_decay: 5e-4"])
def test_numbers_may_have_exponents(line: str, cli: Cli) -> None:
    Path("a.yaml").write_text(f"{line}\n")
    cli("fit", "deterministic", *TOY, "--config", "a.yaml", "--out", "run", "--model-options", "hidden=[4]")
    name, _, value = line.partition(": ")
    assert read_record("run")["config"]["recipe"][name] == float(value)


def test_the_validation_share_may_have_an_exponent(cli: Cli) -> None:
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


def test_flags_override_switches_of_a_file(cli: Cli) -> None:
    Path("a.yaml").write_text("quiet: true\ncompile: false\nmethod: {name: mean-field, relative: false}\n")
    words = ("fit", "mean-field", "--data", "toy", "--epochs", 1, "--config", "a.yaml")
    cli(*words, "--method.relative", "--out", "a")
    assert config.decode(read_record("a")["config"]["method"]) == lb.MeanField(engine="backprop")
    assert cli(*words, "--no-quiet", "--out", "b").err.startswith("MeanField on toy")
    assert config.decode(read_record("b")["config"]["method"]) == lb.MeanField(relative=False, engine="backprop")


@pytest.mark.parametrize("value", ["0.1", "1e-1", "1.e-1", "0.00001"])
def test_numbers_in_model_options_may_have_exponents(value: str) -> None:
    Path("a.yaml").write_text(f"model_options: {{depth: 10, widen: 1, dropout: {value}}}\n")
    from_file = parse(Task, [], "fit", Task(), read_config(Path("a.yaml"))).model_options
    for options in (from_file, ("depth=10", "widen=1", f"dropout={value}")):
        prepared = prepare(Task(model="wrn-28-10", model_options=options), seed=0)
        assert prepared.notes["model"]["options"] == {"depth": 10, "widen": 1, "dropout": float(value)}


def test_the_same_seed_gives_the_same_model(cli: Cli) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        cli("fit", "mean-field", *TOY, "--seed", seed, "--out", name)
    a, b, c = (Path(name, "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_csv_table_is_scored_in_the_unit_of_its_target(cli: Cli, table: Path) -> None:
    cli("fit", "deterministic", "--data", table, "--epochs", 30, "--quiet", "--out", "run")
    scores = json.loads(cli("evaluate", "run", "--json").out)["scores"]
    data = load(table)
    assert isinstance(data.test, ArrayDataset)
    error = (load_run(Path("run")).predict(data.test.x).mean - data.test.y) * data.target_std[0]
    assert scores["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    assert scores["examples"] == len(data.test)


def test_a_folder_of_images_gives_class_names(cli: Cli, pets: Path) -> None:
    words = ("--resize", 16, 16, "--model", "small-cnn", "--workers", 0, "--epochs", 1, "--quiet")
    cli("fit", "deterministic", "--data", pets, *words, "--out", "run")
    assert read_record("run")["config"]["model"]["input_shape"] == [3, 16, 16]
    assert json.loads(cli("evaluate", "run", "--json").out)["scores"]["examples"] == 8
    files = [
        pets / "val" / "cat" / "0.png",
        write_image(Path("gray.png"), 30, 9),
        write_image(Path("large.jpg"), 80, 90, 3),
    ]
    rows = json.loads(cli("predict", "run", *files, "--json").out)
    assert {row["label"] for row in rows} <= {"cat", "dog"}
    assert [row["image"] for row in rows] == [str(path) for path in files]


def test_a_folder_of_images_needs_no_flags_on_a_small_machine(cli: Cli, pets: Path) -> None:
    # More workers than cores would make torch warn, which is an error in these tests.
    words = ("--resize", 16, 16, "--model", "small-cnn", "--epochs", 1, "--quiet")
    assert cli("fit", "deterministic", "--data", pets, *words, "--out", "run").err == ""


@pytest.fixture(scope="session")
def scenes_run(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes_run") / "run"
    words = ("--resize", 16, 16, "--model-options", "width=4", "--workers", 0, "--epochs", 1, "--quiet")
    assert main([str(word) for word in ("fit", "deterministic", "--data", scenes, *words, "--out", folder)]) == 0
    return folder


def test_segmentation(cli: Cli, scenes_run: Path) -> None:
    assert read_record(scenes_run)["config"]["model"]["options"] == {"width": 4}
    output = cli("evaluate", scenes_run)
    assert re.search(r"^   mIoU +\d+\.\d\d%", output.out, re.MULTILINE)
    scores = read_record(scenes_run)["scores"]["test"]
    assert 0 <= scores["miou"] <= scores["accuracy"] <= 1


def test_an_image_to_segment_is_resized_as_in_training(cli: Cli, scenes_run: Path, scenes: Path) -> None:
    # It is stretched to the size; images of classes are cropped.
    (row,) = json.loads(cli("predict", scenes_run, scenes / "test" / "0.png", "--json").out)
    data = load(scenes, resize=(16, 16))
    assert data.test is not None
    assert data.normalize is not None
    expected = load_run(scenes_run).predict(data.normalize(data.test[0][0][None]))
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
    output = cli(*words)
    assert output.err == "The run in run is finished: nothing was trained. --overwrite starts again.\n"
    assert "leanbayes evaluate run" in output.out
    assert cli(*words, "--quiet").err == ""
    assert [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files] == before


@pytest.mark.parametrize("data", ["toy", "digits"])
def test_a_stopped_run_continues_from_its_checkpoint(data: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ("--epochs", 2, "--checkpoint-steps", 10, "--batch-size", 64)
    words = ("fit", "mean-field", "--data", data, "--model", "mlp", "--model-options", "hidden=[8]", *recipe)
    step = Loop._step

    def stopped(self: Loop, parts: Any) -> None:
        if self._journal.steps_done == 12:
            raise KeyboardInterrupt
        step(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", stopped)
        output = cli(*words, "--out", "run", code=130)
    assert re.fullmatch(r"MeanField on [^\n]*\nleanbayes: Stopped\.\n", output.err)
    assert read_record("run")["status"] == "stopped"
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000000010"]
    assert "continuing from step 10 of" in cli(*words, "--out", "run").err
    cli(*words, "--out", "whole")
    assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_a_run_that_is_killed_before_it_has_alarms_ends_bit_equal(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    whole, cut = (tmp_path / name / "model.safetensors" for name in ("whole", "cut"))
    cli("fit", "mean-field", *TOY, "--out", whole.parent)
    with monkeypatch.context() as patch:
        patch.setattr(fit_command, "add_alarms", killed)
        cli("fit", "mean-field", *TOY, "--out", cut.parent, code=130)
    assert cut.read_bytes() != whole.read_bytes()
    cli("fit", "mean-field", *TOY, "--out", cut.parent)
    assert cut.read_bytes() == whole.read_bytes()


def test_overwrite_replaces_a_run(cli: Cli) -> None:
    cli("fit", "mean-field", *TOY, "--out", "run")
    cli("evaluate", "run")
    output = cli("fit", "deterministic", *TOY, "--out", "run", code=1)
    assert "--overwrite" in output.err
    assert read_record("run")["config"]["method"]["type"] == "MeanField"
    cli("fit", "deterministic", *TOY, "--out", "run", "--overwrite")
    record = read_record("run")
    assert record["config"]["method"]["type"] == "Deterministic"
    assert list(record["scores"]) == ["validation"]


def test_settings_that_do_not_change_the_result_may_differ(cli: Cli, toy: Path) -> None:
    cli("fit", "mean-field", *TOY, "--out", toy, "--device", "cpu", "--keep", 5, "--checkpoint-minutes", 1)
