"""`predict(compile=...)`: the same results as without, a bounded number of compiled passes, and a logged fallback."""

import copy
import dataclasses
import functools
import gc
import logging
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.model import compiled_passes


@pytest.fixture(autouse=True)
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Leave out the code generation of inductor, which takes minutes, and return the compiled graphs."""
    found: list[Any] = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield found
    torch.compiler.reset()


def _conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def _model(method: lb.Method | None = None, **settings: Any) -> lb.BayesianModel:
    return lb.bayesianize(_conv(), method or lb.MeanField(init_std=0.1), **settings).eval()


def _images(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def _same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first.probs, second.probs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(first.expected_entropy, second.expected_entropy, rtol=1e-4, atol=1e-6)


WAYS: list[tuple[lb.Method, str]] = [
    (lb.MeanField(init_std=0.1), "moments"),
    (lb.MeanField(init_std=0.1), "sample"),
    (lb.MeanField(init_std=0.1), "mean"),
    (lb.MeanField(init_std=0.1), "flipout"),
    (lb.MeanField(init_std=0.1), "local"),
    (lb.SSVI(density=0.5), "moments"),
    (lb.PBN(rate=0.5, sensitivity="magnitude"), "moments"),
    (lb.MCDropout(rate=0.2), "sample"),
]


@pytest.mark.parametrize(("method", "rule"), WAYS, ids=[f"{type(m).__name__}-{r}" for m, r in WAYS])
def test_a_compiled_pass_gives_the_same(method: lb.Method, rule: str, compilations: list[Any]) -> None:
    bnn = _model(method)
    samples = 3 if rule in ("sample", "flipout", "local") else None

    def predict(x: Tensor, compile: bool) -> Any:
        return bnn.predict(x, samples, rule=rule, compile=compile, generator=torch.Generator().manual_seed(1))

    for seed in range(2):
        _same(predict(_images(4, seed), True), predict(_images(4, seed), False))
    assert len(compilations) == 1  # one graph for both batches and all samples
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.05)
    _same(predict(_images(4), True), predict(_images(4), False))
    assert len(compilations) == 1  # weights are inputs of the graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "rule"), WAYS, ids=[f"{type(m).__name__}-{r}" for m, r in WAYS])
def test_eager_passes_end_with_the_comparisons(
    method: lb.Method, rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, x, eager = _model(method).to(dtype), _images(4).to(dtype), []
    run = compiled_passes._one_pass

    def count(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            eager.append(args)
        return run(*args)

    monkeypatch.setattr(compiled_passes, "_one_pass", count)
    for _ in range(compiled_passes._COMPARED):
        bnn.predict(x, rule=rule, compile=True)
    assert eager
    eager.clear()
    bnn.predict(x, rule=rule, compile=True)
    assert not eager
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.mul_(1.1)
    for _ in range(2):
        bnn.predict(x, rule=rule, compile=True)
    assert len(eager) <= 1  # what follows from the weights alone


@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_code_has_no_work_on_weights_alone(autocast: bool, compilations: list[Any]) -> None:
    """What follows from the weights alone is computed by an eager pass, and again if they change."""
    layers = list(_conv().children())
    conv = nn.Sequential(*layers[:3], nn.Conv2d(6, 6, 3), nn.ReLU(), *layers[3:])
    tokens = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    for network, x in (conv, _images(4)), (tokens, torch.randn(4, 5, 6)):
        bnn = lb.bayesianize(network, lb.MeanField(init_std=0.1)).eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            bnn.predict(x, rule="moments", compile=True)
        of_weights: dict[Any, bool] = {}
        for node in compilations.pop().graph.nodes:
            parts = [of_weights[part] for part in node.all_input_nodes]
            of_weights[node] = "values" in node.name if node.op == "placeholder" else any(parts) and all(parts)
            moves = {"flatten", "to", "reshape", "unbind", "view"}  # without any change of the numbers
            assert node.op == "placeholder" or not of_weights[node] or node.target in moves, node.format_node()


def test_regression_and_dict_inputs(compilations: list[Any]) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a * b)

    torch.manual_seed(0)
    bnn = lb.bayesianize(Network(), lb.MeanField(init_std=0.1), likelihood=lb.Gaussian())
    x = {"a": torch.randn(5, 3), "b": torch.ones(3)}
    first, second = (bnn.predict(x, rule="moments", compile=compile) for compile in (True, False))
    torch.testing.assert_close(first.mean, second.mean)
    torch.testing.assert_close(first.epistemic_variance, second.epistemic_variance)
    assert len(compilations) == 1


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Bernoulli(), lb.Gaussian(), lb.HeteroscedasticGaussian()])
def test_probabilities_are_a_part_of_the_compiled_code(likelihood: Any, compilations: list[Any]) -> None:
    """Kernels after it would wait for Python."""
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    bnn, x = lb.bayesianize(network, lb.MeanField(init_std=0.1), likelihood=likelihood).eval(), torch.randn(5, 3)
    for compile in (True, False):
        found = bnn.predict(x, rule="moments", compile=compile)
        expected = bnn.predict(x, rule="moments", compile=False)
        for name, value in vars(expected).items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(getattr(found, name), value, rtol=1e-5, atol=1e-6)
            else:
                assert getattr(found, name) == value
    (graph,) = compilations
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    tensors = [value for value in vars(expected).values() if isinstance(value, Tensor)]
    assert len(outputs) == len(tensors) + 1  # and whether all are finite


def test_outputs_that_are_kept_are_those_of_the_network() -> None:
    bnn, x = _model(), _images(4)
    first, second = (bnn.predict(x, rule="moments", keep_outputs=True, compile=compile) for compile in (True, False))
    torch.testing.assert_close(first.outputs, second.outputs)
    assert first.outputs.shape == (1, 4, 3)
    _same(first, second)


class Halves(nn.Module):
    """Rotates pairs of features, with the function that joins them."""

    def __init__(self, join: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.join = nn.Linear(6, 8), join

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear(x).chunk(2, -1)
        return self.join((-second, first), dim=-1).flatten(1)


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.stack], ids=["cat", "concat", "stack"])
def test_tuples_of_values_are_joined(join: Any, compilations: list[Any]) -> None:
    torch.manual_seed(0)
    bnn = lb.bayesianize(Halves(join), lb.MeanField(init_std=0.5)).eval()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    first, second = (bnn.predict(x, rule="moments", compile=compile) for compile in (True, False))
    _same(first, second)
    assert second.mutual_information.min() > 0
    assert len(compilations) == 1


@pytest.mark.parametrize("rule", ["moments", "sample"])
def test_a_language_model_with_rotary_positions(rule: str, compilations: list[Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=16, initializer_range=0.2,
    )  # fmt: skip
    bnn = lb.bayesianize(transformers.LlamaForCausalLM(config).eval(), lb.MeanField(init_std=0.1), seed=0).eval()
    ids = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))
    first, second = (
        bnn.predict({"input_ids": ids}, 2, rule=rule, compile=compile, generator=torch.Generator().manual_seed(1))
        for compile in (True, False)
    )
    _same(first, second)
    assert len(compilations) == 1


def test_changes_of_factors_and_corrections_are_seen() -> None:
    bnn, x = _model(), _images(4)
    bnn.predict(x, rule="moments", compile=True)
    bnn.moment_scale = (0.5, 2.0)
    _same(bnn.predict(x, rule="moments", compile=True), bnn.predict(x, rule="moments", compile=False))
    bnn.moment_layers = {"5.weight": torch.tensor([[1.2] * 3, [0.1] * 3, [0.5] * 3])}
    _same(bnn.predict(x, rule="moments", compile=True), bnn.predict(x, rule="moments", compile=False))


def test_the_number_of_compiled_passes_is_bounded() -> None:
    bnn = _model()
    for rows in range(1, compiled_passes._MOST + 4):
        bnn.predict(_images(rows), rule="mean", compile=True)
    assert len(bnn.compiled_passes._known) == compiled_passes._MOST


def test_copies_files_and_memory() -> None:
    bnn, x = _model(), _images(4)
    names = list(bnn.state_dict())
    expected = bnn.predict(x, rule="moments", compile=True)
    assert list(bnn.state_dict()) == names
    for other in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert not other.compiled_passes._known
        _same(other.predict(x, rule="moments"), expected)
    alive = weakref.ref(bnn)
    del bnn
    gc.collect()
    assert alive() is None


# -- without asking ---------------------------------------------------------------------------------------------------


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU, on which passes that take long in total are compiled."""
    monkeypatch.setattr(compiled_passes, "_is_automatic", lambda bnn: compiled_passes._obstacle(bnn) is None)
    monkeypatch.setattr(compiled_passes, "_PAYS_AFTER", 1e-9)


def test_a_cpu_compiles_only_if_asked(compilations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_passes, "_PAYS_AFTER", 0.0)
    _model().predict(_images(4), rule="moments")
    assert not compilations


@pytest.mark.usefixtures("automatic")
def test_passes_that_take_long_are_compiled(compilations: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "leanbayes")
    bnn, x = _model(), _images(6)
    expected = bnn.predict(x, rule="moments")
    assert not compilations  # the first pass takes the time that makes the second one worth compiling
    for _ in range(3):
        _same(bnn.predict(x, rule="moments"), expected)
    assert len(compilations) == 1
    assert [record.levelname for record in caplog.records if record.name == "leanbayes"] == ["INFO"]
    bnn.predict(x, rule="moments", compile=False)
    assert len(compilations) == 1


@pytest.mark.usefixtures("automatic")
@pytest.mark.parametrize("rule", ["moments", "sample"])
def test_a_smaller_last_batch_is_padded(rule: str, compilations: list[Any]) -> None:
    bnn = _model()
    for _ in range(2):
        bnn.predict(_images(6), 2, rule=rule)
    assert len(compilations) == 1
    with bnn.frozen(3):
        small = bnn.predict(_images(4, seed=5), 2, rule=rule)
        _same(small, bnn.predict(_images(4, seed=5), 2, rule=rule, compile=False))
    assert small.probs.shape == (4, 3)
    assert len(compilations) == 1


@pytest.mark.usefixtures("automatic")
def test_noise_of_each_example_is_not_padded(compilations: list[Any]) -> None:
    bnn = _model()
    for _ in range(2):
        bnn.predict(_images(6), 2, rule="flipout")
    with bnn.frozen(3):
        small = bnn.predict(_images(4, seed=5), 2, rule="flipout")
        _same(small, bnn.predict(_images(4, seed=5), 2, rule="flipout", compile=False))
    assert len(compilations) == 1


class _Centered(nn.Module):
    """Features minus their mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - self.layer(x).mean(0)


class _TimeFirst(_Centered):
    """A mean over time, the first dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.tanh()).mean(0)


@pytest.mark.usefixtures("automatic")
@pytest.mark.parametrize(("network", "shape"), [(_Centered(), (3,)), (_TimeFirst(), (5, 3))])
@pytest.mark.parametrize("rows", [4, 1])
def test_a_batch_whose_examples_depend_on_each_other_is_not_padded(
    network: nn.Module, shape: tuple[int, ...], rows: int, compilations: list[Any]
) -> None:
    bnn = lb.bayesianize(network, lb.MeanField()).eval()
    for _ in range(2):
        bnn.predict(torch.randn(6, *shape), rule="mean")
    assert len(compilations) == 1
    x = torch.randn(rows, *shape)
    _same(bnn.predict(x, rule="mean"), bnn.predict(x, rule="mean", compile=False))


class _Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


@pytest.mark.usefixtures("automatic")
def test_a_network_that_cannot_be_compiled_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    bnn, x = lb.bayesianize(_Breaks(), lb.MeanField()), torch.randn(4, 3)
    expected = bnn.predict(x, rule="moments", compile=False)
    for _ in range(4):
        _same(bnn.predict(x, rule="moments"), expected)
    assert [record.levelname for record in caplog.records if record.name == "leanbayes"] == ["WARNING"]
    assert "not compiled" in caplog.text
    with pytest.raises(lb.LeanBayesError, match="cannot be compiled"):
        bnn.predict(x, rule="moments", compile=True)


@pytest.mark.parametrize("rule", ["moments", "sample"])
def test_compiled_code_with_other_outputs_is_not_used(
    rule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: _shifted(function(*args)))
    monkeypatch.setattr(compiled_passes, "_is_automatic", lambda bnn: True)
    monkeypatch.setattr(compiled_passes, "_PAYS_AFTER", 0.0)
    bnn, x = _model(), _images(4)
    with caplog.at_level(logging.WARNING, "leanbayes"), bnn.frozen(0):
        found = bnn.predict(x, rule=rule)
        _same(found, bnn.predict(x, rule=rule, compile=False))
    assert "differ" in caplog.text
    with pytest.raises(lb.LeanBayesError, match=r"cannot be compiled .*differ"):
        bnn.predict(x, rule=rule, compile=True)


def _deep(gain: float) -> nn.Module:
    """A network that amplifies what its layers round."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)]
    network = nn.Sequential(nn.Linear(3, 32), *hidden, nn.Linear(32, 10))
    with torch.no_grad():
        for layer in hidden:
            layer[0].weight.mul_(gain)  # type: ignore[operator]
    return network


@pytest.mark.parametrize(
    ("method", "rule", "gain"), [(lb.MeanField(init_std=1e-3), "moments", 4), (lb.MCDropout(rate=0.1), "sample", 3)]
)
@pytest.mark.parametrize("wrong", [False, True])
def test_rounding_of_a_deep_network_in_half_precision_is_not_a_difference(
    method: lb.Method, rule: str, gain: float, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, x = lb.bayesianize(_deep(gain), method).eval(), torch.randn(200, 3)
    found: list[Tensor] = []

    def rounded(parts: Any) -> Any:
        """Results of a pass whose inputs have another last bit."""
        found.append(parts if isinstance(parts, Tensor) else parts.prediction.probs)
        return _shifted(parts) if wrong else parts

    def compiled(function: Any, **_: Any) -> Any:
        return lambda model, draw, inputs, summarize: rounded(function(model, draw, inputs * (1 + 2**-8), summarize))

    monkeypatch.setattr(torch, "compile", compiled)
    with torch.autocast("cpu", torch.bfloat16), bnn.frozen(0):
        expected = bnn.predict(x, 1, rule=rule, compile=False, keep_outputs=True)
        if wrong:
            with pytest.raises(lb.LeanBayesError, match=r"cannot be compiled .*differ"):
                bnn.predict(x, 1, rule=rule, compile=True)
            return
        bnn.predict(x, 1, rule=rule, compile=True)
        eager = expected.probs if rule == "moments" or expected.outputs is None else expected.outputs[0]
    assert (found[0] - eager).abs().max() > compiled_passes._ROUNDING[True] * eager.abs().max()


def _shifted(parts: Any) -> Any:
    if isinstance(parts, Tensor):
        return parts + 1
    return parts._replace(prediction=dataclasses.replace(parts.prediction, probs=parts.prediction.probs + 0.1))


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(lb.LeanBayesError, match="backward pass"):
        _model().predict(_images(4), rule="adjoint", compile=True)
    with pytest.raises(lb.LeanBayesError, match="ensemble"):
        _model(lb.Ensemble(members=2)).predict(_images(4), compile=True)
    with pytest.raises(lb.LeanBayesError, match="compile='yes'"):
        _model().predict(_images(4), compile="yes")  # type: ignore[arg-type]


def test_errors_of_the_network_are_its_own() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(self.layer(x))

    with pytest.raises(lb.UnsupportedOperation, match="bessel_j0"):
        lb.bayesianize(Network(), lb.MeanField()).predict(torch.ones(2, 3), rule="moments", compile=True)


def test_threads_share_a_compiled_model() -> None:
    bnn = _model()
    expected = [bnn.predict(_images(4, seed), rule="moments", compile=False) for seed in range(4)]
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        found[seed] = bnn.predict(_images(4, seed), rule="moments", compile=True)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, one in enumerate(expected):
        _same(found[seed], one)


def test_samples_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the outputs are finite is read once, not once per sample."""
    read: list[Tensor] = []
    original: Callable[..., bool] = Tensor.__bool__

    def counted(self: Tensor) -> bool:
        read.append(self)
        return original(self)

    def count(samples: int) -> int:
        read.clear()
        _model().predict(_images(4), samples)
        return len(read)

    monkeypatch.setattr(Tensor, "__bool__", counted)
    assert count(12) == count(2)


@pytest.mark.parametrize("compile", [True, False])
def test_one_pass_waits_once_for_the_device(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite outputs and unchanged weights are read together. A CPU reads before whether the inputs are clean."""
    read: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(self: Tensor, *args: Any) -> Any:
            read.append(name)
            return original(self, *args)

        return call

    bnn, x = _model(), _images(4)
    expected = [bnn.predict(x, rule="moments", compile=compile) for _ in range(compiled_passes._COMPARED + 1)]
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, counted(name))
    found = bnn.predict(x, rule="moments", compile=compile)
    assert read == ["__bool__", "tolist"]
    monkeypatch.undo()
    _same(found, expected[-1])
    with torch.no_grad():
        next(bnn.parameters()).data.fill_(math.nan)  # which autograd does not count as a change
    with pytest.raises(lb.LeanBayesError, match="check the parameters"):
        bnn.predict(x, rule="moments", compile=compile)


def test_outdated_moments_of_weights_take_no_second_key() -> None:
    """A prediction that is computed again, because weights were written to unseen, has the noise of its first try."""
    bnn, other = _model(), _model()
    for one in (bnn, other):
        one.predict(_images(4), rule="moments")
    next(bnn.parameters()).data.add_(0.1)
    for one in (bnn, other):
        one.predict(_images(4), rule="moments")
    assert bnn.noise.state[1] == other.noise.state[1]
