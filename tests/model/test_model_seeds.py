"""Models, forks and the workers of a DataLoader have different noise; weight decay does not touch the stds."""

import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import leanbayes as lb


def model(seed: int | None = None) -> lb.BayesianModel[lb.ClassPrediction]:
    torch.manual_seed(0)
    return lb.bayesianize(nn.Linear(4, 3), lb.MeanField(init_std=1.0), seed=seed)


def test_models_have_different_noise_by_default() -> None:
    x = torch.randn(5, 4)
    first, second = model(), model()
    assert not torch.equal(first(x), second(x))
    assert not torch.equal(first.predict(x, 3).probs, second.predict(x, 3).probs)


def test_models_of_one_seed_have_the_same_noise() -> None:
    x = torch.randn(5, 4)
    assert torch.equal(model(7)(x), model(7)(x))
    assert not torch.equal(model(7)(x), model(8)(x))


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_seeds_of_more_than_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(lb.LeanBayesError, match=r"seed=-?\d+ must be a whole number"):
        model(seed)


class Sampled(Dataset[Tensor]):
    """Weights that a model samples in the worker that reads the example."""

    def __init__(self) -> None:
        self.bnn = model(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.bnn(torch.eye(4))


def test_workers_of_a_loader_do_not_repeat_each_other() -> None:
    """Two workers draw two samples each, from copies of one counter, and new workers in the next epoch."""

    def two_epochs() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(Sampled(), batch_size=2, num_workers=2, multiprocessing_context="fork", generator=generator)
        return torch.cat([*loader, *loader])

    samples = two_epochs()
    assert len(samples.flatten(1).unique(dim=0)) == 8
    assert torch.equal(two_epochs(), samples)  # the generator of the loader decides


def sampled_in_a_fork(*models: lb.BayesianModel[Any]) -> list[Tensor]:
    """Return samples of models in a forked process, and the sample of a model that is made there."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def send() -> None:
        with torch.no_grad():
            theirs.send([bnn(torch.eye(4)).tolist() for bnn in (*models, model(0))])

    process = context.Process(target=send)
    process.start()
    found = [torch.tensor(values) for values in ours.recv()]
    process.join()
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_processes_do_not_repeat_each_other() -> None:
    bnn = model(0)
    (first, fresh), (second, fresh_again) = sampled_in_a_fork(bnn), sampled_in_a_fork(bnn)
    with torch.no_grad():
        own, other = bnn(torch.eye(4)), model(0)(torch.eye(4))
    assert torch.equal(own, other)  # the noise of the parent stays the same
    assert not torch.equal(first, own)
    assert not torch.equal(second, own)
    assert not torch.equal(first, second)
    torch.testing.assert_close(fresh, own)  # a model that is made in a fork has its usual noise
    torch.testing.assert_close(fresh_again, own)


def test_parameter_groups_keep_weight_decay_from_the_stds() -> None:
    bnn = lb.bayesianize(nn.Linear(4, 3), lb.MeanField(), likelihood=lb.Gaussian(learned=True))
    groups = bnn.parameter_groups(scale_lr=0.5)
    names = {id(p): name for name, p in bnn.named_parameters()}
    assert [sorted(names[id(p)] for p in group["params"]) for group in groups] == [
        ["network.bias", "posterior.mu"],
        ["likelihood.rho", "posterior.rho"],
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.9)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.9), (0.5, 0.0)]
    before = {name: p.detach().clone() for name, p in bnn.named_parameters()}
    for p in bnn.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in bnn.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"network.bias", "posterior.mu"}


def test_a_model_without_stds_has_one_group() -> None:
    assert len(lb.bayesianize(nn.Linear(4, 3), lb.Deterministic()).parameter_groups()) == 1
