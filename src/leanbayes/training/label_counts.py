"""How many labels an example has. A loss is their mean, so the natural-gradient engine has to know."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from leanbayes.data.base import as_pair
from leanbayes.data.streaming import own_randomness
from leanbayes.likelihoods import Categorical, Likelihood

EXAMPLES = 512  # that are read to estimate the mean


def labels_per_example(likelihood: Likelihood[Any], labels: Iterable[Tensor]) -> float | None:
    """Return the mean number of labels that count in an example, or None if each example is one observation.

    Args:
        likelihood: The likelihood, which says what counts.
        labels: Labels in batches. They are read until there are enough for a good estimate.
    """
    if not isinstance(likelihood, Categorical):
        return None
    counted = examples = 0
    for y in labels:
        if y.numel() == len(y):
            return None
        counted, examples = counted + int(likelihood.observations(y)), examples + len(y)
        if examples >= EXAMPLES:
            break
    return counted / examples if examples else None


def labels_of(dataset: Any, collate: Callable[[list[Any]], Any]) -> Iterable[Tensor]:
    """Yield the labels of examples from all parts of a data set, as many as `labels_per_example` reads."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return
    with own_randomness():  # data sets may augment their examples
        places = range(0, len(dataset), max(1, -(-len(dataset) // EXAMPLES)))
        for start in range(0, len(places), 16):
            yield as_pair(collate([dataset[place] for place in places[start : start + 16]]))[1]
