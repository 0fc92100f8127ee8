"""`leanbayes export`: the model of a run as ONNX."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from cli_cases import TOY, Cli, load_run

from leanbayes.core.config import decode
from leanbayes.training import read_record


def test_a_run_is_exported(cli: Cli, digits: Path) -> None:
    output = cli("export", digits, "digits.onnx")
    assert re.fullmatch(r"leanbayes: The policy was fitted to predictions with 3 samples [^\n]+\n", output.err)
    names = "mean, variance, probs, expected_entropy"
    found = re.fullmatch(
        rf"digits\.onnx: [\d.]+ [KM]iB, from \w+ to {names}, within (\d)e-(\d+) of torch\n", output.out
    )
    assert found, output.out
    assert int(found.group(2)) >= 5
    x = torch.randn(3, 1, 8, 8)
    session = onnxruntime.InferenceSession("digits.onnx", providers=["CPUExecutionProvider"])
    (probs,) = session.run(["probs"], {session.get_inputs()[0].name: x.numpy()})
    wanted = load_run(digits).predict(x, rule="moments").probs
    torch.testing.assert_close(torch.from_numpy(probs), wanted, rtol=1e-4, atol=1e-5)


def test_a_run_on_a_table_is_exported(cli: Cli, toy: Path) -> None:
    output = cli("export", toy, "toy.onnx", "--no-check")
    assert output.out.endswith("to mean, variance, epistemic_variance, not checked\n")
    found, scales = metadata_of("toy.onnx"), read_record(toy)["config"]["scales"]
    assert json.loads(found["normalize"]) == {"mean": scales["input_mean"], "std": scales["input_std"]}
    assert json.loads(found["target"]) == {"mean": scales["target_mean"], "std": scales["target_std"]}
    assert json.loads(found["units"])["mean"] == "target"


def metadata_of(path: str) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_a_file_has_normalization_classes_and_thresholds(cli: Cli, digits: Path) -> None:
    shutil.copytree(digits, "run")
    cli("decide", "run", "--coverage", "0.9", "--false-alarms", "0.1")
    settings = read_record(Path("run"))["config"]
    output = cli("export", "run", "a.onnx", "--no-check")
    assert "the file does not have it" in output.err
    assert "policy" not in metadata_of("a.onnx")
    cli("decide", "run", "--coverage", "0.9", "--false-alarms", "0.1", "--rule", "moments")
    cli("export", "run", "a.onnx", "--no-check")
    found = metadata_of("a.onnx")
    assert json.loads(found["normalize"]) == settings["normalize"]
    assert json.loads(found["classes"]) == list(settings["classes"])
    assert json.loads(found["input_shape"]) == [1, 8, 8]
    assert decode(json.loads(found["policy"])) == load_run(Path("run")).policy


def test_a_run_is_exported_by_another_rule(cli: Cli, digits: Path) -> None:
    output = cli("export", digits, "a.onnx", "--rule", "adjoint", "--no-check")
    assert output.out.endswith("to mean, variance, probs, expected_entropy, margin_std, not checked\n")
    x = torch.randn(3, 1, 8, 8)
    session = onnxruntime.InferenceSession("a.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["margin_std"], {session.get_inputs()[0].name: x.numpy()})
    wanted = load_run(digits).predict(x, rule="adjoint").margin_std
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)


def test_mistakes_are_reported_in_one_sentence(cli: Cli, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("fit", "deterministic", *TOY, "--out", "plain")
    shutil.copytree(digits, "run")
    cli("calibrate", "run")  # the file cannot have a policy of samples, which a warning would say
    for words, sentence in (
        (("nowhere", "a.onnx"), "There is no run in nowhere"),
        (("plain", "a.onnx"), "Deterministic has no Bayesian weights"),
        (("run", "a.onnx", "--rule", "local"), "export with 'moments' or 'adjoint'"),
        (("run", "nowhere/a.onnx"), "Cannot write nowhere/a.onnx"),
    ):
        output = cli("export", *words, code=1)
        assert sentence in output.err
        assert (output.out, output.err.count("\n")) == ("", 1)
    assert "FILE" in cli("export", digits, code=2).err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[export]'" in cli("export", digits, "a.onnx", code=1).err
    assert list(Path().glob("*.onnx*")) == []
