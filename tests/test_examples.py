"""The examples run unchanged, and their output is correct."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def printed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> str:
    """Run the example with the name of the test, and return its output."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{request.node.name.removeprefix('test_')}.py"), run_name="__main__")
    return capsys.readouterr().out


def numbers(text: str, before: str) -> list[float]:
    """Return the numbers that follow some words."""
    return [float(number) for number in re.findall(re.escape(before) + r"\s*(-?[\d.]+(?:e-?\d+)?)", text)]


def test_own_loop(printed: str) -> None:
    (accuracy,) = re.findall(r"Test accuracy: ([\d.]+)% of 599 digits", printed)
    assert float(accuracy) > 95
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    (correct,), (wrong,) = numbers(printed, "of correct predictions:"), numbers(printed, "of wrong predictions:")
    assert correct < wrong


def test_transformers_model(printed: str) -> None:
    assert "in 14 tensors" in printed  # patches, 2 × (query, key, value, output, 2 of MLP), head
    (everything,), (most_certain,) = numbers(printed, "all 599 digits:"), numbers(printed, "with the lowest entropy:")
    assert 90 < everything < most_certain


def test_regression(printed: str) -> None:
    rows = [[float(cell) for cell in line.removesuffix("no data here").split()] for line in printed.splitlines()[1:]]
    noises, epistemic = [], []
    for x, true_mean, mean, true_noise, aleatoric, epistemic_std in rows:
        epistemic.append(epistemic_std)
        if abs(x) < 2:
            assert mean == pytest.approx(true_mean, abs=0.1)
            assert aleatoric == pytest.approx(true_noise, abs=0.1)
            noises.append(aleatoric)
    assert [row[0] for row in rows] == [-4, -1.5, 0, 1.5, 4]
    assert noises == sorted(noises)
    assert min(epistemic[0], epistemic[-1]) > 3 * max(epistemic[1:-1])


def test_compress_and_ship(printed: str) -> None:
    (dense,), (compact,) = numbers(printed, "Dense file:"), numbers(printed, "Compact file:")
    assert compact < 0.1 * dense
    before, after, shipped = (float(share) for share in re.findall(r"([\d.]+)% accuracy", printed))
    assert after > before - 3
    assert after == shipped > 90
    assert max(numbers(printed, "and ONNX Runtime:")) < 1e-4


def test_ood_detection(printed: str) -> None:
    entropies, (mutual,) = numbers(printed, "entropy:"), numbers(printed, "mutual information:")
    assert len(entropies) == 2
    assert min(*entropies, mutual) > 0.85
    assert min(numbers(printed, "5 % of the digits:")) > 30


def test_active_learning(printed: str) -> None:
    rows = {line[:17].strip(): [float(n) for n in re.findall(r"([\d.]+) %", line)] for line in printed.splitlines()[2:]}
    assert {*rows} == {"random", "entropy", "joint information"}
    assert all(len(row) == 5 for row in rows.values())
    for way in ("entropy", "joint information"):
        assert rows[way][0] == rows["random"][0]  # the same first labels
        assert rows[way][-1] > rows["random"][-1] + 5


def test_continual_learning(printed: str) -> None:
    rows = {line[:18].strip(): [float(n) for n in re.findall(r"([\d.]+) %", line)] for line in printed.splitlines()[2:]}
    ours = rows.pop("posterior as prior")
    assert {*rows} == {"plain network", "zero-mean prior"}
    for first, second, mean in rows.values():
        assert ours[0] > first + 10
        assert ours[1] > second - 10
        assert ours[2] > mean + 4


def test_language_model(printed: str) -> None:
    record = json.loads(Path("language_model.json").read_text())
    rows, plain = record["rows"], record["rows"]["plain"]
    assert {*rows} == {"plain", *(f"mean-field{e} {way}" for e in ("", ", ivon") for way in ("10 samples", "one pass"))}
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", printed)]
    assert losses[-1] < losses[0] - 2
    assert rows["mean-field 10 samples"]["nll"] < plain["nll"]  # which overfits
    assert rows["mean-field one pass"]["nll"] == pytest.approx(rows["mean-field 10 samples"]["nll"], abs=0.03)
    assert plain["auroc_mutual_information"] == 0.5  # it has none
    assert all(row["auroc_mutual_information"] > 0.55 for name, row in rows.items() if name != "plain")
    assert record["adapter_bytes"] < 300_000
    assert "continued:" in printed


def test_transformers_trainer(printed: str) -> None:
    losses = numbers(printed, "NLL per token")
    assert len(losses) == 2
    assert max(losses) < 1.0  # log 11 is 2.4
    assert printed.count("continues with") == 2


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*treespec", "ignore:.*LeafSpec")
def test_lightning_trainer(printed: str) -> None:
    accuracies = numbers(printed, "accuracy")
    assert len(accuracies) == 2
    assert min(accuracies) > 0.94


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        name.removeprefix("test_") for name in globals() if name.startswith("test_") and "every" not in name
    }


def test_sharded(printed: str) -> None:
    (accuracy,) = re.findall(r"Test accuracy: ([\d.]+)% of 599 digits", printed)
    assert float(accuracy) > 90
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_sharded_fit(printed: str) -> None:
    assert "units over 1 processes" in printed
    (accuracy,) = re.findall(r"Test accuracy: ([\d.]+)% of 599 digits", printed)
    assert float(accuracy) > 90
