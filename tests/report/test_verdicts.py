"""Verdicts: each sentence has the numbers of the runs, and each status the documented limits."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluated_cases import changed, run, runs

from leanbayes.report import EvaluatedRun, Verdict
from leanbayes.report.verdicts import verdicts_on

DOCS = Path(__file__).parents[2] / "docs" / "report.md"


def scored(one: EvaluatedRun, **scores: float) -> EvaluatedRun:
    return changed(one, "evaluation", "scores", value={"examples": 200, **scores})


def shifted(one: EvaluatedRun, family: str, **scores: float) -> EvaluatedRun:
    shifts = [{"family": family, "name": "x", "level": level, "scores": scores} for level in (1, 2)]
    return changed(one, "evaluation", "shifts", value=shifts)


def asking(one: EvaluatedRun, **found: float) -> EvaluatedRun:
    return changed(one, "evaluation", "asking", value=found)


def missing(one: EvaluatedRun, **missed: float) -> EvaluatedRun:
    for name, share in missed.items():
        for measure in ("max_probability", "entropy", "mutual_information"):
            one = changed(one, "evaluation", "ood", name, "by", measure, "fpr95", value=share)
    return one


def verdict(word: str, *some: EvaluatedRun) -> Verdict:
    (found,) = [one for one in verdicts_on(some) if word in one.question]
    return found


def test_every_run_has_four_verdicts() -> None:
    for some in (runs({"a": 0.0}), [run()]):
        found = verdicts_on(some)
        assert [re.sub(r"\W+", " ", one.question).split()[0] for one in found] == ["Can", "When", "Does", "What"]
        for one in found:
            assert one.answer.endswith(".")
            assert one.question.endswith("?")


@pytest.mark.parametrize(
    ("ece", "corrupted", "status"),
    [(0.03, 0.1, "pass"), (0.031, 0.1, "warn"), (0.03, 0.11, "warn"), (0.081, 0.1, "fail"), (0.01, 0.26, "fail")],
)
def test_trust_depends_on_calibration_with_and_without_shift(ece: float, corrupted: float, status: str) -> None:
    found = verdict("trusted", shifted(scored(run(), ece=ece), "corruptions", ece=corrupted))
    assert found.status == status
    text = (
        f"Its confidence is off by {100 * ece:.1f} % on test data, and by {100 * corrupted:.1f} % on corrupted images."
    )
    assert found.answer == text


def test_trust_in_other_tasks() -> None:
    noisy = verdict("trusted", shifted(scored(run(), ece=0.02), "noise", ece=0.05))
    assert noisy.answer.endswith("5.0 % on noisy inputs.")
    assert verdict("trusted", shifted(scored(run(), ece=0.02), "noise", nll=1)).answer.endswith("2.0 % on test data.")
    for coverage, status in ((0.96, "pass"), (0.92, "warn"), (0.8, "fail")):
        found = verdict("trusted", scored(run(), coverage_95=coverage))
        assert (found.answer, found.status) == (
            f"Its 95 % intervals contain {100 * coverage:.1f} % of the test targets.",
            status,
        )
    assert not [one for one in verdicts_on([scored(run(), nll=1.0)]) if "trusted" in one.question]


@pytest.mark.parametrize(
    ("asked", "wrong", "status"),
    [(0.08, 0.01, "pass"), (0.21, 0.01, "warn"), (0.08, 0.02, "warn"), (0.51, 0.01, "fail"), (0.1, 0.04, "fail")],
)
def test_when_to_ask_a_person(asked: float, wrong: float, status: str) -> None:
    found = verdict("person", asking(run(), threshold=0.834, asked=asked, wrong=wrong, wrong_without=0.061))
    assert found.status == status
    assert found.answer == (
        f"At a confidence threshold of 0.83, {100 * asked:.1f} % go to a person and {100 * wrong:.1f} % of the rest "
        "are wrong (6.1 % without asking)."
    )


def test_the_threshold_is_that_of_one_run() -> None:
    some = [
        asking(run(seed=seed), threshold=t, asked=t / 2, wrong=0.01, wrong_without=0.02)
        for seed, t in enumerate((0.9, 0.0, 0.2))
    ]
    assert "threshold of 0.20, 10.0 % go" in verdict("person", *some).answer


def test_a_person_who_is_never_or_always_asked() -> None:
    never = verdict("person", asking(run(), threshold=0.0, asked=0.0, wrong=0.007, wrong_without=0.007))
    assert (never.answer, never.status) == ("It need not ask: 0.7 % of all answers are wrong.", "pass")
    three = [
        asking(run(seed=seed), threshold=0.0, asked=0.0, wrong=wrong, wrong_without=wrong)
        for seed, wrong in enumerate((0.011, 0.016, 0.003))
    ]
    assert verdict("person", *three).answer == "It need not ask: 1.0 % of all answers are wrong."  # the mean over seeds
    always = asking(run(), asked=1.0, wrong_without=0.4)
    assert verdict("person", always).answer == "Always: no threshold leaves at most 1 % wrong answers."
    assert verdict("person", always, run(seed=1)).answer.startswith("Always, in 1 of 2 runs: ")
    assert verdict("person", always).status == "fail"
    assert not [one for one in verdicts_on([asking(run())]) if "person" in one.question]


def test_a_regression_asks_by_its_std() -> None:
    good = verdict("person", asking(run(), threshold=1.5, asked=0.12, rmse=1.7, rmse_without=2.0))
    assert good.status == "pass"
    assert good.answer == (
        "At a std threshold of 1.5, 12.0 % go to a person and the rest has an RMSE of 1.7 (2 without asking)."
    )
    assert verdict("person", asking(run(), threshold=1.5, asked=0.1, rmse=1.9, rmse_without=2.0)).status == "warn"
    assert verdict("person", asking(run(), threshold=1.5, asked=0.1, rmse=2.1, rmse_without=2.0)).status == "fail"
    flat = verdict("person", asking(run(), threshold=1.5, asked=0.0, rmse=2.0, rmse_without=2.0))
    assert (flat.status, flat.answer.split(":")[0]) == ("fail", "It cannot tell")


@pytest.mark.parametrize(("letters", "status"), [(0.1, "pass"), (0.5, "warn"), (0.9, "fail")])
def test_unknown_inputs_by_the_best_score(letters: float, status: str) -> None:
    one = missing(run(), letters=letters, noisy=0.25)
    for name in ("letters", "noisy"):
        one = changed(one, "evaluation", "ood", name, "by", "mutual_information", "auroc", value=0.99)
    found = verdict("unknown", one)
    assert found.status == status
    assert found.answer == (
        f"At 5 % false alarms it notices {100 - 100 * letters:.1f} % of letters and 75.0 % of noisy inputs (by mutual "
        "information)."
    )


def test_without_ood_data_the_uncertainty_should_follow_the_noise() -> None:
    def noisy(*values: float) -> Verdict:
        shifts: list[dict[str, Any]] = [
            {"family": "noise", "name": "noise", "level": level, "scores": {"std": value}}
            for level, value in zip((40, 20, 10, 0, -6), values, strict=True)
        ]
        one = changed(changed(run(), "evaluation", "ood", value={}), "evaluation", "shifts", value=shifts)
        return verdict("unknown", one)

    assert noisy(0.1, 0.2, 0.3, 0.4, 0.5).status == "pass"
    assert noisy(0.1, 0.2, 0.3, 0.5, 0.4).status == "warn"
    assert noisy(0.5, 0.4, 0.3, 0.2, 0.1).answer == (
        "Its uncertainty does not rise with noise in the inputs (rank correlation -1.00)."
    )
    nothing = changed(changed(run(), "evaluation", "ood", value={}), "evaluation", "shifts", value=[])
    assert not [one for one in verdicts_on([nothing]) if "unknown" in one.question]


@pytest.mark.parametrize(("time", "status"), [(1.1, "pass"), (5.0, "warn"), (32.0, "fail")])
def test_cost_is_the_time_of_a_prediction(time: float, status: str) -> None:
    some = [
        changed(run(seed=seed), "evaluation", "costs", "ratios", "predict_ms_per_1000", value=time * factor)
        for seed, factor in enumerate((0.9, 1.1))
    ]
    found = verdict("cost", *some)
    assert found.status == status
    assert f"takes {time:.3g}× the time of the plain network, and the file has 2× its size." in found.answer
    assert math.isclose(np.mean([0.9, 1.1]), 1)


@pytest.mark.parametrize(("time", "samples", "named"), [(32.0, 30, True), (5.0, 1, False), (1.1, 30, False)])
def test_the_cost_of_many_samples_names_what_costs_less(time: float, samples: int, named: bool) -> None:
    one = changed(run(), "evaluation", "costs", "ratios", "predict_ms_per_1000", value=time)
    one = changed(one, "evaluation", "costs", "ours", "samples", value=samples)
    answer = verdict("cost", one).answer
    assert (f"that of {samples} samples" in answer) == named
    assert ("--rule moments" in answer) == named


def test_the_documentation_has_the_limits() -> None:
    text = " ".join(DOCS.read_text().split())
    for limits in ("3 %", "8 %", "10 %", "25 %", "20 %", "50 %", "1.5 %", "2×", "10×"):
        assert limits in text, limits
