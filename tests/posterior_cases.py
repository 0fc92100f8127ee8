"""A layout of small parameters, and priors of every kind, for tests of posteriors."""

import torch

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.core.layout import Layout, Slot
from leanbayes.priors import Prior

KEY = noise.make_key(3)
PRIORS: dict[str, Prior] = {
    "one scale": lb.Normal(0.3),
    "scale per layer": lb.Normal("fan_in", gain=0.7),
    "mixture": lb.ScaleMixture(),
    "around the weights": lb.Normal("std", center="pretrained"),
}
SHAPES = ((3, 4), (2, 3, 2, 2), (5,), ())
LAYOUT = Layout(
    [Slot((f"w{n}",), shape, tuple(range(len(shape))), torch.float64, n + 1) for n, shape in enumerate(SHAPES)]
)
