"""`leanbayes decide`: a policy is fitted on held-out data and stored in the run, and predict prints a verdict."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import Cli, load_run, write_image
from PIL import Image

import leanbayes as lb
from leanbayes.core import config
from leanbayes.data import ArrayDataset, Batches, load
from leanbayes.likelihoods.decisions import Policy

RISK = ("--risk", 0.3, "--confidence", 0.8)


@pytest.fixture
def run(digits: Path, tmp_path: Path) -> Path:
    """A copy of a run on images."""
    return Path(shutil.copytree(digits, tmp_path / "run"))


@pytest.fixture
def numbers(toy: Path, tmp_path: Path) -> Path:
    """A copy of a run on a table."""
    return Path(shutil.copytree(toy, tmp_path / "numbers"))


def decide(cli: Cli, folder: Path, *words: object) -> Policy:
    found: Any = json.loads(cli("decide", folder, *words, "--device", "cpu", "--json").out)
    assert found["file"] == str(folder / "model.safetensors")
    policy = config.decode(found["policy"])
    assert isinstance(policy, Policy)
    return policy


def test_the_policy_is_that_of_python_and_is_stored(cli: Cli, run: Path) -> None:
    policy = decide(cli, run, "--false-alarms", 0.1, "--coverage", 0.9)
    bnn, data = load_run(run), load("digits")
    assert bnn.policy == policy
    batches = Batches(data.validation, 500, shuffle=False, normalize=data.normalize)
    assert lb.decide.fit(bnn, batches.epoch(), false_alarms=0.1, coverage=0.9) == policy
    assert str(policy) in " ".join(cli("info", run).out.split())
    assert json.loads(cli("info", run, "--json").out)["file"]["policy"] == str(policy)


def test_nothing_else_in_the_run_changes(cli: Cli, run: Path, digits: Path) -> None:
    decide(cli, run, "--coverage", 0.9)
    bnn = load_run(run)
    bnn.policy = load_run(digits).policy  # which fit made
    lb.save(bnn, run / "model.safetensors")
    for path in digits.rglob("*"):
        if path.is_file():
            assert (run / path.relative_to(digits)).read_bytes() == path.read_bytes()


def test_predict_prints_a_verdict(cli: Cli, run: Path) -> None:
    policy = decide(cli, run, *RISK, "--false-alarms", 0.1, "--coverage", 0.9)
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    files = [Path("digit.png"), write_image(Path("noise.png"), 8, 8)]
    Image.fromarray(data.test.x[0, 0].numpy()).save(files[0])
    rows = json.loads(cli("predict", run, *files, "--json").out)
    bnn, normalize = load_run(run), data.normalize
    assert normalize is not None
    for row in rows:
        assert row["verdict"].startswith(("answer", "ask a person: "))
        assert {*row["set"]} <= {*"0123456789"}
        assert row["set"]
    assert policy.samples == bnn.method.samples
    out = cli("predict", run, *files).out
    assert [row["verdict"] in out for row in rows] == [True, True]
    assert re.search(r"\bset\b +verdict", out)


def test_predict_follows_the_rule_of_the_policy(cli: Cli, run: Path) -> None:
    path = write_image(Path("a.png"), 8, 8)
    one_pass = json.loads(cli("predict", run, path, "--json", "--rule", "moments").out)[0]
    policy = decide(cli, run, "--coverage", 0.9, "--rule", "moments")
    assert (policy.rule, policy.samples) == ("moments", 1)
    (row,) = json.loads(cli("predict", run, path, "--json").out)
    assert {key: row[key] for key in one_pass} == one_pass
    adjoint = "adjoint:margins=2,mean=moments"
    assert decide(cli, run, "--coverage", 0.9, "--rule", adjoint).rule == adjoint
    decided, given = (json.loads(cli("predict", run, path, "--json", *of).out) for of in ((), ("--rule", adjoint)))
    assert decided == given
    decide(cli, run, "--coverage", 0.9, "--rule", "moments")
    other = cli("predict", run, path, "--json", "--rule", "sample", "--samples", 3)
    assert "fitted to predictions with one pass (rule moments), but this one is with 3 samples" in other.err
    assert "but this one is with one pass (rule mean)" in cli("predict", run, path, "--rule", "mean").err


def test_a_table_has_intervals_in_the_unit_of_the_target(cli: Cli, numbers: Path) -> None:
    policy = decide(cli, numbers, "--coverage", 0.8)
    assert policy.intervals is not None
    scales = json.loads((numbers / "run.json").read_text())["config"]["scales"]
    features = len(scales["input_mean"])
    np.savetxt("a.csv", np.zeros((3, features)), delimiter=",")
    rows = json.loads(cli("predict", numbers, "a.csv", "--json").out)
    for row in rows:
        half = policy.intervals.quantile * row["std"]
        assert (row["low"], row["high"]) == pytest.approx((row["mean"] - half, row["mean"] + half), rel=1e-4)
        assert row["verdict"] == "answer"
    head = cli("predict", numbers, "a.csv").out.splitlines()[1].split()
    assert head[-3:] == ["low", "high", "verdict"]


def test_the_tolerance_is_in_the_unit_of_the_target(cli: Cli, numbers: Path) -> None:
    (scale,) = json.loads((numbers / "run.json").read_text())["config"]["scales"]["target_std"]
    policy = decide(cli, numbers, "--risk", 0.5, "--confidence", 0.6, "--tolerance", 100 * scale)
    assert policy.abstention is not None
    assert policy.abstention.tolerance == pytest.approx(100)


def test_errors_and_stds_are_printed_in_the_unit_of_the_target(cli: Cli, numbers: Path) -> None:
    (scale,) = json.loads((numbers / "run.json").read_text())["config"]["scales"]["target_std"]
    flags = ("--risk", 0.5, "--confidence", 0.6, "--tolerance", 100 * scale, "--false-alarms", 0.5)
    printed = " ".join(cli("decide", numbers, *flags).out.split())
    policy = load_run(numbers).policy
    assert policy is not None
    assert policy.gate is not None
    assert f"wrong by more than {100 * scale:.4g}" in printed
    assert f"epistemic std is above {policy.gate.threshold * scale:.4g}" in printed
    assert "in units of the target's std" in " ".join(cli("info", numbers).out.split())


def test_mistakes_are_explained(cli: Cli, run: Path, numbers: Path, digits: Path) -> None:
    assert "--risk, --false-alarms and --coverage" in cli("decide", run, code=2).err
    assert "too few for a risk of 0.001" in cli("decide", run, "--risk", 0.001, code=1).err
    assert "needs a tolerance" in cli("decide", numbers, "--risk", 0.1, code=1).err
    assert "risk=2.0 must be a fraction" in cli("decide", run, "--risk", 2, code=1).err
    assert load_run(run).policy == load_run(digits).policy
