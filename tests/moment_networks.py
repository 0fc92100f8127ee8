"""What every network does by the rule `moments`: the assertions of the tests on small, real and foreign networks."""

from typing import Any, cast

import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.network import call_with, output_tensor
from leanbayes.rules.moments.context import Correlation
from leanbayes.rules.moments.rule import MomentPropagation

DRAWS = 300  # the median of ratios of stds then varies by about 0.04
KINDS: list[Correlation] = ["common", "none"]


def with_spread(network: nn.Module, init_std: float = 0.02, **settings: Any) -> lb.BayesianModel:
    """The network in evaluation mode, with little noise in its weights."""
    return lb.bayesianize(network, lb.MeanField(init_std=init_std), **settings).eval()


def without_spread(network: nn.Module) -> lb.BayesianModel:
    """The network with weights whose variance is exactly 0."""
    bnn = with_spread(network)
    torch.nn.init.constant_(cast(Tensor, bnn.posterior.rho), -200.0)
    return bnn


@torch.no_grad()
def moments_of(bnn: lb.BayesianModel, inputs: Any, correlation: Correlation = "common") -> lb.Moments:
    """Mean and variance of the logits, from one pass; they must be numbers."""
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
def assert_plain_without_spread(network: nn.Module, inputs: Any, share: float = 0.0) -> None:
    """Without variance the means are the plain network's, bit for bit or up to a share of the largest output."""
    plain = output_tensor(call_with(network.eval(), inputs))
    for correlation in KINDS:
        result = moments_of(without_spread(network), inputs, correlation)
        assert not result.variance.any()
        torch.testing.assert_close(result.loc, plain, rtol=0, atol=share * plain.abs().max().item())


@torch.no_grad()
def assert_as_draws(network: nn.Module, inputs: Any, low: float, high: float, draws: int = DRAWS) -> None:
    """The median over outputs of predicted std / std of weight draws is in a range; without correlations, below it.

    Outputs that no weight reaches, such as pixels that a transposed convolution leaves out, do not count.
    """
    bnn = with_spread(network)
    outcomes = torch.stack([output_tensor(call_with(bnn, inputs)) for _ in range(draws)])
    std = outcomes.std(0)
    reached = std > 0
    assert reached.any()
    ratios = {kind: (moments_of(bnn, inputs, kind).std / std)[reached].median().item() for kind in KINDS}
    assert low <= ratios["common"] <= high, f"ratios of stds: {ratios}"
    assert 0.4 <= ratios["none"] <= max(high, 1.15), f"ratios of stds: {ratios}"


def assert_predicts(network: nn.Module, inputs: Any, class_dim: int = 1) -> None:
    """One pass gives probabilities, and some doubt."""
    bnn = with_spread(network, 0.1, likelihood=lb.Categorical(class_dim=class_dim))
    prediction = bnn.predict(inputs, rule="moments")
    total = prediction.probs.sum(class_dim)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert (prediction.probs >= 0).all()
    assert prediction.mutual_information.max() > 0


def assert_compiles(network: nn.Module, inputs: Any) -> None:
    """Compiled in one graph, it gives the same."""
    bnn = with_spread(network)

    def parts(inputs: Any) -> tuple[Tensor, Tensor]:
        result = output_tensor(call_with(bnn, inputs))
        return result.loc, result.variance

    torch.compiler.reset()
    with torch.no_grad(), bnn.using("moments"):
        loc, variance = torch.compile(parts, fullgraph=True, backend="aot_eager")(inputs)
        plain_loc, plain_variance = parts(inputs)
    torch.testing.assert_close(loc, plain_loc, rtol=1e-4, atol=1e-5)  # single precision, in another order
    torch.testing.assert_close(variance, plain_variance, rtol=1e-3, atol=1e-9)


def assert_keeps_fine_variances(network: nn.Module, inputs: Any) -> None:
    """Under autocast to bfloat16 the means are coarse, and the variances in single precision and about the same."""
    bnn = with_spread(network)
    fine = moments_of(bnn, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = moments_of(bnn, inputs)
    assert 0.8 < (coarse.std / fine.std).median() < 1.25  # 8 bits, through some layers
    torch.testing.assert_close(coarse.loc.float(), fine.loc, rtol=0, atol=0.05 * fine.loc.abs().max().item())
