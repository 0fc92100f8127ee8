"""Read stored results. Files that earlier versions of these programs wrote are read under today's names."""

import json
import re
from pathlib import Path
from typing import Any

KEYS = {
    "look": "evaluation",
    "optimiser": "optimizer",
    "pretrain_spreads": "pretrain_std",
    "logit_draws": "logit_samples",
    "draws": "samples",
    "file_draws": "file_samples",
}
WORDS = {
    r"\bLook\b": "EvaluationSettings",
    r"--look\.": "--evaluation.",
    r"--beside\b": "--compare-with",
    r"--config mvit\.yaml": "--config experiments/mnist_vit_vdp.yaml",
    r"\boptimiser\b": "optimizer",
    r"\bpretrain_spreads\b": "pretrain_std",
    r"\bneighbours\b": "neighbors",
    r"\b(\d+|one)([ _])draw(s?)\b": r"\1\2sample\3",
    r"(--(?:file-)?|--ways [\w ]*|ssvi\.py )draws\b": r"\1samples",
}


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file; return an empty dict if the file is missing."""
    return current(json.loads(path.read_text())) if path.is_file() else {}


def current(value: Any) -> Any:
    """Return a stored value with today's keys and words."""
    if isinstance(value, list):
        return [current(item) for item in value]
    if isinstance(value, str):
        for former, today in WORDS.items():
            value = re.sub(former, today, value)
        return value
    if not isinstance(value, dict):
        return value
    return {_key(key, value): current(item) for key, item in value.items()}


def _key(key: str, owner: dict[str, Any]) -> str:
    if key == "draws" and owner.get("type") == "SSVI":
        return "addition_samples"
    if key == "figures" and isinstance(owner[key], dict):  # metrics; a list holds plots
        return "metrics"
    return KEYS.get(key) or current(key)


def seeds_of(record: dict[str, Any]) -> str:
    """Format the seeds of a comparison."""
    first, count = record["seed"], record.get("seeds", 1)
    return f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"
