"""The U-Net (Ronneberger et al. 2015) for dense prediction."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.models.checks import check_counts
from leanbayes.models.layers import HeConv2d


def _double_convolution(channels_in: int, channels_between: int, channels: int) -> nn.Sequential:
    """Two 3×3 convolutions, each with batch normalisation and ReLU."""
    return nn.Sequential(
        HeConv2d(channels_in, channels_between, 3),
        nn.BatchNorm2d(channels_between),
        nn.ReLU(),
        HeConv2d(channels_between, channels, 3),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Four halvings of the image and four bilinear doublings back, each joined with the features of its own size.

    Convolutions are padded and normalised. Widths are 64 to 1024 at `width` 64, where the lowest level gives out half
    of its 1024 channels, so that a doubling needs no weights: the usual bilinear variant.
    """

    def __init__(self, num_classes: int = 1, *, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, channels=channels, width=width)
        down = [channels, width, 2 * width, 4 * width, 8 * width, 8 * width]
        up = [8 * width, 4 * width, 2 * width, width, width]
        self.down = nn.ModuleList(_double_convolution(a, b, b) for a, b in pairwise(down))
        self.up = nn.ModuleList(_double_convolution(2 * a, a, b) for a, b in pairwise(up))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, h, w) → (batch, classes, h, w), for any h and w of at least 16."""
        levels: list[Tensor] = []
        for number, convolution in enumerate(self.down):
            x = convolution(x if number == 0 else F.max_pool2d(x, 2))
            levels.append(x)
        for convolution, skip in zip(self.up, levels[-2::-1], strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = convolution(torch.cat([skip, x], dim=1))
        return self.head(x)


def unet(num_classes: int = 1, *, channels: int = 3, width: int = 64) -> UNet:
    """The U-Net: 17.3 million parameters for grey images and one class; `width` makes it smaller."""
    return UNet(num_classes, channels=channels, width=width)
