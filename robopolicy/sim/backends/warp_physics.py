"""N worlds of MuJoCo Warp whose states lie in one buffer of torch, a row per world."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mujoco
import torch
from torch import Tensor

from robopolicy.errors import UserError

_OVERFLOWS = {  # bit of MuJoCo Warp's report: name of the buffer
    1 << 0: "constraints",
    1 << 1: "constraints (their non-zeros)",
    1 << 2: "contacts (broad phase)",
    1 << 3: "contacts",
    1 << 4: "contacts (convex collisions)",
}
# Constants of the model that MuJoCo derives from masses, inertias and positions.
_CONSTANTS = (
    *("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "tendon_length0", "tendon_invweight0"),
)
_STATE = ("qpos", "qvel", "act", "time")  # determine the future
_AFTER_FORCES = {"cacc", "cfrc_int", "cfrc_ext"}  # fields that a step computes only on demand


class Columns:
    """Named blocks `(N, *shape)` of the columns of a buffer `(N, width)`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._blocks: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.width = 0
        for name, shape in shapes.items():
            stop = self.width + math.prod(shape)
            self._blocks[name] = (self.width, stop, tuple(shape))
            self.width = stop

    def __iter__(self) -> Any:
        return iter(self._blocks)

    def views(self, buffer: Any) -> dict[str, Any]:
        """Views of all blocks of a tensor `(N, width)`."""
        found = {}
        for name, (start, stop, shape) in self._blocks.items():
            block = buffer[:, start:stop] if shape else buffer[:, start]
            found[name] = block.unflatten(1, shape) if len(shape) > 1 else block
        return found

    def write(self, buffer: Any, values: Mapping[str, Any]) -> None:
        """Write blocks `(N, *shape)`, or one `(*shape)` for all rows, into an array `(N, width)`."""
        for name, value in values.items():
            start, stop, shape = self._blocks[name]
            block = buffer[:, start:stop]
            block[:] = value.reshape(block.shape if value.ndim > len(shape) else -1)

    def flat(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """All blocks as `(N, size)` in the order of the columns."""
        return [
            values[name].flatten(1) if shape else values[name][:, None] for name, (_, _, shape) in self._blocks.items()
        ]


class WarpPhysics:
    """N worlds of one model. `rows` `(N, R)` holds the state of each world, before and after every call.

    The columns of `rows` are qpos, qvel, act and time, then sensordata, the derived fields and the memory of the task,
    which physics leaves alone. `fields` `(N, F)` holds the fields of the model that differ between worlds.

    Raises:
        UserError: The packages are missing, or MuJoCo Warp does not support the model.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        device: torch.device,
        *,
        contacts: int,  # capacity for contacts per environment, in one pool
        constraints: int,  # capacity for constraint rows of each environment
        frame_skip: int = 1,  # physics steps per `advance`
        derived: Sequence[str] = (),  # fields of `MjData` to keep in the rows
        edited: Sequence[str] = (),  # fields of the model that differ between worlds
        memory: int = 0,  # columns for the memory of the task
    ) -> None:
        self._warp, self._mjw = import_packages()
        self._model_of_mujoco, self._device, self._frame_skip = model, device, frame_skip
        if getattr(model, "nhistory", 0):
            raise UserError("The warp backend does not support delayed actuators and sensors; use backend 'mujoco'.")
        where = self._warp.device_from_torch(device)
        if where.is_cuda and not where.is_mempool_enabled:
            raise UserError(f"MuJoCo Warp needs memory pools, which the driver of {device} lacks; use device cpu.")
        varied = dict.fromkeys((*edited, *(_CONSTANTS if edited else ())), num_envs)
        with self._warp.ScopedDevice(where):
            try:
                self._model = self._mjw.put_model(model, batch_sizes=varied)
                self._data = self._mjw.make_data(model, nworld=num_envs, nconmax=contacts, njmax=constraints)
            except (NotImplementedError, ValueError) as error:
                raise UserError(f"MuJoCo Warp cannot simulate this model: {error} Use backend 'mujoco'.") from error
            if where.is_cuda:  # older drivers cannot loop in a graph until the solver converges
                self._model.opt.graph_conditional = self._warp.is_conditional_graph_supported()
            self._model.opt.warn_overflow = False  # the kernels print; use `overflow`
        missing = sorted(set(derived) - set(vars(self._data)))
        if missing:
            raise UserError(f"MuJoCo Warp does not compute {', '.join(missing)}; use backend 'mujoco-exact'.")
        self._rne = bool(_AFTER_FORCES & set(derived))
        names = (*_STATE, "sensordata", *derived)
        self.state = Columns({name: self._shape(self._data, name) for name in names})
        self.model_fields = Columns({name: self._shape(self._model, name) for name in varied})
        self.rows = torch.zeros(num_envs, self.state.width + memory, device=device)  # (N, R)
        self.fields = torch.zeros(num_envs, self.model_fields.width, device=device)  # (N, F)
        self.positions = model.nq + model.nv + model.na  # leading columns that must stay within bounds
        self._blocks = {name: self._pair(name, view) for name, view in self.state.views(self.rows).items()}
        self._place(self._model, self.model_fields.views(self.fields))
        self._control = torch.zeros(num_envs, model.nu, device=device)
        self.overflow = torch.zeros(num_envs, dtype=torch.int32, device=device)
        """(N,) bits of the buffers that were too small in the last `advance`; see `overflows`."""
        self._place(self._data, {"ctrl": self._control, "overflow": self.overflow})
        self._recorded: dict[Callable[[], None], Callable[[], None]] = {}

    def advance(self, control: Tensor) -> None:
        """Run one control step of all worlds under `control` `(N, nu)`.

        As with `RolloutEngine`, the solver starts every control step from a zero warm start.
        """
        self._control.copy_(control)
        self._launch(self._advance)

    def prepare(self, rows: Tensor, fields: Tensor) -> None:
        """Take states `rows` `(K, R)` and `fields` `(K, F)` for the first K worlds, and compute all that follows.

        `fields` holds the edited fields; the constants that MuJoCo derives from them are computed, as are the sensors
        and derived fields.
        """
        self.rows[: len(rows)] = rows
        self.fields[: len(fields)] = fields
        self._launch(self._initialize)

    def _launch(self, run: Callable[[], None]) -> None:
        if run not in self._recorded:
            kept = self.rows.clone(), self.fields.clone()
            self._recorded[run] = recorded(run, self._device)
            self.rows.copy_(kept[0])
            self.fields.copy_(kept[1])
        self._recorded[run]()

    def _advance(self) -> None:
        self._load()
        self._data.qacc_warmstart.zero_()
        self._data.overflow.zero_()
        for _ in range(self._frame_skip):
            self._mjw.step(self._model, self._data)
        if self._rne:
            self._mjw.rne_postconstraint(self._model, self._data)
        self._store()

    def _initialize(self) -> None:
        self._load()
        if self.model_fields.width:
            self._mjw.set_const(self._model, self._data, restore=False)
        self._mjw.forward(self._model, self._data)
        self._store()

    def _load(self) -> None:
        for name in _STATE:
            own, row = self._blocks[name]
            self._copy(row, own)

    def _store(self) -> None:
        for own, row in self._blocks.values():
            self._copy(own, row)

    def _copy(self, source: Any, target: Any) -> None:
        from robopolicy.sim.backends.warp_kernels import copy_columns

        self._warp.launch(copy_columns, dim=source.shape, inputs=[source], outputs=[target])

    def _pair(self, name: str, view: Tensor) -> tuple[Any, Any]:
        """Array `(N, D)` of Warp and the columns `(N, D)` of the rows that hold the same values."""
        own = self._warp.to_torch(getattr(self._data, name))
        view.copy_(own)
        convert = self._warp.from_torch
        return convert(own.reshape(len(own), -1)), convert(view.flatten(1) if view.dim() > 1 else view[:, None])

    def _shape(self, owner: Any, name: str) -> tuple[int, ...]:
        """Shape of one world in an array."""
        return tuple(self._warp.to_torch(getattr(owner, name)).shape[1:])

    def _place(self, owner: Any, views: Mapping[str, Tensor]) -> None:
        """Move arrays of Warp, with their values, into memory of torch."""
        for name, view in views.items():
            old = getattr(owner, name)
            view.copy_(self._warp.to_torch(old))
            setattr(owner, name, self._warp.from_torch(view, dtype=old.dtype))


def overflows(bits: int) -> str:
    """Names of the buffers of MuJoCo Warp in `bits`."""
    names = [name for bit, name in _OVERFLOWS.items() if bits & bit]
    return ", ".join(names) or "buffers of the collision functions"


def recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run `run` once and return a function that repeats its launches of Warp, on a GPU or the CPU."""
    wp, _ = import_packages()
    with wp.ScopedDevice(wp.device_from_torch(device)):
        run()  # compile and load the kernels before the capture
        with wp.ScopedCapture() as capture:
            run()
        wp.synchronize_device()

    def launch() -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            run()  # becomes a part of the recording of the caller
            return
        with on_torch_stream(device):
            wp.capture_launch(capture.graph)

    return launch


def on_torch_stream(device: torch.device) -> AbstractContextManager[object]:
    """Context in which Warp launches on the current stream of torch, so that neither waits for the other."""
    if device.type != "cuda":
        return nullcontext()
    wp, _ = import_packages()
    stream = torch.cuda.current_stream(device)
    # Warp knows a capture by its stream object, so an equal stream stays in place.
    if wp.get_stream(str(device)).cuda_stream == stream.cuda_stream:
        return nullcontext()
    return wp.ScopedStream(wp.stream_from_torch(stream), sync_enter=False)


def import_packages() -> tuple[Any, Any]:
    """Warp and MuJoCo Warp."""
    try:
        import warp

        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)  # it prints every kernel to stdout
        warp.init()
        import mujoco_warp
    except ImportError as error:
        raise UserError("MuJoCo Warp is not installed; run: pip install 'robopolicy[warp]'.") from error
    return warp, mujoco_warp
