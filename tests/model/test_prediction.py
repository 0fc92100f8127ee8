"""Predictions and their uncertainty, against loops written by hand."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import CASES
from torch import Tensor, distributions, nn
from torch.utils._python_dispatch import TorchDispatchMode

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.model.bayesian import BayesianModel

few = settings(max_examples=25, deadline=None)
RULES = ["sample", "flipout", "local", "mean"]


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str) -> tuple[BayesianModel, Tensor]:
    return lb.bayesianize(CASES[name].build(), lb.MeanField(init_std=0.3)), CASES[name].example()


class Table(nn.Module):
    """A stub network: its output is a parameter, whatever the input."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return self.values


def from_samples(outputs: Tensor, likelihood: Any) -> Any:
    """Return the prediction for given outputs of the samples, from an ensemble of tables."""
    bnn = lb.bayesianize(Table(outputs[0]), lb.Ensemble(members=len(outputs)), likelihood=likelihood)
    with torch.no_grad():
        for parameter, output in zip(bnn.network.parameters(), outputs, strict=True):
            parameter.copy_(output)
    return bnn.predict(torch.zeros(1, 1), keep_outputs=True)


# -- the average over samples, and its uncertainty --------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "autoencoder", "language_model"])
def test_probabilities_are_averaged_over_samples(name: str, rule: str) -> None:
    bnn, x = make(name)
    pred = bnn.predict(x, samples=5, rule=rule, generator=generator(), keep_outputs=True)
    source, outputs = generator(), []
    bnn.eval().rule = rule
    with torch.no_grad():
        for _ in range(5):
            with bnn.drawn(bnn.next_draw(source)) as call:
                outputs.append(call(x))
    torch.testing.assert_close(pred.outputs, torch.stack(outputs))
    torch.testing.assert_close(pred.probs, torch.stack(outputs).softmax(2).mean(0))
    assert pred.samples == 5
    assert (pred.label == pred.probs.argmax(1)).all()
    assert (pred.confidence == pred.probs.amax(1)).all()


@few
@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.floats(0.0, 30.0), st.integers(0, 2**32))
def test_entropy_is_expected_entropy_plus_information(
    samples: int, classes: int, dense: bool, scale: float, seed: int
) -> None:
    shape = (samples, 3, classes, 2, 4) if dense else (samples, 3, classes)
    outputs = scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    pred = from_samples(outputs, lb.Categorical())
    each = distributions.Categorical(logits=outputs.movedim(2, -1))
    total = distributions.Categorical(probs=each.probs.mean(0)).entropy()
    torch.testing.assert_close(pred.probs.movedim(1, -1), each.probs.mean(0))
    torch.testing.assert_close(pred.entropy, total, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(pred.expected_entropy, each.entropy().mean(0), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(pred.entropy, pred.expected_entropy + pred.mutual_information, atol=1e-9, rtol=0)
    assert (pred.mutual_information >= 0).all()


def test_certain_samples_have_finite_entropy() -> None:
    pred = from_samples(torch.tensor([[[200.0, -200.0]], [[-200.0, 200.0]]]), lb.Categorical())
    assert pred.expected_entropy.item() == 0
    assert pred.mutual_information.item() == pytest.approx(torch.tensor(2.0).log().item())


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Bernoulli()])
def test_information_is_never_negative_in_single_precision(likelihood: Any) -> None:
    pred = from_samples(torch.randn(500, 3).expand(7, -1, -1), likelihood)
    assert (pred.entropy < pred.expected_entropy).any()  # by rounding: all samples are equal
    assert (pred.mutual_information >= 0).all()


@few
@given(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2**32))
def test_bernoulli(samples: int, shape: list[int], seed: int) -> None:
    outputs = 4 * torch.randn(samples, *shape, generator=generator(seed), dtype=torch.float64)
    pred = from_samples(outputs, lb.Bernoulli())
    each = distributions.Bernoulli(logits=outputs)
    mean = distributions.Bernoulli(probs=each.probs.mean(0))
    torch.testing.assert_close(pred.probs, mean.probs)
    torch.testing.assert_close(pred.entropy, mean.entropy(), atol=1e-6, rtol=0)  # torch clamps its probabilities
    torch.testing.assert_close(pred.expected_entropy, each.entropy().mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(pred.mutual_information, pred.entropy - pred.expected_entropy, atol=1e-9, rtol=0)
    assert (pred.mutual_information >= 0).all()
    assert (pred.label == (pred.probs >= 0.5)).all()


@few
@given(st.integers(1, 7), st.booleans(), st.integers(0, 2**32))
def test_variance_obeys_the_law_of_total_variance(samples: int, heteroscedastic: bool, seed: int) -> None:
    outputs = torch.randn(samples, 4, 6, generator=generator(seed), dtype=torch.float64)
    if heteroscedastic:
        pred = from_samples(outputs, lb.HeteroscedasticGaussian(1e-4))
        mean, noise = outputs[..., :3], nn.functional.softplus(outputs[..., 3:]) + 1e-4
    else:
        pred = from_samples(outputs, lb.Gaussian(0.5))
        mean, noise = outputs, torch.full_like(outputs, 0.25)
    torch.testing.assert_close(pred.mean, mean.mean(0))
    torch.testing.assert_close(pred.aleatoric_variance.double(), noise.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(pred.epistemic_variance, mean.var(0, correction=0))
    mixture = distributions.MixtureSameFamily(  # the predictive distribution
        distributions.Categorical(torch.ones(samples, dtype=torch.float64)),
        distributions.Normal(mean.movedim(0, -1), noise.movedim(0, -1).sqrt()),
    )
    torch.testing.assert_close(pred.variance, mixture.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(pred.std, mixture.variance.sqrt(), rtol=1e-6, atol=0)


def test_variance_survives_a_large_mean_in_single_precision() -> None:
    outputs = 1e6 + 4 * torch.randn(50, 20)
    pred = from_samples(outputs, lb.Gaussian(1.0))
    expected = outputs.double().var(0, correction=0).float()
    torch.testing.assert_close(pred.epistemic_variance, expected, rtol=0.02, atol=0)
    naive = outputs.square().mean(0) - outputs.mean(0).square()
    assert ((naive - expected).abs() > 0.5 * expected).any()  # else this test would prove nothing


def test_kept_outputs_are_not_changed_afterwards() -> None:
    outputs = torch.rand(4, 3, 2)
    for likelihood in (lb.Categorical(), lb.Bernoulli(), lb.Gaussian(), lb.HeteroscedasticGaussian()):
        assert from_samples(outputs, likelihood).outputs.equal(outputs)


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Bernoulli(), lb.Gaussian(0.3)])
def test_deterministic_network_has_no_epistemic_uncertainty(likelihood: Any) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.Deterministic(), likelihood=likelihood)
    pred = bnn.predict(CASES["mlp"].example())
    epistemic = pred.epistemic_variance if isinstance(pred, lb.RegressionPrediction) else pred.mutual_information
    assert epistemic.abs().max() < 1e-6


# -- how it is done ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rule", "samples"),
    [
        (lb.MeanField(), None, 30),
        (lb.MeanField(samples=7), "local", 7),
        (lb.MeanField(), "mean", 1),
        (lb.MeanField(rule="mean"), None, 1),
        (lb.Deterministic(), None, 1),
        (lb.MCDropout(0.2), None, 30),
        (lb.MCDropout(0.2), "mean", 1),
        (lb.Ensemble(members=3), None, 3),
    ],
)
def test_default_number_of_samples(method: Any, rule: str | None, samples: int) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    assert bnn.predict(CASES["mlp"].example(), rule=rule).samples == samples


@pytest.mark.parametrize("name", ["mlp", "cnn", "autoencoder", "lstm"])
@pytest.mark.parametrize("rule", ["sample", "mean"])
def test_a_tiny_budget_changes_nothing(name: str, rule: str) -> None:
    bnn, x = make(name)
    x = torch.cat([x, 2 * x, -x])
    whole = bnn.predict(x, samples=3, rule=rule, generator=generator())
    cut = bnn.predict(x, samples=3, rule=rule, generator=generator(), memory_budget=1)
    torch.testing.assert_close(cut.probs, whole.probs)
    torch.testing.assert_close(cut.expected_entropy, whole.expected_entropy)


@pytest.mark.parametrize("method", [lb.MeanField(rule="flipout"), lb.MeanField(rule="local"), lb.MCDropout(0.5)])
def test_chunks_have_their_own_noise(method: Any) -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), method), CASES["mlp"].example()
    pred = bnn.predict(x[:1].repeat(6, 1), samples=2, memory_budget=1, keep_outputs=True)
    assert pred.outputs is not None
    assert len(pred.outputs.flatten(0, 1).unique(dim=0)) == 12


@pytest.mark.parametrize("rule", RULES)
def test_the_budget_bounds_the_memory(rule: str) -> None:
    network = nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 2))
    bnn, x = lb.bayesianize(network, lb.MeanField()), torch.randn(512, 8)

    def peak(budget: int | None) -> int:
        with PeakMemory() as memory:
            bnn.predict(x, samples=2, rule=rule, memory_budget=budget)
        return memory.peak_bytes

    budget, weights, outputs = 1 << 18, 4 * bnn.layout.numel, 4 * 2 * 512
    assert peak(None) > 10 * budget
    assert peak(budget) <= budget + 4 * weights + 5 * outputs  # the budget is for activations


def test_the_memory_of_an_example_is_measured_once_per_kind_of_input() -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.MeanField()), CASES["mlp"].example()
    calls = []
    bnn.network.register_forward_hook(lambda *args: calls.append(1))

    def passes(*args: Any, **kwargs: Any) -> int:
        calls.clear()
        bnn.predict(*args, **kwargs)
        return len(calls)

    budget = {"memory_budget": 1 << 20}
    assert [passes(x, 3, **budget), passes(x, 3, **budget), passes(x[:2], 2, **budget)] == [4, 3, 2]
    assert [passes(x, 3, rule="local", **budget), passes(x, 3, rule="local", **budget)] == [4, 3]
    bnn.double()
    assert [passes(x.double(), 3, **budget), passes(x.double(), 3, **budget)] == [4, 3]
    assert [passes(x.double(), 3)] == [3]  # small inputs need no measurement
    large = x.double().repeat(10_000, 1)
    assert [passes(large, 3), passes(large, 3)] == [4, 3]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, a: Tensor, b: Tensor, scale: Any = 1.0) -> Tensor:
        return scale * (self.one(a) + self.two(b))


@pytest.mark.parametrize("budget", [None, 1])
def test_tuples_and_dicts_are_inputs(budget: int | None) -> None:
    bnn = lb.bayesianize(TwoInputs(), lb.MeanField(init_std=0.3))
    a, b, y = torch.randn(5, 3), torch.randn(5, 2), torch.arange(5) % 4
    outputs = []
    for x in ((a, b), [a, b], {"b": b, "a": a}, {"a": a, "b": b, "scale": 1.0}):
        pred = bnn.predict(x, samples=2, generator=generator(), memory_budget=budget, keep_outputs=True)
        outputs.append(pred.outputs)
        assert lb.elbo_loss(bnn, x, y, num_data=5).isfinite()
    assert outputs[0] is not None
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    with torch.no_grad(), bnn.drawn(bnn.next_draw(generator())) as call:
        torch.testing.assert_close(outputs[0][0], call(a, b))


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("shared", [torch.tensor(7.0), torch.full((7, 1), 7.0)], ids=["number", "rows"])
def test_tensors_without_a_batch_dimension_are_not_cut(shared: Tensor, budget: int | None) -> None:
    class Scaled(TwoInputs):
        def forward(self, a: Tensor, b: Tensor, scale: Any = 1.0) -> Tensor:
            return super().forward(a, b) * scale.sum()

    bnn = lb.bayesianize(Scaled(), lb.MeanField())
    a, b = torch.randn(5, 3), torch.randn(5, 2)
    pred = bnn.predict((a, b, shared), rule="mean", memory_budget=budget, keep_outputs=True)
    assert pred.outputs is not None
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(pred.outputs[0], bnn(a, b, shared))


POSTERIORS: dict[str, Any] = {
    "mean-field": lb.MeanField(init_std=0.3),
    "row": lb.VDP(variance="row", rule="sample"),
    "partial": lb.PBN(rate=0.2),
    "subspace": lb.SSVI(density=0.2),
    **{
        f"shared, {sampling}": lb.WeightSharing(8, border=2.0, sampling=sampling, rule="sample")
        for sampling in ("independent", "hierarchical", "tied")
    },
}


def outputs_of_samples(bnn: BayesianModel, x: Tensor, samples: int) -> Tensor:
    """Return the outputs for weights that the posterior samples one after the other."""
    source, outputs = generator(), []
    with torch.no_grad():
        for _ in range(samples):
            with bnn.holding(bnn.posterior.sample(bnn.next_draw(source).key)) as network:
                outputs.append(network(x))
    return torch.stack(outputs)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", POSTERIORS)
def test_sharing_the_std_between_samples_changes_no_bit(name: str, autocast: bool) -> None:
    x = CASES["mlp"].example()
    data = [(x, torch.arange(len(x)) % 3)] if name.startswith(("partial", "shared")) else None
    before = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=0.3))
    bnn = lb.bayesianize(before, POSTERIORS[name], data=data).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pred = bnn.predict(x, samples=3, rule="sample", generator=generator(), keep_outputs=True)
        assert pred.outputs is not None
        assert pred.outputs.equal(outputs_of_samples(bnn, x, 3))


@pytest.mark.parametrize("name", ["mean-field", "row"])
def test_the_shared_std_is_computed_once_and_dropped_afterwards(name: str) -> None:
    class Softplus(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Softplus.calls += func is torch.ops.aten.softplus.default
            return func(*args, **(kwargs or {}))

    x = CASES["mlp"].example()
    bnn = lb.bayesianize(CASES["mlp"].build(), POSTERIORS[name]).eval()
    with Softplus():
        bnn.predict(x, samples=5, rule="sample")
    assert Softplus.calls == 1
    mu, rho = (bnn.posterior.get_parameter(name) for name in ("mu", "rho"))
    with torch.no_grad():
        mu.fill_(torch.nan)
        with pytest.raises(lb.LeanBayesError):
            bnn.predict(x, samples=5, rule="sample")
        mu.fill_(0.1)
        rho.add_(1)
        with bnn.drawn(generator=generator()) as call:
            assert call(x).equal(outputs_of_samples(bnn, x, 1)[0])
    pred = bnn.predict(x, samples=2, rule="sample", generator=generator(), keep_outputs=True)
    assert pred.outputs is not None
    assert pred.outputs.equal(outputs_of_samples(bnn, x, 2))


@pytest.mark.parametrize("fails", [False, True])
def test_predict_restores_every_mode(fails: bool) -> None:
    bnn, x = make("cnn")
    bnn.train()
    list(bnn.network.children())[1].eval()
    modes = [module.training for module in bnn.modules()]
    buffers = {name: buffer.clone() for name, buffer in bnn.network.named_buffers()}
    if fails:
        with pytest.raises(RuntimeError):
            bnn.predict(x[:, :2])
    else:
        bnn.predict(x, samples=2)
    assert [module.training for module in bnn.modules()] == modes
    assert all(buffer.equal(buffers[name]) for name, buffer in bnn.network.named_buffers())


@pytest.mark.parametrize("rule", RULES)
def test_predict_needs_no_gradient_and_no_kl(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("predict computed a KL")

    bnn, x = make("mlp")
    monkeypatch.setattr(bnn.posterior, "kl", refuse)
    monkeypatch.setattr(bnn.posterior, "sample_and_kl", refuse)
    pred = bnn.predict(x, samples=2, rule=rule, keep_outputs=True)
    assert not pred.probs.requires_grad
    assert not pred.outputs.requires_grad
    with torch.inference_mode():
        assert bnn.predict(x, samples=2, rule=rule).probs.shape == (4, 3)


def test_an_empty_name_is_no_rule() -> None:
    bnn = lb.bayesianize(nn.Linear(3, 2), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="There is no rule ''"):
        bnn.predict(torch.zeros(1, 3), rule="")


@pytest.mark.parametrize("used", RULES)
@pytest.mark.parametrize("trained", [*RULES, None])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_warns_of_a_rule_with_different_noise(name: str, trained: str | None, used: str) -> None:
    bnn, x = make(name)
    if trained is not None:
        with bnn.using(trained):
            lb.elbo_loss(bnn, x, torch.zeros(4, dtype=torch.long), num_data=4)
    local = (trained == "local") + (used == "local")
    if name == "cnn" and local == 1 and trained is not None and "mean" not in (trained, used):
        with pytest.warns(lb.RuleMismatchWarning, match="train") as caught:
            bnn.predict(x, samples=2, rule=used)
        assert caught[0].filename == __file__  # it points to the user's line
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bnn.predict(x, samples=2, rule=used)


def test_bilinear_layers_are_not_convolutions() -> None:
    class Quadratic(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x)

    bnn, x = lb.bayesianize(Quadratic(6, 6, 3), lb.MeanField(rule="local")), torch.randn(4, 6)
    lb.elbo_loss(bnn, x, torch.zeros(4, dtype=torch.long), num_data=4)
    bnn.predict(x, samples=2, rule="sample")


# -- networks whose batches cannot be cut -----------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """An LSTM over (time, batch, features), which returns (batch, classes)."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(features, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][-1])


class Masked(nn.Module):
    """Attention with one (time, time) mask for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, attn_mask=mask)[0].mean(1))


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all inputs as large, and allow few activations."""
    monkeypatch.setattr("leanbayes.model.prediction._UNMEASURED", 0)
    monkeypatch.setattr("leanbayes.model.prediction._CPU_BUDGET", 1)


def whole(bnn: lb.BayesianModel, *x: Tensor) -> Tensor:
    with torch.no_grad(), bnn.using("mean"):
        return bnn.eval()(*x).softmax(-1)


def test_time_is_not_cut_as_if_it_were_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    bnn, x = lb.bayesianize(TimeFirst(), lb.MeanField()), torch.randn(12, 5, 4)
    torch.testing.assert_close(bnn.predict(x, rule="mean").probs, whole(bnn, x))
    with pytest.raises(lb.LeanBayesError, match="batch_first=False: pass smaller batches"):
        bnn.predict(x, memory_budget=1000)


@pytest.mark.parametrize("rule", ["mean", "moments"])
@pytest.mark.parametrize("length", [3, 5])
def test_a_mask_as_long_as_the_batch_is_not_cut(length: int, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = lb.bayesianize(Masked(), lb.MeanField(init_std=0.3)), torch.randn(5, length, 8)
    mask = torch.full((length, length), -torch.inf).triu(1)
    expected = bnn.predict((x, mask), rule=rule)
    large(monkeypatch)
    torch.testing.assert_close(bnn.predict((x, mask), rule=rule).probs, expected.probs)
    if rule == "mean":
        torch.testing.assert_close(expected.probs, whole(bnn, x, mask))
    if length == 3:  # which is no length of the batch
        torch.testing.assert_close(bnn.predict((x, mask), rule=rule, memory_budget=1).probs, expected.probs)
    else:
        with pytest.raises(lb.LeanBayesError, match=r"cannot compute a part of the batch .*: pass smaller batches"):
            bnn.predict((x, mask), rule=rule, memory_budget=1)


class OverTime(nn.Module):
    """A mean over the first dimension, which no layer tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).mean(0))


class Centered(OverTime):
    """Features minus their mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.first(x))
        return self.last(features - features.mean(0))


@pytest.mark.parametrize("rule", ["sample", "local", "mean"])
@pytest.mark.parametrize(("network", "shape"), [(OverTime(), (6, 5, 4)), (Centered(), (6, 4))])
def test_examples_that_depend_on_each_other_are_not_separated(
    network: nn.Module, shape: tuple[int, ...], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, x = lb.bayesianize(network, lb.MeanField()), torch.randn(shape)
    expected = bnn.predict(x, 3, rule=rule, generator=generator()).probs
    large(monkeypatch)
    torch.testing.assert_close(bnn.predict(x, 3, rule=rule, generator=generator()).probs, expected)
    with pytest.raises(lb.LeanBayesError, match="depend on the other examples of its batch: pass smaller batches"):
        bnn.predict(x, 3, rule=rule, memory_budget=1)


def test_statistics_of_a_batch_are_those_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    bnn, x = lb.bayesianize(network, lb.MeanField()), torch.randn(6, 4)
    torch.testing.assert_close(bnn.predict(x, rule="mean").probs, whole(bnn, x))
    with pytest.raises(lb.LeanBayesError, match="without running statistics"):
        bnn.predict(x, memory_budget=1000)


def test_a_network_for_one_batch_size_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.view(6, 4))

    large(monkeypatch)
    bnn, x = lb.bayesianize(Fixed(), lb.MeanField()), torch.randn(6, 4)
    torch.testing.assert_close(bnn.predict(x, rule="mean").probs, whole(bnn, x))


def test_a_compiled_network_stays_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    shapes = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            shapes.append(max(arg.shape[0] for arg in args if isinstance(arg, Tensor) and arg.dim() == 2))
            return graph(*args)

        return run

    bnn = lb.bayesianize(TwoInputs(), lb.MeanField())  # torch does not compile the forward of its own containers
    bnn.network.compile(backend=backend)
    x = torch.randn(6, 3), torch.randn(6, 2)
    bnn.predict(x, samples=3)
    assert shapes == [6, 6, 6]
    shapes.clear()
    bnn.predict(x, samples=1, memory_budget=100)  # measuring runs it eagerly
    assert sum(shapes) >= 6
    shapes.clear()
    bnn.predict(x, samples=2)
    assert shapes == [6, 6]


def test_out_of_memory_halves_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which says so."""
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.MeanField()), torch.randn(10, 6)
    expected = bnn.predict(x, samples=2, generator=generator()).probs
    sizes = []

    def limited(module: nn.Module, args: Any) -> None:
        sizes.append(len(args[0]))
        if len(args[0]) > 3:
            raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    bnn.network.register_forward_pre_hook(limited)
    torch.testing.assert_close(bnn.predict(x, samples=2, generator=generator()).probs, expected)
    assert sizes == [10, *(2, 1, 1), 5, 3, 3, 3, 1, 3, 3, 3, 1]  # two examples tell whether the batch can be cut
