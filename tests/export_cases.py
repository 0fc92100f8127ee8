"""Networks to export, and files in onnxruntime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from network_cases import Attention, ResidualBlock
from torch import Tensor, nn


class UNet(nn.Module):
    """A U-Net with one downsampling step."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = F.relu(self.down(image))
        coarse = F.relu(self.deep(F.max_pool2d(fine, 2)))
        up = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([fine, up], dim=1))


class VisionTransformer(nn.Module):
    """A class token, patches, and one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.norm, self.attention, self.head = nn.LayerNorm(8), Attention(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head((x + self.attention(self.norm(x)))[:, 0])


def lenet() -> nn.Module:
    layers = nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    return nn.Sequential(ResidualBlock(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def mlp(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))


def onnx_outputs(path: Path, *inputs: Tensor) -> dict[str, Tensor]:
    """Run a file with onnxruntime."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    feed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    return {
        name: torch.from_numpy(np.asarray(found)) for name, found in zip(names, session.run(names, feed), strict=True)
    }


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "lenet": (lenet, (1, 8, 8), "input"),
    "resnet": (resnet, (3, 8, 8), "input"),
    "vit": (VisionTransformer, (3, 8, 8), "x"),
    "unet": (UNet, (1, 8, 8), "image"),
}
