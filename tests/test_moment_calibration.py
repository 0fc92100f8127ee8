"""`calibrate_moments`: two factors against draws, kept with the model."""

import itertools
from pathlib import Path
from typing import Literal

import pytest
import torch
from networks import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.likelihoods import Likelihood


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(1))


def linear(likelihood: Likelihood | None = None) -> lb.BayesianModel:
    """A network whose moments are exact."""
    net: nn.Sequential = CASES["mlp"].build()[:1]  # type: ignore[index]
    return lb.bayesianize(net, lb.MeanField(init_std=0.5), likelihood=likelihood).eval()


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Gaussian()], ids=["logits", "numbers"])
@pytest.mark.parametrize("samples", [2, 30])
def test_exact_moments_need_no_factors_however_few_the_draws(samples: int, likelihood: Likelihood) -> None:
    bnn = linear(likelihood)
    found = [bnn.calibrate_moments([inputs(100, 6)], samples, generator(seed)) for seed in range(30)]
    means, stds = torch.tensor(found, dtype=torch.float64).unbind(1)
    # One draw serves all examples, so a factor has the noise of a few hundred weights.
    assert abs(means.mean() - 1) < 5 * means.std() / 30**0.5 + 1e-3
    assert abs(stds.log().mean()) < 5 * stds.log().std() / 30**0.5 + 1e-3


def forgetful(likelihood: Likelihood, outputs: int = 3) -> tuple[lb.BayesianModel, Tensor]:
    """A convolution's noise is shared by all pixels, which this rule forgets; and inputs."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs)
    with torch.no_grad():
        layers[-1].weight *= 8  # so that answers differ
    bnn = lb.bayesianize(nn.Sequential(*layers), lb.VDP(correlation="none", init_std=0.4), likelihood=likelihood)
    return bnn.eval(), 4 * inputs(50, 1, 1, 1) + inputs(50, 1, 8, 8)


def test_of_numbers_mean_and_std_are_those_of_draws() -> None:
    bnn, x = forgetful(lb.Gaussian())
    mean, std = bnn.calibrate_moments([x[:25], (x[25:], torch.zeros(25))], samples=200, generator=generator())
    assert std > 1.1
    assert 0.8 < mean < 1.2
    with bnn.using("sample"), torch.no_grad():
        draws = torch.stack([bnn(x) for _ in range(400)])
    ratio = bnn(x).std / draws.std(0)
    assert 0.85 < ratio.median() < 1.15


def mismatch(bnn: lb.BayesianModel, x: Tensor, wanted: Tensor) -> float:
    """Divergence of one pass from probabilities; of yes or no they are those of yes."""
    found = bnn.predict(x, rule="moments").probs.double()
    if isinstance(bnn.likelihood, lb.Bernoulli):
        wanted, found = torch.stack([wanted, 1 - wanted]), torch.stack([found, 1 - found])
    return float((wanted * (wanted / found).log()).sum() / len(x))


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Bernoulli()], ids=["classes", "yes or no"])
def test_of_logits_no_factors_have_nearer_probabilities(likelihood: Likelihood) -> None:
    bnn, x = forgetful(likelihood)
    wanted = bnn.predict(x, samples=3000, rule="sample", generator=generator(5)).probs.double()
    before = mismatch(bnn, x, wanted)
    fitted = bnn.calibrate_moments([x[:25], (x[25:], torch.zeros(25))], samples=1000, generator=generator())
    after = mismatch(bnn, x, wanted)
    assert after < 0.5 * before
    assert fitted[1] > 1.1
    around = [(fitted[0] * a, fitted[1] * b) for a in (0.8, 0.9, 1.0, 1.1, 1.25) for b in (0.8, 0.9, 1.0, 1.1, 1.25)]
    for bnn.moment_scale in around:
        assert mismatch(bnn, x, wanted) > 0.95 * after  # as near as the noise of the draws lets it


def test_pixels_count_as_examples_do() -> None:
    """A convolution with windows of one pixel does what a linear layer does to its pixels."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    flat = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    flat.load_state_dict(
        {name: value.flatten(1) if value.dim() > 1 else value for name, value in dense.state_dict().items()}
    )
    rule = lb.VDP(correlation="none", init_std=0.5)
    x = inputs(5, 4, 6, 6)
    factors = [
        lb.bayesianize(net, rule, likelihood=likelihood).eval().calibrate_moments([given], generator=generator())
        for net, likelihood, given in (
            (dense, lb.Categorical(class_dim=1), x),
            (flat, lb.Categorical(), x.movedim(1, -1).reshape(-1, 4)),
        )
    ]
    assert factors[0] == pytest.approx(factors[1], rel=1e-3)
    assert factors[0] != pytest.approx((1, 1), rel=1e-2)


def test_very_many_outcomes_are_thinned_out() -> None:
    """Pixels, each of them a hundred times, give nearly the same factors as each of them once."""
    torch.manual_seed(0)
    bnn = lb.bayesianize(
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1)),
        lb.VDP(correlation="none", init_std=0.5),
        likelihood=lb.Categorical(class_dim=1),
    ).eval()
    few = inputs(1, 4, 6, 6)
    many = few.repeat_interleave(10, -1).repeat_interleave(10, -2)  # 3600 pixels, of which 2730 are looked at
    first, second = (bnn.calibrate_moments([x], 5, generator()) for x in (few, many))
    assert first == pytest.approx(second, rel=1e-2)


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


@pytest.mark.parametrize("to", ["draws", "labels"])
def test_with_a_generator_the_stream_of_the_model_is_left_as_it_was(to: Literal["draws", "labels"]) -> None:
    bnn, batch = linear(), (inputs(4, 6), torch.zeros(4, dtype=torch.long))
    before = bnn.noise.state.clone()
    bnn.calibrate_moments([batch, batch], 3, generator(), to=to)
    assert torch.equal(bnn.noise.state, before)


def test_mistakes_are_told() -> None:
    with pytest.raises(lb.LeanBayesError, match="samples=1 must be at least 2"):
        linear().calibrate_moments([inputs(4, 6)], samples=1)
    with pytest.raises(lb.LeanBayesError, match="got no batches"):
        linear().calibrate_moments([])
    with pytest.raises(lb.LeanBayesError, match="no Bayesian weights"):
        lb.bayesianize(CASES["mlp"].build(), lb.Deterministic()).calibrate_moments([inputs(4, 6)])


def loss_of(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> float:
    """Negative log-likelihood of labels in one pass, of which those below 0 do not count, and of the factors."""
    probs = bnn.predict(x, rule="moments").probs
    if isinstance(bnn.likelihood, lb.Bernoulli):
        nll = nn.functional.binary_cross_entropy(probs, y, reduction="sum")
    else:
        nll = nn.functional.nll_loss(probs.log(), y, ignore_index=-1, reduction="sum")
    logs = torch.tensor(bnn.moment_scale, dtype=torch.float64).log()
    return nll.item() - torch.distributions.Normal(0.0, 0.5).log_prob(logs).sum().item()


@pytest.mark.parametrize("likelihood", [lb.Categorical(ignore_index=-1), lb.Bernoulli()], ids=["classes", "yes or no"])
def test_by_labels_no_factors_make_them_likelier(likelihood: Likelihood) -> None:
    bnn, _ = forgetful(likelihood)
    x = 4 * inputs(2000, 1, 1, 1) + inputs(2000, 1, 8, 8)
    if isinstance(likelihood, lb.Bernoulli):
        y = (torch.rand(2000, 3, generator=generator(2)) < 0.3 + 0.4 * (x.mean((1, 2, 3)) > 0)[:, None]).float()
    else:
        y = torch.randint(0, 3, (2000,), generator=generator(2))
        y[::7] = -1
    before = loss_of(bnn, x, y)
    fitted = bnn.calibrate_moments(zip(x.split(100), y.split(100), strict=True), to="labels")
    after = loss_of(bnn, x, y)
    assert fitted == bnn.moment_scale
    assert after < before - 20
    for bnn.moment_scale in [(fitted[0] * a, fitted[1] * b) for a in (0.8, 1, 1.25) for b in (0.8, 1, 1.25)]:
        assert loss_of(bnn, x, y) >= after - 1e-3


def test_labels_that_follow_exact_moments_need_no_factors() -> None:
    bnn = linear()
    x = 8 * inputs(20_000, 6)  # so that the spread of the logits matters
    y = torch.multinomial(bnn.predict(x, rule="moments").probs, 1, generator=generator(3))[:, 0]
    mean, std = bnn.calibrate_moments(zip(x.split(500), y.split(500), strict=True), to="labels")
    assert mean == pytest.approx(1, abs=0.1)
    assert std == pytest.approx(1, abs=0.25)


def test_labels_that_are_all_right_do_not_make_it_surer_than_they_tell() -> None:
    """The likeliest mean has no bound then: the answer is that of a prior, found here on a grid."""
    bnn = linear()
    x = 8 * inputs(40, 6)
    y = bnn.predict(x, rule="moments").probs.argmax(1)
    found = bnn.calibrate_moments([(x, y)], to="labels")
    losses = {}
    for bnn.moment_scale in itertools.product(torch.linspace(-2, 2, 81).exp().tolist(), repeat=2):
        losses[bnn.moment_scale] = loss_of(bnn, x, y)
    assert found == pytest.approx(min(losses, key=losses.__getitem__), rel=0.05)
    assert 1.5 < found[0] < 7


def test_labels_that_tell_nothing_of_the_std_leave_it() -> None:
    bnn = linear()
    x = 1e-3 * inputs(50, 6)
    _, std = bnn.calibrate_moments([(x, torch.zeros(50, dtype=torch.long))], to="labels")
    assert std == pytest.approx(1, abs=1e-2)


def test_mistakes_with_labels_are_told_and_leave_the_factors() -> None:
    bnn, x, y = linear(), inputs(4, 6), torch.zeros(4, dtype=torch.long)
    bnn.moment_scale = 0.9, 2.0
    with pytest.raises(lb.LeanBayesError, match=r"needs \(input, label\) pairs"):
        bnn.calibrate_moments([x], to="labels")
    with pytest.raises(lb.LeanBayesError, match="got no batches"):
        bnn.calibrate_moments([], to="labels")
    with pytest.raises(lb.LeanBayesError, match="contain NaN"):
        bnn.calibrate_moments([(x * float("nan"), y)], to="labels")
    with pytest.raises(lb.LeanBayesError, match="out of range"):
        bnn.calibrate_moments([(x, y + 100)], to="labels")
    with pytest.raises(lb.LeanBayesError, match="'draws' or 'labels'"):
        bnn.calibrate_moments([(x, y)], to="truth")  # type: ignore[arg-type]
    assert bnn.moment_scale == (0.9, 2.0)
    with pytest.raises(lb.LeanBayesError, match=r'Gaussian has no probabilities .* use to="draws"'):
        linear(lb.Gaussian()).calibrate_moments([(x, inputs(4, 8))], to="labels")
