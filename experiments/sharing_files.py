"""Models whose weights share, as files: how they are made of a trained run, written, loaded and judged."""

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
from leanbayes import config
from leanbayes.cli.looking import ood_sets
from leanbayes.cli.runs import TrainedRun
from leanbayes.compression.sharing import paper_parameters
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import Look
from leanbayes.evaluation.assessment import batch_size, some
from leanbayes.evaluation.detection import detection_scores
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.evaluation.scores import Scores, ignored, predictions
from leanbayes.methods import parse_method
from leanbayes.posteriors import SharedPosterior
from leanbayes.training import fit
from leanbayes.training.run import REFRESH_EXAMPLES

SCORES = ("accuracy", "nll", "ece", "brier")
SETTINGS = ("components", "bit_price", "rate", "epochs", "lr", "values")  # that tell one file of a run from another
GRADIENT_BATCHES = 50  # that say which weights are outliers, as many as a training takes

Row = dict[str, Any]


# -- how a model is judged --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Terms:
    """How a model is judged, as command lines ask: with how many draws, on how many examples, and on which others."""

    root: Path | None
    seed: int
    samples: int
    calibration: int
    examples: int | None
    train_examples: int | None = None
    ood: Sequence[str] = ()
    ood_examples: int = 1

    @classmethod
    def asked(cls, args: argparse.Namespace) -> Self:
        """Take those that a command line has asked for."""
        known = [field.name for field in dataclasses.fields(cls) if hasattr(args, field.name)]
        return cls(**{name: getattr(args, name) for name in known})


class Judge:
    """The data of a run, and what is told of a model on them."""

    def __init__(self, run: TrainedRun, terms: Terms) -> None:
        data = run.data(terms.root)
        if data.task != "classification" or data.test is None:
            raise LeanBayesError(f"{data.name} has no test data with classes: give a run on others.")
        self.terms, self.device = terms, run.model.device
        limits = {"train": terms.train_examples, "validation": terms.examples, "test": terms.examples}
        parts: Any = {name: some(getattr(data, name), limit, terms.seed) for name, limit in limits.items()}
        self.data = dataclasses.replace(data, **parts)
        look = Look(ood_examples=terms.ood_examples, seed=terms.seed)
        self.others = ood_sets(terms.ood, self.data, terms.root, look, self.device)[0]

    def batches(self, dataset: Dataset[Any], limit: int | None = None, augmented: bool = False) -> Iterator[Any]:
        """Give batches: in a fixed order, or augmented and shuffled as in a training."""
        return Batches(
            some(dataset, limit, self.terms.seed),
            batch_size(self.data.input_shape),
            device=self.device,
            seed=self.terms.seed,
            shuffle=augmented,
            augment=self.data.augment if augmented else None,
            normalise=self.data.normalise,
        ).epoch()

    def outcome(self, bnn: lb.BayesianModel, dataset: Dataset[Any], **how: Any) -> tuple[Row, ClassOutcome]:
        """Predict, and return scores and outcomes."""
        scores = Scores(ignored(bnn), details=True)
        for prediction, y in predictions(bnn, self.batches(dataset), seed=self.terms.seed, **how):
            scores.update(prediction, y)
        found, values = scores.outcome(), scores.compute()
        assert isinstance(found, ClassOutcome)
        return {key: values[key] for key in SCORES}, found

    def tested(self, bnn: lb.BayesianModel, **how: Any) -> dict[str, Any]:
        """Score on the test data, and tell them from others by the entropy."""
        assert self.data.test is not None
        scores, inside = self.outcome(bnn, self.data.test, **how)
        ood = {}
        for name, dataset in self.others.items():
            batches = self.batches(dataset, self.terms.ood_examples)
            seen = predictions(bnn, batches, seed=self.terms.seed, **how)
            doubts = torch.cat([prediction.entropy for prediction, _ in seen])
            ood[name] = {"examples": len(doubts), **detection_scores(inside.entropy.cpu(), doubts.cpu())}
        return {**scores, "ood": ood}

    def of(self, bnn: lb.BayesianModel) -> dict[str, Any]:
        """Score with draws, on held-out and on test data, and by one pass; a plain network knows one way alone."""
        one_pass = bnn.trained_rule == "moments"
        random = (one_pass or bnn.current_rule.random) and bnn.members is None and bnn.layout.numel > 0
        draws: dict[str, Any] = {"samples": self.terms.samples if random else None}
        draws |= {"rule": "sample"} if one_pass else {}
        test = {"draws": self.tested(bnn, **draws)}
        found = {"held_out": self.outcome(bnn, self.data.validation, **draws)[0], "test": test}
        if random:
            for way, model in (("one_pass", bnn), ("one_pass_by_labels", self.by_labels(bnn))):
                test[way] = self.tested(model, rule="moments")
                found[f"held_out_{way}"] = self.outcome(model, self.data.validation, rule="moments")[0]
        return found

    def calibrate(self, bnn: lb.BayesianModel) -> None:
        """Fit the two factors of one pass to draws on held-out data, unless the model was trained by one pass."""
        if bnn.trained_rule == "moments":
            return
        generator = torch.Generator().manual_seed(self.terms.seed)
        bnn.calibrate_moments(self.batches(self.data.validation, self.terms.calibration), self.terms.samples, generator)

    def by_labels(self, bnn: lb.BayesianModel) -> lb.BayesianModel:
        """Return a copy whose factors of one pass are fitted to the labels of all held-out data."""
        made = copy.deepcopy(bnn)
        made.calibrate_moments(self.batches(self.data.validation), to="labels")
        return made


# -- sharing ----------------------------------------------------------------------------------------------------------


def method_for(bnn: lb.BayesianModel, text: str, **settings: Any) -> lb.WeightSharing:
    """Read how weights share; prior, rule and draws are those that the model was trained with, where it has such."""
    method = parse_method(text)
    if not isinstance(method, lb.WeightSharing):
        raise LeanBayesError(f"{text} shares no weights: give weight-sharing, with settings if wished.")
    kept = {name: getattr(bnn.method, name) for name in ("prior", "rule", "samples") if hasattr(bnn.method, name)}
    return dataclasses.replace(method, **{**kept, **settings}, pretrain=0.0, pretrain_spreads=0.0)


def shared(bnn: lb.BayesianModel, method: lb.WeightSharing, judge: Judge) -> lb.BayesianModel:
    """Let the weights of a model share, and bring BatchNorm in line; nothing is trained."""
    batches = itertools.islice(judge.batches(judge.data.train), GRADIENT_BATCHES) if method.needs_data else None
    made = lb.bayesianize(bnn, method, data=batches).eval()
    made.trained_rule = bnn.trained_rule
    inputs = (x for x, _ in judge.batches(judge.data.train, REFRESH_EXAMPLES, augmented=True))
    made.refresh_batchnorm(inputs, torch.Generator().manual_seed(judge.terms.seed))
    return made


def final_recipe(run: TrainedRun, args: argparse.Namespace, epochs: int, lr: float) -> dict[str, Any]:
    """Return how what is shared is trained: at the temperature that the run has ended with."""
    recipe, gpu = run.record["config"]["recipe"], run.model.device.type == "cuda"
    end = recipe["temperature_end"]
    return {
        "epochs": epochs,
        "batch_size": args.batch_size,
        "optimiser": "adamw",
        "lr": lr,
        "weight_decay": 0.0,  # the prior is there
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


def shared_rows(args: argparse.Namespace, run: TrainedRun, judge: Judge, done: Sequence[Row]) -> Iterator[Row]:
    """Give a row for every file that is not done: components, prices, rates, trainings, and precisions of one model."""
    known = [tuple(row[key] for key in SETTINGS) for row in done]
    trainings = [(n, lr) for n in args.epochs for lr in (args.lrs if n else [None])]
    grid = itertools.product(args.components, args.bit_prices, args.rates, trainings)
    for components, price, rate, (epochs, lr) in grid:
        missing = [values for values in args.values if (components, price, rate, epochs, lr, values) not in known]
        if not missing:
            continue
        begun = run.model if rate is None else run.model.restrict(rate)
        rule = {} if args.rule is None else {"rule": args.rule}
        method = method_for(run.model, args.method, components=components, bit_price=price, **rule)
        start = time.perf_counter()
        if lr is None:
            bnn = shared(begun, method, judge)
        else:
            bnn = fit(begun, method, judge.data, progress=False, **final_recipe(run, args, epochs, lr))
        seconds = time.perf_counter() - start
        judge.calibrate(bnn)
        settings = {"components": components, "bit_price": price, "rate": rate, "epochs": epochs, "lr": lr}
        for values in missing:
            kept = None if args.keep is None else args.keep / name_of_file({**settings, "values": values})
            row = settings | {"method": config.encode(method), "model_seconds": seconds}
            row |= of_file(bnn, judge, values, args.rest, kept)
            print(line(row), flush=True)
            yield row


def name_of_file(row: Row) -> str:
    """Name a file by its settings."""
    return f"{'-'.join(str(row[key]) for key in SETTINGS)}.lbc"


def of_file(bnn: lb.BayesianModel, judge: Judge, values: Any, rest: Any, kept: Path | None = None) -> Row:
    """Write a compact file, which may be kept, and score what is loaded from it."""
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
        **judge.of(loaded.to(judge.device)),
    }


def counts_of(posterior: Any) -> dict[str, int]:
    """Count outliers, blended weights and shared Gaussians, and what the paper makes of these."""
    assert isinstance(posterior, SharedPosterior)
    counts = posterior.counts()[:-1]
    common = counts > 1
    common[posterior.partners.flatten()] = True
    outliers, blends, gaussians = int((counts[~common] == 1).sum()), len(posterior.blended), int(common.sum())
    found = {"outliers": outliers, "blends": blends, "gaussians": gaussians}
    return {**found, "paper_parameters": paper_parameters(outliers, blends, gaussians)}


def line(row: Mapping[str, Any]) -> str:
    """Write a row in a line."""
    told = [f"{key} {row[key]}" for key in ("name", *SETTINGS) if key in row]
    scores = [f"{key} {row['test']['draws'][key]:.4f}" for key in SCORES]
    size = f"{row['bytes']:,} bytes, held-out nll {row['held_out']['nll']:.4f}"
    return f"{', '.join(told)}: {size}, {', '.join(scores)}"
