"""`calibrate_moments`: two factors against draws, kept with the model."""

from pathlib import Path

import pytest
import torch
from networks import CASES
from torch import Tensor, nn

import leanbayes as lb


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(1))


def linear() -> lb.BayesianModel:
    """A network whose moments are exact."""
    return lb.bayesianize(CASES["mlp"].build()[:1], lb.MeanField(init_std=0.5)).eval()  # type: ignore[index]


@pytest.mark.parametrize("samples", [2, 3, 30])
def test_exact_moments_need_no_factors_however_few_the_draws(samples: int) -> None:
    bnn = linear()
    found = [bnn.calibrate_moments([inputs(200, 6)], samples, generator(seed)) for seed in range(30)]
    means, stds = torch.tensor(found, dtype=torch.float64).unbind(1)
    # One draw serves all examples, so a factor has the noise of a few hundred weights.
    assert abs(means.mean() - 1) < 5 * means.std() / 30**0.5 + 1e-3
    assert abs(stds.log().mean()) < 5 * stds.log().std() / 30**0.5 + 1e-3


def test_it_brings_the_paper_s_rule_in_line_with_draws() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    bnn = lb.bayesianize(net, lb.VDP(correlation="none", init_std=0.2)).eval()
    x = 1 + inputs(50, 1, 8, 8)
    before = bnn.predict(x).entropy
    mean, std = bnn.calibrate_moments([x[:25], (x[25:], torch.zeros(25))], samples=200, generator=generator())
    assert std > 1.1  # the convolution's noise is shared by all pixels, which this rule forgets
    assert 0.8 < mean < 1.2
    with bnn.using("sample"), torch.no_grad():
        draws = torch.stack([bnn(x) for _ in range(400)])
    ratio = bnn(x).std / draws.std(0)
    assert 0.85 < ratio.median() < 1.15
    assert not torch.equal(bnn.predict(x).entropy, before)


def test_the_factors_are_saved_loaded_copied_and_fitted_anew(tmp_path: Path) -> None:
    bnn, x = linear(), inputs(20, 6)
    plain = bnn.predict(x, rule="moments").probs
    bnn.moment_scale = 0.9, 2.0
    wider = bnn.predict(x, rule="moments").probs
    assert not torch.equal(plain, wider)
    bnn.save(tmp_path / "model.safetensors")
    other = lb.load(tmp_path / "model.safetensors", CASES["mlp"].build()[:1])  # type: ignore[index]
    assert other.moment_scale == (0.9, 2.0)
    assert torch.equal(other.predict(x, rule="moments").probs, wider)
    first = other.calibrate_moments([x], generator=generator())
    assert other.calibrate_moments([x], generator=generator()) == first == other.moment_scale
    assert torch.equal(bnn.predict(x, rule="moments").probs, wider)


def test_it_leaves_modes_rules_and_random_states_as_they_were() -> None:
    bnn, state = linear().train(), torch.get_rng_state()
    bnn.calibrate_moments([inputs(4, 6)], 3)
    assert bnn.training
    assert bnn.rule == "sample"
    assert torch.equal(torch.get_rng_state(), state)
    with bnn.using("sample"):
        assert isinstance(bnn(inputs(4, 6)), Tensor)


def test_mistakes_are_told() -> None:
    with pytest.raises(lb.LeanBayesError, match="samples=1 must be at least 2"):
        linear().calibrate_moments([inputs(4, 6)], samples=1)
    with pytest.raises(lb.LeanBayesError, match="got no batches"):
        linear().calibrate_moments([])
    with pytest.raises(lb.LeanBayesError, match="no Bayesian weights"):
        lb.bayesianize(CASES["mlp"].build(), lb.Deterministic()).calibrate_moments([inputs(4, 6)])
