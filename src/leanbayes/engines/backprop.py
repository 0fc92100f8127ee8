"""`backprop`: gradients of the ELBO with respect to μ and ρ (Bayes by Backprop, Blundell et al. 2015)."""

from typing import Any

import torch

from leanbayes.engines.base import Engine, OptimizerSettings, likelihood_parameters, register_engine
from leanbayes.model.bayesian import BayesianModel

_DEFAULTS = {"sgd": {"lr": 0.1, "weight_decay": 5e-4}, "adamw": {"lr": 1e-3, "weight_decay": 1e-2}}


@register_engine("backprop")
class Backprop(Engine):
    """SGD or AdamW trains means, norms and biases. Adam trains the stds, or SGD, which hardly moves them."""

    def optimizers(self, bnn: BayesianModel, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        """Return the optimizer of the means, and that of the stds if there are any."""
        noise = likelihood_parameters(bnn)
        scales = [p for p in bnn.scale_parameters() if p.requires_grad] + noise
        known = {id(p) for p in scales}
        means = [p for p in bnn.mean_parameters() if id(p) not in known]
        fused = bnn.device.type == "cuda"
        chosen = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        given = {**_DEFAULTS[settings.optimizer], "fused": fused, **given}
        made: list[torch.optim.Optimizer] = []
        momentum: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
        if means and settings.optimizer == "sgd":
            made.append(torch.optim.SGD(means, **momentum, **given))
        elif means:
            made.append(torch.optim.AdamW(means, **given))
        if scales and settings.scale_optimizer == "sgd":
            made.append(torch.optim.SGD(scales, lr=settings.scale_lr, fused=fused, **momentum))
        elif scales:
            made.append(torch.optim.Adam(scales, lr=settings.scale_lr, fused=fused))
        return made
