"""Densities of layers: the total is exact, every layer has active weights, and ERK matches its paper."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import leanbayes as lb
from leanbayes.core.layout import Layout, Slot, choose
from leanbayes.methods.sparse_training.densities import active_counts
from leanbayes.networks import build

KINDS: Any = ("erk", "uniform")


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    return Layout(
        [Slot((f"w{n}",), shape, tuple(range(len(shape))), torch.float32, 3) for n, shape in enumerate(shapes)]
    )


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), min_size=1, max_size=8),
    st.floats(1e-3, 1),
    st.sampled_from(KINDS),
)
def test_the_total_is_exact_and_every_layer_has_active_weights(
    shapes: list[tuple[int, ...]], density: float, kind: Any
) -> None:
    layout = layout_of(*shapes)
    try:
        counts = active_counts(layout, density, kind)
    except lb.LeanBayesError:
        first = layout.sizes[0] if kind == "uniform" else 1
        assert round(density * layout.numel) < first + len(layout) - 1
        return
    assert abs(sum(counts) - density * layout.numel) <= 0.5 + 1e-6
    assert all(1 <= count <= size for count, size in zip(counts, layout.sizes, strict=True))


def test_uniform_keeps_the_first_layer_dense_and_all_others_equal() -> None:
    layout = layout_of((10, 10), (40, 50), (100, 30), (20, 50))
    counts = active_counts(layout, 0.2, "uniform")
    assert counts[0] == 100
    rest = (0.2 * 6100 - 100) / 6000
    assert counts[1:] == pytest.approx([2000 * rest, 3000 * rest, 1000 * rest], abs=1)


def test_erk_is_the_sum_of_the_dimensions_over_their_product() -> None:
    shapes = [(64, 64, 3, 3), (128, 64, 3, 3), (256, 300)]
    layout = layout_of(*shapes)
    densities = [count / size for count, size in zip(active_counts(layout, 0.02, "erk"), layout.sizes, strict=True)]
    ratios = [sum(shape) / size for shape, size in zip(shapes, layout.sizes, strict=True)]
    factors = [density / ratio for density, ratio in zip(densities, ratios, strict=True)]
    assert max(densities) < 1
    assert factors == pytest.approx([factors[0]] * 3, rel=2e-3)


def test_erk_keeps_stem_and_head_of_resnet_18_dense() -> None:
    bnn = lb.bayesianize(build("resnet18", (3, 32, 32), 10), lb.Deterministic())
    layout, _ = choose(bnn.network, None)
    counts = dict(zip([slot.name for slot in layout], active_counts(layout, 0.05, "erk"), strict=True))
    assert counts["conv1.weight"] == 1728
    assert counts["fc.weight"] == 5120
    assert sum(counts.values()) == round(0.05 * layout.numel)
    largest = 512 * 512 * 9
    assert 0.02 < counts["layers.7.conv2.weight"] / largest < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_a_density_of_one_is_dense(kind: Any) -> None:
    layout = layout_of((3, 4), (5,), (), (2, 3, 3, 3))
    assert active_counts(layout, 1.0, kind) == layout.sizes


def test_impossible_densities_raise_an_error() -> None:
    layout = layout_of((10, 10), (10, 10), (10, 10))
    with pytest.raises(lb.LeanBayesError, match="leaves 2 of 300 weights for 3 layers"):
        active_counts(layout, 0.006, "erk")
    assert active_counts(layout, 0.01, "erk") == [1, 1, 1]
    with pytest.raises(lb.LeanBayesError, match=r"first layer.* has 100: increase it, or use densities='erk'"):
        active_counts(layout, 0.33, "uniform")
    assert active_counts(layout, 0.34, "uniform") == [100, 1, 1]
