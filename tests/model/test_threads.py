"""Threads may share a model: each gets the answer that it would get alone, and the model is as before."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.core.noise import make_key
from leanbayes.model.draw import Draw

X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def model() -> lb.BayesianModel[lb.ClassPrediction]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return lb.bayesianize(network, lb.MeanField(init_std=0.5)).train()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_threads_predict_what_they_would_alone() -> None:
    bnn = model()
    rules = ("sample", "flipout", "local", "moments", "mean")

    def predict(seed: int) -> Tensor:
        return bnn.predict(X, samples=3, rule=rules[seed % 5], generator=generator(seed)).probs

    alone = [predict(seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(predict, range(40)))
    for first, second in zip(alone, together, strict=True):
        assert torch.equal(first, second)
    assert bnn.rule == "sample"
    assert all(module.training for module in bnn.modules())
    assert bnn.network[0].weight is None  # type: ignore[index]


def test_blocks_keep_other_threads_out() -> None:
    bnn = model().eval()
    inside, done = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        inside.wait()
        bnn.predict(X, samples=1)
        seen.append("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with bnn.using("moments"), bnn.frozen(0), torch.no_grad():
        inside.set()
        assert not done.wait(0.2)  # it waits for the end of the block
        assert isinstance(bnn(X), lb.Moments)
        seen.append("block")
    thread.join(10)
    assert seen == ["block", "other"]


def test_blocks_keep_other_threads_out_while_a_third_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = model().eval()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # torch has one flag for all threads
    with ThreadPoolExecutor(1) as threads:
        with bnn.using("mean"):
            other = threads.submit(bnn.predict, X, 1)
            assert not wait([other], 0.2).done
        assert other.result(10).samples == 1


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


def test_layers_are_recomputed_while_no_other_thread_uses_the_model() -> None:
    """Activation checkpointing puts weights into the network again, in the backward pass."""
    torch.manual_seed(0)
    bnn = lb.bayesianize(Checkpointed(), lb.MeanField(init_std=0.5), seed=0)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with torch.no_grad(), bnn.drawn():
            inside.set()
            leave.wait(10)

    bnn(X, _draw=Draw(make_key(0))).square().sum().backward()
    expected = [p.grad for p in bnn.parameters()]
    bnn.zero_grad()
    loss = bnn(X, _draw=Draw(make_key(0))).square().sum()
    with ThreadPoolExecutor(2) as threads:
        threads.submit(other)
        inside.wait(10)
        backward = threads.submit(loss.backward)
        assert not wait([backward], 0.2).done  # it waits for the end of the other block
        leave.set()
        backward.result(10)
    torch.testing.assert_close([p.grad for p in bnn.parameters()], expected)


def test_a_thread_that_holds_the_model_may_leave_the_backward_pass_to_another() -> None:
    """As it does on a GPU, where the backward pass has a thread of its own."""
    bnn = lb.bayesianize(Checkpointed(), lb.MeanField(), seed=0)
    with bnn.drawn(), ThreadPoolExecutor(1) as thread:
        thread.submit(bnn(X).square().sum().backward).result(10)
    assert all(p.grad is not None for p in bnn.parameters())


def test_an_exception_restores_everything() -> None:
    bnn = model()
    with pytest.raises(RuntimeError):
        bnn.predict(torch.randn(2, 5, 8, 8), rule="local")
    with pytest.raises(KeyError), bnn.using("moments"), bnn.frozen(3), bnn.drawn():
        raise KeyError
    assert bnn.rule == "sample"
    assert all(module.training for module in bnn.modules())
    assert not torch.equal(bnn(X), bnn(X))  # neither frozen nor drawn
    with ThreadPoolExecutor(1) as thread:  # the lock is free
        assert thread.submit(bnn.predict, X, 1).result(10).samples == 1


def test_copies_have_their_own_lock() -> None:
    bnn = model().eval()
    twin, loaded = copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))
    with bnn.using("mean"), ThreadPoolExecutor(2) as threads:
        results = [threads.submit(other.predict, X, 2).result(10) for other in (twin, loaded)]
    assert all(result.samples == 2 for result in results)
