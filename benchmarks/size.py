"""How many bytes a ResNet-18 takes on disk: plain, mean-field, partial and sparse, each as `bnn.save` writes it.

    python benchmarks/size.py --out benchmarks/results/size.json

The networks are not trained: what is stored depends on the method alone, but for a few bytes of positions.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measuring import write

import leanbayes as lb
from leanbayes.models import build

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
    """Save a model and look at the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        lb.bayesianize(build("resnet-18", (3, 32, 32), 10, seed=0), method).save(path)
        return path.stat().st_size


def table_row(row: dict[str, Any]) -> str:
    """Lay out one method's figures."""
    return f"| {row['method']} | {row['bytes'] / 1e6:.2f} | {row['ratio']:.2f} |"


def main() -> None:
    """Save one model of each method and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args()
    sizes = {name: bytes_of(method) for name, method in METHODS.items()}
    rows = [{"method": name, "bytes": size, "ratio": size / sizes["deterministic"]} for name, size in sizes.items()]
    print("\n".join([HEAD, *map(table_row, rows)]))
    write(args.out, {"network": "resnet-18", "rows": rows})


if __name__ == "__main__":
    main()
