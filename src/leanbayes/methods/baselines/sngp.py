"""SNGP (Liu et al. 2020): bounded layers, and a Gaussian process in place of the last layer.

The last linear layer gets features h, and its outputs are replaced by g(x) = Φ(h) β + b, with D random features
Φ(h) = a √(2/D) cos(h̄ Ωᵀ + φ) of a Gaussian kernel k(h, h') = a² exp(-|h̄ - h̄'|² / (2 d ℓ²)), where h̄ is h with mean 0
and variance 1 over its d channels. The posterior of β is Gaussian, with the covariance (τ I + Σ_n Φ_n Φ_nᵀ)⁻¹ of the
authors' code, which is the same for all classes.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.network import call_with, evaluation_mode
from leanbayes.errors import LeanBayesError
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Method, Training, register_method


@register_method("sngp")
@dataclass(frozen=True)
class SNGP(Method):
    """Spectral-normalized Gaussian process: inputs far from the training data have uncertain outputs.

    The last linear layer is replaced by a Gaussian process on random features, and the weight matrix of every other
    linear and convolutional layer is bounded after each step, so that distances in the features mean distances of
    inputs. After the last step the covariance is computed on the training data. A sample adds Gaussian noise with the
    variance of the process to the outputs of each example. It is for networks that end in a linear layer.

    Paper: Liu et al. (2020), "Simple and Principled Uncertainty Estimation with Deterministic Deep Learning via
    Distance Awareness".

    Attributes:
        features: number of random features.
        length_scale: ℓ, the distance at which features become unrelated, relative to their size.
        amplitude: a, the std of an output far from all data, with ridge=1. A larger one also lets the last layer learn
            faster. The default was chosen by held-out images.
        norm_bound: largest singular value of a weight matrix. A convolution counts as a matrix of outputs by inputs and
            pixels.
        ridge: τ, the prior precision of β.
        samples: number of Monte Carlo samples of a prediction.
        seed: seed of the random features.

    Example:
        >>> bnn = lb.fit(network, lb.SNGP(), train_set, epochs=30)
    """

    features: int = 1024
    length_scale: float = 0.5
    amplitude: float = 3.0
    norm_bound: float = 6.0
    ridge: float = 1.0
    samples: int = 10
    seed: int = 0
    bayesian_weights = False

    def __post_init__(self) -> None:
        if not 1 <= self.features <= 1 << 12:  # the covariance has the square of it
            raise LeanBayesError(f"features={self.features} must be at least 1 and at most {1 << 12:,}.")
        for name in ("length_scale", "amplitude", "norm_bound", "ridge"):
            if not 0 < getattr(self, name) < math.inf:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be a positive number.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")

    def wrap(self, network: nn.Module) -> nn.Module:
        """Put a Gaussian process in the place of the last layer."""
        return GaussianProcessNetwork(network, self)

    def after_step(self, training: Training) -> None:
        """Bound the layers, and after the last step compute the covariance."""
        network = training.model.network
        assert isinstance(network, GaussianProcessNetwork)
        network.bound_layers(self.norm_bound)
        if training.step + 1 == training.steps:
            with training.autocast():
                _fit_covariance(network, training)


@torch.no_grad()
def _fit_covariance(network: "GaussianProcessNetwork", training: Training) -> None:
    """Set the covariance from the features of training batches, scaled to the number of training examples."""
    size, device = network.covariance.shape[0], network.covariance.device
    total = torch.zeros(size, size, dtype=torch.float64, device=device)
    examples = torch.zeros((), dtype=torch.float64, device=device)

    def collect(head: nn.Module, args: tuple[Any, ...]) -> None:
        found = network.features(args[0]).flatten(0, -2).double()
        total.addmm_(found.mT, found)

    handle = network.head().register_forward_pre_hook(collect)
    try:
        with evaluation_mode(training.model), training.model.using("mean"):
            for x, y in training.batches():
                call_with(training.model, x)
                examples += len(y)
    finally:
        handle.remove()
    if not examples:
        raise LeanBayesError("SNGP computes its covariance on training data: set training.batches to your batches.")
    share = training.average(examples) / training.num_data  # each process may have seen a part of the examples
    network.set_precision(training.average(total) / share)


class _Current:
    """The key of the noise of the pass that runs, or None without noise."""

    key: Tensor | None = None


class RandomFeatures(nn.Module):
    """Φ: random features of a Gaussian kernel. They follow from the seed, so files need not have them."""

    frequencies: Tensor
    phases: Tensor

    def __init__(self, method: SNGP, inputs: int, generator: torch.Generator, like: Tensor) -> None:
        super().__init__()
        self.amplitude = method.amplitude
        width = method.length_scale * math.sqrt(inputs)
        seeded: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
        frequencies = torch.randn(method.features, inputs, **seeded) / width
        phases = 2 * math.pi * torch.rand(method.features, **seeded)
        self.register_buffer("frequencies", frequencies.to(like), persistent=False)
        self.register_buffer("phases", phases.to(like), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Return Φ(h), in single precision at least, because the cosine of a large number needs it."""
        with torch.autocast(h.device.type, enabled=False):
            h = h.to(torch.promote_types(h.dtype, torch.float32))
            angles = F.linear(F.layer_norm(h, h.shape[-1:]), self.frequencies.to(h), self.phases.to(h))
            return angles.cos() * (self.amplitude * math.sqrt(2 / len(self.phases)))


class GaussianProcessNetwork(StochasticNetwork):
    """A network whose last linear layer is a Gaussian process on random features."""

    covariance: Tensor

    def __init__(self, network: nn.Module, method: SNGP) -> None:
        super().__init__()
        self.inner = network
        layers = _layers(network)
        if not layers or not isinstance(layers[-1], nn.Linear):
            raise LeanBayesError("SNGP needs a network that ends in a linear layer: use another method for this one.")
        head, self.ridge = layers[-1], method.ridge
        seeded: dict[str, Any] = {"generator": torch.Generator().manual_seed(method.seed), "dtype": torch.float64}
        self.features = RandomFeatures(method, head.in_features, seeded["generator"], head.weight)
        self.register_buffer("covariance", torch.eye(method.features).to(head.weight) / method.ridge)
        beta = 0.05 * torch.randn(head.out_features, method.features, **seeded)
        self.beta = nn.Parameter(beta.to(head.weight))
        head.weight.requires_grad_(False)  # the process takes its place
        self._current = _Current()
        for number, layer in enumerate(layers[:-1]):
            start = torch.randn(layer.weight.shape[0], **seeded)
            self.register_buffer(f"direction_{number}", F.normalize(start, dim=0).to(layer.weight))
        head.register_forward_hook(_Process(self, self._current))

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run the network, with noise in the outputs of a prediction and without noise in a loss."""
        before, self._current.key = self._current.key, None if draw is None or draw.training else draw.key
        try:
            return self.inner(*args, **kwargs)
        finally:
            self._current.key = before

    def head(self) -> nn.Module:
        """Return the layer whose outputs the process replaces."""
        return _layers(self.inner)[-1]

    def variance(self, features: Tensor) -> Tensor:
        """Return Φᵀ (τ I + Σ ΦΦᵀ)⁻¹ Φ of each example, with a last dimension of 1."""
        return ((features @ self.covariance.to(features)) * features).sum(-1, keepdim=True).clamp_min(0)

    @torch.no_grad()
    def set_precision(self, products: Tensor) -> None:
        """Set the covariance, given Σ ΦΦᵀ over the training data in double precision."""
        precision = products + self.ridge * torch.eye(len(products), dtype=products.dtype, device=products.device)
        self.covariance.copy_(torch.cholesky_inverse(torch.linalg.cholesky(precision)))

    @torch.no_grad()
    def bound_layers(self, bound: float) -> None:
        """Scale weight matrices whose largest singular value is above the bound, by one step of power iteration."""
        for number, layer in enumerate(_layers(self.inner)[:-1]):
            if layer.weight.requires_grad:
                matrix, left = layer.weight.flatten(1), getattr(self, f"direction_{number}")
                right = F.normalize(matrix.mT @ left, dim=0)
                image = matrix @ right
                left.copy_(F.normalize(image, dim=0))
                layer.weight.mul_((bound / torch.dot(left, image).clamp_min(1e-12)).clamp_max(1.0))

    def plain(self) -> nn.Module:
        """Return the network with the mean of the process as its last layer."""
        network = copy.deepcopy(self.inner)
        head = _layers(network)[-1]
        name = next(name for name, module in network.named_modules() if module is head)
        last = _MeanHead(self.features, self.beta, head.bias)
        if not name:
            return last
        network.set_submodule(name, last)
        return network


def _layers(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))]


@dataclass
class _Process:
    """A hook that replaces the outputs of the last layer."""

    network: GaussianProcessNetwork
    current: _Current

    def __call__(self, head: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        features = self.network.features(args[0])
        mean = F.linear(features.to(self.network.beta), self.network.beta, head.bias)
        if self.current.key is not None:
            epsilon = noise.normal(mean, self.current.key, stream=1)
            mean = mean + self.network.variance(features).sqrt().to(mean) * epsilon
        return mean.to(output.dtype)


class _MeanHead(nn.Module):
    """The mean of the process, as a layer."""

    def __init__(self, features: RandomFeatures, beta: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.features = copy.deepcopy(features)
        self.beta = nn.Parameter(beta.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, h: Tensor) -> Tensor:
        """Return the mean of the outputs."""
        return F.linear(self.features(h).to(self.beta), self.beta, self.bias)
