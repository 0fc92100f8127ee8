"""Wide residual networks (Zagoruyko and Komodakis 2016), with normalization and ReLU before each convolution."""

import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_counts
from leanbayes.networks.docstrings import arguments_of
from leanbayes.networks.layers import HeConv2d


class WideBlock(nn.Module):
    """Two 3×3 convolutions, with dropout between them, and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = HeConv2d(channels_in, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = HeConv2d(channels, channels, 3)
        changes = stride != 1 or channels_in != channels
        self.shortcut = HeConv2d(channels_in, channels, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels_in, h, w) to (batch, channels, h/stride, w/stride)."""
        active = F.relu(self.bn1(x))
        y = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(active)))))
        return y + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A wide residual network: a 3×3 stem with 16 channels, three stages, global average pooling and a linear layer.

    See Zagoruyko and Komodakis, "Wide residual networks", 2016.

    Args:
        depth: number of layers, 4 more than a multiple of 6.
        widen: factor of the channels.
        num_classes: number of classes.
        channels: channels of the images.
        dropout: dropout rate inside the blocks.

    Raises:
        LeanBayesError: An argument is invalid.

    Example:
        >>> import torch
        >>> from leanbayes.networks import WideResNet
        >>> WideResNet(10, 1, num_classes=5)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """

    @checked()
    def __init__(
        self, depth: int, widen: int, num_classes: int = 10, *, channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_counts(widen=widen, num_classes=num_classes, channels=channels)
        if depth < 10 or depth % 6 != 4:
            raise LeanBayesError(f"depth={depth} must be 4 more than a multiple of 6, such as 16, 28 or 40.")
        if not 0 <= dropout < 1:
            raise LeanBayesError(f"dropout={dropout} must be at least 0 and below 1.")
        self.conv1 = HeConv2d(channels, 16, 3)
        layers: list[nn.Module] = []
        channels_in = 16
        for stage in range(3):
            width = 16 * widen * 2**stage
            for number in range((depth - 4) // 6):
                layers.append(WideBlock(channels_in, width, 2 if stage > 0 and number == 0 else 1, dropout))
                channels_in = width
        self.layers = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels_in)
        self.fc = nn.Linear(channels_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to (batch, num_classes)."""
        y = F.relu(self.bn(self.layers(self.conv1(x))))
        return self.fc(y.mean(dim=(2, 3)))


@arguments_of(WideResNet)
def wrn_28_10(
    num_classes: int = 10, *, channels: int = 3, depth: int = 28, widen: int = 10, dropout: float = 0.0
) -> WideResNet:
    """Build WRN-28-10, or a smaller one with `depth` and `widen`.

    It has 36.5 million parameters for 10 classes.

    Example:
        >>> from leanbayes.networks import wrn_28_10
        >>> sum(parameter.numel() for parameter in wrn_28_10(depth=16, widen=4).parameters())
        2748890
    """
    return WideResNet(depth, widen, num_classes, channels=channels, dropout=dropout)
