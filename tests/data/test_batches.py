"""Batches: each example once, in an order that can be repeated, resumed and shared, whether stored or streamed."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import leanbayes as lb
from leanbayes.data import ArrayDataset, Augment, Batches, Normalize, streaming

# On a small machine torch warns about more workers than cores, which does not matter here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NORMALIZE = Normalize((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))
IMAGES = torch.randint(0, 256, (30, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.arange(30)


class Streamed(Dataset[Any]):
    """A wrapper that hides tensors in memory, so that examples are read one by one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def numbers(count: int) -> TensorDataset:
    """Return a data set whose inputs and labels are the indices of its examples."""
    return TensorDataset(torch.arange(count)[:, None].float(), torch.arange(count))


def labels(batches: Iterator[tuple[Any, Tensor]]) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for part in lists for number in part]


def same(first: Any, second: Any) -> None:
    """Check that two sequences of batches are equal bit by bit."""
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for (x1, y1), (x2, y2) in zip(first, second, strict=True):
        assert torch.equal(x1, x2)
        assert torch.equal(y1, y2)
        assert x1.dtype == x2.dtype
        assert y1.dtype == y2.dtype


def expect(call: Any, *words: str) -> None:
    with pytest.raises(lb.LeanBayesError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    for word in words:
        assert word in message


# -- order ------------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 40),
    size=st.integers(1, 12),
    parts=st.integers(1, 5),
    shuffle=st.booleans(),
    streamed=st.booleans(),
    seed=st.integers(-3, 2**40),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_example_once(
    count: int, size: int, parts: int, shuffle: bool, streamed: bool, seed: int, epoch: int
) -> None:
    dataset: Any = Streamed(numbers(count)) if streamed else numbers(count)
    batches = Batches(dataset, size, parts=parts, shuffle=shuffle, drop_last=False, seed=seed)
    found = labels(batches.epoch(epoch))
    assert sorted(flat(found)) == list(range(count))
    assert all(found)
    assert len(batches) == -(-count // size)
    if not shuffle:
        assert flat(found) == list(range(count))
    assert found == labels(batches.epoch(epoch))
    for start in range(len(batches) + 1):
        before = min(start * size, count)
        assert flat(labels(batches.epoch(epoch, start))) == flat(found)[before:]


@given(examples=st.integers(1, 60), micro=st.integers(1, 5), processes=st.integers(1, 3), accumulate=st.integers(1, 3))
def test_processes_together_get_the_batches_of_one_process(
    examples: int, micro: int, processes: int, accumulate: int
) -> None:
    parts = processes * accumulate
    if examples < parts:
        expect(lambda: Batches(numbers(examples), micro * parts, parts=parts), f"{examples} examples", f"{parts} micro")
        return
    alone = Batches(numbers(examples), micro * parts, parts=parts)
    shares = [
        Batches(numbers(examples), micro * parts, parts=parts, mine=range(rank, parts, processes))
        for rank in range(processes)
    ]
    whole = labels(alone.epoch(2, 0))
    assert len({len(part) for part in whole}) == 1  # equal micro-batches
    assert len(whole) == len(alone) * parts
    interleaved = zip(*(labels(share.epoch(2, 0)) for share in shares), strict=True)
    assert [part for group in interleaved for part in group] == whole
    assert {len(share) for share in shares} == {len(alone)}
    one_part = labels(Batches(numbers(examples), micro * parts).epoch(2))
    assert flat(whole)[: len(one_part[0])] == one_part[0] or alone.batch_size < micro * parts


@pytest.mark.parametrize("streamed", [True, False])
def test_augmentation_does_not_depend_on_the_number_of_processes(streamed: bool) -> None:
    dataset: Any = ArrayDataset(IMAGES, NUMBERS)
    dataset = Streamed(dataset) if streamed else dataset

    def make(parts: int, mine: Any = None) -> Batches:
        return Batches(dataset, 12, parts=parts, mine=mine, augment=Augment(2), normalize=NORMALIZE)

    whole = list(make(4).epoch(1))
    first, second = (list(make(4, range(rank, 4, 2)).epoch(1)) for rank in (0, 1))
    same([batch for pair in zip(first, second, strict=True) for batch in pair], whole)
    same(
        [
            (torch.cat([x for x, _ in whole[i : i + 4]]), torch.cat([y for _, y in whole[i : i + 4]]))
            for i in range(0, len(whole), 4)
        ],
        make(1).epoch(1),
    )
    same(make(4).epoch(1, start=1), whole[4:])


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int, **settings: Any) -> list[int]:
        return flat(labels(Batches(numbers(40), 8, seed=seed, **settings).epoch(epoch)))

    assert order(0, 0) == order(0, 0, augment=Augment(), normalize=NORMALIZE, channels_last=True)
    orders = [tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    batches = Batches(numbers(40), 8)
    late = flat(labels(batches.epoch(5)))
    assert flat(labels(batches.epoch(1))) == order(0, 1)
    assert late == order(0, 5)
    assert sum(a == b for a, b in zip(order(0, 0), order(0, 1), strict=True)) < 10


def test_training_drops_the_last_batch_and_evaluation_has_all_examples() -> None:
    assert [len(part) for part in labels(Batches(numbers(23), 10).epoch())] == [10, 10]
    assert [len(part) for part in labels(Batches(numbers(23), 10, shuffle=False).epoch())] == [10, 10, 3]
    pieces = labels(Batches(numbers(23), 10, shuffle=False, parts=4).epoch())
    assert flat(pieces) == list(range(23))
    assert [len(part) for part in pieces[-3:]] == [1, 1, 1]  # the empty one is left out
    shares = [labels(Batches(numbers(3), 8, shuffle=False, parts=4, mine=[rank]).epoch()) for rank in range(4)]
    assert flat([part for share in shares for part in share]) == [0, 1, 2]


def test_the_repr_shows_examples_steps_and_parts() -> None:
    assert repr(Batches(numbers(23), 10)) == "Batches(23 examples, 2 steps of 10, shuffle=True, device='cpu')"
    share = Batches(numbers(23), 10, shuffle=False, parts=2, mine=[1])
    assert repr(share) == "Batches(23 examples, 3 steps of 10, shuffle=False, device='cpu', parts=2, mine=[1])"


def test_small_data_sets_reduce_the_batch_size() -> None:
    batches = Batches(numbers(7), 100, parts=2)
    assert (len(batches), batches.batch_size) == (1, 6)
    assert [len(part) for part in labels(batches.epoch())] == [3, 3]
    assert len(Batches(numbers(1), 100).epoch().__next__()[1]) == 1


def test_invalid_settings_raise_one_sentence() -> None:
    expect(lambda: Batches(numbers(3), 8, parts=4), "3 examples", "4 micro-batches")
    expect(lambda: Batches(numbers(30), 10, parts=4), "batch_size=10", "multiple")
    for size in (0, -2):
        expect(lambda size=size: Batches(numbers(3), size), f"batch_size={size}")
        expect(lambda size=size: Batches(numbers(3), size, shuffle=False), f"batch_size={size}")
    for mine in ([], [1, 0], [0, 0], [2], [-1]):
        expect(lambda mine=mine: Batches(numbers(8), 4, parts=2, mine=mine), "mine=")
    expect(lambda: Batches(numbers(8), 4).epoch(0, 3), "start=3", "2 steps")
    expect(lambda: Batches(DataLoader(numbers(8)), 4), "loader.dataset")  # type: ignore[arg-type]
    expect(lambda: Batches(numbers(0), 4), "empty")
    expect(lambda: list(Batches(TensorDataset(*numbers(8).tensors, torch.zeros(8)), 4).epoch()), "pairs")
    texts: Any = [(1.0, "cat"), (2.0, "dog")]
    expect(lambda: list(Batches(texts, 2).epoch()), "Labels must be numbers")
    maps = ArrayDataset(IMAGES, torch.zeros(30, 3, 3).long())
    expect(lambda: Batches(maps, 4, augment=Augment()), "(3, 3)", "(6, 7)")
    expect(lambda: list(Batches(ArrayDataset(IMAGES[:, :1], NUMBERS), 4, normalize=NORMALIZE).epoch()), "3 channels")


# -- augmentation -----------------------------------------------------------------------------------------------------


@given(
    crop=st.integers(0, 5),
    flip=st.booleans(),
    floats=st.booleans(),
    dense=st.booleans(),
    normalize=st.booleans(),
    channels_last=st.booleans(),
    shuffle=st.booleans(),
    subset=st.booleans(),
)
def test_stored_and_streamed_batches_are_equal(
    crop: int, flip: bool, floats: bool, dense: bool, normalize: bool, channels_last: bool, shuffle: bool, subset: bool
) -> None:
    x = IMAGES / 255 if floats else IMAGES
    y = torch.randint(0, 5, (30, 6, 7), generator=torch.Generator().manual_seed(2)) if dense else NUMBERS
    dataset: Any = TensorDataset(x, y)
    if subset:
        dataset = Subset(Subset(dataset, list(range(29, 2, -1))), [*range(20), 3])
    settings: dict[str, Any] = {
        "augment": Augment(crop, flip),
        "normalize": NORMALIZE if normalize else None,
        "channels_last": channels_last,
        "shuffle": shuffle,
    }
    resident = list(Batches(dataset, 8, **settings).epoch(3))
    same(resident, Batches(Streamed(dataset), 8, **settings).epoch(3))
    for batch, _ in resident:
        assert batch.dtype == (torch.float32 if floats or normalize else torch.uint8)
        assert batch.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_data_too_large_for_the_device_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Subset(TensorDataset(IMAGES, NUMBERS), range(20))
    settings: dict[str, Any] = {"augment": Augment(2), "normalize": NORMALIZE}
    resident = list(Batches(dataset, 8, **settings).epoch())
    monkeypatch.setattr("leanbayes.data.batches.RESIDENT_BYTES", 100)
    same(Batches(dataset, 8, **settings).epoch(), resident)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_each_image_is_a_crop_of_its_padded_original(flip: bool, streamed: bool) -> None:
    """Each result, with its labels, is exactly one of all crops by plain padding and slicing."""
    crop = 2
    maps = torch.arange(30 * 42).reshape(30, 6, 7)  # each pixel has its own label
    dataset: Any = ArrayDataset(IMAGES, maps)
    batches = Batches(Streamed(dataset) if streamed else dataset, 10, augment=Augment(crop, flip), ignore_index=-7)
    order = flat(labels(Batches(numbers(30), 10).epoch()))
    found = []
    for position, (x, y) in enumerate((x, y) for xs, ys in batches.epoch() for x, y in zip(xs, ys, strict=True)):
        image = F.pad(IMAGES[order[position]], [crop] * 4)
        marks = F.pad(maps[order[position]], [crop] * 4, value=-7)
        matches = []
        for top in range(2 * crop + 1):
            for left in range(2 * crop + 1):
                window = image[:, top : top + 6, left : left + 7]
                window_marks = marks[top : top + 6, left : left + 7]
                for flipped in (False, True):
                    expected = (window.flip(-1), window_marks.flip(-1)) if flipped else (window, window_marks)
                    if torch.equal(x, expected[0]) and torch.equal(y, expected[1]):
                        matches.append((top, left, flipped))
        assert len(matches) == 1
        found += matches
    assert len(set(found)) > 12
    assert any(flipped for *_, flipped in found) == flip


def test_crops_and_flips_are_uniform() -> None:
    """The position of one bright pixel shows the crop and the flip."""
    x = torch.zeros(4000, 1, 9, 8, dtype=torch.uint8)
    x[:, 0, 4, 3] = 1
    for epoch in (0, 1):
        (batch, _), *_ = Batches(TensorDataset(x, torch.zeros(4000)), 4000, augment=Augment(1)).epoch(epoch)
        places = batch[:, 0].nonzero()[:, 1:]
        rows, columns = places[:, 0], places[:, 1]
        assert (rows.bincount()[3:] / 4000 - 1 / 3).abs().max() < 0.03
        assert columns.bincount()[[2, 5]].tolist() == pytest.approx([4000 / 6] * 2, abs=100)
        assert columns.bincount()[[3, 4]].tolist() == pytest.approx([4000 / 3] * 2, abs=130)
    plain = Batches(TensorDataset(x, torch.zeros(4000)), 4000, augment=Augment(0)).epoch()
    assert abs(next(plain)[0][:, 0, 4, 3].float().mean() - 0.5) < 0.03


def test_augmentation_depends_on_the_epoch() -> None:
    dataset = ArrayDataset(IMAGES, NUMBERS)
    batches = Batches(dataset, 30, augment=Augment(2), shuffle=False)
    first, second = (next(batches.epoch(number))[0] for number in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(next(batches.epoch(0))[0], first)
    assert torch.equal(next(Batches(dataset, 30, shuffle=False).epoch(1))[0], IMAGES)


def test_normalization_is_per_channel_for_bytes_and_floats() -> None:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)))
    expected = (IMAGES.double() / 255 - mean) / std
    for x in (IMAGES, IMAGES / 255, (IMAGES / 255).double()):
        (found, _), *_ = Batches(TensorDataset(x, NUMBERS), 30, shuffle=False, normalize=NORMALIZE).epoch()
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        assert found.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert torch.equal(NORMALIZE(IMAGES[0]), NORMALIZE(IMAGES)[0])
    one = Normalize((0.5,), (0.25,))(IMAGES)
    torch.testing.assert_close(one, (IMAGES / 255 - 0.5) / 0.25)
    with torch.inference_mode():
        cached_in_inference_mode = Normalize((0.1,), (0.7,))
        cached_in_inference_mode(IMAGES)
    x = torch.randn(1, 3, 2, 2, requires_grad=True)
    cached_in_inference_mode(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / 0.7))


def test_tables_are_unchanged_and_integer_labels_become_int64() -> None:
    x, y = torch.randn(10, 4), torch.randn(10, 2)
    settings: dict[str, Any] = {"shuffle": False, "augment": Augment(), "normalize": NORMALIZE, "channels_last": True}
    same(Batches(TensorDataset(x, y), 10, **settings).epoch(), [(x, y)])
    same(Batches(Streamed(TensorDataset(x, y)), 10, **settings).epoch(), [(x, y)])
    small = torch.arange(10, dtype=torch.uint8)
    for dataset in (TensorDataset(x, small), Streamed(TensorDataset(x, small))):
        assert next(Batches(dataset, 10).epoch())[1].dtype == torch.long
    yes = torch.ones(10, dtype=torch.bool)
    assert next(Batches(TensorDataset(x, yes), 10).epoch())[1].dtype == torch.long


def test_scalar_targets_become_vectors_and_floats_get_the_dtype() -> None:
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    for dataset in (TensorDataset(x, y), Streamed(TensorDataset(x, y))):
        found = next(Batches(dataset, 10, shuffle=False, dtype=torch.float32).epoch())
        assert torch.equal(found[0], x.float())
        assert torch.equal(found[1], y.float()[:, None])


def test_float_label_maps_are_not_cropped() -> None:
    maps = TensorDataset(torch.rand(4, 3, 8, 8), torch.rand(4, 1, 8, 8))
    with pytest.raises(lb.LeanBayesError, match="crop=0"):
        Batches(maps, 4, augment=Augment(2))
    flipped = next(Batches(maps, 4, augment=Augment(0)).epoch())
    assert flipped[1].shape == (4, 1, 8, 8)


def test_examples_of_different_shapes_raise_an_error() -> None:
    class Uneven(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.zeros(3 + index), 0

    with pytest.raises(lb.LeanBayesError, match=r"\(3,\).*\(4,\).*one size"):
        next(Batches(Uneven(), 4, shuffle=False).epoch())


# -- streamed data sets -----------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """A data set with random transforms that use torch, NumPy and random."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64), index


def test_random_transforms_do_not_depend_on_workers_or_resumption() -> None:
    whole = list(Batches(Noisy(), 6).epoch(1))
    same(Batches(Noisy(), 6, workers=2).epoch(1), whole)
    same(Batches(Noisy(), 6).epoch(1, start=2), whole[2:])
    same(Batches(Noisy(), 6, workers=2).epoch(1, start=1), whole[1:])
    x, y = (torch.cat([batch[i] for batch in whole]) for i in (0, 1))
    assert len(set(x.flatten().tolist())) == x.numel()
    other = {int(y): x for xs, ys in Batches(Noisy(), 6).epoch(2) for x, y in zip(xs, ys, strict=True)}
    assert not any(
        torch.equal(other[int(label)], value) for value, label in zip(x, y, strict=True) if int(label) in other
    )
    second_half = list(Batches(Noisy(), 6, parts=2, mine=[1]).epoch(1))
    same(second_half, [(x[3:], y[3:]) for x, y in whole])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_state_does_not_change(workers: int) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    before = states()
    for dataset in (Noisy(), ArrayDataset(IMAGES, NUMBERS), Streamed(ArrayDataset(IMAGES, NUMBERS))):
        for x, _ in Batches(dataset, 5, augment=Augment(), workers=workers).epoch():
            assert states() == before  # during an epoch too
            assert len(x) == 5
    assert states() == before


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise lb.FileFormatError("The file 2 is damaged: replace it.")
        return torch.zeros(2), index


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_workers_are_one_sentence(workers: int) -> None:
    expect(lambda: list(Batches(Failing(), 2, workers=workers).epoch()), "The file 2 is damaged")


@pytest.mark.parametrize("workers", [0, 2])
def test_inputs_can_be_dicts_and_tuples(workers: int) -> None:
    examples: Any = [({"ids": torch.tensor([i, i]), "mask": torch.ones(2)}, i) for i in range(6)]
    found = list(Batches(examples, 3, shuffle=False, augment=Augment(), normalize=NORMALIZE, workers=workers).epoch())
    assert torch.equal(found[1][0]["ids"], torch.tensor([[3, 3], [4, 4], [5, 5]]))
    assert found[1][0]["mask"].shape == (3, 2)
    assert found[1][1].tolist() == [3, 4, 5]
    pairs: Any = [((torch.tensor(float(i)), torch.tensor([i])), i) for i in range(6)]
    (first, second), _ = next(Batches(pairs, 6, shuffle=False).epoch())
    assert first.tolist() == [0, 1, 2, 3, 4, 5]
    assert second.shape == (6, 1)


def test_a_subclass_of_a_tensor_data_set_keeps_its_transforms() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return 2 * x, y

    (x, y), *_ = Batches(Doubled(*numbers(5).tensors), 5).epoch()
    assert torch.equal(x[:, 0], 2.0 * y)


def test_epochs_can_be_interleaved() -> None:
    for dataset in (numbers(12), Streamed(numbers(12))):
        batches = Batches(dataset, 3)
        pairs = list(zip(labels(batches.epoch(0)), labels(batches.epoch(1)), strict=True))
        interleaved = [
            (a.tolist(), b.tolist()) for (_, a), (_, b) in zip(batches.epoch(0), batches.epoch(1), strict=True)
        ]
        assert interleaved == pairs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("channels_last", [True, False])
def test_gpu_batches_equal_cpu_batches_without_synchronization(channels_last: bool) -> None:
    settings: dict[str, Any] = {"augment": Augment(2), "normalize": NORMALIZE, "channels_last": channels_last}
    for y in (NUMBERS, torch.randint(0, 5, (30, 6, 7))):
        dataset = ArrayDataset(IMAGES, y)
        expected = list(Batches(dataset, 8, **settings).epoch(1))
        resident = Batches(dataset, 8, device="cuda", **settings)
        batches = resident.epoch(1)
        found = [next(batches)]  # the first one copies the order to the device
        torch.cuda.set_sync_debug_mode("error")
        try:
            found += list(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        streamed = list(Batches(Streamed(dataset), 8, device="cuda", **settings).epoch(1))
        for (x, labels), (x1, y1), (x2, y2) in zip(expected, found, streamed, strict=True):
            torch.testing.assert_close(x1.cpu(), x)
            assert torch.equal(x1, x2)
            assert torch.equal(y1.cpu(), labels)
            assert torch.equal(y1, y2)


def test_the_default_device_does_not_matter() -> None:
    dataset = ArrayDataset(torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1), torch.arange(12))
    expected = [y.tolist() for _, y in Batches(dataset, 4, augment=Augment(1)).epoch(3)]
    with torch.device("meta"):  # which cannot draw random numbers
        batches = Batches(dataset, 4, augment=Augment(1)).epoch(3)
        found = [y.tolist() for _, y in batches]
    assert found == expected


class Sleepy(Dataset[Any]):
    """A data set whose example never arrives; a file names the process that reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        (self.folder / str(os.getpid())).touch()
        time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_workers_end_some_time_after_a_signal(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_GRACE_SECONDS", 1.5)
    signaled = []

    def terminate() -> None:
        while not (found := list(tmp_path.iterdir())):
            time.sleep(0.02)
        signaled.append(time.monotonic())
        os.kill(int(found[0].name), number)

    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(RuntimeError, match=r"killed by signal: Alarm clock|exited unexpectedly"):
        next(Batches(Sleepy(tmp_path), 1, shuffle=False, workers=1).epoch())
    assert time.monotonic() - signaled[0] > 1.4
