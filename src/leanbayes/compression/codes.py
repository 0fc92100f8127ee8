"""A codebook as a posterior holds it: the codes with a spread, then those that are points, and who uses which."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """Codes, and the code of each weight; an outlier has one of its own.

    Attributes:
        mean: of each code (C).
        std: of the first G codes; the others are points.
        covariance: of (μ, σ) among the members of each of these (G, 2, 2), 0 for an outlier.
        labels: the number of each weight's code (n), C for a weight that is surely zero.
        blended: positions of weights that take a mix of codes in place of their own (e).
        partners: the codes in each mix (e, B).
        alpha: their shares (e, B).
    """

    mean: Tensor
    std: Tensor
    covariance: Tensor
    labels: Tensor
    blended: Tensor
    partners: Tensor
    alpha: Tensor
