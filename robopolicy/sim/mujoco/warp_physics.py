"""MuJoCo Warp: the physics of N environments on a GPU (or, slowly, on one CPU core), with torch views of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import torch
from torch import Tensor

from robopolicy.errors import UserError

CONTACTS = 64  # per environment, pooled; the Panda scenes reach 14
CONSTRAINTS = 128  # rows per environment; the Panda scenes reach 48
_LARGEST = 1e10  # MuJoCo's own bound of a position or velocity that makes sense
_OVERFLOWS = {  # bit of MuJoCo Warp's report: what ran out
    1 << 0: "constraints",
    1 << 1: "constraints (their non-zeros)",
    1 << 2: "contacts (broad phase)",
    1 << 3: "contacts",
    1 << 4: "contacts (convex collisions)",
}


class WarpPhysics:
    """N worlds of one model. The tensors named below are views: the physics reads and writes what they show.

    Args:
        model: The model.
        num_envs: N.
        device: Where to simulate.
        contacts: Room for contacts per environment, in one pool for all.
        constraints: Room for constraint rows of each environment.

    Raises:
        UserError: The packages are missing, or the model uses what MuJoCo Warp does not have.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        device: torch.device,
        contacts: int,
        constraints: int,
    ) -> None:
        self._warp, self._mjw = _import_packages()
        self._device = device
        if getattr(model, "nhistory", 0):
            raise UserError("The warp backend keeps no history of delayed actuators and sensors; use backend 'mujoco'.")
        if device.type == "cuda" and not self._warp.is_mempool_enabled(str(device)):
            raise UserError(f"MuJoCo Warp needs memory pools, which the driver of {device} lacks; use device cpu.")
        with self._warp.ScopedDevice(str(device)):
            try:
                self._model = self._mjw.put_model(model)
                self._data = self._mjw.make_data(model, nworld=num_envs, nconmax=contacts, njmax=constraints)
            except (NotImplementedError, ValueError) as error:
                raise UserError(f"MuJoCo Warp cannot simulate this model: {error} Use backend 'mujoco'.") from error
            if device.type == "cuda":  # older drivers cannot repeat a part of a graph until the solver has converged
                self._model.opt.graph_conditional = self._warp.is_conditional_graph_supported()
            self._model.opt.warn_overflow = False  # it prints from within its kernels; `overflow` tells as much
        view, data = self._warp.to_torch, self._data
        self.time: Tensor = view(data.time)  # (N,) [s]
        self.qpos: Tensor = view(data.qpos)  # (N, nq)
        self.qvel: Tensor = view(data.qvel)  # (N, nv)
        self.act: Tensor = view(data.act)  # (N, na)
        self.sensors: Tensor = view(data.sensordata)  # (N, nsensordata)
        self._warmstart: Tensor = view(data.qacc_warmstart)
        self._control: Tensor = view(data.ctrl)
        self._overflow: Tensor = view(data.overflow)
        self._step = self._recorded(lambda: self._mjw.step(self._model, self._data))
        senses = model.nsensordata > 0
        self._forward = self._recorded(lambda: self._mjw.forward(self._model, self._data)) if senses else None

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Views of everything that decides the future, and of the sensors: `(N, ...)` each."""
        return self.time, self.qpos, self.qvel, self.act, self.sensors

    @property
    def overflow(self) -> Tensor:
        """(N,) bool, worlds whose contacts or constraints did not fit in the last `advance`."""
        return self._overflow != 0

    def advance(self, control: Tensor, steps: int) -> None:
        """Make `steps` physics steps of all worlds under `control` `(N, nu)`.

        As with `RolloutEngine`, the solver starts every control step from a zero warm start.
        """
        self._control.copy_(control)
        self._warmstart.zero_()
        self._overflow.zero_()
        self._step(steps)

    def sense(self, rows: Tensor) -> None:
        """Compute the sensors of `rows` `(K,)`, which have just been placed."""
        if self._forward is not None:
            before = self.sensors.clone()
            self._forward(1)
            self.sensors.copy_(before.index_copy_(0, rows, self.sensors[rows]))

    def sane(self) -> Tensor:
        """(N,) bool, worlds whose state is finite and within MuJoCo's bounds."""
        return torch.cat([self.qpos, self.qvel, self.act], dim=1).abs().le(_LARGEST).all(dim=1)

    def overflowed(self) -> str:
        """What did not fit in the last `advance`; waits for the device."""
        bits = {int(value) for value in self._overflow.unique().tolist()}
        names = [name for bit, name in _OVERFLOWS.items() if any(value & bit for value in bits)]
        return ", ".join(names) or "buffers of the collision functions"

    def _recorded(self, run: Callable[[], None]) -> Callable[[int], None]:
        """`run`, recorded once and played back so many times as a graph without Python inside, on GPU and CPU alike."""
        wp, device = self._warp, self._device
        with wp.ScopedDevice(str(device)):
            run()  # compiles and loads the kernels, which must not happen while recording
            with wp.ScopedCapture() as capture:
                run()
            wp.synchronize_device()

        def play(times: int) -> None:
            # On torch's stream the physics and torch's operations follow each other without the host waiting.
            stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
            for _ in range(times):
                wp.capture_launch(capture.graph, stream)

        return play


def _import_packages() -> tuple[Any, Any]:
    try:
        import warp

        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)  # it reports every kernel on stdout
        import mujoco_warp
    except ImportError as error:
        raise UserError("MuJoCo Warp is not installed; run: pip install 'robopolicy[warp]'.") from error
    return warp, mujoco_warp
