"""ABNN (Franchi et al. 2024): a trained network becomes Bayesian by noise in its normalization layers."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from leanbayes.core.layout import Layout, Select
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.model.method import Method, Stage, register_method
from leanbayes.posteriors import MultiplicativePosterior


@register_method("abnn")
@dataclass(frozen=True)
class ABNN(Method):
    """Adaptable Bayesian network: a trained network with noise in its normalization layers.

    Each scale γ of a normalization layer becomes γ(1 + α·ε) with standard normal ε. Then γ and the shifts of these
    layers are trained for a few epochs, while all other parameters are frozen. It stores no more numbers than the
    network.

    Paper: Franchi et al. (2024), "Make Me a BNN: A Simple Strategy for Estimating Bayesian Uncertainty from Pre-trained
    Models". The paper averages several such networks, each trained with random class weights; this is one of them.

    Attributes:
        noise_std: α, the std of the noise relative to γ.
        pretrain: fraction of the epochs that train the plain network first. Use 0 for a trained network.
        train_all: train all parameters after that, not only those of normalization layers.
        samples: number of Monte Carlo samples of a prediction.

    Example:
        >>> bnn = lb.fit(network, lb.ABNN(), train_set, epochs=30)
        >>> bnn = lb.bayesianize(trained, lb.ABNN(noise_std=0.1))  # for your own loop
    """

    noise_std: float = 0.1
    pretrain: float = 0.7
    train_all: bool = False
    samples: int = 30
    chooses_parameters = True
    has_kl = False  # α is fixed

    def __post_init__(self) -> None:
        if not 0 < self.noise_std < math.inf:
            raise LeanBayesError(f"noise_std={self.noise_std} must be a positive number.")
        if not 0 <= self.pretrain < 1:
            raise LeanBayesError(f"pretrain={self.pretrain} must be a fraction of the epochs, from 0 to less than 1.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")

    def selected(self, network: nn.Module) -> Select:
        """Return the names of the scales of all normalization layers."""
        norms = [(name, module) for name, module in network.named_modules() if _is_norm(module)]
        if not norms:
            raise LeanBayesError(
                "ABNN needs normalization layers with trainable scales, and the network has none: use "
                "lb.MCDropout or lb.MeanField."
            )
        return [f"{name}.weight" if name else "weight" for name, _ in norms]

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> MultiplicativePosterior:
        """Set μ to the scales of the trained network."""
        return MultiplicativePosterior(layout, mean, self.noise_std)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Freeze the parameters of all other layers."""
        if not self.train_all:
            of_norms = {id(p) for module in network.modules() if _has_norm_name(module) for p in module.parameters()}
            for parameter in network.parameters():
                parameter.requires_grad_(parameter.requires_grad and id(parameter) in of_norms)
        return network

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, then its normalization layers."""
        last = Stage(self, 1 - self.pretrain)
        return (Stage(Deterministic(), self.pretrain), last) if self.pretrain else (last,)


def _has_norm_name(module: nn.Module) -> bool:
    """Whether a module without children is a normalization layer, also one of another library."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer with a scale that can be trained."""
    weight = getattr(module, "weight", None)
    return _has_norm_name(module) and isinstance(weight, nn.Parameter) and weight.requires_grad
