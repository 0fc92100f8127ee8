"""`leanbayes calibrate`: factors of one-pass prediction, fitted on held-out data and stored in the model of the run."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from cli_cases import EVALUATION, TOY, Cli, load_run, must_not_train, without_times
from safetensors import safe_open
from torch import nn

import leanbayes as lb
from leanbayes.data import Batches, Data, load
from leanbayes.evaluation import evaluate
from leanbayes.training import read_record
from leanbayes.training.loop import Loop

SMALL = (*TOY, "--model-options", "hidden=[4]")


@pytest.fixture
def run(digits: Path, tmp_path: Path) -> Path:
    """A copy of a run on images."""
    return Path(shutil.copytree(digits, tmp_path / "run"))


@pytest.fixture
def numbers(toy: Path, tmp_path: Path) -> Path:
    """A copy of a run on a table."""
    return Path(shutil.copytree(toy, tmp_path / "numbers"))


def calibrate(cli: Cli, folder: Path, *words: object) -> Any:
    return json.loads(cli("calibrate", folder, *words, "--device", "cpu", "--json").out)


def scores(cli: Cli, folder: Path, *words: object) -> Any:
    return without_times(json.loads(cli("evaluate", folder, *words, "--device", "cpu", "--json").out)["scores"])


def batches(data: Data) -> Batches:
    return Batches(data.validation, 500, shuffle=False, normalize=data.normalize)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fitted(state: Any) -> tuple[float, float]:
    return state["factors"]["mean"], state["factors"]["std"]


# -- the factors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["labels", "samples"])
def test_factors_equal_those_of_lb_calibrate(to: Any, cli: Cli, run: Path) -> None:
    result = calibrate(cli, run, "--to", to, "--samples", 5, "--seed", 3)
    data, bnn = load("digits"), load_run(run)
    assert (result["run"], result["file"]) == (str(run), str(run / "model.safetensors"))
    assert (result["to"], result["examples"]) == (to, 120)
    assert bnn.moment_scale == fitted(result["after"])
    assert fitted(result["before"]) == (1, 1)
    found = evaluate(bnn, batches(data).epoch(), rule="moments", details=False)
    assert result["after"]["scores"] == pytest.approx(found)
    bnn.moment_scale = (1.0, 1.0)
    assert result["before"]["scores"] == pytest.approx(
        evaluate(bnn, batches(data).epoch(), rule="moments", details=False)
    )
    wanted = lb.calibrate(bnn, batches(data).epoch(), to=to, samples=5, generator=torch.Generator().manual_seed(3))
    assert fitted(result["after"]) == pytest.approx(wanted, rel=1e-9)
    assert wanted != pytest.approx((1, 1), rel=1e-3)


def test_classes_are_fitted_to_labels_and_regression_to_samples(cli: Cli, run: Path, numbers: Path) -> None:
    labels = calibrate(cli, run)
    assert labels["to"] == "labels"
    assert labels["after"]["scores"]["nll"] < labels["before"]["scores"]["nll"]
    samples = calibrate(cli, run, "--to", "samples")
    assert samples["before"] == labels["after"]
    assert fitted(samples["after"]) != pytest.approx(fitted(labels["after"]), rel=0.01)
    assert calibrate(cli, run) == {**labels, "before": samples["after"]}  # earlier factors do not matter
    assert calibrate(cli, numbers)["to"] == "samples"


def test_other_samples_give_other_factors(cli: Cli, numbers: Path) -> None:
    ways = ((), (), ("--seed", 1), ("--samples", 7))
    first, again, *others = (fitted(calibrate(cli, numbers, *words)["after"]) for words in ways)
    assert first == again
    assert all(other != first for other in others)


def test_segmentations_are_fitted_to_pixel_labels(cli: Cli, scenes: Path, tmp_path: Path) -> None:
    words = ("--resize", 16, 16, "--model-options", "width=4", "--workers", 0, "--epochs", 1, "--quiet")
    cli("fit", "mean-field", "--data", scenes, *words, "--out", tmp_path / "run")
    result = calibrate(cli, tmp_path / "run")
    bnn = load_run(tmp_path / "run")
    wanted = lb.calibrate(bnn, batches(load(str(scenes), resize=(16, 16))).epoch(), to="labels")
    assert (result["to"], result["examples"]) == ("labels", 4)
    assert fitted(result["after"]) == pytest.approx(wanted, rel=1e-9)
    assert result["after"]["scores"]["nll"] < result["before"]["scores"]["nll"]


# -- what is printed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "what", "names"),
    [
        ("run", "labels of 120", ["accuracy", "NLL", "ECE"]),
        ("numbers", "30 samples of 90", ["RMSE", "NLL", "CRPS", "95 % interval"]),
    ],
)
def test_the_table_shows_factors_and_scores_before_and_after(
    kind: str, what: str, names: list[str], cli: Cli, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    output = cli("calibrate", folder, "--device", "cpu")
    title, head, *lines, note, removed = output.out.splitlines()
    assert output.err == ""
    assert "The policy of the run is removed" in removed
    assert removed.endswith(f"leanbayes decide {folder} --false-alarms 0.05 --rule moments")
    assert "policy" not in cli("calibrate", folder, "--device", "cpu").out
    assert title == f"{folder}/model.safetensors: one-pass predictions are fitted to {what} held-out examples"
    assert head.split() == ["before", "after"]
    rows = {name: values for name, *values in (re.split(r"  +", line.strip()) for line in lines)}
    assert [*rows] == ["factor of the mean", "factor of the std", *names]
    mean, std = load_run(folder).moment_scale
    assert rows["factor of the mean"] == ["1.0000", f"{mean:.4f}"]
    assert rows["factor of the std"] == ["1.0000", f"{std:.4f}"]
    assert rows["NLL"][1] == f"{scores(cli, folder, '--rule', 'moments', '--split', 'validation')['nll']:.4f}"
    command = f"leanbayes evaluate {folder} --rule moments"
    assert note == f"These scores are from the data of the fit. For those of the test data, run: {command}"


# -- what changes and what does not -----------------------------------------------------------------------------------


def header(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        settings = json.loads(file.metadata()["leanbayes"])
    del settings["digest"]
    return settings


@pytest.mark.parametrize("to", ["labels", "samples"])
def test_only_the_factors_change(to: str, cli: Cli, run: Path) -> None:
    path, before, model = run / "model.safetensors", contents(run), load_run(run)
    settings = header(path)
    del settings["policy"]  # it was fitted to other predictions
    result = calibrate(cli, run, "--to", to)
    after = contents(run)
    assert after.pop(path) != before.pop(path)
    assert after == before
    assert header(path) == {**settings, "moment_scale": [*fitted(result["after"])]}
    for (name, now), (same, was) in zip(load_run(run).state_dict().items(), model.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(now, was), name


def test_the_factors_change_one_pass_predictions_but_not_sampled_ones(cli: Cli, run: Path) -> None:
    sampled, one_pass = scores(cli, run), scores(cli, run, "--rule", "moments")
    calibrate(cli, run)
    assert scores(cli, run) == sampled
    after = scores(cli, run, "--rule", "moments")
    assert after["nll"] < one_pass["nll"] - 0.05
    cli("export", run, "a.onnx")
    x = torch.randn(3, 1, 8, 8)
    session = onnxruntime.InferenceSession("a.onnx", providers=["CPUExecutionProvider"])
    (probs,) = session.run(["probs"], {session.get_inputs()[0].name: x.numpy()})
    bnn = load_run(run)
    torch.testing.assert_close(torch.from_numpy(probs), bnn.predict(x, rule="moments").probs, rtol=1e-4, atol=1e-5)
    bnn.moment_scale = (1.0, 1.0)
    assert (torch.from_numpy(probs) - bnn.predict(x, rule="moments").probs).abs().max() > 0.01


def test_a_calibrated_model_is_evaluated_again(cli: Cli, numbers: Path) -> None:
    stored = numbers / "evaluation.json"
    settings = (*EVALUATION, "--evaluation.rule", "moments", "--device", "cpu", "--quiet")
    found = []
    for _ in range(2):
        cli("report", numbers, *settings)
        found.append(json.loads(stored.read_text()))
        assert found[-1]["scores"]["epistemic_std"] == scores(cli, numbers, "--rule", "moments")["epistemic_std"]
        factor = calibrate(cli, numbers)["after"]["factors"]["std"]
    before, after = (one["scores"]["epistemic_std"] for one in found)
    assert after == pytest.approx(factor * before, rel=1e-4)
    written = stored.stat().st_mtime_ns  # the same factors give the same file, whose evaluation is still valid
    cli("report", numbers, *settings)
    assert stored.stat().st_mtime_ns == written


def test_a_method_that_predicts_in_one_pass_has_other_scores_afterwards(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cli("fit", "vdp", *TOY, "--out", folder)
    before = scores(cli, folder)
    printed = cli("calibrate", folder, "--device", "cpu").out
    assert printed.splitlines()[-2].endswith(f"test data, run: leanbayes evaluate {folder}")  # which the run stores
    after = scores(cli, folder)
    _, std = load_run(folder).moment_scale
    assert std != pytest.approx(1, rel=1e-3)
    assert after["epistemic_std"] == pytest.approx(std * before["epistemic_std"], rel=1e-4)
    assert without_times(read_record(folder)["scores"]["test"]) == after


def test_a_calibrated_run_is_not_trained_again(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("fit", "mean-field", *SMALL, "--out", tmp_path / "run")
    cli(*words)
    factors = fitted(calibrate(cli, tmp_path / "run")["after"])
    monkeypatch.setattr(Loop, "run", must_not_train)
    cli(*words)
    assert load_run(tmp_path / "run").moment_scale == factors
    assert read_record(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("method", ["mean-field", "ssvi"])
def test_runs_that_started_from_it_are_still_finished(
    method: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = ("--method.density", 0.5) if method == "ssvi" else ()
    cli("fit", method, *SMALL, *share, "--out", tmp_path / "first")
    words = ("fit", "mean-field", *SMALL, "--start", tmp_path / "first", "--out", tmp_path / "second")
    cli(*words)
    assert fitted(calibrate(cli, tmp_path / "first")["after"]) != (1, 1)
    monkeypatch.setattr(Loop, "run", must_not_train)
    cli(*words)
    assert load_run(tmp_path / "first").moment_scale != (1, 1)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["deterministic", "ensemble", "mc-dropout", "rigl"])
def test_a_run_without_random_weights_is_refused(method: str, cli: Cli) -> None:
    cli("fit", method, *TOY, "--out", "run")
    before = contents(Path("run"))
    output = cli("calibrate", "run", code=1)
    pattern = r"leanbayes: run is a run of \w+, which has no random weights, [^\n]+ mean-field\.\n"
    assert re.fullmatch(pattern, output.err)
    assert output.out == ""
    assert contents(Path("run")) == before


def test_mistakes_are_reported_in_one_sentence_and_leave_the_run_unchanged(
    cli: Cli, numbers: Path, digits: Path
) -> None:
    record = json.loads((numbers / "run.json").read_text())
    source = {**record["config"]["source"], "validation_share": 0}
    for name, change in (
        ("stopped", {"status": "stopped"}),
        ("without", {"config": {**record["config"], "source": source}}),  # held-out data
    ):
        shutil.copytree(numbers, name)
        (Path(name) / "run.json").write_text(json.dumps({**record, **change}))
    before = contents(Path()) | contents(digits)
    wrong: tuple[tuple[tuple[object, ...], str], ...] = (
        (("nowhere",), "There is no run in nowhere"),
        (("stopped",), "not finished (stopped): run its fit command again"),
        (("without",), "validation_share=0 must lie between 0 and 1"),
        ((numbers, "--to", "labels"), 'no probabilities to fit to labels: use to="samples"'),
        ((numbers, "--samples", 1), "samples=1 must be a whole number of at least 2"),
        ((digits, "--samples", 0), "samples=0 must be a whole number of at least 2"),
    )
    for words, sentence in wrong:
        output = cli("calibrate", *words, code=1)
        assert sentence in output.err
        assert (output.out, output.err.count("\n")) == ("", 1)
    assert "RUN" in cli("calibrate", code=2).err
    assert "labels" in cli("calibrate", numbers, "--to", "truth", code=2).err
    assert contents(Path()) | contents(digits) == before


def test_an_older_file_survives_a_failed_write(cli: Cli, numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*places: object) -> None:
        raise OSError(28, "No space left on device")

    before = contents(numbers)
    monkeypatch.setattr(os, "replace", full)
    output = cli("calibrate", numbers, code=1)
    assert "Cannot write" in output.err
    assert "No space left on device" in output.err
    assert output.out == ""
    assert contents(numbers) == before


def test_changed_training_data_give_a_warning(cli: Cli, table: Path) -> None:
    cli("fit", "mean-field", "--data", table, "--epochs", 1, "--quiet", "--out", "run")
    assert cli("calibrate", "run").err == ""
    values = np.loadtxt(table, delimiter=",", skiprows=1)
    np.savetxt(table, values[5:], delimiter=",")
    output = cli("calibrate", "run")
    assert output.err.startswith("table.csv has other training data than when run was trained: ")
    assert output.err.count("\n") == 1
    assert load_run(Path("run")).moment_scale != (1, 1)


def test_a_fit_to_labels_needs_no_samples(cli: Cli, run: Path) -> None:
    assert calibrate(cli, run)["after"] == calibrate(cli, run, "--seed", 1, "--samples", 2)["after"]


def test_info_shows_the_settings_of_a_rule(cli: Cli, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 3))
    bnn = lb.bayesianize(network, lb.MeanField())
    bnn.rule = "adjoint:margins=2"
    lb.save(bnn, tmp_path / "a.safetensors")
    found = cli("info", tmp_path / "a.safetensors").out
    expected = r"Adjoint\(outputs=margin, margins=2, mean=plain, max_passes=16\), trained with none yet"
    assert re.search(rf"^   rule +{expected} *$", found, re.MULTILINE)


def test_info_shows_the_factors(cli: Cli, run: Path) -> None:
    assert re.search(r"^   one pass +not calibrated", cli("info", run).out, re.MULTILINE)
    mean, std = fitted(calibrate(cli, run)["after"])
    assert json.loads(cli("info", run, "--json").out)["file"]["moment_scale"] == [mean, std]
    assert re.search(rf"^   one pass +mean × {mean:.4g}, std × {std:.4g}", cli("info", run).out, re.MULTILINE)
    cli("compress", run)
    assert json.loads(cli("info", run / "model.lbc", "--json").out)["file"]["moment_scale"] != [1, 1]


# -- corrections of layers --------------------------------------------------------------------------------------------


def test_layers_are_corrected_and_shown(cli: Cli, run: Path) -> None:
    settings = ("--layers", "--samples", 4, "--layer-inputs", 40)
    result = calibrate(cli, run, *settings, "--no-factors")
    bnn, data = load_run(run), load("digits")
    assert result["to"] == "samples"
    assert (result["before"]["layers"], result["after"]["layers"]) == (0, len(bnn.moment_layers))
    assert fitted(result["after"]) == bnn.moment_scale == (1, 1)
    first = bnn.moment_layers
    assert first
    lb.calibrate(
        bnn,
        batches(data).epoch(),
        samples=4,
        generator=torch.Generator().manual_seed(0),
        layers=True,
        layer_inputs=40,
        factors=False,
    )
    assert all(torch.equal(first[name], correction) for name, correction in bnn.moment_layers.items())
    assert re.search(rf"^   one pass +corrected in {len(first)} layers\b", cli("info", run).out, re.MULTILINE)
    output = cli("calibrate", run, *settings, "--device", "cpu")
    assert "corrected layers" in output.out
    assert output.err.endswith("layers compared with samples on 40 of 40 examples\n")
    mean, std = load_run(run).moment_scale
    text = f"corrected in {len(first)} layers, mean × {mean:.4g}, std × {std:.4g}"
    assert text in " ".join(cli("info", run).out.split())
    assert json.loads(cli("info", run, "--json").out)["file"]["moment_layers"].keys() == first.keys()
