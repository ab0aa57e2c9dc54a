"""Exponential moving average of weights, and temporary training and evaluation modes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class EMA(nn.Module, Generic[Module]):
    """Exponential moving average `module` of a network's weights, with Diffusion Policy's schedule.

    The decay of update n = 0, 1, ... is `min(max_decay, 1 - (1 + n) ** -0.75)`, so the first update copies the network.
    Buffers (normaliser statistics) are copied.
    """

    updates: Tensor

    def __init__(self, network: Module, max_decay: float = 0.9999) -> None:
        super().__init__()
        self.module: Module = copy.deepcopy(network).eval().requires_grad_(False)
        self.max_decay = max_decay
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self._count = 0  # `updates`, without a wait for the device

    def decay(self, n: int) -> float:
        """Weight of the old average in update `n` (counted from 0)."""
        return min(self.max_decay, 1.0 - (1.0 + n) ** -0.75)

    @torch.no_grad()
    def update(self, network: Module) -> None:
        """Update the average with the weights of `network`."""
        weight = 1.0 - self.decay(self._count)
        torch._foreach_lerp_(list(self.module.parameters()), list(network.parameters()), weight)
        if buffers := list(self.module.buffers()):
            torch._foreach_copy_(buffers, list(network.buffers()))
        self.updates += 1
        self._count += 1

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._count = int(self.updates)


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Set every submodule to evaluation mode, and restore its mode afterwards."""
    yield from _mode(network, training=False)


@contextmanager
def training_mode(network: nn.Module) -> Iterator[None]:
    """Set every submodule to training mode, and restore its mode afterwards."""
    yield from _mode(network, training=True)


def _mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
