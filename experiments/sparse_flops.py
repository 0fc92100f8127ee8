"""Count the FLOPs of a training step of SSVI, relative to dense mean-field, by how the active weights are distributed.

python experiments/sparse_flops.py --out experiments/results/ssvi/flops.json

Nothing is trained: all layers keep their number of active weights, so the FLOPs of the first step are those of all.
Only products count, and a zero weight costs nothing.
"""

import argparse
from typing import Any, get_args

import torch
from arguments import add_common_arguments, command_of, run_script

import leanbayes as lb
from leanbayes.evaluation.cost import count_flops
from leanbayes.methods.sparse_training.densities import Densities
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json

IMAGE = (3, 32, 32)


def rows(network: str, classes: int, densities: list[float]) -> list[dict[str, Any]]:
    """Return the share of the dense FLOPs for each density and distribution, with the active share of each layer."""
    made, x = build(network, IMAGE, classes, seed=0), torch.zeros(1, *IMAGE)
    dense = count_flops(lb.bayesianize(made, lb.MeanField()), x, samples=1).effective
    found = []
    for density in densities:
        for kind in get_args(Densities):
            bnn = lb.bayesianize(made, lb.SSVI(density, densities=kind))
            active = bnn.posterior.mean() != 0
            layers = [part.double().mean().item() for part in active.split(bnn.layout.sizes)]
            flops = count_flops(bnn, x, samples=1).effective
            row = {"network": network, "classes": classes, "density": density, "densities": kind}
            found.append(row | {"flops": flops, "dense_flops": dense, "share": flops / dense, "layers": layers})
    return found


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--model", default="resnet-18", help="name of a network for images of 32×32 pixels")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.05, 0.1])
    args = add_common_arguments(parser).parse_args()
    results = rows(args.model, 10, args.densities)
    for one in results:
        print(f"{one['densities']} at {one['density']:.0%}: {one['share']:.4f} of the dense FLOPs")
    if args.out is not None:
        record = {"command": command_of("sparse_flops", args, []), "versions": versions(), "machine": machine()}
        write_json(args.out, record | {"results": results})


if __name__ == "__main__":
    run_script(main)
