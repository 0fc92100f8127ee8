"""Tests of the correctness checks on other libraries: they pass correct code and detect faults."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("peers")


class Faulty(nn.Module):
    """A network with a Bayesian last layer whose KL is a mean and whose noise is overwritten in place."""

    def __init__(self, net: nn.Sequential, std: float) -> None:
        super().__init__()
        last = net[-1]
        assert isinstance(last, nn.Linear)
        self.body, self.bias, self.mean = net[:-1].requires_grad_(False), last.bias, last.weight
        self.raw = nn.Parameter(torch.full_like(last.weight, std).expm1().log())
        self.noise = torch.zeros_like(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean + F.softplus(self.raw) * self.noise.data.normal_()
        return F.linear(self.body(x), weight, self.bias)


@pytest.fixture
def faulty(peers: ModuleType) -> Any:
    class FaultyLibrary(peers.Library):  # type: ignore[name-defined]
        package = "faulty"

        def convert(self, net: Any, std: float) -> nn.Module:
            return Faulty(net, std)

        def gaussians(self, model: Any) -> list[tuple[Tensor, Tensor]]:
            return [(model.mean, model.raw)]

        def kl(self, model: Any) -> Tensor:
            posterior = torch.distributions.Normal(model.mean, F.softplus(model.raw))
            return torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, peers.PRIOR_STD)).mean()

    return FaultyLibrary()


def test_leanbayes_passes_every_check(peers: ModuleType) -> None:
    row = peers.probes("leanbayes", samples=300)
    assert row["errors"] == {}
    assert row["kl_ratio"] == pytest.approx(1, abs=1e-4)
    assert row["kl_gradient_ratio"] == pytest.approx(1, abs=1e-4)
    assert row["gradient_error"] < 1e-5
    assert 0.8 < row["std_ratio"] < 1.2
    assert (row["attention"], row["batchnorm"]) == ("random", "random")


def test_kl_that_is_a_mean_is_detected(peers: ModuleType, faulty: Any) -> None:
    value, gradient = peers.kl_ratios(faulty)
    assert value == pytest.approx(1 / 640, rel=1e-4)  # 64 × 10 weights
    assert gradient == pytest.approx(1 / 640, rel=1e-4)


def test_overwritten_noise_is_detected(peers: ModuleType, faulty: Any) -> None:
    assert peers.gradient_error(faulty) > 0.1


def test_deterministic_attention_is_detected(peers: ModuleType) -> None:
    assert peers.attention(peers.LIBRARIES["plain network"]) == "stays fixed"


def test_missing_library_is_reported(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blitz", None)
    row = peers.probes("blitz", samples=2)
    assert "ModuleNotFoundError" in row["errors"]["kl_ratio"]
    assert "ModuleNotFoundError" in peers.probe_row(row)
