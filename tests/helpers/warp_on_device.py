"""MuJoCo Warp on the simulated device: its kernels run on the CPU in the memory of the device and are not counted."""

from typing import Any

import pytest
import torch


def use_simulated_memory(patch: pytest.MonkeyPatch) -> None:
    """Let Warp accept tensors of the simulated device."""
    import warp as wp

    convert, find = wp.from_torch, wp.device_from_torch

    def from_torch(tensor: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        if tensor.device.type == "cpu":
            return convert(tensor, dtype=dtype, **options)
        memory = tensor.data_ptr()
        inner = torch.as_strided(torch.zeros(1, dtype=tensor.dtype), tensor.shape, [0] * tensor.dim())
        like = convert(inner.contiguous(), dtype=dtype)
        size, trailing = tensor.element_size(), len(tensor.shape) - like.ndim
        strides = tuple(step * size for step in tensor.stride()[: tensor.dim() - trailing])
        array = wp.array(ptr=memory, dtype=like.dtype, shape=like.shape, strides=strides, device="cpu")
        array._tensor = tensor  # keeps the memory
        return array

    def device_from_torch(device: torch.device) -> Any:
        return wp.get_device("cpu") if device.type == "simulated" else find(device)

    patch.setattr(wp, "from_torch", from_torch)
    patch.setattr(wp, "device_from_torch", device_from_torch)
