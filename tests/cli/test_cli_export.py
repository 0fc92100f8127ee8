"""`leanbayes export`: the model of a run as ONNX."""

import importlib.util
import re
from pathlib import Path

import onnxruntime
import pytest
import torch
from cli_cases import TOY, Cli, load_run


def test_a_run_is_exported(cli: Cli, digits: Path) -> None:
    output = cli("export", digits, "digits.onnx")
    assert output.err == ""
    line = r"digits\.onnx: [\d.]+ [KM]iB, from \w+ to mean, variance, probs, within (\d)e-(\d+) of torch\n"
    found = re.fullmatch(line, output.out)
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


def test_mistakes_are_reported_in_one_sentence(cli: Cli, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("fit", "deterministic", *TOY, "--out", "plain")
    for words, sentence in (
        (("nowhere", "a.onnx"), "There is no run in nowhere"),
        (("plain", "a.onnx"), "Deterministic has no Bayesian weights"),
        ((digits, "nowhere/a.onnx"), "Cannot write nowhere/a.onnx"),
    ):
        output = cli("export", *words, code=1)
        assert sentence in output.err
        assert (output.out, output.err.count("\n")) == ("", 1)
    assert "FILE" in cli("export", digits, code=2).err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[export]'" in cli("export", digits, "a.onnx", code=1).err
    assert list(Path().glob("*.onnx*")) == []
