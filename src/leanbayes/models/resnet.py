"""Residual networks (He et al. 2015), with the 3×3 stem for small images."""

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, h, w) → (batch, channels, h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of basic blocks, an average and a linear head."""

    def __init__(self, blocks: tuple[int, int, int, int], num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        channels_in = width
        for stage, count in enumerate(blocks):
            channels = width * 2**stage
            for number in range(count):
                layers.append(BasicBlock(channels_in, channels, 2 if stage > 0 and number == 0 else 1))
                channels_in = channels
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, h, w) → (batch, classes)."""
        y = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.fc(y.mean(dim=(2, 3)))


def resnet18(num_classes: int = 10, width: int = 64) -> ResNet:
    """ResNet-18 for 32×32 images: 11.2 million parameters at width 64."""
    return ResNet((2, 2, 2, 2), num_classes, width)
