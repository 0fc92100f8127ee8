"""Transforms of torch.func: gradients, per-sample gradients and Jacobians of networks with random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import leanbayes as lb

RULES = ["sample", "local", "flipout", "moments", "mean"]


def _model(rule: str, **method: Any) -> lb.BayesianModel:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.1, **method), seed=0)
    bnn.rule = rule
    return bnn


def _loss(bnn: lb.BayesianModel, with_kl: bool = False) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    draw = bnn.next_draw(with_kl=with_kl)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result = functional_call(bnn, parameters, (x,), {"_draw": draw})
        output, kl = result if with_kl else (result, 0.0)
        squares = output.loc.square() + output.variance if isinstance(output, lb.Moments) else output.square()
        return squares.sum() + 0.1 * kl

    return loss, {name: value for name, value in bnn.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_grad_equals_that_of_backward(rule: str, with_kl: bool) -> None:
    loss, parameters = _loss(_model(rule), with_kl)
    x = torch.randn(5, 2, 6)
    expected = torch.autograd.grad(loss(parameters, x), list(parameters.values()), materialize_grads=True)
    for found, true in zip(grad(loss)(parameters, x).values(), expected, strict=True):
        torch.testing.assert_close(found, true)


@pytest.mark.parametrize("rule", RULES)
def test_per_sample_gradients_are_those_of_single_examples(rule: str) -> None:
    loss, parameters = _loss(_model(rule))
    x = torch.randn(5, 1, 2, 6)
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for number, example in enumerate(x):
        for name, true in grad(loss)(parameters, example).items():
            torch.testing.assert_close(found[name][number], true)


@pytest.mark.parametrize("rule", RULES)
def test_jacobian(rule: str) -> None:
    bnn = _model(rule)
    draw = bnn.next_draw()

    def output(x: Tensor) -> Tensor:
        result = bnn(x, _draw=draw)
        return result.loc if isinstance(result, lb.Moments) else result

    x = torch.randn(2, 2, 6)
    expected = torch.autograd.functional.jacobian(output, x)
    torch.testing.assert_close(jacrev(output)(x), expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_plain_call_draws_its_own_sample(rule: str) -> None:
    """The counter of the model advances inside of a transform as it does outside."""
    bnn, x = _model(rule), torch.randn(2, 2, 6)
    parameters: dict[str, Tensor] = dict(bnn.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output = functional_call(bnn, parameters, (x,))
        return (output.loc if isinstance(output, lb.Moments) else output).square().sum()

    def position() -> int:
        return int(bnn.noise.state[1])

    start = position()
    found = grad(loss)(parameters, x)
    assert position() == start + 1
    bnn.noise.state[1] = start
    expected = torch.autograd.grad(loss(parameters, x), list(parameters.values()), materialize_grads=True)
    torch.testing.assert_close(list(found.values()), list(expected))
    bnn.noise.state[1] = start
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    assert position() == start + 1
    bnn.noise.state[1] = start
    alone = grad(loss)(parameters, x[1:])
    torch.testing.assert_close({name: value[1] for name, value in each.items()}, alone)
    jacobian: Any = jacrev(lambda x: loss(parameters, x))(x)
    assert jacobian.shape == x.shape


def test_vmap_over_keys_gives_one_sample_each() -> None:
    bnn = _model("sample")
    x, draws = torch.randn(2, 2, 6), [bnn.next_draw() for _ in range(3)]
    keys = torch.stack([draw.key for draw in draws])
    found = vmap(lambda key: bnn(x, _draw=draws[0]._replace(key=key)))(keys)
    torch.testing.assert_close(found, torch.stack([bnn(x, _draw=draw) for draw in draws]))


def test_a_variance_of_zero_has_a_finite_gradient() -> None:
    bnn = _model("local")
    nn.init.constant_(bnn.posterior.rho, -200.0)  # type: ignore[arg-type]
    loss, parameters = _loss(bnn)
    assert all(value.isfinite().all() for value in grad(loss)(parameters, torch.randn(3, 2, 6)).values())
