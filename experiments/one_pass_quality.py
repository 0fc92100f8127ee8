"""Compare one pass in all its forms with Monte Carlo samples and rivals: likelihood, closeness to samples, OOD, cost.

python experiments/one_pass_quality.py MODEL.safetensors --data cifar10 --model resnet-18 --out FILE.json

The model is a file of `lb.save` or `lb.compress`. The reference are many samples, made once; all other predictors are
compared with it on the same test images and on some out-of-distribution (OOD) images. With `--reference-limit`, these
are the first of the test images, and predictors without samples are scored on all of them, too. Corrections are fitted
on held-out images without labels. Factors and the temperature are fitted on held-out labels, and rows that use labels
say so. A model that was trained on another share than 90 % of the images needs its `--validation-share`. Results are
written after each predictor.

KL is KL(reference || predictor), the mean over examples. Correlations are those of log variances over examples: of the
mean variance of the logits of an example, and of the difference of the two logits that are largest at the posterior
mean. The std ratio is the median over all logits, and over the examples for the difference of two.
"""

import argparse
import contextlib
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from arguments import add_common_arguments, command_of, run_script
from mean_network import best_temperature
from one_pass_predictors import Predicted, Set, by_rule, by_samples, one_scalar_per_layer, suq
from torch import Tensor
from torch.utils.data import Dataset

import leanbayes as lb
from leanbayes.data import Batches, load, ood_partners, read_images
from leanbayes.errors import LeanBayesError, RuleMismatchWarning, UnsupportedOperation
from leanbayes.evaluation import Scores
from leanbayes.evaluation.detection import auroc
from leanbayes.evaluation.full_evaluation import UNCERTAINTIES, batch_size, some
from leanbayes.evaluation.metrics import Whole
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.evaluation.scores import ignored
from leanbayes.evaluation.selective import coverage_at_risk
from leanbayes.networks import build
from leanbayes.rules import Adjoint, Rule
from leanbayes.training.record import machine, versions, write_json

COUNTS = (4, 8, 16, 30, 100)
LABELS = ", factors by labels"  # the end of the names of predictors that use labels
COVERAGE = Whole("coverage_at_half_percent", lambda o: coverage_at_risk(-o.confidence, (~o.right).double(), 0.005))
SCORES = ("nll", "ece", "accuracy", "aurc", COVERAGE.name, "coverage_at_1_percent")
LEAST = 1e-30

How = Callable[[Set], Predicted]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("file", type=Path, help="file of lb.save or lb.compress")
    parser.add_argument("--data", required=True, help="name of the data set, or the path of a folder")
    parser.add_argument("--model", required=True, help="name of the network")
    parser.add_argument(
        "--model-options", type=option, nargs="+", default=[], metavar="NAME=VALUE", help="of the network"
    )
    parser.add_argument(
        "--resize", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="size of the images of a folder"
    )
    parser.add_argument("--title", help="name of the model in tables (default: that of the file)")
    parser.add_argument("--limit", type=int, help="test images (default: all)")
    parser.add_argument(
        "--reference-limit", type=int, help="of the test images, the first ones that samples predict (default: all)"
    )
    parser.add_argument("--ood-limit", type=int, default=10_000, help="images of each OOD data set; 0 for none")
    parser.add_argument("--ood-reference", type=int, default=2000, help="of the first one, compared with the reference")
    parser.add_argument("--reference-samples", type=int, default=1000)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="numbers of samples to score")
    parser.add_argument("--fit-samples", type=int, default=64, help="samples that corrections are fitted to")
    parser.add_argument("--fit-inputs", type=int, default=256, help="held-out images for corrections")
    parser.add_argument("--labels", type=int, default=5000, help="held-out labels for factors and temperature")
    parser.add_argument(
        "--validation-share", type=float, default=0.1, help="share of the training data that the training held out"
    )
    parser.add_argument("--batch", type=int, help="images per batch (default: 500, fewer if they are large)")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile passes at once")
    parser.add_argument("--no-cost", action="store_true", help="do not measure times")
    parser.add_argument("--cost-batch", type=int, default=256, help="images per batch whose time is measured")
    parser.add_argument("--repeats", type=int, default=10, help="times that each predictor is measured")
    args = add_common_arguments(parser).parse_args()
    if args.counts != sorted(set(args.counts)) or args.counts[0] < 2 or args.reference_samples < 2:
        parser.error("--counts must be increasing, and at least 2; so must --reference-samples")
    return args


def option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, where the value is JSON, or else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def text_of(value: Any) -> str:
    """Return the value of an option as text, for `option`."""
    return value if isinstance(value, str) else json.dumps(value)


class Comparison:
    """All predictors of one model; results are in `record`."""

    def __init__(self, args: argparse.Namespace) -> None:
        resize = args.resize and tuple(args.resize)
        self.args = args
        self.data = load(args.data, args.root, validation_share=args.validation_share, resize=resize)
        if self.data.test is None or self.data.task == "regression":
            raise LeanBayesError(f"{self.data.name} has no labeled test images: give a data set of classes.")
        model_options = dict(args.model_options)
        network = build(args.model, self.data.input_shape, self.data.outputs, **model_options)
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.bnn = lb.load(args.file, network).to(device).eval()
        self.channels_last = device == "cuda" and len(self.data.input_shape) == 3
        if self.channels_last:
            self.bnn = self.bnn.to(memory_format=torch.channels_last)
        if self.bnn.members is not None or not any(self.bnn.posterior.random_slots()):
            raise LeanBayesError(f"{args.file} has no Bayesian weights: give a model of mean-field or ssvi.")
        self.reset()
        self.test = Set(self.bnn, self.batches(some(self.data.test, args.limit, args.seed)))
        self.ood = {
            name: Set(self.bnn, self.batches(some(read_images(name, "test", args.root), args.ood_limit, args.seed)))
            for name in (ood_partners(self.data.name) if self.data.task == "classification" and args.ood_limit else ())
        }
        self.sampled = self.test.first(args.reference_limit or self.test.images)
        self.labeled = self.batches(some(self.data.validation, args.labels, args.seed))
        words = [args.file.name, "--data", self.data.name]
        if args.model_options:
            words += ["--model-options", *(f"{name}={text_of(value)}" for name, value in args.model_options)]
        self.record: dict[str, Any] = {
            "command": command_of("one_pass_quality", args, words, hidden=("file", "data", "model_options")),
            "title": args.title or args.file.stem,
            "data": self.data.name,
            "model": {"name": args.model, "options": model_options},
            "method": type(self.bnn.method).__name__,
            "trained_rule": self.bnn.trained_rule,
            "random_weights": int((self.bnn.posterior.variance() > 0).sum()),
            "seed": args.seed,
            "versions": versions(),
            "machine": machine(),
            "precision": "bf16" if args.bf16 else "fp32",
            "images": self.sampled.images,
            "rows": len(self.sampled.labels),
            "all_images": self.test.images,
            "ood_images": {name: images.images for name, images in self.ood.items()},
            "reference_samples": args.reference_samples,
            "fit": {"samples": args.fit_samples, "inputs": args.fit_inputs},
            "labels": sum(len(y) for _, y in self.labeled),
            "validation_share": args.validation_share,
            "predictors": {},
            "left_out": {},
        }

    def batches(self, dataset: Dataset[Any]) -> list[tuple[Tensor, Tensor]]:
        """Return normalized batches in order, on the device."""
        size = self.args.batch or batch_size(self.data.input_shape)
        settings = {"normalize": self.data.normalize, "channels_last": self.channels_last}
        return list(Batches(dataset, size, device=self.bnn.device, shuffle=False, **settings).epoch())

    def reset(self) -> None:
        """Remove all corrections and factors."""
        self.bnn.moment_scale, self.bnn.moment_layers, self.bnn.moment_margins = (1.0, 1.0), {}, ()

    def run(self) -> None:
        """Run all predictors, and write the results after each."""
        args, bnn = self.args, self.bnn
        self.compared = {"test": self.sampled}
        if self.ood:
            name = next(iter(self.ood))
            self.compared[name] = self.ood[name].first(args.ood_reference)
        start = perf_counter()
        self.reference = {
            name: next(by_samples(bnn, images, [args.reference_samples], args.seed + 1))[1]
            for name, images in self.compared.items()
        }
        log(f"reference, {perf_counter() - start:.0f} s")
        self.add(f"{args.reference_samples} samples, the reference", self.reference)
        self.samples()
        self.add_rule("mean network", "mean")
        self.with_temperature()
        for name, fit in self.fits().items():
            self.reset()
            seconds = timed(fit)
            self.add_rule(f"moments{name}", "moments", fit_seconds=seconds)
            self.with_adjoint(name)
            lb.calibrate(bnn, self.labeled, to="labels")
            self.add_rule(f"moments{name}{LABELS}", "moments", factors=bnn.moment_scale)
        self.reset()
        rival = suq(bnn)
        if isinstance(rival, str):
            self.leave_out("SUQ", rival)
        else:
            self.add("SUQ", {name: rival(images) for name, images in self.sets().items()})
        if not args.no_cost:
            self.record["cost"] = self.costs()
            self.write()

    def sets(self) -> dict[str, Set]:
        """Return all images by name."""
        return {"test": self.test, **self.ood}

    def fits(self) -> dict[str, Callable[[], object]]:
        """Return the ways to correct one pass without labels, by the end of the name of the predictor."""
        args, unlabeled = self.args, [x for x, _ in self.labeled]

        def generator() -> torch.Generator:
            return torch.Generator().manual_seed(args.seed + 7)

        def one_scalar() -> None:
            found = one_scalar_per_layer(self.bnn, unlabeled, args.fit_samples, args.fit_inputs, generator())
            self.bnn.moment_layers = found

        settings = {"samples": args.fit_samples, "layer_inputs": args.fit_inputs}
        return {
            "": lambda: None,
            ", one scalar per layer (CVP)": one_scalar,
            ", corrected layers": lambda: lb.calibrate(
                self.bnn, unlabeled, to="samples", layers=True, factors=False, generator=generator(), **settings
            ),
        }

    def samples(self) -> None:
        """Score each number of samples, from another stream than the reference."""
        sets = {**self.sets(), "test": self.sampled}
        streams = {name: by_samples(self.bnn, s, self.args.counts, self.args.seed + 2) for name, s in sets.items()}
        for count in self.args.counts:
            self.add(f"{count} samples", {name: next(stream)[1] for name, stream in streams.items()})

    def add_rule(self, name: str, rule: str | Rule, **more: Any) -> None:
        """Score one predictor without samples, or say why it does not run."""
        try:
            found = {key: by_rule(self.bnn, images, rule) for key, images in self.sets().items()}
        except UnsupportedOperation as error:
            self.leave_out(name, str(error))
            return
        self.add(name, found, **more)

    def with_adjoint(self, name: str) -> None:
        """Score the adjoint rule: its variances, and its own mean or that of one pass."""
        if not name:
            self.add_rule("adjoint", Adjoint())
        if "CVP" not in name:
            fits = [list(fit) for fit in self.bnn.moment_margins]
            for margins, title in (1, "adjoint"), (3, "adjoint, 3 margins"):
                rule = Adjoint(mean="moments", margins=margins)
                self.add_rule(f"{title}, mean of moments{name}", rule, margin_fits=fits)

    def with_temperature(self) -> None:
        """Score the mean network with the temperature that is best for the held-out labels."""
        held_out = Set(self.bnn, self.labeled)
        logits = torch.cat(held_out.means).cpu()
        temperature = best_temperature(logits, held_out.labels, ignored(self.bnn))
        found = {}
        for name, images in self.sets().items():
            probs = (torch.cat(images.means).cpu() / temperature).softmax(-1)
            found[name] = Predicted(probs, torch.zeros(len(probs)))
        self.add("mean network, temperature by labels", found, temperature=temperature)

    def add(self, name: str, found: dict[str, Predicted], **more: Any) -> None:
        """Score one predictor, and write all results so far."""
        inside = outcome(found["test"].first(len(self.sampled.labels)), self.sampled.labels, ignored(self.bnn))
        row: dict[str, Any] = scored(inside) | more
        if len(self.sampled.labels) < len(self.test.labels) and whole(found, "test", self.test):
            row["all_images"] = scored(outcome(found["test"], self.test.labels, ignored(self.bnn)))
        row["uses_labels"] = name.endswith((LABELS, "by labels"))
        for key, images in self.compared.items():
            part = compared(found[key], self.reference[key]) if found[key] is not self.reference[key] else {}
            row[f"{key}_against_reference"] = {"images": images.images, **part}
        outside = {
            key: outcome(found[key], images.labels * 0) for key, images in self.ood.items() if whole(found, key, images)
        }
        row["auroc"] = {
            key: {kind: auroc(of(inside), of(other)) for kind, of in UNCERTAINTIES.items()}
            for key, other in outside.items()
        }
        self.record["predictors"][name] = row
        log(f"{name}: NLL {row['nll']:.4f}, {row['test_against_reference']}")
        self.write()

    def leave_out(self, name: str, reason: str) -> None:
        """Record why a predictor does not run."""
        self.record["left_out"][name] = reason
        log(f"{name}: {reason}")
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        if self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.args.out, self.record)

    def costs(self) -> dict[str, Any]:
        """Return the median milliseconds of predicting one batch; the ways take turns, after a warm-up."""
        bnn, args = self.bnn, self.args
        x = torch.cat(self.test.inputs[: -(-args.cost_batch // len(self.test.inputs[0]))])[: args.cost_batch]
        network = bnn.to_deterministic().to(bnn.device).eval()
        compiled = {"compile": True} if args.compile else {}
        ways: dict[str, Callable[[], object]] = {
            "plain forward": lambda: network(x),
            "mean network": lambda: bnn.predict(x, rule="mean"),
            "moments": lambda: bnn.predict(x, rule="moments", **compiled),
        }
        if "adjoint" in self.record["predictors"]:
            ways["adjoint"] = lambda: bnn.predict(x, rule="adjoint")
            one, three = (Adjoint(mean="moments", margins=margins) for margins in (1, 3))
            ways["adjoint, mean of moments"] = lambda: bnn.predict(x, rule=one)
            ways["adjoint, 3 margins, mean of moments"] = lambda: bnn.predict(x, rule=three)
        for count in args.counts:
            ways[f"{count} samples"] = lambda count=count: bnn.predict(x, rule="sample", samples=count, **compiled)
        self.fits()[", corrected layers"]()
        corrected = bnn.moment_layers
        others = {"plain forward": ways["plain forward"], "moments, corrected layers": ways["moments"]}
        medians: dict[str, float] = {}
        over_plain: dict[str, float] = {}
        # Corrections are set once per series, because compiled code reads them where they are.
        for layers, group in ((dict[str, Tensor](), ways), (corrected, others)):
            bnn.moment_layers = layers
            taken: dict[str, list[float]] = {name: [] for name in group}
            warm_up = 3
            with torch.no_grad():
                for _ in range(args.repeats + warm_up):
                    for name, run in group.items():
                        taken[name].append(timed(run))
            own = {name: 1000 * statistics.median(times[warm_up:]) for name, times in taken.items()}
            medians = own | medians
            over_plain = {name: value / own["plain forward"] for name, value in own.items()} | over_plain
        self.reset()
        return {
            "images": len(x),
            "milliseconds": medians,
            "over_plain": over_plain,
            "compiled": args.compile,
        }


def outcome(found: Predicted, labels: Tensor, ignore_index: int = -100) -> ClassOutcome:
    """Combine a prediction with its labels, without the rows that have no label."""
    counted = labels != ignore_index
    probs = found.probs[counted].double()
    entropy = torch.special.entr(probs).sum(-1)
    return ClassOutcome(probs, labels[counted], entropy, found.mutual_information[counted].double())


def scored(found: ClassOutcome) -> dict[str, float]:
    """Return the scores of a prediction."""
    scores = Scores(details=True, metrics=[COVERAGE])
    scores.take(found)
    values = scores.compute()
    return {key: values[key] for key in SCORES}


def whole(found: dict[str, Predicted], name: str, images: Set) -> bool:
    """Whether there is a prediction for all images of a set; the reference has only some."""
    return name in found and len(found[name].probs) == len(images.labels)


def compared(found: Predicted, reference: Predicted) -> dict[str, float]:
    """Compare probabilities and variances with the reference, on its rows."""
    rows = len(reference.probs)
    p, q = reference.probs.double(), found.probs[:rows].double().clamp_min(LEAST)
    result = {"kl": (torch.xlogy(p, p) - p * q.log()).sum(-1).mean().item()}
    if found.variance is None or found.margin is None:
        return result
    assert reference.variance is not None
    assert reference.margin is not None
    ours, margin = found.variance[:rows].double(), found.margin[:rows].double()
    return result | {
        "log_correlation": correlation(ours.mean(-1), reference.variance.mean(-1)),
        "margin_log_correlation": correlation(margin, reference.margin),
        "std_ratio": (ours / reference.variance.clamp_min(LEAST)).sqrt().median().item(),
        "margin_std_ratio": (margin / reference.margin.clamp_min(LEAST)).sqrt().median().item(),
    }


def correlation(ours: Tensor, reference: Tensor) -> float:
    """Return the correlation of log variances."""
    return torch.corrcoef(torch.stack([ours, reference]).clamp_min(LEAST).log())[0, 1].item()


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call, including its work on the GPU."""
    wait()
    start = perf_counter()
    run()
    wait()
    return perf_counter() - start


def wait() -> None:
    """Wait for the GPU if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def precision(args: argparse.Namespace) -> Iterator[None]:
    """Autocast if asked for."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.autocast(device, torch.bfloat16) if args.bf16 else contextlib.nullcontext():
        yield


def log(what: str) -> None:
    """Print the current step."""
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Compare, and write."""
    args = options()
    warnings.simplefilter("ignore", RuleMismatchWarning)  # the comparison measures this mismatch
    with precision(args):
        Comparison(args).run()


if __name__ == "__main__":
    run_script(main)
