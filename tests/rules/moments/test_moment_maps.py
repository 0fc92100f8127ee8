"""Variances without maps: one number per channel, if the outputs of a network have no pixels; and in pieces."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.config import decode, encode
from leanbayes.networks import build
from leanbayes.rules import MomentPropagation
from leanbayes.rules.moments.value import shrunk

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
INDEPENDENT = MomentPropagation(maps="independent")


def resnet() -> lb.BayesianModel:
    network = build("resnet-18", (3, 16, 16), 10, seed=0, width=8)
    return lb.bayesianize(network, lb.MeanField(init_std=0.03)).eval()


def _outputs(bnn: lb.BayesianModel, rule: MomentPropagation) -> lb.Moments:
    with torch.no_grad(), bnn.using(rule):
        output = bnn(IMAGES)
    assert isinstance(output, lb.Moments)
    return output


def stored_variances(bnn: lb.BayesianModel, x: torch.Tensor, rule: MomentPropagation) -> tuple[int, int]:
    """Return the number of stored variances of all activations, and the number of activations."""
    numbers = activations = 0

    def count(module: nn.Module, inputs: object, output: lb.Moments) -> None:
        nonlocal numbers, activations
        if output.loc.dim() == 4 and output.loc.shape[-1] > 1:
            numbers += shrunk(output.variance).numel()
            activations += output.loc.numel()

    hooks = [module.register_forward_hook(count) for module in bnn.network.modules() if not list(module.children())]
    with torch.no_grad(), bnn.using(rule):
        bnn(x)
    for hook in hooks:
        hook.remove()
    return numbers, activations


def test_all_layers_store_one_variance_per_channel() -> None:
    bnn = resnet()
    flat, activations = stored_variances(bnn, IMAGES, MomentPropagation())
    full, _ = stored_variances(bnn, IMAGES, INDEPENDENT)
    assert full == activations
    assert flat <= activations / 4  # the last images have 2x2 pixels, the first 16x16


def test_outputs_without_maps_have_the_same_std() -> None:
    bnn = resnet()
    flat, full = (_outputs(bnn, rule) for rule in (MomentPropagation(maps="uniform"), INDEPENDENT))
    ratio = (flat.variance / full.variance).sqrt()
    assert 0.9 < ratio.median() < 1.1
    torch.testing.assert_close(flat.loc, full.loc, atol=0.5 * float(full.stddev.mean()), rtol=0)


def test_a_network_with_pixels_in_its_outputs_keeps_its_maps() -> None:
    bnn = lb.bayesianize(build("unet", (3, 16, 16), 4, seed=0, width=4), lb.MeanField(init_std=0.03)).eval()
    numbers, activations = stored_variances(bnn, IMAGES, MomentPropagation())
    assert numbers > activations / 2


@pytest.mark.parametrize("name", ["unet", "resnet-18"])
def test_the_default_depends_on_the_pixels_of_the_outputs(name: str) -> None:
    bnn = lb.bayesianize(build(name, (3, 16, 16), 4, seed=0, width=4), lb.MeanField(init_std=0.03))
    rules = (MomentPropagation(), MomentPropagation(maps="uniform"), INDEPENDENT)
    with bnn.train().frozen(0):  # in training mode neighbors share no noise
        auto, uniform, independent = (_outputs(bnn, rule).variance for rule in rules)
    assert torch.equal(auto, independent if name == "unet" else uniform)
    assert not torch.equal(uniform, independent)


@pytest.mark.parametrize(("value", "shown"), [("common", "'common' is unknown"), (True, "True"), (None, "None")])
def test_other_values_are_refused(value: Any, shown: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=f"maps={shown}.*auto.*uniform.*independent"):
        MomentPropagation(maps=value)


@pytest.mark.parametrize(("former", "current"), [(None, "auto"), (True, "independent"), (False, "uniform")])
def test_files_with_former_values_load(former: bool | None, current: Any) -> None:
    stored = {**encode(MomentPropagation("none", "taylor")), "maps": former}
    assert decode(stored) == MomentPropagation("none", "taylor", maps=current)


def test_variances_in_pieces_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    parts = [torch.rand(2, 3, 4, 5), torch.rand(2, 2, 1, 1).expand(2, 2, 4, 5)]
    common = torch.randn(6, 2, 5, 1, 1)
    x = lb.Moments(torch.randn(2, 5, 4, 5), torch.cat(parts, 1), common)
    assert len(x.variances_along(1)) == 1
    x.pieces = (1, parts)
    first, second = x.variances_along(-3)
    assert second.shape == (2, 2, 1, 1)
    torch.testing.assert_close(torch.cat([first, second.expand(2, 2, 4, 5)], 1), x.variance)
    assert len(x.variances_along(2)) == 1
    x.pieces = (1, [parts[0], torch.rand(2, 1, 4, 5).expand(2, 2, 4, 5)])  # constant along the channels
    assert len(x.variances_along(1)) == 1


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(8, 6), (35, 40)])  # the second has cells
def test_a_layer_behind_a_concatenation_is_the_same_in_compiled_code(
    size: tuple[int, int], order: torch.memory_format
) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)

        def forward(self, x: Any) -> Any:
            skip = torch.relu(self.down(x))
            small = F.max_pool2d(skip, 2)
            small = F.interpolate(small, size=skip.shape[-2:], mode="bilinear")
            return self.up(torch.cat([skip, small], 1))

    torch.manual_seed(0)
    bnn = lb.bayesianize(Skips(), lb.MeanField(init_std=0.1)).eval()
    x = torch.randn(2, 3, *size).contiguous(memory_format=order)

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        result = bnn(x)
        return result.loc, result.variance, result.common

    with torch.no_grad(), bnn.using("moments"):
        torch.compiler.reset()
        compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")(x)
        for found, expected in zip(compiled, parts(x), strict=True):
            torch.testing.assert_close(found, expected)
