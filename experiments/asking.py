"""What the command lines of experiments ask alike."""

import argparse
from pathlib import Path


def with_places(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Ask where results go, where data are and where to compute, and for a seed."""
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--figures", type=Path, help="folder to draw the figures into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    parser.add_argument("--root", type=Path, help="folder that holds the data sets")
    return parser
