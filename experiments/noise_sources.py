"""Measure how much output noise each block of a network causes, and how much of it one pass predicts.

python experiments/noise_sources.py RUN --file PATH.lbc --out experiments/results/noise_sources/NAME.json

For each block, only the weights of this block are random, and the output std of one pass is compared with that of Monte
Carlo samples on test images; in the last row all weights are random. --file takes a compact file of the run's network.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from arguments import add_common_arguments, command_of, run_script
from torch import Tensor

import leanbayes as lb
from leanbayes.cli.runs import open_run
from leanbayes.core.network import output_tensor
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.full_evaluation import batch_size, some
from leanbayes.evaluation.layer_accuracy import accuracy_of
from leanbayes.likelihoods.accumulators import Running
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.training.record import machine, versions, write_json

NO_NOISE = -30.0  # softplus(-30) is 1e-13
ALL = "all"


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a trained run")
    parser.add_argument("--file", type=Path, help="compact file of the run's network, to use instead of the run")
    parser.add_argument("--samples", type=int, default=100, help="number of Monte Carlo samples")
    parser.add_argument("--examples", type=int, default=64, help="number of test examples")
    return add_common_arguments(parser).parse_args()


def blocks(names: list[str]) -> dict[str, list[str]]:
    """Group parameter names by block: the name up to the first number, or else the module."""
    found: dict[str, list[str]] = {}
    for name in names:
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        found.setdefault(numbered[0] if numbered else name.rpartition(".")[0], []).append(name)
    return found


def compared(bnn: lb.BayesianModel, x: Tensor, samples: int, seed: int) -> tuple[dict[str, Any], float]:
    """Compare the outputs of one pass with Monte Carlo samples; also return the mean variance of the samples."""
    generator, sampled = torch.Generator().manual_seed(seed), Running()
    with torch.no_grad(), bnn.using("moments"), bnn.frozen(0):
        ours = output_tensor(bnn(x))
    with torch.no_grad(), bnn.using("sample"):
        for number in range(samples):
            sampled.update(output_tensor(bnn(x, _draw=bnn.next_draw(generator, number))).double())
    true = sampled.squares / (samples - 1)
    found = accuracy_of("", "", ours.loc, ours.variance, sampled.mean, true)
    return {"std_ratio": found.ratio, "log_correlation": found.log_correlation}, true.mean().item()


def sources(bnn: lb.BayesianModel, x: Tensor, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the comparison with random weights in each block alone, and then in all blocks."""
    made = lb.bayesianize(bnn, lb.MeanField()).eval()
    assert isinstance(made.posterior, MeanFieldPosterior)
    rho = made.posterior.rho.detach().clone()
    names = [slot.name for slot in made.layout]
    for block, members in {**blocks(names), ALL: names}.items():
        inside = torch.cat([torch.full((slot.numel,), slot.name in members, device=rho.device) for slot in made.layout])
        with torch.no_grad():
            made.posterior.rho.copy_(torch.where(inside, rho, NO_NOISE))
        found, variance = compared(made, x, samples, seed)
        yield {"block": block, **found, "variance": variance}


def main() -> None:
    """Measure all blocks, and write the results after each."""
    args = options()
    run = open_run(args.run, args.device)
    if args.samples < 2:
        raise LeanBayesError(f"--samples {args.samples} must be at least 2 to compute a variance.")
    data = run.data(args.root)
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data: give a run on another data set.")
    bnn = run.model if args.file is None else lb.load(args.file, run.model.to_deterministic()).to(run.model.device)
    images = some(data.test, args.examples, args.seed)
    batches = Batches(images, batch_size(data.input_shape), device=bnn.device, shuffle=False, normalize=data.normalize)
    x = torch.cat([batch[0] for batch in batches.epoch()])
    settings = run.record["config"]
    words = [args.run.resolve().name, *([] if args.file is None else ["--file", args.file.name])]
    record: dict[str, Any] = {
        "command": command_of("noise_sources", args, words, hidden=("file",)),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
        "model": settings["model"],
        "source": settings["source"],
        "examples": len(x),
        "samples": args.samples,
        "results": [],
    }
    for row in sources(bnn, x, args.samples, args.seed):
        record["results"].append(row)
        print(f"{row['block']}: " + ", ".join(f"{key} {row[key]:.4g}" for key in row if key != "block"), flush=True)
        if args.out is not None:
            write_json(args.out, record)


if __name__ == "__main__":
    run_script(main)
