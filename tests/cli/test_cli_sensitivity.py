"""`leanbayes sensitivity`: which layers hold the weights that matter."""

import json
import re
from pathlib import Path

import pytest
from cli_cases import TOY, Cli, load_run

import leanbayes as lb
from leanbayes.data import Batches, load


def test_the_layers_of_a_run_are_told(cli: Cli, digits: Path) -> None:
    told = cli("sensitivity", digits, "--rate", 0.1)
    assert told.err == ""
    bnn = load_run(digits)
    count = int(0.1 * bnn.layout.numel)
    title, *lines = told.out.splitlines()
    assert title == f"{digits}, jacobian: {count:,} of {bnn.layout.numel:,} weights"
    rows = [re.fullmatch(r"\s*(\S+)\s+([\d,]+)\s+(\d\.\d+)\s+([\d,]+)\s*(█*)\s*", line) for line in lines]
    found = [row.groups() for row in rows if row]
    assert [name for name, *_ in found] == [slot.name for slot in bnn.layout]
    assert sum(float(share) for _, _, share, _, _ in found) == pytest.approx(1, abs=0.01)
    numbers = [int(number.replace(",", "")) for _, _, _, number, _ in found]
    assert sum(numbers) == count
    bars = [len(bar) for *_, bar in found]
    assert bars == [round(30 * number / count) for number in numbers]


def test_the_figures_are_those_of_the_library(cli: Cli, digits: Path) -> None:
    words = ("--kind", "fisher", "--examples", 128, "--seed", 3, "--json")
    told = json.loads(cli("sensitivity", digits, *words).out)
    data = load("digits")
    batches = Batches(data.train, 64, seed=3, normalise=data.normalise).epoch()
    found = lb.sensitivity(load_run(digits), [next(batches), next(batches)], "fisher")
    assert {layer["name"]: layer["share"] for layer in told["layers"]} == pytest.approx(found.per_layer())
    assert {layer["name"]: layer["chosen"] for layer in told["layers"]} == found.chosen(0.05)
    assert (told["run"], told["kind"], told["rate"]) == (str(digits), "fisher", 0.05)
    other = json.loads(cli("sensitivity", digits, "--per", "layer", "--kind", "random", "--rate", 0.5, "--json").out)
    assert all(layer["chosen"] in (0, layer["weights"]) for layer in other["layers"])


def test_runs_of_other_methods_have_one_too(cli: Cli, tmp_path: Path) -> None:
    for method in ("deterministic", "pbn"):
        words = (*TOY[:2], "--epochs", 2, "--quiet", "--model-options", "hidden=[4]")
        rate = ("--method.rate", 0.5) if method == "pbn" else ()
        cli("fit", method, *words, *rate, "--out", tmp_path / method)
        layers = json.loads(cli("sensitivity", tmp_path / method, "--rate", 0.5, "--json").out)["layers"]
        assert [layer["weights"] for layer in layers] == [4, 4]
        assert sum(layer["chosen"] for layer in layers) == 4
    assert len(load_run(tmp_path / "pbn").posterior.get_buffer("index")) == 4


def test_mistakes_are_told_in_a_sentence(cli: Cli, digits: Path) -> None:
    cli("fit", "ensemble", *TOY, "--method.members", 2, "--out", "ensemble")
    for words, sentence in (
        (("nowhere",), "There is no run in nowhere"),
        (("ensemble",), "An ensemble is not one network"),
        ((digits, "--rate", "1e-9"), "less than one weight"),
    ):
        told = cli("sensitivity", *words, code=1)
        assert sentence in told.err
        assert (told.out, told.err.count("\n")) == ("", 1)
    wrong: tuple[tuple[tuple[object, ...], str], ...] = (
        ((digits, "--rate", "1.5"), "rate=1.5 must be a share"),
        ((digits, "--examples", "0"), "must be at least 1"),
        ((digits, "--kind", "fischer"), "fischer"),
        ((), "RUN"),
    )
    for given, sentence in wrong:
        assert sentence in cli("sensitivity", *given, code=2).err
