"""Tables of one pass in all its forms, from the files that one_pass_quality.py and areas.py wrote."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Cell = Callable[[dict[str, Any]], Any]
DATA_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
MARGIN = "margin_log_correlation"
KINDS = {"mutual_information": "MI", "entropy": "entropy", "max_probability": "max. prob."}

AREAS: dict[str, tuple[str, str]] = {
    "log corr.": ("log_correlation", ".4f"),
    "within classes": ("log_correlation_within_classes", ".3f"),
    "std ratio": ("std_ratio", ".2f"),
    "log error": ("log_error", ".3f"),
    "error of the mean": ("mean_error", ".2f"),
    "× plain": ("over_plain", ".1f"),
}

NOT_AS_USED = ("moments, corrected layers",)  # an earlier program assigned corrections again before each prediction

MARGINS = "adjoint, 3 margins, mean of moments, corrected layers"
FORMS = {"one pass": "moments", "corrected layers": "moments, corrected layers", "three margins": MARGINS}


def summary_tables(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Format the likelihood, closeness to samples and ranking of one pass without labels, for models with all rows."""
    many = {"mean network": "mean network", "100 samples": "100 samples", **FORMS}
    some = {"30 samples": "30 samples", **FORMS}
    for title, key, form, columns in (
        ("NLL", "nll", ".4f", many),
        ("KL of the probabilities from those of the most samples", "kl", ".4f", some),
        ("Correlation of the log variance of the margin with that of the most samples", MARGIN, ".2f", some),
    ):
        whole = [record for record in records if FORMS["corrected layers"] in record.get("predictors", ())]
        rows = [_summary_row(record, key, form, columns) for record in whole]
        if rows:
            yield "\n".join([f"**{title}**\n", f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns), *rows])


def _summary_row(record: dict[str, Any], key: str, form: str, columns: dict[str, str]) -> str:
    cells = []
    for name in columns.values():
        row = record["predictors"].get(name, {})
        value = row.get(key) if key == "nll" else row.get("test_against_reference", {}).get(key)
        cells.append("" if value is None else format(value, form))
    return f"| {_name(record)} | {' | '.join(cells)} |"


def _name(record: dict[str, Any]) -> str:
    return f"{record['title']}: {record['model']['name']} on {DATA_NAMES.get(record['data'], record['data'])}"


def quality_tables(record: dict[str, Any]) -> str:
    """Format the likelihood of each predictor and its closeness to samples, then decisions, OOD data and cost."""
    machine = record["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    pixels = "" if record["rows"] == record["images"] else f", {record['rows'] // record['images']} pixels each"
    lines = [
        f"**{_name(record)}** ({record['images']:,} test images{pixels}; {where}, {record['precision']})\n",
        f"`{record['command']}`\n",
        *_closeness(record),
        "",
        *_decisions(record),
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in record["left_out"].items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"\nLeft out: {'; '.join(names)} ({reason.rstrip('.')})." for reason, names in reasons.items()]
    return "\n".join(lines)


def cost_table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Format the times of all ways to predict one batch."""
    for record in records:
        cost, machine = record["cost"], record["machine"]
        compiled = "one pass and samples compiled" if cost["compiled"] else "eager"
        rows = [
            f"| {name} | {ms:.1f} | {cost['over_plain'][name]:.1f} |"
            for name, ms in cost["milliseconds"].items()
            if name not in NOT_AS_USED
        ]
        yield (
            f"{record['data']}, {record['model']['name']}, {cost['images']} images, {record['precision']}, {compiled} "
            f"({', '.join(machine['gpus'])})."
        )
        yield "\n".join(["| | ms | × plain |", "|---|---:|---:|", *rows])


def areas_table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Format how close the stds of areas are to those of many samples, for each model, and what they cost."""
    for record in records:
        machine, cost = record["machine"], record["cost"]
        where = ", ".join(machine["gpus"]) or f"{machine['processor']}, CPU time of one thread"
        yield (
            f"{_name(record)}, {record['images']} test images of {record['pixels']:,} pixels, {record['areas']} areas "
            f"of {record['mean_area']:.0f} pixels with a std of {record['mean_std']:.1f} on average; compared with "
            f"{record['reference_samples']:,} samples; times of {cost['images']} images ({where}). "
            f"`{record['command']}`"
        )
    lines = [f"| | {' | '.join(AREAS)} |", "|---|" + "---:|" * len(AREAS)]
    for record in records:
        over_plain = record["cost"]["over_plain"]
        ways = record["ways"] | {"delta method, one area": {}}
        for name, row in ways.items():
            found = row | ({"over_plain": over_plain[name]} if name in over_plain else {})
            cells = [format(found[key], form) if key in found else "" for key, form in AREAS.values()]
            lines.append(f"| {record['title']}: {name} | {' | '.join(cells)} |")
    if records:
        yield "\n".join(lines)


def _closeness(record: dict[str, Any]) -> list[str]:
    others = list(record["ood_images"])[:1]
    columns: dict[str, tuple[Cell, str]] = {
        "NLL": (lambda row: row["nll"], ".4f"),
        "ECE": (lambda row: row["ece"], ".4f"),
        "accuracy": (lambda row: row["accuracy"], ".2%"),
    }
    if record.get("all_images", record["images"]) > record["images"]:
        columns |= {
            f"{title}, {record['all_images']:,} images": (_of_all(key), ".4f")
            for key, title in (("nll", "NLL"), ("ece", "ECE"))
        }
    for name in ("test", *others):
        title = "" if name == "test" else f", {DATA_NAMES.get(name, name)}"
        columns |= {
            f"KL{title}": (_against(name, "kl"), ".4f"),
            f"log corr.{title}": (_against(name, "log_correlation"), ".2f"),
            f"margin{title}": (_against(name, MARGIN), ".2f"),
            f"std ratio{title}": (_against(name, "std_ratio"), ".2f"),
        }
    return _table(record["predictors"], columns)


def _decisions(record: dict[str, Any]) -> list[str]:
    columns: dict[str, tuple[Cell, str]] = {
        "AURC": (lambda row: row["aurc"], ".4f"),
        "coverage at 0.5 % risk": (lambda row: row["coverage_at_half_percent"], ".1%"),
        "at 1 %": (lambda row: row["coverage_at_1_percent"], ".1%"),
    }
    for name in record["ood_images"]:
        for kind, title in KINDS.items():
            columns[f"AUROC {DATA_NAMES.get(name, name)}, {title}"] = (_auroc(name, kind), ".2%")
    over_plain = record.get("cost", {}).get("over_plain", {})
    if over_plain:
        columns["× plain"] = (lambda row: over_plain.get(row["timed_as"]), ".1f")
    rows = {name: {**row, "timed_as": _timed_as(name)} for name, row in record["predictors"].items()}
    return _table(rows, columns)


def _timed_as(name: str) -> str:
    """Return the predictor whose time was measured: factors cost nothing, and corrections of all forms the same."""
    name = name.removesuffix(", factors by labels").removesuffix(", temperature by labels")
    name = name.replace(", one scalar per layer (CVP)", ", corrected layers")
    measured = ("adjoint, mean of moments", "adjoint, 3 margins, mean of moments")
    return next((known for known in measured if name.startswith(known)), name)


def _against(name: str, key: str) -> Cell:
    return lambda row: row.get(f"{name}_against_reference", {}).get(key)


def _of_all(key: str) -> Cell:
    return lambda row: row.get("all_images", {}).get(key)


def _auroc(name: str, kind: str) -> Cell:
    return lambda row: row["auroc"].get(name, {}).get(kind)


def _table(rows: dict[str, dict[str, Any]], columns: dict[str, tuple[Cell, str]]) -> list[str]:
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(_cells(row, list(columns.values())))} |")
    return lines


def _cells(row: dict[str, Any], columns: Sequence[tuple[Cell, str]]) -> list[str]:
    values = ((of(row), form) for of, form in columns)
    return ["" if value is None else format(value, form) for value, form in values]
