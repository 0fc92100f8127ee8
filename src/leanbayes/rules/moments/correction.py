"""Corrections of single layers, which `lb.calibrate(..., layers=True)` measures against samples.

A correction changes the output of one layer, channel by channel, where s is the std of the output:

    mean -> gain · mean + shift · s,      variance -> factor · variance,      common -> √factor · common.

It is tied to the weight of the layer, and applies if the function that uses the weight has a random input. Without one
the moments are exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.rules.moments.value import Moments, shrunk


@dataclass  # not frozen: the compiler of torch 2.10 cannot make a frozen one
class Correction:
    """The correction of one layer: one value of each kind per channel."""

    gain: Tensor
    shift: Tensor
    factor: Tensor

    def __call__(self, y: Moments, channel_dim: int) -> Moments:
        """Return the corrected output of a layer, whose channels are along `channel_dim`, a negative number."""
        y = y if y.common is None or y.grid[channel_dim] == y.shape[channel_dim] else y.plain()
        dtype, after = y.variance.dtype, [1] * (-1 - channel_dim)
        gain, shift, factor = (part.to(dtype).reshape(-1, *after) for part in (self.gain, self.shift, self.factor))
        std = shrunk(y.variance).sqrt()
        common = None if y.common is None else y.common * factor.sqrt()
        variance = (shrunk(y.variance) * factor).expand(y.shape)
        return y.like_total((gain * y.loc + shift * std).to(y.dtype), variance, common, y.grid)

    def stacked(self) -> Tensor:
        """Return one tensor, (3, channels), as it is stored."""
        return torch.stack([self.gain, self.shift, self.factor])
