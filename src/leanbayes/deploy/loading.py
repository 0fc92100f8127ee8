"""`lb.load`: the first bytes of a file say which reader it needs."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from leanbayes.core.arguments import checked
from leanbayes.deploy.compact.compact_file import describe_compact, read_compact
from leanbayes.deploy.compact.container import MAGIC
from leanbayes.deploy.model_file import describe_model, read_model
from leanbayes.model.bayesian import BayesianModel


class _Format(NamedTuple):
    read: Callable[[str | os.PathLike[str], nn.Module], BayesianModel]
    describe: Callable[[str | os.PathLike[str]], dict[str, Any]]


_BY_MAGIC = {MAGIC: _Format(read_compact, describe_compact)}
_SAFETENSORS = _Format(read_model, describe_model)  # starts with the length of its header, not with magic bytes


@checked()
def load(path: str | os.PathLike[str], model: nn.Module) -> BayesianModel:
    """Load a model that `lb.save` or `lb.compress` wrote.

    Args:
        path: The file.
        model: A network of the same architecture. It is not changed. Its weights do not matter, unless the file was
            written with `base=False`, as for adapters of peft: then it is the base network with an adapter.

    Returns:
        The Bayesian model, bit-equal to the one that was written.

    Raises:
        FileFormatError: The file is missing, damaged, or from another network.

    Example:
        >>> lb.save(bnn, "model.safetensors")
        >>> bnn = lb.load("model.safetensors", make_network())
    """
    return _format_of(path).read(path, model)


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a model file from its header: its settings, its number of Bayesian weights, the bytes of each part."""
    return _format_of(path).describe(path)


def _format_of(path: str | os.PathLike[str]) -> _Format:
    longest = max(map(len, _BY_MAGIC))
    start = b""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            start = file.read(longest)
    return next((found for magic, found in _BY_MAGIC.items() if start.startswith(magic)), _SAFETENSORS)
