"""Writes docs/results.md from the figures under experiments/results, so that no number is copied by hand.

python experiments/tables.py
"""

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEAD = """# Results

Each table is one command, with one seed; choices were made on a held-out part of the training data, and the last step's
model is scored. ECE has 15 equal-width bins. `s/epoch` is the median; the methods run one after the other, on a machine
whose speed wavers: [benchmarks.md](benchmarks.md) compares epochs that are taken in turns. This page is written by
`python experiments/tables.py`.
"""
COLUMNS = "| method | accuracy | NLL | ECE | Brier | trained numbers | MB on disk | s/epoch | ms to predict 1000 |"


def table(record: dict[str, Any], title: str) -> str:
    """Lay out one comparison."""
    machine, recipe, examples = record["machine"], record["recipe"], record["results"][0]["scores"]["examples"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    lines = [
        f"## {title}\n",
        f"`{record['command']}`\n",
        f"{where}, torch {record['versions']['torch']}, seed {record['seed']}, {recipe['epochs']} epochs of batches of "
        f"{recipe['batch_size']}, temperature {recipe['temperature']}, {examples} test examples.\n",
        COLUMNS,
        "|---|" + "---:|" * (COLUMNS.count("|") - 2),
    ]
    for result in record["results"]:
        scores, costs = result["scores"], result["costs"]
        cells = [
            f"`{result['name']}`",
            f"{scores['accuracy']:.2%}",
            f"{scores['nll']:.4f}",
            f"{scores['ece']:.4f}",
            f"{scores['brier']:.4f}",
            f"{costs['trainable']:,}",
            f"{costs['file_bytes'] / 1e6:.1f}",
            f"{statistics.median(costs['epoch_seconds']):.2f}",
            f"{scores['predict_ms_per_1000']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parts = [HEAD]
    for path in sorted((HERE / "results").glob("*.json")):
        record = json.loads(path.read_text())
        parts.append(table(record, f"{record['model']['name']} on {record['source']['name']}"))
    (HERE.parent / "docs" / "results.md").write_text("\n".join(parts) + "\n")
