"""Adapters of other libraries with one interface: conversion of a network, KL, sampling, and saving.

All start with the weights of the network as means and with one σ, and use one prior, N(0, 0.1²); everything else has
the default of each library. If a library is not installed, `convert` raises ModuleNotFoundError.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb

NUM_DATA = 50_000
PRIOR_STD = 0.1
Gaussians = list[tuple[Tensor, Tensor]]  # means, and the raw parameters of σ


class Library:
    """The plain network, and the base class of all libraries."""

    package: str | None = None
    trains = True
    one_pass_too = False

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        """Return the model to train, with the same σ for all weights."""
        return net

    def gaussians(self, model: Any) -> Gaussians:
        """Return the stored parameters of q(w)."""
        return []

    def std(self, raw: Tensor) -> Tensor:
        """Compute σ."""
        return F.softplus(raw)

    def draw(self, model: Any, x: Tensor) -> Any:
        """Return the output for one sample of the weights."""
        return model(x)

    def kl(self, model: Any) -> Tensor:
        """Return the KL that the library adds to the loss of a whole data set, after a sample."""
        raise NotImplementedError  # abstract

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a training step."""
        loss = F.cross_entropy(self.draw(model, x), y)
        return loss + self.kl(model) / NUM_DATA if self.package else loss

    @torch.no_grad()
    def probabilities(self, model: Any, x: Tensor, samples: int) -> Tensor:
        """Return mean probabilities over samples, as in the examples of the libraries."""
        total = self.draw(model, x).softmax(-1)
        for _ in range(samples - 1):
            total += self.draw(model, x).softmax(-1)
        return total / samples

    def outputs(self, model: Any, x: Tensor, samples: int) -> Tensor:
        """Return the outputs of several samples."""
        with torch.no_grad():
            return torch.stack([self.draw(model, x) for _ in range(samples)])

    def one_pass(self, model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std of the outputs in one pass."""
        raise NotImplementedError  # only if one_pass_too

    def save(self, model: Any, path: Path) -> None:
        """Save the model as a user would."""
        torch.save(model.state_dict(), path)

    def _with_std(self, model: nn.Module, std: float) -> nn.Module:
        for _, raw in self.gaussians(model):
            raw.data = raw.data.contiguous()
            raw.data.fill_(math.log(math.expm1(std)))
        return model


class LeanBayes(Library):
    """leanbayes: mean-field with sampled weights; one pass by moments."""

    package = "leanbayes"
    one_pass_too = True

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        return lb.bayesianize(net, lb.MeanField(prior=lb.Normal(PRIOR_STD), init_std=std, relative=False), seed=0)

    def gaussians(self, model: Any) -> Gaussians:
        return [(model.posterior.mu, model.posterior.rho)]

    def kl(self, model: Any) -> Tensor:
        return model.kl()

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return lb.elbo_loss(model, x, y, num_data=NUM_DATA, check=False)

    def probabilities(self, model: Any, x: Tensor, samples: int) -> Tensor:
        return model.predict(x, samples=samples).probs

    def one_pass(self, model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), model.using("moments"):
            output = model(x)
        return output.loc, output.variance.sqrt()

    def save(self, model: Any, path: Path) -> None:
        lb.save(model, path)


class BayesianTorch(Library):
    """bayesian-torch, with the weights of the network as means (MOPED)."""

    package = "bayesian-torch"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

        settings = {
            "prior_mu": 0.0,
            "prior_sigma": PRIOR_STD,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.0,
            "type": self.kind,
            "moped_enable": True,
            "moped_delta": 0.1,
        }
        dnn_to_bnn(net, settings)
        return self._with_std(net, std)

    def gaussians(self, model: Any) -> Gaussians:
        return _pairs(model, "mu_", "rho_")

    def kl(self, model: Any) -> Tensor:
        from bayesian_torch.models.dnn_to_bnn import get_kl_loss

        return get_kl_loss(model)


class TorchUncertainty(Library):
    """torch-uncertainty has Bayesian layers but no converter; linear and convolutional layers are replaced here."""

    package = "torch-uncertainty"

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear

        prior = {"prior_sigma_1": PRIOR_STD, "prior_pi": 1}
        return self._with_std(_replaced(net, BayesLinear, BayesConv2d, prior), std)

    def gaussians(self, model: Any) -> Gaussians:
        return _pairs(model, "_mu", "_sigma")

    def kl(self, model: Any) -> Tensor:
        from torch_uncertainty.losses import KLDiv

        return KLDiv(model)().squeeze()


class Blitz(Library):
    """blitz has Bayesian layers but no converter; linear and convolutional layers are replaced here."""

    package = "blitz-bayesian-pytorch"

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        from blitz.modules import BayesianConv2d, BayesianLinear

        prior = {"prior_sigma_1": PRIOR_STD, "prior_pi": 1}
        return self._with_std(_replaced(net, BayesianLinear, BayesianConv2d, prior), std)

    def gaussians(self, model: Any) -> Gaussians:
        from blitz.modules.weight_sampler import TrainableRandomDistribution

        return [(m.mu, m.rho) for m in model.modules() if isinstance(m, TrainableRandomDistribution)]

    def kl(self, model: Any) -> Tensor:
        from blitz.losses import kl_divergence_from_nn

        return kl_divergence_from_nn(model)


class FastBNNs(Library):
    """FastBNNs: trained by moments with its own Gaussian loss (on one-hot labels); tensor inputs give samples.

    Version 0.4.3 initializes the ρ of a layer as one expanded number, which no optimizer can update; here each entry
    has its own memory.
    """

    package = "fastbnns"
    one_pass_too = True

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        from fastbnns.bnn.base import BNN

        model = BNN(net, convert_in_place=True, wrapper_kwargs_global={"resample_mean": False})
        return self._with_std(model, std)

    def gaussians(self, model: Any) -> Gaussians:
        parameters = dict(
            model.named_parameters(remove_duplicate=False)
        )  # the means are also weights of the wrapped layers
        return [
            (parameters[name.removesuffix("_rho") + "_mean"], raw)
            for name, raw in parameters.items()
            if name.endswith("_rho")
        ]

    def _kl_loss(self, device: torch.device) -> nn.Module:
        from fastbnns.bnn.losses import KLDivergence
        from fastbnns.bnn.priors import Distribution

        prior = torch.distributions.Normal(torch.zeros((), device=device), torch.tensor(PRIOR_STD, device=device))
        return KLDivergence(Distribution(prior))

    def kl(self, model: Any) -> Tensor:
        return self._kl_loss(next(model.parameters()).device)(model)

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        from fastbnns.bnn.losses import ELBO
        from fastbnns.bnn.types import MuVar

        output = model(MuVar(x))
        beta = 1 / NUM_DATA
        elbo = ELBO(nn.GaussianNLLLoss(full=True), self._kl_loss(x.device), beta=beta, reduction="mean")
        target = F.one_hot(y, output.mu.shape[1]).to(output.mu.dtype)
        return elbo(model=model, input=output.mu, target=target, var=output.var)

    def one_pass(self, model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        from fastbnns.bnn.types import MuVar

        with torch.no_grad():
            output = model(MuVar(x))
        return output.mu, output.var.sqrt()


class Posteriors(Library):
    """posteriors: diagonal variational inference with functional calls of the network."""

    package = "posteriors"

    def convert(self, net: nn.Module, std: float) -> nn.Module:
        import posteriors  # noqa: F401 (raises an error here if it is not installed)

        return _Functional(net, std)

    def gaussians(self, model: Any) -> Gaussians:
        return list(zip(model.mean, model.log_std, strict=True))

    def std(self, raw: Tensor) -> Tensor:
        return raw.exp()

    def draw(self, model: Any, x: Tensor) -> Any:
        from posteriors import diag_normal_sample

        return model.call(diag_normal_sample(model.tree(model.mean), model.stds()), x)

    def _nelbo(self, model: Any, log_likelihood: Callable[[Any], Tensor], weight: float) -> Tensor:
        from posteriors import diag_normal_log_prob
        from posteriors.vi.diag import nelbo

        def log_posterior(weights: Any, batch: Any) -> tuple[Tensor, Tensor]:
            log_prior = diag_normal_log_prob(weights, sd_diag=PRIOR_STD)
            return log_likelihood(weights) + weight * log_prior, torch.tensor([])

        return nelbo(model.tree(model.mean), model.stds(), None, log_posterior, temperature=weight)[0]

    def kl(self, model: Any) -> Tensor:
        return self._nelbo(model, lambda weights: torch.zeros(()), 1.0)

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return self._nelbo(model, lambda weights: -F.cross_entropy(model.call(weights, x), y), 1 / NUM_DATA)

    def save(self, model: Any, path: Path) -> None:
        torch.save([model.mean.state_dict(), model.log_std.state_dict(), dict(model.net.named_buffers())], path)


class _Functional(nn.Module):
    """A variational distribution over all parameters of a network."""

    def __init__(self, net: nn.Module, std: float) -> None:
        super().__init__()
        self.names = [name for name, _ in net.named_parameters()]
        self.mean = nn.ParameterList(parameter.detach().clone() for parameter in net.parameters())
        self.log_std = nn.ParameterList(torch.full_like(parameter, math.log(std)) for parameter in self.mean)
        self.net = net.requires_grad_(False)

    def tree(self, values: Any) -> dict[str, Tensor]:
        """Return values by parameter name."""
        return dict(zip(self.names, values, strict=True))

    def stds(self) -> dict[str, Tensor]:
        """Return σ of all parameters."""
        return self.tree(raw.exp() for raw in self.log_std)

    def call(self, weights: dict[str, Tensor], x: Tensor) -> Any:
        """Run the network with these weights."""
        return torch.func.functional_call(self.net, weights, (x,))


class LaplaceTorch(Library):
    """laplace-torch with its defaults: Kronecker factors of the last layer, fitted after deterministic training."""

    package = "laplace-torch"
    trains = False

    def __init__(self, kind: str) -> None:
        self.kind, self.one_pass_too = kind, kind == "regression"

    def convert(self, net: nn.Module, std: float) -> Any:
        from laplace import Laplace

        return Laplace(net.eval(), self.kind)

    def fit(self, model: Any, x: Tensor, y: Tensor) -> None:
        """Fit to one batch, replacing an earlier fit."""
        y = F.one_hot(y, 10).to(x.dtype) if self.kind == "regression" else y
        model.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))

    def probabilities(self, model: Any, x: Tensor, samples: int) -> Tensor:
        return model(x, pred_type="nn", link_approx="mc", n_samples=samples)

    def outputs(self, model: Any, x: Tensor, samples: int) -> Tensor:
        return model.predictive_samples(x, pred_type="nn", n_samples=samples)

    def one_pass(self, model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = model(x)
        return mean, covariance.diagonal(dim1=1, dim2=2).sqrt()

    def save(self, model: Any, path: Path) -> None:
        torch.save([model.model.state_dict(), model.state_dict()], path)


def _pairs(model: nn.Module, mean: str, raw: str) -> Gaussians:
    """Return pairs of parameters with matching names."""
    parameters = dict(model.named_parameters())
    return [
        (value, parameters[name.replace(mean, raw)])
        for name, value in parameters.items()
        if mean in name.split(".")[-1]
    ]


def _replaced(net: nn.Module, linear: Any, conv: Any, prior: dict[str, Any]) -> nn.Module:
    """Replace linear and convolutional layers by Bayesian layers with the same means."""
    for name, old in [(n, m) for n, m in net.named_modules() if type(m) in (nn.Linear, nn.Conv2d)]:
        bias = old.bias is not None
        if isinstance(old, nn.Linear):
            new = linear(old.in_features, old.out_features, bias=bias, **prior)
        else:
            shape = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation, "groups": old.groups}
            new = conv(old.in_channels, old.out_channels, old.kernel_size, bias=bias, **shape, **prior)
        with torch.no_grad():
            new.weight_mu.copy_(old.weight)
            if bias:
                new.bias_mu.copy_(old.bias)
        net.set_submodule(name, new)
    return net


LIBRARIES: dict[str, Library] = {
    "plain network": Library(),
    "leanbayes": LeanBayes(),
    "bayesian-torch": BayesianTorch("Reparameterization"),
    "bayesian-torch, flipout": BayesianTorch("Flipout"),
    "torch-uncertainty": TorchUncertainty(),
    "blitz": Blitz(),
    "FastBNNs": FastBNNs(),
    "posteriors": Posteriors(),
    "laplace-torch": LaplaceTorch("classification"),
}
