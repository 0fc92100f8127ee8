"""Entropy coding: round trips are exact, sizes are near the entropy, and damage is detected or harmless."""

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from leanbayes.deploy.compact import coding, masks
from leanbayes.deploy.compact.coding import pack, pack_bytes, pack_symbols, unpack, unpack_bytes, unpack_symbols
from leanbayes.deploy.compact.masks import pack_masks, unpack_masks

RANDOM = np.random.default_rng(0)
SHAPES = st.lists(
    st.lists(st.integers(1, 6), max_size=4).map(tuple),
    max_size=4,
)


def entropy(values: Any) -> float:
    """The bits of all values under their empirical distribution."""
    counts = np.unique(values, return_counts=True)[1]
    return float(counts @ np.log2(len(values) / counts)) if len(values) else 0.0


# -- round trips ------------------------------------------------------------------------------------------------------


@given(arrays.arrays(np.uint8, st.integers(0, 300), elements=st.integers(0, 255)))
def test_round_trip_of_bytes(values: Any) -> None:
    coded = pack_bytes(values)
    assert np.array_equal(unpack_bytes(coded, len(values)), values)
    assert len(coded) <= 1 + len(values)


@given(
    st.sampled_from(["int8", "uint8", "bool", "int32", "int64", "float16", "float32", "float64"]).flatmap(
        lambda dtype: arrays.arrays(dtype, st.integers(0, 50))
    )
)
def test_round_trip_of_numbers_of_any_dtype(values: Any) -> None:
    found = unpack(pack(values), values.dtype, len(values))
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=5), st.integers(10, 12))
def test_round_trip_of_symbols(groups: list[list[int]], alphabet: int) -> None:
    sizes, values = [len(group) for group in groups], np.array([*chain(*groups)], np.int32)
    assert np.array_equal(unpack_symbols(pack_symbols(values, sizes, alphabet), sizes, alphabet), values)


@pytest.mark.parametrize("values", [[], [3], [3] * 1000, [0, 4999], [0] * 999 + [1]], ids=str)
def test_few_symbols_of_a_large_alphabet(values: list[int]) -> None:
    given_values = np.array(values, np.int32)
    coded = pack_symbols(given_values, [len(values)], 5000)
    assert np.array_equal(unpack_symbols(coded, [len(values)], 5000), given_values)


@given(SHAPES, st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]), st.integers(0, 2**32 - 1))
def test_round_trip_of_masks(shapes: list[tuple[int, ...]], share: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random(sum(map(math.prod, shapes))) < share
    assert np.array_equal(unpack_masks(pack_masks(mask, shapes), shapes), mask)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.3, 2, 20])
def test_symbols_take_their_entropy(std: float) -> None:
    values = np.clip(np.rint(RANDOM.normal(100, std, 60_000)), 0, 200).astype(np.int32)
    assert 8 * len(pack_symbols(values, [len(values)], 201)) <= 1.02 * entropy(values) + 8 * 250


def test_a_layer_has_its_own_model_if_that_is_shorter() -> None:
    narrow, wide = RANDOM.integers(0, 4, 20_000), RANDOM.integers(0, 200, 20_000)
    values = np.concatenate([narrow, wide]).astype(np.int32)
    together = 8 * len(pack_symbols(values, [40_000], 200))
    apart = 8 * len(pack_symbols(values, [20_000, 20_000], 200))
    assert together >= entropy(values)
    assert apart <= 1.02 * (entropy(narrow) + entropy(wide)) + 8 * 250
    alike = RANDOM.integers(0, 200, 3000).astype(np.int32)  # three models would be longer than one
    assert len(pack_symbols(alike, [1000] * 3, 200)) <= len(pack_symbols(alike, [3000], 200)) + 16


@pytest.mark.parametrize("density", [0.01, 0.05, 0.3])
def test_a_mask_takes_its_entropy(density: float) -> None:
    mask = RANDOM.random(128 * 64 * 9) < density
    bits = 8 * len(pack_masks(mask, [(128, 64, 3, 3)]))
    assert entropy(mask) * 0.999 <= bits <= 1.02 * entropy(mask) + 8 * 40


def test_masks_use_the_densities_of_rows_and_columns() -> None:
    rows, columns = RANDOM.normal(-3, 1.5, (256, 1)), RANDOM.normal(0, 1.5, (1, 256))
    probability = 1 / (1 + np.exp(-rows - columns))
    mask = (RANDOM.random((256, 256)) < probability).ravel()
    true = float(-(probability * np.log2(probability) + (1 - probability) * np.log2(1 - probability)).sum())
    bits = 8 * len(pack_masks(mask, [(256, 256)]))
    by_rows = sum(entropy(row) for row in mask.reshape(256, 256))
    assert bits < 0.9 * by_rows < 0.9 * entropy(mask)
    assert bits < 1.15 * true


def test_equal_bytes_take_almost_nothing() -> None:
    assert len(pack(np.full(100_000, 1.5, np.float32))) <= 4 * 8
    assert len(pack_masks(np.ones(100_000, bool), [(100, 1000)])) < 16


# -- the same on every machine ----------------------------------------------------------------------------------------


def test_frequencies_are_exact_integers() -> None:
    for level in (1, 2, 9, 100, 255):
        found = coding.power(level - 1, 8)
        assert found**8 <= 2 ** (level - 1 + 64) < (found + 1) ** 8
    assert coding.power(-16, 40) == 2**38


def test_the_encoding_does_not_change() -> None:
    symbols = bytes.fromhex("0009000000000901160000000001e613d70d")
    assert unpack_symbols(symbols, [4, 6], 8).tolist() == [0, 1, 2, 2, 2, 7, 2, 2, 0, 2]
    numbers = np.arange(40)
    one_level, axes = "0202000000007558200ec9a88fa428", "040e00000000728080808088888888787878783b768931"
    assert np.array_equal(unpack_masks(bytes.fromhex(one_level), [(5, 2, 4)]), numbers * 7 % 11 < 3)
    assert np.array_equal(unpack_masks(bytes.fromhex(axes), [(5, 8)]), (numbers % 8 < 4) & (numbers > 7))


# -- damage -----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=60), st.integers(0, 40))
def test_any_bytes_give_numbers_or_a_value_error(data: bytes, count: int) -> None:
    """Decoded values have the right size and range, so that nothing after them can fail."""

    def tried(action: Any) -> Any:
        try:
            return action()
        except ValueError:
            return None

    found = tried(lambda: unpack(data, np.float32, count))
    assert found is None or found.shape == (count,)
    found = tried(lambda: unpack_symbols(data, [count, 3], 7))
    assert found is None or (found.shape == (count + 3,) and found.min() >= 0 and found.max() < 7)
    found = tried(lambda: unpack_masks(data, [(count + 1, 2), (3,)]))
    assert found is None or (found.shape == (2 * count + 5,) and found.dtype == bool)


def test_truncated_and_longer_parts_are_refused() -> None:
    values = RANDOM.integers(0, 1000, 100)
    coded = pack(values)
    for wrong in (coded[:-1], coded + b"\0", b""):
        with pytest.raises(ValueError, match=r"short|long|length|truncated"):
            unpack(wrong, values.dtype, len(values))
    with pytest.raises(ValueError, match="unknown"):
        unpack_masks(bytes([9]), [(3,)])


def test_too_many_codes() -> None:
    with pytest.raises(ValueError, match="fewer components"):
        pack_symbols(np.zeros(1, np.int32), [1], coding.MOST_SYMBOLS + 1)
    with pytest.raises(ValueError, match="too large"):
        unpack_symbols(b"", [], 2**62)


def test_every_model_of_a_mask_is_used() -> None:
    """So that the tests above cover each of them."""
    dense, even = np.ones((40, 40), bool), RANDOM.random((40, 40)) < 0.2
    rows = RANDOM.random((40, 400)) < np.linspace(0.01, 0.9, 40)[:, None]
    both = RANDOM.random((200, 200)) < np.linspace(0, 1, 200)[:, None] * np.linspace(0, 1, 200)
    layers = [~dense, dense, even, rows, both]
    coded = pack_masks(np.concatenate([layer.ravel() for layer in layers]), [layer.shape for layer in layers])
    assert list(coded[:5]) == [masks._NONE, masks._ALL, masks._LAYER, masks._ROWS, masks._AXES]
