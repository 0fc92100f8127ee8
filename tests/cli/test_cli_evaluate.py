"""`leanbayes evaluate` scores a run, and `leanbayes info` describes it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import TOY, Cli, load_run, without_times

import leanbayes as lb
from leanbayes.cli.text_tables import scores_table, show
from leanbayes.core import config
from leanbayes.data import ArrayDataset, load
from leanbayes.training import read_record
from leanbayes.training.loop import Loop

# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_scores_are_computed_on_the_test_data(cli: Cli, digits: Path) -> None:
    scores = json.loads(cli("evaluate", digits, "--json").out)["scores"]
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    assert data.normalize is not None
    generator = torch.Generator().manual_seed(0)
    prediction = load_run(digits).predict(data.normalize(data.test.x), generator=generator)
    assert isinstance(prediction, lb.ClassPrediction)
    assert scores["accuracy"] == pytest.approx((prediction.label == data.test.y).float().mean().item(), abs=1e-6)
    chosen = prediction.probs.gather(1, data.test.y[:, None])
    assert scores["nll"] == pytest.approx(-chosen.log().mean().item(), rel=1e-4)
    assert scores["examples"] == len(data.test) == 599
    assert scores["predict_ms_per_1000"] > 0


def test_scores_are_reproducible_and_stored_in_the_run(cli: Cli, digits: Path) -> None:
    first = json.loads(cli("evaluate", digits, "--json").out)
    assert read_record(digits)["scores"]["test"] == first["scores"]
    assert first["run"] == str(digits)
    assert first["costs"] == read_record(digits)["costs"]
    second = json.loads(cli("evaluate", digits, "--json").out)
    assert without_times(first["scores"]) == without_times(second["scores"])
    record = read_record(digits)
    assert record["status"] == "finished"
    assert "validation" in record["scores"]


@pytest.mark.parametrize("words", [("--samples", 2), ("--rule", "mean"), ("--split", "validation"), ("--seed", 5)])
def test_scores_with_other_settings_are_not_stored(words: tuple[Any, ...], cli: Cli, digits: Path) -> None:
    usual = json.loads(cli("evaluate", digits, "--json").out)["scores"]
    before = (digits / "run.json").read_bytes()
    other = json.loads(cli("evaluate", digits, *words, "--json").out)["scores"]
    assert without_times(other) != without_times(usual)
    assert (digits / "run.json").read_bytes() == before


def test_scores_are_stored_for_any_output_device_and_root(cli: Cli, toy: Path) -> None:
    for words in ((), ("--json",), ("--device", "cpu"), ("--root", "."), ("--split", "test", "--seed", 0)):
        record = read_record(toy)
        record["scores"].pop("test", None)
        (toy / "run.json").write_text(json.dumps(record))
        cli("evaluate", toy, *words)
        assert read_record(toy)["scores"]["test"]["examples"] == 100


def test_scores_are_printed_even_if_they_cannot_be_stored(cli: Cli, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, values: Any) -> None:
        raise lb.LeanBayesError(f"Cannot write {path}: the disk is full.")

    monkeypatch.setattr("leanbayes.cli.evaluate.write_json", full)
    output = cli("evaluate", toy)
    assert re.search(r"^   RMSE +[\d.]+  Root mean squared error", output.out, re.MULTILINE)
    assert output.err == f"The scores are not stored in the run: Cannot write {toy / 'run.json'}: the disk is full.\n"
    assert "rmse" in json.loads(cli("evaluate", toy, "--json").out)["scores"]


def test_other_splits_and_rules_can_be_scored(cli: Cli, digits: Path) -> None:
    held_out = json.loads(cli("evaluate", digits, "--split", "validation", "--json").out)["scores"]
    assert held_out["examples"] == 120
    recorded = read_record(digits)["scores"]["validation"]
    assert held_out["nll"] == pytest.approx(recorded["nll"], rel=1e-4)
    mean = json.loads(cli("evaluate", digits, "--rule", "mean", "--json").out)["scores"]
    assert mean["mutual_information"] == pytest.approx(0, abs=1e-6)


COSTS = ("trained ×1000", "stored ×1000", "file kB", "train ms/epoch", "predict ms/1000", "predict × plain", "examples")


def test_the_table_shows_every_score(cli: Cli, digits: Path, toy: Path) -> None:
    for folder, names in (
        (digits, ("accuracy", "NLL", "ECE", "Brier", "mutual information", "class-wise ECE", "excess AURC", "entropy")),
        (toy, ("RMSE", "NLL", "CRPS", "95 % interval", "std")),
    ):
        text = cli("evaluate", folder).out
        for name in (*names, *COSTS):
            assert re.search(rf"^   {name} +[\d.,e+%×]+  ", text, re.MULTILINE), name
        lines = [line for line in text.splitlines()[1:] if line.startswith("   ")]
        parts = [re.split(r"  +", line.strip()) for line in lines]
        assert all(len(row) == 3 and row[2].endswith(".") for row in parts)  # each score has its meaning
        rows = {name: value for name, value, _ in parts}
        groups = [line.strip() for line in text.splitlines()[1:] if not line.startswith("   ")]
        assert groups == ["quality", "uncertainty", "other scores", "cost", "data"]
        scores = read_record(folder)["scores"]["test"]
        assert len(rows) == len(lines) == len(scores) + 4  # and four costs of the training
        assert rows["NLL"] == f"{scores['nll']:.4f}"
        assert rows["predict × plain"] == f"{scores['predict_time_ratio']:.2f}×"
        assert "_" not in "".join(rows)
        assert {*list(rows)[-len(COSTS) :]} == {*COSTS}  # costs are below scores
    record = read_record(digits)
    assert f"{record['scores']['test']['accuracy']:.2%}" in cli("evaluate", digits).out


def test_the_title_names_the_run_and_the_split(cli: Cli, digits: Path) -> None:
    assert cli("evaluate", digits).out.splitlines()[0] == f"{digits}, test data"
    assert (
        cli("evaluate", digits, "--split", "validation").out.splitlines()[0]
        == f"{digits}, held-out part of the training data"
    )


def test_an_undefined_score_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"accuracy": 1.0, "entropy_wrong": math.nan, "examples": 1234}  # there are no wrong answers
    show("", scores_table({**scores, "kilo_trained": 2.5, "my_own_score": 0.25}))
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()] == [
        ["quality"],
        ["accuracy", "100.00%", *"Share of correct predictions on the test data.".split()],
        ["uncertainty"],
        ["entropy", "if", "wrong", "–", *"Mean entropy of wrong predictions.".split()],
        ["other", "scores"],
        ["my", "own", "score", "0.2500"],
        ["cost"],
        ["trained", "×1000", "2.500", *"Trainable numbers, in thousands.".split()],
        ["data"],
        ["examples", "1,234", *"Examples that the scores are computed on.".split()],
    ]


def test_a_rule_with_other_noise_gives_one_warning_in_one_line(cli: Cli, digits: Path) -> None:
    output = cli("evaluate", digits, "--rule", "local", "--samples", 2)
    assert re.fullmatch(r"leanbayes: [^\n]*was trained with the rule[^\n]*\.\n", output.err)
    assert ".py" not in output.err


# -- info -------------------------------------------------------------------------------------------------------------


def test_a_run_is_described(cli: Cli, digits: Path) -> None:
    found = json.loads(cli("info", digits, "--json").out)
    record = read_record(digits)
    for name in ("status", "config", "scores", "costs", "versions", "machine"):
        assert found["run"][name] == record[name]
    text = cli("info", digits).out
    for word in (
        "finished",
        "digits",
        "small-cnn",
        "MeanField",
        "Normal(scale=auto",
        "epochs=2",
        "of 58,144 in 4",
    ):
        assert word in text


def test_a_file_is_described(cli: Cli, digits: Path) -> None:
    path = digits / "model.safetensors"
    found = json.loads(cli("info", path, "--json").out)
    assert list(found) == ["file"]
    bnn = load_run(digits)
    file = found["file"]
    assert file["bytes"] == path.stat().st_size
    assert file["bayesian_weights"] == len(bnn.posterior.mean())
    assert config.decode(file["method"]) == bnn.method
    assert (file["rule"], file["trained_rule"]) == (bnn.rule, bnn.trained_rule)
    assert sum(part["numbers"] for part in file["parts"].values()) == sum(t.numel() for t in bnn.state_dict().values())
    assert f"{file['bytes']:,} bytes" in cli("info", path).out


def test_the_file_name_is_printed_in_one_line(cli: Cli, digits: Path) -> None:
    assert str(digits / "model.safetensors") in cli("info", digits / "model.safetensors").out


def test_an_unfinished_run_is_described(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: Loop) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "run", stopped)
    cli("fit", "mean-field", *TOY, "--out", "run", code=130)
    assert re.search(r"^   status +stopped", cli("info", "run").out, re.MULTILINE)
    assert list(json.loads(cli("info", "run", "--json").out)) == ["run"]
