"""Completion in a shell, and the flag that every command has."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_cases import Cli

from leanbayes.cli.main import COMMANDS
from leanbayes.methods import METHODS

CASES = [
    (("ev",), {"evaluate"}),
    (("",), {*COMMANDS}),
    (("fit", "me"), {"mean-field"}),
    (("fit", ""), {*METHODS}),
    (("fit", "mean-field", "--temperature-"), {"--temperature-end", "--temperature-warmup"}),
    (("fit", "ensemble", "--method.m"), {"--method.members"}),
    (("evaluate", "run", "--sa"), {"--samples"}),
    (("compare", "mean-field", "vd"), {"vdp"}),
    (("info", "a-f"), {"a-file"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_methods_flags_and_files(cli: Cli) -> None:
    Path("script").write_text(cli("completion", "bash").out)
    Path("a-file").touch()
    tries = "\n".join(
        f"COMP_WORDS=(leanbayes {' '.join(repr(word) for word in words)}); COMP_CWORD={len(words)}; COMPREPLY=()\n"
        '_leanbayes; echo "${COMPREPLY[*]}"'
        for words, _ in CASES
    )
    run = subprocess.run(["bash", "-c", f"source ./script\n{tries}"], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    found = [{*line.split()} for line in run.stdout.splitlines()]
    assert found == [expected for _, expected in CASES]


def test_the_script_of_zsh_loads_the_completion_of_bash(cli: Cli) -> None:
    assert "bashcompinit" in cli("completion", "zsh").out
    assert "fish" in cli("completion", "fish", code=2).err


def test_every_command_has_json(cli: Cli) -> None:
    flags = json.loads(cli("completion", "--json").out)
    assert {*flags} == {*COMMANDS}
    assert {*flags["fit"]} == {*METHODS}
    methods = flags.pop("fit")
    for name, words in {**flags, **methods}.items():
        assert "--json" in words, name


def test_json_of_fit_export_and_report_is_all_that_is_printed(cli: Cli, toy: Path) -> None:
    shutil.copytree(toy, "run")
    found = json.loads(cli("report", "run", "--json", "--evaluation.shifts", "labels", "--evaluation.no-pruning").out)
    assert (found["report"], found["runs"][0]["run"]) == ("report.html", "run")
    assert found["runs"][0]["scores"]["rmse"] > 0
    found = json.loads(cli("export", "run", "a.onnx", "--json").out)
    assert (found["file"], found["bytes"]) == ("a.onnx", Path("a.onnx").stat().st_size)
    found = json.loads(
        cli("fit", "deterministic", "--data", "toy", "--epochs", 1, "--quiet", "--out", "b", "--json").out
    )
    assert found["run"] == "b"
    assert found["scores"]["validation"]["rmse"] > 0
