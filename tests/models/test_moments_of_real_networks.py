"""Unmodified networks of torchvision and timm under the rule `moments`, compared with plain networks and samples."""

import functools
from collections.abc import Callable

import pytest
import timm
import torch
from moment_networks import (
    assert_compiles,
    assert_plain_without_noise,
    assert_precise_variances,
    assert_predicts,
    assert_std_of_samples,
)
from torch import Tensor, nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock

CLASSES = 5


def _mobilenet_v3() -> nn.Module:
    """Two blocks: one with ReLU and squeeze-and-excitation, one with Hardswish."""
    blocks = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1),
        InvertedResidualConfig(16, 5, 48, 24, True, "HS", 2, 1, 1),
    ]
    return models.MobileNetV3(blocks, 32, num_classes=CLASSES)


def _swin(version: str) -> nn.Module:
    parts = models.swin_transformer
    block, merging = getattr(parts, f"SwinTransformerBlock{version}"), getattr(parts, f"PatchMerging{version}")
    sizes = ([4, 4], 24, [2, 2], [2, 2], [4, 4])
    return models.SwinTransformer(*sizes, num_classes=CLASSES, block=block, downsample_layer=merging)


def _timm(name: str, **settings: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=CLASSES, **settings)


SMALL_VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}

# Large architectures are made small by their own settings, with the same kinds of layers.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES),
    "convnext": lambda: models.ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=CLASSES),
    "efficientnet": lambda: models.EfficientNet(
        [MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(4, 3, 2, 16, 24, 2)], 0.0, num_classes=CLASSES
    ),
    "vit": lambda: models.VisionTransformer(32, 8, 2, 2, hidden_dim=32, mlp_dim=64, num_classes=CLASSES),
    "swin": lambda: _swin(""),
    "swin_v2": lambda: _swin("V2"),
    "maxvit": lambda: models.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 16, 0.0, num_classes=CLASSES),
    "densenet": lambda: models.DenseNet(8, (2, 2), 16, num_classes=CLASSES),
    "mobilenet_v2": lambda: models.mobilenet_v2(num_classes=CLASSES, width_mult=0.35),
    "mobilenet_v3": _mobilenet_v3,
    "shufflenet": lambda: models.shufflenet_v2_x0_5(num_classes=CLASSES),
    "googlenet": lambda: models.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False),
    "timm resnet": lambda: timm.models.ResNet(timm.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=CLASSES),
    "timm convnext": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm convnext_v2": _timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm efficientnet": _timm("efficientnet_lite0"),
    "timm vit": _timm("vit_tiny_patch16_224", **SMALL_VIT),
    "timm deit3": _timm("deit3_small_patch16_224", **SMALL_VIT),
    "timm cait": _timm("cait_xxs24_224", **SMALL_VIT),
    "timm eva": _timm("eva02_tiny_patch14_224", **SMALL_VIT),
    "timm vit with relative positions": _timm("vit_relpos_small_patch16_224", **SMALL_VIT),
    "timm swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 2)
    ),
    "timm convmixer": lambda: timm.models.ConvMixer(16, 2, num_classes=CLASSES),
    "lraspp": lambda: models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES
    ),
}
# Fewer samples for networks that have no settings to make them small.
SAMPLES = {
    "googlenet": 60,
    "shufflenet": 100,
    "mobilenet_v2": 100,
    "lraspp": 40,
    "timm resnet": 60,
    "resnet": 60,
    "timm efficientnet": 60,
}
RANGES = {"timm resnet": (0.8, 1.5), "lraspp": (0.75, 1.3)}
INEXACT = ("vit",)  # nn.MultiheadAttention multiplies in another order


@functools.cache
def build(name: str) -> nn.Module:
    """Return the network with fixed weights; all-zero parameters become random, so that noise reaches all layers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = NETWORKS[name]()
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
        return net.eval()


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NETWORKS)
def test_with_zero_variance_outputs_equal_the_plain_network(name: str) -> None:
    assert_plain_without_noise(build(name), images(), 1e-6 if name in INEXACT else 0.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_std_matches_that_of_weight_samples(name: str) -> None:
    assert_std_of_samples(build(name), images(), *RANGES.get(name, (0.8, 1.35)), samples=SAMPLES.get(name, 300))


@pytest.mark.parametrize("name", NETWORKS)
def test_predict_returns_probabilities(name: str) -> None:
    assert_predicts(build(name), images())


@pytest.mark.parametrize("name", ["mobilenet_v3"])
def test_the_network_compiles(name: str) -> None:
    assert_compiles(build(name), images())


@pytest.mark.parametrize("name", ["convnext", "mobilenet_v3", "swin", "timm vit"])
def test_variances_stay_in_single_precision(name: str) -> None:
    assert_precise_variances(build(name), images())
