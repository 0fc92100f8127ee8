"""k-means on the plane: labels and centers equal those from all distances, for any density of points."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_cases import plane
from sklearn.cluster import KMeans
from torch import Tensor

import leanbayes as lb
from leanbayes.methods.weight_sharing.clustering import assign, first_centers, kmeans, lloyd, relocated
from leanbayes.methods.weight_sharing.tiles import Tiles, segment_sum


def all_distances(points: Tensor, centers: Tensor) -> Tensor:
    return (points[:, None] - centers).square().sum(2)


# -- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 300, 5000, 20_011])
def test_tiles_hold_every_point_once(count: int) -> None:
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


def test_segment_sums() -> None:
    values, labels = torch.randn(100, 3, dtype=torch.float64), torch.randint(7, (100,))
    expected = torch.stack([values[labels == number].sum(0) for number in range(7)])
    torch.testing.assert_close(segment_sum(values, labels, 7), expected)


# -- nearest centers --------------------------------------------------------------------------------------------------


@given(st.integers(1, 6000), st.integers(1, 300), st.integers(0, 1000), st.sampled_from([1.0, 1e-3, 1e-5]))
@settings(max_examples=25, deadline=None)
def test_nearest_centers_are_exact(count: int, number: int, seed: int, scale: float) -> None:
    points = plane(count, seed) * torch.tensor([1.0, scale])
    centers = plane(number, seed + 1) * torch.tensor([1.0, scale])
    assert torch.equal(assign(Tiles(points), centers), all_distances(points, centers).argmin(1))


def test_nearest_centers_are_exact_if_centers_are_close() -> None:
    """At these distances ‖x‖² - 2x·c + ‖c‖² cancels in fp32."""
    points = plane(4000)
    near = points[:1] + 1e-3 * points.std(0) * torch.randn(500, 2, generator=torch.Generator().manual_seed(1))
    points = torch.cat([points, near])
    centers = torch.cat([points[:40], near[::5] + 1e-4 * points.std(0)])
    labels = assign(Tiles(points), centers)
    assert torch.equal(labels, all_distances(points.double(), centers.double()).argmin(1))
    expanded = points.square().sum(1)[:, None] - 2 * points @ centers.T + centers.square().sum(1)
    assert not torch.equal(labels, expanded.argmin(1))


def test_the_first_of_equal_centers_is_nearest() -> None:
    points = plane(3000)
    centers = points[:20].repeat(3, 1)
    assert assign(Tiles(points), centers).max() < 20


def test_equal_points_form_one_cluster() -> None:
    centers, clusters = kmeans(Tiles(torch.ones(1000, 2)), 5)
    assert len(centers) == 1
    assert float(clusters.mass) == 1000
    assert torch.equal(centers, torch.ones(1, 2))
    assert (clusters.covariance.diagonal(dim1=1, dim2=2) > 0).all()


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_lloyd_step_returns_the_moments_of_clusters() -> None:
    points, weights = plane(5000), torch.rand(5000, generator=torch.Generator().manual_seed(2))
    centers = points[:40]
    found = lloyd(Tiles(points, weights), centers)
    labels = all_distances(points, centers).argmin(1)
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


def test_kmeans_is_as_good_as_scikit_learn() -> None:
    points = plane(20_000)
    centers, clusters = kmeans(Tiles(points), 100, sample_steps=30, full_steps=5)
    ours = float(all_distances(points, centers).amin(1).sum())
    theirs = KMeans(100, n_init=1, random_state=0, max_iter=35).fit(points.numpy()).inertia_
    assert ours < 1.03 * theirs
    assert float(clusters.mass.sum()) == 20_000


def test_steps_on_a_sample_help_and_are_deterministic() -> None:
    tiles = Tiles(plane(60_000))
    (without, _), (first, _), (again, _) = (kmeans(tiles, 50, steps, 1, per_center=100) for steps in (0, 10, 10))
    points = plane(60_000)
    assert torch.equal(first, again)
    assert all_distances(points, first).amin(1).sum() < 0.97 * all_distances(points, without).amin(1).sum()


def test_centers_move_to_where_they_reduce_the_error() -> None:
    near = 0.01 * torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    far = torch.randn(4000, 2, generator=torch.Generator().manual_seed(1)) + 20
    points = torch.cat([near, far])
    tiles, centers = Tiles(points), torch.cat([near[:95], far[:5]])
    before = float(all_distances(points, lloyd(tiles, centers).mean.float()).amin(1).sum())
    for _ in range(20):
        centers = relocated(lloyd(tiles, centers)).float()
    centers = lloyd(tiles, centers).mean.float()
    assert float(all_distances(points, centers).amin(1).sum()) < 0.2 * before
    assert int((centers[:, 0] > 10).sum()) > 60


def test_heavy_points_attract_centers() -> None:
    points = plane(8000)
    heavy = points[:, 0] > 0
    weights = torch.where(heavy, 100.0, 1.0)
    plain, _ = kmeans(Tiles(points), 30)
    weighted, _ = kmeans(Tiles(points, weights), 30)
    error = [float(all_distances(points[heavy], centers).amin(1).sum()) for centers in (weighted, plain)]
    assert error[0] < error[1]


def test_initial_centers_are_points() -> None:
    points = plane(3000)
    chosen = first_centers(Tiles(points), 200)
    assert (all_distances(chosen, points).amin(1) == 0).all()
    assert len(chosen.unique(dim=0)) == 200


def test_zero_components_raise_an_error() -> None:
    with pytest.raises(lb.LeanBayesError, match="components=0"):
        kmeans(Tiles(plane(100)), 0)
