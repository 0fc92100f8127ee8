"""Layers on tokens that are merged with the batch: the tokens of an example share the noise of the weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb

BATCH, TOKENS, CHANNELS = 3, 6, 8
SAMPLES = 2000


class Tokens(nn.Module):
    """Two layers on each token, the mean over the tokens, and one layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(CHANNELS, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def _layer(self, x: Any, layer: nn.Linear) -> Any:
        if self.how == "addmm":  # as in Conv1D of Hugging Face
            return torch.addmm(layer.bias, x, layer.weight.t())
        if self.how == "mm":
            return torch.mm(x, layer.weight.t()) + layer.bias
        return layer(x)

    def forward(self, x: Tensor) -> Any:
        size = x.shape[:2]
        if self.how == "length first":
            x = x.transpose(0, 1)
            size = x.shape[:2]
        h: Any = x if self.how == "whole" else x.reshape(-1, x.shape[-1])
        h = self._layer(F.relu(self._layer(h, self.first)), self.second)
        h = h.view(*size, -1)
        h = h.mean(0 if self.how == "length first" else 1)
        return self.last(torch.tanh(h))


def _model(how: str) -> tuple[lb.BayesianModel, Tensor]:
    torch.manual_seed(0)
    bnn = lb.bayesianize(Tokens(how), lb.MeanField(init_std=0.05)).eval()
    bnn.traits.batch_first = how != "length first"
    return bnn, torch.randn(BATCH, TOKENS, CHANNELS) + 0.5


@torch.no_grad()
def _std(bnn: lb.BayesianModel, x: Tensor, rule: str) -> Tensor:
    with bnn.using(rule):
        return torch.stack([bnn(x) for _ in range(SAMPLES)]).std(0)


@torch.no_grad()
def _one_pass(bnn: lb.BayesianModel, x: Tensor) -> Tensor:
    with bnn.using("moments"):
        return bnn(x).variance.sqrt()


@pytest.fixture(scope="module")
def true_std() -> Tensor:
    return _std(*_model("whole"), "sample")


@pytest.mark.parametrize("how", ["whole", "flat", "addmm", "mm", "length first"])
def test_moments_have_the_std_of_samples(how: str, true_std: Tensor) -> None:
    ratio = (_one_pass(*_model(how)) / true_std).median()
    assert 0.85 < ratio < 1.2, ratio


@pytest.mark.parametrize("how", ["whole", "flat", "addmm", "length first"])
def test_flipout_has_the_std_of_samples(how: str, true_std: Tensor) -> None:
    ratio = (_std(*_model(how), "flipout") / true_std).median()
    assert 0.93 < ratio < 1.07, ratio


def test_flat_tokens_have_the_moments_of_sequences() -> None:
    torch.testing.assert_close(_one_pass(*_model("flat")), _one_pass(*_model("whole")))
    torch.testing.assert_close(_one_pass(*_model("addmm")), _one_pass(*_model("whole")))


class Selected(Tokens):
    """The layers run on a selection of all tokens only, as in a mixture of experts or without padding."""

    def forward(self, x: Tensor) -> Any:
        rows = torch.arange(BATCH * TOKENS)
        kept = rows[rows % 5 != 2]  # their number is not a multiple of the batch
        h = self.second(F.relu(self.first(x.reshape(-1, CHANNELS)[kept])))
        shares = F.one_hot(kept // TOKENS, BATCH).T.float()
        h = torch.matmul(shares / shares.sum(1, keepdim=True), h)
        return self.last(torch.tanh(h))


@pytest.mark.parametrize(("rule", "low", "high"), [("moments", 0.85, 1.2), ("flipout", 0.93, 1.07)])
def test_a_selection_of_tokens_has_the_std_of_samples(rule: str, low: float, high: float) -> None:
    torch.manual_seed(0)
    bnn, x = lb.bayesianize(Selected("flat"), lb.MeanField(init_std=0.05), seed=0).eval(), _model("flat")[1]
    found = _one_pass(bnn, x) if rule == "moments" else _std(bnn, x, rule)
    ratio = (found / _std(bnn, x, "sample")).median()
    assert low < ratio < high, ratio


class Standardized(nn.Module):
    """A convolution whose weight is standardized in each pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight, self.gain = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        w: Tensor = self.weight
        if self.how == "batch_norm":  # as timm does
            w = F.batch_norm(w.reshape(1, 4, -1), None, None, weight=self.gain * 0.5, training=True).reshape_as(w)
        elif self.how == "var and mean":
            var, mean = w.var((1, 2, 3), keepdim=True), w.mean((1, 2, 3), keepdim=True)
            w = (w - mean) / torch.sqrt(var + 1e-5)
        elif self.how == "layer_norm":
            w = F.layer_norm(w, w.shape[1:])
        elif self.how == "einsum":
            w = w - torch.einsum("oihw->o", w)[:, None, None, None] / 27
        elif self.how == "softmax":  # as in lightweight convolutions
            w = w.flatten(1).softmax(1).view_as(w)
        elif self.how == "interpolate":  # patches of another size
            w = F.interpolate(w, scale_factor=2.0, mode="bilinear")
        else:
            w = w - w.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w)


@pytest.mark.parametrize(
    "how", ["batch_norm", "var and mean", "layer_norm", "mean", "einsum", "softmax", "interpolate"]
)
def test_moments_refuse_weight_standardization(how: str) -> None:
    bnn = lb.bayesianize(Standardized(how), lb.MeanField())
    with bnn.using("moments"), pytest.raises(lb.UnsupportedOperation, match=r"standardization.*sample"):
        bnn(torch.randn(2, 3, 8, 8))
