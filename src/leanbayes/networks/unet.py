"""The U-Net (Ronneberger et al. 2015) for dense prediction."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.networks.checks import check_counts
from leanbayes.networks.layers import HeConv2d


def _double_convolution(channels_in: int, channels_between: int, channels: int) -> nn.Sequential:
    """Two 3×3 convolutions, each with batch normalization and ReLU."""
    return nn.Sequential(
        HeConv2d(channels_in, channels_between, 3),
        nn.BatchNorm2d(channels_between),
        nn.ReLU(),
        HeConv2d(channels_between, channels, 3),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """The U-Net: four downsampling and four upsampling steps, with skip connections between equal resolutions.

    This is the usual variant with padded convolutions, batch normalization and bilinear upsampling. Upsampling has no
    weights, so the lowest level outputs 8 · width channels, not 16 · width. See Ronneberger et al., "U-Net:
    Convolutional networks for biomedical image segmentation", 2015.

    Args:
        num_classes: number of classes.
        channels: channels of the images.
        width: channels at full resolution.

    Raises:
        LeanBayesError: An argument is invalid.

    Example:
        >>> import torch
        >>> from leanbayes.networks import UNet
        >>> UNet(4, width=8)(torch.zeros(2, 3, 32, 48)).shape
        torch.Size([2, 4, 32, 48])
    """

    @checked()
    def __init__(self, num_classes: int = 1, *, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, channels=channels, width=width)
        down = [channels, width, 2 * width, 4 * width, 8 * width, 8 * width]
        up = [8 * width, 4 * width, 2 * width, width, width]
        self.down = nn.ModuleList(_double_convolution(a, b, b) for a, b in pairwise(down))
        self.up = nn.ModuleList(_double_convolution(2 * a, a, b) for a, b in pairwise(up))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to (batch, num_classes, h, w), for h and w of at least 16."""
        levels: list[Tensor] = []
        for number, convolution in enumerate(self.down):
            x = convolution(x if number == 0 else F.max_pool2d(x, 2))
            levels.append(x)
        for convolution, skip in zip(self.up, levels[-2::-1], strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = convolution(torch.cat([skip, x], dim=1))
        return self.head(x)


def unet(num_classes: int = 1, *, channels: int = 3, width: int = 64) -> UNet:
    """Build a U-Net for dense prediction.

    It has 17.3 million parameters for gray images and one class.

    Args:
        num_classes: number of classes.
        channels: channels of the images.
        width: channels at full resolution.

    Returns:
        Network that maps (batch, channels, height, width) to logits (batch, num_classes, height, width).

    Raises:
        LeanBayesError: An argument is invalid.

    Example:
        >>> from leanbayes.networks import unet
        >>> sum(parameter.numel() for parameter in unet(channels=1).parameters())
        17261825
    """
    return UNet(num_classes, channels=channels, width=width)
