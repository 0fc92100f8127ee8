"""The table of docs/guide/language_models.md."""

import statistics
from typing import Any

COLUMNS = {
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
    "auroc_nll": ("AUROC by NLL", "{:.1%}"),
    "auroc_entropy": ("by entropy", "{:.1%}"),
    "auroc_mutual_information": ("by mutual information", "{:.1%}"),
    "milliseconds": ("ms", "{:.1f}"),
}


def language_table(record: dict[str, Any]) -> str:
    """Format the scores of adapters as means over seeds, with the time of a prediction."""
    settings, seeds = record["settings"], record["seeds"]
    where = ", ".join(record["machine"]["gpus"]) or f"{record['machine']['processor']}, CPU"
    compiled = record.get("compiled", {})
    names = [name for name, _ in COLUMNS.values()] + ["ms, compiled"] * bool(compiled)
    lines = [
        f"Adapters of a GPT with {record['weights'] / 1e6:.1f} million weights, trained on {settings['pages']} windows "
        f"of {settings['length']} bytes; means over {len(seeds)} seed{'s' * (len(seeds) > 1)}. NLL and ECE are per "
        f"byte of {settings['test']} other windows. AUROC tells these from {settings['unknown']} windows of C++. Times "
        f"are those of 16 windows. The file of an adapter has {record['adapter_bytes'] / 1e6:.2f} MB. "
        f"`{record['command']}` ({where}, torch {record['versions']['torch']})\n",
        f"| adapter | {' | '.join(names)} |",
        "|---|" + "---:|" * len(names),
    ]
    for name in seeds[0]:
        means = {key: statistics.fmean(one[name][key] for one in seeds) for key in COLUMNS}
        cells = [form.format(means[key]) for key, (_, form) in COLUMNS.items()]
        if compiled:
            cells.append(f"{compiled[name]:.1f}" if isinstance(compiled.get(name), float) else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
