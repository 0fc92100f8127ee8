"""Algorithm 1 up to the final training: outliers, assignment, small components, blends, counts."""

from typing import Any

import pytest
import torch
from sharing_cases import plane
from torch import Tensor

import leanbayes as lb
from leanbayes.methods.weight_sharing.assignment import Assignment, assign_components, dissolve
from leanbayes.methods.weight_sharing.clustering import kmeans
from leanbayes.methods.weight_sharing.codebook import (
    Sharing,
    SharingSettings,
    share_codes,
    share_weights,
)
from leanbayes.methods.weight_sharing.mixture import Mixture
from leanbayes.methods.weight_sharing.outliers import find_outliers, top_share
from leanbayes.methods.weight_sharing.plane import plane_for
from leanbayes.methods.weight_sharing.tiles import Tiles

SETTINGS = SharingSettings(components=60, threshold=0.05, steps=8)


def network(count: int = 20_000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    points = plane(count, seed)
    return points[:, 0], points[:, 1], torch.rand(count, generator=torch.Generator().manual_seed(seed))


def shared(**changes: Any) -> tuple[Sharing, Tensor, Tensor]:
    mean, std, gradient = network()
    return share_weights(mean, std, SharingSettings(**{**vars(SETTINGS), **changes}), gradient), mean, std


# -- outliers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.01, 1), (0.29, 29), (0.999, 99), (1.0, 100)])
def test_the_share_of_outliers_is_exact(share: float, number: int) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    marked = top_share(values, share)
    assert int(marked.sum()) == number
    if 0 < number < 100:
        assert values[marked].abs().min() >= values[~marked].abs().max()


def test_the_first_of_equals_are_outliers() -> None:
    assert torch.equal(top_share(torch.tensor([1.0, -2.0, 2.0, 2.0, 1.0]), 0.4).nonzero()[:, 0], torch.tensor([1, 2]))


def test_outliers_by_mean_and_gradient() -> None:
    mean, gradient = torch.tensor([0.1, -0.3, 0.2, 0.21, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, -5.0])
    assert find_outliers(mean, gradient, 0.2, 0.2).tolist() == [False, True, False, True, True]
    assert find_outliers(mean, None, 0.2).tolist() == [False, True, False, True, False]
    assert not find_outliers(mean, None, None).any()
    with pytest.raises(lb.LeanBayesError, match="between 0 and 1"):
        top_share(mean, 1.5)


# -- assignment -------------------------------------------------------------------------------------------------------


def assigned(count: int = 5000) -> tuple[Tensor, Mixture, Assignment]:
    points = plane(count)
    tiles = Tiles(points)
    mixture = kmeans(tiles, 40)[1]
    return points, mixture, assign_components(tiles, mixture)


def test_labels_and_blends_equal_those_from_all_densities() -> None:
    points, mixture, found = assigned()
    joint = mixture.log_joint(points)
    top = joint.sort(1, descending=True)
    clear = top.values[:, 0] - top.values[:, 1] > 1e-3
    assert torch.equal(found.labels[clear], top.indices[clear, 0])
    apart = points.double() - mixture.mean[found.labels]
    distances = torch.einsum("ni,nij,nj->n", apart, mixture.covariance[found.labels].inverse(), apart)
    blends = torch.zeros(len(points), dtype=torch.bool).index_fill_(0, found.blended, True)
    assert torch.equal(blends[(distances - 5.991).abs() > 1e-2], (distances > 5.991)[(distances - 5.991).abs() > 1e-2])
    assert len(found.blended) > 20
    torch.testing.assert_close(found.alpha.sum(1), torch.ones(len(found.blended)))
    dense = torch.zeros(len(found.blended), 40).scatter_add_(1, found.partners, found.alpha)
    five = torch.full_like(joint, -torch.inf).scatter_(1, top.indices[:, :5], top.values[:, :5]).softmax(1)
    torch.testing.assert_close(dense, five[found.blended].float(), rtol=0, atol=2e-3)


def test_blends_work_with_few_components() -> None:
    points = plane(1000)
    tiles = Tiles(points)
    found = assign_components(tiles, kmeans(tiles, 2)[1])
    assert found.partners.shape == (len(found.blended), 5)
    assert int(found.partners.max()) <= 1
    torch.testing.assert_close(found.alpha.sum(1), torch.ones(len(found.blended)))


@pytest.mark.parametrize("mode", ["outliers", "neighbors"])
def test_small_components_dissolve(mode: Any) -> None:
    points, mixture, found = assigned()
    sizes = torch.bincount(found.labels, minlength=40)
    minimum = int(sizes.median())
    fewer, moved = dissolve(mixture, found, points, minimum, mode)
    small = sizes < minimum
    members = small[found.labels]
    assert len(fewer) == int((~small).sum())
    torch.testing.assert_close(fewer.mean[moved.labels[~members]], mixture.mean[found.labels[~members]])
    if mode == "outliers":
        assert (moved.labels[members] == -1).all()
    else:
        assert torch.equal(moved.labels[members], fewer.log_joint(points[members]).argmax(1))
    assert (moved.labels[moved.blended] >= 0).all()
    assert ((moved.partners >= 0) & (moved.partners < len(fewer))).all()
    assert moved.blended.diff().gt(0).all()
    torch.testing.assert_close(moved.alpha.sum(1), torch.ones(len(moved.blended)))


def test_dissolving_all_components_raises_an_error() -> None:
    points, mixture, found = assigned()
    with pytest.raises(lb.LeanBayesError, match="No component has 10000 members"):
        dissolve(mixture, found, points, 10_000, "outliers")


# -- all steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["plain", "whitened"])
def test_every_weight_is_shared_blended_or_an_outlier(metric: Any) -> None:
    sharing, mean, std = shared(metric=metric)
    loc, variance = sharing.weights(mean, std)
    assert torch.equal((sharing.labels < 0).nonzero()[:, 0], sharing.outliers)
    assert torch.equal(loc[sharing.outliers], mean[sharing.outliers])
    assert (mean.abs() > 0.05)[sharing.outliers].sum() == (mean.abs() > 0.05).sum()
    counts = torch.bincount(sharing.labels[sharing.labels >= 0], minlength=len(sharing.mean))
    assert torch.equal(counts, sharing.counts)
    assert int(counts.min()) >= 20
    assert (loc - mean).std() < 0.2 * mean.std()
    assert (variance.sqrt() - std).std() < 0.6 * std.std()
    assert (sharing.std > 0).all()


def test_sharing_is_deterministic() -> None:
    first, again = shared()[0], shared()[0]
    assert torch.equal(first.labels, again.labels)
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.alpha, again.alpha)


def test_autocast_changes_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = shared()[0]
    assert torch.equal(inside.labels, shared()[0].labels)


def test_without_blends_and_merges() -> None:
    sharing, _, _ = shared(border=None, merge_distance=0.0, minimum=1)
    assert not len(sharing.blended)
    assert len(sharing.mean) == 60


def test_merging_leaves_fewer_components() -> None:
    sharing, mean, std = shared(merge_distance=2e-5)
    assert 1 < len(sharing.mean) < 40
    assert int(sharing.partners.max()) < len(sharing.mean)
    assert (sharing.weights(mean, std)[0] - mean).std() < mean.std()


def test_layers_have_their_own_components() -> None:
    mean, std, _ = network()
    mean = torch.cat([mean[:15_000], mean[15_000:19_990] + 0.01, mean[19_990:]])
    sharing = share_weights(mean, std, SETTINGS, layers=[15_000, 4990, 10])
    first, second, third = sharing.labels[:15_000], sharing.labels[15_000:19_990], sharing.labels[19_990:]
    assert set(first[first >= 0].tolist()).isdisjoint(second[second >= 0].tolist())
    assert (third == -1).all()
    loc, _ = sharing.weights(mean, std)
    assert (loc - mean).std() < 0.2 * mean.std()
    with pytest.raises(lb.LeanBayesError, match="The layers have 3 weights"):
        share_weights(mean, std, SETTINGS, layers=[1, 2])


def test_sensitive_weights_have_smaller_errors() -> None:
    mean, std, _ = network()
    sensitive = mean > 0
    plain = share_weights(mean, std, SETTINGS)
    weighted = share_weights(
        mean, std, SharingSettings(**{**vars(SETTINGS), "metric": "sensitivity"}), None, sensitive * 99.0 + 1
    )
    errors = [(one.weights(mean, std)[0] - mean)[sensitive].square().mean() for one in (weighted, plain)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("changes", [{}, {"metric": "whitened"}, {"bit_price": 0.2, "border": None}])
def test_deterministic_weights_share_with_each_other(changes: dict[str, Any]) -> None:
    mean, std, _ = network()
    fixed = torch.arange(len(mean)) % 3 == 0
    std = torch.where(fixed, 0.0, std)
    sharing = share_weights(mean, std, SharingSettings(**{**vars(SETTINGS), **changes}))
    own = (sharing.std == 0)[sharing.labels.clamp_min(0)]
    inside = sharing.labels >= 0
    assert torch.equal(own[inside], fixed[inside])
    assert not fixed[sharing.blended].any()
    loc, variance = sharing.weights(mean, std)
    assert torch.equal(variance == 0, fixed)
    assert (loc - mean)[fixed].std() < 0.2 * mean.std()


def test_labels_are_ordered_by_gaussian_deterministic_and_zero() -> None:
    mean, std, _ = network(9000)
    kind = torch.arange(9000) % 3  # 0: Gaussian, 1: deterministic, 2: zero
    mean, std = torch.where(kind == 2, 0.0, mean), torch.where(kind == 0, std, 0.0)
    for layers in (None, [4000, 5000]):
        codes = share_codes(mean, std, SharingSettings(40, threshold=0.04, steps=8), layers=layers)
        number, total = len(codes.std), len(codes.mean)
        assert 0 < number < total
        assert codes.covariance.shape == (number, 2, 2)
        expected = torch.where(codes.labels < number, 0, torch.where(codes.labels < total, 1, 2))
        assert torch.equal(expected, kind)
        assert (codes.labels[codes.blended] < number).all()
        assert int(codes.partners.max()) < number
        outliers = (mean.abs() > 0.04) & (kind != 2)
        assert torch.equal(codes.mean[codes.labels[outliers]], mean[outliers])
        gaussians = outliers & (kind == 0)
        assert torch.equal(codes.std[codes.labels[gaussians]], std[gaussians])
        assert (codes.covariance[codes.labels[gaussians]] == 0).all()
        counts = torch.bincount(codes.labels, minlength=total + 1)
        assert (counts[codes.labels[outliers]] == 1).all()


def test_without_components_every_weight_keeps_its_values() -> None:
    mean, std, _ = network(100)
    codes = share_codes(mean, std, SharingSettings(None))
    assert torch.equal(codes.mean[codes.labels], mean)
    assert torch.equal(codes.std[codes.labels], std)


@pytest.mark.parametrize("metric", ["plain", "whitened"])
def test_covariances_are_those_of_mean_and_std(metric: Any) -> None:
    sharing, mean, std = shared(metric=metric, components=5, border=None, merge_distance=0.0)
    member = sharing.labels == int(sharing.counts.argmax())
    expected = torch.stack([mean[member], std[member]]).cov()
    found = sharing.covariance[sharing.counts.argmax()]
    # EM assigns members softly, and log σ is linearized.
    torch.testing.assert_close(found.diagonal().sqrt(), expected.diagonal().sqrt(), rtol=0.4, atol=0)


def test_coordinates_of_the_plane_are_inverted() -> None:
    mean, std, _ = network(100)
    for metric in ("plain", "whitened"):
        chosen = plane_for(metric, mean, std)
        back = chosen.weights(chosen.points(mean, std))
        torch.testing.assert_close(back, (mean, std))


def test_invalid_input_raises_an_error() -> None:
    mean, std, _ = network(100)
    with pytest.raises(lb.LeanBayesError, match="Too few weights can share"):
        share_weights(mean, std, SETTINGS, layers=[10] * 10)
    with pytest.raises(lb.LeanBayesError, match="finite"):
        share_weights(mean, -std, SharingSettings(2))
    with pytest.raises(lb.LeanBayesError, match="needs the sensitivity"):
        share_weights(mean, std, SharingSettings(2, metric="sensitivity"))
    with pytest.raises(lb.LeanBayesError, match="not all 0"):
        share_weights(mean, std, SharingSettings(2, metric="sensitivity"), sensitivity=0 * std)
    with pytest.raises(lb.LeanBayesError, match="at most 1e\\+09"):
        share_weights(mean, std * 1e20, SharingSettings(2))
    metric: Any = "round"
    with pytest.raises(lb.LeanBayesError, match="'round' is unknown"):
        share_weights(mean, std, SharingSettings(2, metric=metric))
