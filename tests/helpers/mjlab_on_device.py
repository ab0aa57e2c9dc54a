"""mjlab on the simulated device: Warp's kernels run on the CPU in the same memory and are not counted."""

from typing import Any

import pytest
import simulated
import torch


def put_mjlab_on_device(patch: pytest.MonkeyPatch) -> None:
    """Let Warp and mjlab accept the simulated device."""
    import warp as wp
    from mjlab.sim.sim_data import TorchArray
    from warp._src import context

    def is_simulated(device: Any) -> bool:
        return str(device).startswith(simulated.NAME)

    find, scope, to_torch, wrap = wp.get_device, wp.ScopedDevice, wp.to_torch, TorchArray.__init__

    def wrap_shared(self: Any, array: Any, nworld: int | None = None) -> None:
        wrap(self, array, nworld)
        self._tensor = simulated.share(self._tensor)  # for empty arrays, which are not converted

    wp.init()
    for name in (simulated.NAME, f"{simulated.NAME}:0"):
        patch.setitem(context.runtime.device_map, name, context.runtime.cpu_device)
    patch.setattr(wp, "get_device", lambda device=None: find("cpu" if is_simulated(device) else device))
    patch.setattr(wp, "ScopedDevice", lambda device: scope("cpu" if is_simulated(device) else device))
    patch.setattr(wp, "to_torch", lambda array, *options: simulated.share(to_torch(array, *options)))
    patch.setattr(wp, "from_torch", _from_torch(wp.from_torch))
    patch.setattr(TorchArray, "__init__", wrap_shared)


def _from_torch(convert: Any) -> Any:
    def from_torch(tensor: torch.Tensor, *types: Any, **options: Any) -> Any:
        if tensor.device.type == "cpu":
            return convert(tensor, *types, **options)
        import warp as wp

        like = convert(tensor.cpu(), *types, **options)
        array = wp.array(ptr=tensor.data_ptr(), dtype=like.dtype, shape=like.shape, device="cpu")
        array._tensor = tensor  # keeps the memory
        return array

    return from_torch
