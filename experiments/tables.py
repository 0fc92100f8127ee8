"""Writes docs/results.md, and the tables of other pages and of the README, from the figures under experiments/results.

No number of ours is copied by hand; those of papers are in the modules whose names end in _tables. What is not measured
is left out.

python experiments/tables.py
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headline_tables import cell, headline_tables, short_table
from pbn_tables import partial_tables
from sharing_tables import sharing_tables
from ssvi_tables import overlap_table, read, sparse_entries, sparse_tables

HERE = Path(__file__).parent
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
EXPERIMENTS = "<!-- measured: experiments -->"  # where a page has two places
HEADLINE = "<!-- measured: headline -->"
HEAD = """# Results

Each table is one command. Choices were made on a held-out part of the training data, but for MNIST, where the prior
and the temperature were tried in short runs that saw some of the test images, and for SSVI on CIFAR-10, whose first
temperature, 0.02, was given up after a look at 500 test images (0.008 itself is that of dense mean-field); the last
step's model is scored. With several seeds a figure is the mean, ± half of its 95 % interval; bold is what no other
method of the table is shown to beat, by paired differences over the seeds. ECE has 15 equal-width bins; “class-wise”
is the debiased L2 calibration error that some papers print as ECE. “Corrupted” is the mean over 15 corruptions at five
severities, made by leanbayes. AUROC is by entropy. `ms/epoch` is the median of runs that shared the machine: with as
many as `--jobs` says, and all but the first of ResNet-18 with other comparisons too, so it tells nothing between
tables, nor in that of all methods, where some trainings met more company than others;
[benchmarks.md](benchmarks.md) compares epochs that are taken in turns. `× plain` is the time to predict over that of
the plain network, taken in turns. This page is written by `python experiments/tables.py`.
"""
COLUMNS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
    "debiased_classwise_error": ("class-wise", "{:.4f}"),
    "brier": ("Brier", "{:.4f}"),
    "aurc": ("AURC", "{:.4f}"),
    "corruptions:accuracy": ("corrupted accuracy", "{:.2%}"),
    "corruptions:nll": ("corrupted NLL", "{:.4f}"),
    "corruptions:ece": ("corrupted ECE", "{:.4f}"),
    "kilo_trained": ("trained ×1000", "{:,.0f}"),
    "file_kb": ("kB on disk", "{:,.0f}"),
    "epoch_ms": ("ms/epoch", "{:,.0f}"),
    "train_peak_mb": ("peak MB", "{:,.0f}"),
    "predict_ms_per_1000": ("ms to predict 1000", "{:.0f}"),
    "predict_time_ratio": ("× plain", "{:.1f}"),
}

VDP_COLUMNS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
    "noisy_accuracy": ("accuracy at -6 dB", "{:.2%}"),
    "spearman": ("Spearman of variance and SNR", "{:.3f}"),
    "lost": ("accuracy lost by pruning 90 %", "{:.2%}"),
    "infidelity": ("Infidelity", "{:.4f}"),
    "sensitivity_max": ("Sensitivity-Max", "{:.4f}"),
}
MANY = 5  # methods from which on a comparison has a line a method, with fewer figures
FEW_COLUMNS = ("accuracy", "nll", "ece", "debiased_classwise_error", "kilo_trained", "file_kb", "epoch_ms")
SUBJECTS = {
    "cifar10_criteria": "removal criteria",
    "cifar10_criteria_sensitivity": "removal by sensitivity",
    "cifar10_density": "densities",
    "cifar10_init_std": "the first σ",
    "cifar10_init_std_no_warmup": "the first σ, without a warm-up of the temperature",
    "cifar10_sharing_ablations": "what sharing leaves out",
    "cifar10_sharing_paper": "weight sharing",
    "cifar10_sharing_paper_seed_2": "weight sharing, another start and seed",
    "cifar10_ssvi": "SSVI",
    "cifar10_vdp": "VDP++",
    "cifar10_ssvi_paper": "SSVI as in its paper",
    "cifar10_methods": "all methods",
    "cifar10_methods_ensemble": "an ensemble by the recipe of all methods",
    "cifar10_methods_seed_1": "all methods, another seed",
    "cifar10_methods_seed_2": "mean-field and PBN, a third seed",
    "cifar10_methods_seed_2_mc_dropout": "MC dropout, a third seed",
    "cifar10_methods_seed_2_plain": "the plain network, a third seed",
    "cifar10_pbn_start": "PBN of a trained network",
    "cifar10_ssvi_long": "SSVI for longer",
    "cifar10_ssvi_long_held_out": "SSVI for longer, 5 % held out",
    "cifar10_ssvi_long_seed_1": "SSVI for longer, another seed",
    "cifar100_ssvi": "SSVI",
    "mnist_init_std": "the first σ",
    "mnist_init_std_no_warmup": "the first σ, without a warm-up of the temperature",
}  # of comparisons that share their network and data with others


def table(record: dict[str, Any], title: str) -> str:
    """Lay out one comparison, turned on its side: a column a method."""
    machine, recipe, examples = record["machine"], record["recipe"], record["results"][0]["scores"]["examples"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    methods, winners = record["summary"]["methods"], record["summary"]["winners"]
    lines = [
        f"## {title}\n",
        f"`{record['command']}`\n",
        f"{where}, torch {record['versions']['torch']}, {record['seeds']} seeds from {record['seed']} on, "
        f"{recipe['epochs']} epochs of batches of {recipe['batch_size']}, temperature {recipe['temperature']}, "
        f"{examples} test examples.\n",
    ]
    there = next(iter(methods.values()))
    columns = {key: value for key, value in COLUMNS.items() if key in there}
    columns |= {key: (f"AUROC {key[4:]}", "{:.2%}") for key in there if key.startswith("ood:")}
    if len(methods) >= MANY:
        columns = {key: value for key, value in columns.items() if key in FEW_COLUMNS}
        lines += [f"| | {' | '.join(name for name, _ in columns.values())} |", "|---|" + "---:|" * len(columns)]
        for method, figures in methods.items():
            cells = [cell(figures[key], form, method in winners.get(key, ())) for key, (_, form) in columns.items()]
            lines.append(f"| `{method}` | {' | '.join(cells)} |")
        return "\n".join(lines)
    lines += [f"| | {' | '.join(f'`{name}`' for name in methods)} |", "|---|" + "---:|" * len(methods)]
    for key, (name, form) in columns.items():
        cells = [cell(figures[key], form, method in winners.get(key, ())) for method, figures in methods.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def vdp_table(record: dict[str, Any], title: str) -> str:
    """Lay out the experiments of VDP's paper, a column a method, with what tells the methods apart."""
    machine, summary = record["machine"], record["summary"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    methods = summary["methods"]
    lines = [
        f"## {title}\n",
        f"`{record['command']}`\n",
        f"{where}, torch {record['versions']['torch']}, seeds {', '.join(map(str, record['seeds']))}, noise and "
        f"pruning on {record['examples']} test images. ± is half of the {summary['level']:.0%} interval, and p is that "
        f"of a one-way analysis of variance. {' '.join(record['notes'])}\n",
        f"| | {' | '.join(f'`{name}`' for name in methods)} | p |",
        "|---|" + "---:|" * (len(methods) + 1),
    ]
    for key, (name, form) in VDP_COLUMNS.items():
        if not any(key in figures for figures in methods.values()):
            continue
        cells = [cell(figures[key], form, False) if key in figures else "" for figures in methods.values()]
        p_value = summary["tests"].get(key, {}).get("anova", {}).get("p_value")
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if p_value is None else format(p_value, '.2g')} |")
    return "\n".join(lines)


def one_pass_table(record: dict[str, Any]) -> str:
    """Lay out every way to predict one network."""
    title = f"{record['model']['name']} on {record['source']['name']}"
    accuracies = record["output_accuracy"]
    lines = [
        f"**{title}** ({record['test_examples']} test examples; {', '.join(record['machine']['gpus']) or 'CPU'})",
        "",
        "| | accuracy | NLL | ECE | std ratio | log corr. |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, scores in record["scores"].items():
        cells = [f"{scores['accuracy']:.2%}", f"{scores['nll']:.4f}", f"{scores['ece']:.4f}"]
        found = accuracies.get(name)
        cells += [f"{found['ratio']:.2f} ({found['low']:.2f}-{found['high']:.2f})"] if found else [""]
        cells += [f"{found['log_correlation']:.2f}"] if found else [""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def head_of(record: dict[str, Any], title: str, on: str) -> list[str]:
    """Begin a table: network, data and title, then the command, the machine, and what it was done on."""
    machine = record["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    name = f"{record['model']['name']} on {record['source']['name']}"
    return [f"**{name}: {title}**\n", f"`{record['command']}` ({where}, {on})\n"]


def factors_table(record: dict[str, Any]) -> str:
    """Lay out what each way to fit the factors of one pass gives, beside draws."""
    lines = [
        *head_of(record, "ways to fit the factors", f"{record['examples']} test examples"),
        "| | of the mean | of the std | accuracy | NLL | ECE |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, ways in record["results"].items():
        for way, found in ways.items():
            factors = [f"{factor:.2f}" for factor in found.get("factors", ())] or ["", ""]
            cells = [*factors, f"{found['accuracy']:.2%}", f"{found['nll']:.4f}", f"{found['ece']:.4f}"]
            lines.append(f"| {name}, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def noise_table(record: dict[str, Any]) -> str:
    """Lay out what the noise of each block is to the outputs, and how much of it one pass finds."""
    on = f"{record['examples']} test examples, {record['samples']} draws"
    lines = [
        *head_of(record, "where the noise comes from", on),
        "| noise in | share of the variance | std ratio | log corr. |",
        "|---|---:|---:|---:|",
    ]
    every = record["results"][-1]["variance"]
    for row in record["results"]:
        cells = [f"{row['variance'] / every:.0%}", f"{row['std_ratio']:.2f}", f"{row['log_correlation']:.2f}"]
        lines.append(f"| {row['block']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: Path, parts: Iterable[str], begin: str = BEGIN) -> None:
    """Put the tables of a page between its marks."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + "\n" + "\n\n".join(parts) + "\n" + END + rest.partition(END)[2])


def sensitivity_table(record: dict[str, Any]) -> str:
    """Lay out how well each kind of sensitivity ranks the weights of each network."""
    results = {(one["kind"], one["network"]): one for one in record["results"]}
    kinds, networks = (list(dict.fromkeys(names)) for names in zip(*results, strict=True))
    lines = [f"`{record['command']}`\n", f"| kind | {' | '.join(networks)} |", "|---|" + "---|" * len(networks)]
    for kind in kinds:
        cells = [f"{one['spearman']:.2f}, {one['top_found']:.2f}" for one in (results[kind, n] for n in networks)]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write all pages."""
    results, docs = HERE / "results", HERE.parent / "docs"
    measured = results / "headline", HERE.parent / "benchmarks" / "results"
    fill(HERE.parent / "README.md", short_table(*measured), HEADLINE)
    parts = [HEAD, *headline_tables(*measured)]
    for path in sorted(results.glob("*.json")):
        record = read(path)
        subject = f": {SUBJECTS[path.stem]}" if path.stem in SUBJECTS else ""
        parts.append(table(record, f"{record['model']['name']} on {record['source']['name']}{subject}"))
    for path in sorted((results / "vdp").glob("*.json")):
        record = read(path)
        name = f"{record['model']['name']} on {record['source']['name']}: noise, pruning and explanations"
        parts.append(vdp_table(record, name))
    for path in sorted((results / "ssvi").glob("overlap*.json")):
        record = read(path)
        name = f"{record['model']['name']} on {record['source']['name']}: what the removal criteria have in common"
        parts.append(overlap_table(record, name))
    (docs / "results.md").write_text("\n\n".join(part.strip("\n") for part in parts) + "\n")
    passes = [one_pass_table(read(path)) for path in sorted((results / "one_pass").glob("*.json"))]
    passes += [factors_table(read(path)) for path in sorted((results / "factors").glob("*.json"))]
    passes += [noise_table(read(path)) for path in sorted((results / "noise_sources").glob("*.json"))]
    fill(docs / "one_pass.md", passes)
    figures = sorted((results / "ssvi").glob("*.svg"))
    shown = (f"![{path.stem}](../experiments/results/ssvi/{path.name})" for path in figures)
    fill(
        docs / "partial.md",
        (sensitivity_table(read(path)) for path in sorted((results / "pbn").glob("sensitivity.json"))),
    )
    fill(docs / "partial.md", partial_tables(results / "pbn"), EXPERIMENTS)
    fill(docs / "sharing.md", sharing_tables(results / "sharing"))
    fill(docs / "sparse.md", [*sparse_tables(sparse_entries(results)), *shown])


if __name__ == "__main__":
    main()
