"""The mixture on the plane: densities compared with SciPy, EM compared with scikit-learn, and blends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sharing_cases import plane, random_mixture
from sklearn.mixture import GaussianMixture
from torch import Tensor

from leanbayes.methods.weight_sharing import em
from leanbayes.methods.weight_sharing import tiles as tiles_module
from leanbayes.methods.weight_sharing.assignment import assign_components
from leanbayes.methods.weight_sharing.clustering import kmeans
from leanbayes.methods.weight_sharing.mixture import Mixture, blend_weights
from leanbayes.methods.weight_sharing.tiles import Tiles
from leanbayes.posteriors.shared.codes import blend_moments


def fitted(points: Tensor, count: int) -> tuple[Tiles, Mixture]:
    tiles = Tiles(points)
    return tiles, kmeans(tiles, count)[1]


# -- densities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_the_log_density_equals_scipy(scale: float) -> None:
    mixture = random_mixture(6, 0, scale)
    points = scale * torch.randn(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = zip(mixture.mean, mixture.covariance, mixture.mass / mixture.mass.sum(), strict=True)
    density = sum(float(w) * multivariate_normal(m.numpy(), c.numpy()).pdf(points.numpy()) for m, c, w in parts)
    torch.testing.assert_close(mixture.log_density(points, chunk=7), torch.as_tensor(density).log())


@given(st.integers(0, 10_000), st.sampled_from([1.0, 1e-4]))
@settings(max_examples=40, deadline=None)
def test_bounds_hold_in_a_box_and_are_tight(seed: int, scale: float) -> None:
    mixture = random_mixture(4, seed, scale)
    generator = torch.Generator().manual_seed(seed + 1)
    corners = scale * torch.randn(2, 2, generator=generator)
    low, high = corners.amin(0), corners.amax(0)
    upper, lower = em.densities(mixture)(low.expand(4, 2), high.expand(4, 2), torch.arange(4))
    axis = torch.linspace(0, 1, 41, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).view(-1, 2)
    joint = mixture.log_joint(low + grid * (high - low))
    slack = 1e-3 + 1e-3 * joint.abs().amax(0)
    assert (joint.amax(0) <= upper + slack).all()
    assert (joint.amin(0) >= lower - slack).all()
    torch.testing.assert_close(joint.amin(0), lower.double(), rtol=1e-3, atol=1e-3)


def test_joints_of_tiles_equal_double_precision() -> None:
    points = plane(6000)
    tiles, mixture = fitted(points, 60)
    expected = mixture.log_joint(points)
    seen = 0
    for block, joint in em.log_joints(tiles, em.candidates(tiles, mixture), mixture):
        rows = tiles.order[block.tiles]
        own = expected[rows].gather(2, block.items[:, None].expand(-1, tiles.size, -1)).mT
        valid = block.valid[..., None].expand_as(joint)
        torch.testing.assert_close(joint[valid].double(), own[valid], rtol=1e-4, atol=1e-4)
        seen += len(block.tiles)
    assert seen == len(tiles.x)


def test_candidate_lists_hardly_change_the_likelihood() -> None:
    points = plane(20_000)
    tiles, mixture = fitted(points, 200)
    _, found = em.expectation(tiles, em.candidates(tiles, mixture), mixture)
    assert found == pytest.approx(float(mixture.log_density(points).mean()), abs=1e-3)


def test_small_components_are_not_lost() -> None:
    points = plane(400)  # one or two tiles, with many components each
    tiles, mixture = fitted(points, 100)
    _, found = em.expectation(tiles, em.candidates(tiles, mixture), mixture)
    assert found > float(mixture.log_density(points).mean()) - 1e-3


def test_lists_are_cut_if_there_are_too_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    points = plane(20_000)
    tiles, mixture = fitted(points, 200)
    wide = Mixture(mixture.mean, 1e4 * mixture.covariance, mixture.mass)
    assert int(em.candidates(tiles, wide).sizes.min()) > 190
    monkeypatch.setattr(tiles_module, "_PAIRS", 2000)
    monkeypatch.setattr(tiles_module, "_PER_BOX", 40)
    assert int(em.candidates(tiles, wide).sizes.max()) == 40
    assert em.expectation(tiles, em.candidates(tiles, mixture), mixture)[1] == pytest.approx(
        float(mixture.log_density(points).mean()), abs=0.01
    )


def test_points_in_the_tails_stay_near_their_components() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(20_000, 3, generator=generator).prod(1) * 0.05  # boxes in the tails are large
    points = torch.stack([wide, 0.02 * (0.3 * torch.randn(20_000, generator=generator)).exp()], 1)
    tiles, mixture = fitted(points, 512)
    mixture = em.fit(tiles, mixture, 3, full_steps=1)
    labels = assign_components(tiles, mixture).labels
    best = torch.cat([mixture.log_joint(part).argmax(1) for part in points.split(2000)])
    assert torch.equal(labels, best)
    assert (points - mixture.mean[labels]).abs().max() < 0.03 < wide.abs().max() / 10


# -- EM ---------------------------------------------------------------------------------------------------------------


def test_a_step_equals_plain_em() -> None:
    points = plane(3000)
    tiles, mixture = fitted(points, 8)
    after, _ = em.expectation(tiles, em.candidates(tiles, mixture, slack=1e9), mixture)
    shares = mixture.log_joint(points).softmax(1)
    mass = shares.sum(0)
    mean = shares.T @ points.double() / mass[:, None]
    apart = points.double()[:, None] - mean
    covariance = torch.einsum("nk,nki,nkj->kij", shares, apart, apart) / mass[:, None, None]
    torch.testing.assert_close(after.mass, mass, rtol=1e-4, atol=0)
    torch.testing.assert_close(after.mean, mean, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(after.covariance, covariance, rtol=1e-3, atol=1e-4 * float(covariance.max()))


def test_the_likelihood_increases_in_each_step() -> None:
    tiles, mixture = fitted(plane(20_000), 100)
    found, values = em.candidates(tiles, mixture), []
    for _ in range(15):
        mixture, value = em.expectation(tiles, found, mixture)
        values.append(value)
    increases = torch.tensor(values).diff()
    assert (increases > -1e-6).all()
    assert values[-1] > values[0] + 0.01


def test_mini_batches_increase_the_likelihood_and_are_deterministic() -> None:
    points = plane(30_000)
    tiles, mixture = fitted(points, 60)
    first, again = (em.fit(tiles, mixture, passes=2) for _ in range(2))
    assert first.log_density(points).mean() > mixture.log_density(points).mean()
    assert torch.equal(first.mean, again.mean)
    assert float(first.mass.sum()) == pytest.approx(1)


def test_the_likelihood_is_as_good_as_scikit_learn() -> None:
    points = plane(12_000)
    scaled = (points.double() / points.double().std(0)).float()
    tiles, mixture = fitted(scaled, 40)
    ours = float(em.fit(tiles, mixture, passes=20, batches=1).log_density(scaled).mean())
    theirs = GaussianMixture(40, max_iter=20, tol=0, random_state=0)
    with pytest.warns(UserWarning, match="did not converge"):
        theirs.fit(scaled.double().numpy())
    assert ours > float(theirs.score(scaled.double().numpy())) - 0.01


def test_very_narrow_components_stay_finite() -> None:
    points = torch.stack([torch.randn(2000) * 1e-2, torch.full((2000,), 3e-3)], 1)
    tiles, mixture = fitted(points, 20)
    after = em.fit(tiles, mixture, passes=3)
    assert after.log_density(points).isfinite().all()
    assert (torch.linalg.eigvalsh(after.covariance) > 0).all()


def test_clusters_of_one_point_stay_regular() -> None:
    points = torch.cat([plane(2000), 50 * plane(20, 1)])
    tiles, mixture = fitted(points, 300)
    assert (torch.linalg.eigvalsh(mixture.covariance) > 0).all()
    assert em.fit(tiles, mixture, passes=3).log_density(points).isfinite().all()


# -- blends -----------------------------------------------------------------------------------------------------------


def test_blend_weights_sum_to_one_and_ignore_missing_components() -> None:
    alpha = blend_weights(torch.tensor([[-1.0, -2.0, -torch.inf], [-900.0, -901.0, -902.0]]))
    torch.testing.assert_close(alpha.sum(1), torch.ones(2))
    assert float(alpha[0, 2]) == 0
    torch.testing.assert_close(alpha[0, 0] / alpha[0, 1], torch.tensor(1.0).exp())


def test_moments_of_a_blend_equal_those_of_samples() -> None:
    mean, std = torch.tensor([[-1.0, 0.5, 3.0]]), torch.tensor([[0.3, 0.1, 0.6]])
    alpha = torch.tensor([[0.2, 0.5, 0.3]])
    generator = torch.Generator().manual_seed(0)
    which = alpha[0].multinomial(1_000_000, replacement=True, generator=generator)
    samples = mean[0, which] + std[0, which] * torch.randn(1_000_000, generator=generator)
    center, variance = blend_moments(mean, std, alpha)
    torch.testing.assert_close(center[0], samples.mean(), rtol=0, atol=5e-3)
    torch.testing.assert_close(variance[0], samples.var(), rtol=1e-2, atol=0)
    torch.testing.assert_close(variance[0], (alpha * (std**2 + mean**2)).sum() - center[0] ** 2)
