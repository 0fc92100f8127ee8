"""Blocks of weights: numbers and positions compared with plain loops, and subspaces of whole blocks."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import subspace
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.layout import Slot
from leanbayes.posteriors.subspace.blocks import Blocks, block_shape
from leanbayes.posteriors.subspace.sparse_weight import Pattern, SparseWeight

SHAPES: Any = st.tuples(
    st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8]), st.lists(st.integers(1, 3), max_size=2)
).map(lambda parts: (parts[0], parts[1], *parts[2]))


def slot_of(shape: tuple[int, ...], channels_last: bool = False) -> Slot:
    order = (0, *range(2, len(shape)), 1) if channels_last else tuple(range(len(shape)))
    return Slot(("weight",), shape, order, torch.float32, 1)


def places(slot: Slot) -> dict[tuple[int, ...], int]:
    """Return the position in memory of every weight, by its indices."""
    in_memory = itertools.product(*(range(slot.shape[dim]) for dim in slot.order))
    found = {}
    for position, along in enumerate(in_memory):
        indices = [0] * len(along)
        for dim, place in zip(slot.order, along, strict=True):
            indices[dim] = place
        found[tuple(indices)] = position
    return found


@settings(deadline=None, max_examples=30)
@given(shape=SHAPES, rows=st.sampled_from([1, 2]), columns=st.sampled_from([1, 2, 4]), channels_last=st.booleans())
def test_blocks_hold_neighboring_outputs_and_inputs_of_one_tap(
    shape: tuple[int, ...], rows: int, columns: int, channels_last: bool
) -> None:
    slot = slot_of(shape, channels_last)
    blocks = Blocks(slot, (rows, columns))
    divides = shape[1] % columns == 0 and slot.numel > rows * columns
    assert blocks.shape == ((rows, columns) if divides else (1, 1))
    high, wide = blocks.shape
    members: dict[tuple[int, ...], set[int]] = {}
    for indices, position in places(slot).items():
        members.setdefault((indices[0] // high, indices[1] // wide, *indices[2:]), set()).add(position)
    numbers = blocks.of(torch.arange(slot.numel))
    assert sorted(set(numbers.tolist())) == list(range(blocks.count))
    values = torch.randn(slot.numel, dtype=torch.float64)
    sums = blocks.sums(values)
    for positions in members.values():
        (number,) = {int(numbers[position]) for position in positions}
        assert set(blocks.positions(torch.tensor([number])).tolist()) == positions
        assert float(sums[number]) == pytest.approx(float(values[sorted(positions)].sum()))


def test_patterns_are_parsed() -> None:
    assert block_shape("weight") == (1, 1)
    assert block_shape("16x4") == (16, 4)
    for wrong in ("", "0x4", "4", "2:4", "4x", "x4", "-1x4"):
        with pytest.raises(lb.LeanBayesError, match=r"'weight', or blocks such as '16x16'"):
            lb.SSVI(pattern=wrong)


class Mixed(nn.Module):
    """A layer that 2x4 blocks do not divide, and two that they divide, one of them a channels_last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 6)
        self.second.weight.data = self.second.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


def blocks_of(bnn: lb.BayesianModel, block: tuple[int, int] = (2, 4)) -> list[tuple[Blocks, Tensor]]:
    """Return the blocks of each layer, and the number of active weights of each."""
    posterior, found, start = subspace(bnn), [], 0
    for slot in bnn.layout:
        blocks = Blocks(slot, block)
        inside = (posterior.index >= start) & (posterior.index < start + slot.numel)
        numbers = blocks.of(posterior.index[inside].long() - start)
        found.append((blocks, torch.bincount(numbers, minlength=blocks.count)))
        start += slot.numel
    return found


@pytest.mark.parametrize("start", ["random", "magnitude"])
def test_a_subspace_exchanges_whole_blocks(start: Any) -> None:
    torch.manual_seed(0)
    method = lb.SSVI(0.3, pattern="2x4", interval=1, drop=0.5, subspace=start, init_std=0.01)
    bnn = lb.bayesianize(Mixed(), method).train()
    posterior = subspace(bnn)
    x, y = torch.randn(8, 3, 8, 8), torch.randint(6, (8,))
    optimizers = [torch.optim.Adam(bnn.parameters(), lr=1e-2)]
    training = lb.Training(bnn, 1000, 100, optimizers=list(optimizers), batch=(x, y))
    counts, exchanged = posterior.counts, 0
    assert abs(sum(counts) - 0.3 * bnn.layout.numel) <= 8 * len(counts) / 2
    for _ in range(4):
        lb.elbo_loss(bnn, x, y, num_data=100).backward()
        optimizers[0].step()
        held = blocks_of(bnn)
        scores = method.removal_scores(training, posterior)
        addition_scores = method.addition_scores(training, posterior)
        before, first, begin = posterior.index.clone(), 0, 0
        method.after_step(training)
        training.step += 1
        assert posterior.counts == counts
        for (blocks, old), (_, new), count in zip(held, blocks_of(bnn), counts, strict=True):
            assert set(new.tolist()) <= {0, blocks.size}
            removed, added = (old > 0) & (new == 0), (old == 0) & (new > 0)
            number = min(int(method.drop / 2 * (1 + math.cos(math.pi * training.step / 750)) * count / blocks.size),
                         blocks.count - count // blocks.size)  # fmt: skip
            assert removed.sum() == added.sum() == number
            by_block = torch.zeros(blocks.count).index_add_(
                0, blocks.of(before[first : first + count].long() - begin), scores[first : first + count]
            )
            stayed = (old > 0) & (new > 0)
            if number:
                exchanged += blocks.size > 1
                assert by_block[removed].max() <= by_block[stayed].min() + 1e-5
            block_scores = blocks.sums(addition_scores[begin : begin + blocks.slot.numel])
            left_out = (old == 0) & (new == 0)
            if number and left_out.any():
                assert block_scores[added].min() >= block_scores[left_out].max() - 1e-6
            first, begin = first + count, begin + blocks.slot.numel
        optimizers[0].zero_grad()
    assert [blocks.size for blocks, _ in held] == [1, 8, 8]
    assert exchanged == 4  # the convolution each time; the head is dense


def test_a_converted_model_keeps_its_blocks() -> None:
    torch.manual_seed(1)
    method = lb.SSVI(0.3, pattern="2x4")
    bnn = lb.bayesianize(Mixed(), method)
    again = lb.bayesianize(bnn, method)
    assert torch.equal(subspace(bnn).index, subspace(again).index)


@pytest.mark.parametrize("format", ["blocks", "rows"])
def test_products_with_blocks_equal_dense_products(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pattern, "pays", lambda *args: True)
    shape = (8, 12) if format == "blocks" else (8, 12, 3, 3)  # convolutions use rows of single weights
    slot = slot_of(shape, channels_last=len(shape) > 2)
    blocks = Blocks(slot, (4, 4))
    positions = blocks.positions(torch.randperm(blocks.count)[:3]).sort().values
    weight: Any = SparseWeight(Pattern(positions, slot, (4, 4)), torch.randn(len(positions)))
    assert weight.matrix.layout is (torch.sparse_bsr if format == "blocks" else torch.sparse_csr)
    assert torch.equal(weight.matrix.to_dense(), weight.loc.flatten(1))
    x = torch.randn(5, 12) if format == "blocks" else torch.randn(2, 12, 6, 6)
    function: Any = nn.functional.linear if format == "blocks" else nn.functional.conv2d
    torch.testing.assert_close(function(x, weight), function(x, weight.loc))
