"""Tests of stored results: files of earlier versions are read, and the pages match the programs."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return runpy.run_path(str(ROOT / "experiments" / "stored.py"))


def test_former_names_are_replaced(stored: dict[str, Any], tmp_path: Path) -> None:
    record = {
        "command": "leanbayes compare --optimiser sgd --look.shifts noise --method weight-sharing:dissolve=neighbours",
        "look": {"type": "Look", "samples": None},
        "recipe": {"optimiser": "sgd"},
        "method": {"type": "SSVI", "draws": 3, "samples": 5},
        "results": [{"way": "30 draws", "figures": {"nll": 0.2}, "test": {"draws": {"nll": 0.1}}}],
        "figures": ["plot"],
        "scores": {"100 draws": {}},
    }
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert stored["read"](tmp_path / "record.json") == {
        "command": "leanbayes compare --optimizer sgd --evaluation.shifts noise "
        "--method weight-sharing:dissolve=neighbors",
        "evaluation": {"type": "EvaluationSettings", "samples": None},
        "recipe": {"optimizer": "sgd"},
        "method": {"type": "SSVI", "addition_samples": 3, "samples": 5},
        "results": [{"way": "30 samples", "metrics": {"nll": 0.2}, "test": {"samples": {"nll": 0.1}}}],
        "figures": ["plot"],
        "scores": {"100 samples": {}},
    }


def test_current_names_are_unchanged(stored: dict[str, Any], tmp_path: Path) -> None:
    record = {"evaluation": {"samples": 3}, "metrics": {"nll": 0.1}, "way": "30 samples", "count": [1, None, 2.5]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert stored["read"](tmp_path / "record.json") == record
    assert stored["read"](tmp_path / "missing.json") == {}
