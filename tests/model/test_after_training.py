"""After training: refreshed BatchNorm statistics, the plain network at the mean, and one sample for many calls."""

import copy
from typing import Any

import pytest
import torch
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.model.bayesian import BayesianModel

RULES = ["sample", "flipout", "local", "mean"]


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str) -> tuple[BayesianModel, Tensor]:
    return lb.bayesianize(CASES[name].build(), lb.MeanField(init_std=0.3)), CASES[name].example()


def statistics(module: nn.Module) -> list[Tensor]:
    return [b.clone() for name, b in module.named_buffers() if "running" in name or "tracked" in name]


def test_refreshed_statistics_are_averages_over_batches_and_samples() -> None:
    bnn, _ = make("cnn")
    batches = [torch.randn(8, 3, 8, 8) + i for i in range(3)]
    bnn.train()(5 * batches[0])  # earlier statistics do not count
    assert bnn.refresh_batchnorm(batches, generator=generator()) == 2
    source, means, variances = generator(), [], []
    with torch.no_grad():
        for batch in batches:
            with bnn.eval().drawn(bnn.next_draw(source)):
                first = bnn.network.get_submodule("0")(batch)
            means.append(first.mean((0, 2, 3)))
            variances.append(first.var((0, 2, 3)))
    norm: Any = bnn.network.get_submodule("1")
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0))
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("labeled", [False, True])
@pytest.mark.parametrize("name", ["cnn", "resnet", "conv1d"])
def test_without_noise_refreshing_is_the_cumulative_average_of_torch(name: str, labeled: bool) -> None:
    model = CASES[name].build()
    bnn = lb.bayesianize(model, lb.MeanField(init_std=1e-7))
    batches = [CASES[name].example() * i for i in (1.0, 2.0, 3.0)]
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    for batch in batches:
        model.train()(batch)
    given_batches = [(batch, torch.zeros(4)) for batch in batches] if labeled else batches
    assert bnn.refresh_batchnorm(iter(given_batches)) == len(norms)
    for ours, theirs in zip(statistics(bnn), statistics(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_refreshing_restores_momentum_and_modes(fails: bool) -> None:
    bnn, x = make("cnn")
    norms: list[Any] = [bnn.network.get_submodule("1"), bnn.network.get_submodule("5")]
    norms[0].momentum, norms[1].momentum = 0.3, None
    bnn.train()
    norms[0].eval()
    modes = [module.training for module in bnn.modules()]
    if fails:
        with pytest.raises(RuntimeError):
            bnn.refresh_batchnorm([x, x[:, :2]])
    else:
        bnn.refresh_batchnorm([x, x])
    assert [norm.momentum for norm in norms] == [0.3, None]
    assert [module.training for module in bnn.modules()] == modes


def test_refreshing_needs_batches_only_for_batchnorm_layers() -> None:
    assert make("mlp")[0].refresh_batchnorm([]) == 0
    with pytest.raises(lb.LeanBayesError, match="batches"):
        make("cnn")[0].refresh_batchnorm([])


@pytest.mark.parametrize("name", CASES)
def test_to_deterministic_is_the_plain_mean_network(name: str) -> None:
    model, x = CASES[name].build().eval(), CASES[name].example()
    bnn = lb.bayesianize(model, lb.MeanField())
    with torch.no_grad():
        bnn.posterior.get_parameter("mu").mul_(1.1)
    plain = bnn.to_deterministic()
    assert not any(type(module).__module__.startswith("leanbayes") for module in plain.modules())
    assert {*plain.state_dict()} == {*model.state_dict()}
    assert {n for n, _ in plain.named_parameters()} == {n for n, _ in model.named_parameters()}  # tied stay tied
    with bnn.using("mean"), torch.no_grad():
        torch.testing.assert_close(plain(x), bnn(x), rtol=0, atol=0)
    plain.train()(x).sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in plain.parameters())
    model.load_state_dict(plain.state_dict())
    assert bnn.posterior.get_parameter("mu").grad is None
    copy.deepcopy(plain)


@pytest.mark.parametrize("name", ["mlp", "vit_mha", "lstm"])
def test_to_deterministic_keeps_the_order_of_parameters(name: str) -> None:
    """Optimizer states are matched by this order."""
    model = CASES[name].build()
    plain = lb.bayesianize(model, lb.MeanField()).to_deterministic()
    assert list(plain.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("rule", RULES)
def test_drawn_keeps_one_sample(rule: str) -> None:
    bnn, x = make("mlp")
    bnn.rule = rule
    with torch.no_grad():
        with bnn.drawn() as call:
            first, second = call(x), call(x)
            assert bnn.network.get_submodule("0").weight is not None
        assert first.equal(second)
        with bnn.drawn() as call:
            assert call(x).equal(first) == (rule == "mean")
    assert bnn.network.get_submodule("0").weight is None


def test_a_model_made_in_inference_mode_can_be_trained() -> None:
    net, x = CASES["cnn"].build(), CASES["cnn"].example()
    with torch.inference_mode():
        bnn = lb.bayesianize(net, lb.MeanField())
        first, second = bnn.predict(x, 2), bnn.predict(x, 2)
    assert not torch.equal(first.probs, second.probs)
    lb.elbo_loss(bnn, x, first.label.clone(), num_data=100).backward()
    assert bnn.scale_parameters()[0].grad is not None


def test_repr_of_a_model_names_method_rule_and_weights() -> None:
    bnn, _ = make("cnn")
    assert f"MeanField, rule='sample', {bnn.layout.numel:,} Bayesian weights" in str(bnn)
