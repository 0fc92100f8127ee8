"""Small networks with the rule `moments`: one pass against plain networks and weight samples."""

from typing import Any

import pytest
from moment_networks import (
    assert_compiles,
    assert_plain_without_noise,
    assert_precise_variances,
    assert_predicts,
    assert_std_of_samples,
    moments_of,
    with_noise,
)
from network_cases import CASES, Case, floats, seeded

from leanbayes import networks as models

# Networks of leanbayes: the shape of their input, and options that make them small.
BUILT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "lenet-5": ((1, 16, 16), {}),
    "resnet-18": ((3, 8, 8), {"width": 4}),
    "resnet-20": ((3, 8, 8), {"width": 4}),
    "resnet-50": ((3, 8, 8), {"width": 4}),
    "unet": ((2, 16, 18), {"width": 4}),
    "vit-tiny": ((3, 8, 8), {"depth": 2, "patch": 4}),
    "wrn-28-10": ((3, 8, 8), {"depth": 10, "widen": 1}),
}


def _built(name: str) -> Case:
    shape, options = BUILT[name]
    return Case(name, seeded(lambda: models.build(name, shape, 5, seed=0, **options)), floats(*shape), 5)


NETWORKS = {**CASES, **{name: _built(name) for name in BUILT}}
INEXACT = ("vit_mha", "language_model")  # nn.MultiheadAttention multiplies in another order
# Ratio of the predicted std and that of samples, median over outputs: 1.52 for resnet-18, 0.91 to 1.12 for others.
RANGES = {"resnet-18": (0.85, 1.8)}


@pytest.mark.parametrize("name", NETWORKS)
def test_means_without_noise_equal_the_plain_network(name: str) -> None:
    case = NETWORKS[name]
    assert_plain_without_noise(case.build(), case.example(), 1e-6 if name in INEXACT else 0.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_std_equals_that_of_weight_samples(name: str) -> None:
    assert_std_of_samples(NETWORKS[name].build(), NETWORKS[name].example(), *RANGES.get(name, (0.85, 1.25)))


@pytest.mark.parametrize("name", NETWORKS)
def test_prediction(name: str) -> None:
    assert_predicts(NETWORKS[name].build(), NETWORKS[name].example())


@pytest.mark.parametrize("name", ["resnet"])
def test_compilation(name: str) -> None:
    assert_compiles(NETWORKS[name].build(), NETWORKS[name].example())


@pytest.mark.parametrize("name", ["resnet", "vit_mha", "vit_timm", "conv1d", "resnet-20", "vit-tiny"])
def test_variances_stay_in_single_precision(name: str) -> None:
    assert_precise_variances(NETWORKS[name].build(), NETWORKS[name].example())


def test_more_noise_in_the_weights_gives_more_noise_in_the_outputs() -> None:
    case = NETWORKS["lstm"]
    little, much = (moments_of(with_noise(case.build(), std), case.example()).stddev for std in (0.01, 0.05))
    assert (much > 3 * little).all()
    assert (much < 6 * little).all()
