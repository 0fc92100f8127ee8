"""Networks whose outputs are maps: neighboring pixels have nearly the same noise."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.rules import MomentPropagation
from leanbayes.rules.moments.map_cells import Cells, at_probes


class SmallUNet(nn.Module):
    """Two resolutions, with a skip connection."""

    def __init__(self, upsample: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 12, 2, stride=2) if upsample == "transposed" else None
        self.mix, self.head = nn.Conv2d(24, 12, 3, padding=1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.relu(self.second(F.max_pool2d(x, 2)))
        y = F.interpolate(y, size=x.shape[-2:], mode="bilinear") if self.up is None else self.up(y)
        return self.head(torch.relu(self.mix(torch.cat([x, y], 1))))


def smooth(height: int, width: int) -> Tensor:
    rough = torch.randn(3, 3, 6, 8, generator=torch.Generator().manual_seed(1))
    return F.interpolate(rough, size=(height, width), mode="bicubic")


def model(network: nn.Module, init_std: float = 0.03) -> lb.BayesianModel:
    return lb.bayesianize(network, lb.MeanField(init_std=init_std), likelihood=lb.Categorical()).eval()


@torch.no_grad()
def closeness(bnn: lb.BayesianModel, x: Tensor, rule: MomentPropagation) -> tuple[float, float]:
    """Return the median ratio of stds to those of 400 samples, and the correlation of log variances of pixels."""
    with bnn.using(rule):
        ours = bnn(x).variance
    generator = torch.Generator().manual_seed(3)
    with bnn.using("sample"):
        true = torch.stack([bnn(x, _draw=bnn.next_draw(generator, n)) for n in range(400)]).var(0)
    logs = torch.stack([part.mean(1).log().flatten() for part in (ours, true)])
    return (ours / true).sqrt().median().item(), torch.corrcoef(logs)[0, 1].item()


@pytest.mark.parametrize("upsample", ["bilinear", "transposed"])
@pytest.mark.parametrize("size", [(48, 64), (40, 36)])
def test_noise_of_neighbors_adds_up(upsample: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    bnn, x = model(SmallUNet(upsample)), smooth(*size)
    ratio, correlation = closeness(bnn, x, MomentPropagation())
    before, _ = closeness(bnn, x, MomentPropagation(maps="independent"))
    assert ratio == pytest.approx(1, abs=0.1)
    assert correlation > 0.85
    assert abs(ratio - 1) < abs(before - 1) - 0.05


class ChannelNorm(nn.LayerNorm):
    """Layer norm of the channels of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS = {
    "instance": nn.InstanceNorm2d,
    "group": lambda width: nn.GroupNorm(4, width),
    "one group": lambda width: nn.GroupNorm(1, width),
    "channels": ChannelNorm,
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_maps_keep_the_noise_of_their_parts(norm: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(12, 12, 3, padding=1), NORMS[norm](12), nn.ReLU()]  # type: ignore[operator]
    bnn, x = model(nn.Sequential(*layers, nn.Conv2d(12, 4, 1))), smooth(48, 48)
    ratio, correlation = closeness(bnn, x, MomentPropagation())
    assert 0.7 < ratio < 1.2
    assert correlation > 0.8


def test_the_pattern_of_one_layer_is_exact() -> None:
    torch.manual_seed(0)
    bnn, x = model(nn.Conv2d(3, 5, 3, padding=1, bias=False)), smooth(20, 27)
    std = 0.2
    with torch.no_grad():
        bnn.posterior.rho.fill_(torch.tensor(std).expm1().log().item())  # type: ignore[operator]
        with bnn.using("moments"):
            variance = bnn(x).variance
    true = std**2 * F.conv2d(x.square(), torch.ones(5, 3, 3, 3), padding=1)
    torch.testing.assert_close(variance.mean((-2, -1)), true.mean((-2, -1)), rtol=0.05, atol=0)  # at the borders
    torch.testing.assert_close(*(v / v.mean((-2, -1), keepdim=True) for v in (variance, true)), rtol=1e-4, atol=1e-6)


def test_correlations_of_classes_are_those_of_samples() -> None:
    """Two outputs with the same weights apart from small noise differ far less than independent ones would."""
    torch.manual_seed(0)
    network = SmallUNet("bilinear")
    with torch.no_grad():
        network.head.weight[1] = network.head.weight[0]
        network.head.bias[1] = network.head.bias[0]  # type: ignore[index]
    bnn, x = (
        lb.bayesianize(network, lb.MeanField(init_std=0.05), select=lambda name, _: "head" not in name),
        smooth(32, 32),
    )
    bnn = bnn.eval()
    output = bnn.predict(x, rule="moments").probs
    samples = bnn.predict(x, rule="sample", samples=300, generator=torch.Generator().manual_seed(0)).probs
    torch.testing.assert_close(output[:, 0], output[:, 1], rtol=1e-2, atol=1e-3)
    assert (output - samples).abs().mean() < 0.01


def test_a_pooled_map_is_not_coherent() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x))).mean((-2, -1))

    torch.manual_seed(0)
    calls: list[int] = []
    network = Pooled()
    bnn, x = model(network), smooth(24, 24)
    bnn.network.first.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    with torch.no_grad(), bnn.using("moments"):
        first = bnn(x)
        assert len(calls) == 1  # hooks do not see the pass that tells the kind of the outputs
        again = bnn(x)
    assert torch.equal(first.variance, again.variance)
    assert not first.within.coherent
    with torch.no_grad(), bnn.using(MomentPropagation(maps="uniform")):
        torch.testing.assert_close(bnn(x).variance, first.variance)


@pytest.mark.parametrize("sides", [(16, 24), (24, 16)])
def test_inputs_of_one_size_do_not_change_predictions_for_another(sides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 12))
    alone, both = model(network), model(network)  # a pixel for images of 16 pixels, a map for larger ones
    first, second = (smooth(side, side) for side in sides)
    with torch.no_grad(), alone.using("moments"), both.using("moments"):
        expected = alone(second)
        both(first)
        assert both(first).within.coherent == (sides[0] == 24)
        found = both(second)
    assert found.within.coherent == (sides[1] == 24)
    assert torch.equal(found.variance, expected.variance)


def test_cells_cover_maps_of_any_size() -> None:
    values = torch.randn(2, 3, 19, 35, dtype=torch.float64)
    cells = Cells.of(values, 2)
    assert cells is not None
    means = cells.means(values)
    assert means.shape == (2, 3, 3, 5)
    torch.testing.assert_close(means[:, :, 2, 4], values[:, :, 16:19, 32:35].mean((-2, -1)))
    torch.testing.assert_close(cells.mean(means), values.mean((-2, -1), keepdim=True))
    assert Cells.of(values[..., :15], 2) is None


def test_probes_are_in_all_parts_of_a_map() -> None:
    values = torch.zeros(1, 2, 16, 8, 8)
    values[0, 1, :, 4:] = 3.0
    found = at_probes(values, 3, 8)
    assert found.shape == (8, 1, 2, 1, 1, 1)
    assert not found[:, 0, 0].any()
    assert found[:, 0, 1].flatten().sort().values.tolist() == [0, 0, 0, 0, 3, 3, 3, 3]
    assert at_probes(torch.rand(1, 2, 5, 3), 2, 64).shape == (64, 1, 2, 1, 1)
