"""The command line: `leanbayes fit`, `evaluate`, `predict`, `compare`, `report` and `info`."""

from leanbayes.cli.main import main

__all__ = ["main"]
