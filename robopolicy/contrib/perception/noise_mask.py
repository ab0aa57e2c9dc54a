"""A learned mask on camera images: noise whose distribution follows the task loss.

Source: Yavuz and Yang 2024, and its code. A tiny network sees the image and gives every cell of a grid a Beta
distribution. What is drawn, between 0 and 1, is scaled up, blurred and multiplied with the image, whose grey is 0.
REINFORCE moves the distribution towards masks under which the loss is low. Masks belong to the first part of imitation
alone; the rest of it, and everything later, sees the images as they are, so the mask costs nothing once trained. Prefer
crops, which need no training; try this where a policy leans on what will look different tomorrow.

Deviations: the likelihood of a mask is that of all its cells (the code adds up densities), the policy's own gradient is
not weighted with it, and the batch's mean loss is the baseline. Parameters follow the image alone, not a running mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.constraints import PositiveInt, Validated
from robopolicy.nets.augmentation import Augmentation

BLUR = 1.0  # [cells] standard deviation of the blur
EDGE = 1e-4  # draws keep this distance from 0 and 1, where densities end
LARGEST = 2.0  # bound of the logarithms of both Beta parameters
SHARE = 0.5  # of the updates, the first ones, in which images are seen through masks


@dataclass(frozen=True)
class NoiseMaskConfig(Validated):
    """Settings of a learned noise mask."""

    cells: PositiveInt = 8  # cells a side


class NoiseMask(Augmentation):
    """Multiplies images `(B, C, h, w)` in [-1, 1] with drawn masks; begins uniform in every cell."""

    config_class = NoiseMaskConfig

    def __init__(self, channels: int, config: NoiseMaskConfig) -> None:
        """Prepare masks of `config.cells` by `config.cells` values."""
        super().__init__()
        self.cells = config.cells
        self.on = False  # whether images are masked; `set_progress` says
        self.logp: Tensor | None = None  # (B,) of the last masks, mean over the cells, until `extra_loss` takes it
        last = nn.Conv2d(16, 2, 1)
        self.body = nn.Sequential(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), last)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def distribution(self, image: Tensor) -> torch.distributions.Beta:
        """Beta distributions `(B, cells, cells)`."""
        small = F.adaptive_avg_pool2d(image, 2 * self.cells)
        alpha, beta = (LARGEST * (self.body(small) / LARGEST).tanh()).exp().unbind(1)
        return torch.distributions.Beta(alpha, beta, validate_args=False)

    def forward(self, image: Tensor) -> Tensor:
        """Images under drawn masks while they are on."""
        return image * self.draw(image) if self.on else image

    def draw(self, image: Tensor) -> Tensor:
        """Draw masks `(B, 1, h, w)` in [0, 1] and remember how likely they were."""
        distribution = self.distribution(image)
        drawn = distribution.sample().clamp(EDGE, 1 - EDGE)  # from torch's global generator
        self.logp = distribution.log_prob(drawn).mean((1, 2))
        height, width = image.shape[-2:]
        mask = F.interpolate(drawn[:, None], (height, width))
        mask = _blurred(mask, height / self.cells * BLUR)
        return _blurred(mask.mT, width / self.cells * BLUR).mT

    def set_progress(self, progress: float) -> None:
        """Switch masks on during the first half of training."""
        self.on, self.logp = progress < SHARE, None

    def extra_loss(self, loss: Tensor) -> Tensor:
        """REINFORCE loss of the masks that were drawn for the samples of `loss` `(B,)`; 0 where none was.

        Its gradient is an estimate of the gradient of the mean of `loss` in the parameters of the distributions, up to
        the factor by which `draw` averages over cells.
        """
        if self.logp is None:
            return loss.new_zeros(())
        count = len(loss)
        advantage = (loss.detach() - loss.detach().mean()) * count / max(count - 1, 1)  # baseline: mean of the others
        logp, self.logp = self.logp, None  # a graph kept here could not be copied with the module
        return (advantage * logp.view(count, -1).sum(1)).mean()  # several images may make a sample


def _blurred(mask: Tensor, std: float) -> Tensor:
    """Gaussian blur of `(B, 1, h, w)` along h, `std` in pixels; edges are continued."""
    radius = max(1, math.ceil(2 * std))
    offsets = torch.arange(-radius, radius + 1, device=mask.device, dtype=mask.dtype)
    kernel = (-0.5 * (offsets / std).square()).softmax(0)
    return F.conv2d(F.pad(mask, (0, 0, radius, radius), mode="replicate"), kernel.view(1, 1, -1, 1))
