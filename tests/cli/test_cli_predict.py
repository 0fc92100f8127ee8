"""`leanbayes predict`: images and rows of tables."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import RANDOM, Cli, load_run, write_image
from PIL import Image

import leanbayes as lb
from leanbayes.data import ArrayDataset, load


def check_row(row: dict[str, Any], classes: int) -> None:
    assert 1 / classes <= row["probability"] <= 1
    assert -1e-6 <= row["epistemic_uncertainty"] <= row["total_uncertainty"] <= math.log(classes) + 1e-6


@pytest.mark.parametrize(
    ("name", "shape"),
    [("a.png", (8, 8)), ("a.png", (9, 30, 3)), ("a.jpg", (40, 20, 3)), ("a.jpeg", (8, 8)), ("a.png", (5, 5, 4))],
    ids=str,
)
def test_images_of_any_size_are_predicted(name: str, shape: tuple[int, ...], cli: Cli, digits: Path) -> None:
    (row,) = json.loads(cli("predict", digits, write_image(Path(name), *shape), "--json").out)
    assert row["label"] in list("0123456789")
    check_row(row, 10)


def test_predictions_equal_those_of_predict(cli: Cli, digits: Path) -> None:
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    files = [Path(f"{number}.png") for number in range(4)]
    for number, path in enumerate(files):
        Image.fromarray(data.test.x[number, 0].numpy()).save(path)
    rows = json.loads(cli("predict", digits, *files, "--json").out)
    bnn, normalize = load_run(digits), data.normalize
    assert normalize is not None
    for number, row in enumerate(rows):
        x = normalize(data.test.x[number : number + 1])
        expected = bnn.predict(x, generator=torch.Generator().manual_seed(0))
        assert isinstance(expected, lb.ClassPrediction)
        assert row["label"] == str(int(expected.label))
        assert row["probability"] == pytest.approx(expected.confidence.item(), rel=1e-5)
        assert row["total_uncertainty"] == pytest.approx(expected.entropy.item(), rel=1e-4, abs=1e-6)
        check_row(row, 10)


def test_samples_follow_the_seed(cli: Cli, digits: Path) -> None:
    path = write_image(Path("a.png"), 8, 8)
    same = {cli("predict", digits, path, "--json", "--seed", 4).out for _ in range(2)}
    assert len(same) == 1
    assert cli("predict", digits, path, "--json", "--seed", 5).out not in same
    (row,) = json.loads(cli("predict", digits, path, "--json", "--samples", 1).out)
    assert row["epistemic_uncertainty"] == pytest.approx(0, abs=1e-6)  # one sample cannot disagree with itself


def test_one_pass_needs_no_seed(cli: Cli, digits: Path) -> None:
    path = write_image(Path("a.png"), 8, 8)
    texts = {cli("predict", digits, path, "--json", "--rule", "moments", "--seed", seed).out for seed in (0, 1)}
    assert len(texts) == 1
    (row,) = json.loads(texts.pop())
    check_row(row, 10)
    assert row["epistemic_uncertainty"] > 0


def test_the_table_has_one_line_per_image(cli: Cli, digits: Path) -> None:
    files = [write_image(Path(name), 8, 8) for name in ("one.png", "two.png")]
    rows = json.loads(cli("predict", digits, *files, "--json").out)
    head, *lines = cli("predict", digits, *files).out.splitlines()
    assert head.split() == ["image", "label", "probability", "total", "epistemic", "verdict"]
    for line, row in zip(lines, rows, strict=True):
        image, label, *values = line.split()
        assert (image, label) == (row["image"], row["label"])
        shown = [f"{row[key]:.3f}" for key in ("probability", "total_uncertainty", "epistemic_uncertainty")]
        assert values == [*shown, *row["verdict"].split()]
        assert row["verdict"] in ("answer", "ask a person: unlike the training data")


def test_the_table_fits_a_terminal(cli: Cli, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = write_image(Path("a_name_that_is_not_short_at_all.png"), 8, 8)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = re.sub(r"\x1b\[[\d;]*m", "", cli("predict", digits, image).out).splitlines()
    assert max(map(len, lines)) == 80
    (row,) = json.loads(cli("predict", digits, image, "--json").out)
    assert f"{row['probability']:.3f}" in "".join(lines)  # numbers are whole
    names = "".join(line.split()[0] for line in lines if line.startswith(" ") and not line.startswith("  "))
    assert names.endswith("a_name_that_is_not_short_at_all.png")  # two names may differ only in their last characters


def test_fit_lets_predict_raise_alarms_about_unknown_inputs(cli: Cli, digits: Path) -> None:
    policy = load_run(digits).policy
    assert policy is not None
    assert policy.gate is not None
    assert policy.gate.false_alarms == 0.05
    data = load("digits")
    assert data.normalize is not None
    generator = torch.Generator().manual_seed(0)
    held_out = load_run(digits).predict(data.normalize(data.validation[:][0]), generator=generator)
    assert policy.gate.alarms(held_out.mutual_information).float().mean() <= 0.06


def test_a_folder_is_predicted_as_the_images_in_it(cli: Cli, digits: Path) -> None:
    Path("scans", "old").mkdir(parents=True)
    paths = [write_image(Path("scans") / name, 8, 8) for name in ("a.png", "b.png", "old/c.png")]
    assert cli("predict", digits, "scans", "--json").out == cli("predict", digits, *paths, "--json").out
    Path("empty").mkdir()
    assert "empty has no images" in cli("predict", digits, "empty", code=1).err


def test_a_run_without_a_policy_says_how_to_get_verdicts(cli: Cli, digits: Path) -> None:
    shutil.copytree(digits, "run")
    cli("calibrate", "run")  # removes the policy, which was fitted to other predictions
    output = cli("predict", "run", write_image(Path("a.png"), 8, 8))
    assert "verdict" not in output.out
    assert output.err == "For a verdict on each input: leanbayes decide run --false-alarms 0.05\n"


@pytest.mark.parametrize(
    "name",
    [
        "a folder with a long name/in a folder with a long name/in a folder with a long name/a.png",
        "cat[bold].png",  # it looks like markup
    ],
)
def test_file_names_are_printed_in_full(name: str, cli: Cli, digits: Path) -> None:
    assert name in cli("predict", digits, write_image(Path(name), 8, 8)).out


def test_rows_of_a_table_are_predicted_in_the_unit_of_the_target(cli: Cli) -> None:
    rows = RANDOM.normal(50, 10, (200, 2))
    table = np.column_stack([rows, 3 * rows[:, 0] - rows[:, 1] + 1000])
    np.savetxt("a.csv", table, delimiter=",")
    cli("fit", "mean-field", "--data", "a.csv", "--epochs", 60, "--quiet", "--out", "run")
    np.savetxt("new.csv", table[:5, :2], delimiter=",")
    found = json.loads(cli("predict", "run", "new.csv", "--json").out)
    assert [row["row"] for row in found] == [1, 2, 3, 4, 5]
    for row, truth in zip(found, table[:, 2], strict=False):
        assert abs(row["mean"] - truth) < 15  # the std of the targets is 32
        assert 0 < row["epistemic_std"] <= row["std"] < 32
    assert len(cli("predict", "run", "new.csv").out.splitlines()) == 7


@pytest.fixture(scope="module")
def certain(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with a policy that accepts everything, so that only what a network cannot see is refused."""
    folder = tmp_path_factory.mktemp("certain") / "run"
    shutil.copytree(digits, folder)
    bnn = load_run(folder)
    assert bnn.policy is not None
    assert bnn.policy.gate is not None
    bnn.policy = replace(bnn.policy, gate=replace(bnn.policy.gate, threshold=1e9))
    lb.save(bnn, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("size", [16, 64, 256])
def test_noise_that_shrinking_turns_into_gray_is_not_answered(size: int, cli: Cli, certain: Path) -> None:
    (row,) = json.loads(cli("predict", certain, write_image(Path("noise.png"), size, size), "--json").out)
    assert re.fullmatch(r"ask a person: \d+% of the detail is lost in 8×8 pixels", row["verdict"])


@pytest.mark.parametrize("resampling", [Image.Resampling.NEAREST, Image.Resampling.BICUBIC], ids=["nearest", "bicubic"])
def test_enlarged_digits_are_answered(resampling: Image.Resampling, cli: Cli, certain: Path) -> None:
    data = load("digits")
    assert isinstance(data.test, ArrayDataset)
    files = [Path(f"{number}.png") for number in range(8)]
    for number, path in enumerate(files):
        Image.fromarray(data.test.x[number, 0].numpy()).resize((64, 64), resampling).save(path)
    rows = json.loads(cli("predict", certain, *files, "--json").out)
    assert [row["verdict"] for row in rows] == ["answer"] * len(files)


def test_noise_is_not_answered_without_a_policy_either(cli: Cli, digits: Path) -> None:
    shutil.copytree(digits, "run")
    cli("calibrate", "run")
    noise, small = write_image(Path("noise.png"), 64, 64), write_image(Path("small.png"), 8, 8)
    first, second = json.loads(cli("predict", "run", noise, small, "--json").out)
    assert first["verdict"].startswith("ask a person")
    assert "verdict" not in second
    assert "ask a person" in cli("predict", "run", small, noise).out
