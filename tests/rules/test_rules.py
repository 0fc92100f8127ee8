"""Each rule against the distribution of its outputs, for every way that a layer may use a random weight."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb
from leanbayes import rules
from leanbayes.core import noise

SAMPLES = 4000


class Use(nn.Module):
    """A network that consists of one function of one weight."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


BIAS = rand(3)
# name: (weight shape, input, function)
USES: dict[str, tuple[tuple[int, ...], Tensor, Callable[[Tensor, Any], Tensor]]] = {
    "linear": ((3, 4), rand(2, 4), lambda x, w: F.linear(x, w, BIAS)),
    "linear unbatched": ((3, 4), rand(4), lambda x, w: F.linear(x, w)),
    "linear sequence": ((3, 4), rand(2, 5, 4), lambda x, w: F.linear(x, weight=w, bias=BIAS)),
    "conv1d": ((3, 2, 3), rand(2, 2, 6), lambda x, w: F.conv1d(x, w, BIAS, padding=1)),
    "conv2d": ((3, 2, 2, 2), rand(2, 2, 5, 5), lambda x, w: F.conv2d(x, w, BIAS, 2, 1, 1, 1)),
    "conv2d in groups": ((4, 2, 2, 2), rand(2, 4, 5, 5), lambda x, w: F.conv2d(x, w, groups=2, dilation=2)),
    "conv2d unbatched": ((3, 2, 2, 2), rand(2, 5, 5), lambda x, w: F.conv2d(x, w, BIAS, stride=2)),
    "conv3d": ((3, 1, 2, 2, 2), rand(2, 1, 3, 3, 3), lambda x, w: F.conv3d(x, w)),
    "conv_transpose1d": ((2, 3, 3), rand(2, 2, 4), lambda x, w: F.conv_transpose1d(x, w, BIAS)),
    "conv_transpose2d": (
        (2, 3, 3, 3),
        rand(2, 2, 3, 3),
        lambda x, w: F.conv_transpose2d(x, w, BIAS, stride=2, padding=1, output_padding=1),
    ),
    "conv_transpose3d": ((2, 3, 2, 2, 2), rand(2, 2, 2, 2, 2), lambda x, w: F.conv_transpose3d(x, w)),
    "bilinear": ((3, 4, 4), rand(2, 4), lambda x, w: F.bilinear(x, x, w, BIAS)),
    "matmul": ((4, 3), rand(2, 4), lambda x, w: x @ w),
    "matmul of a transpose": ((3, 4), rand(2, 4), lambda x, w: torch.matmul(x, w.t())),
    "addmm": ((4, 3), rand(2, 4), lambda x, w: torch.addmm(BIAS, x, w)),
    "addmm with factors": ((4, 3), rand(2, 4), lambda x, w: torch.addmm(BIAS, x, w, beta=2, alpha=0.5)),
    "reshaped": ((12,), rand(2, 4), lambda x, w: F.linear(x, w.view(3, 4))),
    "sliced": ((6, 4), rand(2, 4), lambda x, w: F.linear(x, w[:3], BIAS)),
    "chunked": ((6, 4), rand(2, 4), lambda x, w: F.linear(x, w.chunk(2)[1])),
    "by indices": ((6, 4), rand(2, 4), lambda x, w: F.linear(x, w[torch.tensor([4, 0, 1])], BIAS)),
    "flipped": ((3, 4), rand(2, 4), lambda x, w: F.linear(x, w.flip(0))),
    "scaled": ((3, 4), rand(2, 4), lambda x, w: F.linear(x, 0.5 * w * 3 / 2)),
    "scaled by a tensor": ((3, 4), rand(2, 4), lambda x, w: F.linear(x, BIAS[:, None] * w)),
}


def moments_of(bnn: lb.BayesianModel, x: Tensor, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        outputs = torch.stack([bnn(x) for _ in range(samples)])
    return outputs.mean(0), outputs.var(0)


# The rule `sample` gives plain tensors, so one function is enough.
@pytest.mark.parametrize(("name", "rule"), [("linear", "sample"), *itertools.product(USES, ["flipout", "local"])])
def test_outputs_have_the_mean_and_variance_of_a_weight_sample(name: str, rule: str) -> None:
    shape, x, function = USES[name]
    net = Use(shape, function)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.3, relative=False, rule=rule), select="weight")
    mean, variance = moments_of(bnn, x)
    # The outputs are linear in the weight, so their moments follow from the Jacobian.
    expected = net(x).detach()
    jacobian = torch.autograd.functional.jacobian(lambda w: function(x, w), net.weight.detach())
    true_variance = 0.3**2 * jacobian.square().flatten(expected.dim()).sum(-1)
    standard_error = (true_variance / SAMPLES).sqrt()
    assert ((mean - expected).abs() <= 5 * standard_error + 1e-12).all()
    ratio = variance[true_variance > 0] / true_variance[true_variance > 0]
    assert ((ratio - 1).abs() < 6 * (2 / SAMPLES) ** 0.5).all()


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_embedding(rule: str) -> None:
    net = nn.Embedding(5, 3, padding_idx=0, dtype=torch.float64)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.2, relative=False, rule=rule))
    mean, variance = moments_of(bnn, torch.tensor([[1, 4], [2, 2]]))
    torch.testing.assert_close(mean, net(torch.tensor([[1, 4], [2, 2]])), atol=5 * 0.2 / SAMPLES**0.5, rtol=0)
    torch.testing.assert_close(variance, torch.full_like(variance, 0.04), rtol=6 * (2 / SAMPLES) ** 0.5, atol=0)


def correlation(bnn: lb.BayesianModel, x: Tensor, a: tuple[int, ...], b: tuple[int, ...]) -> float:
    with torch.no_grad():
        outputs = torch.stack([bnn(x) for _ in range(SAMPLES)])
    pair = torch.stack([outputs.movedim(0, -1)[a], outputs.movedim(0, -1)[b]])
    return float(torch.corrcoef(pair)[0, 1])


@pytest.mark.parametrize(("rule", "pixels", "examples"), [("sample", 1, 1), ("flipout", 1, 0), ("local", 0, 0)])
def test_correlations_of_pixels_and_examples(rule: str, pixels: float, examples: float) -> None:
    # A 1×1 convolution of a constant image: all pixels share the noise of a weight sample.
    net = nn.Conv2d(1, 1, 1, bias=False)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.5, relative=False, rule=rule))
    x = torch.ones(2, 1, 2, 2)
    assert abs(correlation(bnn, x, (0, 0, 0, 0), (0, 0, 1, 1)) - pixels) < 0.08
    assert abs(correlation(bnn, x, (0, 0, 0, 0), (1, 0, 0, 0)) - examples) < 0.08


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_frozen_noise_repeats(rule: str) -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), lb.MeanField(rule=rule))
    x = torch.randn(3, 4)
    with bnn.frozen(1):
        first, second = bnn(x), bnn(x)
    with bnn.frozen(2):
        other = bnn(x)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not torch.equal(bnn(x), bnn(x))


ATTENTION: dict[str, dict[str, Any]] = {
    "self": {},
    "no weights": {"need_weights": False},
    "per head": {"average_attn_weights": False},
    "causal": {"attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1), "need_weights": False},
    "float mask": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
    "mask per head": {"attn_mask": torch.randn(6, 5, 5, dtype=torch.float64)},
    "padding": {"key_padding_mask": torch.tensor([[False, False, False, True, True]] * 3)},
    "both masks": {
        "attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1),
        "key_padding_mask": torch.tensor([[False, False, False, False, True]] * 3),
    },
}


@pytest.mark.parametrize("rule", ["flipout", "local"])
@pytest.mark.parametrize("masks", ATTENTION)
@pytest.mark.parametrize("settings", [{}, {"batch_first": True}, {"bias": False}, {"add_zero_attn": True},
                                      {"add_bias_kv": True}, {"kdim": 4, "vdim": 6}])  # fmt: skip
def test_attention_without_noise_equals_that_of_torch(settings: dict[str, Any], masks: str, rule: str) -> None:
    net = nn.MultiheadAttention(8, 2, dtype=torch.float64, **settings)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=1e-12, relative=False, rule=rule))
    query = rand(5, 3, 8)
    key = rand(5, 3, settings["kdim"]) if "kdim" in settings else query
    value = rand(5, 3, settings["vdim"]) if "vdim" in settings else query
    if settings.get("batch_first"):
        query = key = value = query.transpose(0, 1)
    for training in (True, False):
        net.train(training)
        bnn.train(training)
        expected, expected_weights = net(query, key, value, **ATTENTION[masks])
        output, weights = bnn(query, key, value, **ATTENTION[masks])
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights, expected_weights)


def test_attention_without_a_batch_and_across_sequences() -> None:
    net = nn.MultiheadAttention(8, 2, dtype=torch.float64)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=1e-12, relative=False, rule="local"))
    for query, other in ((rand(5, 8), rand(7, 8)), (rand(5, 2, 8), rand(7, 2, 8))):
        torch.testing.assert_close(bnn(query, other, other), net(query, other, other))


@pytest.mark.parametrize("rule", ["local", "flipout"])
@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x, w: x * w.exp(), "exp"),
        (lambda x, w: torch.sin(w) * x, "sin"),
        (lambda x, w: F.linear(x, w * w), "product"),
        (lambda x, w: F.linear(x, torch.mul(w, w)), "product"),
        (lambda x, w: x / w, "div"),
        (lambda x, w: F.linear(x, w / w), "division"),
        (lambda x, w: F.linear(w, x), "linear"),
        (lambda x, w: x + w, "add"),
        (lambda x, w: F.linear(x, w - 1), "arithmetic"),
    ],
)
def test_an_unsupported_operation_raises_an_error_that_names_it(
    function: Callable[[Tensor, Any], Tensor], operation: str, rule: str
) -> None:
    bnn = lb.bayesianize(Use((4, 4), function), lb.MeanField(rule=rule), select="weight")
    with pytest.raises(lb.UnsupportedOperation, match=rf"(?s){rule}.*{operation}.*'weight'.*sample"):
        bnn(rand(4, 4))


COPIES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "rows by expand": lambda x, w: F.linear(x, w[:1].expand(8, 4)),
    "columns by expand": lambda x, w: F.linear(x, w[:, :1].expand(4, 4)),
    "expanded, reshaped and scaled": lambda x, w: F.linear(x, 2 * w[0].expand(3, 4).reshape(3, 4)),
    "rows by indices": lambda x, w: F.linear(x, w[[0, 0]]),
    "more rows by indices": lambda x, w: F.linear(x, w[[0, 1, 2, 3, 0]]),
    "columns by indices": lambda x, w: F.linear(x, w[:, torch.tensor([0, 0, 1, 1])]),
    "selected and transposed": lambda x, w: x @ w.index_select(0, torch.tensor([1, 1, 0, 0])).T,
    "repeated": lambda x, w: F.linear(x, w[:1].repeat(3, 1)),
    "by a factor": lambda x, w: F.linear(x, w[:1] * torch.ones(3, 1)),
    "of a kernel": lambda x, w: F.conv1d(x[:, None], w[:1, None].expand(2, 1, 4)),
}


@pytest.mark.parametrize("rule", ["local", "flipout", "covariance", "moments"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_weight_raise_an_error(name: str, rule: str) -> None:
    bnn = lb.bayesianize(Use((4, 4), COPIES[name]), lb.MeanField(rule=rule), select="weight")
    with pytest.raises(lb.UnsupportedOperation, match=rf"(?s){rule}.*copies.*: .*bnn.using"):
        bnn(rand(4, 4))
    with bnn.using("sample"):
        assert bnn(rand(4, 4)).shape == bnn.to_deterministic()(rand(4, 4)).shape


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.bmm(x[:, None], w.expand(3, 4, 4)),
        lambda x, w: torch.einsum("bi,bio->bo", x, w.expand(3, 4, 4)),
        lambda x, w: F.linear(x, w[[3, 0]]),
        lambda x, w: F.linear(x, w[torch.tensor([True, False, True, True])]),
        lambda x, w: x + w[:1].expand(3, 4),
    ],
)
def test_moments_support_one_copy_per_example_and_indices_without_copies(
    function: Callable[[Tensor, Any], Tensor],
) -> None:
    bnn = lb.bayesianize(Use((4, 4), function), lb.MeanField(init_std=0.3, relative=False), select="weight")
    mean, variance = moments_of(bnn, rand(3, 4))
    with bnn.using("moments"):
        found: Any = bnn(rand(3, 4))
    assert ((found.loc - mean).abs() <= 5 * (variance / SAMPLES).sqrt()).all()
    torch.testing.assert_close(found.variance, variance, rtol=6 * (2 / SAMPLES) ** 0.5, atol=0)


def test_a_user_can_register_a_linear_operation() -> None:
    def double_linear(x: Tensor, weight: Any) -> Tensor:
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(double_linear, (x, weight), x, weight)
        return 2 * F.linear(x, weight)

    bnn = lb.bayesianize(Use((3, 4), double_linear), lb.MeanField(rule="local"), select="weight")
    with pytest.raises(lb.UnsupportedOperation, match="double_linear"):
        bnn(rand(2, 4))
    rules.linear_in_weight(double_linear, "x weight", inputs="x", bias=None)
    assert bnn(rand(2, 4)).shape == (2, 3)


def test_using_restores_the_rule_after_an_error() -> None:
    bnn = lb.bayesianize(nn.Linear(2, 2), lb.MeanField())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), bnn.using("local"):
        bnn(torch.randn(3, 3))
    assert bnn.rule == "sample"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 33, 1000])
def test_noise_in_half_precision_is_rounded_noise(dtype: torch.dtype, size: int) -> None:
    key = noise.make_key(1, 2)
    single, half = (noise.normal(torch.empty(size, dtype=own), key, 3) for own in (torch.float32, dtype))
    torch.testing.assert_close(half, single.to(dtype), rtol=0, atol=0)
    signs = [noise.signs(torch.empty(1, dtype=own), (size,), key, 3) for own in (torch.float32, dtype)]
    assert torch.equal(signs[0], signs[1].float())


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_may_have_settings() -> None:
    rule = rules.Adjoint(mean="moments", margins=3)
    text = "adjoint:mean=moments,margins=3"
    assert rules.get_rule(text) == rule
    assert rules.get_rule(rule) is rule
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)), lb.MeanField(init_std=0.3)).eval()
    x = rand(6, 4).float()
    assert torch.equal(bnn.predict(x, rule=text).probs, bnn.predict(x, rule=rule).probs)
    assert not torch.equal(bnn.predict(x, rule="adjoint").probs, bnn.predict(x, rule=rule).probs)
    bnn.rule = text
    assert (bnn.rule, bnn.current_rule) == ("adjoint", rule)


def test_settings_of_a_name_are_added_to_those_of_the_method() -> None:
    made = lb.VDP.paper().make_rule("moments:maps=uniform")
    assert made == rules.MomentPropagation("none", "paper", "uniform")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adjoint:margin=3", "did you mean margins?"),
        ("adjoint:margins=many", "margins='many' must be a whole number"),
        ("adjoint:margins", "write setting=value"),
        ("adjoint:margins={[]:1}", "margins='{[]:1}' must be a whole number"),
        (f"adjoint:margins={'-' * 6000}1", "must be a whole number"),
        ("sample:margins=3", "The rule 'sample' has no settings"),
        ("adjont:margins=3", "did you mean adjoint?"),
    ],
)
def test_wrong_settings_of_a_name_raise_an_error(name: str, expected: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=re.escape(expected)):
        rules.get_rule(name)
