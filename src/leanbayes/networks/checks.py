"""Checks of the sizes of networks."""

from numbers import Integral

from leanbayes.errors import LeanBayesError


def check_counts(**counts: int) -> None:
    """Raise an error for a size that is not a whole number of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            raise LeanBayesError(f"{name}={count!r} must be a whole number of at least 1.")


def check_image(input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of an image as (channels, height, width); raise an error for other shapes."""
    if len(input_shape) != 3:
        raise LeanBayesError(
            f"input_shape={tuple(input_shape)} must be that of an image, (channels, height, width): use mlp for others."
        )
    channels, height, width = input_shape
    check_counts(channels=channels, height=height, width=width)
    return channels, height, width
