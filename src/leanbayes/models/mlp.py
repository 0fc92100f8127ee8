"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from leanbayes.errors import LeanBayesError
from leanbayes.models.checks import check_counts


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (100, 100)) -> nn.Sequential:
    """A network of linear layers with ReLU between them: (batch, ...) with `inputs` values each → (batch, outputs)."""
    if isinstance(hidden, (str, int, float)):
        raise LeanBayesError(f"hidden={hidden!r} must be a list of layer widths, such as [100, 100].")
    check_counts(inputs=inputs, outputs=outputs, **{f"hidden[{number}]": size for number, size in enumerate(hidden)})
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for size_in, size in pairwise(sizes):
        layers += [nn.Linear(size_in, size), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def lenet_300_100(inputs: int = 784, outputs: int = 10) -> nn.Sequential:
    """LeNet-300-100 (LeCun et al. 1998): 266,610 parameters for 28×28 grey images and 10 classes."""
    return mlp(inputs, outputs, (300, 100))
