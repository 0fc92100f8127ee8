"""`lb.calibrate`: two factors of one-pass prediction, fitted to samples or labels and stored in the model."""

import itertools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.data import load
from leanbayes.evaluation.shift import add_noise, rotate
from leanbayes.likelihoods import Likelihood
from leanbayes.networks import build


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
def test_exact_moments_need_no_factors_even_with_few_samples(samples: int, likelihood: Likelihood) -> None:
    bnn = linear(likelihood)
    found = [
        lb.calibrate(bnn, [inputs(100, 6)], to="samples", samples=samples, generator=generator(seed))
        for seed in range(30)
    ]
    means, stds = torch.tensor(found, dtype=torch.float64).unbind(1)
    # All examples share a sample of the weights, so a factor has the noise of a few hundred weights.
    assert abs(means.mean() - 1) < 5 * means.std() / 30**0.5 + 1e-3
    assert abs(stds.log().mean()) < 5 * stds.log().std() / 30**0.5 + 1e-3


def test_the_noise_of_samples_does_not_decide_about_the_std() -> None:
    """A small σ hardly changes the mean probabilities, and 30 samples of them have more noise than that."""
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    with torch.no_grad():
        network.weight *= 0.3
    bnn = lb.bayesianize(network, lb.MeanField(init_std=1.0)).eval()
    x = inputs(100, 4)
    true = bnn.predict(x, rule="sample", samples=5000, generator=generator(9)).mutual_information.mean()
    for seed in range(10):
        lb.calibrate(bnn, [x], to="samples", generator=generator(seed))
        ratio = bnn.predict(x, rule="moments").mutual_information.mean() / true
        assert 0.7 < ratio < 1.5


def test_copies_of_examples_share_the_noise_of_samples() -> None:
    bnn, x = linear(lb.Categorical()), inputs(10, 6)
    once, often = (
        lb.calibrate(bnn, [of], to="samples", samples=8, generator=generator(3)) for of in (x, x.repeat(20, 1))
    )
    assert once == pytest.approx(often, rel=1e-3)
    assert once != pytest.approx((1, 1), rel=1e-2)


def underestimating(likelihood: Likelihood, outputs: int = 3) -> tuple[lb.BayesianModel, Tensor]:
    """A model whose rule ignores that all pixels share the noise of a convolution, and inputs."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs)
    with torch.no_grad():
        layers[-1].weight *= 8  # so that predictions differ
    bnn = lb.bayesianize(nn.Sequential(*layers), lb.VDP(correlation="none", init_std=0.4), likelihood=likelihood)
    return bnn.eval(), 4 * inputs(50, 1, 1, 1) + inputs(50, 1, 8, 8)


def test_regression_outputs_match_mean_and_std_of_samples() -> None:
    bnn, x = underestimating(lb.Gaussian())
    mean, std = lb.calibrate(bnn, [x[:25], (x[25:], torch.zeros(25))], to="samples", samples=200, generator=generator())
    assert std > 1.1
    assert 0.8 < mean < 1.2
    with bnn.using("sample"), torch.no_grad():
        samples = torch.stack([bnn(x) for _ in range(400)])
    ratio = bnn(x).stddev / samples.std(0)
    assert 0.85 < ratio.median() < 1.15


def mismatch(bnn: lb.BayesianModel, x: Tensor, wanted: Tensor) -> float:
    """The KL divergence of the probabilities of one pass from the wanted ones."""
    found = bnn.predict(x, rule="moments").probs.double()
    if isinstance(bnn.likelihood, lb.Bernoulli):
        wanted, found = torch.stack([wanted, 1 - wanted]), torch.stack([found, 1 - found])
    return float((wanted * (wanted / found).log()).sum() / len(x))


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Bernoulli()], ids=["classes", "yes or no"])
def test_no_other_factors_match_the_probabilities_of_samples_better(likelihood: Likelihood) -> None:
    bnn, x = underestimating(likelihood)
    wanted = bnn.predict(x, samples=3000, rule="sample", generator=generator(5)).probs.double()
    before = mismatch(bnn, x, wanted)
    fitted = lb.calibrate(bnn, [x[:25], (x[25:], torch.zeros(25))], to="samples", samples=1000, generator=generator())
    after = mismatch(bnn, x, wanted)
    assert after < 0.5 * before
    assert fitted[1] > 1.1
    around = [(fitted[0] * a, fitted[1] * b) for a in (0.8, 0.9, 1.0, 1.1, 1.25) for b in (0.8, 0.9, 1.0, 1.1, 1.25)]
    for bnn.moment_scale in around:
        assert mismatch(bnn, x, wanted) > 0.95 * after  # up to the noise of the samples


def test_pixels_count_as_examples() -> None:
    """A 1×1 convolution is a linear layer on pixels."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    flat = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    flat.load_state_dict(
        {name: value.flatten(1) if value.dim() > 1 else value for name, value in dense.state_dict().items()}
    )
    rule = lb.VDP(correlation="none", init_std=0.5)
    x = inputs(5, 4, 6, 6)
    factors = [
        lb.calibrate(
            lb.bayesianize(net, rule, likelihood=likelihood).eval(), [given], to="samples", generator=generator()
        )
        for net, likelihood, given in (
            (dense, lb.Categorical(class_dim=1), x),
            (flat, lb.Categorical(), x.movedim(1, -1).reshape(-1, 4)),
        )
    ]
    assert factors[0] == pytest.approx(factors[1], rel=1e-3)
    assert factors[0] != pytest.approx((1, 1), rel=1e-2)


def test_very_many_outcomes_are_subsampled() -> None:
    """Repeating each pixel a hundred times gives nearly the same factors."""
    torch.manual_seed(0)
    bnn = lb.bayesianize(
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1)),
        lb.VDP(correlation="none", init_std=0.5),
        likelihood=lb.Categorical(class_dim=1),
    ).eval()
    few = inputs(1, 4, 6, 6)
    many = few.repeat_interleave(10, -1).repeat_interleave(10, -2)  # 3600 pixels, of which 2730 are used
    first, second = (lb.calibrate(bnn, [x], to="samples", samples=5, generator=generator()) for x in (few, many))
    assert first == pytest.approx(second, rel=1e-2)


def test_factors_are_saved_loaded_and_fitted_again(tmp_path: Path) -> None:
    bnn, x = linear(), inputs(20, 6)
    plain = bnn.predict(x, rule="moments").probs
    bnn.moment_scale = 0.9, 2.0
    wider = bnn.predict(x, rule="moments").probs
    assert not torch.equal(plain, wider)
    lb.save(bnn, tmp_path / "model.safetensors")
    other = lb.load(tmp_path / "model.safetensors", CASES["mlp"].build()[:1])  # type: ignore[index]
    assert other.moment_scale == (0.9, 2.0)
    assert torch.equal(other.predict(x, rule="moments").probs, wider)
    first = lb.calibrate(other, [x], to="samples", generator=generator())
    assert lb.calibrate(other, [x], to="samples", generator=generator()) == first == other.moment_scale
    assert torch.equal(bnn.predict(x, rule="moments").probs, wider)


def test_modes_rules_and_random_states_do_not_change() -> None:
    bnn, state = linear().train(), torch.get_rng_state()
    lb.calibrate(bnn, [inputs(4, 6)], to="samples", samples=3)
    assert bnn.training
    assert bnn.rule == "sample"
    assert torch.equal(torch.get_rng_state(), state)
    with bnn.using("sample"):
        assert isinstance(bnn(inputs(4, 6)), Tensor)


@pytest.mark.parametrize("to", ["samples", "labels"])
def test_with_a_generator_the_noise_stream_of_the_model_does_not_advance(to: Literal["samples", "labels"]) -> None:
    bnn, batch = linear(), (inputs(4, 6), torch.zeros(4, dtype=torch.long))
    before = bnn.noise.state.clone()
    lb.calibrate(bnn, [batch, batch], to=to, samples=3, generator=generator())
    assert torch.equal(bnn.noise.state, before)


def test_mistakes() -> None:
    with pytest.raises(lb.LeanBayesError, match="samples=1 must be a whole number of at least 2"):
        lb.calibrate(linear(), [inputs(4, 6)], to="samples", samples=1)
    with pytest.raises(lb.LeanBayesError, match="got no batches"):
        lb.calibrate(linear(), [], to="samples")
    with pytest.raises(lb.LeanBayesError, match="no Bayesian weights"):
        lb.calibrate(lb.bayesianize(CASES["mlp"].build(), lb.Deterministic()), [inputs(4, 6)], to="samples")


def loss_of(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> float:
    """Negative log-likelihood of labels in one pass (without those below 0), and of the factors under their prior."""
    probs = bnn.predict(x, rule="moments").probs
    if isinstance(bnn.likelihood, lb.Bernoulli):
        nll = nn.functional.binary_cross_entropy(probs, y, reduction="sum")
    else:
        nll = nn.functional.nll_loss(probs.log(), y, ignore_index=-1, reduction="sum")
    logs = torch.tensor(bnn.moment_scale, dtype=torch.float64).log()
    return nll.item() - torch.distributions.Normal(0.0, 0.5).log_prob(logs).sum().item()


@pytest.mark.parametrize("likelihood", [lb.Categorical(ignore_index=-1), lb.Bernoulli()], ids=["classes", "yes or no"])
def test_no_other_factors_make_the_labels_more_likely(likelihood: Likelihood) -> None:
    bnn, _ = underestimating(likelihood)
    x = 4 * inputs(2000, 1, 1, 1) + inputs(2000, 1, 8, 8)
    if isinstance(likelihood, lb.Bernoulli):
        y = (torch.rand(2000, 3, generator=generator(2)) < 0.3 + 0.4 * (x.mean((1, 2, 3)) > 0)[:, None]).float()
    else:
        y = torch.randint(0, 3, (2000,), generator=generator(2))
        y[::7] = -1
    before = loss_of(bnn, x, y)
    fitted = lb.calibrate(bnn, zip(x.split(100), y.split(100), strict=True), to="labels")
    after = loss_of(bnn, x, y)
    assert fitted == bnn.moment_scale
    assert after < before - 20
    for bnn.moment_scale in [(fitted[0] * a, fitted[1] * b) for a in (0.8, 1, 1.25) for b in (0.8, 1, 1.25)]:
        assert loss_of(bnn, x, y) >= after - 1e-3


def test_labels_that_follow_exact_moments_need_no_factors() -> None:
    bnn = linear()
    x = 8 * inputs(20_000, 6)  # so that the std of the logits matters
    y = torch.multinomial(bnn.predict(x, rule="moments").probs, 1, generator=generator(3))[:, 0]
    mean, std = lb.calibrate(bnn, zip(x.split(500), y.split(500), strict=True), to="labels")
    assert mean == pytest.approx(1, abs=0.1)
    assert std == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("wrong", [0, 4, 5])
def test_labels_with_few_mistakes_do_not_make_predictions_more_certain(wrong: int) -> None:
    """The best factors are found here on a grid: of all of them, or of those with a mean ≤ 1 and a std ≥ 1."""
    bnn = linear()
    x = 8 * inputs(40, 6)
    probs = bnn.predict(x, rule="moments").probs
    y = probs.argmax(1)
    closest = (probs.topk(2).values.diff().abs()[:, 0]).topk(wrong, largest=False).indices
    y[closest] = probs[closest].topk(2).indices[:, 1]
    found = lb.calibrate(bnn, [(x, y)], to="labels")
    losses = {}
    for bnn.moment_scale in itertools.product(torch.linspace(-2, 2, 81).exp().tolist(), repeat=2):
        mean, std = bnn.moment_scale
        if wrong >= 5 or (mean <= 1 + 1e-9 and std >= 1 - 1e-9):
            losses[bnn.moment_scale] = loss_of(bnn, x, y)
    assert found == pytest.approx(min(losses, key=losses.__getitem__), rel=0.06)
    assert (found[0] > 1) == (wrong >= 5)


def test_labels_without_information_about_the_std_leave_it_at_1() -> None:
    bnn = linear()
    x = 1e-3 * inputs(50, 6)
    _, std = lb.calibrate(bnn, [(x, torch.zeros(50, dtype=torch.long))], to="labels")
    assert std == pytest.approx(1, abs=1e-2)


def test_mistakes_with_labels_leave_the_factors_unchanged() -> None:
    bnn, x, y = linear(), inputs(4, 6), torch.zeros(4, dtype=torch.long)
    bnn.moment_scale = 0.9, 2.0
    with pytest.raises(lb.LeanBayesError, match=r"needs \(input, label\) pairs"):
        lb.calibrate(bnn, [x], to="labels")
    with pytest.raises(lb.LeanBayesError, match="got no batches"):
        lb.calibrate(bnn, [], to="labels")
    with pytest.raises(lb.LeanBayesError, match="contain NaN"):
        lb.calibrate(bnn, [(x * float("nan"), y)], to="labels")
    with pytest.raises(lb.LeanBayesError, match="out of range"):
        lb.calibrate(bnn, [(x, y + 100)], to="labels")
    with pytest.raises(lb.LeanBayesError, match="'labels' or 'samples'"):
        lb.calibrate(bnn, [(x, y)], to="truth")  # type: ignore[arg-type]
    assert bnn.moment_scale == (0.9, 2.0)
    with pytest.raises(lb.LeanBayesError, match=r'Gaussian has no probabilities .* use to="samples"'):
        lb.calibrate(linear(lb.Gaussian()), [(x, inputs(4, 8))], to="labels")


def test_a_fit_to_few_labels_does_not_make_unknown_inputs_more_certain() -> None:
    data = load("digits")
    assert data.normalize is not None
    network = build("small-cnn", data.input_shape, data.outputs, seed=0)
    settings: Any = {
        "epochs": 8,
        "batch_size": 64,
        "lr": 2e-3,
        "temperature": 0.01,
        "evaluate_every": 0,
        "device": "cpu",
    }
    bnn = lb.fit(network, lb.MeanField(), data, progress=False, **settings)
    x, y = data.validation[:]
    x, generator = x.float() / 255, torch.Generator().manual_seed(0)
    unknown = {
        "noise": torch.rand(100, 1, 8, 8, generator=generator),
        "noisy": add_noise(x, -6, generator),
        "rotated": rotate(x, 90),
    }

    def confidence() -> dict[str, Tensor]:
        inputs = {name: data.normalize(of) for name, of in unknown.items()}  # type: ignore[misc]
        return {name: bnn.predict(of, rule="moments").confidence for name, of in inputs.items()}

    before = confidence()
    lb.calibrate(bnn, [(data.normalize(x), y)])
    for name, after in confidence().items():
        assert (after <= before[name] + 1e-6).all(), name
