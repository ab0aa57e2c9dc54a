"""Base class of the MuJoCo robots of gymnasium: model files, reset noise and forward reward, batched.

Observations, rewards, terminations and initial states equal gymnasium's v5 environments exactly. The control cost is
computed in float32, as in gymnasium, whose actions are float32.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array, BatchState, MujocoTask, ResetState, StepResult, namespace
from robopolicy.sim.contract import TERM_PREFIX, TensorSpec

_UNITS = {
    mujoco.mjtJoint.mjJNT_FREE: (("x [m]", "y [m]", "z [m]", "qw", "qx", "qy", "qz"), ("vx", "vy", "vz")),
    mujoco.mjtJoint.mjJNT_SLIDE: (("position [m]",), ("velocity [m/s]",)),
    mujoco.mjtJoint.mjJNT_HINGE: (("position [rad]",), ("velocity [rad/s]",)),
}


class GymnasiumRobot(MujocoTask):
    """One robot of gymnasium v5; subclasses define parameters and reward."""

    xml: str  # file in the assets of gymnasium
    noise: float  # half width of the uniform initial noise on positions
    velocity_noise: Literal["uniform", "normal"] = "uniform"  # initial noise on velocities, same scale
    skipped: int = 1  # leading positions (world x, y) that are not observed
    array_api = batched_initial = True
    max_episode_steps = 1000
    control_cost: float = 0.0  # weight of the squared action

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = mujoco.MjModel.from_xml_path(str(_assets() / self.xml))
        self.dt = self.frame_skip * float(self.model.opt.timestep)
        self.action_low, self.action_high = self.model.actuator_ctrlrange.T.copy()
        self.action_names = tuple(self.model.actuator(i).name or f"motor{i}" for i in range(self.model.nu))
        self.cameras = tuple(self.model.camera(i).name for i in range(self.model.ncam) if self.model.camera(i).name)
        self.observation = {"state": TensorSpec((len(self.state_names()),), names=self.state_names())}

    def state_names(self) -> tuple[str, ...]:
        """One name per element of the observation."""
        positions, velocities = _joint_names(self.model)
        return (*positions[self.skipped :], *velocities)

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Sample the initial state of one episode, equal to gymnasium for the same seed."""
        qpos = self.model.qpos0 + rng.uniform(-self.noise, self.noise, self.model.nq)
        if self.velocity_noise == "normal":
            return ResetState(qpos, self.noise * rng.standard_normal(self.model.nv))
        return ResetState(qpos, rng.uniform(-self.noise, self.noise, self.model.nv))

    def observe(self, state: BatchState) -> dict[str, Array]:
        """Positions without world x (and y), then velocities."""
        return {"state": namespace(state.qpos).concat([state.qpos[:, self.skipped :], state.qvel], axis=1)}

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Forward velocity minus control cost; never terminates."""
        xp, forward, control = namespace(action), self.forward_velocity(before, after), self.cost(action)
        reward = forward - control
        return StepResult(reward, xp.zeros_like(reward, dtype=xp.bool), reward_terms(forward=forward, ctrl=-control))

    def forward_velocity(self, before: BatchState, after: BatchState) -> Array:
        """(N,) mean velocity along x during the step [m/s]."""
        return (after.qpos[:, 0] - before.qpos[:, 0]) / self.dt

    def cost(self, action: Array) -> NDArray[np.float32]:
        """(N,) weighted squared action."""
        xp = namespace(action)
        return self.control_cost * xp.square(xp.asarray(action, dtype=xp.float32)).sum(1)


def reward_terms(**terms: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Reward terms `(N,)` for `StepResult.info`, named as `reward_NAME` in gymnasium."""
    return {TERM_PREFIX + name: value for name, value in terms.items()}


def _assets() -> Path:
    spec = find_spec("gymnasium")
    assert spec is not None and spec.submodule_search_locations, "gymnasium is a dependency of this package"
    return Path(spec.submodule_search_locations[0]) / "envs" / "mujoco" / "assets"


def _joint_names(model: mujoco.MjModel) -> tuple[list[str], list[str]]:
    """Names with units of every position and velocity of the model."""
    positions: list[str] = []
    velocities: list[str] = []
    for i in range(model.njnt):
        joint = model.joint(i)
        names, rates = _UNITS[mujoco.mjtJoint(int(joint.type[0]))]
        if len(rates) == 3:
            rates = (*(f"{rate} [m/s]" for rate in rates), *(f"{rate} [rad/s]" for rate in ("wx", "wy", "wz")))
        positions += [f"{joint.name} {name}" for name in names]
        velocities += [f"{joint.name} {rate}" for rate in rates]
    return positions, velocities
