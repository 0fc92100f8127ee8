"""`temperature="auto"` keeps the model with the best held-out likelihood, and continues after an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import assert_equal_models, clusters, expect, mlp, task

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.training import Recipe, fit, read_record, temperatures

SETTINGS: dict[str, Any] = {"epochs": 6, "batch_size": 32, "lr": 0.01, "seed": 0, "progress": False}


def run(out: Path | None = None, **settings: Any) -> lb.BayesianModel:
    return fit(mlp(), lb.MeanField(), task(clusters()), out=out, **{**SETTINGS, **settings})


def test_the_best_temperature_is_kept(tmp_path: Path) -> None:
    bnn = run(tmp_path, temperature="auto")
    choice = json.loads((tmp_path / "temperatures" / "choice.json").read_text())
    scores = {}
    for temperature in temperatures.TEMPERATURES:
        alone = tmp_path / "alone" / str(temperature)
        run(alone, temperature=temperature)
        scores[f"{temperature:g}"] = read_record(alone)["scores"]["validation"]["nll"]
    assert choice["held_out_nll"] == pytest.approx(scores)
    assert len(set(scores.values())) == len(scores)
    best = min(scores, key=lambda name: scores[name])
    assert f"{choice['temperature']:g}" == best
    record = read_record(tmp_path)
    assert record["config"]["recipe"]["temperature"] == choice["temperature"]
    assert record["status"] == "finished"
    assert_equal_models(bnn, lb.load(tmp_path / "model.safetensors", mlp()))
    assert_equal_models(bnn, run(temperature="auto"))  # without a folder


def test_a_stopped_search_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = torch.optim.AdamW.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    stop_at = 40  # in the second of four trainings of 24 steps
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", temperature="auto")
    assert not (tmp_path / "stopped" / "run.json").exists()
    stop_at = -1
    calls.clear()
    bnn = run(tmp_path / "stopped", temperature="auto")
    assert len(calls) <= 3 * 24  # the first training is not repeated
    calls.clear()
    assert_equal_models(bnn, run(tmp_path / "stopped", temperature="auto"))
    assert calls == []  # nor is a finished search
    assert_equal_models(bnn, run(tmp_path / "stopped", temperature="auto", overwrite=True))
    assert len(calls) == 4 * 24


def test_a_network_without_a_kl_is_trained_once(tmp_path: Path) -> None:
    fit(mlp(), lb.Deterministic(), task(clusters()), out=tmp_path, temperature="auto", **SETTINGS)
    assert not (tmp_path / "temperatures").exists()
    assert read_record(tmp_path)["config"]["recipe"]["temperature"] == 1.0


def test_the_command_line_has_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "fit",
        "mean-field",
        "--data",
        "toy",
        "--epochs",
        "2",
        "--temperature",
        "auto",
        "--quiet",
        "--device",
        "cpu",
    ]
    assert main([*words, "--out", str(out)]) == 0
    assert read_record(out)["config"]["recipe"]["temperature"] in temperatures.TEMPERATURES
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0


def test_mistakes_raise_a_clear_error(tmp_path: Path) -> None:
    expect(lambda: Recipe(temperature="warm"), "temperature='warm'")  # type: ignore[arg-type]
    expect(lambda: Recipe(temperature="auto").temperature_at(0, 10), "lb.fit")
    run(tmp_path, temperature="auto", epochs=1)
    (tmp_path / "temperatures" / "choice.json").write_text("{}")
    expect(lambda: run(tmp_path, temperature="auto", epochs=1), "choice.json is damaged")
