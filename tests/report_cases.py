"""A made-up report of five methods."""

import base64
import io
import math

import numpy as np
from PIL import Image

from leanbayes.report import Cell, Column, Document, Gallery, GalleryImage, Png, Row, Section, Table, Verdict, merge
from leanbayes.report.figure import Figure, Series

METHODS = ("deterministic", "mean-field", "ensemble", "ssvi:density=0.05", "mc-dropout")
BROKEN = "mc-dropout"  # without a value in some columns, and without some figures
COLUMNS = (
    Column("accuracy", "accuracy", "quality", "high", "percent", "The share of correct predictions."),
    Column("nll", "NLL", "quality", "low", "decimal", "Negative log-likelihood, in nats."),
    Column("ece", "ECE", "quality", "low", "decimal", "The mean gap between confidence and accuracy, in 15 bins."),
    Column("entropy_wrong", "entropy\nif wrong", "quality", "high", "decimal", "Mean entropy of wrong predictions."),
    Column(
        "shift_accuracy", "accuracy", "under shift", "high", "percent", "Accuracy over all corruptions at severity 3."
    ),
    Column("shift_nll", "NLL", "under shift", "low", "decimal", "NLL over all corruptions at severity 3."),
    Column("auroc", "AUROC", "out of distribution", "high", "percent", "How well entropy detects OOD images."),
    Column("kilo_trained", "numbers\n×1000", "cost", "low", "number", "Trainable numbers, in thousands."),
    Column("file_kb", "file\nkB", "cost", "low", "count", "Size of the model file."),
    Column("epoch", "train\ntime", "cost", "low", "times", "Time per epoch, relative to the deterministic network."),
    Column("predict_ms", "predict\nms/1000", "cost", "low", "number", "Time to predict 1000 examples."),
)
MEANS = {
    "deterministic": (0.9311, 0.2874, 0.0412, 0.6120, 0.7120, 1.1290, 0.8712, 11_174, 44_760, 1.0, 38.2),
    "mean-field": (0.9332, 0.2021, 0.0081, 0.8841, 0.7421, 0.8610, 0.9044, 22_345, 89_440, 1.18, 1130.4),
    "ensemble": (0.9465, 0.1712, 0.0094, 0.8013, 0.7534, 0.8102, 0.9210, 55_870, 223_800, 5.02, 189.7),
    "ssvi:density=0.05": (0.9288, 0.2190, 0.0120, 0.8420, 0.7302, 0.9011, 0.8933, 1_117, 3_470, 0.93, 1084.0),
    "mc-dropout": (0.9240, 0.2433, 0.0189, 0.7410, 0.7011, 0.9820, math.nan, 11_174, 44_760, 1.03, math.nan),
}
WINNERS = {
    "accuracy": ("ensemble",),
    "nll": ("ensemble",),
    "ece": ("mean-field", "ensemble"),
    "entropy_wrong": ("mean-field",),
    "shift_accuracy": ("ensemble",),
    "shift_nll": ("ensemble",),
    "auroc": ("ensemble",),
    "kilo_trained": ("ssvi:density=0.05",),
    "file_kb": ("ssvi:density=0.05",),
    "epoch": ("ssvi:density=0.05",),
    "predict_ms": ("deterministic",),
}
VERDICTS = (
    Verdict("Can its confidence be trusted?", "Its confidence is off by 0.8 % on test data.", "pass"),
    Verdict("When should it ask a person?", "At a confidence threshold of 0.83, 12.0 % go to a person.", "warn"),
    Verdict("Does it notice unknown inputs?", "At 5 % false alarms it notices 30.2 % of svhn (by entropy).", "fail"),
)
LAYERS = tuple(
    f"layer{stage}.{block}.{part}.weight"
    for stage in range(1, 6)
    for block in (0, 1)
    for part in ("conv1", "downsample.0")
)


def document(points: int = 2000) -> Document:
    """Return the whole report."""
    return Document(
        title="CIFAR-10: five ways to a posterior",
        subtitle="ResNet-18, three seeds each, 10,000 test images",
        summary=(
            "The ensemble is the most accurate (94.65%), at five times the training time and size.",
            "Mean-field is as well calibrated as the ensemble (ECE 0.008), at 1.18 times the time per epoch.",
            "SSVI with 5% of the weights needs 3.5 MB, an eighth of the file of the deterministic network.",
        ),
        table=table(),
        sections=sections(points),
        galleries=galleries(),
        facts={
            "data": "cifar10, 45,000 training and 10,000 test images",
            "network": "resnet18, 11.17 million weights",
            "seeds": "0, 1, 2",
            "leanbayes": "0.1.0",
            "machine": "NVIDIA H200, 16 cores, 128 GiB",
            "versions": "torch 2.13.0, Python 3.11.9",
            "command": "leanbayes compare deterministic mean-field ensemble ssvi:density=0.05 mc-dropout "
            "--data cifar10 --model resnet18 --epochs 80 --seeds 0 1 2 --report report.html",
        },
        glossary={
            "Epistemic uncertainty": "What the model does not know yet. More data makes it smaller.",
            "Aleatoric uncertainty": "What no model can know, because of noise. More data does not change it.",
            "Reliability": "Of the predictions with 80% confidence, 80% should be right. The curve shows how many are.",
            "NLL": "Minus the log of the probability of the true class. It rewards accuracy and calibration together.",
            "Selective prediction": "The model abstains on uncertain examples. The risk is the error rate on the rest.",
        },
        verdicts={name: VERDICTS for name in METHODS[:2]},
        chosen="mean-field",
    )


def table() -> Table:
    random = np.random.default_rng(1)
    rows = []
    for name in METHODS:
        cells = {}
        for column, mean in zip(COLUMNS, MEANS[name], strict=True):
            fixed = column.key in ("kilo_trained", "file_kb")
            values = tuple(mean * (1 + (0 if fixed else 0.008) * random.normal()) for _ in range(3))
            middle, half = float(np.mean(values)), 2 * float(np.std(values))
            cells[column.key] = Cell(mean) if fixed else Cell(middle, middle - half, middle + half, values)
        rows.append(Row(name, cells, runs=3))
    note = "A star marks the methods that no other beats significantly, by paired differences over the seeds."
    return Table(COLUMNS, tuple(rows), WINNERS, "95% interval of the mean", note)


def sections(points: int = 2000) -> tuple[Section, ...]:
    figures = merge({name: own_figures(name, number, points) for number, name in enumerate(METHODS)})
    found = {one.figure.key: one for one in figures}

    def of(*keys: str):
        return tuple(found[key] for key in keys)

    return (
        Section("calibration", "Calibration", "Is the confidence right?", of("reliability", "coverage")),
        Section("uncertainty", "Uncertainty", "", of("entropy", "severity", "corruptions", "entropies")),
        Section("empty", "Empty"),
        Section("weights", "The weights", "What was learned.\n\nAnd in which layers.", of("plane", "layers", "size")),
    )


def own_figures(name: str, number: int, points: int) -> list[Figure]:
    random = np.random.default_rng(number)
    confidence = np.linspace(0.1, 1, 15)
    right = np.clip(confidence ** (1 + 0.25 * number) + random.normal(size=15) * 0.02, 0, 1)
    reliability = Figure(
        "reliability",
        "Reliability",
        "lines",
        "confidence",
        "accuracy",
        "Below the diagonal, the method is overconfident.",
        (
            Series(
                "",
                (*confidence[:14], math.nan),
                tuple(right),
                tuple(np.clip(right - 0.05, 0, 1)),
                tuple(np.clip(right + 0.05, 0, 1)),
                sizes=tuple(confidence**5 / (confidence**5).sum()),
            ),
        ),
        percent="xy",
        diagonal=True,
    )
    kept = np.linspace(0.02, 1, 100)
    coverage = Figure(
        "coverage",
        "Risk and coverage",
        "lines",
        "coverage",
        "error rate",
        "Abstaining on the least certain examples should leave fewer errors.",
        (
            Series(
                "",
                tuple(kept),
                tuple(0.07 * kept ** (2.5 - 0.3 * number)),
                labels=tuple(f"{k} of 100" for k in range(100)),
            ),
        ),
        percent="xy",
    )
    bins = np.linspace(0.05, 2.25, 23)
    entropy = Figure(
        "entropy",
        "Entropy of correct and wrong predictions",
        "bars",
        "entropy in nats",
        "share of predictions",
        "Correct predictions should be on the left, wrong ones on the right.",
        (
            Series("correct", tuple(bins), tuple(np.exp(-bins * (3 + number)) * 0.4)),
            Series("wrong", tuple(bins), tuple(0.1 * np.exp(-((bins - 0.8 - 0.1 * number) ** 2) * 3))),
        ),
        percent="y",
        apart=True,
    )
    level = np.arange(6)
    accuracy = 0.93 - 0.05 * level * (1 + 0.2 * number) ** 0.5
    severity = Figure(
        "severity",
        "Accuracy under corruption",
        "lines",
        "severity",
        "accuracy",
        "The band is the range over three seeds.",
        (
            Series(
                "",
                tuple(map(float, level)),
                tuple(accuracy),
                tuple(accuracy - 0.01 * (level + 1)),
                tuple(accuracy + 0.01 * level),
            ),
        ),
        percent="y",
        warning="The accuracy falls below 65%." if accuracy[-1] < 0.65 else "",
    )
    kinds = ("noise", "blur", "fog", "jpeg")
    corruptions = Figure(
        "corruptions",
        "Accuracy by kind of corruption",
        "bars",
        "corruption",
        "accuracy",
        "At severity 3.",
        (Series("", kinds, tuple(0.8 - 0.05 * random.random(4)), (0.7,) * 4, (0.82,) * 4),),
        percent="y",
    )
    mean = random.normal(size=points) * 0.05
    sigma = np.exp(random.normal(size=points) * 0.6 - 4 - 8 * np.abs(mean))
    plane = Figure(
        "plane",
        "The plane of means and stds",
        "points",
        "μ",
        "σ",
        "Each dot is a weight. Those far from zero usually have a smaller std.",
        (Series("", tuple(mean), tuple(sigma)),),
        log="y",
        apart=True,
    )
    layers = Figure(
        "layers",
        "Share of the posterior in each layer",
        "bars",
        "layer",
        "share of the active weights",
        "Early layers keep more of their weights.",
        (Series("", LAYERS, tuple(random.dirichlet(np.linspace(9, 3, 20)))),),
        percent="y",
    )
    size = Figure(
        "size",
        "Size and quality",
        "points",
        "file in bytes",
        "NLL",
        "Down and to the left is better.",
        (
            Series(
                "",
                tuple(MEANS[name][8] * 1000 * (1 + 0.1 * k) for k in range(3)),
                tuple(MEANS[name][1] + 0.01 * k for k in range(3)),
                labels=tuple(f"seed {k}" for k in range(3)),
            ),
        ),
        log="x",
    )
    entropy_bins = np.linspace(0.05, 2.25, 23)
    parts = {"correct": 0.2, "wrong": 1.0, "rotated": 1.4, "noisy": 1.8}
    entropies = Figure(
        "entropies",
        "Entropy in and out of distribution",
        "lines",
        "entropy in nats",
        "share of the examples",
        "OOD data should be on the right.",
        tuple(
            Series(part, tuple(entropy_bins), tuple(0.1 * np.exp(-((entropy_bins - middle - 0.05 * number) ** 2) * 4)))
            for part, middle in parts.items()
        ),
        percent="y",
        apart=True,
    )
    every = [entropies, reliability, coverage, entropy, severity, corruptions, plane, layers, size]
    return [figure for figure in every if name != BROKEN or figure.key not in ("plane", "layers")]


def png(pixels: np.ndarray, label: str = "") -> Png:
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "png")
    return Png(base64.b64encode(file.getvalue()).decode(), label)


def galleries() -> tuple[Gallery, ...]:
    random = np.random.default_rng(0)
    found = []
    for name in METHODS[:3]:
        small = []
        for k in range(8):
            truth, answer = random.integers(0, 10, 2)
            pixels = np.clip(random.normal(size=(8, 8)) * 60 + 120, 0, 255)
            small.append(
                GalleryImage((png(pixels),), f"{answer} at {99 - k}%\nis {truth}", f"A {truth} predicted as {answer}")
            )
        found.append(Gallery("Most confident mistakes", "Wrong predictions with high confidence.", name, tuple(small)))
    ramp = np.linspace(0, 255, 32)
    for name in METHODS[:2]:
        photos = []
        for k in range(6):
            pixels = np.stack(
                [ramp[:, None] + 0 * ramp, 20 * k + 0 * ramp[:, None] + ramp * 0.5, random.random((32, 32)) * 255], -1
            )
            photos.append(GalleryImage((png(pixels),), "ship at 21%\nis truck", "A truck predicted as a ship"))
        found.append(Gallery("Most uncertain", "Predictions with the highest entropy.", name, tuple(photos)))
    rows, columns = np.mgrid[0:90, 0:120]
    scene = np.stack([rows * 2, columns * 2, rows + columns], -1)
    labels = (rows // 30 * 80)[..., None] + np.zeros(3)
    maps = (png(scene, "image"), png(labels, "truth"), png(labels[::-1], "prediction"), png(scene[::-1], "uncertainty"))
    scenes = tuple(GalleryImage(maps, f"mIoU {k}2%", "A street scene") for k in (4, 5))
    found.append(Gallery("Segmentation", "Uncertainty should be high at the edges.", METHODS[1], scenes))
    return tuple(found)
