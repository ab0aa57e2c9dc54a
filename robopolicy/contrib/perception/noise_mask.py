"""Learned mask on camera images: noise whose distribution follows the task loss.

Source: Yavuz and Yang 2024, and its code. A tiny network maps the image to a Beta distribution for every cell of a
grid. The draw, in [0, 1], is upsampled, blurred and multiplied with the image, whose grey is 0. REINFORCE moves the
distribution towards masks with a low loss. Masks apply in the first part of imitation only; afterwards the policy gets
unmasked images, so the mask costs nothing after training. Prefer crops, which need no training; try this if a policy
relies on image content that will change.

Deviations: the likelihood of a mask covers all its cells (the code adds densities), the policy's own gradient is not
weighted with it, and the batch's mean loss is the baseline. Parameters depend on the image only, not on a running mean.
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
EDGE = 1e-4  # minimum distance of draws to 0 and 1, where densities end
LARGEST = 2.0  # bound of the logarithms of both Beta parameters
SHARE = 0.5  # fraction of the updates, from the start, with masks


@dataclass(frozen=True)
class NoiseMaskConfig(Validated):
    """Settings of a learned noise mask."""

    cells: PositiveInt = 8  # cells per side


class NoiseMask(Augmentation):
    """Multiplies images `(B, C, h, w)` in [-1, 1] with drawn masks, initially uniform in every cell."""

    config_class = NoiseMaskConfig

    def __init__(self, channels: int, config: NoiseMaskConfig) -> None:
        """Prepare masks of `config.cells` by `config.cells` values."""
        super().__init__()
        self.cells = config.cells
        self.on = False  # whether images are masked; set by `set_progress`
        self.logp: Tensor | None = None  # (B,) of the last masks, mean over the cells, until `extra_loss` uses it
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
        """Mask the images while masks are on."""
        return image * self.draw(image) if self.on else image

    def draw(self, image: Tensor) -> Tensor:
        """Draw masks `(B, 1, h, w)` in [0, 1] and store their log-probability."""
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
        """REINFORCE loss of the masks drawn for the samples of `loss` `(B,)`; 0 without masks.

        Its gradient estimates the gradient of the mean of `loss` in the parameters of the distributions, up to the
        factor by which `draw` averages over cells.
        """
        if self.logp is None:
            return loss.new_zeros(())
        count = len(loss)
        advantage = (loss.detach() - loss.detach().mean()) * count / max(count - 1, 1)  # baseline: mean of the others
        logp, self.logp = self.logp, None  # a stored graph would prevent copies of the module
        return (advantage * logp.view(count, -1).sum(1)).mean()  # a sample may have several images


def _blurred(mask: Tensor, std: float) -> Tensor:
    """Gaussian blur of `(B, 1, h, w)` along h, `std` in pixels; edges are replicated."""
    radius = max(1, math.ceil(2 * std))
    offsets = torch.arange(-radius, radius + 1, device=mask.device, dtype=mask.dtype)
    kernel = (-0.5 * (offsets / std).square()).softmax(0)
    return F.conv2d(F.pad(mask, (0, 0, radius, radius), mode="replicate"), kernel.view(1, 1, -1, 1))
