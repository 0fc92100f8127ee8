"""`lb.delta_method` against the full Jacobian, against samples, and its errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from network_cases import CASES, hf_cases
from torch import Tensor, nn

import leanbayes as lb
from leanbayes import networks
from leanbayes.core.network import call_with, map_tensors


def brute_force(bnn: lb.BayesianModel, x: Any, function: Callable[[Any], Tensor]) -> Tensor:
    """Return the diagonal of J diag(σ²) Jᵀ, with the full Jacobian by torch.func."""

    def of_weights(flat: Tensor) -> Tensor:
        with bnn.holding(flat) as network:
            return function(call_with(network, x))

    jacobian = torch.func.jacrev(of_weights, chunk_size=1)(bnn.posterior.mean().detach())
    return (jacobian.square() * bnn.posterior.variance().detach()).sum(-1)


def in_double(x: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, x)


def segmentation_model(method: lb.Method | None = None) -> tuple[lb.BayesianModel, Tensor]:
    torch.manual_seed(0)
    network = networks.UNet(3, channels=1, width=2).double()
    return lb.bayesianize(network, method or lb.MeanField(init_std=0.02)), torch.randn(3, 1, 16, 16).double()


def areas(logits: Tensor) -> Tensor:
    """Return the area of each class but the first, in pixels."""
    return logits.softmax(1)[:, 1:].sum((2, 3))


def test_areas_of_segments_have_the_variance_of_the_full_jacobian() -> None:
    bnn, images = segmentation_model()
    bnn.eval()
    found = lb.delta_method(bnn, images, areas)
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(found.loc, areas(bnn(images)))
    assert found.variance.min() > 0
    torch.testing.assert_close(found.variance, brute_force(bnn, images, areas))
    torch.testing.assert_close(found.stddev, found.variance.sqrt())


def test_areas_of_segments_vary_as_samples_do() -> None:
    """The formula is of first order, so the noise is small. Pixels are correlated: independent ones would vary less."""
    bnn, images = segmentation_model(lb.MeanField(init_std=0.003))
    samples = torch.stack([areas(logits) for logits in bnn.predict(images, samples=1000, keep_outputs=True).outputs])
    ratio = lb.delta_method(bnn, images, areas).stddev / samples.std(0)
    assert ratio.min() > 0.9
    assert ratio.max() < 1.1


def test_one_value_per_example() -> None:
    bnn, images = segmentation_model(lb.SSVI(density=0.3, init_std=0.05))
    one = lb.delta_method(bnn, images, lambda logits: areas(logits)[:, 0])
    assert one.shape == (3,)
    torch.testing.assert_close(one.variance, lb.delta_method(bnn, images, areas).variance[:, 0])
    torch.testing.assert_close(one.variance[1:2], lb.delta_method(bnn, images[1:2], areas).variance[:, 0])


@pytest.mark.parametrize("name", ["hf_bert", "hf_gpt2"])
def test_chosen_tokens_of_transformers(name: str) -> None:
    """The function gets the whole output of the network, here one with `logits`."""
    case = hf_cases()[name]
    likelihood = lb.Categorical(class_dim=2) if name == "hf_gpt2" else None
    bnn = lb.bayesianize(case.build().double().eval(), lb.MeanField(init_std=0.1), likelihood=likelihood)

    def score(output: Any) -> Tensor:
        logits: Tensor = output.logits if output.logits.dim() == 2 else output.logits[:, -1]
        return logits.log_softmax(-1)[:, [0, 2]]

    x = in_double(case.example())
    torch.testing.assert_close(lb.delta_method(bnn, x, score).variance, brute_force(bnn, x, score))


class Returning(nn.Module):
    """A network whose output is whatever a function makes of it."""

    def __init__(self, network: nn.Module, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.network(x))


@pytest.mark.parametrize(
    ("output", "function"),
    [
        (lambda out: {"boxes": out, "names": ["a"]}, lambda found: found["boxes"]),
        (lambda out: (out.exp(), out), lambda found: found[1]),
        (lambda out: torch.complex(out, out), lambda found: found.real),
        (lambda out: list(out.unbind(1)), lambda found: torch.stack(found, 1)),
    ],
    ids=["dict", "tuple", "complex", "list"],
)
def test_the_function_gets_outputs_that_no_likelihood_scores(output: Any, function: Any) -> None:
    network, x = CASES["mlp"].build(), CASES["mlp"].example()
    expected = lb.delta_method(lb.bayesianize(network, lb.MeanField()), x, lambda out: out)
    found = lb.delta_method(lb.bayesianize(Returning(network, output), lb.MeanField()), x, function)
    assert expected.variance.min() > 0
    torch.testing.assert_close(found.loc, expected.loc)
    torch.testing.assert_close(found.variance, expected.variance)


def test_the_mode_the_rule_and_the_gradients_of_the_model_stay() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField()).train()
    lb.delta_method(bnn, CASES["cnn"].example(), lambda logits: logits[:, 0])
    assert bnn.training
    assert bnn.rule == "sample"
    assert all(parameter.grad is None for parameter in bnn.parameters())
    mean = next(buffer for name, buffer in bnn.named_buffers() if name.endswith("running_mean"))
    assert mean.abs().max() == 0  # of BatchNorm, which would have changed in training mode


def test_a_posterior_without_noise_has_no_variance() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.PBN(0.0, sensitivity="random"))
    found = lb.delta_method(bnn, CASES["mlp"].example(), lambda logits: logits.softmax(1))
    assert found.variance.max() == 0


def test_mistakes_are_reported_in_one_sentence() -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.MeanField()), CASES["mlp"].example()
    dense, images = segmentation_model()
    swag = lb.bayesianize(CASES["mlp"].build(), lb.SWAG())
    rows = len(x)

    def run(function: Any, inputs: Any = x, model: Any = bnn, **settings: Any) -> Callable[[], Any]:
        return lambda: lb.delta_method(model, inputs, function, **settings)

    calls = {
        rf"must return one value per example, a tensor of shape \({rows},\), or several": run(lambda out: out.sum()),
        r"but it returned a tensor of shape \(3, 3, 16, 16\)": run(lambda out: out, images, dense),
        "but it returned None": run(lambda out: None),
        "no gradient with respect to the output": run(lambda out: out.argmax(1)),
        "no gradient .*: leave out": run(lambda out: out.detach()[:, 0]),
        r"256 values per example, .* raise max_passes=16\.": run(lambda out: out[:, 0].flatten(1), images, dense),
        rf"but it returned a tensor of shape \({rows}, 0\)": run(lambda out: out[:, :0]),
        "returned complex numbers": run(lambda out: torch.complex(out, out)),
        "max_passes=0 must be at least 1": run(lambda out: out, max_passes=0),
        "function=3 must be a function": run(3),
        r"delta_method\(\) needs a tensor": run(lambda out: out, "text"),
        r"delta_method\(\) got no examples": run(lambda out: out, x[:0]),
        "are correlated": run(lambda out: out, model=swag),
        "has no Bayesian weights": run(lambda out: out, model=lb.bayesianize(nn.Linear(4, 2), lb.Deterministic())),
    }
    for message, call in calls.items():
        with pytest.raises(lb.LeanBayesError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
