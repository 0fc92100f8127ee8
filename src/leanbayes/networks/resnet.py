"""Residual networks (He et al. 2015) for small and large images."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_counts
from leanbayes.networks.docstrings import arguments_of
from leanbayes.networks.layers import HeConv2d

Stem = Literal["small", "imagenet"]
Shortcut = Literal["projection", "padding"]


class PaddedShortcut(nn.Module):
    """Option A of the paper: subsampled pixels, and zeros for the new channels."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = new_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to (batch, channels + new_channels, h/stride, w/stride)."""
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
        """Map (batch, channels_in, h, w) to (batch, channels, h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1 convolutions, the last with four times the channels, and a shortcut."""

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
        """Map (batch, channels_in, h, w) to (batch, 4 · channels, h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network: a stem, stages of blocks, global average pooling and a linear layer.

    Each stage has twice the channels of the one before. See He et al., "Deep residual learning for image recognition",
    2015.

    Args:
        blocks: number of blocks of each stage.
        num_classes: number of classes.
        width: channels of the first stage.
        channels: channels of the images.
        stem: "small" is a 3×3 convolution, for images below 64 pixels. "imagenet" is a 7×7 convolution with stride 2
            and max-pooling, for larger images.
        block: class of the blocks.
        shortcut: shortcut of blocks that change the shape: "projection" has weights, "padding" has none.

    Raises:
        LeanBayesError: An argument is invalid.

    Example:
        >>> import torch
        >>> from leanbayes.networks import ResNet
        >>> ResNet((1, 1), num_classes=5, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """

    @checked()
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
        """Map (batch, channels, h, w) to (batch, num_classes)."""
        y = self.layers(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(y.mean(dim=(2, 3)))


@arguments_of(ResNet)
def resnet18(num_classes: int = 10, width: int = 64, *, channels: int = 3, stem: Stem = "small") -> ResNet:
    """Build ResNet-18.

    It has 11.2 million parameters for 10 classes with the stem for small images.

    Example:
        >>> from leanbayes.networks import resnet18
        >>> sum(parameter.numel() for parameter in resnet18().parameters())
        11173962
    """
    return ResNet((2, 2, 2, 2), num_classes, width, channels=channels, stem=stem)


@arguments_of(ResNet)
def resnet20(num_classes: int = 10, width: int = 16, *, channels: int = 3) -> ResNet:
    """Build ResNet-20 for CIFAR, whose shortcuts have no weights.

    It has 0.27 million parameters. See section 4.2 of He et al. (2015).

    Example:
        >>> from leanbayes.networks import resnet20
        >>> sum(parameter.numel() for parameter in resnet20().parameters())
        269722
    """
    return ResNet((3, 3, 3), num_classes, width, channels=channels, shortcut="padding")


@arguments_of(ResNet)
def resnet50(num_classes: int = 10, width: int = 64, *, channels: int = 3, stem: Stem = "small") -> ResNet:
    """Build ResNet-50, with the stride in the 3×3 convolutions.

    It has 25.6 million parameters for ImageNet.

    Example:
        >>> from leanbayes.networks import resnet50
        >>> sum(parameter.numel() for parameter in resnet50().parameters())
        23520842
    """
    return ResNet((3, 4, 6, 3), num_classes, width, channels=channels, stem=stem, block=Bottleneck)


@arguments_of(ResNet)
def resnet101(num_classes: int = 10, width: int = 64, *, channels: int = 3, stem: Stem = "small") -> ResNet:
    """Build ResNet-101, with the stride in the 3×3 convolutions.

    It has 44.5 million parameters for ImageNet.

    Example:
        >>> from leanbayes.networks import resnet101
        >>> sum(parameter.numel() for parameter in resnet101().parameters())
        42512970
    """
    return ResNet((3, 4, 23, 3), num_classes, width, channels=channels, stem=stem, block=Bottleneck)
