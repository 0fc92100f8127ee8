"""The rule `adjoint` against the full Jacobian, against samples, and its memory."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES, hf_cases
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.core.network import call_with, output_tensor
from leanbayes.rules import Adjoint, adjoint_weight, example_gradients, linear_in_weight
from leanbayes.rules.margins import margin_variances


def jacobian(bnn: lb.BayesianModel, x: Any, scalars: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the derivative of scalars of the output with respect to all weights, by torch.func."""

    def of_weights(flat: Tensor) -> Tensor:
        with bnn.holding(flat) as network:
            return scalars(output_tensor(call_with(network, x)))

    return torch.func.jacrev(of_weights, chunk_size=1)(bnn.posterior.mean().detach())


def brute_force(bnn: lb.BayesianModel, x: Any, scalars: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the diagonal of J diag(σ²) Jᵀ."""
    return (jacobian(bnn, x, scalars).square() * bnn.posterior.variance().detach()).sum(-1)


def margin(output: Tensor) -> Tensor:
    largest, second = output.topk(2, 1).values.unbind(1)
    return largest - second


def double(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: double(value) for name, value in x.items()}
    return x.double() if x.is_floating_point() else x


def make(network: nn.Module, method: Any = None, **settings: Any) -> lb.BayesianModel:
    method = lb.MeanField(init_std=0.1) if method is None else method
    return lb.bayesianize(network.double().eval(), method, **settings)


def check(bnn: lb.BayesianModel, x: Any, class_dim: int = 1, rule: Adjoint | None = None) -> None:
    """Compare both kinds of variances with the full Jacobian."""
    rule = Adjoint(max_passes=1000) if rule is None else rule
    with torch.no_grad(), bnn.using(rule):
        output = output_tensor(call_with(bnn, x))
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(output.loc, output_tensor(call_with(bnn, x)))
    assert output.variance.mean() > 0
    expected = brute_force(bnn, x, lambda out: margin(out.movedim(class_dim, 1)))
    torch.testing.assert_close(2 * output.variance.select(class_dim, 0), expected)
    with bnn.using(Adjoint("each", max_passes=1000)):
        output = output_tensor(call_with(bnn, x))
    torch.testing.assert_close(output.variance, brute_force(bnn, x, lambda out: out))


@pytest.mark.parametrize("name", [name for name in CASES if name != "lstm"])
def test_variances_are_those_of_the_full_jacobian(name: str) -> None:
    """MLP, CNN with BatchNorm and groups, ViTs, transposed convolutions, tied embeddings, 1d and 3d convolutions."""
    check(make(CASES[name].build()), double(CASES[name].example()))


@pytest.mark.parametrize("name", ["hf_bert", "hf_gpt2", "hf_vit"])
def test_networks_of_transformers(name: str) -> None:
    case = hf_cases()[name]
    likelihood = lb.Categorical(class_dim=2) if name == "hf_gpt2" else None
    bnn = make(case.build(), likelihood=likelihood)
    check(bnn, double(case.example()), 2 if name == "hf_gpt2" else 1)


@pytest.mark.parametrize("method", [lb.SSVI(0.3, init_std=0.1), lb.PBN(0.2, sensitivity="random", init_std=0.5)])
@pytest.mark.parametrize("name", ["cnn", "language_model"])
def test_sparse_and_partial_posteriors(method: Any, name: str) -> None:
    check(make(CASES[name].build(), method), double(CASES[name].example()))


def test_slots_without_noise_are_plain_tensors() -> None:
    network = CASES["mlp"].build()
    bnn = make(network, lb.PBN(1.0, sensitivity="random"))
    values, _ = Adjoint().weights(bnn.posterior, bnn.next_draw().key, with_kl=False)
    assert all(isinstance(value, adjoint_weight.AdjointWeight) for value in values)
    none = make(network, lb.PBN(0.0, sensitivity="random"))
    values, _ = Adjoint().weights(none.posterior, none.next_draw().key, with_kl=False)
    assert all(isinstance(value, Tensor) for value in values)
    with none.using("adjoint"):
        assert none(double(CASES["mlp"].example())).variance.max() == 0


class Rows(nn.Module):
    """Uses one weight several times, whole, in parts, transposed and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        x = torch.tanh(self.layer(x))
        x = x + torch.tanh(F.linear(x, weight.t() * 0.5))
        first, second = weight.chunk(2)
        x = torch.cat([F.linear(x, first), x @ second.T], -1)
        return self.head(self.layer(x).relu_())


class Unusual(nn.Module):
    """Layers whose batch is merged with tokens, the second dimension, or missing in one input."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv2d(1, 4, 3, padding="same")
        self.steps = nn.Linear(4, 4)
        self.positions = nn.Embedding(7, 4)
        self.gate = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, frames = x.shape[:2]
        h = self.frames(x.flatten(0, 1).unsqueeze(1)).relu_().mean((-2, -1)).unflatten(0, (batch, frames))
        h = self.steps(h.transpose(0, 1)).transpose(0, 1).tanh() + self.positions(torch.arange(frames).unsqueeze(0))
        return self.gate(h.mean(1), h[:, 0])


class Circular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), dilation=(1, 2), padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.conv(x).tanh()).flatten(1))


def test_weights_that_are_used_several_times() -> None:
    check(make(Rows()), torch.randn(5, 6, dtype=torch.float64))


@pytest.mark.parametrize("batch", [1, 5])
def test_merged_moved_and_missing_batch_dimensions(batch: int) -> None:
    check(make(Unusual()), torch.randn(batch, 3, 6, 6, dtype=torch.float64))


def test_convolutions_with_unusual_settings() -> None:
    network = Circular()
    network(torch.randn(1, 2, 7, 6))
    check(make(network), torch.randn(3, 2, 7, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "settings",
    [{"padding": 1}, {"stride": 2, "padding": (2, 0)}, {"dilation": 2}, {"groups": 2, "padding": 1}, {"bias": False}],
    ids=str,
)
def test_grouped_convolutions_give_the_gradients_of_examples(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision on a CPU, layers with many pixels compute all examples in one convolution."""
    calls: list[int] = []

    def counted(*args: Any) -> Tensor:
        calls.append(args[-1])
        return conv2d_weight(*args)

    monkeypatch.setattr(example_gradients, "conv2d_weight", counted)
    layers = [nn.Conv2d(4, 6, 3, **settings), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)]
    exact, x = make(nn.Sequential(*layers)), torch.randn(3, 4, 20, 20)
    bnn = lb.bayesianize(copy.deepcopy(exact.to_deterministic()).float(), lb.MeanField(init_std=0.1)).eval()
    with torch.no_grad(), bnn.using("adjoint"):
        found = bnn(x)
    assert calls == [3 * settings.get("groups", 1)]
    # Both have the same weights, and stds that are relative to them.
    expected = brute_force(exact, x.double(), margin)
    torch.testing.assert_close(2 * found.variance[:, 0].double(), expected, rtol=1e-4, atol=0)


def test_transformers_with_sequences_first_inside() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(1, 8, 2, stride=2)
            self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.patch(x).flatten(2).permute(2, 0, 1)).mean(0))

    bnn = make(Tokens())
    check(bnn, torch.randn(3, 1, 4, 4, dtype=torch.float64))
    with pytest.raises(lb.UnsupportedOperation, match="no clear batch dimension in a batch of 4"), bnn.using("adjoint"):
        bnn(torch.randn(4, 1, 4, 4, dtype=torch.float64))  # as many tokens as examples


def test_sequences_first_as_input_are_refused() -> None:
    bnn = make(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12), nn.Linear(8, 2)))
    with pytest.raises(lb.UnsupportedOperation, match="batch_first=False"):
        bnn.predict(torch.randn(3, 4, 8, dtype=torch.float64), rule="adjoint")


def test_registered_functions_work() -> None:
    def twice(x: Tensor, weight: Tensor) -> Tensor:
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(twice, (x, weight), x, weight)
        return 2 * F.linear(x, weight)

    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return twice(input, self.weight)

    linear_in_weight(twice, "x weight", inputs="x", bias=None)
    check(make(nn.Sequential(Twice(4, 5), nn.Tanh(), Twice(5, 3))), torch.randn(6, 4, dtype=torch.float64))


def test_regression_outputs_have_their_variances() -> None:
    bnn = make(CASES["mlp"].build(), likelihood=lb.Gaussian(0.3))
    x = torch.randn(7, 6, dtype=torch.float64)
    prediction = bnn.predict(x, rule="adjoint")
    torch.testing.assert_close(prediction.epistemic_variance, brute_force(bnn, x, lambda out: out))
    torch.testing.assert_close(prediction.aleatoric_variance, torch.full_like(prediction.mean, 0.09))


@pytest.mark.parametrize("method", [lb.MeanField(init_std=1e-4), lb.SSVI(0.4, init_std=1e-5)])
def test_variances_are_those_of_many_samples_with_little_noise(method: Any) -> None:
    bnn, x = make(CASES["cnn"].build(), method), double(CASES["cnn"].example())
    with torch.no_grad(), bnn.using("adjoint"):
        output = bnn(x)
    mean, std = bnn.posterior.mean().detach(), bnn.posterior.variance().detach().sqrt()
    largest, second = output.loc.topk(2, 1).indices.unbind(1)
    rows, generator = torch.arange(len(x)), torch.Generator().manual_seed(0)

    def margins(weights: Tensor) -> Tensor:
        with bnn.holding(weights) as network:
            logits = network(x)
        return logits[rows, largest] - logits[rows, second]

    samples = []
    with torch.no_grad():
        for _ in range(30):
            noise = torch.randn(2000, len(mean), generator=generator, dtype=torch.float64)
            samples.append(torch.func.vmap(margins)(mean + std * noise))
    ratio = 2 * output.variance[:, 0] / torch.cat(samples).var(0)
    assert (ratio - 1).abs().max() < 0.02


@pytest.mark.parametrize("name", ["cnn", "vit_mha", "language_model"])
def test_chunks_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = make(CASES[name].build()), double(CASES[name].example())
    with bnn.using("adjoint"):
        whole = bnn(x).variance
        for elements in (1, 1000, 5000):  # of the weight gradients
            monkeypatch.setitem(adjoint_weight._ELEMENTS, "cpu", elements)
            torch.testing.assert_close(bnn(x).variance, whole)
    prediction = bnn.predict(x, rule="adjoint")
    cut = bnn.predict(x, rule="adjoint", memory_budget=20_000)  # of everything
    torch.testing.assert_close(cut.probs, prediction.probs)
    torch.testing.assert_close(cut.margin_std, prediction.margin_std)


@pytest.mark.parametrize("layer", ["linear", "conv", "embedding", "tied"])
def test_memory_is_not_that_of_batch_times_weights(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, batch = 256 * 256, 64

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(256, 256, bias=False), nn.Linear(256, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x)))

    pooled = (nn.AdaptiveAvgPool1d(1), nn.Flatten())
    network, x = {
        "linear": lambda: (nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2)), torch.randn(batch, 256)),
        "conv": lambda: (nn.Sequential(nn.Conv1d(64, 256, 4), *pooled, nn.Linear(256, 2)), torch.randn(batch, 64, 8)),
        "embedding": lambda: (
            nn.Sequential(nn.Embedding(256, 256), nn.Flatten(), nn.Linear(512, 2)),
            torch.randint(256, (batch, 2)),
        ),
        "tied": lambda: (Tied(), torch.randn(batch, 256)),
    }[layer]()
    bnn = lb.bayesianize(network.eval(), lb.MeanField())
    monkeypatch.setitem(adjoint_weight._ELEMENTS, "cpu", 4 * weights)
    with bnn.using("adjoint"), PeakMemory() as memory:
        bnn(x)
    assert memory.peak_bytes < 4 * (16 * weights + 40 * x.numel() + 40 * 256 * batch)
    assert memory.peak_bytes < 4 * batch * weights / 2


@pytest.mark.parametrize("name", ["cnn", "vit_mha", "language_model"])
def test_bf16(name: str) -> None:
    case = CASES[name]
    bnn, x = lb.bayesianize(case.build().eval(), lb.MeanField(init_std=0.1)), case.example()
    with bnn.using("adjoint"):
        exact = bnn(x).variance
        with torch.autocast("cpu", torch.bfloat16):
            rounded = bnn(x)
    assert rounded.dtype == torch.bfloat16
    assert rounded.variance.dtype == torch.float32
    assert (rounded.variance / exact).log().median().abs() < 0.05
    with bnn.to(torch.bfloat16).using("adjoint"):
        assert bnn(x.to(torch.bfloat16) if x.is_floating_point() else x).variance.isfinite().all()


class Converted(nn.Module):
    """A network that returns its outputs with another dtype, twice the precision of its layers or half."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)
        return out.to(self.dtype)


@pytest.mark.parametrize("name", ["mlp", "cnn", "conv3d", "language_model"])
@pytest.mark.parametrize("layers", [torch.float32, torch.float64])
def test_outputs_of_another_dtype_than_the_layers(name: str, layers: torch.dtype) -> None:
    case, outputs = CASES[name], {torch.float32: torch.float64, torch.float64: torch.float32}[layers]
    network = case.build().to(layers).eval()
    x = case.example()
    x = x.to(layers) if x.is_floating_point() else x
    expected, found = (
        lb.bayesianize(one, lb.MeanField(init_std=0.1)).eval().predict(x, rule=Adjoint(max_passes=1000))
        for one in (network, Converted(network, outputs))
    )
    assert expected.margin_std is not None
    assert found.margin_std is not None
    assert found.margin_std.dtype == outputs
    torch.testing.assert_close(found.margin_std, expected.margin_std.to(outputs), rtol=1e-4, atol=1e-6)


def test_predictions_have_probabilities_entropy_and_the_std_of_the_margin() -> None:
    bnn, x = make(CASES["cnn"].build(), lb.MeanField(init_std=0.3)), double(CASES["cnn"].example())
    prediction = bnn.predict(x, rule="adjoint")
    torch.testing.assert_close(prediction.margin_std, brute_force(bnn, x, margin).sqrt())
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(len(x), dtype=torch.float64))
    assert prediction.mutual_information.min() > 0
    assert (prediction.entropy >= prediction.mutual_information).all()
    assert bnn.predict(x).margin_std is None


def test_the_mean_can_be_that_of_moments() -> None:
    bnn, x = make(CASES["cnn"].build(), lb.MeanField(init_std=0.3)), double(CASES["cnn"].example())
    bnn.moment_scale = (0.5, 2.0)  # not for this rule
    prediction = bnn.predict(x, rule=Adjoint(mean="moments"), keep_outputs=True)
    bnn.moment_scale = (1.0, 1.0)
    with torch.no_grad(), bnn.using("moments"):
        torch.testing.assert_close(prediction.outputs[0], bnn(x).loc)
    with torch.no_grad(), bnn.using("adjoint"):
        output = bnn(x)
    assert not torch.allclose(output.loc, prediction.outputs[0])
    same = (output.loc.topk(2, 1).indices == prediction.outputs[0].topk(2, 1).indices).all(1)
    assert same.any()
    torch.testing.assert_close(prediction.margin_std[same], (2 * output.variance[same, 0]).sqrt())


def test_the_mean_of_moments_has_corrected_layers() -> None:
    bnn, x = make(CASES["cnn"].build(), lb.MeanField(init_std=0.3)), double(CASES["cnn"].example())
    plain = bnn.predict(x, rule=Adjoint(mean="moments"), keep_outputs=True).outputs
    lb.calibrate(bnn, [x], layers=True, factors=False, samples=4, generator=torch.Generator().manual_seed(0))
    corrected = bnn.predict(x, rule=Adjoint(mean="moments"), keep_outputs=True).outputs
    assert not torch.allclose(plain, corrected)
    with torch.no_grad(), bnn.using("moments"):
        torch.testing.assert_close(corrected[0], bnn(x).loc)


def difference(two: Tensor, output: Tensor) -> Tensor:
    first, second = output.gather(1, two).unbind(1)
    return first - second


@pytest.mark.parametrize("margins", [1, 3])
def test_several_margins_have_their_variances(margins: int) -> None:
    bnn, x = make(CASES["cnn"].build(), lb.MeanField(init_std=0.3)), double(CASES["cnn"].example())
    with bnn.using(Adjoint(margins=margins)):
        output = bnn(x)
    order = output.loc.topk(4, 1).indices
    for k in range(1, 4):
        expected = brute_force(bnn, x, functools.partial(difference, order[:, [0, k]]))
        found = margin_variances(output.independent, output.common, order[:, [0, k]])[:, 0]
        assert torch.allclose(found, expected, rtol=2e-3) == (k <= margins)


def test_a_prediction_leaves_no_gradients_and_no_graph() -> None:
    bnn, x = make(CASES["cnn"].build()), double(CASES["cnn"].example())
    with bnn.using("adjoint"):
        output = bnn(x)
    assert not output.loc.requires_grad
    assert not output.variance.requires_grad
    assert all(parameter.grad is None for parameter in bnn.parameters())
    twin = copy.deepcopy(bnn)
    assert torch.equal(twin.predict(x, rule="adjoint").probs, bnn.predict(x, rule="adjoint").probs)


def test_activation_checkpointing_gives_the_same() -> None:
    class Block(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.checkpointed = checkpointed
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.checkpointed:
                return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))
            return self.head(self.inner(x))

    plain, x = Block(False), torch.randn(5, 6, dtype=torch.float64)
    recomputed = copy.deepcopy(plain)
    recomputed.checkpointed = True
    first, second = (make(network).predict(x, rule="adjoint") for network in (plain, recomputed))
    torch.testing.assert_close(first.margin_std, second.margin_std)
    torch.testing.assert_close(first.probs, second.probs)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.positions(torch.arange(x.shape[1]))).mean(1))


@pytest.mark.parametrize("length", [3, 5, 6])  # with 3 examples: as many, not a multiple, and a multiple
def test_embeddings_without_a_batch_are_refused_and_work_for_one_example(length: int) -> None:
    bnn = make(Positions())
    x = torch.randn(3, length, 4, dtype=torch.float64)
    with pytest.raises(lb.UnsupportedOperation, match=r"embedding.*no clear batch dimension.*'positions.weight'"):
        bnn.predict(x, rule="adjoint")
    check(bnn, x[:1])


def test_errors_name_the_problem() -> None:
    bnn, x = make(CASES["cnn"].build()), double(CASES["cnn"].example())
    y = torch.zeros(len(x), dtype=torch.long)
    with pytest.raises(lb.UnsupportedOperation, match="a training loss"), bnn.using("adjoint"):
        lb.elbo_loss(bnn, x, y, num_data=10)
    with pytest.raises(lb.UnsupportedOperation, match="training mode"), bnn.using("adjoint"):
        bnn.train()(x)
    with pytest.raises(lb.UnsupportedOperation, match="inference_mode"), torch.inference_mode():
        bnn.predict(x, rule="adjoint")
    with pytest.raises(lb.UnsupportedOperation, match="5 scalars per example: raise max_passes=4"):
        bnn.predict(x, rule=Adjoint("each", max_passes=4))
    with pytest.raises(lb.LeanBayesError, match="outputs='all'"):
        Adjoint("all")  # type: ignore[arg-type]
    with pytest.raises(lb.LeanBayesError, match="max_passes=0"):
        Adjoint(max_passes=0)
    recurrent = make(CASES["lstm"].build())
    with pytest.raises(lb.UnsupportedOperation, match=r"lstm.*weight_ih_l0"):
        recurrent.predict(double(CASES["lstm"].example()), rule="adjoint")
    method = lb.WeightSharing(components=8, minimum=2, sampling="tied")
    correlated = make(CASES["mlp"].build(), method)
    with pytest.raises(lb.UnsupportedOperation, match="correlated"):
        correlated.predict(double(CASES["mlp"].example()), rule="adjoint")
