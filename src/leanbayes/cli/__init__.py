"""The command line: `leanbayes COMMAND`; `main` knows the commands."""

from leanbayes.cli.main import main

__all__ = ["main"]
