"""--start: a training that starts from the model of another run."""

import json
from pathlib import Path

import pytest
import torch
from cli_cases import EVALUATION, TOY, Cli, load_run

import leanbayes as lb

NO_LEARNING = (*TOY, "--lr", 1e-12, "--scale-lr", 1e-12, "--weight-decay", 0)


def test_mean_and_std_are_those_of_the_run(cli: Cli, toy: Path, tmp_path: Path) -> None:
    cli("fit", "mean-field", *NO_LEARNING, "--start", toy, "--out", tmp_path / "b")
    before, after = load_run(toy).posterior, load_run(tmp_path / "b").posterior
    torch.testing.assert_close(after.mean(), before.mean())
    torch.testing.assert_close(after.variance(), before.variance())
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    assert record["config"]["start"]["method"]["type"] == "MeanField"


def test_methods_can_start_from_each_other(cli: Cli, toy: Path, tmp_path: Path) -> None:
    words = ("--method.pretrain-std", 0, "--method.components", 8, "--method.minimum", 1)
    cli("fit", "weight-sharing", *NO_LEARNING, *words, "--start", toy, "--out", tmp_path / "shared")
    shared = load_run(tmp_path / "shared").posterior.mean()
    method = lb.WeightSharing(components=8, minimum=1, pretrain_std=0)
    torch.testing.assert_close(shared, lb.bayesianize(load_run(toy), method).posterior.mean())
    assert shared.unique().numel() <= 8
    cli(
        "compare",
        "mean-field",
        "pbn:rate=1,pretrain=0",
        *NO_LEARNING,
        *EVALUATION,
        "--start",
        tmp_path / "shared",
        "--out",
        "c",
    )
    for place in Path("c").glob("*/run.json"):
        torch.testing.assert_close(load_run(place.parent).posterior.mean(), shared)


def test_a_run_with_another_start_is_another_run(cli: Cli, toy: Path, tmp_path: Path) -> None:
    cli("fit", "deterministic", *NO_LEARNING, "--out", tmp_path / "run")
    output = cli("fit", "deterministic", *NO_LEARNING, "--start", toy, "--out", tmp_path / "run", code=1)
    assert "holds a run with start" in output.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model-options", "hidden=[4]"), "has the network"),
        (("--validation-share", 0.2), "use --validation-share 0.1"),
        (("--start", "nowhere"), "nowhere"),
    ],
)
def test_an_unsuitable_start_is_refused(
    cli: Cli, toy: Path, tmp_path: Path, words: tuple[object, ...], message: str
) -> None:
    output = cli("fit", "mean-field", *NO_LEARNING, "--start", toy, *words, "--out", tmp_path / "run", code=1)
    assert message in output.err
    assert not (tmp_path / "run").exists()
