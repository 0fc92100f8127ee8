"""Layers with the initialization of the papers, which `reset_parameters` repeats."""

from torch import nn


class HeConv2d(nn.Conv2d):
    """Convolution without bias, padded to keep the size, initialized from N(0, 2 / fan_out) (He et al. 2015)."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class NarrowLinear(nn.Linear):
    """Linear layer with weights initialized from N(0, 0.02²) and biases initialized to 0."""

    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)
