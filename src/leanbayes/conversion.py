"""`bayesianize`: a Bayesian model of any network, whose weights are kept."""

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout, Report, Select, choose, report_points
from leanbayes.likelihoods import Categorical, Likelihood
from leanbayes.method import Method
from leanbayes.network import copy_without
from leanbayes.posteriors import PointPosterior


def bayesianize(
    model: Any,
    method: Method,
    *,
    data: Iterable[Any] | None = None,
    select: Select = None,
    likelihood: Likelihood | None = None,
    seed: int = 0,
) -> BayesianModel:
    """Make a Bayesian model of any network; the network itself is left as it is, and its weights are kept.

    select: which parameters become Bayesian: a regular expression, names of parameters or modules, a module type, or
    a predicate over (name, parameter); by default the weights of linear, convolutional, embedding, attention and
    recurrent layers. likelihood: what the outputs mean; classes from logits by default. seed: of all its noise.
    data: batches (x, y) of training data, for a method such as PBN that chooses the Bayesian weights on them.
    A `BayesianModel` as `model` hands its means and variances to the new posterior.
    """
    if not isinstance(method, Method):
        name = getattr(method, "__name__", repr(method))
        raise LeanBayesError(f"method must be an instance such as lb.MeanField(), not {name}.")
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise LeanBayesError("likelihood must be an instance such as lb.Categorical().")
    variances: dict[str, Tensor] = {}
    if not isinstance(model, nn.Module):
        raise LeanBayesError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, BayesianModel):
        variances = model.weight_variances()
        likelihood = likelihood or copy.deepcopy(model.likelihood)
        model = model.to_deterministic()
    if method.bayesian_weights:
        layout, report = choose(model, select)
    elif select is None:
        layout, report = Layout([]), report_points(model, f"{type(method).__name__} keeps it")
    else:
        raise LeanBayesError(f"{type(method).__name__} has no Bayesian weights: leave select out.")
    bnn = assemble(model, method, layout, report, likelihood or Categorical(), seed, variances)
    if data is not None:
        method.choose(bnn, data)
    return bnn


@torch.inference_mode(False)
@torch.no_grad()
def assemble(
    model: nn.Module,
    method: Method,
    layout: Layout,
    report: Report,
    likelihood: Likelihood,
    seed: int,
    variances: dict[str, Tensor] | None,
) -> BayesianModel:
    """Copy the network without the layout's parameters, and build the model around them.

    variances: those of an earlier posterior, by name; None where a file fills the posterior.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = [parameters[slot.name] for slot in layout]
    first = next(itertools.chain(model.parameters(), model.buffers()))
    if layout.slots:
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in chosen) else torch.float32
        mean = layout.join([p.detach() for p in chosen]).to(dtype)
        if variances is None:
            posterior = method.empty_posterior(layout, mean)
        else:
            posterior = method.posterior(layout, mean, _joined(layout, variances, mean))
    else:
        posterior = PointPosterior(layout, torch.zeros(0))
    network = method.wrap(copy_without(model, layout))
    bnn = BayesianModel(network, posterior, method, likelihood, report, seed)
    return bnn.to(first.device).train(model.training)


def _joined(layout: Layout, variances: dict[str, Tensor], like: Tensor) -> Tensor | None:
    """Put the variances of parameters into one flat vector, nan where there are none; None if there are none at all."""
    known = {slot.name: variances[slot.name] for slot in layout if slot.name in variances}
    if not known:
        return None
    return layout.join([known.get(slot.name, torch.full(slot.shape, torch.nan)).to(like) for slot in layout])
