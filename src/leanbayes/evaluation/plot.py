"""Plots with matplotlib, without the report: reliability, risk over coverage, and entropies.

Each function takes one prediction, or a dict of predictions by name to compare models, and returns the axes.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError, missing_package
from leanbayes.evaluation.calibration_error import BINS, bin_sums, expected_calibration_error
from leanbayes.evaluation.curves import entropy_edges, histogram
from leanbayes.evaluation.intervals import interval_coverage
from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, outcome_of
from leanbayes.evaluation.selective import area_under_risk_coverage
from leanbayes.evaluation.selective import risk_coverage as risk_over_coverage
from leanbayes.likelihoods import Prediction, RegressionPrediction
from leanbayes.likelihoods.decisions.checked_values import class_probs, uncertainty

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["entropy", "reliability", "risk_coverage"]
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe & Ito: safe for color blindness
_GRAY = "#777777"
_LEAST = 5  # examples of a bin that is drawn


def reliability(
    predictions: Prediction | Mapping[str, Prediction], labels: Tensor, *, bins: int = BINS, ax: "Axes | None" = None
) -> "Axes":
    """Draw whether confidences can be trusted: the accuracy of predictions by their confidence.

    Each point is a bin of equal width with at least 5 examples: its area grows with their number, and the bar is the
    95 % interval of the accuracy (Wilson). A regression has the share of targets inside the central intervals of the
    prediction, by their probability.

    Args:
        predictions: What `bnn.predict` returned; or several, by name.
        labels: The true labels or targets.
        bins: The number of bins.
        ax: The axes to draw into. None makes new ones.

    Returns:
        The axes. The legend has the expected calibration error (ECE), or for a regression the mean error of coverage.

    Raises:
        LeanBayesError: Shapes do not match, or matplotlib is not installed.

    Example:
        >>> lb.plot.reliability({"plain": plain.predict(x), "Bayesian": bnn.predict(x)}, y)
        >>> plt.savefig("reliability.png")
    """
    ax = _axes(ax)
    regression = False
    for name, color, prediction in _each(predictions):
        if isinstance(prediction, RegressionPrediction):
            regression = True
            levels, shares = _coverages(prediction, labels)
            gap = float((levels - shares).abs().mean())
            ax.plot(levels, shares, "-", color=color, label=_label(name, f"mean error {gap:.1%}"))
            continue
        confidence, right = _confidence(prediction, labels)
        sums = bin_sums(confidence, right, bins)
        mean, share, count = sums[0] / sums[2], sums[1] / sums[2], sums[2]
        drawn = count >= _LEAST
        mean, share, count = (values[drawn].cpu() for values in (mean, share, count))
        bars = torch.stack(_wilson(share, count)).sub(share).abs()
        text = _label(name, f"ECE {expected_calibration_error(sums):.1%}")
        ax.errorbar(
            mean.numpy(), share.numpy(), bars.numpy(), color=color, lw=1.2, elinewidth=0.8, alpha=0.9, label=text
        )
        ax.scatter(mean, share, 12 + 150 * count / count.sum(), color=color, zorder=3, clip_on=False)
    ax.plot([0, 1], [0, 1], "--", color=_GRAY, lw=1, zorder=0, label="perfect")
    _percent(ax, x=True)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    names = ("probability of the interval", "targets inside") if regression else ("confidence", "accuracy")
    return _finished(ax, *names)


def risk_coverage(
    predictions: Prediction | Mapping[str, Prediction],
    labels: Tensor,
    *,
    score: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw what abstaining gains: the error of the given answers by the share of inputs that are answered.

    The most certain inputs are answered first. A regression has the RMSE instead of the error.

    Args:
        predictions: What `bnn.predict` returned; or several, by name.
        labels: The true labels or targets.
        score: The uncertainty: "confidence", "entropy" or "mutual_information", and "std" or "epistemic_std" for a
            regression. None means "confidence" or "std".
        ax: The axes to draw into. None makes new ones.

    Returns:
        The axes. The legend has the area under the curve (AURC), of the squared error for a regression.

    Raises:
        LeanBayesError: Shapes do not match, the score is unknown, or matplotlib is not installed.

    Example:
        >>> lb.plot.risk_coverage({"plain": plain.predict(x), "Bayesian": bnn.predict(x)}, y)
    """
    ax = _axes(ax)
    regression = False
    for name, color, prediction in _each(predictions):
        if isinstance(prediction, RegressionPrediction):
            regression = True
            found: Any = outcome_of(prediction, labels)
            error = found.error.double().square()
            loss, usual = error.flatten(1).mean(1) if error.dim() > 1 else error, "std"
        else:
            loss, usual = (~_confidence(prediction, labels)[1]).double(), "confidence"
        unsure = uncertainty(prediction, score or usual)
        coverage, risk = risk_over_coverage(unsure, loss)
        risk = risk.sqrt() if regression else risk
        area = area_under_risk_coverage(unsure, loss)
        ax.plot(coverage.cpu(), risk.cpu(), color=color, lw=1.6, label=_label(name, f"AURC {area:.3g}"))
    _percent(ax, x=True, y=not regression)
    ax.set(xlim=(0, 1))
    ax.set_ylim(bottom=0)
    return _finished(ax, "inputs that are answered", "RMSE of the answers" if regression else "wrong answers")


def entropy(
    predictions: Prediction | Mapping[str, Prediction], labels: Tensor | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Draw the distribution of the entropy: of several models, of familiar and unfamiliar inputs, of right and wrong.

    Args:
        predictions: What `bnn.predict` returned; or several, by name, such as those of test data and of inputs unlike
            them.
        labels: The true labels. If given, right and wrong answers have a distribution each.
        ax: The axes to draw into. None makes new ones.

    Returns:
        The axes. The height is the share of the examples of each distribution in a bin.

    Raises:
        LeanBayesError: Predictions are not of classes, shapes do not match, or matplotlib is not installed.

    Example:
        >>> lb.plot.entropy({"digits": bnn.predict(digits), "letters": bnn.predict(letters)})
        >>> lb.plot.entropy(bnn.predict(x), y)  # right and wrong answers
    """
    ax = _axes(ax)
    for name, color, prediction in _each(predictions):
        if isinstance(prediction, RegressionPrediction):
            raise LeanBayesError("A regression has no entropy of classes: plot prediction.std with plt.hist.")
        values = uncertainty(prediction, "entropy").cpu()
        edges = entropy_edges(class_probs(prediction).shape[-1])
        groups = {"": values}
        if labels is not None:
            found: Any = outcome_of(prediction, labels)  # without examples that have no label
            values, right = found.entropy.flatten().cpu(), _confidence(prediction, labels)[1].cpu()
            groups = {"right": values[right], "wrong": values[~right]}
        for number, (group, part) in enumerate(groups.items()):
            shares = torch.tensor(histogram(part, edges), dtype=torch.float64) / max(len(part), 1)
            own = color if name or not number else _COLORS[1]  # one model: its mistakes have another color
            text = _label(f"{name} {group}".strip(), f"{len(part):,}")
            ax.stairs(shares, edges, label=text, baseline=None, color=own, lw=1.4, ls="--" if number and name else "-")
            if not (number and name):
                ax.stairs(shares, edges, fill=True, color=own, alpha=0.15)
    _percent(ax, x=False)
    ax.set(xlim=(0, float(edges[-1])))
    ax.set_ylim(bottom=0)
    return _finished(ax, "entropy in nats", "share of examples")


# -- data -------------------------------------------------------------------------------------------------------------


def _each(predictions: Prediction | Mapping[str, Prediction]) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, color and prediction of each model."""
    named = predictions if isinstance(predictions, Mapping) else {"": predictions}
    if not named:
        raise LeanBayesError("There is nothing to draw: pass at least one prediction.")
    for number, (name, prediction) in enumerate(named.items()):
        if not isinstance(prediction, Prediction):
            raise LeanBayesError(f"A plot needs what bnn.predict returns, not {type(prediction).__name__}.")
        yield name, _COLORS[number % len(_COLORS)], prediction


def _confidence(prediction: Prediction, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence of each answer, and whether it is right; pixels and several outputs are flattened."""
    found = outcome_of(prediction, labels)
    if isinstance(found, ClassOutcome):
        return found.confidence, found.right
    assert isinstance(found, BinaryOutcome)
    yes = found.probs >= 0.5
    return torch.where(yes, found.probs, 1 - found.probs).flatten(), (yes == (found.truth > 0.5)).flatten()


def _coverages(prediction: RegressionPrediction, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels of central intervals, and the share of targets inside."""
    found: Any = outcome_of(prediction, labels)
    levels = torch.arange(1, 20, dtype=torch.float64) / 20
    shares = [interval_coverage(found.error, found.std, level).mean().cpu() for level in levels.tolist()]
    return levels, torch.stack(shares)


def _wilson(share: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of the 95 % interval of a share (Wilson 1927)."""
    z = 1.959963984540054
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)).sqrt()
    return middle - half, middle + half


# -- axes -------------------------------------------------------------------------------------------------------------


def _axes(ax: "Axes | None") -> "Axes":
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        raise missing_package("lb.plot needs matplotlib", "plot") from None
    return pyplot.subplots(figsize=(5, 4), layout="constrained")[1] if ax is None else ax


def _percent(ax: "Axes", *, x: bool, y: bool = True) -> None:
    from matplotlib.ticker import PercentFormatter

    for axis, wanted in ((ax.xaxis, x), (ax.yaxis, y)):
        if wanted:
            axis.set_major_formatter(PercentFormatter(1, symbol=" %"))


def _label(name: str, text: str) -> str:
    return f"{name} ({text})" if name else text


def _finished(ax: "Axes", x: str, y: str) -> "Axes":
    """Name the axes, and draw the grid and the legend."""
    ax.set(xlabel=x, ylabel=y)
    ax.grid(color="#dddddd", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small")
    return ax
