"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_counts


@checked(hidden="a list of layer widths")
def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (100, 100)) -> nn.Sequential:
    """Build a multilayer perceptron: linear layers with ReLU between them.

    Args:
        inputs: number of values per example.
        outputs: number of classes, or of values to predict.
        hidden: widths of the hidden layers.

    Returns:
        Network that maps (batch, ...), with `inputs` values per example, to (batch, outputs).

    Raises:
        LeanBayesError: A size is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from leanbayes.networks import mlp
        >>> mlp(6, 3, hidden=(50,))(torch.zeros(2, 6)).shape
        torch.Size([2, 3])
    """
    if isinstance(hidden, (str, int, float)):
        raise LeanBayesError(f"hidden={hidden!r} must be a list of layer widths, such as [100, 100].")
    check_counts(inputs=inputs, outputs=outputs, **{f"hidden[{number}]": size for number, size in enumerate(hidden)})
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for size_in, size in pairwise(sizes):
        layers += [nn.Linear(size_in, size), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


@checked()
def lenet_300_100(inputs: int = 784, outputs: int = 10) -> nn.Sequential:
    """Build LeNet-300-100, a perceptron with hidden layers of 300 and 100 units.

    It has 266,610 parameters for gray images of 28×28 pixels and 10 classes. See LeCun et al., "Gradient-based
    learning applied to document recognition", 1998.

    Args:
        inputs: number of values per example.
        outputs: number of classes, or of values to predict.

    Returns:
        Network that maps (batch, ...), with `inputs` values per example, to (batch, outputs).

    Raises:
        LeanBayesError: A size is not a whole number of at least 1.

    Example:
        >>> from leanbayes.networks import lenet_300_100
        >>> sum(parameter.numel() for parameter in lenet_300_100().parameters())
        266610
    """
    return mlp(inputs, outputs, (300, 100))
