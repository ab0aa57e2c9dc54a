"""The GPU backend: a `MujocoTask` that computes with torch, on the physics of MuJoCo Warp.

Against `MujocoSim` the same task plays the same episodes in single precision: equal starts, then trajectories that part
slowly until something is touched and faster after it (docs/guide.md has figures).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.device import usable_device
from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.sim.host import check_action, check_number_of_envs
from robopolicy.sim.mujoco.render import Renderer
from robopolicy.sim.mujoco.task import BatchState, MujocoTask, sim_spec
from robopolicy.sim.mujoco.warp_physics import CONSTRAINTS, CONTACTS, WarpPhysics
from robopolicy.sim.seeds import SeedCounter


class WarpSim(VectorSim):
    """N environments of one task on one device.

    A step waits for the device once, to learn which episodes ended; the starts of the next ones are drawn on the host.

    Args:
        task: What to simulate; its functions must take torch tensors (`MujocoTask.array_api`).
        num_envs: N.
        device: `cpu`, `cuda`, `cuda:0`, ...
        contacts: Room for contacts per environment, in one pool for all.
        constraints: Room for constraint rows of each environment.

    A state that diverges (non-finite or beyond MuJoCo's bounds) ends its episode: `terminated`, `info["diverged"]`,
    never a success, and `final_obs` is the last good observation. Contacts that found no room are lost: that sets
    `info["overflow"]`, and the first time a warning says what to enlarge.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_envs: int,
        *,
        device: str = "cpu",
        contacts: int = CONTACTS,
        constraints: int = CONSTRAINTS,
    ) -> None:
        if task.needs_exact_engine:
            raise UserError(f"Task {task.name} reads contacts or forces and needs backend 'mujoco-exact', got 'warp'.")
        if not task.array_api:
            raise UserError(f"Task {task.name} is written for numpy alone, backend 'warp' needs torch; use 'mujoco'.")
        self.task = task
        self.spec = sim_spec(task)
        self.num_envs = num_envs
        self._physics = WarpPhysics(task.model, num_envs, usable_device(device), contacts, constraints)
        self.device = self._physics.qpos.device  # "cuda" has become "cuda:0"
        self._low, self._high = self.spec.action_low.to(self.device), self.spec.action_high.to(self.device)
        self._seeds = SeedCounter(num_envs)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._memory: dict[str, Tensor] = {}
        self._started = self._warned = False
        self._renderers: dict[tuple[int, int], Renderer] = {}

    @property
    def episode_seed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, seed of the episode now running."""
        return torch.from_numpy(self._seeds.current.copy()).to(self.device)

    @property
    def episode_step(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, control steps taken in that episode."""
        return self._steps.clone()

    def state(self) -> BatchState:
        """States of all environments now, as a task sees them; views that the next step overwrites."""
        return self._batch(self._physics.state, self._memory)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every environment anew; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        self._start(np.arange(self.num_envs))
        self._started = True
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; rows where `active` `(N,)` is False stand still.

        A NaN is found out after it has been played, as 0: looking for it first would be a second wait for the device.
        """
        if not self._started:
            raise UserError("Call reset before the first step.")
        check_action(action, self.num_envs, self.spec)
        asked = action.detach().to(self.device, torch.float32)
        played: Any = asked.nan_to_num(0.0).clamp(self._low, self._high)
        moves = torch.ones_like(self._steps, dtype=torch.bool) if active is None else active.to(self.device)
        physics = self._physics
        start = [view.clone() for view in physics.state]
        before = self._batch(start, {key: value.clone() for key, value in self._memory.items()})

        physics.advance(_tensor(self.task.control(played, before)), self.task.frame_skip)
        sane = physics.sane()
        for view, old in zip(physics.state, start, strict=True):
            view.copy_(_where(moves & sane, view, old))
        written = {key: _tensor(value) for key, value in before.memory.items()}
        self._memory = {key: _where(moves, value, self._memory[key]) for key, value in written.items()}
        outcome = self.task.outcome(before, played, self.state())
        final, earned = self._observe(), _tensor(outcome.reward).float()
        for value in (earned, *final.values()):
            sane = sane & value.isfinite().reshape(self.num_envs, -1).all(1)

        diverged = moves & ~sane
        final = {key: _where(sane, value, value.nan_to_num(0.0, 0.0, 0.0)) for key, value in final.items()}
        terminated = moves & (_tensor(outcome.terminated) | diverged)
        self._steps = self._steps + moves
        truncated = moves & (self._steps >= self.spec.max_episode_steps)
        info = {key: _masked(_tensor(value), moves) for key, value in outcome.info.items()}
        info |= {"diverged": diverged, "overflow": moves & physics.overflow}
        if "success" in info:
            info["success"] = info["success"] & ~diverged
        reward = _masked(earned, moves & ~diverged)
        obs = self._restart(terminated | truncated, info["overflow"], asked)
        return Step(obs or dict(final), reward, terminated, truncated, final, info)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames `(envs, 3, height, width)` uint8 of the first `envs` environments, drawn on the CPU."""
        camera = self.task.shown_camera(camera)
        if (height, width) not in self._renderers:
            self._renderers[height, width] = Renderer(self.task.model, height, width)
        renderer, state = self._renderers[height, width], self.state().on_host()
        frames = np.empty((min(envs, self.num_envs), 3, height, width), np.uint8)
        for frame, qpos in zip(frames, state.qpos, strict=False):
            renderer.data.qpos[:] = qpos
            mujoco.mj_forward(self.task.model, renderer.data)
            frame[:] = renderer.frame(camera).transpose(2, 0, 1)
        return torch.from_numpy(frames)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, for exact resume."""
        return {
            "physics": [view.cpu().clone() for view in self._physics.state],
            "memory": {key: value.cpu().clone() for key, value in self._memory.items()},
            "seeds": self._seeds.state_dict(),
            "steps": self._steps.cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict` and return the observation to act on next."""
        check_number_of_envs(len(state["steps"]), self.num_envs)
        for view, saved in zip(self._physics.state, state["physics"], strict=True):
            view.copy_(saved)
        self._memory = {key: value.to(self.device, copy=True) for key, value in state["memory"].items()}
        self._seeds.load_state_dict(state["seeds"])
        self._steps = state["steps"].to(self.device, copy=True)
        self._started = True
        return self._observe()

    def close(self) -> None:
        """Free rendering contexts; safe to call twice."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _restart(self, ended: Tensor, overflow: Tensor, asked: Tensor) -> Observation | None:
        """Begin the next episode of the rows that `ended`; return what is seen then, None where none did."""
        unusable = ~asked.isfinite().all(dim=1)
        ends, overflows, bad = torch.stack([ended, overflow, unusable]).cpu().numpy()  # the one wait for the device
        if bad.any():
            raise UserError("An action is NaN or infinite; the policy has diverged.")
        if overflows.any() and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.spec.task}: {int(overflows.sum())} of {self.num_envs} environments had no room for their "
                f"{self._physics.overflowed()} and lost some; give WarpSim more contacts or constraints.",
                RuntimeWarning,
                stacklevel=3,
            )
        if not ends.any():
            return None
        self._start(np.flatnonzero(ends))
        return self._observe()

    def _start(self, rows: NDArray[np.intp]) -> None:
        """Begin the next episode of each of `rows`; the only Python loop over environments."""
        starts = [self.task.initial(np.random.default_rng(seed)) for seed in self._seeds.take(rows)]
        if any(start.model for start in starts):
            raise UserError(
                f"Task {self.spec.task} changes its model from episode to episode, which backend 'warp' cannot; "
                "choose backend 'mujoco'."
            )
        index, physics = torch.from_numpy(rows).to(self.device), self._physics
        for view in physics.state:
            view.index_fill_(0, index, 0.0)
        physics.qpos.index_copy_(0, index, self._uploaded([start.qpos for start in starts]))
        physics.qvel.index_copy_(0, index, self._uploaded([start.qvel for start in starts]))
        physics.sense(index)
        for key in starts[0].memory:
            values = self._uploaded([start.memory[key] for start in starts])
            if key not in self._memory:
                self._memory[key] = values.new_zeros((self.num_envs, *values.shape[1:]))
            self._memory[key] = self._memory[key].index_copy(0, index, values)
        self._steps = self._steps.index_fill(0, index, 0)

    def _batch(self, state: Sequence[Tensor], memory: dict[str, Tensor]) -> BatchState:
        time, qpos, qvel, _, sensors = state
        fields: Any = (qpos, qvel, time, sensors, memory)  # tensors where the CPU engines have arrays
        return BatchState(self.task.model, *fields)

    def _observe(self) -> Observation:
        seen = self.task.observe(self.state())
        return {key: _tensor(value).to(torch.float32, copy=True) for key, value in seen.items()}

    def _uploaded(self, values: Sequence[Any]) -> Tensor:
        """One row per value `(K, ...)`; floats become float32."""
        rows = torch.from_numpy(np.stack([np.asarray(value) for value in values]))
        return rows.to(torch.float32 if rows.is_floating_point() else rows.dtype).to(self.device)


def _tensor(value: Any) -> Tensor:
    """What a task returned, which is a tensor because it was given tensors."""
    return value


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` in `rows` `(N,)`, `no` elsewhere `(N, ...)`."""
    return torch.where(rows.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)


def _masked(values: Tensor, rows: Tensor) -> Tensor:
    """Copy of `values` with zeros outside `rows`."""
    return _where(rows, values, torch.zeros_like(values))
