"""The command line, `leanbayes COMMAND`: one file per command, and the table of commands in `main`."""

from leanbayes.cli.main import main

__all__ = ["main"]
