"""`leanbayes decide RUN`: fit on held-out data when to answer and when to ask a person, and store it in the run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from leanbayes.cli.calibrate import check_held_out
from leanbayes.cli.console import line
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import MODEL, TrainedRun, open_run
from leanbayes.core import config
from leanbayes.core.json_values import json_text
from leanbayes.data import Data
from leanbayes.deploy.model_file import save
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import decide

FALSE_ALARMS = 0.05  # share of familiar inputs about which predict raises an alarm, unless another one is chosen
Score = Literal["confidence", "entropy", "mutual_information", "std", "epistemic_std"]


@dataclass(frozen=True)
class DecideOptions:
    """Fit on the held-out data of a run when to answer and when to ask a person.

    The policy is stored in model.safetensors of the run; nothing else in it changes. From then on predict prints a
    verdict for each input: "answer", or "ask a person" and why.

    Attributes:
        run: folder of the run.
        risk: largest share of wrong answers among those that are given. None answers always.
        false_alarms: largest share of alarms among inputs like the held-out ones; an input with an alarm is unlike the
            training data. None raises no alarm.
        coverage: probability with which sets of classes, or intervals of a regression, contain the truth. None makes no
            sets and intervals.
        confidence: probability that the risk is kept.
        tolerance: for the risk of a regression, the largest error that is not wrong, in the unit of the target.
        score: uncertainty that decides whether to answer. None means confidence, or std for a regression.
        ood_score: uncertainty that raises an alarm. None means the epistemic one if there is any.
        sets: adaptive sets of classes are never empty, threshold sets are smaller.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: how random weights are combined with activations: sample, moments, mean or another rule, also with
            settings, such as adjoint:mean=moments,margins=3. moments needs one pass and no samples. None means the rule
            used in training.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        device: where to predict. None means the GPU, if there is one.
        json: print JSON instead of sentences.
    """

    run: RunFolder
    risk: float | None = None
    false_alarms: float | None = None
    coverage: float | None = None
    confidence: float = 0.95
    tolerance: float | None = None
    score: Score | None = None
    ood_score: Score | None = None
    sets: Literal["adaptive", "threshold"] = "adaptive"
    samples: int | None = None
    rule: str | None = None
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(DecideOptions, words, "decide")
    if options.risk is None and options.false_alarms is None and options.coverage is None:
        raise LeanBayesError("There is nothing to decide: give at least one of --risk, --false-alarms and --coverage.")
    return lambda: _decide(options)


def _decide(options: DecideOptions) -> None:
    run = open_run(options.run, options.device)
    data = run.data(options.root)
    check_held_out(run, data)
    scale = data.target_std[0] if data.target_std else 1.0
    policy = decide.fit(
        run.model,
        run.batches(data, data.validation).epoch(),
        risk=options.risk,
        false_alarms=options.false_alarms,
        coverage=options.coverage,
        confidence=options.confidence,
        score=options.score,
        ood_score=options.ood_score,
        sets=options.sets,
        tolerance=None if options.tolerance is None else options.tolerance / scale,
        samples=options.samples,
        rule=options.rule,
    )
    path = options.run / MODEL
    save(run.model, path)
    if options.json:
        print(json_text({"run": str(options.run), "file": str(path), "policy": config.encode(policy)}))
        return
    line(f"{path}: a policy for predictions {policy.way}")
    for sentence in policy.sentences(scale):
        line(f"- {sentence}")


def add_alarms(run: TrainedRun, data: Data) -> None:
    """Let a model without a policy raise alarms about unknown inputs, so that predict has a verdict from the start.

    A finished run gets them too, because it may have been killed before they were written.
    """
    if run.model.policy is not None or data.task == "segmentation":
        return
    try:
        decide.fit(run.model, run.batches(data, data.validation).epoch(), false_alarms=FALSE_ALARMS)
    except LeanBayesError:  # too few examples are held out, or an answer has several parts: predict says what to do
        return
    save(run.model, run.folder / MODEL)
