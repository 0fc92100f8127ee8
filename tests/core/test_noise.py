"""Noise is standard normal, a function of its key, and independent of the global random state."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import CASES
from scipy import stats
from torch import Tensor

import leanbayes as lb
from leanbayes.core import noise

METHODS: dict[str, Any] = {
    "MeanField": lb.MeanField(init_std=0.5),
    "ScaleMixture": lb.MeanField(prior=lb.ScaleMixture(), init_std=0.5),
    "flipout": lb.MeanField(rule="flipout", init_std=0.5),
    "local": lb.MeanField(rule="local", init_std=0.5),
    "Deterministic": lb.Deterministic(),
    "Ensemble": lb.Ensemble(members=3, seed=5),
    "MCDropout": lb.MCDropout(rate=0.3),
}
X, Y = CASES["cnn"].example(), torch.tensor([0, 1, 2, 3])


def model(method: str = "MeanField", seed: int = 0) -> lb.BayesianModel:
    return lb.bayesianize(CASES["cnn"].build(), METHODS[method], seed=seed)


def everything(method: str, folder: Path) -> list[Tensor]:
    """Run everything that may use noise."""
    bnn = model(method)
    outputs = [bnn(X), bnn.kl(), lb.elbo_loss(bnn, X, Y, num_data=100, samples=2), bnn.predict(X, 2).probs]
    with bnn.frozen(3):
        outputs.append(bnn(X))
    bnn.refresh_batchnorm([X, X])
    lb.save(bnn, folder / "model.safetensors")
    loaded = lb.load(folder / "model.safetensors", CASES["cnn"].build())
    return [*outputs, loaded(X), *loaded.state_dict().values()]


@pytest.mark.parametrize("method", METHODS)
def test_the_global_random_state_is_neither_used_nor_changed(method: str, tmp_path: Path) -> None:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
        results.append(everything(method, tmp_path))
        after = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
        assert torch.equal(before[0], after[0])
        assert np.array_equal(before[1]["state"]["key"], after[1]["state"]["key"])
        assert before[1]["state"]["pos"] == after[1]["state"]["pos"]
        assert before[2] == after[2]
    assert len(results[0]) > 5
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_ensemble_on_the_cpu_does_not_seed_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    net, seeded = CASES["cnn"].build(), list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    lb.bayesianize(net, METHODS["Ensemble"])
    assert seeded == []


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["MeanField", "flipout", "local", "MCDropout"])
def test_equal_seeds_give_equal_noise_and_other_seeds_do_not(method: str) -> None:
    first, second, other = model(method, 4), model(method, 4), model(method, 5)
    outputs = [first(X) for _ in range(3)]
    assert all(torch.equal(output, second(X)) for output in outputs)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], other(X))


def test_noise_is_standard_normal() -> None:
    like = torch.empty(20_000)
    for seed, index, stream in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (2**62, 2**40, 7), (-1, 0, 0)):
        values = noise.normal(like, noise.make_key(seed, index), stream)
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-3


def test_different_seeds_indices_and_streams_are_uncorrelated() -> None:
    like = torch.empty(40_000, dtype=torch.float64)
    keys = [(seed, index, stream) for seed in (0, 1, 2) for index in (0, 1, 2) for stream in (0, 1)]
    values = torch.stack([noise.normal(like, noise.make_key(seed, index), stream) for seed, index, stream in keys])
    correlations = torch.corrcoef(values) - torch.eye(len(keys))
    assert correlations.abs().max() < 5 / 200  # five standard errors of 40 000 pairs


@given(
    first=st.tuples(*[st.integers(0, 2**40)] * 2, st.integers(0, 99)),
    second=st.tuples(*[st.integers(0, 2**40)] * 2, st.integers(0, 99)),
)
@settings(max_examples=50, deadline=None)
def test_noise_is_a_function_of_key_and_stream(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    a, again, b = (noise.normal(torch.empty(8), noise.make_key(s, i), n) for s, i, n in (first, first, second))
    assert torch.equal(a, again)
    assert torch.equal(a, b) == (first == second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_are_balanced_and_uncorrelated(dtype: torch.dtype) -> None:
    like = torch.empty(3, dtype=dtype)
    first, second = (noise.signs(like, (100, 200), noise.make_key(1, index), 2) for index in (0, 1))
    assert (first.shape, first.dtype) == ((100, 200), dtype)
    assert first.unique().tolist() == [-1, 1]
    assert abs(first.double().mean()) < 4 / 141  # four standard errors of 20 000 signs
    assert abs((first.double() * second.double()).mean()) < 4 / 141


# On a GPU a program fills 2048 positions, and a CPU seeds 16384 at once. Counters of 32 bits end at 2^31, 2^32 or 2^34.
PARTS = ((0, 10), (1, 49_999), (2047, 2), (2048, 2048), (16_284, 16_384), (19_900, 1), (31_900, 700), (49_999, 1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 100, 2**31 - 20_000, 2**32 - 20_000, 2**34 - 20_000])
def test_noise_by_position_is_the_same_in_parts_of_any_length(first: int, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    key, like = noise.make_key(5, 2, device), torch.empty(50_000, device=device, dtype=dtype)
    values = noise.normal(like, noise.at(key, first))
    for start, length in PARTS:
        part = noise.normal(like[:length], noise.at(key, first + start))
        assert torch.equal(part, values[start : start + length])
    image = torch.empty(2, 5, 20, 250, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    in_memory = noise.normal(image, noise.at(key, first)).permute(0, 2, 3, 1)
    assert torch.equal(in_memory.reshape(-1), values)  # positions count memory, as a layout does
    if dtype == torch.bfloat16:
        assert torch.equal(values, noise.normal(like.float(), noise.at(key, first)).bfloat16())
    else:
        assert stats.kstest(values.cpu().numpy(), "norm").pvalue > 1e-3
    if device == "cuda" and dtype != torch.float64 and first == 0:  # whose noise is always by position
        assert torch.equal(values, noise.normal(like, key))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_noise_of_distant_positions_differs(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    key, like = noise.make_key(5, 2, device), torch.empty(16_384, device=device)
    starts = (0, 2**31, 2**32, 2**33, 2**34, 2**35, 2**40)
    values = torch.stack([noise.normal(like, noise.at(key, start)) for start in starts]).cpu()
    assert (torch.corrcoef(values) - torch.eye(len(values))).abs().max() < 5 / 128


def test_noise_by_position_differs_between_spans_keys_and_streams() -> None:
    like = torch.empty(16_384, dtype=torch.float64)
    keys = [noise.at(noise.make_key(0, index), start) for index in (0, 1) for start in (0, 16_384, 16_384 * 7)]
    values = torch.stack([noise.normal(like, key, stream) for key in keys for stream in (0, 1)])
    assert (torch.corrcoef(values) - torch.eye(len(values))).abs().max() < 5 / 128


def test_each_chunk_has_its_own_noise() -> None:
    key, like = noise.make_key(7, 3), torch.empty(10_000)
    values = torch.stack([noise.normal(like, noise.of_chunk(key, number)) for number in range(4)])
    assert torch.equal(values[0], noise.normal(like, key))
    assert (torch.corrcoef(values) - torch.eye(4)).abs().max() < 5 / 100


def test_chunks_of_a_batch_are_predicted_with_different_noise() -> None:
    same = X[:1].expand(4, -1, -1, -1).contiguous()
    bnn = model("local")
    outputs = bnn.predict(same, 1, memory_budget=1, keep_outputs=True).outputs[0]
    assert len(torch.unique(outputs[:, 0])) == 4


def test_each_rank_has_the_index_of_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        stream = noise.NoiseStream(9)
        assert [stream.next().tolist() for _ in range(4)] == [[9, 2 * step + rank] for step in range(4)]
        assert stream.state.tolist() == [9, 4]  # equal on all ranks, so that any rank can save it


def test_a_restored_stream_continues_with_equal_noise() -> None:
    bnn, restored = model(), model(seed=99)
    for _ in range(3):
        bnn(X)
    restored.load_state_dict(bnn.state_dict())
    assert any(name.startswith("noise") for name in bnn.state_dict())
    assert torch.equal(bnn(X), restored(X))
    assert torch.equal(bnn.predict(X, 3).probs, restored.predict(X, 3).probs)


# -- frozen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["MeanField", "flipout", "local", "MCDropout"])
def test_frozen_repeats_nests_and_restores(method: str) -> None:
    bnn = model(method).eval()
    state = bnn.noise.state.clone()
    with bnn.frozen(1):
        one = bnn(X)
        with bnn.frozen(2):
            two = bnn(X)
            assert torch.equal(two, bnn(X))
        assert torch.equal(one, bnn(X))
    assert not torch.equal(one, two)
    assert torch.equal(bnn.noise.state, state)  # the stream did not advance
    assert not torch.equal(bnn(X), bnn(X))
    with pytest.raises(RuntimeError, match="fault"), bnn.frozen(1):
        raise RuntimeError("fault")
    assert not torch.equal(bnn(X), bnn(X))
    with bnn.frozen(1):
        assert torch.equal(one, bnn(X))


# -- generators -------------------------------------------------------------------------------------------------------


def refreshed(bnn: lb.BayesianModel, generator: torch.Generator) -> Tensor:
    bnn.refresh_batchnorm([X, X.flip(0)], generator=generator)
    return torch.cat([b.double().flatten() for n, b in bnn.named_buffers() if "running" in n])


USES: dict[str, tuple[str, Callable[[lb.BayesianModel, torch.Generator], Tensor]]] = {
    "elbo": ("MeanField", lambda bnn, g: lb.elbo_loss(bnn, X, Y, num_data=10, generator=g)),
    "elbo of several samples": ("local", lambda bnn, g: lb.elbo_loss(bnn, X, Y, num_data=10, samples=3, generator=g)),
    "predict": ("flipout", lambda bnn, g: bnn.predict(X, 3, generator=g).probs),
    "predict with dropout": ("MCDropout", lambda bnn, g: bnn.predict(X, 3, generator=g).probs),
    "sampled kl": ("ScaleMixture", lambda bnn, g: bnn.kl(generator=g)),
    "refresh_batchnorm": ("MeanField", refreshed),
}


@pytest.mark.parametrize("name", USES)
def test_results_depend_on_the_generator_only_and_advance_it(name: str) -> None:
    method, use = USES[name]
    bnn, other = model(method), model(method, seed=8)
    before = bnn.noise.state.clone()
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    start = generators[0].get_state()
    first = use(bnn, generators[0])
    assert not torch.equal(start, generators[0].get_state())
    second = use(bnn, generators[0])
    assert not torch.equal(first, second)
    assert torch.equal(first, use(other, generators[1]))  # whatever the model's own seed
    assert torch.equal(bnn.noise.state, before)  # the model's own stream did not move
    assert not torch.equal(first, use(other, torch.Generator().manual_seed(4)))


def test_an_exact_kl_uses_no_noise() -> None:
    bnn, generator = model(), torch.Generator().manual_seed(0)
    start, state = generator.get_state(), bnn.noise.state.clone()
    bnn.kl(generator)
    bnn.kl()
    assert torch.equal(start, generator.get_state())
    assert torch.equal(state, bnn.noise.state)


def test_a_generator_makes_a_plain_call_repeatable() -> None:
    bnn, x = lb.bayesianize(torch.nn.Linear(3, 2), lb.MeanField()), torch.randn(4, 3)
    outputs = []
    for _ in range(2):
        with bnn.drawn(generator=torch.Generator().manual_seed(1)) as call:
            outputs.append(call(x))
    assert torch.equal(*outputs)


def test_the_samples_of_one_loss_share_an_index_but_not_their_noise() -> None:
    stream = noise.NoiseStream(3)
    first = [stream.next(number) for number in range(4)]
    second = [stream.next(number) for number in range(4)]
    assert stream.state.tolist() == [3, 2]
    assert [int(key[1]) for key in first + second] == [0] * 4 + [1] * 4
    keys = first + second + [noise.of_chunk(first[0], number) for number in range(1, 4)]
    values = torch.stack([noise.normal(torch.empty(2000), key) for key in keys])
    correlation = torch.corrcoef(values) - torch.eye(len(keys))
    assert correlation.abs().max() < 0.1
