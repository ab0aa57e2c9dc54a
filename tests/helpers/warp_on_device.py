"""MuJoCo Warp on the simulated device: its kernels run on the CPU in the memory of the device and are not counted."""

from typing import Any

import pytest
import torch
import warp as wp


def use_simulated_memory(patch: pytest.MonkeyPatch) -> None:
    """Let Warp accept tensors of the simulated device."""
    wp.init()
    convert, find = wp.from_torch, wp.device_from_torch

    def from_torch(tensor: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        if tensor.device.type != "simulated":
            return convert(tensor, dtype=dtype, **options)
        like = convert(torch.zeros(tensor.shape, dtype=tensor.dtype), dtype=dtype)
        strides = tuple(step * tensor.element_size() for step in tensor.stride()[: like.ndim])
        return wp.array(ptr=tensor.data_ptr(), dtype=like.dtype, shape=like.shape, strides=strides, device="cpu")

    def device_from_torch(device: torch.device) -> Any:
        return wp.get_device("cpu") if device.type == "simulated" else find(device)

    patch.setattr(wp, "from_torch", from_torch)
    patch.setattr(wp, "device_from_torch", device_from_torch)
