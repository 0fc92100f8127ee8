"""Tells from which layers the noise of the outputs comes, and how much of it one pass finds.

python experiments/noise_sources.py RUN --file PATH.lbc --out experiments/results/noise_sources/NAME.json

Block after block, the weights of that one alone have noise, and std of the outputs by one pass is compared with that
over draws, on some test images; at last all of them have noise. --file takes a compact file of the run's network.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from asking import as_script, command_of, with_places
from torch import Tensor

import leanbayes as lb
from leanbayes.cli.runs import open_run
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.assessment import batch_size, some
from leanbayes.evaluation.moments import accuracy_of
from leanbayes.network import output_tensor
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.prediction import Running
from leanbayes.training.record import machine, versions, write_json

NO_NOISE = -30.0  # softplus makes 1e-13 of it
ALL = "all"


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a trained run")
    parser.add_argument("--file", type=Path, help="compact file of its network, to be looked at in its place")
    parser.add_argument("--samples", type=int, default=100, help="draws")
    parser.add_argument("--examples", type=int, default=64, help="test examples")
    return with_places(parser).parse_args()


def blocks(names: list[str]) -> dict[str, list[str]]:
    """Bring the parameters of each block together: those with the same name up to its first number, or its module."""
    found: dict[str, list[str]] = {}
    for name in names:
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        found.setdefault(numbered[0] if numbered else name.rpartition(".")[0], []).append(name)
    return found


def compared(bnn: lb.BayesianModel, x: Tensor, samples: int, seed: int) -> tuple[dict[str, Any], float]:
    """Compare the outputs of one pass with those of draws; return their mean variance over draws, too."""
    generator, draws = torch.Generator().manual_seed(seed), Running()
    with torch.no_grad(), bnn.using("moments"), bnn.frozen(0):
        ours = output_tensor(bnn(x))
    with torch.no_grad(), bnn.using("sample"):
        for number in range(samples):
            draws.update(output_tensor(bnn(x, _draw=bnn.next_draw(generator, number))).double())
    true = draws.squares / (samples - 1)
    found = accuracy_of("", "", ours.loc, ours.variance, draws.mean, true)
    return {"std_ratio": found.ratio, "log_correlation": found.log_correlation}, true.mean().item()


def sources(bnn: lb.BayesianModel, x: Tensor, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """Leave noise in one block after the other, and at last in all."""
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
    """Look at all blocks, and write what was found after each."""
    args = options()
    run = open_run(args.run, args.device)
    if args.samples < 2:
        raise LeanBayesError(f"--samples {args.samples} must be at least 2: a variance needs as many.")
    data = run.data(args.root)
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data: give a run on others.")
    bnn = run.model if args.file is None else lb.load(args.file, run.model.to_deterministic()).to(run.model.device)
    images = some(data.test, args.examples, args.seed)
    batches = Batches(images, batch_size(data.input_shape), device=bnn.device, shuffle=False, normalise=data.normalise)
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
    as_script(main)
