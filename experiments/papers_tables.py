"""The tables of docs/papers.md: every table, figure and ablation of the four papers, with the paper's numbers and ours.

The rows are in papers.toml. A cell of ours, or a verdict, calls the functions below, such as {usual cifar10_ssvi
mean-field}, which read the files in experiments/results.
"""

import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stored import read

from leanbayes.evaluation.seeds import paired_test

HERE = Path(__file__).parent
SEEDS = ("cifar10_methods", "cifar10_methods_seed_1", "cifar10_methods_seed_2")
RATES = ("0.01", "0.05", "0.1", "0.25", "0.5")
USUAL = ("accuracy", "nll", "ece")


def papers_tables(folder: Path) -> Iterator[str]:
    """Yield one section per paper. Rows whose results are missing are left out."""
    stored = Stored(folder)
    for paper in tomllib.loads((HERE / "papers.toml").read_text())["paper"]:
        lines = [
            f"## {paper['title']}\n",
            "| in the paper | the paper's result | ours | cost, if unusual | seeds | verdict |",
            "|---|---|---|---|---:|---|",
        ]
        for row in paper["row"]:
            try:
                ours, verdict = (re.sub(r"\{(.*?)\}", stored.call, row.get(cell, "")) for cell in ("ours", "verdict"))
            except MissingResultError:
                continue
            cells = [row["item"], row["paper"], ours, row.get("cost", ""), row.get("seeds", ""), verdict]
            lines.append(f"| {' | '.join(cells)} |")
        yield "\n".join(lines)


class MissingResultError(LookupError):
    """A result is in no file."""


class Stored:
    """Functions that read stored results. All arguments are words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, match: re.Match[str]) -> str:
        """Return the result of a call such as `usual cifar10_ssvi mean-field`."""
        name, *words = match[1].split()
        return str(getattr(self, name)(*words))

    def file(self, name: str) -> dict[str, Any]:
        """Read one file."""
        found = read(self.folder / name)
        if not found:
            raise MissingResultError(name)
        return found

    def mean(self, comparison: str, method: str, key: str) -> float:
        """Return the mean over seeds of a metric of the method that starts with `method`."""
        for name, found in self.file(f"{comparison}.json")["summary"]["methods"].items():
            if name.startswith(method) and key in found:
                return float(found[key]["mean"])
        raise MissingResultError(f"{key} of {method} in {comparison}.json")

    def metric(self, comparison: str, method: str, key: str, form: str) -> str:
        """Return one metric."""
        return f"{self.mean(comparison, method, key):{form}}"

    def ratio(self, comparison: str, method: str, other: str, key: str, form: str) -> str:
        """Return the ratio of two methods."""
        return f"{self.mean(comparison, method, key) / self.mean(comparison, other, key):{form}}"

    def usual(self, comparison: str, method: str) -> str:
        """Return accuracy / NLL / ECE."""
        return _triple(self.mean(comparison, method, key) for key in USUAL)

    def three(self, method: str) -> str:
        """Return accuracy / NLL / ECE over the three comparisons of all methods."""
        return _triple(statistics.fmean(self.mean(name, method, key) for name in SEEDS) for key in USUAL)

    def engine(self, *names: str) -> str:
        """Return accuracy / NLL / ECE of trainings by engines.py, means over files."""
        scores = [self.file(f"{name}.json")["scores"]["refreshed"]["test"] for name in names]
        return _triple(statistics.fmean(one[key] for one in scores) for key in USUAL)

    def ood(self, comparison: str, method: str, data: str) -> str:
        """Return an AUROC."""
        return self.metric(comparison, method, f"ood:{data}", ".3f")

    def value(self, name: str, path: str, form: str) -> str:
        """Return the value at a path of keys and positions."""
        found: Any = self.file(name)
        for key in path.split("."):
            found = found[int(key) if isinstance(found, list) else key]
        return f"{found:{form}}"

    def ablation(self, number: str) -> str:
        """Return accuracy / NLL / ECE of one of the ablations of weight sharing."""
        scores = self.file("cifar10_sharing_ablations.json")["results"][int(number)]["scores"]
        return _triple(scores[key] for key in USUAL)

    def rates(self, key: str, form: str) -> str:
        """Return a metric of PBN on MNIST over the rates."""
        found = (f"{float(rate):.0%} {self.metric('mnist_pbn', f'pbn:rate={rate}', key, form)}" for rate in RATES)
        return ", ".join(found)

    def paired(self, comparison: str, method: str, other: str, key: str, form: str) -> str:
        """Return by how much a method differs from another one in a metric, over the seeds of both, and the p-value."""
        runs = self.file(f"{comparison}.json")["results"]
        first, second = ([run["scores"][key] for run in runs if run["name"] == name] for name in (method, other))
        return _difference(first, second, form)

    def rows_of_recipe(self, file: str, name: str) -> list[dict[str, Any]]:
        """Return a row of a file of pbn_recipe.py, once per seed. In a call, spaces of its name are underscores."""
        runs = [one for one in self.file(f"pbn/{file}.json")["results"] if one["name"] == name.replace("_", " ")]
        if not runs:
            raise MissingResultError(f"{name} in pbn/{file}.json")
        return runs

    def recipe(self, file: str, name: str) -> str:
        """Return accuracy / NLL / ECE on the test images of a row of pbn_recipe.py, means over seeds."""
        return _triple(statistics.fmean(one["test"][key] for one in self.rows_of_recipe(file, name)) for key in USUAL)

    def recipe_stds(self, file: str, name: str) -> str:
        """Return the median σ of each layer that a row of pbn_recipe.py ends with, means over seeds."""
        rows = [one["stds"] for one in self.rows_of_recipe(file, name)]
        return ", ".join(f"{statistics.fmean(stds[layer]['median'] for stds in rows):.2f}" for layer in rows[0])

    def recipe_paired(self, file: str, name: str, other: str, key: str, form: str) -> str:
        """Return by how much two rows of pbn_recipe.py differ on the test images, and the p-value."""
        first, second = ([one["test"][key] for one in self.rows_of_recipe(file, row)] for row in (name, other))
        return _difference(first, second, form)

    def central(self, rate: str, form: str) -> str:
        """Return the share of PBN's Bayesian weights of the first layer in the central quarter, mean over seeds."""
        rows = self.file("pbn/mnist_rates.json")["results"]
        found = [one["first_layer"] for one in rows if one["rate"] == float(rate) and "random" not in one["name"]]
        return f"{statistics.fmean(one['in_the_middle'] for one in found):{form}}"

    def toy(self) -> str:
        """Return the stds outside of the toy data."""
        return ", ".join(f"{one['name']} {one['outside']['std']:.1f}" for one in self.file("pbn/toy.json")["results"])

    def kolmogorov(self) -> str:
        """Return the Kolmogorov-Smirnov statistics of weights, means over seeds."""
        found: dict[str, list[float]] = {}
        for one in self.file("pbn/weights.json")["results"]:
            found.setdefault(one["name"], []).append(one["statistic"])
        return "; ".join(f"{name} {statistics.fmean(values):.3f}" for name, values in found.items())

    def miou(self) -> str:
        """Return the mean IoU on CamVid."""
        return ", ".join(
            f"{one['name']} {one['scores']['miou']:.1%}" for one in self.file("pbn/camvid.json")["results"]
        )

    def converged(self) -> str:
        """Return the last NLL of each start."""
        found = self.file("pbn/convergence.json")["results"]
        return ", ".join(f"{one['name']} from a {one['start']} start {one['last']['nll']:.4f}" for one in found)

    def vdp(self, key: str, form: str, file: str = "vdp/mnist_vdp.json") -> str:
        """Return a metric of the models that VDP++ is compared with, by default those of MNIST."""
        methods = self.file(file)["summary"]["methods"]
        names = {name: name.replace("vdp, objective=", "VDP++, ") for name in methods}
        return "; ".join(
            f"{names[name]} {found[key]['mean']:{form}}" for name, found in methods.items() if key in found
        )

    def explained(self) -> str:
        """Return Infidelity and Sensitivity-Max of the models of MNIST, on more images."""
        methods = self.file("vdp/mnist_explained.json")["summary"]["methods"]
        return "; ".join(
            f"{name} {found['infidelity']['mean']:.4f} and {found['sensitivity_max']['mean']:.3f}"
            for name, found in methods.items()
        )

    def p_value(self, name: str, key: str, first: str, *second: str) -> str:
        """Return the p-value of the difference of two methods of vdp.py; the name of the second may have spaces."""
        pairs = self.file(name)["summary"]["tests"][key]["pairs"]
        found = {(pair["first"], pair["second"]): pair["p_value"] for pair in pairs}
        value = found.get((first, " ".join(second)))
        if value is None:
            raise MissingResultError(f"{key} of {first} and {' '.join(second)} in {name}")
        return f"{value:.2g}"

    def vdp_cost(self) -> str:
        """Return time and memory of an epoch."""
        methods = self.file("mnist_vdp.json")["summary"]["methods"]
        costs = {name.partition(":")[0]: (found["epoch_ms"], found["train_peak_mb"]) for name, found in methods.items()}
        return "; ".join(
            f"{name} {time['mean']:,.0f} ms, {peak['mean']:.0f} MB" for name, (time, peak) in costs.items()
        )

    def density(self, density: str) -> str:
        """Return the accuracies of SSVI and RigL at one density."""
        both = (
            self.metric("cifar10_density", f"{name}:density={density}", "accuracy", ".1%") for name in ("ssvi", "rigl")
        )
        return f"{float(density):.0%}: {' / '.join(both)}"

    def criterion(self, removal: str) -> str:
        """Return the accuracy of a removal criterion."""
        return self.metric("cifar10_criteria", f"ssvi:density=0.05,removal={removal}", "accuracy", ".2%")

    def overlap(self, first: str, second: str) -> str:
        """Return the IoU of two criteria at the first and the last exchange."""
        found = self.file("ssvi/overlap.json")
        one, other = (found["criteria"].index(name) for name in (first, second))
        start, end = (found["exchanges"][number]["iou"][one][other] for number in (0, -1))
        return f"{start:.2f} at first, {end:.2f} at the end"


def _difference(first: Sequence[float], second: Sequence[float], form: str) -> str:
    test = paired_test(first, second)
    return f"{test.difference:+{form}} (p = {test.p_value:.3f})"


def _triple(values: Any) -> str:
    accuracy, nll, ece = values
    return f"{accuracy:.2%} / {nll:.3f} / {ece:.3f}"
