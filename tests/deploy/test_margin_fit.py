"""Tests of how the two variances of margins are combined, which `lb.calibrate(..., layers=True)` fits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.cli.info import _file_lines
from leanbayes.core.network import evaluation_mode
from leanbayes.deploy.header import moment_margins_of
from leanbayes.deploy.loading import describe
from leanbayes.errors import FileFormatError
from leanbayes.rules import Adjoint, MarginFit


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5)]
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def calibrated() -> tuple[lb.BayesianModel, Tensor]:
    bnn = lb.bayesianize(network(), lb.MeanField(init_std=0.15)).eval()
    x = 2 * torch.randn(160, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    source = torch.Generator().manual_seed(2)
    lb.calibrate(bnn, [x[:128]], to="samples", layers=True, factors=False, samples=48, generator=source)
    return bnn, x


@torch.no_grad()
def logs(bnn: lb.BayesianModel, x: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log variances of the margin: by a backward pass, by one pass, and by samples."""
    with bnn.using("adjoint"):
        output = bnn(x)
    own, two = (2 * output.variance[:, 0]).log(), output.loc.topk(2, 1).indices
    with bnn.using("moments"):
        out = bnn(x)
    covariance = torch.diag_embed(out.independent)
    if out.common is not None:
        covariance = covariance + torch.einsum("rni,rnj->nij", out.common, out.common)
    rows, (i, j) = torch.arange(len(x)), two.unbind(1)
    first = (covariance[rows, i, i] + covariance[rows, j, j] - 2 * covariance[rows, i, j]).log()
    source = torch.Generator().manual_seed(3)
    outputs = bnn.predict(x, rule="sample", samples=samples, generator=source, keep_outputs=True).outputs
    true = outputs.gather(2, two.expand(samples, *two.shape)).diff(dim=2)[..., 0].var(0).log()
    return own, first, true


def test_the_fit_is_least_squares(calibrated: tuple[lb.BayesianModel, Tensor]) -> None:
    """Against NumPy's least squares, with 2000 samples in place of 48."""
    bnn, x = calibrated
    own, first, true = logs(bnn, x[:128], 2000)
    columns = np.stack([(own - first).numpy(), np.ones(128)], 1)
    (weight, offset), *_ = np.linalg.lstsq(columns, (true - first).numpy(), rcond=None)
    assert 0.05 < weight < 1  # so that no limit applies
    assert len(bnn.moment_margins) == 3
    assert bnn.moment_margins[0].weight == pytest.approx(weight, abs=0.12)
    assert bnn.moment_margins[0].factor == pytest.approx(np.exp(offset / 2), rel=0.05)


def test_predictions_use_the_fit(calibrated: tuple[lb.BayesianModel, Tensor]) -> None:
    """On other inputs, the combined variances are closer to samples than either of the two."""
    bnn, x = calibrated
    own, first, true = logs(bnn, x[128:], 2000)
    weight, factor, *_ = bnn.moment_margins[0]
    expected = (1 - weight) * first + weight * own + 2 * np.log(factor)
    prediction = bnn.predict(x[128:], rule=Adjoint(mean="moments"), keep_outputs=True)
    with torch.no_grad(), bnn.using("adjoint"), evaluation_mode(bnn):
        same = (bnn(x[128:]).loc.topk(2, 1).indices == prediction.outputs[0].topk(2, 1).indices).all(1)
    assert same.sum() > 10
    torch.testing.assert_close(2 * prediction.margin_std[same].log(), expected[same], rtol=1e-4, atol=1e-4)
    errors = [(found - true).square().mean() for found in (expected, own, first)]
    assert errors[0] < min(errors[1:])


@torch.no_grad()
def test_the_fit_of_all_noise_is_least_squares(calibrated: tuple[lb.BayesianModel, Tensor]) -> None:
    """Against NumPy's least squares of the mean log variance of the logits, with 2000 samples in place of 48."""
    bnn, x = calibrated
    x = x[:128]
    source = torch.Generator().manual_seed(3)
    true = bnn.predict(x, rule="sample", samples=2000, generator=source, keep_outputs=True).outputs.var(0).log().mean(1)
    with bnn.using("moments"):
        first = bnn(x).variance.log().mean(1)
    for count, fit in enumerate(bnn.moment_margins, 1):
        ratios = []
        for k in range(1, count + 1):  # a margin at a time, by brute force: the largest logit and the k-th other one
            ratios.append(margin_ratio(bnn, x, k))
        columns = np.stack([torch.stack(ratios).mean(0).numpy(), np.ones(len(x))], 1)
        (weight, offset), *_ = np.linalg.lstsq(columns, (true - first).numpy(), rcond=None)
        assert 0 < weight < 1  # so that no limit applies
        assert fit.total_weight == pytest.approx(weight, abs=0.12)
        assert fit.total_factor == pytest.approx(np.exp(offset / 2), rel=0.05)


def test_a_constant_logit_does_not_count() -> None:
    class Masked(nn.Module):
        """A class that is impossible, as masks of language models make them."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).masked_fill(torch.tensor([False, True, False, False]), -30.0)

    torch.manual_seed(0)
    bnn = lb.bayesianize(Masked(), lb.MeanField(init_std=0.2)).eval()
    source = torch.Generator().manual_seed(0)
    lb.calibrate(bnn, [torch.randn(64, 4)], to="samples", layers=True, factors=False, generator=source)
    assert len(bnn.moment_margins) == 3
    assert all(0 <= fit.total_weight <= 1 and 0.3 < fit.total_factor < 3 for fit in bnn.moment_margins)


def margin_ratio(bnn: lb.BayesianModel, x: Tensor, k: int) -> Tensor:
    """Return the log of the ratio of two variances of a margin: by gradients of single examples, and by one pass."""
    with bnn.using("mean"):
        order = bnn(x).topk(k + 1, 1).indices[:, [0, k]]
    with bnn.using("moments"):
        out = bnn(x)
    covariance = torch.diag_embed(out.independent) + torch.einsum("rni,rnj->nij", out.common, out.common)
    rows, (i, j) = torch.arange(len(x)), order.unbind(1)
    first = covariance[rows, i, i] + covariance[rows, j, j] - 2 * covariance[rows, i, j]
    net = bnn.to_deterministic().eval()
    weights: dict[str, Tensor] = dict(net.named_parameters())
    variances = dict(zip([slot.name for slot in bnn.layout], bnn.layout.split(bnn.posterior.variance()), strict=True))

    def margin(weights: dict[str, Tensor], x: Tensor, order: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights, x[None])[0, order].diff().neg()[0]

    gradients = torch.func.vmap(torch.func.grad(margin), (None, 0, 0))(weights, x, order)
    parts = [(gradients[name].square() * variance).flatten(1).sum(1) for name, variance in variances.items()]
    return (torch.stack(parts).sum(0) / first).log()


def test_files_keep_the_fit(calibrated: tuple[lb.BayesianModel, Tensor], tmp_path: Path) -> None:
    bnn, x = calibrated
    path = tmp_path / "model.safetensors"
    lb.save(bnn, path)
    loaded = lb.load(path, network())
    assert loaded.moment_margins == bnn.moment_margins
    rule = Adjoint(mean="moments", margins=2)
    assert torch.equal(loaded.predict(x, rule=rule).probs, bnn.predict(x, rule=rule).probs)
    weight, factor, *_ = bnn.moment_margins[0]
    assert (
        f"adjoint: weight {weight:.4g}, std × {factor:.4g}" in dict(_file_lines(path, describe(path), {}))["one pass"]
    )
    assert lb.restrict(bnn, 0.5).moment_margins == ()
    for wrong in (MarginFit(1.5), MarginFit(factor=0.0), MarginFit(total_weight=-0.1), MarginFit(total_factor=np.inf)):
        loaded.moment_margins = (wrong,)
        lb.save(loaded, path)
        with pytest.raises(FileFormatError, match="fit of the margins"):
            lb.load(path, network())


def test_older_files_have_one_margin() -> None:
    assert moment_margins_of({"moment_margin": [0.5, 1.25]}) == (MarginFit(0.5, 1.25, 0.0, 1.0),)
    assert moment_margins_of({}) == ()


def test_outputs_that_are_not_classes_have_no_fit() -> None:
    bnn = lb.bayesianize(
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), lb.MeanField(), likelihood=lb.Gaussian()
    )
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    lb.calibrate(bnn, [x], layers=True, samples=4, generator=torch.Generator().manual_seed(0))
    assert bnn.moment_margins == ()


def test_recurrent_networks_have_no_fit() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gru, self.head = nn.Linear(3, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(self.first(x))[0][:, -1])

    bnn = lb.bayesianize(Last(), lb.MeanField()).eval()
    x = torch.randn(32, 5, 3, generator=torch.Generator().manual_seed(0))
    lb.calibrate(bnn, [x], layers=True, factors=False, samples=4, generator=torch.Generator().manual_seed(0))
    assert bnn.moment_layers
    assert bnn.moment_margins == ()
