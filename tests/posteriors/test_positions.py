"""Encoded positions: they are decoded exactly, and invalid bytes raise an error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanbayes.posteriors import positions


def by_hand(index: list[int]) -> bytes:
    """Encode by the definition: seven bits per byte, lowest first; the top bit says that another byte follows."""
    written, before = [], -1
    for position in index:
        gap = position - before - 1
        while gap >= 0x80:
            written.append(gap & 0x7F | 0x80)
            gap >>= 7
        written.append(gap)
        before = position
    return bytes(written)


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.sets(st.one_of(st.integers(0, 300), st.integers(0, 2**40)), max_size=30))
def test_positions_are_decoded_exactly(chosen: set[int]) -> None:
    index = sorted(chosen)
    written = positions.encode(torch.tensor(index, dtype=torch.int64))
    assert bytes(written.tolist()) == by_hand(index)
    limit = index[-1] + 1 if index else 1
    assert positions.decode(written, len(index), limit).tolist() == index


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_large_gaps_of_both_types(dtype: torch.dtype) -> None:
    index = torch.tensor([0, 1, 127, 128, 300, 2**20, 2**31 - 1], dtype=dtype)
    assert positions.decode(positions.encode(index), 7, 2**31).tolist() == index.tolist()


def test_five_percent_of_a_network_take_about_one_byte_each() -> None:
    index = torch.randperm(1_000_000)[:50_000].sort().values
    assert 50_000 <= len(positions.encode(index)) < 50_200


@pytest.mark.parametrize("index", [[3, 2], [5, 5], [-1]])
def test_positions_that_do_not_increase_raise_an_error(index: list[int]) -> None:
    with pytest.raises(ValueError, match="increase"):
        positions.encode(torch.tensor(index))


BAD = {
    "too few": (b"\x01\x02", "2 positions instead of 3"),
    "too many": (b"\x01\x02\x03\x04", "4 positions instead of 3"),
    "none": (b"", "0 positions instead of 3"),
    "cut off": (b"\x01\x02\x03\x84", "cut off"),
    "beyond the end": (b"\x01\x02\xff\x01", "beyond the 100"),
    "beyond by their sum": (b"\x30\x30\x30", "beyond the 100"),
    "wraps around": (b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" * 3, "beyond the 100"),
    "more bytes than needed": (b"\x01\x82\x00\x03", "more bytes than it needs"),
    "longer than a number can be": (b"\x01\x02" + b"\xff" * 20 + b"\x01", "more bytes than it needs"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_bytes_raise_an_error(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        positions.decode(as_bytes(data), 3, 100)


def test_the_last_position_is_allowed() -> None:
    assert positions.decode(as_bytes(b"\x00\x00\x61"), 3, 100).tolist() == [0, 1, 99]
    with pytest.raises(ValueError, match="beyond"):
        positions.decode(as_bytes(b"\x00\x00\x62"), 3, 100)


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(3).int()])
def test_invalid_tensors_raise_an_error(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="vector of bytes"):
        positions.decode(tensor, 3, 100)


@given(st.binary(max_size=40))
def test_decoded_positions_are_always_valid(data: bytes) -> None:
    try:
        index = positions.decode(as_bytes(data), 5, 1000).tolist()
    except ValueError:
        return
    assert len(set(index)) == 5
    assert index == sorted(index)
    assert 0 <= index[0] <= index[-1] < 1000
    assert by_hand(index) == data
