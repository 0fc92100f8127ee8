"""Reference networks: what the papers use, by name."""

from leanbayes.models.by_name import NAMES, build
from leanbayes.models.cnn import lenet5, small_cnn
from leanbayes.models.mlp import lenet_300_100, mlp
from leanbayes.models.resnet import ResNet, resnet18, resnet20, resnet50, resnet101
from leanbayes.models.unet import UNet, unet
from leanbayes.models.vit import VisionTransformer, vit_base, vit_small, vit_tiny
from leanbayes.models.wide_resnet import WideResNet, wrn_28_10

__all__ = [
    "NAMES",
    "ResNet",
    "UNet",
    "VisionTransformer",
    "WideResNet",
    "build",
    "lenet5",
    "lenet_300_100",
    "mlp",
    "resnet18",
    "resnet20",
    "resnet50",
    "resnet101",
    "small_cnn",
    "unet",
    "vit_base",
    "vit_small",
    "vit_tiny",
    "wrn_28_10",
]
