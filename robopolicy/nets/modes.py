"""Training and evaluation mode for a while, e.g. dropout only where something is learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode and restore each one's own mode afterwards."""
    with _mode(network, training=False):
        yield


@contextmanager
def training_mode(network: nn.Module) -> Iterator[None]:
    """Put every submodule into training mode and restore each one's own mode afterwards."""
    with _mode(network, training=True):
        yield


@contextmanager
def _mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
