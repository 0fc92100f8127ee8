"""Saliency maps agree with weights, autograd and closed forms; captum's metrics agree with plain loops."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from captum import metrics
from network_cases import CASES, seeded
from torch import Tensor, nn
from torch.func import functional_call
from training_cases import expect

import leanbayes as lb
from leanbayes.core.config import change
from leanbayes.evaluation.explanation import KINDS, Score, explanation_scores, infidelity, saliency, sensitivity_max
from leanbayes.evaluation.pruning import prune
from leanbayes.methods import METHODS as ALL_METHODS
from leanbayes.methods.sparse_training.base import SparseMethod

METHODS = {**ALL_METHODS, "pbn": lb.PBN(0.2, sensitivity="random")}  # its default sensitivity needs data
for without_noise in ("laplace", "std-search", "swag", "csgmcmc", "aeb", "mbnn"):  # before they are fitted or trained
    METHODS.pop(without_noise)

MEASURES: dict[str, Callable[..., Tensor]] = {"infidelity": infidelity, "sensitivity_max": sensitivity_max}
EXPLAIN: list[Callable[..., Any]] = [saliency, *MEASURES.values()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(method: lb.Method, outputs: int = 3, likelihood: Any = None) -> lb.BayesianModel:
    """Dropout that only MCDropout uses, and a linear layer: linear in its inputs for each sample of most methods."""
    network = seeded(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, outputs)).double())()
    return lb.bayesianize(network, method, likelihood=likelihood)


def numpy_random_state() -> np.ndarray:
    state: Any = np.random.get_state()
    return state[1].copy()


def tanh_network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double())()


LINEAR_METHODS = [
    lb.Deterministic(),
    lb.Ensemble(3),
    lb.MCDropout(),
    lb.MeanField(init_std=0.5),
    lb.MeanField(init_std=0.5, rule="flipout"),
    lb.MeanField(init_std=0.5, rule="mean"),
]


def inputs(rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=generator(1), dtype=torch.float64)


def plain_samples(bnn: lb.BayesianModel, network: nn.Module, samples: int, seed: int) -> Iterator[Score]:
    """The deterministic network with each sample of the weights, without the library's own predict."""
    source = generator(seed)
    for number in range(samples):
        flat = bnn.posterior.sample(bnn.next_draw(source, number).key).detach()
        weights = {slot.name: value for slot, value in zip(bnn.layout, bnn.layout.split(flat), strict=True)}
        yield partial(functional_call, network, weights)


def plain_gradient(call: Score, x: Tensor, target: list[int]) -> Tensor:
    """One row of a Jacobian at a time."""
    rows = [torch.func.jacrev(lambda row: call(row[None])[0])(row)[t] for row, t in zip(x, target, strict=True)]
    return torch.stack(rows).detach()


# -- maps -------------------------------------------------------------------------------------------------------------


def test_the_map_of_a_linear_network_is_its_weight() -> None:
    bnn = linear(lb.MeanField(init_std=0.3, relative=False))
    target = torch.tensor([2, 0])
    samples = 1000
    found = saliency(bnn, inputs(2), target, samples=samples)
    weights = [bnn.layout.split(bnn.posterior.sample(bnn.next_draw(source, n).key))[0].detach()[target]
               for source in [generator()] for n in range(samples)]  # fmt: skip
    draws = torch.stack(weights)
    torch.testing.assert_close(found.mean, draws.mean(0))
    torch.testing.assert_close(found.std, draws.std(0, correction=0))
    # Five standard errors of a mean and of a std.
    mu = bnn.layout.split(bnn.posterior.mean())[0].detach()[target]
    assert (found.mean - mu).abs().max() < 5 * 0.3 / samples**0.5
    assert (found.std - 0.3).abs().max() < 5 * 0.3 / (2 * samples) ** 0.5
    assert torch.equal(found.target, target)


def test_maps_are_the_gradients_of_each_sample() -> None:
    network = tanh_network()
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.5))
    x, target = inputs(), [0, 2, 1, 1]
    for seed in (0, 9):
        draws = [plain_gradient(call, x, target) for call in plain_samples(bnn, network, 5, seed)]
        found = saliency(bnn, x, torch.tensor(target), samples=5, seed=seed)
        torch.testing.assert_close(found.mean, torch.stack(draws).mean(0))
        torch.testing.assert_close(found.std, torch.stack(draws).std(0, correction=0))
        sizes = saliency(bnn, x, torch.tensor(target), samples=5, seed=seed, kind="magnitude")
        torch.testing.assert_close(sizes.mean, torch.stack(draws).abs().mean(0))


def test_maps_of_rules_with_noise_per_example_are_gradients() -> None:
    x = inputs()
    for method in (lb.MeanField(init_std=0.5, rule="local"), lb.MeanField(init_std=0.5, rule="flipout")):
        bnn = lb.bayesianize(tanh_network(), method)
        found = saliency(bnn, x, 1, samples=1).mean
        with bnn.drawn(bnn.next_draw(generator())) as call, torch.no_grad():
            for feature in range(6):  # central differences with the same noise
                step = 1e-5 * torch.eye(6, dtype=torch.float64)[feature]
                slope = (call(x + step) - call(x - step))[:, 1] / 2e-5
                torch.testing.assert_close(found[:, feature], slope, rtol=1e-6, atol=1e-8)


def test_members_and_dropout_masks_are_samples() -> None:
    ensemble = linear(lb.Ensemble(3))
    weights = torch.stack([p for p in ensemble.network.parameters() if p.dim() > 1])[:, 1].detach()
    found = saliency(ensemble, inputs(2), 1)
    torch.testing.assert_close(found.mean, weights.mean(0).expand(2, 6))
    torch.testing.assert_close(found.std, weights.std(0, correction=0).expand(2, 6))
    dropout = linear(lb.MCDropout())
    weight: Any = dropout.to_deterministic().get_parameter("1.weight").detach()[1]
    one = saliency(dropout, inputs(200), 1, samples=1).mean
    kept = one != 0
    assert 0.4 < kept.double().mean() < 0.6
    torch.testing.assert_close(one, torch.where(kept, 2 * weight, 0.0))  # dropout of a half doubles the other inputs
    torch.testing.assert_close(saliency(dropout, inputs(200), 1, rule="mean").mean, weight.expand(200, 6))


def test_integrated_gradients_add_up_to_the_change_of_the_output() -> None:
    network = tanh_network()
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.5))
    x = inputs()
    changes = [(call(x) - call(torch.zeros_like(x)))[:, 2] for call in plain_samples(bnn, network, 3, 0)]
    found = saliency(bnn, x, 2, samples=3, kind="integrated")
    # captum rounds the sizes of its steps to single precision.
    torch.testing.assert_close(found.mean.sum(1), torch.stack(changes).mean(0).detach(), rtol=1e-6, atol=1e-6)
    weight: Any = network.get_parameter("0.weight").detach()[0]
    first = lb.bayesianize(network.get_submodule("0"), lb.Deterministic())
    torch.testing.assert_close(saliency(first, x, 0, kind="integrated").mean, weight * x, rtol=1e-6, atol=1e-6)


def test_a_custom_attribution_can_be_passed() -> None:
    def occlusion(score: Score, x: Tensor) -> Tensor:
        return torch.stack([score(x) - score(x * (torch.arange(6) != i)) for i in range(6)], 1)

    for method in LINEAR_METHODS:  # without a bias, occlusion is the gradient times the input
        bnn, x = linear(method), inputs()
        found = saliency(bnn, x, 2, samples=2 if bnn.current_rule.random else 1, kind=occlusion)
        same = saliency(bnn, x, 2, samples=2 if bnn.current_rule.random else 1)
        torch.testing.assert_close(found.mean, same.mean * x)
    bnn = linear(lb.Deterministic())
    expect(lambda: saliency(bnn, inputs(), kind=lambda score, x: score(x[:2])), "all 4 examples", "2")
    expect(lambda: saliency(bnn, inputs(), kind=lambda score, x: x[:, 0]), "(4,)", "(4, 6)")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_explained_by_every_method(method: str, kind: str) -> None:
    network: Any = CASES["cnn"].build()
    made = METHODS[method]
    if isinstance(made, SparseMethod):
        made = change(made, {"density": 0.5})  # at the default density no signal passes so small a network
    bnn = lb.bayesianize(network.to(memory_format=torch.channels_last), made)
    x = CASES["cnn"].example().to(memory_format=torch.channels_last)
    random = bnn.current_rule.random
    samples = 2 if random else 1
    found = saliency(bnn, x, kind=kind, samples=samples)
    assert found.mean.shape == found.std.shape == x.shape
    assert found.mean.abs().sum((1, 2, 3)).min() > 0
    assert found.std.any() == random
    assert torch.equal(found.target, bnn.predict(x, samples, generator=generator()).label)
    settings: dict[str, Any] = {"kind": kind, "samples": samples, "perturbations": 2}
    for values in (infidelity(bnn, x, std=1.0, **settings), sensitivity_max(bnn, x, radius=1.0, **settings)):
        assert values.shape == (4,)
        assert values.isfinite().all()
        assert values.min() > 0


# -- targets ----------------------------------------------------------------------------------------------------------


def test_the_default_target_is_the_class_of_the_mean_probability() -> None:
    bnn = linear(lb.Ensemble(3), outputs=2)
    members: Any = bnn.network.networks
    for member, bias in zip(members, ([8.0, 0.0], [0.0, 3.0], [0.0, 3.0]), strict=True):
        member[1].bias.data.copy_(torch.tensor(bias))  # the mean of the logits would give 0
    x = torch.full((2, 6), 1e-3, dtype=torch.float64)
    assert saliency(bnn, x).target.tolist() == [1, 1]
    assert torch.equal(saliency(bnn, x).mean, saliency(bnn, x, 1).mean)
    assert not torch.allclose(saliency(bnn, x).mean, saliency(bnn, x, 0).mean)


@pytest.mark.parametrize("likelihood", [lb.Gaussian(), lb.Bernoulli()])
def test_one_of_several_outputs_must_be_chosen(likelihood: Any) -> None:
    bnn = linear(lb.Deterministic(), 3, likelihood)
    weight = bnn.network.get_parameter("1.weight").detach()
    torch.testing.assert_close(saliency(bnn, inputs(2), 2).mean, weight[2].expand(2, 6))
    torch.testing.assert_close(saliency(bnn, inputs(2), torch.tensor([1, 0])).mean, weight[[1, 0]])
    expect(lambda: saliency(bnn, inputs(2)), "3 outputs", "target=")
    single = linear(lb.Deterministic(), 1, likelihood)
    torch.testing.assert_close(saliency(single, inputs(1)).mean, single.network.get_parameter("1.weight").detach())


def test_the_mean_is_explained_if_outputs_are_mean_and_variance() -> None:
    bnn = linear(lb.Deterministic(), 4, lb.HeteroscedasticGaussian())
    torch.testing.assert_close(saliency(bnn, inputs(1), 1).mean[0], bnn.network.get_parameter("1.weight")[1].detach())
    expect(lambda: saliency(bnn, inputs(1), 2), "0 to 1")
    squeezed = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)).double()
    flat = lb.bayesianize(squeezed, lb.Deterministic(), likelihood=lb.Gaussian())
    torch.testing.assert_close(saliency(flat, inputs(2)).mean, squeezed.get_parameter("0.weight").detach().expand(2, 6))


@pytest.mark.parametrize(
    ("target", "words"),
    [(3, "0 to 2"), (-1, "0 to 2"), (torch.zeros(3, dtype=torch.long), "tensor of 4"), (torch.zeros(4), "integer")],
)
def test_invalid_targets_raise_errors(target: Any, words: str) -> None:
    for explain in EXPLAIN:
        expect(partial(explain, linear(lb.MeanField()), inputs(), target), words)


# -- infidelity and sensitivity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_gradients_of_a_linear_network_are_exact_and_constant(method: lb.Method) -> None:
    # This holds only if every sample, with the signs and masks of every example, is the same in each call of captum.
    bnn = linear(method)
    assert infidelity(bnn, inputs(), std=1.0, samples=None).max() < 1e-25
    assert sensitivity_max(bnn, inputs(), radius=1.0).max() == 0


@pytest.mark.parametrize("std", [0.2, None])
def test_the_infidelity_of_a_wrong_map_is_known(std: float | None) -> None:
    bnn, x = linear(lb.Deterministic()), inputs(100)
    wrong = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0, 0.0]).double()
    error = wrong - bnn.network.get_parameter("1.weight")[1].detach()
    size = 0.1 * x.std(correction=0).item() if std is None else std
    found = infidelity(bnn, x, 1, kind=lambda score, x: wrong.expand_as(x), std=std, perturbations=100)
    # E(I·error)² = std²‖error‖²; the standard error of a mean of n squared normals is √(2/n) of it.
    assert found.mean().item() == pytest.approx(size**2 * error.square().sum().item(), rel=5 * (2 / 10_000) ** 0.5)


def test_normalized_infidelity_depends_only_on_the_shape_of_a_map() -> None:
    bnn, x = linear(lb.Deterministic()), inputs()
    weight = bnn.network.get_parameter("1.weight")[1].detach()
    settings: dict[str, Any] = {"kind": lambda score, x: 7 * weight.expand_as(x), "perturbations": 3}
    assert infidelity(bnn, x, 1, **settings).min() > 1e-3
    assert infidelity(bnn, x, 1, **settings, normalize=True).max() < 1e-15


def test_the_metrics_are_those_of_a_plain_loop() -> None:
    network = tanh_network()
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.5))
    x, target, samples, count = inputs(), [0, 2, 1, 1], 3, 4
    unfaithful, change = torch.zeros(4).double(), torch.zeros(4).double()
    normals, uniforms = generator(6), generator(6)
    for call in plain_samples(bnn, network, samples, 6):
        own = plain_gradient(call, x, target)
        outputs = call(x).detach()
        largest = [0.0] * 4
        for _ in range(count):
            noise = 0.3 * torch.randn(4, 6, generator=normals, dtype=torch.float64)
            moved = call(x - noise).detach()
            for i, t in enumerate(target):
                difference = (own[i] @ noise[i] - (outputs[i, t] - moved[i, t])) ** 2
                unfaithful[i] += difference / (samples * count)
            near = x + 0.2 * (2 * torch.rand(4, 6, generator=uniforms, dtype=torch.float64) - 1)
            other = plain_gradient(call, near, target)
            for i in range(4):
                distance = ((other[i] - own[i]).square().sum().sqrt() / own[i].square().sum().sqrt()).item()
                largest[i] = max(largest[i], distance)
        change += torch.tensor(largest).double() / samples
    settings: dict[str, Any] = {"samples": samples, "perturbations": count, "seed": 6}
    torch.testing.assert_close(infidelity(bnn, x, torch.tensor(target), std=0.3, **settings), unfaithful)
    torch.testing.assert_close(sensitivity_max(bnn, x, torch.tensor(target), radius=0.2, **settings), change)
    assert unfaithful.min() > 1e-6
    assert change.min() > 1e-2


def test_the_default_radius_is_a_fraction_of_the_std_of_the_inputs() -> None:
    bnn, x = lb.bayesianize(tanh_network(), lb.Deterministic()), inputs()
    given = sensitivity_max(bnn, x, radius=0.02 * x.std(correction=0).item())
    torch.testing.assert_close(sensitivity_max(bnn, x), given)


def test_maps_that_are_multiplied_by_the_input_are_perturbed_as_in_captum() -> None:
    bnn, x = lb.bayesianize(tanh_network(), lb.Deterministic()), inputs()
    x[:, 2] = 0
    network = bnn.to_deterministic()
    source = generator()

    @metrics.infidelity_perturb_func_decorator(multiply_by_inputs=True)
    def perturb(x: Tensor) -> Tensor:
        return x - 0.3 * torch.randn(x.shape, generator=source, dtype=x.dtype)

    attributions = saliency(bnn, x, 1, kind="integrated").mean
    expected = metrics.infidelity(network, perturb, x, attributions, target=1, max_examples_per_batch=4)
    torch.testing.assert_close(infidelity(bnn, x, 1, kind="integrated", std=0.3), expected)


# -- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_means_over_all_examples() -> None:
    bnn = lb.bayesianize(tanh_network(), lb.MeanField(init_std=0.5))
    batches = [(inputs(3), torch.zeros(3)), inputs(1)]
    settings: dict[str, Any] = {"samples": 3, "perturbations": 2, "std": 0.3, "radius": 0.2}
    found = explanation_scores(bnn, iter(batches), **settings)
    assert list(found) == ["infidelity", "sensitivity_max", "saliency_std"]
    sums = dict.fromkeys(found, 0.0)
    for number, x in enumerate([inputs(3), inputs(1)]):
        seed: dict[str, Any] = {"samples": 3, "seed": number << 20}
        sums["infidelity"] += infidelity(bnn, x, **seed, perturbations=2, std=0.3).sum().item()
        sums["sensitivity_max"] += sensitivity_max(bnn, x, **seed, perturbations=2, radius=0.2).sum().item()
        maps = saliency(bnn, x, **seed)
        for mean, std in zip(maps.mean, maps.std, strict=True):
            sums["saliency_std"] += (std.norm() / mean.norm()).item()
    assert found == pytest.approx({name: value / 4 for name, value in sums.items()})
    assert explanation_scores(bnn, batches, **settings) == found
    assert explanation_scores(bnn, batches, **settings, seed=1) != found
    expect(lambda: explanation_scores(bnn, []), "nothing to explain")


def test_scores_of_a_network_without_noise_and_of_one_without_weights() -> None:
    plain = explanation_scores(lb.bayesianize(tanh_network(), lb.Deterministic()), [inputs()])
    assert plain["saliency_std"] == 0
    assert min(plain["infidelity"], plain["sensitivity_max"]) > 0
    dead = prune(lb.bayesianize(tanh_network(), lb.MeanField()), 1.0)
    assert explanation_scores(dead, [inputs()], samples=2) == {"infidelity": 0, "sensitivity_max": 0, "saliency_std": 0}
    regression = lb.bayesianize(tanh_network(), lb.MeanField(), likelihood=lb.Gaussian())
    assert explanation_scores(regression, [inputs()], target=2, samples=2)["saliency_std"] > 0


# -- nothing else changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_the_inputs_and_the_random_states_are_not_changed(method: str, fails: bool) -> None:
    def fail(score: Score, x: Tensor) -> Tensor:
        raise RuntimeError("no map")

    bnn, x = lb.bayesianize(CASES["cnn"].build(), METHODS[method]), CASES["cnn"].example()
    x.requires_grad_(fails)
    bnn.train()
    next(iter(bnn.network.modules())).eval()
    modes = [module.training for module in bnn.modules()]
    trained = [parameter.requires_grad for parameter in bnn.parameters()]
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    given, torch_state, numpy_state = x.clone(), torch.get_rng_state(), numpy_random_state()
    settings: dict[str, Any] = {"samples": 1, "perturbations": 1, "kind": fail if fails else "gradient"}
    if fails:
        with pytest.raises(RuntimeError, match="no map"):
            explanation_scores(bnn, [x], **settings)
    else:
        explanation_scores(bnn, [x], **settings)
        saliency(bnn, x, samples=1, kind="integrated")
    assert [module.training for module in bnn.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
    assert all(parameter.grad is None for parameter in bnn.parameters())
    assert [parameter.requires_grad for parameter in bnn.parameters()] == trained
    assert bnn._values is None
    assert torch.equal(x, given)
    assert x.grad is None
    assert x.requires_grad == fails
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(numpy_random_state(), numpy_state)


def test_results_have_no_graph() -> None:
    bnn, x = lb.bayesianize(tanh_network(), lb.MeanField()), inputs().requires_grad_()
    maps = saliency(bnn, x, samples=2)
    results = [maps.mean, maps.std, *(measure(bnn, x, samples=2) for measure in MEASURES.values())]
    assert not any(result.requires_grad for result in results)


def test_results_follow_from_the_seed() -> None:
    bnn, x = lb.bayesianize(tanh_network(), lb.MeanField(init_std=0.5)), inputs()
    for explain in (lambda *args, **given: saliency(*args, **given).mean, *MEASURES.values()):
        first = explain(bnn, x, 1, samples=2)
        assert torch.equal(explain(bnn, x, 1, samples=2, seed=0), first)
        assert not torch.allclose(explain(bnn, x, 1, samples=2, seed=1), first)
        torch.manual_seed(123)
        bnn(x)  # advances the model's own random stream
        assert torch.equal(explain(bnn, x, 1, samples=2), first)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_maps_are_computed_if_gradients_are_disabled(mode: Any) -> None:
    bnn, x = lb.bayesianize(tanh_network(), lb.MeanField(init_std=0.5)), inputs()
    expected = [saliency(bnn, x, samples=2).mean, infidelity(bnn, x, samples=2), sensitivity_max(bnn, x, samples=2)]
    with mode():
        x = 1.0 * x
        found = [saliency(bnn, x, samples=2).mean, infidelity(bnn, x, samples=2), sensitivity_max(bnn, x, samples=2)]
        assert not torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- errors -----------------------------------------------------------------------------------------------------------


def test_inputs_and_outputs_without_maps_raise_errors() -> None:
    dense = lb.bayesianize(CASES["autoencoder"].build(), lb.MeanField())
    expect(lambda: saliency(dense, CASES["autoencoder"].example()), "(4, 2, 8, 8)", "mean over all pixels")
    text = lb.bayesianize(CASES["language_model"].build(), lb.MeanField())
    for explain in EXPLAIN:
        expect(partial(explain, text, CASES["language_model"].example()), "torch.int64")
        expect(partial(explain, text, {"x": inputs()}), "dict", "wrap")


def test_invalid_settings_raise_errors() -> None:
    bnn, x = linear(lb.MeanField()), inputs()
    expect(lambda: saliency(bnn, x, kind="gradients"), "did you mean gradient?")
    expect(lambda: saliency(bnn, x, kind="shap"), "gradient, magnitude, integrated")
    expect(lambda: saliency(bnn, x, samples=0), "samples=0")
    expect(lambda: saliency(bnn, x[:0]), "at least one")
    expect(lambda: saliency(bnn, x * torch.nan), "NaN")
    expect(lambda: infidelity(bnn, x, std=0.0), "std=0.0", "positive")
    expect(lambda: sensitivity_max(bnn, x, radius=-1.0), "radius=-1.0", "positive")
    expect(lambda: infidelity(bnn, torch.ones(2, 6).double()), "pass std=")
    for measure in MEASURES.values():
        expect(partial(measure, bnn, x, perturbations=0), "at least 1")


def test_the_error_without_captum_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ImportError(name)

    bnn, x = linear(lb.MeanField()), inputs()
    monkeypatch.setattr(importlib, "import_module", import_module)
    assert saliency(bnn, x, samples=1).mean.any()  # a gradient needs no captum
    for call in (
        lambda: infidelity(bnn, x),
        lambda: sensitivity_max(bnn, x),
        lambda: saliency(bnn, x, kind="integrated"),
    ):
        expect(call, "pip install '.[explain]'")
