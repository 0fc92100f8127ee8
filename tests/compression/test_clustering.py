"""k-means on the plane: the same labels and centres as all distances give, however close the points lie."""

import pytest
import torch
from compression_cases import plane
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor

import leanbayes as lb
from leanbayes.compression.clustering import assign, first_centres, kmeans, lloyd, relocated
from leanbayes.compression.tiles import Tiles, segment_sum


def all_distances(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None] - centres).square().sum(2)


# -- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 300, 5000, 20_011])
def test_tiles_have_every_point_once(count: int) -> None:
    points = plane(count)
    tiles = Tiles(points)
    assert int(tiles.real.sum()) == count
    assert float(tiles.weight.sum()) == count
    back = tiles.unsorted(torch.stack([tiles.x, tiles.y], 2))
    assert torch.equal(back, points)
    low, high = tiles.levels[-1]
    assert (tiles.x >= low[:, :1]).all()
    assert (tiles.y <= high[:, 1:]).all()


def test_tiles_are_small() -> None:
    tiles = Tiles(plane(131_072))
    low, high = tiles.levels[-1]
    inside = (high - low).prod(1).median()
    top_low, top_high = tiles.levels[0]
    assert inside < (top_high - top_low).prod() / len(low)


def test_sums_by_label() -> None:
    values, labels = torch.randn(100, 3, dtype=torch.float64), torch.randint(7, (100,))
    expected = torch.stack([values[labels == number].sum(0) for number in range(7)])
    torch.testing.assert_close(segment_sum(values, labels, 7), expected)


# -- nearest centres --------------------------------------------------------------------------------------------------


@given(st.integers(1, 6000), st.integers(1, 300), st.integers(0, 1000), st.sampled_from([1.0, 1e-3, 1e-5]))
@settings(max_examples=25, deadline=None)
def test_nearest_centres_are_those_of_all_distances(count: int, number: int, seed: int, scale: float) -> None:
    points = plane(count, seed) * torch.tensor([1.0, scale])
    centres = plane(number, seed + 1) * torch.tensor([1.0, scale])
    assert torch.equal(assign(Tiles(points), centres), all_distances(points, centres).argmin(1))


def test_nearest_centres_that_are_a_thousandth_of_the_spread_apart() -> None:
    """Where ‖x‖² - 2x·c + ‖c‖² in fp32 has no digits left."""
    points = plane(4000)
    near = points[:1] + 1e-3 * points.std(0) * torch.randn(500, 2, generator=torch.Generator().manual_seed(1))
    points = torch.cat([points, near])
    centres = torch.cat([points[:40], near[::5] + 1e-4 * points.std(0)])
    labels = assign(Tiles(points), centres)
    assert torch.equal(labels, all_distances(points.double(), centres.double()).argmin(1))
    expanded = points.square().sum(1)[:, None] - 2 * points @ centres.T + centres.square().sum(1)
    assert not torch.equal(labels, expanded.argmin(1))


def test_equal_centres_give_the_first() -> None:
    points = plane(3000)
    centres = points[:20].repeat(3, 1)
    assert assign(Tiles(points), centres).max() < 20


def test_equal_points() -> None:
    centres, clusters = kmeans(Tiles(torch.ones(1000, 2)), 5)
    assert len(centres) == 1
    assert float(clusters.mass) == 1000
    assert torch.equal(centres, torch.ones(1, 2))
    assert (clusters.covariance.diagonal(dim1=1, dim2=2) > 0).all()


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_gives_the_moments_of_clusters() -> None:
    points, weights = plane(5000), torch.rand(5000, generator=torch.Generator().manual_seed(2))
    centres = points[:40]
    found = lloyd(Tiles(points, weights), centres)
    labels = all_distances(points, centres).argmin(1)
    for number in range(40):
        own, weight = points[labels == number].double(), weights[labels == number].double()
        mean = (weight[:, None] * own).sum(0) / weight.sum()
        torch.testing.assert_close(found.mass[number], weight.sum(), rtol=1e-5, atol=0)
        torch.testing.assert_close(found.mean[number], mean, rtol=1e-5, atol=1e-9)
        if len(own) > 2:
            expected = torch.cov(own.T, correction=0, aweights=weight)
            torch.testing.assert_close(
                found.covariance[number], expected, rtol=1e-3, atol=1e-3 * float(expected.trace())
            )


def test_no_worse_than_scikit_learn() -> None:
    points = plane(20_000)
    centres, clusters = kmeans(Tiles(points), 100, sample_steps=30, full_steps=5)
    ours = float(all_distances(points, centres).amin(1).sum())
    theirs = KMeans(100, n_init=1, random_state=0, max_iter=35).fit(points.numpy()).inertia_
    assert ours < 1.03 * theirs
    assert float(clusters.mass.sum()) == 20_000


def test_steps_on_a_sample_help_and_are_repeated_exactly() -> None:
    tiles = Tiles(plane(60_000))
    (without, _), (first, _), (again, _) = (kmeans(tiles, 50, steps, 1, per_centre=100) for steps in (0, 10, 10))
    points = plane(60_000)
    assert torch.equal(first, again)
    assert all_distances(points, first).amin(1).sum() < 0.97 * all_distances(points, without).amin(1).sum()


def test_centres_move_to_where_they_help() -> None:
    near = 0.01 * torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    far = torch.randn(4000, 2, generator=torch.Generator().manual_seed(1)) + 20
    points = torch.cat([near, far])
    tiles, centres = Tiles(points), torch.cat([near[:95], far[:5]])
    before = float(all_distances(points, lloyd(tiles, centres).mean.float()).amin(1).sum())
    for _ in range(20):
        centres = relocated(lloyd(tiles, centres)).float()
    centres = lloyd(tiles, centres).mean.float()
    assert float(all_distances(points, centres).amin(1).sum()) < 0.2 * before
    assert int((centres[:, 0] > 10).sum()) > 60


def test_weights_draw_centres_to_them() -> None:
    points = plane(8000)
    heavy = points[:, 0] > 0
    weights = torch.where(heavy, 100.0, 1.0)
    plain, _ = kmeans(Tiles(points), 30)
    drawn, _ = kmeans(Tiles(points, weights), 30)
    error = [float(all_distances(points[heavy], centres).amin(1).sum()) for centres in (drawn, plain)]
    assert error[0] < error[1]


def test_first_centres_are_points() -> None:
    points = plane(3000)
    chosen = first_centres(Tiles(points), 200)
    assert (all_distances(chosen, points).amin(1) == 0).all()
    assert len(chosen.unique(dim=0)) == 200


def test_no_components() -> None:
    with pytest.raises(lb.LeanBayesError, match="components=0"):
        kmeans(Tiles(plane(100)), 0)
