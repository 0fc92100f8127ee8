"""Bad input raises one clear sentence that says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.model.bayesian import BayesianModel

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 1])
REAL = torch.zeros(4, 3)
NAN, INF = float("nan"), float("inf")


def model() -> nn.Module:
    return CASES["mlp"].build()


def bnn(method: Any = None, **settings: Any) -> BayesianModel:
    return lb.bayesianize(model(), method or lb.MeanField(), **settings)


def spoilt(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


def expect(call: Callable[[], Any], words: str, kind: type[Exception] = lb.LeanBayesError) -> None:
    """Check that the call raises a sentence with all of these words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, lb.LeanBayesError)
    for word in words.split():
        assert word in message
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 300
    assert message[0].isupper() or message.split("=")[0].split()[0].isidentifier() or "()" in message


def nan_parameters(likelihood: Any = None) -> BayesianModel:
    broken = bnn(likelihood=likelihood)
    with torch.no_grad():
        broken.posterior.get_parameter("mu")[5] = NAN
    return broken


# -- data -------------------------------------------------------------------------------------------------------------

DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "nan input": (lambda: lb.elbo_loss(bnn(), spoilt(X, NAN), Y, num_data=9), "inputs NaN clean"),
    "infinite input": (lambda: lb.elbo_loss(bnn(), spoilt(X, INF), Y, num_data=9), "inputs infinity clean"),
    "nan input, two samples": (
        lambda: lb.elbo_loss(bnn(), spoilt(X, NAN), Y, num_data=9, samples=2),
        "inputs NaN clean",
    ),
    "nan input, predict": (lambda: bnn().predict(spoilt(X, NAN)), "inputs NaN clean"),
    "nan input in a dict": (lambda: bnn().predict({"input": spoilt(X, NAN)}), "inputs NaN clean"),
    "nan target": (
        lambda: lb.elbo_loss(bnn(likelihood=lb.Gaussian()), X, spoilt(REAL, NAN), num_data=9),
        "labels NaN clean",
    ),
    "nan yes or no": (
        lambda: lb.elbo_loss(bnn(likelihood=lb.Bernoulli()), X, spoilt(REAL, NAN), num_data=9),
        "[0, 1] fix",
    ),
    "yes or no of 2": (lambda: lb.elbo_loss(bnn(likelihood=lb.Bernoulli()), X, REAL + 2, num_data=9), "[0, 1] fix"),
    "nan parameters": (lambda: lb.elbo_loss(nan_parameters(), X, Y, num_data=9), "parameters NaN learning rate"),
    "nan parameters, predict": (lambda: nan_parameters().predict(X), "parameters NaN"),
    "negative label": (lambda: lb.elbo_loss(bnn(), X, Y - 1, num_data=9), "-1 3 classes ignore_index"),
    "label too large": (lambda: lb.elbo_loss(bnn(), X, Y + 1, num_data=9), "3 classes 0 to 2 widen"),
    "float labels": (lambda: lb.elbo_loss(bnn(), X, Y.float(), num_data=9), "int64 float32 convert"),
    "int32 labels": (lambda: lb.elbo_loss(bnn(), X, Y.int(), num_data=9), "int64 int32 convert"),
    "one-hot labels": (lambda: lb.elbo_loss(bnn(), X, F.one_hot(Y), num_data=9), "(4,) (4, 3) convert"),
    "too few labels": (lambda: lb.elbo_loss(bnn(), X, Y[:3], num_data=9), "(4,) (3,)"),
    "flat targets": (
        lambda: lb.elbo_loss(bnn(likelihood=lb.Gaussian()), X, REAL[:, 0], num_data=9),
        "(4,) (4, 3) reshape",
    ),
    "flat targets, unchecked": (
        lambda: lb.elbo_loss(bnn(likelihood=lb.Gaussian()), X, REAL[:, :1], num_data=9, check=False),
        "(4, 1) (4, 3) reshape",  # shapes are known without synchronization
    ),
    "odd outputs": (
        lambda: lb.elbo_loss(bnn(likelihood=lb.HeteroscedasticGaussian()), X, REAL[:, :1], num_data=9),
        "odd double",
    ),
    "odd outputs, predict": (lambda: bnn(likelihood=lb.HeteroscedasticGaussian()).predict(X), "odd double"),
    "empty batch": (lambda: lb.elbo_loss(bnn(), X[:0], Y[:0], num_data=9), "no examples batch"),
    "empty batch, predict": (lambda: bnn().predict(X[:0]), "no examples batch"),
    "no tensor": (lambda: bnn().predict({}), "needs a tensor not dict"),
    "array": (lambda: bnn().predict(X.numpy()), "needs a tensor not ndarray torch.as_tensor(x)"),
    "minus infinite input": (lambda: bnn().predict(X - float("inf")), "outputs NaN infinity so do the inputs clean"),
    "no batches": (lambda: lb.bayesianize(CASES["cnn"].build(), lb.MeanField()).refresh_batchnorm([]), "no batches"),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data(name: str) -> None:
    expect(*DATA[name])


# -- arguments --------------------------------------------------------------------------------------------------------


def assign_rule(name: str) -> None:
    bnn().rule = name


def enter(block: Any) -> None:
    with block:
        pass


RULES = "'lrt' covariance, flipout, local, mean, moments or sample"
ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no num_data": (lambda: lb.elbo_loss(bnn(), X, Y, num_data=None), "num_data=None len(train_set)"),  # type: ignore[arg-type]
    "num_data below the batch": (
        lambda: lb.elbo_loss(bnn(), X, Y, num_data=3),
        "num_data=3 4 number of training examples",
    ),
    "negative temperature": (
        lambda: lb.elbo_loss(bnn(), X, Y, num_data=9, temperature=-0.1),
        "temperature=-0.1 negative",
    ),
    "nan temperature": (lambda: lb.elbo_loss(bnn(), X, Y, num_data=9, temperature=NAN), "temperature=nan"),
    "no samples": (lambda: lb.elbo_loss(bnn(), X, Y, num_data=9, samples=0), "samples=0 at least 1"),
    "no samples, predict": (lambda: bnn().predict(X, samples=0), "samples=0 from 1 to 1,000,000"),
    "too many samples": (lambda: bnn().predict(X, samples=10**12), "samples=1000000000000 to 1,000,000"),
    "samples in words": (lambda: bnn().predict(X, samples="many"), "samples='many' whole number"),  # type: ignore[arg-type]
    "half a sample": (lambda: bnn().predict(X, samples=2.5), "samples=2.5 whole number"),  # type: ignore[arg-type]
    "budget in words": (lambda: bnn().predict(X, memory_budget="1GB"), "memory_budget='1GB' bytes"),  # type: ignore[arg-type]
    "generator is a seed": (lambda: bnn().predict(X, generator=3), "generator=3 torch.Generator().manual_seed(0)"),  # type: ignore[arg-type]
    "no samples, method": (lambda: lb.MeanField(samples=0), "samples=0 at least 1"),
    "too many members": (lambda: bnn(lb.Ensemble(members=2)).predict(X, samples=3), "samples=3 1 to 2"),
    "learned likelihood": (
        lambda: lb.elbo_loss(bnn(), X, REAL, num_data=9, likelihood=lb.Gaussian(learned=True)),
        "Gaussian optimizer lb.bayesianize(..., likelihood=...)",
    ),
    "unknown over": (lambda: lb.elbo_loss(bnn(), X, Y, num_data=9, over="x"), "'x' accumulate fold"),  # type: ignore[arg-type]
    "folding one sample": (
        lambda: lb.elbo_loss(bnn(), X, Y, num_data=9, samples=2, over="fold"),
        "accumulate local flipout",
    ),
    "plain network": (lambda: lb.elbo_loss(model(), X, Y, num_data=9), "Sequential lb.bayesianize"),
    "unknown rule, using": (lambda: enter(bnn().using("lrt")), RULES),
    "unknown rule, method": (lambda: lb.MeanField(rule="lrt"), RULES),
    "unknown rule, predict": (lambda: bnn().predict(X, rule="lrt"), RULES),
    "unknown rule, assigned": (lambda: assign_rule("lrt"), RULES),
    "empty selection": (lambda: bnn(select="decoder"), "no Bayesian parameter select"),
    "frozen network": (
        lambda: lb.bayesianize(model().requires_grad_(False), lb.MeanField()),
        "no Bayesian parameter requires_grad=True",
    ),
    "misspelt selection": (lambda: bnn(select=["0.wieght"]), "0.wieght mean 0.weight"),
    "broken pattern": (lambda: bnn(select="("), "valid regular expression"),
    "selection of a baseline": (lambda: bnn(lb.Deterministic(), select="weight"), "Deterministic select out"),
    "no parameters": (lambda: lb.bayesianize(nn.ReLU(), lb.MeanField()), "no parameters pass network"),
    "no parameters, baseline": (lambda: lb.bayesianize(nn.ReLU(), lb.Deterministic()), "no parameters pass network"),
    "lazy network": (lambda: lb.bayesianize(nn.LazyLinear(3), lb.MeanField()), "weight lazy batch"),
    "no module": (lambda: lb.bayesianize(torch.relu, lb.MeanField()), "torch.nn.Module"),  # type: ignore[call-overload]
    "class of a module": (lambda: lb.bayesianize(nn.Linear, lb.MeanField()), "torch.nn.Module"),  # type: ignore[call-overload]
    "class of a method": (lambda: lb.bayesianize(model(), lb.MeanField), "instance lb.MeanField()"),  # type: ignore[call-overload]
    "name of a method": (lambda: lb.bayesianize(model(), "mean_field"), "instance lb.MeanField()"),  # type: ignore[call-overload]
    "unknown center": (lambda: lb.Normal(center="mean"), "'mean' 'zero' 'pretrained'"),  # type: ignore[arg-type]
    "unknown scale": (lambda: lb.Normal("fan_out"), "'fan_out' 'fan_in' 'std'"),  # type: ignore[arg-type]
    "no members": (lambda: lb.Ensemble(members=0), "members=0 at least 1"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_argument(name: str) -> None:
    expect(*ARGUMENTS[name])


SCALES: dict[str, Callable[[float], Any]] = {
    "scale": lambda value: lb.Normal(value),
    "gain": lambda value: lb.Normal(gain=value),
    "wide": lambda value: lb.ScaleMixture(wide=value),
    "narrow": lambda value: lb.ScaleMixture(narrow=value),
    "init_std": lambda value: lb.MeanField(init_std=value),
    "std": lambda value: lb.Gaussian(value),
    "min_variance": lambda value: lb.HeteroscedasticGaussian(value),
}


@pytest.mark.parametrize("value", [-1.0, 0.0, NAN, INF])
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_positive(name: str, value: float) -> None:
    expect(lambda: SCALES[name](value), f"{name}={value} positive")


@pytest.mark.parametrize("value", [-0.1, 0.0, 1.0, 2.0, NAN])
@pytest.mark.parametrize("name", ["pi", "rate"])
def test_shares_are_between_0_and_1(name: str, value: float) -> None:
    make: Any = {"pi": lb.ScaleMixture, "rate": lb.MCDropout}[name]
    expect(lambda: make(**{name: value}), f"{name}={value} between 0 and 1")


# -- networks ---------------------------------------------------------------------------------------------------------


class Pair(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        output = super().forward(input)
        return output, output


class StaticAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, x = self.attention, x[None]
        inputs = (a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0, a.out_proj.weight, a.out_proj.bias)
        return F.multi_head_attention_forward(x, x, x, 6, 1, *inputs, static_k=x.transpose(0, 1))[0][0]


class Positive(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, torch.exp(self.weight))


def test_a_loss_that_is_not_finite_raises_its_own_error() -> None:
    expect(lambda: lb.elbo_loss(bnn(), spoilt(X, NAN), Y, num_data=9), "inputs NaN clean", lb.NotFiniteError)


def test_output_must_hold_a_tensor() -> None:
    pair = lb.bayesianize(Pair(6, 3), lb.MeanField())
    expect(lambda: pair.predict(X), "tuple logits wrap")
    expect(lambda: lb.elbo_loss(pair, X, Y, num_data=9), "tuple logits wrap")


@pytest.mark.parametrize("rule", ["local", "flipout"])
def test_unsupported_operations_are_named(rule: str) -> None:
    lstm = lb.bayesianize(CASES["lstm"].build(), lb.MeanField(rule=rule))
    words = f"'{rule}' torch.lstm 'lstm.weight_ih_l0' using(\"sample\") select= linear_in_weight"
    expect(lambda: lstm(CASES["lstm"].example()), words, lb.UnsupportedOperation)
    assert lstm.predict(CASES["lstm"].example(), rule="sample").samples == 30  # the suggested rule works
    positive = lb.bayesianize(Positive(6, 3), lb.MeanField(rule=rule))
    expect(lambda: positive(X), f"'{rule}' torch.exp 'weight' using(\"sample\")", lb.UnsupportedOperation)
    static = lb.bayesianize(StaticAttention(), lb.MeanField(rule=rule))
    expect(lambda: static(X), 'static_k using("sample")', lb.UnsupportedOperation)


def test_a_failed_pass_leaves_no_weights_in_the_network() -> None:
    lstm = lb.bayesianize(CASES["lstm"].build(), lb.MeanField(rule="local"))
    with pytest.raises(lb.UnsupportedOperation):
        lstm(CASES["lstm"].example())
    assert lstm.network.get_submodule("lstm").weight_ih_l0 is None


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)])
def test_alpha_dropout_is_refused(layer: nn.Module) -> None:
    network = lb.bayesianize(nn.Sequential(layer, nn.Linear(6, 3)), lb.MCDropout())
    expect(lambda: network(X), "alpha dropout nn.Dropout", lb.UnsupportedOperation)
    network.predict(X, rule="mean")
