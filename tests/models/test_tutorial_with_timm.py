"""The tutorial on a network of timm runs as it is, and what it prints is true."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_images_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = runpy.run_path(str(ROOT / "tools" / "tutorial_pages.py"))
    source = (ROOT / "docs" / "tutorials" / "images_timm.py").read_text()
    cells, names = program["run"](program["cells_of"](source), "images_timm")
    assert names["accuracy"] > 0.9
    assert names["strange"].entropy.mean() > 3 * names["prediction"].entropy.mean()
    alarms = {name: alarm.float().mean().item() for name, alarm in names["alarms"].items()}
    assert alarms["known letters"] < 0.25 < 0.6 < alarms["unknown letters"]
    assert "made without" not in program["page"](cells, "images_timm")
