"""The Laplace approximation (MacKay 1992): a Gaussian around trained weights, whose precision is the curvature there.

With the curvature G of the summed loss (`leanbayes.model.curvature`), the prior N(m, 1/δ) and the temperature T, the
posterior is N(w*, (G/T + δ)⁻¹). The prior precision δ is left open by default, and chosen after training.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.core.config import check_choices
from leanbayes.core.last_layer import last_layer
from leanbayes.core.layout import Layout, Select
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.after_training import AfterTraining
from leanbayes.methods.gaussian_settings import check_gaussian_settings
from leanbayes.methods.pbn.estimators import scores_of
from leanbayes.methods.pbn.selection import check_rate, top
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.curvature import estimated_diagonal, exact_diagonal, full_matrix, labeled
from leanbayes.model.kronecker_curvature import kronecker_factors
from leanbayes.model.method import Training, register_method
from leanbayes.model.validation_nll import validation_nll
from leanbayes.posteriors import FullPosterior, KroneckerPosterior, MeanFieldPosterior, PartialPosterior, Posterior
from leanbayes.priors import BoundPrior, Normal, Prior

Over = Literal["all", "last-layer"]
Covariance = Literal["diagonal", "kronecker", "full"]
Estimate = Literal["probes", "exact"]
PriorFrom = Literal["marginal-likelihood", "held-out"]
Subnetwork = Literal["variance", "jacobian", "moment", "fisher", "paper", "magnitude", "random"]
_MOST_FULL = 10_000  # weights with a full covariance: 800 MB in double precision
_COARSE, _FINE = torch.linspace(-6, 10, 65), torch.linspace(-0.25, 0.25, 17)  # powers of ten of prior precisions
_POWERS = [power / 2 for power in range(14, -5, -1)]  # of ten, of the prior precisions for held-out data
_MUCH_WORSE = 1.0  # nats per label than the best precision, at which the search on held-out data ends
_HELD_OUT_SAMPLES = 10


@register_method("laplace", prior_from="held-out")
@dataclass(frozen=True)
class Laplace(AfterTraining):
    """Laplace approximation: a Gaussian around the weights of a trained network.

    Its precision is the curvature of the loss (the diagonal of the Gauss-Newton matrix, in the memory of the weights)
    plus that of the prior. `lb.fit` trains the plain network first, or starts from a trained one.

    Papers: MacKay (1992), "A Practical Bayesian Framework for Backpropagation Networks"; Daxberger et al. (2021),
    "Laplace Redux", and "Bayesian Deep Learning via Subnetwork Inference".

    Attributes:
        over: the Bayesian weights: all weights of layers, or weight and bias of the last linear layer. `select=`
            replaces it.
        covariance: diagonal; kronecker for two factors of each parameter of linear layers and convolutions (KFAC); or
            full for up to 10,000 weights, such as those of the last layer. Predictions with the last two are by
            samples.
        rate: fraction of these weights that are Bayesian. The others are deterministic.
        subnetwork: which weights are Bayesian if rate is below 1: those with the largest variance, or the largest
            sensitivity of a kind that `lb.PBN` has, such as jacobian.
        estimate: how a diagonal or Kronecker factors are computed. probes takes backward passes with random signs, in
            the memory of a training step. exact takes the derivatives of each output of each example, for small
            networks, and of each output of a batch for Kronecker factors.
        probes: number of these backward passes on the first 64 batches together, and as many per batch on others.
        prior: the prior over the weights. `Normal("auto")` leaves its scale open, and data choose it.
        prior_from: how data choose it. marginal-likelihood needs no more data. held-out takes the best likelihood of
            held-out predictions (in `lb.fit`; elsewhere call `lb.choose_prior`).
        temperature: factor by which the curvature is divided. Below 1 the posterior is colder.
        pretrain: train the plain network first. Use False for a trained network.
        rule: how the model predicts: sample, flipout, local, moments, adjoint (which is the linearized model) or mean.
        samples: number of Monte Carlo samples of a prediction.
        seed: seed of random signs.

    Example:
        >>> bnn = lb.fit(network, lb.Laplace(), train_set, epochs=30)
        >>> bnn = lb.bayesianize(trained, lb.Laplace(), data=train_loader)  # nothing is trained
        >>> bnn = lb.bayesianize(trained, lb.Laplace(over="last-layer", covariance="full"), data=train_loader)
    """

    over: Over = "all"
    covariance: Covariance = "diagonal"
    rate: float = 1.0
    subnetwork: Subnetwork = "variance"
    estimate: Estimate = "probes"
    probes: int = 256
    prior: Prior = field(default_factory=lambda: Normal("auto"))
    prior_from: PriorFrom = "marginal-likelihood"
    temperature: float = 1.0
    pretrain: bool = True
    rule: str = "sample"
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_choices(self, over=Over, covariance=Covariance, subnetwork=Subnetwork)
        check_choices(self, estimate=Estimate, prior_from=PriorFrom)
        if self.rate == 0 or self.probes < 1:
            raise LeanBayesError(f"rate={self.rate} must be above 0, and probes={self.probes} at least 1.")
        if not 0 < self.temperature < math.inf:
            raise LeanBayesError(f"temperature={self.temperature} must be a positive number.")
        if not getattr(self.prior, "gaussian", False):
            raise LeanBayesError("A Laplace approximation needs a Gaussian prior: use lb.Normal().")
        if self.covariance == "kronecker" and (self.rate < 1 or not isinstance(self.prior, Normal)):
            raise LeanBayesError(
                "covariance='kronecker' is for all weights of a layer, with the same prior: use rate=1 and lb.Normal()."
            )
        if self.covariance != "diagonal" and self.rule not in ("sample", "mean"):
            raise LeanBayesError(
                f"covariance={self.covariance!r} predicts by samples of the weights, not by the rule {self.rule!r}: "
                "use rule='sample', or covariance='diagonal'."
            )
        check_gaussian_settings(self.prior, 1.0, self.rule, self.samples)

    # -- a new model --------------------------------------------------------------------------------------------------

    def selected(self, network: nn.Module) -> Select:
        """Return the last layer, if only that is Bayesian."""
        return last_layer(network) if self.over == "last-layer" else None

    def empty_posterior(self, layout: Layout, mean: Tensor) -> Posterior:
        """Make the posterior that a file fills."""
        prior = self.prior.bind(layout, mean)
        if self.covariance == "full":
            return FullPosterior(layout, mean, mean.new_zeros(0, 0), prior, torch.zeros(0, dtype=torch.int64))
        if self.covariance == "kronecker":
            shapes = [(slot.shape[0], math.prod(slot.shape[1:])) for slot in layout]
            left, right = ([mean.new_zeros(shape[side], shape[side]) for shape in shapes] for side in (0, 1))
            return KroneckerPosterior(layout, mean, torch.ones_like(mean), left, right, prior)
        if self.rate < 1:
            return PartialPosterior(layout, mean, torch.ones_like(mean), prior)
        return MeanFieldPosterior(layout, mean, torch.ones_like(mean), prior)

    def choose(self, bnn: BayesianModel, batches: Iterable[Any]) -> None:
        """Fit the posterior to all of these training batches."""
        if self.prior_from == "held-out":
            raise LeanBayesError(
                "prior_from='held-out' needs held-out data: use prior_from='marginal-likelihood', and then "
                "lb.choose_prior(bnn, held_out_batches)."
            )
        self._fit(bnn, Training(bnn, 0, 0, lambda: batches))

    # -- training -----------------------------------------------------------------------------------------------------

    def start(self, training: Training) -> None:
        """Fit the posterior to the training data, and choose the prior."""
        self._fit(training.model, training)
        if self.prior_from == "held-out" and training.model.posterior.prior.is_open:  # type: ignore[union-attr]
            choose_prior(training.model, list(training.held_out()), seed=self.seed)

    def _fit(self, bnn: BayesianModel, training: Training) -> None:
        weights, layout = bnn.posterior.mean().detach(), bnn.layout
        if self.covariance == "kronecker":
            bnn.posterior = self._kronecker(bnn, weights, training).train(bnn.posterior.training)
            return
        index = None
        with training.autocast():
            if self.covariance == "diagonal" or (self.rate < 1 and self.subnetwork == "variance"):
                diagonal = training.average(self._diagonal(bnn, weights, training.batches()))
            if self.rate < 1:
                if self.subnetwork == "variance":
                    scores = -diagonal
                else:
                    scores = scores_of(bnn, weights, training.batches(), self.subnetwork, self.seed)
                    scores = training.average(scores)
                index = top(layout, scores, self.rate)
            if self.covariance == "full":
                count = layout.numel if index is None else len(index)
                if count > _MOST_FULL:
                    raise LeanBayesError(
                        f"A full covariance of {count:,} weights does not fit into memory: use over='last-layer', a "
                        f"smaller rate, select=, or covariance='diagonal' (it may have {_MOST_FULL:,} weights)."
                    )
                matrix = training.average(full_matrix(bnn, weights, training.batches(), index).total)
        prior = self.prior.bind(layout, weights).to(weights.device)
        if index is not None:
            prior.keep(index)
        mode = bnn.posterior.training
        if self.covariance == "full":
            places = torch.arange(layout.numel, device=weights.device) if index is None else index
            spectrum = torch.linalg.eigvalsh(matrix).clamp_min(0)
            _open_scale(prior, spectrum / self.temperature, weights[places], places)
            precision = matrix / self.temperature + torch.diag(_precision(prior, places).to(matrix).expand(len(places)))
            bnn.posterior = FullPosterior(layout, weights.clone(), _root(precision), prior, places).train(mode)
            return
        chosen = diagonal if index is None else diagonal[index]
        _open_scale(prior, chosen / self.temperature, weights if index is None else weights[index], index)
        std = (chosen / self.temperature + _precision(prior, index).to(chosen)).rsqrt()
        if index is None:
            bnn.posterior = MeanFieldPosterior(layout, weights.clone(), std, prior).train(mode)
        else:
            stds = torch.ones_like(weights).index_copy(0, index, std)
            bnn.posterior = PartialPosterior(layout, weights.clone(), stds, prior, index).train(mode)

    def _kronecker(self, bnn: BayesianModel, weights: Tensor, training: Training) -> KroneckerPosterior:
        probes = None if self.estimate == "exact" else self.probes
        with training.autocast():
            factors = kronecker_factors(bnn, weights, training.batches(), probes, self.seed)
        pairs = [[torch.linalg.eigh(training.average(factor)) for factor in both] for both in factors]
        products = [torch.outer(left.eigenvalues, right.eigenvalues).clamp_min(0) for left, right in pairs]
        shaped = [product.view(slot.shape) for product, slot in zip(products, bnn.layout, strict=True)]
        curvature = bnn.layout.join(shaped) / self.temperature
        prior = self.prior.bind(bnn.layout, weights).to(weights.device)
        _open_scale(prior, curvature, weights, None)
        std = (curvature + _precision(prior, None).to(curvature)).rsqrt()
        left, right = ([pair[side].eigenvectors for pair in pairs] for side in (0, 1))
        return KroneckerPosterior(bnn.layout, weights.clone(), std, left, right, prior)

    def _diagonal(self, bnn: BayesianModel, weights: Tensor, batches: Iterable[Any]) -> Tensor:
        if self.estimate == "exact":
            return exact_diagonal(bnn, weights, batches).total
        return estimated_diagonal(bnn, weights, batches, self.probes, self.seed).total


# -- the prior --------------------------------------------------------------------------------------------------------


def _precision(prior: BoundPrior, index: Tensor | None) -> Tensor:
    terms = prior.normal_terms(index)
    assert terms is not None
    return torch.as_tensor(terms.scale, dtype=torch.float64).square().reciprocal()


def _root(precision: Tensor) -> Tensor:
    """Return a lower triangular R with R·Rᵀ = the inverse of the precision."""
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(precision)))


def _open_scale(prior: BoundPrior, curvature: Tensor, weights: Tensor, index: Tensor | None) -> None:
    """Set an open scale to that with the largest marginal likelihood.

    With the eigenvalues c of the curvature, log p(data | δ) = ½ Σ_i [log δ - log(c_i + δ)] - ½ δ ‖w - m‖² + constant.
    """
    if not prior.is_open:
        return
    terms = prior.normal_terms(index)
    assert terms is not None
    distance = (weights if terms.loc is None else weights - terms.loc).double().square().sum()
    curvature = curvature.double()

    def evidence(precision: Tensor) -> Tensor:
        return -0.5 * (torch.log1p(curvature / precision).sum() + precision * distance)

    best = torch.zeros(())
    for powers in (_COARSE, _FINE):
        grid = 10 ** (best + powers).to(curvature.device, torch.float64)
        best = best + powers[torch.stack([evidence(one) for one in grid]).argmax().cpu()]
    prior.set_scale(10 ** (-0.5 * float(best)))


@checked()
@torch.inference_mode(False)
@torch.no_grad()
def choose_prior(bnn: BayesianModel, batches: Iterable[Any], *, samples: int | None = None, seed: int = 0) -> float:
    """Choose the prior precision of a Laplace approximation on held-out data, and return it.

    It takes the precision δ with the lowest negative log-likelihood of the predictions, among powers of √10 from 10⁷
    down to 0.01. The stds of the model become those of δ.

    Args:
        bnn: A model of `lb.Laplace` with the prior `Normal("auto")`. It changes in place.
        batches: Held-out batches (x, y), which are read several times.
        samples: The number of Monte Carlo samples of a prediction. By default 10.
        seed: The seed of these samples, which are the same for all precisions.

    Returns:
        The precision δ = 1/s² of the prior N(m, s²).

    Raises:
        LeanBayesError: The model has another method, its prior has a fixed scale, or there are no labels.

    Example:
        >>> bnn = lb.bayesianize(trained, lb.Laplace(), data=train_loader)
        >>> lb.choose_prior(bnn, held_out_loader)
    """
    prior: Any = getattr(bnn.posterior, "prior", None)
    if not isinstance(bnn.method, Laplace) or not isinstance(prior, BoundPrior) or not prior.is_open:
        raise LeanBayesError('choose_prior() needs a fitted model of lb.Laplace with the prior lb.Normal("auto").')
    batches = list(labeled(bnn, batches))
    stds_of = _by_precision(bnn)
    samples = _HELD_OUT_SAMPLES if samples is None and bnn.current_rule.random else samples
    best, lowest = math.nan, math.inf
    for power in _POWERS:  # from nearly no noise up
        stds_of(10**power)
        nll = validation_nll(bnn, batches, samples, seed)
        if nll < lowest:
            best, lowest = 10**power, nll
        elif nll > lowest + _MUCH_WORSE:  # more noise still could overflow
            break
    stds_of(best)
    return best


def _by_precision(bnn: BayesianModel) -> Callable[[float], None]:
    """Return a function that sets the posterior to that of another prior precision."""
    posterior: Any = bnn.posterior
    prior: BoundPrior = posterior.prior
    before = _precision(prior, None).item()
    if isinstance(posterior, FullPosterior):
        values, vectors = torch.linalg.eigh(torch.cholesky_inverse(posterior.root.double()))
        curvature = (values - before).clamp_min(0)

        def set_matrix(precision: float) -> None:
            prior.set_scale(precision**-0.5)
            posterior.root.copy_(torch.linalg.cholesky((vectors / (curvature + precision)) @ vectors.mT))

        return set_matrix
    kronecker = isinstance(posterior, KroneckerPosterior)
    diagonal = ((posterior.std if kronecker else posterior.std()).double().square().reciprocal() - before).clamp_min(0)

    def set_stds(precision: float) -> None:
        prior.set_scale(precision**-0.5)
        std = (diagonal + precision).rsqrt()
        if kronecker:
            posterior.std.copy_(std)
        else:
            posterior.rho.copy_(torch.log(torch.expm1(std)))

    return set_stds
