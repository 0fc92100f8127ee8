"""The search behind `lb.compress(..., target_size=...)`: try finer and coarser sharing, and keep the best file.

Every trial starts from the trained model. Its score is that of the file, loaded again.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from leanbayes.core.files import written_whole
from leanbayes.core.quantization import Precision
from leanbayes.deploy.calibration import calibrate
from leanbayes.deploy.compact.compact_file import CompactFile, Trial, TrialResult, read_compact, write_compact
from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing.codebook import TooFewWeightsError
from leanbayes.methods.weight_sharing.weight_sharing import WeightSharing
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.conversion import bayesianize
from leanbayes.posteriors import SharedPosterior
from leanbayes.rules import RULES

TRIALS = (
    *(Trial(components, None, "fp16") for components in (1024, 256)),
    *(Trial(256, price, "fp16") for price in (0.1, 0.3, 1.0, 3.0)),
    *(Trial(64, price, "int8") for price in (3.0, 10.0)),
)
_AS_IT_IS: tuple[Precision, ...] = ("fp16", "int8")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

Batches = Callable[[], Iterable[Any]]
Score = Callable[[BayesianModel], float]


def parse_size(size: int | str) -> int:
    """Return a size in bytes, given as a number or as a text such as 700KB, 1.5 MiB or 90000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", str(size).lower())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS or float(found[1]) == 0:
        raise LeanBayesError(f"The size {size!r} cannot be read: write it as 700KB, 1.5MB or 90000.")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Goal:
    """Which file to keep: the best that is small enough, the smallest that is good enough, or the finest.

    Attributes:
        target_size: The largest number of bytes.
        max_nll_increase: By how much the validation NLL may increase.
    """

    target_size: int | None = None
    max_nll_increase: float | None = None

    def __post_init__(self) -> None:
        if self.target_size is not None and self.max_nll_increase is not None:
            raise LeanBayesError("target_size and max_nll_increase exclude each other: give only one of them.")
        if self.max_nll_increase is not None and not self.max_nll_increase >= 0:
            raise LeanBayesError(f"max_nll_increase={self.max_nll_increase} must not be negative.")

    @property
    def first_is_enough(self) -> bool:
        """Whether the first trial, which is the finest, ends the search."""
        return self.target_size is None and self.max_nll_increase is None

    def prefers(self, result: TrialResult, to: TrialResult | None, nll_before: float) -> bool:
        """Whether a result meets the goal, and better than an earlier one."""
        if self.target_size is not None:
            return result.bytes <= self.target_size and (to is None or result.nll < to.nll)
        good = self.max_nll_increase is None or result.nll <= nll_before + self.max_nll_increase
        return good and (to is None or result.bytes < to.bytes)

    def missed(self, results: list[TrialResult], nll_before: float) -> LeanBayesError:
        """Return the error of a search that found nothing, which says how close it came."""
        if not results:
            return LeanBayesError("The network has too few weights to share: keep its safetensors file.")
        if self.target_size is None:
            best = min(results, key=lambda result: result.nll)
            return LeanBayesError(
                f"No file is good enough: the best has {best.bytes:,} bytes and NLL {best.nll:.4f}, and the model has "
                f"NLL {nll_before:.4f}. Allow a larger increase, or train the model longer."
            )
        smallest = min(results, key=lambda result: result.bytes)
        return LeanBayesError(
            f"No file is as small as {self.target_size:,} bytes: the smallest has {smallest.bytes:,}, with NLL "
            f"{smallest.nll:.4f}. Allow more bytes, or train a sparser model, such as ssvi."
        )


def search(
    bnn: BayesianModel,
    path: Path,
    goal: Goal,
    batches: Batches,
    score: Score,
    seed: int,
    report: Callable[[str], None],
) -> CompactFile:
    """Write the compact file that meets the goal.

    Args:
        bnn: The trained model. It is not changed.
        path: The file to write.
        goal: Which file to keep.
        batches: A function that returns the validation batches. They calibrate each file if `bnn` is calibrated.
        score: The validation NLL of a model.
        seed: The seed of the Monte Carlo samples of the calibration.
        report: Called with one line about each trial.
    """
    nll_before = score(bnn)
    results: list[TrialResult] = []
    best: tuple[TrialResult, CompactFile] | None = None
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        for result, file in _tried(bnn, Path(folder), batches, score, seed, report):
            results.append(result)
            if goal.prefers(result, None if best is None else best[0], nll_before):
                best = result, file
                file.path.replace(kept)
            if goal.first_is_enough:
                break
        if best is None:
            raise goal.missed(results, nll_before)
        with written_whole(path) as temporary:
            shutil.copyfile(kept, temporary)
    chosen, file = best
    return replace(file, path=path, chosen=chosen, tried=tuple(results), nll_before=nll_before)


def _tried(
    bnn: BayesianModel, folder: Path, batches: Batches, score: Score, seed: int, report: Callable[[str], None]
) -> Iterator[tuple[TrialResult, CompactFile]]:
    """Write and score one file after the other."""
    network, trials = bnn.to_deterministic(), TRIALS
    if isinstance(bnn.posterior, SharedPosterior):
        trials = (*(Trial(None, None, precision) for precision in _AS_IT_IS), *TRIALS)
    for number, trial in enumerate(trials):
        path = folder / str(number)
        try:
            shared = _shared(bnn, trial, batches, seed)
        except TooFewWeightsError as error:
            report(f"{trial}: {error}")
            continue
        file = write_compact(shared, path, values=trial.precision, rest=trial.precision)
        result = TrialResult(trial, file.bytes, score(read_compact(path, network).eval()))
        report(f"{trial}: {result.bytes:,} bytes, NLL {result.nll:.4f}")
        yield result, file


def _shared(bnn: BayesianModel, trial: Trial, batches: Batches, seed: int) -> BayesianModel:
    """Let the weights of a model share, and calibrate the result if the model is calibrated."""
    if trial.components is None:
        return bnn
    # The rule `example` is for groups of weights, and shared weights have none.
    names = ("prior", "samples") if bnn.posterior.has_groups else ("prior", "rule", "samples")
    kept = {name: getattr(bnn.method, name) for name in names if hasattr(bnn.method, name)}
    shared = bayesianize(bnn, WeightSharing(components=trial.components, bit_price=trial.bit_price, **kept))
    if bnn.rule in RULES and bnn.rule != "example":
        # Not the text alone, which has other settings under another method, such as `moments` of lb.VDP.paper().
        shared.rule = bnn.method.make_rule(bnn.method.text_of_rule(bnn.current_rule))
    shared.trained_rule = bnn.trained_rule
    generator = torch.Generator().manual_seed(seed)
    if bnn.moment_layers:
        calibrate(shared, batches(), generator=generator, layers=True, factors=bnn.moment_scale != (1.0, 1.0))
    elif bnn.moment_scale != (1.0, 1.0):
        calibrate(shared, batches(), generator=generator)
    return shared
