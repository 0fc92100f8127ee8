"""The tables of docs/guide/language_models.md."""

import statistics
from typing import Any

COLUMNS = {
    "accuracy": ("accuracy", "{:.1%}"),
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
    "nll_scaled": ("NLL with temperature", "{:.4f}"),
    "auroc_nll": ("AUROC by NLL", "{:.1%}"),
    "auroc_entropy": ("by entropy", "{:.1%}"),
    "auroc_mutual_information": ("by mutual information", "{:.1%}"),
    "milliseconds": ("ms", "{:.0f}"),
}
TRIED = ("lr", "init_std", "hess_init", "temperature")
FILES = {"plain": "plain", "mean-field 10 samples": "Bayesian"}


def language_table(record: dict[str, Any]) -> str:
    """Format the scores of adapters as means over seeds, with the time of a prediction."""
    settings, seeds, windows = record["settings"], record["seeds"], record["windows"]
    where = ", ".join(record["machine"]["gpus"]) or f"{record['machine']['processor']}, CPU"
    compiled = record.get("compiled", {})
    names = [name for name, _ in COLUMNS.values()] + ["ms, compiled"] * bool(compiled)
    known, other = (record["pretraining"]["nll"][name] for name in ("code", "prose"))
    kilobytes = [f"{seeds[0][row]['bytes'] / 1e3:.0f} kB ({kind})" for row, kind in FILES.items()]
    lines = [
        f"A GPT with {record['weights'] / 1e6:.2f} million weights, which has NLL {known:.2f} on other code and "
        f"{other:.2f} on prose, gets adapters of rank {settings['rank']} for prose: {settings['adapting']} steps on "
        f"{windows['pages']} windows of {settings['length']} bytes. Means over {len(seeds)} "
        f"seed{'s' * (len(seeds) > 1)}; NLL and ECE are per byte of {windows['test']} other windows. The NLL with "
        f"a temperature has the one that fits {windows['held out']} held-out windows. AUROC tells the test windows "
        f"from {windows['unknown']} windows of C++. ms is the time of a prediction of 16 windows"
        f"{'' if record['machine']['gpus'] else ', of one core'}. Files: {', '.join(kilobytes)}. "
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


def choices_table(record: dict[str, Any]) -> str:
    """Format what held-out text said about settings."""
    names = [name for name in TRIED if any(name in row for row in record["tried"])]
    lines = [
        f"The settings were chosen by {record['windows']['held out']} held-out windows, one seed. A plain adapter has "
        "the lowest NLL of its training, and then the last one; others have the last one. "
        f"`{record['command']}`\n",
        f"| adapter | {' | '.join(names)} | held-out NLL |",
        "|---|" + "---:|" * (len(names) + 1),
    ]
    methods = [row["method"] for row in record["tried"]]
    for row in sorted(record["tried"], key=lambda row: methods.index(row["method"])):
        cells = [f"{row[name]:g}" if name in row else "" for name in names]
        last = [curve["held_out_nll"][-1] for curve in record["curves"] if curve["lr"] == row["lr"]]
        nll = f"{row['nll']:.4f}" + (f" ({last[0]:.4f})" if row["method"] == "plain" else "")
        lines.append(f"| {row['method']} | {' | '.join(cells)} | {nll} |")
    return "\n".join(lines)
