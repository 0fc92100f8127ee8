"""Residual networks (He et al. 2015), for small images and for large ones."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError
from leanbayes.models.checks import check_counts
from leanbayes.models.layers import HeConv2d

Stem = Literal["small", "imagenet"]
Shortcut = Literal["projection", "padding"]


class PaddedShortcut(nn.Module):
    """The paper's option A: every stride-th pixel, and zeros for the channels that are new."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = new_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, h, w) → (batch, channels + new, h/stride, w/stride)."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def _shortcut(channels_in: int, channels: int, stride: int, kind: Shortcut) -> nn.Module:
    if stride == 1 and channels_in == channels:
        return nn.Sequential()
    if kind == "padding":
        return PaddedShortcut(channels - channels_in, stride)
    return nn.Sequential(HeConv2d(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels_in: int, channels: int, stride: int, shortcut: Shortcut = "projection") -> None:
        super().__init__()
        self.conv1 = HeConv2d(channels_in, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = HeConv2d(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(channels_in, channels, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, h, w) → (batch, channels, h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1 ones, of which the last has four times the channels, with a shortcut."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels_in: int, channels: int, stride: int, shortcut: Shortcut = "projection") -> None:
        super().__init__()
        self.conv1 = HeConv2d(channels_in, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = HeConv2d(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = HeConv2d(channels, 4 * channels, 1)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.shortcut = _shortcut(channels_in, 4 * channels, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, h, w) → (batch, 4 · channels, h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of blocks of which each has twice the channels of the one before, an average and a linear head.

    stem: `"small"` is a 3×3 convolution, `"imagenet"` a 7×7 one with stride 2 and a max-pool.
    shortcut: where a block changes the shape, `"projection"` has weights and `"padding"` has none.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        num_classes: int = 10,
        width: int = 64,
        *,
        channels: int = 3,
        stem: Stem = "small",
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        shortcut: Shortcut = "projection",
    ) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, width=width, channels=channels)
        if stem not in ("small", "imagenet"):
            raise LeanBayesError(f"stem={stem!r} is unknown: use 'small' or 'imagenet'.")
        small = stem == "small"
        self.conv1 = HeConv2d(channels, width, 3) if small else HeConv2d(channels, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        layers: list[nn.Module] = []
        channels_in = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(block(channels_in, width * 2**stage, stride, shortcut))
                channels_in = width * 2**stage * block.expansion
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, h, w) → (batch, classes)."""
        y = self.layers(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(y.mean(dim=(2, 3)))


def resnet18(num_classes: int = 10, width: int = 64, *, channels: int = 3, stem: Stem = "small") -> ResNet:
    """ResNet-18: 11.2 million parameters for 10 classes with the stem for small images."""
    return ResNet((2, 2, 2, 2), num_classes, width, channels=channels, stem=stem)


def resnet20(num_classes: int = 10, width: int = 16, *, channels: int = 3) -> ResNet:
    """ResNet-20 of the paper's section on CIFAR, with shortcuts that have no weights: 0.27 million parameters."""
    return ResNet((3, 3, 3), num_classes, width, channels=channels, shortcut="padding")


def resnet50(num_classes: int = 10, width: int = 64, *, channels: int = 3, stem: Stem = "small") -> ResNet:
    """ResNet-50, with the stride in the 3×3 convolution: 25.6 million parameters for ImageNet."""
    return ResNet((3, 4, 6, 3), num_classes, width, channels=channels, stem=stem, block=Bottleneck)


def resnet101(num_classes: int = 10, width: int = 64, *, channels: int = 3, stem: Stem = "small") -> ResNet:
    """ResNet-101, with the stride in the 3×3 convolution: 44.5 million parameters for ImageNet."""
    return ResNet((3, 4, 23, 3), num_classes, width, channels=channels, stem=stem, block=Bottleneck)
