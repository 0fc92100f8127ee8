"""Tables on PBN: claims of the paper and our results, scores and costs over rates, corruptions, segmentation."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stored import read

RATE_COLUMNS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "nll": ("NLL", "{:.4f}"),
    "brier": ("Brier", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
}
COSTS = {
    "kilo_trained": ("trained ×1000", "{:,.0f}"),
    "file_kb": ("kB on disk", "{:,.0f}"),
    "predict_time_ratio": ("× plain to predict", "{:.1f}"),
}
TOY_COLUMNS = {"rmse": "RMSE", "nll": "NLL", "std": "std", "epistemic_std": "of it epistemic"}
RECIPES = ("recipe", "recipe_50_epochs")
NAMES = ("toy", "mnist_rates", *RECIPES, "convergence", "weights", "cifar10", "cifar10_start", "camvid")
MEMBERS = 5  # of the ensembles in the paper
SAMPLES = 5  # per training step and prediction in the paper
# The figures of the page: the file with their numbers, and their captions.
FIGURES = {
    "toy.svg": ("toy", "Mean ± 3 std; the frame is the range of the data"),
    "rates.svg": (
        "mnist_rates",
        "Over the rate, on all test images; methods without a rate are horizontal lines",
    ),
    "first-layer.png": ("mnist_rates", "Mean σ of the first layer per input pixel, from 0 to the number above"),
    "rotation.svg": ("mnist_rates", "Rotated digits, 1,000 for each angle: accuracy and entropy"),
    "entropy-*.svg": ("mnist_rates", "Fraction of the images above each entropy"),
    "dial-mnist.svg": ("mnist_dial", "One trained model at smaller rates, for both rankings of the weights"),
    "dial-cifar10.svg": ("cifar10_dial", "One trained model at smaller rates, for both rankings of the weights"),
    "convergence-*.svg": ("convergence", "Held-out scores with one sample after every epoch"),
    "severities.svg": ("cifar10", "Mean over 15 corruptions of 1,000 test images each; severity 0 is clean"),
    "entropies.svg": ("cifar10", "Entropy of correct and of wrong predictions, on the same images"),
    "weights.svg": ("weights", "Distribution functions of the weights of seed 0"),
    "shares-cifar10.svg": ("shares", "Each point is a layer, from input to output"),
    "segmentation.png": ("camvid", "One test image: prediction and entropy of each method"),
}

Runs = Sequence[Mapping[str, Any]]


def partial_tables(folder: Path) -> Iterator[str]:
    """Format all results on PBN: the claims of its paper, then tables and figures."""
    found = {name: read(folder / f"{name}.json") for name in NAMES}
    found["shares"] = {path.stem: read(path) for path in sorted(folder.glob("*shares.json"))}
    rows = [row for claim in CLAIMS for row in claim(found)]
    if rows:
        lines = ["| the paper's claim | ours | its cost |", "|---|---|---|"]
        yield "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
    for name, layouts in LAYOUTS.items():
        if found[name]:
            yield from (layout(found[name]) for layout in layouts)
    for pattern, (name, caption) in FIGURES.items():
        record = read(folder / f"{name}.json")
        for path in sorted(folder.glob(pattern)):
            where = f" ({about(record)})" if record else ""
            yield f"![{path.stem}](../experiments/results/pbn/{path.name})\n\n{caption}{where}."


# -- claims -----------------------------------------------------------------------------------------------------------

Row = tuple[str, str, str]
Found = Mapping[str, Mapping[str, Any]]


def size_claim(found: Found) -> Iterator[Row]:
    """Claim: 45 % fewer parameters than VI, 80 % fewer than an ensemble."""
    record = found["cifar10"] or found["mnist_rates"]
    if record:
        ours = mean_of(record["results"], "PBN 5 %", "costs", "kilo_trained")
        larger = {name: mean_of(record["results"], name, "costs", "kilo_trained") for name in _LARGER}
        texts = [f"{1 - ours / of:.0%} fewer than {name}" for name, of in larger.items() if not math.isnan(of)]
        yield (
            "45 % fewer parameters than VI, 80 % fewer than 5 members",
            f"{record['model']['name']} at 5 %: {', '.join(texts)}",
            times(record["results"], "PBN 5 %", "kilo_trained", "the plain network's parameters"),
        )


_LARGER = ("mean-field", "ensemble")


def mnist_claims(found: Found) -> Iterator[Row]:
    """Claims on MNIST: Brier score over rates, OOD detection, and location of the Bayesian weights."""
    record = found["mnist_rates"]
    if not record:
        return
    runs = record["results"]

    def brier(name: str) -> str:
        return f"{mean_of(runs, name, 'scores', 'brier'):.4f}"

    yield (
        "MNIST: the Brier score gets worse as the rate rises, at a fixed number of steps",
        f"{brier('PBN 1 %')} at 1 %, {brier('PBN 50 %')} at 50 %, {brier('mean-field')} at 100 %; "
        f"plain {brier('deterministic')}, ensemble {brier('ensemble')}",
        times(runs, "PBN 50 %", "train_gflops", "the FLOPs of the plain training"),
    )
    detection = {name: mean_of(runs, name, "ood", "fashion-mnist", "auroc") for name in _ROWS}
    listed = ", ".join(f"{name} {value:.3f}" for name, value in detection.items())
    yield "Fashion-MNIST: AUROC at 10 % matches the ensemble", listed, predicting(runs, "PBN 10 %")
    share = mean_of(runs, "PBN 5 %", "first_layer", "in_the_middle")
    chance = mean_of(runs, "PBN 5 %, random", "first_layer", "in_the_middle")
    yield (
        "At 5 % the random weights of the first layer are at the center of the image",
        f"{share:.0%} of them in its central quarter; {chance:.0%} by chance",
        "",
    )


_ROWS = ("deterministic", "PBN 10 %", "mean-field", "ensemble")


def start_claim(found: Found) -> Iterator[Row]:
    """Claim: a trained start converges faster."""
    record = found["convergence"]
    if record:
        name = f"{record['model']['name']} on {record['source']['name']}"
        ours = ", ".join(
            f"{one['name']} from a {one['start']} start {one['last']['nll']:.4f}" for one in record["results"]
        )
        total = 2 * record["recipe"]["epochs"]
        yield "A trained start converges faster, to a lower NLL", f"{name}: held-out {ours}", f"{total} epochs in all"


def shift_claim(found: Found) -> Iterator[Row]:
    """Claims: better than the plain network on clean images and under corruptions."""
    record = found["cifar10"]
    if record:
        runs = record["results"]
        scores = [
            f"{name} {mean_of(runs, name, 'scores', 'accuracy'):.2%}, NLL {mean_of(runs, name, 'scores', 'nll'):.3f}"
            for name in ("deterministic", "PBN 1 %", "PBN 5 %", "mean-field", "mc-dropout", "ensemble")
            if not math.isnan(mean_of(runs, name, "scores", "nll"))
        ]
        yield (
            "CIFAR-10: at 5 % competitive with ensembles",
            "; ".join(scores),
            times(runs, "PBN 5 %", "kilo_trained", "the plain network's parameters"),
        )
        plain, ours = (levels_of(runs, name, "ece") for name in ("deterministic", "PBN 5 %"))
        lower = sum(a < b for a, b in zip(ours[1:], plain[1:], strict=True))
        text = f"ECE at 5 % below the plain network's at {lower} of {len(plain) - 1} severities"
        yield (
            "CIFAR-10: calibrated under corruptions at 5 %",
            f"{text}; {ours[-1]:.3f} against {plain[-1]:.3f} at the highest",
            predicting(runs, "PBN 5 %"),
        )


def equal_claim(found: Found) -> Iterator[Row]:
    """Claim: better than the plain network that it starts from, trained for as many more epochs."""
    record = found["cifar10_start"]
    if record:
        runs = record["results"]
        accuracy, nll, ece = (
            [mean_of(runs, name, "scores", key) for name in ("deterministic", "PBN 5 %")]
            for key in ("accuracy", "nll", "ece")
        )
        yield (
            "Better calibrated at the plain network's accuracy",
            f"CIFAR-10, both from one trained network, {record['recipe']['epochs']} more epochs: accuracy "
            f"{accuracy[1]:.2%} against {accuracy[0]:.2%}, NLL {nll[1]:.4f} against {nll[0]:.4f}, ECE {ece[1]:.4f} "
            f"against {ece[0]:.4f}",
            times(runs, "PBN 5 %", "kilo_trained", "the plain network's parameters"),
        )


def layer_claim(found: Found) -> Iterator[Row]:
    """Claim: the Bayesian weights are near input and output."""
    for record in found["shares"].values():
        for one in record["results"]:
            shares = {place: of["bayesian"] / of["weights"] for place, of in enumerate(one["layers"], 1)}
            most = sorted(shares, key=lambda place: -shares[place])[:3]
            listed = ", ".join(f"layer {place} ({shares[place]:.0%})" for place in most)
            text = f"{record['model']['name']} at 5 %, of {len(shares)} layers most in {listed}"
            if one["name"] == "PBN 5 %":
                yield "The Bayesian weights are near the input and the output", text, ""


def segmentation_claim(found: Found) -> Iterator[Row]:
    """Claim: segmentation at 1 % is close to the plain network."""
    record = found["camvid"]
    if record:
        runs = record["results"]
        plain = mean_of(runs, "deterministic", "scores", "miou")
        others = {name: mean_of(runs, name, "scores", "miou") for name in ("PBN 1 %", "mean-field", "ensemble")}
        known = {name: value for name, value in others.items() if not math.isnan(value)}
        listed = (f"{name} {value:.1%} ({value / plain - 1:+.1%})" for name, value in known.items())
        yield (
            "Segmentation (Cityscapes): mIoU at 1 % within 4 % of the plain network's; VI loses 40 %",
            f"CamVid: plain {plain:.1%}, {', '.join(listed)}",
            times(runs, "PBN 1 %", "kilo_trained", "the plain network's parameters"),
        )


CLAIMS: tuple[Callable[[Found], Iterator[Row]], ...] = (
    size_claim,
    mnist_claims,
    layer_claim,
    shift_claim,
    equal_claim,
    start_claim,
    segmentation_claim,
)


# -- tables -----------------------------------------------------------------------------------------------------------


def head(record: Mapping[str, Any], title: str) -> list[str]:
    """Return the lines above a table: title, command and machine."""
    machine = record["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    return [f"**{title}**\n", f"`{record['command']}` ({where}, torch {record['versions']['torch']})\n"]


def about(record: Mapping[str, Any]) -> str:
    """Return network, data and number of seeds of a record."""
    counts = seeds_of(record["results"]).values()
    most = f"{max(counts)} seed{'s' if max(counts) > 1 else ''}"
    text = most if min(counts) == max(counts) else f"{min(counts)} to {most}"
    name = f"{record['model']['name']} on {record['source']['name']}" if "model" in record else "y = x³"
    return f"{name}, {text}"


def seeds_of(runs: Runs) -> dict[str, int]:
    """Return the number of seeds of each method."""
    names = dict.fromkeys(one["name"] for one in runs)
    return {name: len({one.get("seed") for one in runs if one["name"] == name}) for name in names}


def named(runs: Runs) -> dict[str, str]:
    """Return the label of each method, with its number of seeds if methods differ in it."""
    counts = seeds_of(runs)
    alike = len(set(counts.values())) == 1
    return {
        name: name if alike else f"{name} ({count} seed{'s' if count > 1 else ''})" for name, count in counts.items()
    }


def toy_table(record: Mapping[str, Any]) -> str:
    """Format the scores and widths of the bands, inside and outside the range of the data."""
    titles = [f"{name} {end}" for end in ("inside", "outside") for name in TOY_COLUMNS.values()]
    lines = [*head(record, f"x³ from {record['examples']} points"), *header(titles)]
    for one in record["results"]:
        cells = [f"{one[end][key]:.2f}" for end in ("inside", "outside") for key in TOY_COLUMNS]
        lines.append(f"| {one['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rate_table(record: Mapping[str, Any]) -> str:
    """Format scores, OOD detection and costs of every rate."""
    runs = record["results"]
    others = list(runs[0]["ood"])
    titles = [title for title, _ in RATE_COLUMNS.values()] + [f"AUROC {name}" for name in others]
    lines = [*head(record, about(record)), *header([*titles, *(title for title, _ in COSTS.values())])]
    for name, label in named(runs).items():
        cells = [form.format(mean_of(runs, name, "scores", key)) for key, (_, form) in RATE_COLUMNS.items()]
        cells += [f"{mean_of(runs, name, 'ood', other, 'auroc'):.3f}" for other in others]
        cells += costs_of(runs, name)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def severity_table(record: Mapping[str, Any]) -> str:
    """Format NLL and ECE at every severity, and the entropies at the lowest and highest."""
    runs = record["results"]
    numbers = [int(one["severity"]) for one in runs[0]["levels"]]
    titles = [f"{score} {number}" for score in ("NLL", "ECE") for number in numbers]
    lines = [
        *head(record, f"{about(record)}, by severity"),
        *header([*titles, "entropy correct / wrong, clean", "highest severity"]),
    ]
    for name, label in named(runs).items():
        cells = [f"{value:.3f}" for score in ("nll", "ece") for value in levels_of(runs, name, score)]
        right, wrong = (levels_of(runs, name, f"entropy_{of}") for of in ("right", "wrong"))
        cells += [f"{right[place]:.2f} / {wrong[place]:.2f}" for place in (0, -1)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def iou_table(record: Mapping[str, Any]) -> str:
    """Format mean IoU and IoU per class."""
    runs = record["results"]
    classes = list(runs[0]["iou"])
    lines = [
        *head(record, about(record)),
        *header(["mIoU", "NLL", "ECE", *classes, *(title for title, _ in COSTS.values())]),
    ]
    for name, label in named(runs).items():
        cells = [f"{mean_of(runs, name, 'scores', 'miou'):.1%}"]
        cells += [f"{mean_of(runs, name, 'scores', key):.4f}" for key in ("nll", "ece")]
        cells += [f"{mean_of(runs, name, 'iou', key):.0%}" for key in classes]
        cells += costs_of(runs, name)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def weights_table(record: Mapping[str, Any]) -> str:
    """Format the Kolmogorov-Smirnov statistics of weights against an ensemble."""
    words = (
        "The largest difference of the distribution functions of a weight, chosen at random, in a model and in an "
        "ensemble of the same seed. The paper has 0.07 for PBN 1 % on CIFAR-10.\n"
    )
    lines = [*head(record, f"Distributions of weights, {about(record)}"), words, *header(["statistic"])]
    runs = record["results"]
    return "\n".join([*lines, *(f"| {name} | {mean_of(runs, name, 'statistic'):.4f} |" for name in seeds_of(runs))])


def recipe_table(record: Mapping[str, Any]) -> str:
    """Format the scores of each way to continue from one plain network, and the stds that it ends with."""
    runs, half = record["results"], record["epochs"] // 2
    layers = list(next(one["stds"] for one in runs if one["stds"]))
    others = any(one["name"] == "Adam for stds" for one in runs)
    adam = ", “Adam for stds” by Adam, as `lb.fit` does by default" if others else ""
    words = (
        f"All rows continue from the same plain network of {half} epochs, for as many epochs, with the settings of "
        f"`lb.PBN.paper()` at a rate of {record['rate']:.0%}. “paper” trains the stds by SGD like all else"
        f"{adam}. Numbers are means over seeds; stds are medians of each layer.\n"
    )
    splits = {"test": "test", "test, at the means": "test, at the means", "training": "10,000 training images"}
    titles = [f"{name}, {split}" for split in splits.values() for name in ("accuracy", "NLL")]
    titles = [titles[0], titles[1], "ECE, test", *titles[2:], *(f"σ of layer {place}" for place in range(1, 4))]
    lines = [
        *head(record, f"The recipe of the paper, {record['epochs']} epochs, {about(record)}"),
        words,
        *header(titles),
    ]
    for name in seeds_of(runs):
        cells = []
        for split in splits:
            known = all(split in one for one in runs if one["name"] == name)
            for key, form in (("accuracy", ".2%"), ("nll", ".4f"), *([("ece", ".4f")] if split == "test" else [])):
                cells.append(f"{mean_of(runs, name, split, key):{form}}" if known else "")
        stds = [one["stds"] for one in runs if one["name"] == name and one["stds"]]
        cells += [f"{statistics.fmean(one[layer]['median'] for one in stds):.3f}" if stds else "" for layer in layers]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def flops_table(record: Mapping[str, Any]) -> str:
    """Format Table 1 of the paper and our counts: trained parameters, and FLOPs per training step."""
    runs = record["results"]
    plain = mean_of(runs, "deterministic", "costs", "train_gflops")
    titles = ["parameters, paper", "ours", "FLOPs per step, paper", "ours"]
    words = (
        f"In units of the plain network's parameters θ and of its forward pass f. The paper uses {SAMPLES} samples per "
        "step and counts σ as another product; here a step has one sample, which is one pass. Only products count.\n"
    )
    lines = [*head(record, f"Counted costs, {about(record)}"), words, *header(titles)]
    for name in dict.fromkeys(one["name"] for one in runs if "," not in one["name"]):
        rate = next(one["rate"] for one in runs if one["name"] == name)
        size, work = paper_costs(rate)
        ours = 3 * mean_of(runs, name, "costs", "train_gflops") / plain
        lines.append(f"| {name} | {size:g} θ | {times(runs, name, 'kilo_trained', 'θ')} | {work:g} f | {ours:.2f} f |")
    return "\n".join(lines)


def paper_costs(rate: float | None) -> tuple[float, float]:
    """Return trained parameters and FLOPs per step by the paper; an ensemble has no rate."""
    if rate is None:
        return MEMBERS, 3 * MEMBERS
    return 1 + rate, (1 + rate) * (SAMPLES + 2) if rate else 3


LAYOUTS: dict[str, tuple[Callable[[Mapping[str, Any]], str], ...]] = {
    "toy": (toy_table,),
    "mnist_rates": (rate_table, flops_table),
    **dict.fromkeys(RECIPES, (recipe_table,)),
    "weights": (weights_table,),
    "cifar10": (severity_table,),
    "cifar10_start": (severity_table,),
    "camvid": (iou_table,),
}


def header(titles: Iterable[str]) -> list[str]:
    """Return the first two lines of a table with named rows."""
    titles = list(titles)
    return [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]


# -- means ------------------------------------------------------------------------------------------------------------


def mean_of(runs: Runs, name: str, *keys: str) -> float:
    """Return the mean of a value over the seeds of a method; nan if there is no such run."""
    values = []
    for run in runs:
        if run["name"] == name:
            value: Any = run
            for key in keys:
                value = value[key]
            values.append(value)
    return statistics.fmean(values) if values and None not in values else math.nan


def levels_of(runs: Runs, name: str, score: str) -> list[float]:
    """Return the mean of a score over the seeds of a method, per severity."""
    lines = [[level[score] for level in run["levels"]] for run in runs if run["name"] == name]
    return [math.nan if None in values else statistics.fmean(values) for values in zip(*lines, strict=True)]


def costs_of(runs: Runs, name: str) -> list[str]:
    """Format the costs of a method."""
    return [form.format(mean_of(runs, name, "costs", key)) for key, (_, form) in COSTS.items()]


def predicting(runs: Runs, name: str) -> str:
    """Format the prediction time relative to the plain network, measured in turns."""
    return f"{mean_of(runs, name, 'costs', 'predict_time_ratio'):.1f}× the plain network's time to predict"


def times(runs: Runs, name: str, cost: str, text: str) -> str:
    """Format a cost relative to the plain network."""
    return f"{mean_of(runs, name, 'costs', cost) / mean_of(runs, 'deterministic', 'costs', cost):.2f}× {text}"
