"""ResNet-18 with frozen batch normalisation (He et al. 2016), with the names of torchvision's weights.

Normalisation uses constants instead of statistics of a batch, so that images never interact. The constants come
from pretrained weights: without such weights they are 0 and 1, and `vision.kind=resnet` trains better.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn, ones, tensor, zeros

CHANNELS = 512  # of the feature map, which has 1/32 of the rows and columns of the image
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with constants, per channel."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", ones(channels))
        self.register_buffer("bias", zeros(channels))
        self.register_buffer("running_mean", zeros(channels))
        self.register_buffer("running_var", ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `(B, C, h, w)`."""
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = FrozenBatchNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = FrozenBatchNorm(channels)
        self.downsample = None
        if stride > 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, FrozenBatchNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(B, C, h, w)` to `(B, C', h / stride, w / stride)`."""
        skip = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + skip)


class ResNet18(nn.Module):
    """Map images `(B, 3, h, w)` in [-1, 1] to the last feature map `(B, 512, h / 32, w / 32)`, rounded up.

    The image is standardised by `mean` and `std` `(3, 1, 1)`, in units of [0, 1], at first the statistics of ImageNet.
    """

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", tensor(IMAGENET_MEAN)[:, None, None])
        self.register_buffer("std", tensor(IMAGENET_STD)[:, None, None])
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenBatchNorm(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, CHANNELS, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Compute the feature map."""
        x = ((x + 1) / 2 - self.mean) / self.std
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))
