"""The command line: `leanbayes fit`, `evaluate`, `predict`, `compare` and `info`."""

from leanbayes.cli.main import main

__all__ = ["main"]
