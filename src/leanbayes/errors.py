"""Errors and warnings of leanbayes. Each message is one sentence that says what is wrong and what to do."""


def printable(text: str) -> str:
    """Escape line breaks and control characters, so that names from files cannot change what a terminal shows."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class LeanBayesError(ValueError):
    """Base class of all errors that leanbayes raises for a mistake of the user.

    It is a `ValueError`. The message says what is wrong and what to do about it. Control characters in it, which names
    in a file may have, are escaped.

    Example:
        >>> try:
        ...     bnn = lb.bayesianize(network, lb.MeanField(init_std=-1.0))
        ... except lb.LeanBayesError as error:
        ...     print(error)
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UnsupportedOperation(LeanBayesError):
    """Raised if a rule has no formula for a torch operation on a random weight or activation.

    The message names the operation. Use another rule for the network, leave the weight out with `select=`, or register
    a formula with `lb.moment_rule` or `leanbayes.rules.linear_in_weight`.

    Example:
        >>> try:
        ...     with bnn.using("moments"):
        ...         output = bnn(x)
        ... except lb.UnsupportedOperation:
        ...     with bnn.using("sample"):  # supports every operation
        ...         output = bnn(x)
    """


class NotFiniteError(LeanBayesError):
    """Raised if a loss is NaN or infinite.

    Example:
        >>> try:
        ...     loss = lb.elbo_loss(bnn, x, y, num_data=len(train_set))
        ... except lb.NotFiniteError:
        ...     optimizer.param_groups[0]["lr"] /= 2
    """


class FileFormatError(LeanBayesError):
    """Raised if leanbayes cannot load a file.

    The file is in another format, truncated, written by a newer version, or made for another network.

    Example:
        >>> try:
        ...     bnn = lb.load("model.safetensors", network)
        ... except lb.FileFormatError:
        ...     bnn = lb.bayesianize(network, lb.MeanField())
    """


class MissingPackageError(LeanBayesError, AttributeError):
    """Raised if a part of leanbayes needs a package that is not installed.

    It is also an `AttributeError`, so `hasattr(lb, "fit")` is False without accelerate.

    Example:
        >>> try:
        ...     fit = lb.fit
        ... except lb.MissingPackageError as error:
        ...     print(error)
        lb.fit needs accelerate: run pip install '.[train]' in the folder of the leanbayes repository.
    """


def missing_package(need: str, extra: str) -> MissingPackageError:
    """Return the error for a package that is not installed, given a text such as "lb.fit needs accelerate"."""
    return MissingPackageError(f"{need}: run pip install '.[{extra}]' in the folder of the leanbayes repository.")


class RuleMismatchWarning(UserWarning):
    """Warns that a network predicts with another kind of noise than it was trained with.

    Example:
        >>> warnings.simplefilter("error", lb.RuleMismatchWarning)
    """
