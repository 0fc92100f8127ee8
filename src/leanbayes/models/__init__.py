"""Small reference networks: what the papers use."""

from leanbayes.models.resnet import ResNet, resnet18

__all__ = ["ResNet", "resnet18"]
