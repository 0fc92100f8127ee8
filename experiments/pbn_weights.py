"""Compare the distribution of the weights of PBN with that of an ensemble, by the Kolmogorov-Smirnov statistic.

python experiments/pbn_weights.py RUNS --out experiments/results/pbn/weights.json --figures FOLDER

RUNS is the folder of `leanbayes compare --config experiments/mnist_pbn_paper.yaml`. The distribution is that of one
weight, chosen at random: in a Bayesian network the mixture of its Gaussians and deterministic weights, in an ensemble
the weights of all members. The statistic is the largest difference of two distribution functions. For comparison, it
also has the plain network, and each member of the ensemble against the others.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from arguments import add_common_arguments, command_of, run_script
from plotting import draw
from torch import Tensor
from trained_runs import Results, about, compared, in_order, lines_figure, opened, task_of

import leanbayes as lb
from leanbayes.errors import LeanBayesError
from leanbayes.model.draw import StochasticNetwork
from leanbayes.report.figure import Series
from leanbayes.training.record import machine, versions, write_json

POINTS = 2001  # of the grid that distribution functions are compared on
PARTS = 4096  # Gaussians per part of a sum
SHOWN = 101  # points of a line in the figure


class Weights:
    """The distribution of a weight: a mixture of Gaussians, some with σ = 0."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.fixed = mean[std == 0].sort().values
        self.mean, self.std = mean[std > 0], std[std > 0]

    def cdf(self, at: Tensor) -> Tensor:
        """Return the distribution function."""
        below = torch.searchsorted(self.fixed, at, right=True).double()
        for mean, std in zip(self.mean.split(PARTS), self.std.split(PARTS), strict=True):
            below += torch.special.ndtr((at[:, None] - mean) / std).sum(1)
        return below / (len(self.fixed) + len(self.mean))


def statistic(one: Weights, other: Weights, at: Tensor) -> float:
    """Return the largest difference of two distribution functions on a grid."""
    return (one.cdf(at) - other.cdf(at)).abs().max().item()


def flat(network: torch.nn.Module) -> Tensor:
    """Return the weights of a plain network that would be Bayesian."""
    return lb.bayesianize(network, lb.MeanField()).posterior.mean().detach().double().cpu()


def members_of(bnn: lb.BayesianModel) -> list[Tensor]:
    """Return the weights of each member of an ensemble; of a plain network, its own."""
    if bnn.members is None:
        return [flat(bnn.to_deterministic())]
    assert isinstance(bnn.network, StochasticNetwork)
    return [flat(bnn.network.member(number)) for number in range(bnn.members)]


def distribution(bnn: lb.BayesianModel) -> Weights:
    """Return the distribution of a weight of a model."""
    if not bnn.posterior.random_weights:
        found = torch.cat(members_of(bnn))
        return Weights(found, torch.zeros_like(found))
    mean, variance = (part.detach().double().cpu() for part in (bnn.posterior.mean(), bnn.posterior.variance()))
    return Weights(mean, variance.sqrt())


def weights(args: argparse.Namespace) -> Results:
    """Compare all runs with the ensemble of their seed."""
    found, ensembles, results = {}, {}, []
    for run, _ in opened(args):
        row = about(run)
        if isinstance(run.model.method, lb.Ensemble):
            ensembles[row["seed"]] = members_of(run.model)
        found[row["name"], row["seed"]] = distribution(run.model)
        results.append(row)
    if not ensembles:
        raise LeanBayesError("There is no ensemble among these runs: train one with leanbayes compare.")
    results = [row for row in results if row["seed"] in ensembles]
    for row in results:
        members = ensembles[row["seed"]]
        pooled = torch.cat(members)
        edge = pooled.abs().max().item()
        at = torch.linspace(-edge, edge, POINTS, dtype=torch.float64)
        whole = Weights(pooled, torch.zeros_like(pooled))
        if row["method"]["type"] == "Ensemble":
            row["name"] = "one member against the others"
            others = [torch.cat([*members[:number], *members[number + 1 :]]) for number in range(len(members))]
            pairs = zip(members, others, strict=True)
            values = [statistic(*(Weights(part, torch.zeros_like(part)) for part in pair), at) for pair in pairs]
            row["statistic"] = statistics.fmean(values)
        else:
            row["statistic"] = statistic(found[row["name"], row["seed"]], whole, at)
    drawn = figure(found, min(ensembles), f"{task_of(results[0])}, seed {min(ensembles)}")
    return Results(compared(sorted(results, key=in_order)), {"weights": draw(drawn)})


def figure(found: dict[Any, Weights], seed: int, where: str) -> Any:
    """Return the distribution functions of one seed."""
    chosen = {name: one for (name, number), one in found.items() if number == seed}
    at = torch.linspace(-0.15, 0.15, SHOWN, dtype=torch.float64)
    series = [Series(name, tuple(at.tolist()), tuple(one.cdf(at).tolist())) for name, one in chosen.items()]
    return lines_figure("weights", "Distribution function", "Weight", series, where)


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs or of leanbayes compare")
    args = add_common_arguments(parser).parse_args()
    results = weights(args)
    for row in results.values["results"]:
        print(f"{row['name']}, seed {row['seed']}: {row['statistic']:.4f}")
    if args.out is not None:
        names = [path.resolve().name for path in args.runs]
        record = {"command": command_of("pbn_weights", args, names), "versions": versions(), "machine": machine()}
        write_json(args.out, record | results.values)
    if args.figures is not None:
        results.draw(args.figures)


if __name__ == "__main__":
    run_script(main)
