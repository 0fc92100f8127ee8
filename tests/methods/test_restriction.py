"""`lb.restrict`: trained models with fewer Bayesian weights."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from partial_cases import BATCHES, partial, train
from training_cases import assert_equal_models, clusters, expect, mlp, task

import leanbayes as lb


def with_random_stds(method: Any) -> lb.BayesianModel:
    """A model whose stds all differ."""
    bnn = lb.bayesianize(mlp(), method, data=BATCHES if isinstance(method, lb.PBN) else None)
    with torch.no_grad():
        rho = bnn.posterior.get_parameter("rho")
        rho.add_(torch.randn(rho.shape, generator=torch.Generator().manual_seed(0)))
    return bnn.eval()


METHODS = [
    lb.MeanField(),
    lb.PBN(0.5),
    lb.PBN(0.5, prior=lb.Normal("std", center="pretrained")),
    lb.PBN(0.5, prior=lb.ScaleMixture()),
    lb.SSVI(0.5),
    lb.MeanField(prior=lb.Normal("fan_in", center="pretrained")),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("with_data", [False, True])
def test_a_smaller_rate_keeps_some_stds_unchanged(method: Any, with_data: bool, tmp_path: Path) -> None:
    bnn, data = with_random_stds(method), BATCHES if with_data else None
    before = copy.deepcopy(bnn)
    variance, sets = bnn.posterior.variance().detach(), []
    for rate in (0.4, 0.1, 0.05, 0.0):
        small = lb.restrict(bnn, rate, data)
        kept = small.posterior.variance().detach() > 0
        assert kept.sum() == int(rate * 144)
        torch.testing.assert_close(small.posterior.variance()[kept], variance[kept])
        assert torch.equal(small.posterior.mean(), bnn.posterior.mean())
        assert isinstance(small.method, lb.PBN)
        assert not small.training
        sets.append(kept)
        lb.save(small, tmp_path / "model.safetensors")
        loaded = lb.load(tmp_path / "model.safetensors", mlp())
        assert_equal_models(loaded, small)
        assert torch.equal(loaded.predict(BATCHES[0][0], 3).probs, small.predict(BATCHES[0][0], 3).probs)
    for larger, smaller in itertools.pairwise(sets):
        assert (larger | ~smaller).all()
    again = lb.restrict(lb.restrict(bnn, 0.4, data), 0.1, data)
    assert torch.equal(again.posterior.variance() > 0, sets[1])
    assert_equal_models(bnn, before)


@pytest.mark.parametrize("method", METHODS[:3], ids=lambda method: type(method).__name__)
def test_a_rate_of_1_changes_nothing(method: Any) -> None:
    bnn, x = with_random_stds(method), BATCHES[0][0]
    whole = lb.restrict(bnn, 1.0)
    assert_equal_models(whole, bnn)
    assert whole.method == bnn.method
    assert whole is not bnn
    with bnn.frozen(0), whole.frozen(0):
        assert torch.equal(bnn(x), whole(x))
    twin = lb.restrict(bnn, 0.4)
    with torch.no_grad():
        twin.posterior.get_parameter("mu").add_(1)
        twin.network.get_parameter("0.bias").add_(1)
    assert torch.equal(bnn.posterior.mean(), whole.posterior.mean())
    assert torch.equal(bnn.network.get_parameter("0.bias"), mlp().get_parameter("0.bias"))


def test_weights_are_ranked_by_shrinkage_from_the_prior_or_by_sensitivity() -> None:
    bnn = with_random_stds(lb.MeanField(prior=lb.Normal("fan_in")))
    variance = bnn.posterior.variance().detach()
    scale: Any = bnn.posterior.prior.normal_terms().scale  # type: ignore[union-attr, operator]
    best = (variance / scale**2).argsort()[:14].sort().values
    assert torch.equal(partial(lb.restrict(bnn, 0.1)).index, best.int())
    scores = variance * lb.sensitivity(bnn, BATCHES).scores
    best = scores.argsort(descending=True)[:14].sort().values
    assert torch.equal(partial(lb.restrict(bnn, 0.1, BATCHES)).index, best.int())


def test_the_kl_is_that_of_the_remaining_weights() -> None:
    bnn = with_random_stds(lb.PBN(0.5, prior=lb.Normal("std", center="pretrained")))
    with torch.no_grad():
        bnn.posterior.get_parameter("mu").add_(0.1)
    small = lb.restrict(bnn, 0.1)
    where = torch.isin(partial(bnn).index, partial(small).index)
    terms: Any = partial(bnn)._terms()
    q = torch.distributions.Normal(small.posterior.mean()[partial(small).index.long()], partial(small).std())
    p = torch.distributions.Normal(terms.loc[where], terms.scale[where])
    torch.testing.assert_close(small.kl(), torch.distributions.kl_divergence(q, p).sum(), rtol=1e-4, atol=1e-5)


def test_the_remaining_weights_have_most_of_the_output_variance() -> None:
    """30 % of the stds of a trained model keep more than 30 % of the variance."""
    bnn = train(lb.MeanField(), epochs=40, lr=1e-2, scale_lr=0.05, temperature=0.5)
    x = task(clusters()).validation[:][0]
    with torch.no_grad(), bnn.using("moments"):
        whole = bnn(x).variance.sum()
        kept = {}
        for name, data in (("shrunk", None), ("data", BATCHES)):
            with (small := lb.restrict(bnn, 0.3, data)).using("moments"):
                kept[name] = (small(x).variance.sum() / whole).item()
    assert kept["shrunk"] > 0.3
    assert kept["data"] > 0.5


def test_methods_without_a_std_per_weight_raise_an_error() -> None:
    for method in (lb.Deterministic(), lb.Ensemble(2), lb.RigL(0.3), lb.VDP(variance="row")):
        bnn = lb.bayesianize(mlp(), method)
        expect(lambda bnn=bnn: lb.restrict(bnn, 0.1), "use PBN, MeanField or SSVI")  # type: ignore[misc]
    expect(lambda: lb.restrict(with_random_stds(lb.MeanField()), 1.5), "from 0 to 1")
