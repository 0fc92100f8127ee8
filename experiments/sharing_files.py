"""Models with shared weights: made from a trained run, written to compact files, loaded and evaluated."""

import argparse
import copy
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import Dataset

import leanbayes as lb
from leanbayes.cli.evaluations import ood_sets
from leanbayes.cli.runs import TrainedRun
from leanbayes.core import config
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import EvaluationSettings
from leanbayes.evaluation.detection import detection_scores
from leanbayes.evaluation.full_evaluation import batch_size, some
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.evaluation.scores import Scores, ignored, predictions
from leanbayes.methods import parse_method
from leanbayes.posteriors import SharedPosterior
from leanbayes.training import fit
from leanbayes.training.run import REFRESH_EXAMPLES

SCORES = ("accuracy", "nll", "ece", "brier")
SETTINGS = ("components", "bit_price", "rate", "epochs", "lr", "values")  # that identify a file of a run
GRADIENT_BATCHES = 50  # to find outliers, as many as in training

Row = dict[str, Any]


# -- evaluation -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The command-line arguments of an evaluation: data, seed, samples and numbers of examples."""

    root: Path | None
    seed: int
    samples: int
    calibration: int
    examples: int | None
    train_examples: int | None = None
    ood: Sequence[str] = ()
    ood_examples: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Take the arguments that a command line has."""
        known = [field.name for field in dataclasses.fields(cls) if hasattr(args, field.name)]
        return cls(**{name: getattr(args, name) for name in known})


class Evaluator:
    """Scores models on the data of a run."""

    def __init__(self, run: TrainedRun, arguments: Arguments) -> None:
        data = run.data(arguments.root)
        if data.task != "classification" or data.test is None:
            raise LeanBayesError(
                f"{data.name} has no labeled test data for classification: give a run on another data set."
            )
        self.arguments, self.device = arguments, run.model.device
        limits = {"train": arguments.train_examples, "validation": arguments.examples, "test": arguments.examples}
        parts: Any = {name: some(getattr(data, name), limit, arguments.seed) for name, limit in limits.items()}
        self.data = dataclasses.replace(data, **parts)
        settings = EvaluationSettings(ood_examples=arguments.ood_examples, seed=arguments.seed)
        self.others = ood_sets(arguments.ood, self.data, arguments.root, settings, self.device)[0]

    def batches(self, dataset: Dataset[Any], limit: int | None = None, augmented: bool = False) -> Iterator[Any]:
        """Return batches in a fixed order, or augmented and shuffled as in training."""
        return Batches(
            some(dataset, limit, self.arguments.seed),
            batch_size(self.data.input_shape),
            device=self.device,
            seed=self.arguments.seed,
            shuffle=augmented,
            augment=self.data.augment if augmented else None,
            normalize=self.data.normalize,
        ).epoch()

    def outcome(self, bnn: lb.BayesianModel, dataset: Dataset[Any], **how: Any) -> tuple[Row, ClassOutcome]:
        """Return scores and per-example outcomes on a data set."""
        scores = Scores(ignored(bnn), details=True)
        for prediction, y in predictions(bnn, self.batches(dataset), seed=self.arguments.seed, **how):
            scores.update(prediction, y)
        found, values = scores.outcome(), scores.compute()
        assert isinstance(found, ClassOutcome)
        return {key: values[key] for key in SCORES}, found

    def tested(self, bnn: lb.BayesianModel, **how: Any) -> dict[str, Any]:
        """Score on the test data, and detect OOD data by the entropy."""
        assert self.data.test is not None
        scores, inside = self.outcome(bnn, self.data.test, **how)
        ood = {}
        for name, dataset in self.others.items():
            batches = self.batches(dataset, self.arguments.ood_examples)
            predicted = predictions(bnn, batches, seed=self.arguments.seed, **how)
            entropies = torch.cat([prediction.entropy for prediction, _ in predicted])
            ood[name] = {"examples": len(entropies), **detection_scores(inside.entropy.cpu(), entropies.cpu())}
        return {**scores, "ood": ood}

    def evaluate(self, bnn: lb.BayesianModel) -> dict[str, Any]:
        """Score on held-out and test data, with samples and, for random weights, in one pass."""
        one_pass = bnn.trained_rule == "moments"
        random = (one_pass or bnn.current_rule.random) and bnn.members is None and bnn.layout.numel > 0
        sampled: dict[str, Any] = {"samples": self.arguments.samples if random else None}
        sampled |= {"rule": "sample"} if one_pass else {}
        test = {"samples": self.tested(bnn, **sampled)}
        found = {"held_out": self.outcome(bnn, self.data.validation, **sampled)[0], "test": test}
        if random:
            for way, model in (("one_pass", bnn), ("one_pass_by_labels", self.by_labels(bnn))):
                test[way] = self.tested(model, rule="moments")
                found[f"held_out_{way}"] = self.outcome(model, self.data.validation, rule="moments")[0]
        return found

    def calibrate(self, bnn: lb.BayesianModel) -> None:
        """Calibrate one pass to samples on held-out data, unless the model was trained by one pass."""
        if bnn.trained_rule == "moments":
            return
        generator = torch.Generator().manual_seed(self.arguments.seed)
        batches = self.batches(self.data.validation, self.arguments.calibration)
        lb.calibrate(bnn, batches, to="samples", samples=self.arguments.samples, generator=generator)

    def by_labels(self, bnn: lb.BayesianModel) -> lb.BayesianModel:
        """Return a copy with one pass calibrated to the labels of all held-out data."""
        made = copy.deepcopy(bnn)
        lb.calibrate(made, self.batches(self.data.validation), to="labels")
        return made


# -- sharing ----------------------------------------------------------------------------------------------------------


def method_for(bnn: lb.BayesianModel, text: str, **settings: Any) -> lb.WeightSharing:
    """Parse a weight-sharing method; prior, rule and samples come from the method of the model if it has them."""
    method = parse_method(text)
    if not isinstance(method, lb.WeightSharing):
        raise LeanBayesError(f"{text} does not share weights: give weight-sharing, optionally with settings.")
    kept = {name: getattr(bnn.method, name) for name in ("prior", "rule", "samples") if hasattr(bnn.method, name)}
    return dataclasses.replace(method, **{**kept, **settings}, pretrain=0.0, pretrain_std=0.0)


def share(bnn: lb.BayesianModel, method: lb.WeightSharing, evaluator: Evaluator) -> lb.BayesianModel:
    """Share the weights of a model and refresh BatchNorm, without training."""
    batches = itertools.islice(evaluator.batches(evaluator.data.train), GRADIENT_BATCHES) if method.needs_data else None
    made = lb.bayesianize(bnn, method, data=batches, seed=evaluator.arguments.seed).eval()
    made.trained_rule = bnn.trained_rule
    inputs = (x for x, _ in evaluator.batches(evaluator.data.train, REFRESH_EXAMPLES, augmented=True))
    made.refresh_batchnorm(inputs, torch.Generator().manual_seed(evaluator.arguments.seed))
    return made


def final_recipe(run: TrainedRun, args: argparse.Namespace, epochs: int, lr: float) -> dict[str, Any]:
    """Return the recipe of the final training, with the final temperature of the run."""
    recipe, gpu = run.record["config"]["recipe"], run.model.device.type == "cuda"
    end = recipe["temperature_end"]
    return {
        "epochs": epochs,
        "batch_size": args.batch_size,
        "optimizer": "adamw",
        "lr": lr,
        "weight_decay": 0.0,  # the prior regularizes
        "scale_lr": args.scale_lr,
        "temperature": recipe["temperature"] if end is None else end,
        "temperature_warmup": 0.0,
        "precision": "bf16" if gpu else "fp32",
        "channels_last": gpu,
        "compile": args.compile,
        "evaluate_every": 0,
        "seed": args.seed,
        "device": run.model.device.type,
    }


def shared_rows(args: argparse.Namespace, run: TrainedRun, evaluator: Evaluator, done: Sequence[Row]) -> Iterator[Row]:
    """Yield a row for every missing file of the grid of components, prices, rates, trainings and precisions."""
    known = [tuple(row[key] for key in SETTINGS) for row in done]
    trainings = [(n, lr) for n in args.epochs for lr in (args.lrs if n else [None])]
    grid = itertools.product(args.components, args.bit_prices, args.rates, trainings)
    for components, price, rate, (epochs, lr) in grid:
        missing = [values for values in args.values if (components, price, rate, epochs, lr, values) not in known]
        if not missing:
            continue
        start_model = run.model if rate is None else lb.restrict(run.model, rate)
        rule = {} if args.rule is None else {"rule": args.rule}
        method = method_for(run.model, args.method, components=components, bit_price=price, **rule)
        start = time.perf_counter()
        if lr is None:
            bnn = share(start_model, method, evaluator)
        else:
            bnn = fit(start_model, method, evaluator.data, progress=False, **final_recipe(run, args, epochs, lr))
        seconds = time.perf_counter() - start
        evaluator.calibrate(bnn)
        settings = {"components": components, "bit_price": price, "rate": rate, "epochs": epochs, "lr": lr}
        for values in missing:
            kept = None if args.keep is None else args.keep / name_of_file({**settings, "values": values})
            row = settings | {"method": config.encode(method), "model_seconds": seconds}
            row |= of_file(bnn, evaluator, values, args.rest, kept)
            print(line(row), flush=True)
            yield row


def name_of_file(row: Row) -> str:
    """Return the file name for some settings."""
    return f"{'-'.join(str(row[key]) for key in SETTINGS)}.lbc"


def of_file(bnn: lb.BayesianModel, evaluator: Evaluator, values: Any, rest: Any, kept: Path | None = None) -> Row:
    """Write a compact file, to `kept` if given, and score the loaded model."""
    with tempfile.TemporaryDirectory() as folder:
        path = kept or Path(folder) / "model.lbc"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        made = lb.compress(bnn, path, values=values, rest=rest)
        middle = time.perf_counter()
        loaded = lb.load(path, bnn.to_deterministic()).eval()
        end = time.perf_counter()
    return {
        "values": values,
        "rest": rest,
        "bytes": made.bytes,
        "parts": made.parts,
        **counts_of(bnn.posterior),
        "compress_seconds": middle - start,
        "load_seconds": end - middle,
        **evaluator.evaluate(loaded.to(evaluator.device)),
    }


def paper_parameters(outliers: int, ellipses: int, gaussians: int) -> int:
    """Return outliers + ellipses + 2·Gaussians (Tables 1 to 3), which omits labels, covariances and σ of outliers."""
    return outliers + ellipses + 2 * gaussians


def counts_of(posterior: Any) -> dict[str, int]:
    """Count outliers, blended weights and shared Gaussians, and the parameters by the paper's definition."""
    assert isinstance(posterior, SharedPosterior)
    counts = posterior.counts()[:-1]
    common = counts > 1
    common[posterior.partners.flatten()] = True
    outliers, blends, gaussians = int((counts[~common] == 1).sum()), len(posterior.blended), int(common.sum())
    found = {"outliers": outliers, "blends": blends, "gaussians": gaussians}
    return {**found, "paper_parameters": paper_parameters(outliers, blends, gaussians)}


def line(row: Mapping[str, Any]) -> str:
    """Format a row as one line."""
    settings = [f"{key} {row[key]}" for key in ("name", *SETTINGS) if key in row]
    scores = [f"{key} {row['test']['samples'][key]:.4f}" for key in SCORES]
    size = f"{row['bytes']:,} bytes, held-out nll {row['held_out']['nll']:.4f}"
    return f"{', '.join(settings)}: {size}, {', '.join(scores)}"
