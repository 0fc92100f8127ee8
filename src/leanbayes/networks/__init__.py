"""Reference networks of the papers, by name."""

from leanbayes.networks.by_name import NAMES, build
from leanbayes.networks.cnn import lenet5, small_cnn
from leanbayes.networks.mlp import lenet_300_100, mlp
from leanbayes.networks.resnet import ResNet, resnet18, resnet20, resnet50, resnet101
from leanbayes.networks.unet import UNet, unet
from leanbayes.networks.vit import VisionTransformer, vit_base, vit_small, vit_tiny
from leanbayes.networks.wide_resnet import WideResNet, wrn_28_10

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
