"""`lb.bayesianize`: from any network to a Bayesian model."""

import copy
import itertools
from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.core.layout import Layout, Report, Select, choose, report_deterministic
from leanbayes.core.network import copy_without
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Categorical, CausalLM, ClassPrediction, Likelihood
from leanbayes.likelihoods.base import P
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.defaults import with_engine
from leanbayes.model.method import Method
from leanbayes.posteriors import PointPosterior

_SEEDS = itertools.count()
# The names of transformers for losses over logits of shape (batch, tokens, classes), without a shift of the labels.
_TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")


@overload
def bayesianize(  # type: ignore[overload-overlap]  # a BayesianModel is a module too
    model: BayesianModel[P],
    method: Method,
    *,
    data: Iterable[Any] | None = None,
    select: Select = None,
    likelihood: None = None,
    seed: int | None = None,
) -> BayesianModel[P]: ...
@overload
def bayesianize(
    model: nn.Module,
    method: Method,
    *,
    data: Iterable[Any] | None = None,
    select: Select = None,
    likelihood: None = None,
    seed: int | None = None,
) -> BayesianModel[ClassPrediction]: ...
@overload
def bayesianize(
    model: nn.Module,
    method: Method,
    *,
    data: Iterable[Any] | None = None,
    select: Select = None,
    likelihood: Likelihood[P],
    seed: int | None = None,
) -> BayesianModel[P]: ...


@checked()
def bayesianize(
    model: nn.Module,
    method: Method,
    *,
    data: Iterable[Any] | None = None,
    select: Select = None,
    likelihood: Likelihood[Any] | None = None,
    seed: int | None = None,
) -> BayesianModel[Any]:
    """Make a Bayesian model of any network. The network is not changed, and its weights are kept as means.

    Args:
        model: The network. A `BayesianModel` hands its means and variances to the new posterior.
        method: The method, such as `lb.MeanField()`.
        data: Batches (x, y) of training data, for methods that choose their Bayesian weights on data, such as `lb.PBN`.
        select: The parameters that become Bayesian: a regular expression, names of parameters or modules, a module
            type, or a predicate over (name, parameter). By default the weights of linear, convolutional, embedding,
            attention and recurrent layers.
        likelihood: What the outputs mean. By default classes from logits, `lb.Categorical()`. For networks of
            transformers that score tokens it is `lb.Categorical(class_dim=-1)`, or `lb.CausalLM()` for the next token.
        seed: The seed of all noise of the model. By default the first model of a process has the seed 0, the next one
            the seed 1, and so on: models have different noise, and a program that runs again repeats it.

    Returns:
        The Bayesian model, on the device of the network and in its mode (training or evaluation).

    Raises:
        LeanBayesError: An argument is of the wrong kind, or `select` finds no parameter.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField())
        >>> print(bnn.report)  # which parameters are Bayesian, and why
        >>> bnn.predict(x)  # the average over samples, with uncertainty
        >>> bnn.eval()(x)  # the output of one sample of the weights: in evaluation mode too, each call is random
        >>> with bnn.using("mean"):
        ...     bnn(x)  # the output at the mean of the weights, without randomness
    """
    variances: dict[str, Tensor] = {}
    if isinstance(model, BayesianModel):
        variances = model.weight_variances()
        likelihood = likelihood or copy.deepcopy(model.likelihood)
        model = model.to_deterministic()
    model = method.prepare(model)
    if method.chooses_parameters and select is not None:
        raise LeanBayesError(f"{type(method).__name__} chooses its Bayesian parameters itself: leave select out.")
    if method.bayesian_weights:
        layout, report = choose(model, method.selected(model) if select is None else select)
    elif select is None:
        layout, report = Layout([]), report_deterministic(model, f"{type(method).__name__} keeps it")
    else:
        raise LeanBayesError(f"{type(method).__name__} has no Bayesian weights: leave select out.")
    seed = next(_SEEDS) if seed is None else seed
    bnn = assemble(model, method, layout, report, likelihood or default_likelihood(model), seed, variances)
    if data is not None:
        method.choose(bnn, data)
    return bnn


def default_likelihood(model: nn.Module, ignore_index: int = -100) -> Likelihood[Any]:
    """Return the likelihood of classes, or that of tokens if a network of transformers or peft says it has them."""
    can_generate, settings = getattr(model, "can_generate", None), getattr(model, "config", None)
    if callable(can_generate) and can_generate() and not getattr(settings, "is_encoder_decoder", False):
        return CausalLM(ignore_index)
    return Categorical(ignore_index, class_dim=-1 if getattr(model, "loss_type", None) in _TOKEN_LOSSES else 1)


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

    Args:
        variances: The variances of an earlier posterior by parameter name, or None if a file will fill the posterior.
    """
    method = with_engine(method)
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
    """Put variances into one flat vector, with nan for parameters that have none. Return None if none has any."""
    known = {slot.name: variances[slot.name] for slot in layout if slot.name in variances}
    if not known:
        return None
    return layout.join([known.get(slot.name, torch.full(slot.shape, torch.nan)).to(like) for slot in layout])
