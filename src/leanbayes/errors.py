"""What leanbayes raises: one clear sentence that says what to do."""


class LeanBayesError(ValueError):
    """A user's mistake, told in one sentence with its remedy."""


class UnsupportedOperation(LeanBayesError):
    """A rule met a torch operation on a random weight that it has no formula for."""


class NotFiniteError(LeanBayesError):
    """A loss that is NaN or infinite."""


class FileFormatError(LeanBayesError):
    """A file that leanbayes cannot load: foreign, truncated, too new, or for another network."""


class RuleMismatchWarning(UserWarning):
    """The network predicts with noise of another kind than it was trained with."""
