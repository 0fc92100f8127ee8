"""`leanbayes compress`: the options of the search, and what it prints; `info` describes the file."""

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_cases import TOY, Cli, load_run

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.deploy.compact.compact_file import Trial
from leanbayes.evaluation import evaluate

FINE, COARSE = Trial(64, None, "fp16"), Trial(8, None, "int8")
TRIALS = "leanbayes.deploy.compact.search.TRIALS"


@pytest.fixture(autouse=True)
def _two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRIALS, (FINE, COARSE))


def test_target_size_gives_a_file_that_is_small_enough(cli: Cli, digits: Path) -> None:
    finest = json.loads(cli("compress", digits, "small.lbc", "--json").out)
    assert finest["chosen"]["trial"]["components"] == 64
    found = json.loads(cli("compress", digits, "--target-size", finest["chosen"]["bytes"] - 1, "--json").out)
    assert [result["trial"]["components"] for result in found["tried"]] == [64, 8]
    assert found["chosen"]["trial"]["components"] == 8
    assert (digits / "model.lbc").stat().st_size == found["chosen"]["bytes"] < finest["chosen"]["bytes"]
    # The printed score is that of the model in the file, on the validation data.
    loaded = lb.load(digits / "model.lbc", load_run(digits).to_deterministic()).eval()
    data = load("digits")
    assert data.validation is not None
    batches = Batches(data.validation, 1000, shuffle=False, normalize=data.normalize)
    assert evaluate(loaded, batches.epoch(), seed=0)["nll"] == pytest.approx(found["chosen"]["nll"], rel=0.05)


def test_max_nll_increase_gives_a_file_that_info_describes(cli: Cli, digits: Path) -> None:
    printed = cli("compress", digits, "a.lbc", "--max-nll-increase", 100)
    assert printed.out.startswith("a.lbc: ")
    assert "8 components, int8" in next(line for line in printed.out.splitlines() if line.rstrip().endswith("chosen"))
    assert [line.partition(": ")[0] for line in printed.err.splitlines()] == [str(FINE), str(COARSE)]
    size = Path("a.lbc").stat().st_size
    file = json.loads(cli("info", "a.lbc", "--json").out)["file"]
    assert sum(part["bytes"] for part in file["parts"].values()) == file["bytes"] == size
    shown = cli("info", "a.lbc").out
    assert f"a.lbc, {size:,} bytes" in shown
    assert "labels" in shown


def test_a_bad_trial_before_a_good_one_does_not_end_the_search(
    cli: Cli, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRIALS, (COARSE, FINE, COARSE))
    both = json.loads(cli("compress", digits, "a.lbc", "--max-nll-increase", 100, "--json").out)
    coarse, fine = (both["tried"][place]["nll"] for place in (0, 1))
    between = (coarse + fine) / 2 - both["nll_before"]
    assert coarse > fine
    found = json.loads(cli("compress", digits, "a.lbc", "--max-nll-increase", max(between, 0), "--json").out)
    assert found["chosen"]["trial"]["components"] == 64
    assert len(found["tried"]) == 3
    assert Path("a.lbc").stat().st_size == found["chosen"]["bytes"]


@pytest.mark.parametrize("words", [("--out", "b.lbc"), ("--out=b.lbc",)])
def test_the_file_may_be_named_as_in_other_commands(words: tuple[str, ...], cli: Cli, digits: Path) -> None:
    cli("compress", *words, digits, "--seed", 1)
    assert Path("b.lbc").is_file()


def test_the_best_of_the_files_that_are_small_enough_is_kept(
    cli: Cli, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRIALS, (COARSE, FINE))
    found = json.loads(cli("compress", digits, "a.lbc", "--target-size", "1GB", "--json").out)
    coarse, fine = (result["nll"] for result in found["tried"])
    assert coarse > fine
    assert found["chosen"]["trial"]["components"] == 64
    assert Path("a.lbc").stat().st_size == found["chosen"]["bytes"]


def test_the_file_of_a_calibrated_run_is_calibrated(cli: Cli, digits: Path) -> None:
    shutil.copytree(digits, "run")
    network = load_run(digits).to_deterministic()
    cli("compress", "run", "before.lbc", "--max-nll-increase", 100)
    assert lb.load("before.lbc", network).moment_scale == (1, 1)
    cli("calibrate", "run", "--to", "samples")
    cli("compress", "run", "after.lbc", "--max-nll-increase", 100)  # the coarse file, which is another model
    coarse, data = lb.load("after.lbc", network).eval(), load("digits")
    found = coarse.moment_scale
    assert data.validation is not None
    batches = Batches(data.validation, 1000, shuffle=False, normalize=data.normalize)
    fitted = lb.calibrate(coarse, batches.epoch(), to="labels")
    assert found == pytest.approx(fitted, rel=0.1)  # up to the rounding to int8
    assert load_run(Path("run")).moment_scale != pytest.approx(found, rel=0.3)


def test_the_file_of_a_calibrated_regression_is_calibrated(cli: Cli) -> None:
    cli("fit", "vdp", *TOY, "--method.correlation", "none", "--out", "run")
    cli("calibrate", "run")
    cli("compress", "run")
    factors = lb.load("run/model.lbc", load_run(Path("run")).to_deterministic()).moment_scale
    assert factors not in ((1, 1), load_run(Path("run")).moment_scale)  # another model has other factors


@pytest.mark.parametrize("method", ["mc-dropout", "ensemble", "deterministic", "mbnn"])
def test_a_run_without_the_bayesian_weights_of_one_network_is_refused(cli: Cli, method: str) -> None:
    cli("fit", method, *TOY, "--out", "run")
    printed = cli("compress", "run", code=1)
    assert re.search("whose weights cannot be shared: compress one of .*mean-field", printed.err)
    assert not re.search(rf"\b(bnn|{method})\b", printed.err)
    assert not Path("run", "model.lbc").exists()


def test_mistakes_are_reported_in_one_sentence(cli: Cli, digits: Path) -> None:
    printed = cli("compress", digits, "--target-size", "100", code=1)
    assert "No file is as small as 100 bytes: the smallest has" in printed.err
    cli("fit", "mean-field", *TOY, "--model-options", "hidden=[2]", "--out", "tiny")
    printed = cli("compress", "tiny", code=1)
    assert "64 components, fp16: Too few weights" in printed.err
    assert "The network has too few weights to share" in printed.err
    assert "choose a folder" in cli("compress", digits, "no/file.lbc", code=1).err
    assert "There is no run in nowhere" in cli("compress", "nowhere", code=1).err
    for words, sentence in (
        (("--target-size", "much"), "write it as 700KB"),
        (("--target-size", "1KB", "--max-nll-increase", "1"), "exclude each other"),
        (("--max-nll-increase", "-1"), "must not be negative"),
    ):
        assert sentence in cli("compress", digits, *words, code=2).err
