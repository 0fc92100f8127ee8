"""Names from files and arguments cannot change what a terminal shows: control characters and markup are escaped."""

import json
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import TINY, command
from file_cases import with_header
from torch import nn

import leanbayes as lb
from leanbayes.cli.console import cell, one_line_warnings
from leanbayes.errors import printable
from leanbayes.training.progress import Progress, say

EVIL = "\x1b[31m\x07\u202e[bold]a[/]\x9b2J"
FORBIDDEN = ("\x1b[31m", "\x07", "\u202e", "\x9b")


def check(text: str) -> None:
    assert not any(part in text for part in FORBIDDEN), repr(text)


@pytest.fixture
def evil_run(tmp_path: Path) -> Path:
    """A run whose folder, data, network and scores have names that control a terminal."""
    folder = tmp_path / EVIL.replace("/", "")
    output = command("fit", "mean-field", *TINY[:-4], "--out", folder)
    assert output.code == 0
    assert "\\x1b[31m" in output.out
    check(output.out + output.err)
    return folder


def test_printable_text_stays_as_it_is() -> None:
    assert printable("a café with 3 µ, 日本") == "a café with 3 µ, 日本"
    assert printable("a\nb\x1b\ud800") == "a\\nb\\x1b\\ud800"
    assert cell("[bold]a") == "\\[bold]a"


def test_errors_escape_control_characters() -> None:
    for kind in (lb.LeanBayesError, lb.FileFormatError, lb.UnsupportedOperation):
        check(str(kind(f"There is no {EVIL}.")))
    with pytest.raises(lb.FileFormatError) as caught:
        lb.load(EVIL, nn.Linear(1, 1))
    check(str(caught.value))


def test_tensor_names_are_escaped(tmp_path: Path) -> None:
    network = nn.Sequential()
    network.add_module("\x1b[31m[bold]\x07", nn.Linear(2, 3))
    path = tmp_path / "a.safetensors"
    with pytest.raises(lb.LeanBayesError, match="rename its module") as caught:
        lb.save(lb.bayesianize(network, lb.MeanField()), path)
    check(str(caught.value))
    lb.save(lb.bayesianize(nn.Sequential(OrderedDict({"[bold]": nn.Linear(2, 3)})), lb.MeanField()), path)
    with_header(path, lambda header: header["layout"][0].update(names=[EVIL]))
    output = command("info", path)
    assert "\\x1b[31m" in output.err
    check(output.err)
    with pytest.raises(lb.FileFormatError) as caught:
        lb.load(path, nn.Linear(2, 3))
    check(str(caught.value))


def test_names_in_a_record_are_escaped(evil_run: Path, tmp_path: Path) -> None:
    def changed(**settings: Any) -> None:
        path = evil_run / "run.json"
        record = json.loads(path.read_text())
        record["config"] |= settings
        record["versions"][EVIL] = EVIL
        record["scores"][EVIL] = {EVIL: 1.0}
        record["costs"][EVIL] = EVIL
        path.write_text(json.dumps(record))

    changed(data=EVIL, classes=[EVIL])
    (tmp_path / "inputs.csv").write_text("0.5\n")
    for words in (
        ("info", evil_run),
        ("predict", evil_run, tmp_path / "inputs.csv"),
        ("predict", evil_run, tmp_path / f"{EVIL.replace('/', '')}.png"),
        ("evaluate", evil_run),
        ("report", evil_run, "--out", tmp_path / f"{EVIL.replace('/', '')}.html", "--evaluation.shifts", "noise"),
        ("calibrate", evil_run),
        ("acquire", evil_run, tmp_path / "inputs.csv", "--number", 1),
        ("sensitivity", evil_run),
        ("export", evil_run, tmp_path / EVIL.replace("/", "") / "a.onnx"),
    ):
        output = command(*words)
        assert output.code in (0, 1)
        check(output.out + output.err)
    changed(model={"name": EVIL, "input_shape": [1], "outputs": 1, "options": {EVIL: EVIL}})
    output = command("predict", evil_run, tmp_path / "inputs.csv")
    assert output.code == 1
    check(output.err)


def test_wrong_arguments_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps({EVIL: EVIL}))
    for words in (
        (EVIL,),
        ("info", EVIL),
        ("predict", EVIL, "a"),
        ("fit", EVIL),
        ("fit", "mean-field", "--data", EVIL),
        ("fit", "mean-field", f"--{EVIL}"),
        ("fit", "mean-field", "--model", EVIL, "--data", "toy"),
        ("fit", "mean-field", "--epochs", EVIL),
        ("fit", "mean-field", "--config", tmp_path / "c.yaml"),
        ("fit", "mean-field", "--config", EVIL),
        ("compare", EVIL),
    ):
        output = command(*words)
        assert output.code in (1, 2)
        check(output.out + output.err)


def test_progress_and_warnings_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say(True, EVIL)
    with Progress(EVIL, 1, True, None) as progress:
        progress.say(EVIL)
        progress.stage(EVIL)
    with one_line_warnings():
        warnings.warn(EVIL, lb.RuleMismatchWarning, stacklevel=1)
    check("".join(capsys.readouterr()))


def test_a_model_with_nan_is_not_saved(tmp_path: Path) -> None:
    network = nn.Linear(2, 3)
    bnn = lb.bayesianize(network, lb.MeanField())
    lb.save(bnn, tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    with torch.no_grad():
        bnn.mean_parameters()[0][0] = torch.nan
    with pytest.raises(lb.LeanBayesError, match="NaN or infinite values, so the model is not saved"):
        lb.save(bnn, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_model_with_nan_is_not_trained() -> None:
    network = nn.Linear(2, 3)
    with torch.no_grad():
        network.weight[0, 0] = torch.inf
    data = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(lb.LeanBayesError, match="weight of the model has NaN or infinite values"):
        lb.fit(network, lb.MeanField(), data, epochs=1)
