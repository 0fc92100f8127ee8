"""What leanbayes raises: one clear sentence that says what to do."""

import difflib
from collections.abc import Iterable


class LeanBayesError(ValueError):
    """A user's mistake, told in one sentence with its remedy."""


class UnsupportedOperation(LeanBayesError):
    """A rule met a torch operation on a random weight that it has no formula for."""


class NotFiniteError(LeanBayesError):
    """A loss that is NaN or infinite."""


class FileFormatError(LeanBayesError):
    """A file that leanbayes cannot load: foreign, truncated, too new, or for another network."""


class MissingPackageError(LeanBayesError, AttributeError):
    """A part of leanbayes whose package is not installed: `hasattr` takes it for not being there."""


class RuleMismatchWarning(UserWarning):
    """The network predicts with noise of another kind than it was trained with."""


def did_you_mean(name: object, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a sentence on a name that is not there: the closest one that is, or something else."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {close[0]}?" if close else otherwise
