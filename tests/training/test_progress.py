"""The progress of a training: what stays in a narrow terminal, and what is said about its length and its posterior."""

import contextlib
import copy
import io
import os
import random
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import rich.console
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset
from training_cases import Jittered, clusters, conv, finish, mlp, stripes, task, together

import leanbayes as lb
from leanbayes.data import from_datasets
from leanbayes.training import journal, read_record
from leanbayes.training.posterior_check import posterior_problem
from leanbayes.training.progress import Progress

ENGINES: tuple[Literal["backprop", "ivon"], ...] = ("backprop", "ivon")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_long_training_says_so_before_its_first_step(
    device: Literal["cpu", "cuda"], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, said in ((1e9, False), (0.0, True)):
        monkeypatch.setattr(journal, "_LONG", limit)
        network, before = mlp(), list[str]()
        taken = register_optimizer_step_pre_hook(lambda *_, before=before: before.append(capsys.readouterr().err))
        lb.fit(network, lb.MeanField(), task(clusters()), epochs=2, batch_size=16, device=device)
        taken.remove()
        first, *later = (" ".join(text.split()) for text in [*before, capsys.readouterr().err])
        assert ("This training takes about" in first) == said
        assert not any("This training takes about" in text for text in later)  # once
    assert "(16 steps of" in first


class Watching(nn.Module):
    """A network that waits for all processes in each pass, as one with SyncBatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.distributed.barrier()
        return self.inner(x)


def train_together(folder: Path) -> None:
    """Train in one of several processes, and write what was said before the first step."""
    journal._LONG = 0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        before = list[str]()
        taken = register_optimizer_step_pre_hook(lambda *_: before.append(said.getvalue()))
        lb.fit(Watching(), lb.MeanField(), task(clusters()), epochs=1, batch_size=16, device="cpu", evaluate_every=0)
        taken.remove()
    (folder / os.environ["RANK"]).write_text(before[0])


def test_several_processes_say_so_before_their_first_step(tmp_path: Path) -> None:
    assert [finish(process) for process in together(train_together, 2, tmp_path)] == [0, 0]
    first, second = (" ".join((tmp_path / rank).read_text().split()) for rank in "01")
    assert "This training takes about" in first
    assert "(8 steps of" in first
    assert second == ""


@pytest.mark.parametrize("method", [lb.Deterministic(), lb.MeanField(), lb.PBN(), lb.Ensemble(2)], ids=repr)
def test_the_estimate_of_the_time_changes_nothing(method: lb.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LONG", 0.0)
    settings: Any = {"epochs": 2, "batch_size": 16, "device": "cpu", "evaluate_every": 0}
    found = []
    for progress in (False, True):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        network = conv()
        weights = copy.deepcopy(network.state_dict())
        bnn = lb.fit(network, method, from_datasets(Jittered(stripes()), outputs=4), progress=progress, **settings)
        after = (torch.rand(1).item(), random.random(), np.random.rand())
        found.append((bnn.state_dict(), after))
        assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    (first, after), (second, after_estimate) = found
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert after == after_estimate


def test_a_loss_that_cannot_be_computed_is_reported_by_the_training() -> None:
    with pytest.raises(lb.LeanBayesError, match="label") as plain:
        lb.fit(mlp(), lb.MeanField(), task(TensorDataset(torch.randn(96, 6), torch.full((96,), 9))), progress=False)
    with pytest.raises(lb.LeanBayesError, match="label") as estimated:
        lb.fit(mlp(), lb.MeanField(), task(TensorDataset(torch.randn(96, 6), torch.full((96,), 9))))
    assert str(plain.value) == str(estimated.value)


@pytest.mark.parametrize(
    ("temperature", "epochs", "expected"),
    [(1e-7, 20, "nearly a point"), (1.0, 20, ""), (1000.0, 20, "hardly learned anything")],
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
    said = [text for text in ("nearly a point", "drown", "hardly learned anything") if text in shown]
    assert (expected in shown) if expected else not said, (said, scores)


def test_a_collapsed_posterior_is_logged_if_the_progress_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    lb.fit(mlp(), lb.MeanField(init_std=1e-3), task(clusters()), epochs=2, device="cpu", progress=False)
    (record,) = [record for record in caplog.records if record.name == "leanbayes"]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("MeanField: Samples of the weights hardly disagree")


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
    said = posterior_problem(
        {"nll": 4.08, "mutual_information": 0.0, "entropy": 0.1}, lb.MeanField(), 1.0, task(clusters())
    )
    assert "held-out NLL 4.08" in (said or "")
    assert "lb.Deterministic" in (said or "")
    assert "RMSE" in (posterior_problem({**healthy, "rmse": 0.99 * std}, lb.MeanField(), 0.1, data) or "")


def test_the_remedy_of_a_point_fits_the_engine() -> None:
    scores = {"nll": 0.1, "entropy": 0.2, "mutual_information": 1e-5, "accuracy": 0.97}
    said = [posterior_problem(scores, lb.MeanField(engine=engine), 1.0, task(clusters())) for engine in ENGINES]
    assert ["hess_init" in (text or "") for text in said] == [engine == "ivon" for engine in ENGINES]
    assert all("temperature above 1" in (text or "") for text in said)
