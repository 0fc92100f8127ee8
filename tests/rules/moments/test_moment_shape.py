"""Functions that move elements: the covariance moves with them, and the common part stays small."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_covariances import assert_linear, expected_covariance, random_value, size_of_common
from torch import Tensor

import leanbayes as lb

INDEX = torch.tensor([2, 0, 1])
MASK = torch.tensor([True, False, True, True])
IMAGE = (2, 3, 4, 5)  # common noise along the last two dimensions

VIEWS: dict[str, Any] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute of a list": lambda x: torch.permute(x, (3, 0, 1, 2)),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose by name": lambda x: torch.transpose(input=x, dim0=0, dim1=2),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "movedim": lambda x: x.movedim((0, 2), (1, -1)),
    "moveaxis": lambda x: torch.moveaxis(x, 1, -1),
    "mT": lambda x: x.mT,
    "t": lambda x: x[0, :, 0].t(),
    "squeeze": lambda x: x[:, :1, :, :1].squeeze(),
    "squeeze one": lambda x: x[:, :1, :, :1].squeeze(1),
    "squeeze many": lambda x: x[:, :1, :, :1].squeeze((1, 3)),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "select": lambda x: x.select(1, -1).select(-1, 2),
    "narrow": lambda x: x.narrow(1, 1, 2).narrow(2, 1, 3),
    "slices": lambda x: x[:, 1:, ::2, -3:],
    "integer": lambda x: x[1, :, -1],
    "ellipsis and None": lambda x: x[..., None, 1:, :],
    "index tensor": lambda x: x[:, INDEX],
    "index of positions": lambda x: x[..., INDEX],
    "index list": lambda x: x[:, [0, 2], 1:],
    "two index tensors": lambda x: x[:, INDEX, INDEX],
    "index tensors apart": lambda x: x[:, INDEX, :, INDEX],
    "index tensor and integer": lambda x: x[1, :, INDEX],
    "index that broadcasts": lambda x: x[:, INDEX[:, None], INDEX],
    "mask": lambda x: x[:, :, MASK],
    "mask of all": lambda x: x[torch.ones(IMAGE).tril() > 0],
    "index_select": lambda x: x.index_select(1, INDEX).index_select(3, INDEX),
    "gather": lambda x: x.gather(1, INDEX.expand(2, 4, 5, 3).permute(0, 3, 1, 2)),
    "gather positions": lambda x: x.gather(3, INDEX.expand(2, 2, 4, 3)),
    "take_along_dim": lambda x: x.take_along_dim(INDEX[None, :, None, None], 1),
    "take_along_dim flat": lambda x: x.take_along_dim(INDEX),
    "unbind": lambda x: x.unbind(1)[2],
    "iteration": lambda x: list(x)[1],
    "split": lambda x: x.split(2, 1)[1],
    "split sizes": lambda x: torch.split(x, [1, 2], dim=1)[1],
    "chunk": lambda x: x.chunk(2, -2)[1],
    "tensor_split": lambda x: x.tensor_split(2, 1)[0],
    "flip": lambda x: x.flip(1, 3),
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "roll flat": lambda x: torch.roll(x, 7),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "reshape": lambda x: x.reshape(2, 3, 20),
    "view": lambda x: x.view(2, 3, 2, 2, -1),
    "view to merge": lambda x: x.view(6, 20).view(-1),
    "view to split otherwise": lambda x: x.view(2, 4, 15),
    "flatten": lambda x: torch.flatten(x, 1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "ravel": lambda x: x.ravel(),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 6, 4, 5)[:, :4], 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[..., :4], 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x.reshape(1, 6, 4, 5), 3),
    "windows": lambda x: x[..., :4].reshape(2, 3, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(8, 4, 3),
    "windows back": lambda x: (
        x[..., :4]
        .reshape(2, 3, 2, 2, 2, 2)
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(8, 4, 3)[:, :, 1:]
        .reshape(2, 2, 2, 2, 2, 2)
    ),
    "clone": lambda x: x.clone().contiguous(),
}
COPIES: dict[str, Any] = {
    "expand": lambda x: x[:, :1].expand(-1, 3, 4, 5),
    "expand new": lambda x: x.expand(2, *IMAGE),
    "expand_as": lambda x: x[:1].expand_as(torch.zeros(IMAGE)),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x[:, :1], torch.zeros(3, 1, 1))[0],
    "repeat": lambda x: x.repeat(2, 1, 2, 1),
    "repeat new": lambda x: x.repeat(2, 1, 1, 1, 1),
    "tile": lambda x: torch.tile(x, (2, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave unevenly": lambda x: torch.repeat_interleave(x, INDEX, dim=1),
}


@pytest.mark.parametrize("positions", [None, (2, 3)], ids=["independent", "common"])
@pytest.mark.parametrize("name", VIEWS)
def test_covariance_moves_with_the_elements(name: str, positions: tuple[int, ...] | None) -> None:
    assert_linear(VIEWS[name], random_value(IMAGE, positions=positions))


@pytest.mark.parametrize("positions", [None, (2, 3)], ids=["independent", "common"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_have_the_same_variance(name: str, positions: tuple[int, ...] | None) -> None:
    assert_linear(COPIES[name], random_value(IMAGE, positions=positions), whole=False)


SPREADING = {"view to merge", "view to split otherwise", "roll flat", "ravel", "diagonal", "mask of all"}


@pytest.mark.parametrize("name", sorted((VIEWS | COPIES).keys() - SPREADING))
def test_the_common_part_stays_small(name: str) -> None:
    """If it were expanded, it would have the size of the map."""
    x = random_value((2, 3, 4, 5), positions=(2, 3))
    size = size_of_common((VIEWS | COPIES)[name](x))
    assert size <= 4 * size_of_common(x)


@st.composite
def _chain(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[str, Any]]]:
    """Draw a shape, its positions, and permutations and reshapes to other factorizations."""
    shape = list(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    positions = tuple(dim for dim in range(len(shape)) if draw(st.booleans()))
    start, steps = tuple(shape), []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            order = draw(st.permutations(range(len(shape))))
            shape = [shape[dim] for dim in order]
            steps.append(("permute", order))
        else:
            rest, shape = math.prod(shape), []
            while rest > 1:
                shape.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
                rest //= shape[-1]
                if len(shape) == 4:
                    shape.append(rest)
                    break
            shape = shape or [1]
            steps.append(("reshape", list(shape)))
    return start, positions, steps


@settings(max_examples=80, deadline=None)
@given(_chain())
def test_chains_of_reshapes_and_permutations(
    chain: tuple[tuple[int, ...], tuple[int, ...], list[tuple[str, Any]]],
) -> None:
    shape, positions, steps = chain

    def follow(x: Any) -> Any:
        for name, argument in steps:
            x = getattr(x, name)(argument)
        return x

    assert_linear(follow, random_value(shape, positions=positions))
    result = assert_linear(lambda x: (follow(x) * 2)[..., :1].mean(-1), random_value(shape, positions=positions))
    assert math.prod(result.grid) == result.numel()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_indices(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    positions = tuple(dim for dim in range(len(shape)) if data.draw(st.booleans()))
    key: list[Any] = []
    for size in shape:
        if data.draw(st.integers(0, 4)) == 0:
            key.append(None)
        kinds = [st.integers(-size, size - 1), st.slices(size).filter(lambda part: (part.step or 1) > 0)]
        kinds.append(
            st.permutations(range(size)).map(lambda order: torch.tensor(order[:2])) if size > 1 else st.just(0)
        )
        key.append(data.draw(st.one_of(*kinds)))
    key = key[: data.draw(st.integers(0, len(key)))]
    x = random_value(shape, positions=positions)
    if x.loc[tuple(key)].numel():
        assert_linear(lambda x: x[tuple(key)], x)
    else:
        assert x[tuple(key)].variance.shape == x.loc[tuple(key)].shape


def test_cat_of_channels_keeps_their_common_noise() -> None:
    x, y, z = (
        random_value((2, 3, 4, 4), positions=(2, 3)),
        random_value((2, 2, 4, 4), 1, positions=(2, 3)),
        torch.randn(2, 1, 4, 4),
    )
    result = assert_linear(lambda x, y: torch.cat([x, z.double(), y], 1), x, y)
    assert size_of_common(result) == 2 * 6
    assert_linear(lambda x, y: torch.cat((x[:, :2], y), dim=-3), x, y)
    assert_linear(lambda x, y: torch.stack([x[:, :2], y], -1), x, y)
    assert_linear(lambda x, y: torch.hstack([x, y]), x, y)
    assert_linear(lambda x, y: torch.vstack([x[:, :2], y]), x, y)
    assert_linear(lambda x, y: torch.cat([x, z.double()], 1), x, y.detach())


def _join(tokens: Any, token: Any) -> Any:
    return torch.cat([token, tokens], dim=1)


def test_cat_of_positions_shares_the_mean_noise() -> None:
    tokens, token = random_value((2, 6, 3), positions=(1,)), random_value((2, 1, 3), 1, 0.6, positions=(1,))
    result = assert_linear(_join, tokens, token, whole=False)
    assert size_of_common(result) == 2 * 3
    assert result.common is not None
    mean = (token.common + 6 * tokens.common) / 7
    direction = torch.nn.functional.cosine_similarity(result.common, mean, dim=0)
    torch.testing.assert_close(direction, torch.ones_like(direction))
    shared = result.common.square().sum(0)
    bounds = [part.square().sum(0) for part in (mean, token.common, tokens.common)]
    torch.testing.assert_close(shared, torch.minimum(torch.minimum(bounds[0], bounds[1]), bounds[2]))


def test_cat_of_positions_with_equal_noise_keeps_all_of_it() -> None:
    x = random_value((2, 6, 3), positions=(1,))
    assert_linear(lambda x: torch.cat([x[:, :2], x[:, 2:]], 1), x)


def test_a_token_without_noise_gets_none_from_the_others() -> None:
    tokens = random_value((2, 6, 3), positions=(1,))
    assert_linear(lambda x: torch.cat([torch.ones(2, 1, 3, dtype=x.dtype), x], 1), tokens, whole=False)


def test_cat_of_values_with_and_without_common_noise() -> None:
    x, y = random_value((2, 3, 4)), random_value((2, 3, 4), 1, positions=(2,))
    assert_linear(lambda x: torch.cat([x, torch.ones(2, 1, 4, dtype=torch.float64)], 1), x)
    assert_linear(lambda x, y: torch.cat([x, y], 1), x, y)
    expected = expected_covariance(lambda x, y: torch.cat([x, y], 2), x, y).diagonal().reshape(2, 3, 8)
    joined: Any = torch.cat([x, y], 2)
    torch.testing.assert_close(joined.variance.mean(2), expected.mean(2))


def test_conversions_keep_variances_in_single_precision() -> None:
    x = random_value((2, 3, 4), positions=(2,), dtype=torch.float32)
    for coarse in (x.to(torch.bfloat16), x.bfloat16(), x.half(), x.to("cpu", torch.float16), x.type(torch.bfloat16)):
        assert coarse.dtype in (torch.bfloat16, torch.float16)
        assert torch.equal(coarse.independent, x.independent)
        assert coarse.common is not None
        assert torch.equal(coarse.common, x.common)
    fine = x.to(torch.zeros(1, dtype=torch.float64))
    assert fine.dtype == fine.independent.dtype == torch.float64
    assert x.type_as(fine).dtype == torch.float64
    assert torch.zeros(2).to(fine).dtype == torch.float64
    assert not isinstance(x.long(), lb.Moments)
    views = [x.bfloat16().reshape(6, 4), x.bfloat16()[:, 1], torch.cat([x.bfloat16(), x.bfloat16()], 1)]
    assert all(view.independent.dtype == torch.float32 and view.dtype == torch.bfloat16 for view in views)


def test_deterministic_results() -> None:
    x = random_value((2, 3))
    assert torch.equal(x.new_zeros(4), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(torch.ones_like(x), torch.ones_like(x.loc))
    assert torch.equal(x > 0, x.loc > 0)
    assert torch.equal(torch.zeros(2, 3).double() > x, x.loc < 0)
    assert torch.equal(x.argmax(-1), x.loc.argmax(-1))
    assert torch.equal(torch.isnan(x), torch.isnan(x.loc))
    assert torch.is_floating_point(x)
    assert torch.numel(x) == 6


def test_detach_and_detach_in_place() -> None:
    x = random_value((2, 3), positions=(1,))
    x.requires_grad_()
    assert (x * 1).requires_grad
    assert not x.detach().requires_grad
    y = x.clone()
    assert y.unsqueeze_(0) is y
    assert y.shape == (1, 2, 3)
    assert x.shape == (2, 3)


def test_gradients_flow_through_all_parts() -> None:
    x = random_value((2, 4, 3, 3), positions=(2, 3))
    parts = [part.clone().requires_grad_() for part in (x.loc, x.independent, x.common)]
    value: Any = lb.Moments(*parts, within=x.within)
    result: Any = torch.cat([value.flatten(2).transpose(1, 2)[:, 1:], value.reshape(2, 9, 4)], 1).chunk(2, -1)[0]
    (result.loc.sum() + result.variance.sum()).backward()
    assert all(part.grad is not None and part.grad.isfinite().all() and part.grad.any() for part in parts)


def _chain_of_views(x: Any) -> Any:
    y = x.permute(0, 2, 3, 1).reshape(2, 16, 4)
    q, k = y.chunk(2, -1)
    y = torch.cat([q, k[:, :, :1], torch.zeros(2, 16, 1, dtype=x.dtype)], -1)
    y = y.unflatten(1, (4, 4)).movedim(-1, 1)
    return y.reshape(4, 2, 16).transpose(0, 1).flatten(1)


def test_compiles() -> None:
    x = random_value((2, 4, 4, 4), positions=(2, 3))

    def parts(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        result = _chain_of_views(lb.Moments(loc, independent, common, within=x.within))
        return result.loc, result.variance

    given = (x.loc, x.independent, x.common)
    compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")(*given)
    for found, expected in zip(compiled, parts(*given), strict=True):
        torch.testing.assert_close(found, expected)
