"""The progress of a training: what stays in a narrow terminal, and what is said about its length and its posterior."""

import io
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import rich.console
from training_cases import clusters, mlp, task

import leanbayes as lb
from leanbayes.training import journal, read_record
from leanbayes.training.posterior_check import posterior_problem
from leanbayes.training.progress import Progress

ENGINES: tuple[Literal["backprop", "ivon"], ...] = ("backprop", "ivon")
VALUES = {"loss": 0.1824, "kl": 195_000.0, "sigma": 0.00245, "examples_per_second": 175.0}


def bar(width: int, monkeypatch: pytest.MonkeyPatch, title: str = "WeightSharing") -> str:
    """Return the last line that is drawn in a terminal of this width."""
    output, original = io.StringIO(), rich.console.Console
    monkeypatch.setattr(
        rich.console,
        "Console",
        lambda **_: original(file=output, force_terminal=True, width=width, legacy_windows=False),
    )
    with Progress(title, 12_640, True, None) as progress:
        progress.log({"accuracy": 0.98}, "validation")
        progress.log(VALUES)
        for _ in range(40):
            progress.advance()
    monkeypatch.undo()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    return [line for line in re.split(r"[\r\n]", plain) if line.strip()][-1]


@pytest.mark.parametrize("title", ["WeightSharing", "Evaluating mean-field:rule=flipout,prior.scale=0.05, seed 0"])
def test_in_80_columns_bar_step_and_time_stay_and_values_go(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = bar(80, monkeypatch, title)
    assert len(line) <= 80
    assert "━" * 10 in line
    assert "40/12640" in line
    assert re.search(r"[0-9-]+:[0-9-]{2}", line)
    assert "examples/s" not in line


def test_in_a_wide_terminal_all_values_are_shown_and_held_out_accuracy_is_called_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = bar(160, monkeypatch)
    assert "loss 0.1824  KL 1.95e+05  σ 0.00245  held-out accuracy 98.00%  examples/s 175" in line


def test_a_long_training_says_so_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, said in ((1e9, False), (0.0, True)):
        monkeypatch.setattr(journal, "_LONG", limit)
        lb.fit(mlp(), lb.Deterministic(), task(clusters()), epochs=2, batch_size=16, device="cpu")
        shown = " ".join(capsys.readouterr().err.split())
        assert ("This training takes about" in shown) == said
    assert "(16 steps of" in shown


@pytest.mark.parametrize(
    ("temperature", "epochs", "expected"),
    [(1e-7, 20, "nearly a point"), (1.0, 20, ""), (1000.0, 20, "hardly better than a constant")],
)
def test_a_posterior_that_collapsed_or_drowned_the_likelihood_is_reported(
    temperature: float, epochs: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: Any = {"epochs": epochs, "batch_size": 16, "lr": 0.01, "scale_lr": 0.1, "temperature_warmup": 0.0}
    lb.fit(
        mlp(), lb.MeanField(init_std=1e-3 if temperature < 1 else 0.1), task(clusters()), out=tmp_path, device="cpu",
        temperature=temperature, evaluate_every=0, **settings,
    )  # fmt: skip
    shown = " ".join(capsys.readouterr().err.split())
    scores = read_record(tmp_path)["scores"]["validation"]
    said = [text for text in ("nearly a point", "drown", "hardly better than a constant") if text in shown]
    assert (expected in shown) if expected else not said, (said, scores)


def test_predictions_that_are_less_certain_than_right_are_reported() -> None:
    data = task(clusters())
    scores = {"nll": 0.5, "entropy": 0.9, "mutual_information": 0.4, "accuracy": 0.93}
    said = posterior_problem(scores, lb.MeanField(), 1.0, data)
    assert said is not None
    assert "drowns the likelihood" in said
    assert "temperature below 1" in said
    assert posterior_problem({**scores, "entropy": 0.5}, lb.MeanField(), 1.0, data) is None  # as certain as right
    assert posterior_problem(scores, lb.Deterministic(), 1.0, data) is None


def test_a_regression_is_checked_too() -> None:
    data = lb.data.load("toy")
    std = data.target_std[0]
    healthy = {"rmse": 0.3 * std, "epistemic_std": 0.1 * std, "nll": 1.0}
    assert posterior_problem(healthy, lb.MeanField(), 0.1, data) is None
    assert "nearly a point" in (
        posterior_problem({**healthy, "epistemic_std": 1e-3 * std}, lb.MeanField(), 0.1, data) or ""
    )
    assert "RMSE" in (posterior_problem({**healthy, "rmse": 0.99 * std}, lb.MeanField(), 0.1, data) or "")


def test_the_remedy_of_a_point_fits_the_engine() -> None:
    scores = {"nll": 0.1, "entropy": 0.2, "mutual_information": 1e-5, "accuracy": 0.97}
    said = [posterior_problem(scores, lb.MeanField(engine=engine), 1.0, task(clusters())) for engine in ENGINES]
    assert ["hess_init" in (text or "") for text in said] == [engine == "ivon" for engine in ENGINES]
    assert all("temperature above 1" in (text or "") for text in said)
