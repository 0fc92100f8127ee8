"""Measure the size of a ResNet-18 on disk: deterministic, mean-field, partial and sparse, as written by `lb.save`.

    python benchmarks/size.py --out benchmarks/results/size.json

The networks are not trained: the size depends only on the method, up to a few bytes of positions.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measuring import write

import leanbayes as lb
from leanbayes.networks import build

METHODS = {
    "deterministic": lb.Deterministic(),
    "mean-field": lb.MeanField(),
    "pbn, rate 0.05": lb.PBN(0.05, sensitivity="magnitude"),
    "ssvi, density 0.1": lb.SSVI(0.1),
    "ssvi, density 0.05": lb.SSVI(0.05),
    "rigl, density 0.05": lb.RigL(0.05),
}
HEAD = "| method | MB on disk | × plain |\n|---|---|---|"


def bytes_of(method: lb.Method) -> int:
    """Return the size of a saved model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        lb.save(lb.bayesianize(build("resnet-18", (3, 32, 32), 10, seed=0), method), path)
        return path.stat().st_size


def table_row(row: dict[str, Any]) -> str:
    """Format the results of one method."""
    return f"| {row['method']} | {row['bytes'] / 1e6:.2f} | {row['ratio']:.2f} |"


def main() -> None:
    """Save one model per method and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    sizes = {name: bytes_of(method) for name, method in METHODS.items()}
    rows = [{"method": name, "bytes": size, "ratio": size / sizes["deterministic"]} for name, size in sizes.items()]
    print("\n".join([HEAD, *map(table_row, rows)]))
    write(args.out, {"network": "resnet-18", "rows": rows})


if __name__ == "__main__":
    main()
