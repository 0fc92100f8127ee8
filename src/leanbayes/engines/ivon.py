"""`ivon`: the natural-gradient update of a diagonal Gaussian (IVON, Shen et al. 2024), as one optimizer.

IVON stores an estimate h of the curvature, with σ² = 1/(λ(h + δ)) for λ = N/T training examples at the temperature T
and a prior N(0, 1/(λδ)). Here σ itself is the state, as the posterior stores it: written with σ the update needs no h.
The curvature is estimated by Price's theorem, ĥ = (∂L/∂σ)/σ, from the gradient of ρ. So several samples per step,
accumulated gradients, several processes, and every rule that is differentiable in σ give the right average.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.arguments import checked
from leanbayes.core.parts import is_sharded, local_part, whole
from leanbayes.engines.base import Engine, OptimizerSettings, likelihood_parameters, register_engine
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.likelihoods import Gaussian
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.defaults import defaults
from leanbayes.model.objective import unwrap
from leanbayes.posteriors import Posterior
from leanbayes.posteriors.base import DiagonalGaussian
from leanbayes.priors import BoundPrior

_WEIGHT_DECAY = 5e-4


class IVON(torch.optim.Optimizer):
    """The natural-gradient optimizer of a Bayesian model, for methods with `engine="ivon"`.

    It updates means and stds of the posterior together, and all other parameters by SGD with the same momentum. The
    prior and its KL are part of the update, so `lb.elbo_loss` reports the KL without a gradient. It is an ordinary
    optimizer: schedulers, gradient clipping, accumulated gradients and `state_dict` work. Its state is one momentum per
    parameter; the curvature is stored as the std of the posterior.

    With the mean loss L of a batch, the prior N(m, s²) and λ = num_data · labels_per_example / temperature, so that λL
    is the NLL of all training data, a step is

        r  = λσ·∂L/∂σ + σ²/s² - 1
        σ² ← σ² / (1 + (1-β₂)·r + ½(1-β₂)²·r²)
        v  ← β₁v + (1-β₁)·∂L/∂μ
        μ  ← μ - lr·(σ²/σ₀²)·(v/(1-β₁ᵗ) + (μ-m)/(λs²)),   σ₀² = 1/(λ·hess_init + 1/s²).

    If the std s of the data's noise is learned (`lb.Gaussian(learned=True)`), lr is multiplied by min(1, s/s₀), with
    the initial s₀. The gradient of a residual of size s is 1/s, so steps keep their length as s falls; with a constant
    lr they would grow and diverge.

    Paper: Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks". The weight decay δ of the
    paper is the prior's, δ = 1/(λs²): `lb.Normal("auto")` has δ = 0.001.

    Args:
        model: A `BayesianModel` whose method has `engine="ivon"`, or DistributedDataParallel or torch.compile around
            one.
        lr: The learning rate. The momentum is an average of gradients, so it is about ten times that of SGD with
            momentum 0.9. None means 1 for classes and 0.1 for a regression.
        num_data: The number of training examples, as in `lb.elbo_loss`.
        temperature: The weight of the KL. 1 is the Bayesian posterior.
        betas: β₁ of the momentum and β₂ of the stds.
        hess_init: The curvature that σ starts from. None chooses 0.5, or more if σ₀ would be more than a fifth of the
            std of the network's weights.
        weight_decay: The weight decay of parameters without a prior: norms, biases and deterministic weights.
        scale_lr: The learning rate of the noise in the data if it is learned, by Adam's update.
        keep_std: Keep the stds that the model has, to continue a training, instead of starting from σ₀.
        labels_per_example: The mean number of labels of an example, if the loss is a mean over several of them: the
            labeled tokens of a sequence, without the first one, or the labeled pixels of an image. None means one
            label; `lb.elbo_loss` raises an error if there are more.

    Raises:
        LeanBayesError: The model is trained by another engine, or an argument is out of range.
        UnsupportedOperation: The posterior is not a diagonal Gaussian with a Gaussian prior.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField(engine="ivon"))
        >>> optimizer = lb.IVON(bnn, num_data=len(train_set))
        >>> for x, y in loader:
        ...     loss = lb.elbo_loss(bnn, x, y, num_data=len(train_set))
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    """

    @checked(num_data="the number of training examples, such as len(train_set)")
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        *,
        num_data: int,
        temperature: float = 1.0,
        betas: tuple[float, float] = (0.9, 1 - 1e-5),
        hess_init: float | None = None,
        weight_decay: float = _WEIGHT_DECAY,
        scale_lr: float = 1e-2,
        keep_std: bool = False,
        labels_per_example: float | None = None,
    ) -> None:
        bnn = unwrap(model)
        if bnn.method.engine != "ivon":
            raise LeanBayesError(
                f"This model is trained by the engine {bnn.method.engine!r}: make it with a method that has "
                "engine='ivon', such as lb.MeanField(engine='ivon')."
            )
        if lr is None:
            lr = defaults("ivon", bnn.likelihood.has_logits).lr
        assert lr is not None
        labels = 1.0 if labels_per_example is None else labels_per_example
        _check_arguments(lr, num_data, temperature, betas, hess_init, weight_decay, scale_lr, labels)
        self._posterior, self._likelihood = bnn.posterior, bnn.likelihood
        weights = _diagonal(bnn.posterior)
        noise = likelihood_parameters(bnn)
        others = {id(p) for p in [*weights, *noise]}
        rest = [p for p in bnn.parameters() if p.requires_grad and id(p) not in others]
        scale = float(num_data * labels / temperature)
        groups: list[dict[str, Any]] = []
        if weights:
            hess_init = _initial_curvature(bnn.posterior, scale) if hess_init is None else float(hess_init)
            groups.append({"params": list(weights), "kind": "posterior", "loss_weight": scale, "hess_init": hess_init})
        if rest:
            groups.append({"params": rest, "kind": "deterministic"})
        if noise:
            groups.append({"params": noise, "kind": "likelihood", "lr": scale_lr, "betas": (0.9, 0.999)})
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        for group in self.param_groups:
            group["count"] = _scalar(0.0, group["params"][0])
        if weights and not keep_std:
            for prior in (module for module in bnn.posterior.modules() if isinstance(module, BoundPrior)):
                prior.choose_scale(scale)
            self._initialize_stds(self.param_groups[0])
        # torch.distributed.checkpoint takes a step if an optimizer has no state, and expects some for each parameter.
        for parameter in (p for p in bnn.mean_parameters() if is_sharded(p)):
            self._momentum(parameter)
        for parameter in (p for p in bnn.scale_parameters() if is_sharded(p)):
            self.state[parameter]["step"] = torch.zeros(())
        bnn.optimized_by, bnn.labels_per_example = "ivon", labels_per_example

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy, with the posterior and the likelihood."""
        return {**super().__getstate__(), "_posterior": self._posterior, "_likelihood": self._likelihood}

    @torch.no_grad()
    def _initialize_stds(self, group: dict[str, Any]) -> None:
        """Set all stds to σ₀."""
        for found in self._posterior.diagonal_gaussians():
            rho, inverse = local_part(found.rho), found.prior.scale**-2
            variance = 1 / (group["loss_weight"] * group["hess_init"] + inverse)
            std = variance.sqrt() if isinstance(variance, Tensor) else torch.full_like(rho, math.sqrt(variance))
            rho.copy_(gaussian.inverse_softplus(std))

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again and returns it, as for other optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] = group["count"].to(group["params"][0].device)  # after `load_state_dict`
            group["count"].add_(1)
            _UPDATES[group["kind"]](self, group)
        return loss

    def _rate(self, group: dict[str, Any], like: Tensor) -> Tensor:
        """Return the learning rate of weights, which falls with the noise of the data if that is learned."""
        rate, likelihood = _scalar(group["lr"], like), self._likelihood
        if not isinstance(likelihood, Gaussian) or likelihood.rho is None:
            return rate
        return rate * (likelihood.std.to(rate) / likelihood.settings["std"]).clamp(max=1.0)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]

    def _update_posterior(self, group: dict[str, Any]) -> None:
        """Take the natural-gradient step, and a plain one for weights of the posterior that are deterministic."""
        for found in self._posterior.diagonal_gaussians():
            if found.mean.grad is not None or found.rho.grad is not None:
                self._update_gaussian(group, found)

    def _update_gaussian(self, group: dict[str, Any], found: DiagonalGaussian) -> None:
        """Update one piece of the posterior: of a sharded one, the part of this process."""
        mean, rho, prior, places = found
        beta, second = group["betas"]
        grad = None if mean.grad is None else local_part(mean.grad)
        slope = None if rho.grad is None else local_part(rho.grad)
        is_trained = mean.requires_grad  # else only the stds are
        momentum = local_part(self._momentum(mean)) if is_trained else None
        mean, rho = local_part(mean), local_part(rho)
        slope = torch.zeros_like(rho) if slope is None else slope
        steps: dict[str, Any] = {
            "rate": self._rate(group, mean),
            "count": group["count"],
            "beta": beta,
            "gap": 1 - second,
            "precision": group["loss_weight"] * group["hess_init"],
            "weight": group["loss_weight"],
        }
        if momentum is None:
            unmoved, zeros = mean.detach(), torch.zeros_like(rho)
            unmoved = unmoved.clone() if places is None else unmoved[places]
            gaussian.natural_step_(unmoved, rho, zeros, zeros, slope, prior, **steps)
            return
        grad = torch.zeros_like(mean) if grad is None else grad
        if places is None:
            gaussian.natural_step_(mean, rho, momentum, grad, slope, prior, **steps)
            return
        chosen, chosen_momentum = mean[places], momentum[places]
        gaussian.natural_step_(chosen, rho, chosen_momentum, grad[places], slope, prior, **steps)
        momentum.lerp_(grad, 1 - beta)
        direction = momentum / (1 - beta ** group["count"])
        mean.sub_(direction.add_(mean, alpha=group["weight_decay"]).mul_(steps["rate"]))
        mean[places] = chosen

    def _update_deterministic(self, group: dict[str, Any]) -> None:
        """Take a step of SGD with the same momentum."""
        with_grad = [p for p in group["params"] if p.grad is not None]
        if not with_grad:
            return
        moved = [local_part(p) for p in with_grad]
        beta, momenta = group["betas"][0], [local_part(self._momentum(p)) for p in with_grad]
        torch._foreach_lerp_(momenta, [local_part(p.grad) for p in with_grad], 1 - beta)
        directions = torch._foreach_div(momenta, 1 - beta ** group["count"])
        torch._foreach_add_(directions, moved, alpha=group["weight_decay"])
        torch._foreach_mul_(directions, self._rate(group, moved[0]))
        torch._foreach_sub_(moved, directions)

    def _update_likelihood(self, group: dict[str, Any]) -> None:
        """Take a step of Adam: the noise of the data has another scale than the weights."""
        first, second = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, momentum = self.state[parameter], self._momentum(parameter)
            square = state.setdefault("square", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1 - first)
            square.lerp_(parameter.grad.square(), 1 - second)
            root = (square / (1 - second ** group["count"])).sqrt_().add_(1e-8)
            direction = momentum / (1 - first ** group["count"]) / root
            parameter.sub_(direction * _scalar(group["lr"], parameter))


_UPDATES: dict[str, Callable[[IVON, dict[str, Any]], None]] = {
    "posterior": IVON._update_posterior,
    "deterministic": IVON._update_deterministic,
    "likelihood": IVON._update_likelihood,
}


def _scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a scalar tensor on the device of another tensor."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    return torch.full((), value, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))


def _diagonal(posterior: Posterior) -> tuple[nn.Parameter, ...]:
    """Return μ and ρ, or nothing if no weight is Bayesian. Refuse a posterior that the update is wrong for."""
    if not posterior.random_weights:
        return ()
    found = posterior.diagonal_gaussians()
    if not found:
        raise UnsupportedOperation(
            f"IVON needs independent Gaussian weights with a Gaussian prior, which {type(posterior).__name__} does not "
            "have: use lb.Normal() as the prior, or engine='backprop'."
        )
    return tuple(parameter for one in found for parameter in (one.mean, one.rho))


def _initial_curvature(posterior: Posterior, loss_weight: float) -> float:
    """Return 0.5, or what keeps σ₀ at a fifth of the root mean square of the weights.

    On few data 0.5 means noise as large as the weights, and the curvature is estimated too slowly to correct it.
    """
    found = posterior.diagonal_gaussians()
    means = [one.mean if one.places is None else one.mean[one.places] for one in found]
    sums = [whole(values.detach().double().square().sum()) for values in means]
    size = torch.stack(sums).sum() / sum(values.numel() for values in means)
    return max(0.5, 25.0 / (loss_weight * float(size))) if size > 0 else 0.5


def _check_arguments(
    lr: float | Tensor,
    num_data: int,
    temperature: float,
    betas: tuple[float, float],
    hess_init: float | None,
    weight_decay: float,
    scale_lr: float,
    labels_per_example: float,
) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise LeanBayesError(f"lr must be one number, not a tensor of shape {tuple(lr.shape)}.")
    numbers = {"num_data": num_data, "temperature": temperature, "hess_init": 1 if hess_init is None else hess_init}
    numbers["labels_per_example"] = labels_per_example
    for name, value in {**numbers, "lr": float(lr), "scale_lr": scale_lr}.items():
        if not 0 < value < math.inf:
            raise LeanBayesError(f"{name}={value} must be a positive number.")
    if not 0 <= weight_decay < math.inf:
        raise LeanBayesError(f"weight_decay={weight_decay} must be a number of at least 0.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise LeanBayesError(f"betas={betas} must be two numbers from 0 to less than 1.")


@register_engine("ivon")
class NaturalGradient(Engine):
    """One `IVON` for all parameters."""

    def optimizers(self, bnn: BayesianModel, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        """Return the optimizer."""
        optimizer = IVON(
            bnn,
            settings.lr,
            num_data=settings.num_data,
            temperature=settings.temperature,
            hess_init=settings.hess_init,
            weight_decay=_WEIGHT_DECAY if settings.weight_decay is None else settings.weight_decay,
            scale_lr=settings.scale_lr,
            keep_std=settings.keep_std,
            labels_per_example=settings.labels_per_example,
        )
        return [optimizer]
