"""The dial: trained models with fewer Bayesian weights."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from partial_cases import BATCHES, partial, train
from training_cases import assert_equal_models, clusters, expect, mlp, task

import leanbayes as lb


def dialled(method: Any) -> lb.BayesianModel:
    """A model whose spreads all differ."""
    bnn = lb.bayesianize(mlp(), method, data=BATCHES if isinstance(method, lb.PBN) else None)
    with torch.no_grad():
        rho = bnn.posterior.get_parameter("rho")
        rho.add_(torch.randn(rho.shape, generator=torch.Generator().manual_seed(0)))
    return bnn.eval()


DIALLED = [
    lb.MeanField(),
    lb.PBN(0.5),
    lb.PBN(0.5, prior=lb.Normal("std", center="pretrained")),
    lb.PBN(0.5, prior=lb.ScaleMixture()),
    lb.SSVI(0.5),
    lb.MeanField(prior=lb.Normal("fan_in", center="pretrained")),
]


@pytest.mark.parametrize("method", DIALLED, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("with_data", [False, True])
def test_a_smaller_rate_keeps_some_spreads_as_they_are(method: Any, with_data: bool, tmp_path: Path) -> None:
    bnn, data = dialled(method), BATCHES if with_data else None
    before = copy.deepcopy(bnn)
    variance, sets = bnn.posterior.variance().detach(), []
    for rate in (0.4, 0.1, 0.05, 0.0):
        small = bnn.restrict(rate, data)
        kept = small.posterior.variance().detach() > 0
        assert kept.sum() == int(rate * 144)
        torch.testing.assert_close(small.posterior.variance()[kept], variance[kept])
        assert torch.equal(small.posterior.mean(), bnn.posterior.mean())
        assert isinstance(small.method, lb.PBN)
        assert not small.training
        sets.append(kept)
        small.save(tmp_path / "model.safetensors")
        loaded = lb.load(tmp_path / "model.safetensors", mlp())
        assert_equal_models(loaded, small)
        assert torch.equal(loaded.predict(BATCHES[0][0], 3).probs, small.predict(BATCHES[0][0], 3).probs)
    for larger, smaller in itertools.pairwise(sets):
        assert (larger | ~smaller).all()
    again = bnn.restrict(0.4, data).restrict(0.1, data)
    assert torch.equal(again.posterior.variance() > 0, sets[1])
    assert_equal_models(bnn, before)


@pytest.mark.parametrize("method", DIALLED[:3], ids=lambda method: type(method).__name__)
def test_the_whole_dial_changes_nothing(method: Any) -> None:
    bnn, x = dialled(method), BATCHES[0][0]
    whole = bnn.restrict(1.0)
    assert_equal_models(whole, bnn)
    assert whole.method == bnn.method
    assert whole is not bnn
    with bnn.frozen(0), whole.frozen(0):
        assert torch.equal(bnn(x), whole(x))
    twin = bnn.restrict(0.4)
    with torch.no_grad():
        twin.posterior.get_parameter("mu").add_(1)
        twin.network.get_parameter("0.bias").add_(1)
    assert torch.equal(bnn.posterior.mean(), whole.posterior.mean())
    assert torch.equal(bnn.network.get_parameter("0.bias"), mlp().get_parameter("0.bias"))


def test_what_is_kept_is_what_has_shrunk_from_its_prior_or_matters_on_data() -> None:
    bnn = dialled(lb.MeanField(prior=lb.Normal("fan_in")))
    variance = bnn.posterior.variance().detach()
    scale: Any = bnn.posterior.prior.normal_terms().scale  # type: ignore[union-attr, operator]
    best = (variance / scale**2).argsort()[:14].sort().values
    assert torch.equal(partial(bnn.restrict(0.1)).index, best.int())
    scores = variance * lb.sensitivity(bnn, BATCHES).scores
    best = scores.argsort(descending=True)[:14].sort().values
    assert torch.equal(partial(bnn.restrict(0.1, BATCHES)).index, best.int())


def test_a_dialled_model_keeps_the_kl_of_what_is_left() -> None:
    bnn = dialled(lb.PBN(0.5, prior=lb.Normal("std", center="pretrained")))
    with torch.no_grad():
        bnn.posterior.get_parameter("mu").add_(0.1)
    small = bnn.restrict(0.1)
    where = torch.isin(partial(bnn).index, partial(small).index)
    terms: Any = partial(bnn)._terms()
    q = torch.distributions.Normal(small.posterior.mean()[partial(small).index.long()], partial(small).std())
    p = torch.distributions.Normal(terms.loc[where], terms.scale[where])
    torch.testing.assert_close(small.kl(), torch.distributions.kl_divergence(q, p).sum(), rtol=1e-4, atol=1e-5)


def test_the_dial_keeps_most_of_what_a_trained_model_says() -> None:
    """The spreads that it keeps move the predictions more than as many others do."""
    bnn = train(lb.MeanField(), epochs=40, lr=1e-2, scale_lr=0.05, temperature=0.5)
    x = task(clusters()).validation[:][0]
    with torch.no_grad(), bnn.using("moments"):
        whole = bnn(x).variance.sum()
        kept = {}
        for name, data in (("shrunk", None), ("data", BATCHES)):
            with (small := bnn.restrict(0.3, data)).using("moments"):
                kept[name] = (small(x).variance.sum() / whole).item()
    assert kept["shrunk"] > 0.3
    assert kept["data"] > 0.5


def test_the_dial_refuses_what_has_no_spreads() -> None:
    for method in (lb.Deterministic(), lb.Ensemble(2), lb.RigL(0.3), lb.VDP(variance="row")):
        bnn = lb.bayesianize(mlp(), method)
        expect(lambda bnn=bnn: bnn.restrict(0.1), "use PBN, MeanField or SSVI")  # type: ignore[misc]
    expect(lambda: dialled(lb.MeanField()).restrict(1.5), "from 0 to 1")
