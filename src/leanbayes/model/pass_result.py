"""What one pass of `predict` gives: the output of a sample, or the summary of an output with moments.

A summary is small and a function of each example alone, so it can be a part of compiled code, and its parts can be
joined.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.likelihoods.predictive import Prediction, joined, map_prediction
from leanbayes.rules import Moments

if TYPE_CHECKING:
    from leanbayes.model.bayesian import BayesianModel


class Summary(NamedTuple):
    """The prediction of one pass by moments, and whether its outputs are finite."""

    prediction: Prediction
    finite: Tensor


def is_finite(output: Any) -> Tensor:
    """Return whether all outputs are finite, without waiting for the device."""
    if not isinstance(output, Moments):
        return output.isfinite().all()
    return output.loc.isfinite().all() & output.variance.isfinite().all()


def summarized(bnn: "BayesianModel", output: Moments) -> Summary:
    """Return the prediction for an output."""
    return Summary(bnn.likelihood.predict_moments(output), is_finite(output))


def copied(summary: Summary) -> Summary:
    """Return a copy of a summary."""
    return Summary(map_prediction(Tensor.clone, summary.prediction), summary.finite.clone())


def first_examples(result: Any, rows: int) -> Any:
    """Return the result of the first examples of a batch."""
    if isinstance(result, Summary):
        return result._replace(prediction=map_prediction(lambda tensor: tensor[:rows], result.prediction))
    return result[:rows]


def whole(results: Sequence[Any]) -> Any:
    """Return the result of a batch from those of its parts."""
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], Summary):
        finite = torch.stack([result.finite for result in results]).all()
        return Summary(joined([result.prediction for result in results]), finite)
    return torch.cat(list(results))
