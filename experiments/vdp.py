"""Experiments of the VDP++ paper, on runs of `leanbayes compare`.

python experiments/vdp.py RUNS ... --out experiments/results/vdp/NAME.json --figures FOLDER

Every run is scored on the test data, under noise at several signal-to-noise ratios, and with more and more of its
smallest weights set to zero; its saliency maps are scored by Infidelity and Sensitivity-Max if captum is installed. The
output variance is that of the probability and the logit of the predicted class, in one pass and over Monte Carlo
samples. Methods are compared over their seeds.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from torch import Tensor
from trained_runs import folders, save

import leanbayes as lb
from leanbayes.cli.runs import open_run
from leanbayes.core import config
from leanbayes.core.network import call_with, evaluation_mode, output_tensor
from leanbayes.core.noise import mix
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.evaluation import evaluate
from leanbayes.evaluation.explanation import explanation_scores
from leanbayes.evaluation.full_evaluation import some
from leanbayes.evaluation.pruning import SHARES, prune
from leanbayes.evaluation.seeds import anova, paired_test, spearman, summarize
from leanbayes.evaluation.shift import add_noise
from leanbayes.methods import describe_method
from leanbayes.report.figure import Figure
from leanbayes.report.figures.pruning_curve import pruning_figure
from leanbayes.report.figures.seed_lines import mean_line
from leanbayes.rules.covariance import Covariances
from leanbayes.training import read_record
from leanbayes.training.record import machine, versions, write_json

DECIBELS = (-6, -3, 1, 5, 10, 20, 40)  # signal to noise, relative to the power of each image
FEW_DECIBELS = (-6, 5, 40)  # for full covariances, which are slow
SCORES = ("accuracy", "nll", "ece")
VARIANCES = ("variance", "logit_variance", "sampled_variance", "sampled_logit_variance")  # of the predicted class
LEVEL = 0.99  # of the intervals; the paper tests at 0.01
PRUNED = 0.9  # fraction of pruned weights at which the lost accuracy is reported
PART, FEW = 250, 8  # images per batch, and with full covariances
COLUMNS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
    "noisy_accuracy": (f"at {DECIBELS[0]} dB", "{:.2%}"),
    "spearman": ("ρ(variance, SNR)", "{:.3f}"),
    "lost": (f"lost at {PRUNED:.0%} pruned", "{:.2%}"),
    "infidelity": ("infidelity", "{:.4f}"),
    "sensitivity_max": ("sensitivity", "{:.4f}"),
}

Given = list[tuple[Tensor, Tensor]]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of leanbayes compare or of one run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--figures", type=Path, help="folder for the figures (SVG)")
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    parser.add_argument("--examples", type=int, default=1000, help="test images for noise and pruning")
    parser.add_argument("--samples", type=int, default=30, help="Monte Carlo samples, for rules that sample")
    parser.add_argument("--explained", type=int, default=32, help="images to compute saliency maps for")
    parser.add_argument("--no-explain", dest="explained", action="store_const", const=0, help="no saliency maps")
    parser.add_argument("--covariance", type=int, default=0, help="images to compare with full covariances (VDP only)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and samples")
    args = parser.parse_args()
    if args.examples < 1 or args.samples < 2 or min(args.explained, args.covariance) < 0:
        parser.error("--examples must be 1 or more, --samples 2 or more, and no number may be negative")
    return args


class Evaluator:
    """Evaluates models on test images: clean, noisy, pruned and explained."""

    def __init__(self, args: argparse.Namespace, data: Data) -> None:
        if data.test is None or data.task != "classification" or len(data.input_shape) != 3:
            raise LeanBayesError(f"{data.name} has no labeled test images: train on another data set.")
        self.args, self.data = args, data
        self.notes: list[str] = []
        self.explained = args.explained
        if self.explained and not importlib.util.find_spec("captum"):
            self.explained = 0
            self.note("captum is not installed, so Infidelity and Sensitivity-Max are left out.")

    def note(self, text: str) -> None:
        """Add a note about skipped results, once."""
        if text not in self.notes:
            self.notes.append(text)

    def evaluate(self, bnn: lb.BayesianModel) -> dict[str, Any]:
        """Return all results of one model."""
        args, random = self.args, bnn.layout.numel > 0
        how: dict[str, Any] = {"samples": args.samples if bnn.current_rule.random else None, "seed": args.seed}
        if bnn.members is not None or not random:
            how["samples"] = None  # an ensemble uses its members, a deterministic network has no samples
        chosen = self.images(bnn, args.examples)
        test = evaluate(bnn, self.batches(bnn, None).epoch(), **how)
        noise = [self.under_noise(bnn, chosen, decibels, random, how) for decibels in DECIBELS]
        batches = [(self.normalized(x), y) for x, y in chosen]
        curve = [{"share": share} | evaluate(prune(bnn, share), batches, **how) for share in SHARES]
        pruning = [{key: point[key] for key in ("share", *SCORES)} for point in curve]
        kept = {point["share"]: point["accuracy"] for point in pruning}
        found: dict[str, Any] = {
            "scores": {key: test[key] for key in SCORES},
            "noise": noise,
            "spearman": {
                key: spearman(DECIBELS, [level[key] for level in noise]).statistic
                for key in (*VARIANCES, "median_variance")
                if random
            },
            "pruning": pruning,
            "lost": kept[0.0] - kept[PRUNED],
        }
        if self.explained:
            explained = self.batches(bnn, self.explained).epoch()
            rule = None if bnn.current_rule.random else "mean"  # saliency maps need outputs, not moments
            found["explanation"] = explanation_scores(bnn, explained, rule=rule, **how)
        if args.covariance and isinstance(bnn.method, lb.VDP):
            found["covariance"] = self.full_covariance(bnn)
        return found

    def batches(self, bnn: lb.BayesianModel, limit: int | None, normalize: bool = True) -> Batches:
        """Return batches of test images, at most `limit` images."""
        assert self.data.test is not None
        dataset = some(self.data.test, limit, self.args.seed)
        scale = self.data.normalize if normalize else None
        return Batches(dataset, PART, device=bnn.device, shuffle=False, normalize=scale)

    def images(self, bnn: lb.BayesianModel, limit: int) -> Given:
        """Return test images with values from 0 to 1."""
        batches = self.batches(bnn, limit, normalize=False).epoch()
        return [(x / 255 if x.dtype == torch.uint8 else x, y) for x, y in batches]

    def normalized(self, x: Tensor) -> Tensor:
        """Normalize images as in training."""
        return x if self.data.normalize is None else self.data.normalize(x)

    def noisy(self, images: Given, decibels: float) -> Given:
        """Add noise before normalization, the same noise for all models."""
        found = []
        for number, (x, y) in enumerate(images):
            generator = torch.Generator().manual_seed(mix(self.args.seed, number))
            found.append((self.normalized(add_noise(x, decibels, generator)), y))
        return found

    def under_noise(
        self, bnn: lb.BayesianModel, images: Given, decibels: float, random: bool, how: dict[str, Any]
    ) -> dict[str, float]:
        """Return scores on noisy images, and mean and median variance of the predicted class."""
        batches = self.noisy(images, decibels)
        scores = evaluate(bnn, batches, details=False, **how)
        found = {"snr": float(decibels), **{key: scores[key] for key in SCORES}}
        if random:
            rule = "moments" if bnn.current_rule.random else bnn.rule
            of = (*variances(bnn, batches, rule), *sampled_variances(bnn, batches, self.args.samples, self.args.seed))
            found |= {key: values.mean().item() for key, values in zip(VARIANCES, of, strict=True)}
            found["median_variance"] = of[0].median().item()
        return found

    def full_covariance(self, bnn: lb.BayesianModel) -> dict[str, Any] | None:
        """Compare the logit variances of VDP++ with those of full covariances, per image."""
        images = self.images(bnn, self.args.covariance)
        pairs = []
        for decibels in FEW_DECIBELS:
            noisy = self.noisy(images, decibels)
            few = [(part, y) for x, y in noisy for part in x.split(FEW)]
            try:
                pairs.append((variances(bnn, noisy, bnn.rule)[1], variances(bnn, few, "covariance")[1]))
            except UnsupportedOperation as error:
                self.note(f"Full covariances are left out: {error}")
                return None
        ours, full = (torch.cat(parts).double().cpu() for parts in zip(*pairs, strict=True))
        return {
            "examples": len(pairs[0][0]),
            "noise": [
                {"snr": float(snr), "moments": a.mean().item(), "covariance": b.mean().item()}
                for snr, (a, b) in zip(FEW_DECIBELS, pairs, strict=True)
            ],
            "spearman": spearman(ours.tolist(), full.tolist()).statistic,
            "ratio": (ours / full).quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist(),
        }


@torch.no_grad()
def variances(bnn: lb.BayesianModel, batches: Given, rule: str) -> tuple[Tensor, Tensor]:
    """Return the variances of probability and logit of the predicted class per image, in one pass."""
    parts = []
    with bnn.using(rule), evaluation_mode(bnn):
        for x, _ in batches:
            output = output_tensor(call_with(bnn, x))
            output = output.moments() if isinstance(output, Covariances) else output
            label = output.loc.argmax(1, keepdim=True)
            parts.append([of.variance.gather(1, label)[:, 0] for of in (output.softmax(1), output)])
    probs, logits = zip(*parts, strict=True)
    return torch.cat(probs), torch.cat(logits)


@torch.no_grad()
def sampled_variances(bnn: lb.BayesianModel, batches: Given, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the same variances over Monte Carlo samples."""
    generator, outputs = torch.Generator().manual_seed(seed), []
    with bnn.using("sample"), evaluation_mode(bnn):
        for number in range(samples):
            with bnn.drawn(bnn.next_draw(generator, number)) as call:
                outputs.append(torch.cat([output_tensor(call_with(call, x)) for x, _ in batches]).float())
    logits = torch.stack(outputs)
    probs = logits.softmax(-1)
    label = probs.mean(0).argmax(1, keepdim=True)
    return probs.var(0).gather(1, label)[:, 0], logits.var(0).gather(1, label)[:, 0]


# -- over seeds -------------------------------------------------------------------------------------------------------


def metrics_of(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a run by which methods are compared."""
    found = {**result["scores"], "noisy_accuracy": result["noise"][0]["accuracy"], "lost": result["lost"]}
    if result["spearman"]:
        found["spearman"] = result["spearman"]["variance"]
    explanation = result.get("explanation") or {}
    return found | {key: explanation[key] for key in ("infidelity", "sensitivity_max") if key in explanation}


def by_method(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group runs by method, in the order of their seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda result: result["seed"]):
        found.setdefault(result["name"], []).append(result)
    return {name: found[name] for name in dict.fromkeys(result["name"] for result in results)}


def summary_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over seeds, tests of differences between methods, and tests of the accuracy lost by pruning."""
    methods = by_method(results)
    values: dict[str, dict[str, list[float]]] = {}
    for name, runs in methods.items():
        of_runs = [metrics_of(run) for run in runs]
        values[name] = {key: [one[key] for one in of_runs] for key in of_runs[0]}
    means = {
        name: {key: dataclasses.asdict(summarize(numbers, LEVEL)) for key, numbers in of.items()}
        for name, of in values.items()
    }
    tests: dict[str, Any] = {}
    for key in COLUMNS:
        groups = {name: of[key] for name, of in values.items() if key in of}
        if len(groups) < 2:
            continue
        pairs = [
            {"first": a, "second": b, **dataclasses.asdict(paired_test(groups[a], groups[b], LEVEL))}
            for a, b in itertools.combinations(groups, 2)
            if [run["seed"] for run in methods[a]] == [run["seed"] for run in methods[b]]
        ]
        tests[key] = {"anova": dataclasses.asdict(anova(list(groups.values()))), "pairs": pairs}
    pruned = {name: _cost_of_pruning(runs) for name, runs in methods.items()}
    return {"level": LEVEL, "methods": means, "tests": tests, "pruning": pruned}


def _cost_of_pruning(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    curves = [{point["share"]: point["accuracy"] for point in run["pruning"]} for run in runs]
    return dataclasses.asdict(paired_test([c[0.0] for c in curves], [c[PRUNED] for c in curves], LEVEL))


def figures_of(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the figures of the paper, one line per method: variance and accuracy over noise, and pruning."""
    methods = by_method(results)
    random = {name: runs for name, runs in methods.items() if all(run["noise"][0].get("variance") for run in runs)}
    accuracies = {
        name: [[level["accuracy"] for level in run["noise"]] for run in runs] for name, runs in methods.items()
    }
    pruning = pruning_figure({name: runs[0]["pruning"] for name, runs in methods.items()}, "accuracy")
    pruned = {name: [[point["accuracy"] for point in run["pruning"]] for run in runs] for name, runs in methods.items()}
    figures = [
        Figure(
            key="snr-accuracy",
            title="Accuracy under noise",
            kind="lines",
            x="signal to noise, dB",
            y="accuracy",
            caption="Gaussian noise is added to the test images, relative to the power of each image.",
            series=tuple(mean_line(name, DECIBELS, lines) for name, lines in accuracies.items()),
            percent="y",
        ),
        dataclasses.replace(
            pruning,
            series=tuple(mean_line(one.name, one.x, pruned[one.name]) for one in pruning.series),
        ),
    ]
    if random:
        levels = {name: [_relative(run, "variance") for run in runs] for name, runs in random.items()}
        figure = Figure(
            key="snr-variance",
            title="Output variance under noise",
            kind="lines",
            x="signal to noise, dB",
            y=f"variance relative to {DECIBELS[0]} dB",
            caption="Mean variance of the probability of the predicted class, in one pass; it falls with the noise.",
            series=tuple(mean_line(name, DECIBELS, lines) for name, lines in levels.items()),
        )
        figures.insert(0, figure)
    return figures


def _relative(run: dict[str, Any], key: str) -> list[float]:
    first = run["noise"][0][key]
    return [level[key] / first for level in run["noise"]]


# -- output -----------------------------------------------------------------------------------------------------------


def names_of(methods: Iterable[lb.Method]) -> dict[str, str]:
    """Return short names of methods; several of one kind are distinguished by the first setting that differs."""
    different = {describe_method(method): method for method in methods}
    names = {}
    for full, method in different.items():
        kind = full.partition(":")[0]
        alike = [other for other in different.values() if type(other) is type(method)]
        fields = [field.name for field in dataclasses.fields(method)]  # type: ignore[arg-type]
        distinct = [name for name in fields if len({str(getattr(other, name)) for other in alike}) == len(alike)]
        distinct.sort(key=lambda name: not isinstance(getattr(method, name), str))
        setting = f", {distinct[0]}={getattr(method, distinct[0])}" if distinct else full.removeprefix(kind)
        names[full] = kind if len(alike) == 1 else kind + setting
    return names


def table(results: Sequence[dict[str, Any]]) -> str:
    """Format the means over seeds, one line per method."""
    lines = [["", *(title for title, _ in COLUMNS.values())]]
    for name, runs in by_method(results).items():
        of_runs = [metrics_of(run) for run in runs]
        cells = [
            form.format(statistics.mean(one[key] for one in of_runs)) if key in of_runs[0] else ""
            for key, (_, form) in COLUMNS.items()
        ]
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join([line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], others, strict=True))]).rstrip()
        for line in lines
    )


def main() -> None:
    """Evaluate and compare all runs, write and print the results."""
    args = options()
    places = [place for given in args.runs for place in folders(given)]
    records = [read_record(place)["config"] for place in places]
    tasks = [(record["source"], record["model"]) for record in records]
    if any(task != tasks[0] for task in tasks):
        raise LeanBayesError("The runs differ in data set or network: give runs of one task.")
    names = names_of(config.decode(record["method"]) for record in records)
    evaluator: Evaluator | None = None
    results = []
    for place, record in zip(places, records, strict=True):
        run = open_run(place, args.device)
        evaluator = evaluator or Evaluator(args, run.data(args.root))
        name, seed = names[describe_method(run.model.method)], record["recipe"]["seed"]
        print(f"{name}, seed {seed} ...", file=sys.stderr, flush=True)
        about = {"name": name, "seed": seed, "method": record["method"], "costs": run.record["costs"]}
        results.append(about | evaluator.evaluate(run.model))
    assert evaluator is not None
    figures = figures_of(results)
    if args.out is not None:
        source = {**records[0]["source"], "name": Path(records[0]["source"]["name"]).name}
        found = {
            "command": command_of("vdp", args, [path.resolve().name for path in args.runs]),
            "seed": args.seed,
            "seeds": sorted({result["seed"] for result in results}),
            "source": source,
            "model": records[0]["model"],
            "recipe": {key: value for key, value in records[0]["recipe"].items() if key != "seed"},
            "versions": versions(),
            "machine": machine(),
            "examples": min(args.examples, len(evaluator.data.test)),  # type: ignore[arg-type]
            "samples": args.samples,
            "explained": evaluator.explained,
            "notes": evaluator.notes,
            "results": results,
            "summary": summary_of(results),
            "figures": [figure.to_json() for figure in figures],
        }
        write_json(args.out, found)
    if args.figures is not None:
        save(figures, args.figures)
    for text in evaluator.notes:
        print(text)
    print(table(results))


if __name__ == "__main__":
    run_script(main)
