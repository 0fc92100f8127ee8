"""The examples run as they are, and what they print is so."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def printed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> str:
    """What the example that a test is named after prints."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{request.node.name.removeprefix('test_')}.py"), run_name="__main__")
    return capsys.readouterr().out


def numbers(text: str, before: str) -> list[float]:
    """The numbers that follow some words."""
    return [float(number) for number in re.findall(re.escape(before) + r"\s*(-?[\d.]+(?:e-?\d+)?)", text)]


def test_own_loop(printed: str) -> None:
    (right,) = re.findall(r"([\d.]+)% of 599 digits are right", printed)
    assert float(right) > 95
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    (sure,), (unsure,) = numbers(printed, "where right:"), numbers(printed, "where wrong:")
    assert sure < unsure


def test_transformers_model(printed: str) -> None:
    assert "weights in 14 tensors are Bayesian" in printed  # patches, 2 × (query, key, value, output, 2 of MLP), head
    everything, surest = (float(share) for share in re.findall(r"([\d.]+)% of", printed))
    assert 90 < everything < surest


def test_regression(printed: str) -> None:
    rows = [[float(cell) for cell in line.removesuffix("no data here").split()] for line in printed.splitlines()[1:]]
    noises, epistemic = [], []
    for x, true_mean, mean, true_noise, aleatoric, spread in rows:
        epistemic.append(spread)
        if abs(x) < 2:
            assert mean == pytest.approx(true_mean, abs=0.1)
            assert aleatoric == pytest.approx(true_noise, abs=0.1)
            noises.append(aleatoric)
    assert [row[0] for row in rows] == [-4, -1.5, 0, 1.5, 4]
    assert noises == sorted(noises)
    assert min(epistemic[0], epistemic[-1]) > 3 * max(epistemic[1:-1])


def test_compress_and_ship(printed: str) -> None:
    (dense,), (compact,) = numbers(printed, "dense model:"), numbers(printed, "compact file:")
    assert compact < 0.1 * dense
    before, after, shipped = (float(share) for share in re.findall(r"([\d.]+)% right", printed))
    assert after > before - 3
    assert after == shipped > 90
    assert max(numbers(printed, "to torch:")) < 1e-4


def test_never_seen(printed: str) -> None:
    entropies, (mutual,) = numbers(printed, "entropy:"), numbers(printed, "mutual information:")
    assert len(entropies) == 2
    assert min(*entropies, mutual) > 0.85
    assert min(numbers(printed, "are turned away,")) > 30


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        name.removeprefix("test_") for name in globals() if name.startswith("test_") and "every" not in name
    }
