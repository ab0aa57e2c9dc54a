"""Devices and threads of networks and simulators, copies of tensors to a device, and random generators on it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name

CPU = torch.device("cpu")
COMPILE_MODES = ("", "default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class GPUConfig:
    """Precision and speed of the networks on a GPU; without effect on the CPU."""

    deterministic: bool = False  # updates that repeat to the last bit, which are slower
    tf32: bool = False  # matrix products with a mantissa of 10 bits, which are faster for large networks
    compile: str = ""  # mode of torch.compile: default | reduce-overhead | max-autotune; empty: not compiled

    def __post_init__(self) -> None:
        if self.compile not in COMPILE_MODES:
            raise unknown_name("mode of torch.compile", self.compile, COMPILE_MODES[1:])

    def apply(self) -> None:
        """Apply the global settings, before the first matrix product."""
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32

    def compile_networks(self, module: nn.Module) -> None:
        """Compile the outermost parts of `module` from `robopolicy.nets` in place, without new names of weights."""
        if type(module).__module__.startswith("robopolicy.nets."):
            if self.compile and next(module.parameters(), None) is not None:
                module.compile(mode=self.compile)
            return
        for part in module.children():
            self.compile_networks(part)


AUTO = "auto"
"""Name of the GPU, if there is one, and otherwise of the CPU."""


def device_name(name: str) -> str:
    """Return the device that `name` stands for: "cuda" or "cpu" for `AUTO`."""
    if name != AUTO:
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str | torch.device) -> torch.device:
    """Return the named device after a test allocation; an unavailable device raises a UserError."""
    name = device_name(name) if isinstance(name, str) else name
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it stores no data")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if reason.startswith("Expected one of"):  # torch lists all its backends
            reason = "it is not a device such as auto, cpu, cuda or cuda:0"
        raise UserError(f"Device '{name}' cannot be used: {reason}; use device cpu.") from error
    return device


def use_configured_threads() -> None:
    """Compute in the calling thread with the number of torch threads that `torch.set_num_threads` set.

    A new thread computes with one per core until it asks for the number, which can change the last bit of results.
    """
    torch.get_num_threads()


def list_factories() -> None:
    """Let torch list the functions that create tensors on the device of `with torch.device(...)`.

    It does so once, when the first such block creates a tensor. Call this before a library loads that replaces one of
    the functions for a while, as transformers replaces `torch.linspace`: the original would be missing from the list.
    """
    with torch.device("cpu"):
        torch.empty(0)


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


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """Return a random permutation `(count,)` on the device of `generator`."""
    return torch.randperm(count, generator=generator, device=generator.device)


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Set the state of `generator`; a state of another type of device, whose numbers differ, becomes its seed."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
    else:
        digest = hashlib.sha256(state.numpy().tobytes()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Use kernels whose results repeat to the last bit, where they exist."""
    if not enabled:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
