"""Moments in practice: aliases, layouts, masks, settings, errors."""

import math
from typing import Any

import pytest
import torch
from moment_cases import gaussian
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.rules import MomentPropagation


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def bayesian(net: nn.Module) -> lb.BayesianModel:
    return lb.bayesianize(net, lb.MeanField(init_std=0.1), select=r".*weight.*").eval()


def test_in_place_operations_change_all_references() -> None:
    value: Any = gaussian((3,))
    before, alias = value.loc.clone(), value
    value += 5
    assert alias is value
    torch.testing.assert_close(alias.loc, before + 5)
    value *= 2
    value -= 1
    value /= 4
    torch.testing.assert_close(alias.loc, ((before + 5) * 2 - 1) / 4)
    torch.testing.assert_close(alias.variance, gaussian((3,)).variance / 4)


class TimeFirst(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 8), inner

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)).transpose(0, 1)
        y = self.inner(y)
        return (y[0] if isinstance(y, tuple) else y)[-1]


@pytest.mark.parametrize(
    "inner",
    [nn.GRU(8, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 8)],
    ids=["gru", "transformer", "linear"],
)
def test_examples_do_not_mix_in_any_layout(inner: nn.Module) -> None:
    bnn = bayesian(TimeFirst(inner))
    x = inputs(8, 5, 4) * torch.arange(1.0, 9).view(8, 1, 1)
    with bnn.using("moments"), torch.no_grad():
        together = bnn(x)
        for row in (0, 3, 7):
            two = [row, (row + 1) % 8]  # with one example the sizes do not determine the layout
            torch.testing.assert_close(bnn(x[two]).variance[0], together.variance[row], rtol=1e-3, atol=1e-6)


def test_a_transformer_encoder_supports_padded_batches() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(x.shape[:2], dtype=torch.bool)
            mask[:, 3:] = True
            return self.encoder(x, src_key_padding_mask=mask)[:, 0]

    bnn = bayesian(Padded())
    with bnn.using("moments"), torch.no_grad():
        out = bnn(inputs(2, 5, 8))
    assert out.variance.isfinite().all()
    assert (out.variance > 0).all()


def test_an_image_without_a_batch_equals_one_in_a_batch() -> None:
    bnn, x = bayesian(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3))), inputs(3, 8, 8)
    with bnn.using("moments"), torch.no_grad():
        torch.testing.assert_close(bnn(x).variance, bnn(x[None]).variance[0])


def test_calibration_applies_only_to_its_settings_and_not_in_training() -> None:
    bnn, x = bayesian(nn.Sequential(nn.Linear(4, 3))), inputs(2, 4)
    bnn.moment_scale = 2.0, 3.0
    with bnn.using(MomentPropagation(correlation="none")):
        assert torch.equal(bnn(x).loc, bnn.to_deterministic()(x))
    with bnn.using("moments"):
        torch.testing.assert_close(bnn(x).loc, 2 * bnn.to_deterministic()(x))
        assert torch.equal(bnn.train()(x).loc, bnn.to_deterministic()(x))


def test_a_failed_calibration_keeps_the_previous_one() -> None:
    bnn = bayesian(nn.Sequential(nn.Linear(4, 3)))
    bnn.moment_scale = 0.9, 1.1
    for batches, words in (([], "got no batches"), ([inputs(2, 4) * math.nan], "contain NaN")):
        with pytest.raises(lb.LeanBayesError, match=words):
            lb.calibrate(bnn, batches, to="samples")
        assert bnn.moment_scale == (0.9, 1.1)


def test_error_messages() -> None:
    value: Any = gaussian((3, 3))
    with pytest.raises(lb.UnsupportedOperation, match="__setitem__"):
        value[0] = 1
    with pytest.raises(lb.UnsupportedOperation, match="__float__"):
        float(value)
    with pytest.raises(lb.LeanBayesError, match="functions themselves"):
        lb.moment_rule("torch.erfinv")  # type: ignore[arg-type]
    with pytest.raises(lb.UnsupportedOperation, match=r"torch\.erfinv.*register one with @lb\.moment_rule"):
        torch.erfinv(value)
