"""The version of leanbayes."""

__version__ = "0.1.0"
