"""Two processes train as one process with two parts per batch, and each can resume the run of the other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import (
    Staged,
    Watched,
    WithUnused,
    clusters,
    conv,
    curve,
    finish,
    mlp,
    mlp_for,
    run_conv,
    run_mlp,
    run_signaled,
    run_unused,
    score_share,
    together,
    without_nan,
)

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.data import Batches
from leanbayes.evaluation import evaluate
from leanbayes.methods import METHODS
from leanbayes.networks import build
from leanbayes.training import read_record

MODEL = "model.safetensors"


def run_by_two(function: Any, *args: Any, **kwargs: Any) -> None:
    assert [finish(process) for process in together(function, 2, *args, **kwargs)] == [0, 0]


def close_runs(
    found: Path, expected: Path, network: torch.nn.Module, tolerance: float = 1e-4, scores: bool = True
) -> None:
    """Check that two runs have about the same history, scores and weights."""
    one, other = read_record(found), read_record(expected)
    assert [entry["step"] for entry in one["history"]] == [entry["step"] for entry in other["history"]]
    for mine, theirs in zip(curve(one), curve(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if scores or name != "validation":
                assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    if scores:
        final = [without_nan(record["scores"]["validation"]) for record in (one, other)]
        assert final[0] == pytest.approx(final[1], rel=tolerance, abs=tolerance)
    first, second = (lb.load(folder / MODEL, network).state_dict() for folder in (found, expected))
    for name, tensor in first.items():
        if name != "noise.state":  # it counts the samples of one process
            torch.testing.assert_close(tensor, second[name], rtol=tolerance, atol=tolerance, msg=name)


# -- the same training ------------------------------------------------------------------------------------------------

ALL = {
    **METHODS,
    "csgmcmc": lb.CyclicalSGMCMC(cycles=2, per_cycle=1),
    "aeb": lb.AEB(snapshots=2),
    "mbnn": lb.MBNN(snapshots=2, interval=100),  # a move sees the last part of a batch
    "staged": Staged(),
}


@pytest.mark.parametrize("method", ALL.values(), ids=ALL)
def test_two_processes_train_as_one_with_two_parts(method: lb.Method, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "optimizer": "sgd", "lr": 0.05, "clip": 1.0}
    run_by_two(run_mlp, method, tmp_path / "two", **settings)
    run_mlp(method, tmp_path / "one", accumulate=2, **settings)
    # With separate noise per example, a prediction depends on how the held-out examples are split into batches.
    close_runs(
        tmp_path / "two",
        tmp_path / "one",
        mlp_for(method),
        scores=not isinstance(method, (lb.MCDropout, lb.SNGP, lb.SparseVD, lb.SBP, lb.VariationalDropout)),
    )


def test_batch_norm_dropout_and_augmentation_do_not_depend_on_the_processes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.05, "evaluate_every": 0}
    run_by_two(run_conv, "sgd", tmp_path / "two", accumulate=2, **settings)
    run_conv("sgd", tmp_path / "one", accumulate=4, **settings)
    close_runs(tmp_path / "two", tmp_path / "one", conv(), 1e-3)


def test_several_samples_do_not_depend_on_the_processes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "optimizer": "sgd", "lr": 0.05, "samples": 2}
    run_by_two(run_mlp, lb.MeanField(), tmp_path / "two", **settings)
    run_mlp(lb.MeanField(), tmp_path / "one", accumulate=2, **settings)
    close_runs(tmp_path / "two", tmp_path / "one", mlp())


def test_each_process_has_its_own_noise_and_its_own_half_of_a_batch(tmp_path: Path) -> None:
    run_by_two(run_mlp, Watched(init_std=0.5, folder=str(tmp_path)), None, epochs=1)
    for step in range(8):
        (loss0, mean0, size0), (loss1, mean1, size1) = (torch.load(tmp_path / f"{r}-{step}.pt") for r in (0, 1))
        assert loss0 != loss1
        assert torch.equal(mean0, mean1)
        torch.testing.assert_close(mean0, (loss0 + loss1) / 2)
        assert size0 == size1 == 8


# -- resuming ---------------------------------------------------------------------------------------------------------


def kill_after(steps: int, function: Any, *args: Any, **kwargs: Any) -> None:
    """Let two processes train until there is a checkpoint of that many steps, and kill both."""
    out = next(arg for arg in args if isinstance(arg, Path))
    processes = together(function, 2, *args, **kwargs)
    while all(process.is_alive() for process in processes) and not any(
        path.name >= f"step-{steps:09d}" for path in out.glob("checkpoints/*")
    ):
        time.sleep(0.001)
    for process in processes:
        process.kill()
    assert [finish(process) for process in processes] == [-9, -9]


def test_two_killed_processes_resume_to_the_same_bytes(tmp_path: Path) -> None:
    run_by_two(run_mlp, lb.MeanField(), tmp_path / "whole")
    for steps in (4, 11):
        kill_after(steps, run_mlp, lb.MeanField(), tmp_path / "killed", checkpoint_steps=3)
    run_by_two(run_mlp, lb.MeanField(), tmp_path / "killed", checkpoint_steps=3)
    assert (tmp_path / "killed" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    for killed, whole in zip(*(curve(read_record(tmp_path / name)) for name in ("killed", "whole")), strict=True):
        assert killed == {**whole, "loss": pytest.approx(whole["loss"], rel=1e-12)}  # sums in another order


def test_two_signaled_processes_stop_together_with_a_checkpoint(tmp_path: Path) -> None:
    run_by_two(run_mlp, lb.MeanField(), tmp_path / "whole")
    run_by_two(run_signaled, signal.SIGTERM, 6, tmp_path / "stopped")
    assert "Stopped at step 8" in (tmp_path / "stopped" / "error.txt").read_text()  # the next log entry
    assert read_record(tmp_path / "stopped")["status"] == "stopped"
    run_by_two(run_mlp, lb.MeanField(), tmp_path / "stopped")
    assert (tmp_path / "stopped" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()


def test_unused_parameters_can_be_allowed(tmp_path: Path) -> None:
    run_by_two(run_unused, tmp_path / "two", unused_parameters=True, optimizer="sgd", lr=0.05)
    run_unused(tmp_path / "one", accumulate=2, optimizer="sgd", lr=0.05)
    close_runs(tmp_path / "two", tmp_path / "one", WithUnused())


def test_one_process_resumes_the_run_of_two(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}
    run_mlp(lb.MeanField(), tmp_path / "whole", accumulate=2, **settings)
    kill_after(9, run_mlp, lb.MeanField(), tmp_path / "killed", checkpoint_steps=3, **settings)
    run_mlp(lb.MeanField(), tmp_path / "killed", accumulate=2, **settings)
    close_runs(tmp_path / "killed", tmp_path / "whole", mlp())


def test_a_finished_run_of_two_is_loaded_by_one(tmp_path: Path) -> None:
    run_by_two(run_mlp, lb.MeanField(), tmp_path, epochs=1)
    before = (tmp_path / "run.json").read_bytes()
    run_mlp(lb.MeanField(), tmp_path, epochs=1)
    run_by_two(run_mlp, lb.MeanField(), tmp_path, epochs=1)
    assert (tmp_path / "run.json").read_bytes() == before


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [33, 15, 1])
def test_two_processes_score_a_model_as_one_does(examples: int, tmp_path: Path) -> None:
    bnn = run_mlp(lb.MeanField(), None, epochs=1)
    lb.save(bnn, tmp_path / MODEL)
    expected = evaluate(bnn, Batches(torch.utils.data.TensorDataset(*clusters(examples)[:]), 7, shuffle=False).epoch())
    processes = together(score_share, 2, tmp_path / MODEL, examples, tmp_path)
    assert [finish(process) for process in processes] == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True)


# -- the command ------------------------------------------------------------------------------------------------------


def test_torchrun_takes_the_same_command(tmp_path: Path) -> None:
    def words(out: Path) -> list[str]:
        return ["fit", "mean-field", "--data", "digits", "--model", "mlp", "--epochs", "2", "--optimizer", "sgd",
                "--lr", "0.05", "--device", "cpu", "--quiet", "--out", str(out)]  # fmt: skip

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "leanbayes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, *words(tmp_path / "two")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert main([*words(tmp_path / "one"), "--accumulate", "2"]) == 0
    close_runs(tmp_path / "two", tmp_path / "one", build("mlp", (1, 8, 8), 10), 1e-3)
    assert done.stdout.count("The run is in") == 1
