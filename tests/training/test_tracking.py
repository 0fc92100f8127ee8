"""Metrics of a training go to the caller's function and to accelerate's trackers."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker
from training_cases import clusters, mlp, task

import leanbayes as lb
from leanbayes.training import read_record


class Fake(GeneralTracker):
    """A tracker that remembers what it is given."""

    name, requires_logging_directory = "fake", False

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.entries: list[tuple[int | None, dict[str, float]]] = []
        self.closed = 0

    @property
    def tracker(self) -> list[Any]:
        return self.entries

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.entries.append((step, dict(values)))

    def finish(self) -> None:
        self.closed += 1


def train(**settings: Any) -> lb.BayesianModel:
    chosen: dict[str, Any] = {"epochs": 3, "batch_size": 32, "evaluate_every": 1, "device": "cpu", "progress": False}
    return lb.fit(mlp(), lb.MeanField(), task(clusters()), **chosen | settings)


def test_the_caller_and_trackers_get_what_the_record_has(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    fake = Fake()
    train(on_log=lambda step, values: seen.append((step, values)), log_with=fake, out=tmp_path / "run", temperature=0.1)
    assert seen == fake.entries
    *entries, (last, final) = seen
    record = read_record(tmp_path / "run")
    assert last == record["history"][-1]["step"]
    assert final == {f"final/{name}": value for name, value in record["scores"]["validation"].items()}
    assert len(entries) == len(record["history"]) == 3
    for (step, values), row in zip(entries, record["history"], strict=True):
        assert step == row["step"]
        validation = row.get("validation", {})
        assert {name for name in values if name.startswith("validation/")} == {
            f"validation/{key}" for key in validation
        }
        assert values["train/loss"] == pytest.approx(row["loss"])
        assert values["train/kl"] == pytest.approx(row["kl"])
        for name, value in validation.items():
            assert values[f"validation/{name}"] == pytest.approx(value)
    assert fake.config["recipe.epochs"] == 3
    assert fake.config["recipe.temperature"] == 0.1
    assert fake.config["method.type"] == "MeanField"
    assert all(isinstance(value, (bool, int, float, str)) for value in fake.config.values())
    assert not fake.closed  # it belongs to the caller


def test_trackers_by_name_write_and_are_closed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(log_with=["tensorboard"], out=tmp_path / "run")
    found = EventAccumulator(str(tmp_path / "run" / "leanbayes"))
    found.Reload()
    assert len(found.Scalars("train/loss")) == 3
    assert len(found.Scalars("final/nll")) == 1


def test_what_the_function_raises_stops_the_training(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(step: int, values: dict[str, float]) -> None:
        raise Enough

    with pytest.raises(Enough):
        train(on_log=stop, out=tmp_path / "run")
    assert read_record(tmp_path / "run")["status"].startswith("failed")


def test_trackers_that_cannot_log_are_refused() -> None:
    with pytest.raises(lb.LeanBayesError, match="log_with='nonsense' is not available"):
        train(log_with="nonsense")
    with pytest.raises(lb.LeanBayesError, match="out="):
        train(log_with="tensorboard")
