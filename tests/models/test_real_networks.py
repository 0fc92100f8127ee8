"""Unmodified networks of torchvision and timm become Bayesian, train, predict and can be saved."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from checks import assert_every_slot_has_a_gradient
from torch import Tensor, nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig

import leanbayes as lb

RULES = ["sample", "flipout", "local", "mean"]
CLASSES = 5

# Large architectures are made small by their own settings, with the same kinds of layers.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: models.resnet18(num_classes=CLASSES),
    "convnext": lambda: models.ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=CLASSES),
    "efficientnet_b0": lambda: models.efficientnet_b0(num_classes=CLASSES),
    "mnasnet0_5": lambda: models.mnasnet0_5(num_classes=CLASSES),  # it reads the version of its state_dict
    "vit": lambda: models.VisionTransformer(32, 8, 2, 2, hidden_dim=32, mlp_dim=64, num_classes=CLASSES),
    "swin": lambda: models.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=CLASSES),
    "swin_v2": lambda: models.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=CLASSES,
        block=models.swin_transformer.SwinTransformerBlockV2, downsample_layer=models.swin_transformer.PatchMergingV2,
    ),
    "lraspp_mobilenet_v3_large": lambda: models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES
    ),
    "timm vit_tiny": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, img_size=32, depth=2),
    "timm swin_tiny": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=CLASSES, img_size=32, window_size=4,
        embed_dim=24, depths=(2, 2), num_heads=(2, 2),
    ),
    "timm convnext_atto": lambda: timm.create_model("convnext_atto", num_classes=CLASSES),
    "timm efficientnet_lite0": lambda: timm.create_model("efficientnet_lite0", num_classes=CLASSES),
}  # fmt: skip


@functools.cache
def build(name: str) -> nn.Module:
    """Return the network with fixed weights; all-zero parameters become random, so that gradients reach all layers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = NETWORKS[name]()
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
        return net


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def logits(output: Any) -> Tensor:
    return output["out"] if isinstance(output, dict) else output


def bayesian(name: str, rule: str = "sample", init_std: float = 0.05) -> lb.BayesianModel:
    return lb.bayesianize(build(name), lb.MeanField(rule=rule, init_std=init_std, samples=2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_with_tiny_std_outputs_equal_the_plain_network(name: str, rule: str) -> None:
    with torch.no_grad():
        plain, output = build(name).eval()(images()), bayesian(name, rule, 1e-7).eval()(images())
    assert type(output) is type(plain)
    expected = logits(plain)
    # Tolerance for single precision over tens of layers and a weight std of 1e-7: 1e-4 of the largest output.
    torch.testing.assert_close(logits(output), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert expected.std() > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_has_a_gradient(name: str, rule: str) -> None:
    bnn = bayesian(name, rule).train()
    y = torch.arange(4) if "lraspp" not in name else torch.arange(4).view(4, 1, 1).expand(4, 32, 32).contiguous()
    with torch.random.fork_rng(devices=[]):  # some networks have stochastic depth and dropout
        torch.manual_seed(0)
        lb.elbo_loss(bnn, images(), y, num_data=1000, temperature=0.0).backward()
    assert_every_slot_has_a_gradient(bnn, rule)
    loss = lb.elbo_loss(bnn, images(), y, num_data=1000)
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_of_a_saved_model_are_bit_equal(name: str, tmp_path: Path) -> None:
    bnn = bayesian(name, init_std=0.3)
    path = tmp_path / "model.safetensors"
    lb.save(bnn, path)
    loaded = lb.load(path, build(name))
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in bnn.state_dict().items())
    prediction, again = bnn.predict(images()), loaded.predict(images())
    assert prediction.probs.shape == logits(build(name).eval()(images())).shape
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones_like(prediction.probs.sum(1)))
    assert prediction.mutual_information.max() > 0
    assert torch.equal(prediction.probs, again.probs)
    assert str(loaded.report) == str(bnn.report)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_bayesian_and_other_parameters_deterministic(name: str) -> None:
    weights = {n for n, p in build(name).named_parameters() if p.dim() >= 2 and n.endswith("weight")}
    assert {row.name for row in bayesian(name).report.rows if row.bayesian} == weights
