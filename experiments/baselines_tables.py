"""The table of docs/baselines.md, from the files of `engines.py` in experiments/results/baselines."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engines_tables import NAMES, equivalent, head, mean, name_of, task_of

WIDE_RESNET = (
    "WRN-28-10, [uncertainty-baselines](https://github.com/google/uncertainty-baselines/tree/main/baselines/cifar)"
)
AVERAGED = "WRN-28-10, [Izmailov et al. 2019](https://arxiv.org/abs/1907.07504)"
SPARSE = "ResNet-18, in the SSVI paper (Li et al. 2024), whose ECE is class-wise"
SHARED = "in the 2DGBNN paper (Lin et al. 2025)"
# What others print for CIFAR-10: accuracy, NLL and ECE on clean images, and where.
PUBLISHED = {
    "sgd": ("96.0 %, 0.159, 0.023", WIDE_RESNET),
    "ensemble": ("96.6 %, 0.114, 0.010", f"{WIDE_RESNET}, 4 members"),
    "mc-dropout": ("96.1 %, 0.145, 0.019", f"{WIDE_RESNET}, 30 samples"),
    "batch-ensemble": ("96.3 %, 0.136, 0.018", f"{WIDE_RESNET}, 4 members"),
    "mimo": ("96.4 %, 0.123, 0.010", WIDE_RESNET),
    "rank-1": ("96.3 %, 0.128, 0.008", f"{WIDE_RESNET}, 4 members"),
    "rank-1-cauchy": ("96.5 %, 0.120, 0.009", f"{WIDE_RESNET}, 4 members"),
    "sngp": ("96.0 %, 0.134, 0.007", WIDE_RESNET),
    "swa": ("96.5 %, 0.108", AVERAGED),
    "swag": ("96.4 %, 0.112", AVERAGED),
    "lp-bnn": ("95.0 %, –, 0.009", f"WRN-28-10, {SHARED}"),
    "abnn": ("95.0 %, 0.160, 0.010", f"ResNet-50, {SHARED}"),
    "sparse-vd": ("90.6 %, 0.298, 0.009", f"{SPARSE}, 76.8 % pruned"),
    "sbp": ("90.1 %, 0.301, 0.009", f"{SPARSE}, 81.1 % pruned"),
    "aeb": ("91.8 %, 0.308, 0.023", f"{SPARSE}, 90 % pruned"),
    "csgmcmc": ("95.7 %", "ResNet-18, 200 epochs, 12 networks, [Zhang et al. 2020](https://arxiv.org/abs/1902.03932)"),
}
COLUMNS = (
    "accuracy", "NLL", "ECE", "NLL, temperature fitted", "plain networks with this NLL", "NLL, corrupted",
    "AUROC, {ood}", "file, MB", "training ×", "prediction ×", "seeds",
)  # fmt: skip
OF_PUBLISHED = ("published: accuracy, NLL, ECE", "published for")
OOD = {"cifar10": ("svhn", "SVHN"), "fashion-mnist": ("mnist", "MNIST"), "digits": ("letters", "letters")}
MEMBERS = 4  # of ensembles, as in engines.py
NOTE = (
    "Means over seeds. “Corrupted” is the mean over 15 corruptions at severity 3. AUROC uses the entropy. “Training ×” "
    "is {time} over that of the plain network. Rows after training count the time of the plain network too. "
    "“Prediction ×” counts FLOPs with all samples or members. The ensemble is a mean over choices of members among "
    "five plain networks. Empty cells were not measured."
)
ON_GPU = "wall time, with three trainings on the GPU at any time,"  # which is rough
ON_CPU = "processor time"
OF_OTHERS = " Published numbers are of other networks and trainings."


def baselines_tables(results: Path) -> Iterator[str]:
    """Yield one table per task: a row per method, means over seeds."""
    records = _records(results / "baselines")
    others = _records(results / "engines")
    rows = [record for record in records if "row" in record]
    if not rows:
        yield "These rows have not been run yet (`experiments/engines.py`)."
    for task in dict.fromkeys(task_of(record) for record in rows):
        own = [record for record in rows if task_of(record) == task]
        plain = [one for one in own if one["row"] == "sgd"]
        plain = plain or [one for one in others if one.get("row") == "sgd" and task_of(one) == task]
        sizes = [one["ensembles"] for one in [*records, *others] if "ensembles" in one and task_of(one) == task]
        yield baselines_table(own, plain, sizes[0] if sizes else ())


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def baselines_table(
    records: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], sizes: Sequence[dict[str, Any]]
) -> str:
    """Format the rows of one task. Files without a metric leave its cell empty."""
    data, model, images, epochs = task_of(records[0])
    groups: dict[str, list[dict[str, Any]]] = {}
    order = list(NAMES)
    by_default = any(record["settings"].get("defaults") for record in records)
    for record in sorted(records, key=lambda one: (order.index(one["row"]), not one["settings"].get("defaults"))):
        own = by_default and record["settings"]["temperature"] == 1  # where others have the defaults of their methods
        groups.setdefault(f"{name_of(record)}{', temperature 1' if own else ''}", []).append(record)
    published = data == "cifar10"
    names = [name.format(ood=OOD[data][1]) for name in COLUMNS]
    lines = [f"| {' | '.join(['method', *names, *(OF_PUBLISHED if published else ())])} |"]
    lines.append("|---|" + "---:|" * len(names) + "---|" * (len(OF_PUBLISHED) if published else 0))

    def add(name: str, cells: Sequence[str], row: str) -> None:
        cells = [*cells, *(PUBLISHED.get(row, ("", "")) if published else ())]
        lines.append(f"| {' | '.join([name, *cells])} |")

    for name, runs in groups.items():
        add(name, _cells(runs, plain, sizes), runs[0]["row"])
        if runs[0]["row"] == "sgd":
            for size in sizes:
                if size["members"] == MEMBERS:
                    add(f"{NAMES['ensemble']} of {MEMBERS}", _ensemble(size, runs), "ensemble")
    start = head(records[0], "experiments/engines.py, one file per row and seed")
    note = NOTE.format(time=ON_GPU if records[0]["machine"]["gpus"] else ON_CPU) + (OF_OTHERS if published else "")
    return "\n".join([*start, f"{data}, {model}, {images:,} images, {epochs} epochs. {note}\n", *lines])


def _cells(
    runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], sizes: Sequence[dict[str, Any]]
) -> list[str]:
    def cell(find: Callable[[dict[str, Any]], float], form: str) -> str:
        try:
            return form.format(mean(find(run) for run in runs))
        except KeyError:
            return ""

    def relative(find: Callable[[dict[str, Any]], float | None]) -> str:
        ours, theirs = ([value for run in group if (value := find(run)) is not None] for group in (runs, plain))
        return f"{mean(ours) / mean(theirs):.2f}" if ours and theirs else ""

    def seconds(run: dict[str, Any]) -> float | None:
        on_cpu = not run["machine"]["gpus"]
        own = run["costs"].get("training_processor_seconds" if on_cpu else "training_seconds")
        if own is None or not run["settings"].get("post_hoc"):
            return own
        of_plain = [value for one in plain if (value := seconds(one)) is not None]
        return own + mean(of_plain) if of_plain else None

    fitted = not runs[0]["settings"]["all_images"]  # without held-out images no temperature can be fitted
    scaled = mean(_scores(run)["test_with_temperature"]["nll"] for run in runs)
    return [
        cell(lambda run: _scores(run)["test"]["accuracy"], "{:.2%}"),
        cell(lambda run: _scores(run)["test"]["nll"], "{:.4f}"),
        cell(lambda run: _scores(run)["test"]["ece"], "{:.4f}"),
        f"{scaled:.4f}" if fitted else "",
        equivalent(scaled, sizes) if fitted and sizes else "",
        cell(lambda run: _scores(run)["corrupted"]["nll"], "{:.3f}"),
        cell(lambda run: _scores(run)["ood"][OOD[run["settings"]["data"]][0]]["auroc"], "{:.2%}"),
        cell(lambda run: run["costs"]["file_bytes"] / 1e6, _form(runs)),
        relative(seconds) if plain or not runs[0]["settings"].get("post_hoc") else "",
        relative(lambda run: run["costs"].get("predict_flops")),
        str(len(runs)),
    ]


def _form(runs: Sequence[dict[str, Any]]) -> str:
    """Return the format of a size in MB."""
    return "{:.1f}" if mean(run["costs"]["file_bytes"] for run in runs) > 1e7 else "{:.3f}"


def _ensemble(size: dict[str, Any], plain: Sequence[dict[str, Any]]) -> list[str]:
    """Return the row of an ensemble of plain networks, with as many members as the other ensembles have."""
    members, test, scaled = size["members"], size["test"], size["test_with_temperature"]["nll"]
    numbers = [f"{test['accuracy']:.2%}", f"{test['nll']:.4f}", f"{test['ece']:.4f}", f"{scaled:.4f}", f"{members}.0"]
    megabytes = members * mean(run["costs"]["file_bytes"] for run in plain) / 1e6
    return [*numbers, "", "", _form(plain).format(megabytes), f"{members}.00", f"{members}.00", "5"]


def _scores(run: dict[str, Any]) -> dict[str, Any]:
    return run["scores"]["refreshed"]
