"""Learned augmentations of camera images for behaviour cloning, by name in `AUGMENTATIONS`.

An augmentation belongs to the policy and is trained with it, by its own loss, which behaviour cloning adds. Sampling
and scoring never use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import Registry
from robopolicy.schema import with_defaults


class Augmentation(nn.Module, ABC):
    """Learned augmentation of the images of a camera, constructed as `cls(channels, config)`; inactive at first."""

    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings, all with defaults

    @abstractmethod
    def forward(self, image: Tensor) -> Tensor:
        """Augment images `(B, C, h, w)` in [-1, 1]."""

    @abstractmethod
    def set_progress(self, progress: float) -> None:
        """Set the training progress in [0, 1]."""

    @abstractmethod
    def extra_loss(self, loss: Tensor) -> Tensor:
        """Scalar loss of its parameters, given the loss `(B,)` of the augmented samples."""


AUGMENTATIONS: Registry[type[Augmentation]] = Registry("augmentations", {})
"""Name -> class."""


def augmentation_config(settings: Mapping[str, Any]) -> tuple[type[Augmentation], Any] | None:
    """Class and config of an augmentation from `settings` `{"name": NAME, ...}`; None if they are empty."""
    if not settings:
        return None
    rest = dict(settings)
    name = rest.pop("name", None)
    if name is None:
        raise UserError("vision.augmentation needs a name; set vision.augmentation.name.")
    if name not in AUGMENTATIONS:
        raise unknown_name("augmentation", str(name), AUGMENTATIONS)
    augmentation = AUGMENTATIONS[name]
    return augmentation, with_defaults(augmentation.config_class, rest, f"augmentation '{name}'")


def set_augmentation_progress(module: nn.Module, progress: float) -> None:
    """Set the training progress in [0, 1] of every augmentation in `module`."""
    for augmentation in _augmentations(module):
        augmentation.set_progress(progress)


def augmentation_loss(module: nn.Module, loss: Tensor) -> Tensor:
    """Sum of the losses of all augmentations in `module`, a scalar, given the loss `(B,)` of the samples."""
    total = loss.new_zeros(())
    for augmentation in _augmentations(module):
        total = total + augmentation.extra_loss(loss)
    return total


def _augmentations(module: nn.Module) -> Iterator[Augmentation]:
    return (part for part in module.modules() if isinstance(part, Augmentation))
