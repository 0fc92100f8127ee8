"""`leanbayes compress RUN [OUT]`: search for the compact file that is small enough, or good enough."""

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.calibrate import fit_factors
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import open_run
from leanbayes.cli.tables import show
from leanbayes.compression.file import compress
from leanbayes.compression.quantisation import Precision
from leanbayes.conversion import bayesianize
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.files import written_whole
from leanbayes.methods import METHODS, WeightSharing
from leanbayes.plain import json_text
from leanbayes.posteriors import SharedPosterior
from leanbayes.saving import load

CompactPath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class CompressOptions:
    """Let the weights of a trained run share few Gaussians, and write a compact file of them.

    It shares finely and coarsely, and scores each file on the validation data. With --target-size the best of those
    that are small enough is kept; with --max-nll-increase the smallest of those that are good enough. Without either,
    it is the finest.

    Attributes:
        run: folder of the run.
        out: file to write. None means model.lbc in that folder.
        target_size: bytes that the file may have, such as 700KB or 1.5MiB.
        max_nll_increase: by how much the mean negative log-likelihood of the validation data may grow.
        samples: draws of a prediction. None means what the method says.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        device: where to predict. None means the GPU, if there is one.
        seed: number that the draws follow from.
        json: print JSON, not a table.
    """

    run: RunFolder
    out: CompactPath = None
    target_size: str | None = None
    max_nll_increase: float | None = None
    samples: int | None = None
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


@dataclass(frozen=True)
class Trial:
    """One way to compress: components to share (None: as the model is), the price of a bit, and the precision."""

    components: int | None
    bit_price: float | None
    precision: Precision


@dataclass(frozen=True)
class Result:
    """What one way gave."""

    trial: Trial
    bytes: int
    nll: float


TRIALS = (
    *(Trial(components, None, "fp16") for components in (1024, 256)),
    *(Trial(256, price, "fp16") for price in (0.1, 0.3, 1.0, 3.0)),
    *(Trial(64, price, "int8") for price in (3.0, 10.0)),
)


def compress_run(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(CompressOptions, _with_out_last(words), "compress")
    limit = None if options.target_size is None else bytes_of(options.target_size)
    if limit is not None and options.max_nll_increase is not None:
        raise LeanBayesError("--target-size and --max-nll-increase exclude each other: give one.")
    if options.max_nll_increase is not None and not options.max_nll_increase >= 0:
        raise LeanBayesError(f"--max-nll-increase {options.max_nll_increase} must not be negative.")
    return lambda: _compress(options, limit)


def _with_out_last(words: list[str]) -> list[str]:
    """Take --out FILE, as other commands call it, for OUT."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--out=") else [word])]
    if "--out" not in split[:-1]:
        return words
    place = split.index("--out")
    return [*split[:place], *split[place + 2 :], split[place + 1]]


def bytes_of(text: str) -> int:
    """Read a size such as 700KB, 1.5 MiB or 90000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        raise LeanBayesError(f"--target-size {text} cannot be read: write it as 700KB, 1.5MB or 90000.")
    return int(float(found[1]) * _UNITS[found[2]])


def _compress(options: CompressOptions, limit: int | None) -> None:
    run = open_run(options.run, options.device)
    if not run.model.method.bayesian_weights:
        others = ", ".join(name for name, method in METHODS.items() if method.bayesian_weights)
        raise LeanBayesError(
            f"{options.run} is a run of {type(run.model.method).__name__}, which has no Bayesian weights to share: "
            f"compress one of {others}."
        )
    out = options.out or options.run / "model.lbc"
    data = run.data(options.root)
    if data.validation is None:
        raise LeanBayesError(f"{data.name} has no validation data to choose on: train with --validation-share above 0.")
    batches = run.batches(data, data.validation)

    def score(bnn: BayesianModel) -> float:
        how: dict[str, Any] = {"samples": options.samples, "seed": options.seed, "target_scale": data.target_std}
        return float(evaluate(bnn, batches.epoch(), **how)["nll"])

    def share(trial: Trial) -> BayesianModel:
        made = _shared(run.model, trial)
        if made is not run.model and run.model.moment_scale != (1.0, 1.0):  # it is calibrated, and shared otherwise
            fit_factors(made, data, batches, seed=options.seed)
        return made

    before = score(run.model)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        chosen: Result | None = None
        for result, path in _tried(run.model, share, score, Path(folder)):
            results.append(result)
            print(f"{_words(result.trial)}: {result.bytes:,} bytes, NLL {result.nll:.4f}", file=sys.stderr, flush=True)
            if limit is not None:
                better = result.bytes <= limit and (chosen is None or result.nll < chosen.nll)
            else:
                good = options.max_nll_increase is None or result.nll <= before + options.max_nll_increase
                better = good and (chosen is None or result.bytes < chosen.bytes)
            if better:
                chosen = result
                path.replace(kept)
            if limit is None and options.max_nll_increase is None:
                break
        if chosen is None:
            raise _missed(results, before, limit)
        with written_whole(out) as temporary:
            shutil.copyfile(kept, temporary)
    _tell(options, out, before, results, chosen)


def _tried(
    bnn: BayesianModel,
    share: Callable[[Trial], BayesianModel],
    score: Callable[[BayesianModel], float],
    folder: Path,
) -> Iterator[tuple[Result, Path]]:
    """Try one way after the other, each from the trained model on; what is scored is the file, loaded again."""
    network, trials = bnn.to_deterministic(), TRIALS
    if isinstance(bnn.posterior, SharedPosterior):
        trials = (Trial(None, None, "fp16"), Trial(None, None, "int8"), *TRIALS)
    for number, trial in enumerate(trials):
        path = folder / str(number)
        try:
            made = compress(share(trial), path, values=trial.precision, rest=trial.precision)
        except LeanBayesError as error:  # a small network has too few weights for many components
            print(f"{_words(trial)}: {error}", file=sys.stderr, flush=True)
            continue
        yield Result(trial, made.bytes, score(load(path, network).eval())), path


def _shared(bnn: BayesianModel, trial: Trial) -> BayesianModel:
    """Let the weights of a model share."""
    if trial.components is None:
        return bnn
    changed = {name: getattr(bnn.method, name) for name in ("prior", "rule", "samples") if hasattr(bnn.method, name)}
    method = WeightSharing(components=trial.components, bit_price=trial.bit_price, **changed)
    made = bayesianize(bnn, method)
    made.trained_rule = bnn.trained_rule
    return made


def _missed(results: list[Result], before: float, limit: int | None) -> LeanBayesError:
    """Tell how near it came."""
    if not results:
        return LeanBayesError("The network has too few weights to share: keep its model.safetensors.")
    if limit is None:
        best = min(results, key=lambda result: result.nll)
        return LeanBayesError(
            f"No file is good enough: the best has NLL {best.nll:.4f}, and the run {before:.4f}, with {best.bytes:,} "
            "bytes. Allow more, or train the run longer."
        )
    least = min(results, key=lambda result: result.bytes)
    return LeanBayesError(
        f"No file is as small as {limit:,} bytes: the smallest has {least.bytes:,}, with NLL {least.nll:.4f}. Allow "
        "more, or train a sparser run, such as ssvi."
    )


def _words(trial: Trial) -> str:
    if trial.components is None:
        return f"as it is, {trial.precision}"
    price = "" if trial.bit_price is None else f", {trial.bit_price:g} nats a bit"
    return f"{trial.components} components{price}, {trial.precision}"


def _tell(options: CompressOptions, out: Path, before: float, results: list[Result], chosen: Result) -> None:
    if options.json:
        told = {"run": str(options.run), "file": str(out), "nll_before": before, "chosen": asdict(chosen)}
        print(json_text({**told, "tried": [asdict(result) for result in results]}))
        return
    view = Table("tried", box=None)
    for name in ("bytes", "NLL", "more than\nthe run's", ""):
        view.add_column(name, justify="right")
    for result in results:
        mark = "kept" if result is chosen else ""
        view.add_row(
            _words(result.trial), f"{result.bytes:,}", f"{result.nll:.4f}", f"{result.nll - before:+.4f}", mark
        )
    show(f"{out}: {chosen.bytes:,} bytes, validation NLL {chosen.nll:.4f}", view)
