"""`leanbayes sensitivity`: which layers hold the weights that matter most."""

import json
import re
from pathlib import Path

import pytest
from cli_cases import TOY, Cli, load_run

import leanbayes as lb
from leanbayes.data import Batches, load


def test_the_table_has_one_line_per_layer(cli: Cli, digits: Path) -> None:
    output = cli("sensitivity", digits, "--rate", 0.1)
    assert output.err == ""
    bnn = load_run(digits)
    count = int(0.1 * bnn.layout.numel)
    title, *lines = output.out.splitlines()
    assert title == f"{digits}, jacobian: {count:,} of {bnn.layout.numel:,} weights"
    rows = [re.fullmatch(r"\s*(\S+)\s+([\d,]+)\s+(\d\.\d+)\s+([\d,]+)\s*(█*)\s*", line) for line in lines]
    found = [row.groups() for row in rows if row]
    assert [name for name, *_ in found] == [slot.name for slot in bnn.layout]
    assert sum(float(share) for _, _, share, _, _ in found) == pytest.approx(1, abs=0.01)
    numbers = [int(number.replace(",", "")) for _, _, _, number, _ in found]
    assert sum(numbers) == count
    overlap = re.fullmatch(
        r"About (\d+)% of them are in the exact top 10 % \(estimated from random signs\)\.", lines[-1]
    )
    assert overlap
    assert 85 <= int(overlap[1]) <= 100
    bars = [len(bar) for *_, bar in found]
    assert bars == [round(30 * number / count) for number in numbers]


def test_the_numbers_equal_those_of_lb_sensitivity(cli: Cli, digits: Path) -> None:
    words = ("--kind", "fisher", "--examples", 128, "--seed", 3, "--json")
    result = json.loads(cli("sensitivity", digits, *words).out)
    data = load("digits")
    batches = Batches(data.train, 64, seed=3, normalize=data.normalize).epoch()
    found = lb.sensitivity(load_run(digits), [next(batches), next(batches)], "fisher")
    assert {layer["name"]: layer["share"] for layer in result["layers"]} == pytest.approx(found.per_layer())
    assert {layer["name"]: layer["chosen"] for layer in result["layers"]} == found.chosen(0.05)
    assert (result["run"], result["kind"], result["rate"]) == (str(digits), "fisher", 0.05)
    assert result["overlap"] is None
    other = json.loads(cli("sensitivity", digits, "--per", "layer", "--kind", "random", "--rate", 0.5, "--json").out)
    assert all(layer["chosen"] in (0, layer["weights"]) for layer in other["layers"])


def test_runs_of_other_methods_are_scored(cli: Cli, tmp_path: Path) -> None:
    for method in ("deterministic", "pbn"):
        words = (*TOY[:2], "--epochs", 2, "--quiet", "--model-options", "hidden=[4]")
        rate = ("--method.rate", 0.5) if method == "pbn" else ()
        cli("fit", method, *words, *rate, "--out", tmp_path / method)
        layers = json.loads(cli("sensitivity", tmp_path / method, "--rate", 0.5, "--json").out)["layers"]
        assert [layer["weights"] for layer in layers] == [4, 4]
        assert sum(layer["chosen"] for layer in layers) == 4
    assert len(load_run(tmp_path / "pbn").posterior.get_buffer("index")) == 4


def test_mistakes_are_reported_in_one_sentence(cli: Cli, digits: Path) -> None:
    cli("fit", "ensemble", *TOY, "--method.members", 2, "--out", "ensemble")
    for words, sentence in (
        (("nowhere",), "There is no run in nowhere"),
        (("ensemble",), "An ensemble is not a single network"),
        ((digits, "--rate", "1e-9"), "less than one weight"),
    ):
        output = cli("sensitivity", *words, code=1)
        assert sentence in output.err
        assert (output.out, output.err.count("\n")) == ("", 1)
    wrong: tuple[tuple[tuple[object, ...], str], ...] = (
        ((digits, "--rate", "1.5"), "rate=1.5 must be a fraction"),
        ((digits, "--examples", "0"), "must be at least 1"),
        ((digits, "--kind", "fischer"), "fischer"),
        ((), "RUN"),
    )
    for given, sentence in wrong:
        assert sentence in cli("sensitivity", *given, code=2).err
