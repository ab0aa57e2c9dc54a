"""Devices of networks and simulators, copies of tensors to a device, and random generators on it."""

from __future__ import annotations

import hashlib
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


STAGED_BYTES = 2**16
"""Largest copy from the CPU to a device that the driver stages; larger ones wait unless the memory is pinned."""


def copy_to(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`; only copies to the CPU wait."""
    if device.type == "cpu" or value.device == device:
        return value.to(device)
    if value.device.type == "cpu" and value.nbytes > STAGED_BYTES:
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def has_memory(device: torch.device, size: int) -> bool:
    """Whether `size` bytes take at most half of the free memory of a device; True if that is unknown."""
    free = getattr(torch.get_device_module(device), "mem_get_info", None)
    return free is None or 2 * size <= free(device)[0]


def move(value: Any, device: torch.device) -> Any:
    """Copy a tensor, or a mapping, tuple or dataclass of tensors, to `device`."""
    if isinstance(value, Tensor):
        return copy_to(value, device)
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(move(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: move(getattr(value, entry.name), device) for entry in fields(value)})
    return value


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Set the state of `generator`; a state of another type of device, whose numbers differ, becomes its seed."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
    else:
        digest = hashlib.sha256(state.numpy().tobytes()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
