"""Devices of networks and simulators, and copies of tensors to a device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError


def usable_device(name: str | torch.device) -> torch.device:
    """Return the named device after a test allocation; an unavailable device raises a UserError."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it stores no data")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if reason.startswith("Expected one of"):  # torch lists all its backends
            reason = "it is not a device such as cpu, cuda or cuda:0"
        raise UserError(f"Device '{name}' cannot be used: {reason}; use device cpu.") from error
    return device


def module_device(module: nn.Module) -> torch.device | None:
    """Return the device of the parameters or buffers of a module; None if it has neither."""
    return next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)


def move(value: Any, device: torch.device) -> Any:
    """Copy a tensor, or a mapping, tuple or dataclass of tensors, to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(move(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: move(getattr(value, entry.name), device) for entry in fields(value)})
    return value
