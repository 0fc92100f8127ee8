"""Verdicts on a method, for the first screen of a report: four questions, each with one sentence and a status.

The limits between pass, warn and fail are conventions, and docs/report.md lists them.
"""

import statistics
from collections.abc import Iterable, Sequence

from leanbayes.report.document import Status, Verdict
from leanbayes.report.evaluated_run import OOD_SCORES, EvaluatedRun, best_ood_score, ood_words
from leanbayes.report.summary import listed

Runs = Sequence[EvaluatedRun]
COST = "What does it cost?"
_GAP, _SHIFTED_GAP = (0.03, 0.08), (0.10, 0.25)  # calibration error on test data, and on corrupted or noisy data
_INTERVAL_GAP = (0.02, 0.05)  # between the coverage of 95 % intervals and 95 %
_ASKED, _WRONG = (0.20, 0.50), (0.015, 0.03)  # share that goes to a person, and errors among the rest
_LESS_ERROR = (0.90, 0.99)  # RMSE of the rest, relative to that of all
_MISSED = (0.20, 0.50)  # share of unknown inputs that raise no alarm
_NOT_RISING = (0.05, 0.30)  # 1 minus the rank correlation of uncertainty and noise
_TIMES = (2.0, 10.0)  # prediction time, relative to the plain network


def verdicts_on(runs: Runs) -> tuple[Verdict, ...]:
    """Return the verdicts on the runs of one method, without those for which nothing was measured."""
    return tuple(filter(None, (question(runs) for question in (_trust, _person, _unknown, _cost))))


def _status(*values: tuple[float, tuple[float, float]]) -> Status:
    """Return the worst status of values with their limits: pass up to the first, warn up to the second."""
    if all(value <= limits[0] for value, limits in values):
        return "pass"
    return "warn" if all(value <= limits[1] for value, limits in values) else "fail"


def _trust(runs: Runs) -> Verdict | None:
    question = "Can its confidence be trusted?"
    coverage, gap = _mean(run.scores.get("coverage_95") for run in runs), _mean(run.scores.get("ece") for run in runs)
    if coverage is not None:
        answer = f"Its 95 % intervals contain {_percent(coverage)} of the test targets."
        return Verdict(question, answer, _status((abs(coverage - 0.95), _INTERVAL_GAP)))
    if gap is None:
        return None
    for family, what in (("corruptions", "corrupted images"), ("noise", "noisy inputs")):
        shifted = _mean(_shifted(run, family, "ece") for run in runs)
        if shifted is not None:
            answer = f"Its confidence is off by {_percent(gap)} on test data, and by {_percent(shifted)} on {what}."
            return Verdict(question, answer, _status((gap, _GAP), (shifted, _SHIFTED_GAP)))
    return Verdict(question, f"Its confidence is off by {_percent(gap)} on test data.", _status((gap, _GAP)))


def _person(runs: Runs) -> Verdict | None:
    question = "When should it ask a person?"
    found = [run.evaluation["asking"] for run in runs]
    if not all(found):
        return None
    never = sum("threshold" not in one for one in found)
    if never:
        where = "" if never == len(found) else f", in {never} of {len(found)} runs"
        return Verdict(question, f"Always{where}: no threshold leaves at most 1 % wrong answers.", "fail")
    # The run with the median threshold, because a mean of thresholds would be that of no model.
    one = sorted(found, key=lambda one: one["threshold"])[(len(found) - 1) // 2]
    asked, threshold = one["asked"], one["threshold"]
    if "wrong" in one:
        # Without a threshold no run stands for the others, and the mean agrees with the accuracy in the table.
        wrong = one["wrong"] if asked else statistics.fmean(other["wrong_without"] for other in found)
        answer = (
            f"At a confidence threshold of {threshold:.2f}, {_percent(asked)} go to a person and "
            f"{_percent(wrong)} of the rest are wrong ({_percent(one['wrong_without'])} without asking)."
            if asked
            else f"It need not ask: {_percent(wrong)} of all answers are wrong."
        )
        return Verdict(question, answer, _status((asked, _ASKED), (wrong, _WRONG)))
    if not asked:
        return Verdict(question, "It cannot tell: the predicted std hardly differs between inputs.", "fail")
    rmse, without = one["rmse"], one["rmse_without"]
    answer = (
        f"At a std threshold of {threshold:.3g}, {_percent(asked)} go to a person and the rest has an RMSE of "
        f"{rmse:.3g} ({without:.3g} without asking)."
    )
    return Verdict(question, answer, _status((rmse / without if without else 1.0, _LESS_ERROR)))


def _unknown(runs: Runs) -> Verdict | None:
    question = "Does it notice unknown inputs?"
    names = [name for name in runs[0].evaluation["ood"] if all(name in run.evaluation["ood"] for run in runs)]
    if names:
        score = best_ood_score(runs)
        missed = {
            name: statistics.fmean(run.evaluation["ood"][name]["by"][score]["fpr95"] for run in runs) for name in names
        }
        noticed = listed([f"{_percent(1 - share)} of {ood_words(name)}" for name, share in missed.items()])
        answer = f"At 5 % false alarms it notices {noticed} (by {OOD_SCORES[score]})."
        return Verdict(question, answer, _status((statistics.fmean(missed.values()), _MISSED)))
    rising = _mean(run.metrics().get("noise:spearman") for run in runs)
    if rising is None:
        return None
    how = {"pass": "rises with", "warn": "rises with most levels of", "fail": "does not rise with"}
    status = _status((1 - rising, _NOT_RISING))
    answer = f"Its uncertainty {how[status]} noise in the inputs (rank correlation {rising:.2f})."
    return Verdict(question, answer, status)


def _cost(runs: Runs) -> Verdict | None:
    ratios = [run.evaluation["costs"]["ratios"] for run in runs]
    time, size = (statistics.fmean(one[key] for one in ratios) for key in ("predict_ms_per_1000", "file_bytes"))
    answer = f"A prediction takes {time:.3g}× the time of the plain network, and the file has {size:.3g}× its size."
    status, samples = _status((time, _TIMES)), runs[0].evaluation["costs"]["ours"]["samples"]
    if status != "pass" and samples > 1:
        answer += (
            f" The time is that of {samples:g} samples. Fewer take less, and so does one pass (--rule moments) for "
            "methods that have it."
        )
    return Verdict(COST, answer, status)


def _shifted(run: EvaluatedRun, family: str, key: str) -> float | None:
    return _mean(one["scores"].get(key) for one in run.evaluation["shifts"] if one["family"] == family)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None if there are no values or one is missing or nan."""
    found = [value for value in values]
    if not found or any(value is None or value != value for value in found):
        return None
    return statistics.fmean(value for value in found if value is not None)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
