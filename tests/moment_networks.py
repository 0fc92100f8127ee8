"""Assertions about networks with the rule `moments`, for small and real networks."""

from typing import Any, cast

import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.network import call_with, output_tensor
from leanbayes.rules.moments.context import Correlation
from leanbayes.rules.moments.rule import MomentPropagation

SAMPLES = 300  # the median of ratios of stds then varies by about 0.04
KINDS: list[Correlation] = ["common", "none"]


def with_noise(network: nn.Module, init_std: float = 0.02, **settings: Any) -> lb.BayesianModel:
    """Return a Bayesian network in evaluation mode, with little noise in its weights."""
    return lb.bayesianize(network, lb.MeanField(init_std=init_std), **settings).eval()


def without_noise(network: nn.Module) -> lb.BayesianModel:
    """Return a Bayesian network whose weights have a variance of exactly 0."""
    bnn = with_noise(network)
    torch.nn.init.constant_(cast(Tensor, bnn.posterior.rho), -200.0)
    return bnn


@torch.no_grad()
def moments_of(bnn: lb.BayesianModel, inputs: Any, correlation: Correlation = "common") -> lb.Moments:
    """Return the mean and variance of the logits from one pass, and check that they are finite."""
    with bnn.using(MomentPropagation(correlation)):
        result = output_tensor(call_with(bnn, inputs))
    assert isinstance(result, lb.Moments)
    assert result.loc.isfinite().all()
    assert result.variance.isfinite().all()
    assert (result.variance >= 0).all()
    assert result.variance.shape == result.loc.shape
    assert result.variance.dtype == torch.float32
    return result


@torch.no_grad()
def assert_plain_without_noise(network: nn.Module, inputs: Any, share: float = 0.0) -> None:
    """Check that the means without noise are those of the plain network, up to a share of the largest output."""
    plain = output_tensor(call_with(network.eval(), inputs))
    for correlation in KINDS:
        result = moments_of(without_noise(network), inputs, correlation)
        assert not result.variance.any()
        torch.testing.assert_close(result.loc, plain, rtol=0, atol=share * plain.abs().max().item())


@torch.no_grad()
def assert_std_of_samples(network: nn.Module, inputs: Any, low: float, high: float, samples: int = SAMPLES) -> None:
    """Check that the ratio of the predicted std and the std of samples, the median over outputs, is in a range.

    Outputs without noise, such as pixels that a transposed convolution skips, do not count.
    """
    bnn = with_noise(network)
    outcomes = torch.stack([output_tensor(call_with(bnn, inputs)) for _ in range(samples)])
    std = outcomes.std(0)
    random = std > 0
    assert random.any()
    ratios = {kind: (moments_of(bnn, inputs, kind).stddev / std)[random].median().item() for kind in KINDS}
    assert low <= ratios["common"] <= high, f"ratios of stds: {ratios}"
    assert 0.4 <= ratios["none"] <= max(high, 1.15), f"ratios of stds: {ratios}"


def assert_predicts(network: nn.Module, inputs: Any, class_dim: int = 1) -> None:
    """Check that one pass predicts probabilities with some uncertainty."""
    bnn = with_noise(network, 0.1, likelihood=lb.Categorical(class_dim=class_dim))
    prediction = bnn.predict(inputs, rule="moments")
    total = prediction.probs.sum(class_dim)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert (prediction.probs >= 0).all()
    assert prediction.mutual_information.max() > 0


def assert_compiles(network: nn.Module, inputs: Any) -> None:
    """Check that the outputs are the same if compiled into one graph."""
    bnn = with_noise(network)

    def parts(inputs: Any) -> tuple[Tensor, Tensor]:
        result = output_tensor(call_with(bnn, inputs))
        return result.loc, result.variance

    torch.compiler.reset()
    with torch.no_grad(), bnn.using("moments"):
        loc, variance = torch.compile(parts, fullgraph=True, backend="aot_eager")(inputs)
        plain_loc, plain_variance = parts(inputs)
    torch.testing.assert_close(loc, plain_loc, rtol=1e-4, atol=1e-5)  # rounding errors of single precision
    torch.testing.assert_close(variance, plain_variance, rtol=1e-3, atol=1e-9)


def assert_precise_variances(network: nn.Module, inputs: Any) -> None:
    """Check that under autocast to bfloat16 the variances are in single precision and about the same."""
    bnn = with_noise(network)
    single = moments_of(bnn, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = moments_of(bnn, inputs)
    assert 0.8 < (half.stddev / single.stddev).median() < 1.25  # 8 bits, through some layers
    torch.testing.assert_close(half.loc.float(), single.loc, rtol=0, atol=0.05 * single.loc.abs().max().item())
