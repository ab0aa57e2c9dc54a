"""Tests of learned noise masks: shapes, schedule, and a distribution trained only by losses that depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.contrib.perception.noise_mask import NoiseMask, NoiseMaskConfig
from robopolicy.data.chunks import ChunkBatch
from robopolicy.errors import UserError
from robopolicy.nets.augmentation import set_augmentation_progress
from robopolicy.nets.vision import CameraNet, VisionConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

IMAGE = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
VISION = VisionConfig(widths=(16,), keypoints=4, augmentation={"name": "noise_mask", "cells": 4})


def switched_on() -> NoiseMask:
    torch.manual_seed(0)
    mask = NoiseMask(3, NoiseMaskConfig(cells=4))
    mask.set_progress(0.0)
    return mask


def test_a_fresh_mask_is_uniform_smooth_and_within_its_range() -> None:
    mask = switched_on()
    sampled = mask.draw(IMAGE)
    assert sampled.shape == (6, 1, 16, 16) and float(sampled.min()) > 0 and float(sampled.max()) < 1
    assert torch.equal(mask.distribution(IMAGE).mean, torch.full((6, 4, 4), 0.5))
    assert float(sampled.diff(dim=2).abs().max()) < 0.2 and float(sampled.diff(dim=3).abs().max()) < 0.2
    assert not sampled.requires_grad and mask.logp is not None and mask.logp.shape == (6,)


@pytest.mark.parametrize("size", [(16, 16), (7, 19)])
def test_blurring_preserves_a_constant_mask(size: tuple[int, int]) -> None:
    mask = switched_on()
    mask.distribution = lambda image: Even()  # type: ignore[assignment,return-value]
    torch.testing.assert_close(mask.draw(torch.zeros(2, 3, *size)), torch.full((2, 1, *size), 0.25))


class Even:
    def sample(self) -> Tensor:
        return torch.full((2, 4, 4), 0.25)

    def log_prob(self, value: Tensor) -> Tensor:
        return value


def gradient(mask: NoiseMask, loss: Tensor) -> float:
    mask.zero_grad()
    (loss.mean() + mask.extra_loss(loss)).backward()
    return sum(float(parameter.grad.abs().sum()) for parameter in mask.parameters() if parameter.grad is not None)


def test_mask_distribution_gets_gradients_only_from_mask_dependent_losses() -> None:
    mask = switched_on()
    mask.draw(IMAGE)
    assert gradient(mask, torch.full((6,), 3.0, requires_grad=True)) == 0.0
    assert gradient(mask, mask.draw(IMAGE).mean((1, 2, 3)).requires_grad_()) > 0.0
    assert mask.logp is None


@pytest.mark.parametrize(("sign", "bright"), [(1.0, False), (-1.0, True)])
def test_noise_mask_learns_the_masks_with_low_loss(sign: float, bright: bool) -> None:
    mask = switched_on()
    optimizer = torch.optim.Adam(mask.parameters(), lr=0.03)
    image = IMAGE.repeat(6, 1, 1, 1)
    for _ in range(50):
        loss = sign * mask.draw(image).mean((1, 2, 3))
        optimizer.zero_grad()
        mask.extra_loss(loss).backward()
        optimizer.step()
    mean = float(mask.distribution(image).mean.mean().detach())
    assert (mean > 0.6) if bright else (mean < 0.4)


def test_cameras_apply_the_mask_only_while_scheduled_and_images_are_augmented() -> None:
    torch.manual_seed(0)
    camera, image = CameraNet((3, 16, 16), VISION), torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    plain = camera(image)
    crop = lambda: torch.Generator().manual_seed(1)  # noqa: E731
    augmented = camera(image, augment=True, generator=crop())
    set_augmentation_progress(camera, 0.2)
    assert torch.equal(camera(image), plain)
    assert not torch.equal(camera(image, augment=True, generator=crop()), augmented)
    set_augmentation_progress(camera, 0.5)
    assert torch.equal(camera(image, augment=True, generator=crop()), augmented)


def test_cloning_trains_the_masks_only_in_its_first_half() -> None:
    torch.manual_seed(0)
    spec = PolicySpec({"image.top": (3, 16, 16)}, action_dim=1, horizon=1, action_horizon=1)
    policy = GaussianPolicy(GaussianConfig(hidden=(8,), vision=VISION, imitation="mse"), spec)
    algorithm = BC(BCConfig(ema=False, warmup=0), policy, total_updates=4)
    masks = nn.ModuleList(part for part in policy.modules() if isinstance(part, NoiseMask))
    image = torch.randint(0, 256, (8, 1, 3, 16, 16), dtype=torch.uint8)
    batch = ChunkBatch({"image.top": image}, torch.randn(8, 1, 1), torch.ones(8, 1), torch.ones(8))
    moved = []
    for _ in range(4):
        before = [parameter.detach().clone() for parameter in masks.parameters()]
        algorithm.update(batch)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, masks.parameters(), strict=True)))
    assert moved == [True, True, False, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "noise_mask", "cells": 0}, "cells must be at least 1"),
        ({"name": "noise_mask", "cell": 4}, "Unknown setting 'cell'.*augmentation 'noise_mask'"),
        ({"name": "noise"}, "Unknown augmentation 'noise'"),
        ({"cells": 4}, "needs a name"),
    ],
)
def test_invalid_augmentation_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        VisionConfig(augmentation=settings)
