"""The help texts of the command line, and running it as a program."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from cli_cases import ENVIRONMENT, Cli, Output

import leanbayes as lb
from leanbayes.cli.options import Task
from leanbayes.core import config
from leanbayes.methods import METHODS
from leanbayes.training import Recipe

# -- help -------------------------------------------------------------------------------------------------------------


COMMANDS = [
    ("evaluate",),
    ("predict",),
    ("serve",),
    ("calibrate",),
    ("decide",),
    ("acquire",),
    ("compress",),
    ("export",),
    ("push",),
    ("sensitivity",),
    ("compare",),
    ("report",),
    ("plan",),
    ("info",),
    *(("fit", name) for name in METHODS),
]


def described(text: str) -> dict[str, str]:
    """Parse a help text into its flags and positional arguments, each with its description."""
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


def test_the_usage_lists_all_commands(cli: Cli) -> None:
    text = cli("--help").out
    for name in ("fit", *(words[0] for words in COMMANDS), *METHODS):
        assert name in text
    assert max(map(len, text.splitlines())) <= 80
    assert cli("-h").out == cli("help").out == cli(code=2).out == text
    assert cli("--version").out == f"leanbayes {lb.__version__}\n"


def test_the_usage_of_fit_lists_all_methods(cli: Cli) -> None:
    text = cli("fit", "--help").out
    for name in METHODS:
        assert re.search(rf"^  {name} +\S", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
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
def test_the_help_shows_the_preset_of_the_data(
    data: str, shown: tuple[str, ...], cli: Cli, pets: Path, scenes: Path
) -> None:
    data = {"PETS": str(pets), "SCENES": str(scenes)}.get(data, data)
    for words in (("--data", data), (f"--data={data}",)):
        text = " ".join(cli("fit", "mean-field", *words, "--help").out.replace("│", " ").split())
        for flag, value in zip(("model", "epochs", "batch-size"), shown, strict=True):
            assert re.search(rf"--{flag} [^-].*?\(default: (.*?)\)", text).group(1) == value  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "engine", "temperature"),
    [
        (("mean-field", "--data", "cifar10"), "ivon", "1.0"),
        (("ssvi", "--data", "svhn"), "ivon", "1.0"),
        (("pbn", "--data", "cifar100"), "ivon", "1.0"),
        (("deterministic", "--data", "cifar10"), "backprop", "0.003"),
        (("mean-field", "--data", "cifar10", "--method.engine", "backprop"), "backprop", "0.003"),
        (("mean-field", "--data", "cifar10", "--optimizer", "sgd"), "backprop", "0.003"),
        (("mean-field", "--data", "digits"), "backprop", "0.003"),
        (("mean-field", "--data", "digits", "--method.engine", "ivon"), "ivon", "1.0"),
    ],
)
def test_the_preset_fits_the_engine(words: tuple[str, ...], engine: str, temperature: str, cli: Cli) -> None:
    text = " ".join(cli("fit", *words, "--help").out.replace("│", " ").split())
    shown = {"method.engine": engine, "temperature": temperature}
    for flag, value in shown.items():
        assert re.search(rf"--{flag} [^-].*?\(default: (.*?)\)", text).group(1) == value  # type: ignore[union-attr]


# -- as a program -----------------------------------------------------------------------------------------------------


PROGRAM = [str(Path(sys.executable).with_name("leanbayes"))]
MODULE = [sys.executable, "-m", "leanbayes"]


def program(how: list[str], *words: object) -> Output:
    """Run the installed program."""
    command = [*how, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    return Output(done.returncode, done.stdout, done.stderr)


def test_the_program_is_installed_and_gives_no_warnings(digits: Path, cli: Cli) -> None:
    output = program(PROGRAM, "info", digits, "--json")
    assert (output.code, output.err) == (0, "")
    assert output.out == cli("info", digits, "--json").out


def test_mistakes_set_the_exit_code() -> None:
    output = program(MODULE, "info", "nowhere")
    assert output == (1, "", "leanbayes: There is no file or folder nowhere: check the path.\n")
    output = program(PROGRAM, "info", "nowhere", "--what")
    assert (output.code, output.out) == (2, "")
    assert "--what" in output.err
    assert "Traceback" not in output.err


# Runs the program in four processes whose output nobody reads, forked from one that has imported everything.
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


def test_a_closed_pipe_causes_no_traceback(digits: Path) -> None:
    output = program([sys.executable, "-c", UNREAD], digits)
    assert output == (0, "--help 1\n--help 1\ninfo 1\nfit 1\n", "")
