"""`lb.fit(shard=True)` trains a sharded model, and any number of processes can resume it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import (
    assert_equal_models,
    clusters,
    conv,
    finish,
    mlp,
    run_conv,
    run_mlp,
    start,
    stopped_at,
    stripes,
    task,
    together,
)

import leanbayes as lb
from leanbayes.training import read_record

METHODS: dict[str, Any] = {
    "SSVI": lb.SSVI(0.5, interval=3, drop=0.5, engine="ivon"),
    "PBN": lb.PBN(0.3),  # which trains a plain network first
}
SETTINGS: dict[str, Any] = {"shard": True, "checkpoint_steps": 4, "log_every": 2, "clip": 1.0}


def run_stopped(step: int, method: lb.Method, out: Path) -> None:
    with stopped_at(step):
        run_mlp(method, out, **SETTINGS)


@pytest.mark.parametrize("method", METHODS)
def test_a_sharded_run_is_resumed_by_another_number_of_processes(method: str, tmp_path: Path) -> None:
    """Two processes are stopped between checkpoints, and one process continues as if it had trained alone."""
    stopped, alone, chosen = tmp_path / "stopped", tmp_path / "alone", METHODS[method]
    assert [finish(process) for process in together(run_stopped, 2, 25, chosen, stopped)] == [0, 0]
    assert [path.name for path in (stopped / "checkpoints").iterdir()]
    assert not (stopped / "model.safetensors").exists()
    trained = [start(run_mlp, chosen, out, **SETTINGS) for out in (stopped, alone)]
    assert [finish(process) for process in trained] == [0, 0]
    found, expected = (lb.load(folder / "model.safetensors", mlp()) for folder in (stopped, alone))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    one, other = (read_record(folder) for folder in (stopped, alone))
    assert [entry["step"] for entry in one["history"]] == [entry["step"] for entry in other["history"]]
    for name in ("loss", "kl", "sigma"):
        for first, second in zip(one["history"], other["history"], strict=True):
            assert first.get(name, 0) == pytest.approx(second.get(name, 0), rel=1e-4)  # a plain network has no KL
    assert one["scores"]["validation"]["nll"] == pytest.approx(other["scores"]["validation"]["nll"], rel=1e-3)
    assert one["scores"]["validation"]["accuracy"] > 0.6
    again = run_mlp(chosen, stopped, **SETTINGS)  # a finished run is loaded whole
    assert_equal_models(again, found)


def test_a_sharded_network_with_batch_norm_trains_in_bf16(tmp_path: Path) -> None:
    processes = together(run_conv, 2, "adamw", tmp_path / "run", shard=True, precision="bf16", epochs=15, lr=0.02)
    assert [finish(process) for process in processes] == [0, 0]
    x, y = stripes()[:]
    assert (lb.load(tmp_path / "run" / "model.safetensors", conv()).predict(x).label == y).float().mean() > 0.5


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        (lb.MeanField(), {"compile": True}, "compile=True"),
        (lb.MeanField(), {"average": 0.99}, "average=0.99"),
        (lb.MeanField(), {"samples": 2}, "samples=2"),
        (lb.Deterministic(), {}, "no Bayesian weights"),
        (lb.VDP(), {}, "does not work with a sharded posterior"),
    ],
)
def test_what_a_sharded_run_does_not_support_is_refused(method: Any, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=reason):
        lb.fit(mlp(), method, task(clusters()), epochs=2, device="cpu", progress=False, shard=True, **settings)
    assert not torch.distributed.is_initialized()
