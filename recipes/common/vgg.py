"""VGG for small images."""

from __future__ import annotations

import torch
from torch import nn
from torchvision import models


def make_vgg(depth: int, num_classes: int) -> models.VGG:
    """Return a VGG with batch normalisation and one linear layer.

    Args:
        depth: 11 or 16.
        num_classes: outputs of the linear layer.
    """
    with torch.device("meta"):  # large images have linear layers of 120 million parameters there, drawn in seconds
        vgg: models.VGG = {11: models.vgg11_bn, 16: models.vgg16_bn}[depth](num_classes=1)
    vgg.avgpool = nn.AdaptiveAvgPool2d(1)
    vgg.classifier = nn.Linear(512, num_classes)
    for layer in vgg.features.to_empty(device="cpu"):  # drawn as torchvision does
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
    return vgg
