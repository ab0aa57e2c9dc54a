"""A task with hand-computable numbers: a frictionless unit mass on a rail, pushed by at most 1 N.

One control step is one physics step of 1 s, so v += action and then x += v. The reward is x; x > 5 terminates, the
fourth step truncates.

    action 1.0: x = 1, 3, 6            terminated after 3 steps, return 10
    action 0.5: x = 0.5, 1.5, 3, 5     truncated after 4 steps, return 10
    action 0.6: x = 0.6, 1.8, 3.6, 6   both flags after 4 steps, return 12
"""

from typing import Any

import gymnasium
import mujoco
import numpy as np

from robopolicy.sim.backends.mujoco.task import Array, BatchState, MujocoTask, ResetState, StepResult, namespace
from robopolicy.sim.contract import TensorSpec

XML = """
<mujoco>
  <option timestep="1" gravity="0 0 0"/>
  <worldbody>
    <light pos="0 0 5"/>
    <camera name="side" pos="0 -6 0" xyaxes="1 0 0 0 0 1"/>
    <body>
      <joint name="rail" type="slide" axis="1 0 0"/>
      <geom type="box" size=".5 .5 .5" mass="1" rgba=".9 .2 .1 1"/>
    </body>
  </worldbody>
  <actuator><motor joint="rail" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


class Slider(MujocoTask):
    """The mass on a rail; `noise` randomises the start and `steps_seen` counts the steps in the task's memory."""

    name = "test/slider"
    frame_skip = 1
    max_episode_steps = 4
    cameras = ("side",)
    array_api = True

    def __init__(self, noise: float = 0.0, max_episode_steps: int = 4) -> None:
        self.model = mujoco.MjModel.from_xml_string(XML)
        self.noise = noise
        self.max_episode_steps = max_episode_steps
        self.action_low, self.action_high = np.array([-1.0]), np.array([1.0])
        self.observation = {"state": TensorSpec((3,), names=("x [m]", "v [m/s]", "steps seen"))}

    def initial(self, rng: np.random.Generator) -> ResetState:
        qpos = rng.uniform(-self.noise, self.noise, 1)
        return ResetState(qpos, np.zeros(1), {"steps_seen": 0.0})

    def control(self, action: Array, state: BatchState) -> Array:
        state.memory["steps_seen"][:] += 1  # type: ignore[operator]
        return action

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        x = after.qpos[:, 0]
        return StepResult(1.0 * x, x > 5, {"success": x > 5})

    def observe(self, state: BatchState) -> dict[str, Array]:
        parts = [state.qpos[:, 0], state.qvel[:, 0], state.memory["steps_seen"]]
        return {"state": namespace(state.qpos).stack(parts, axis=1)}


class SliderEnv(gymnasium.Env[Any, Any]):
    """The same rail as a gymnasium environment."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    dt = 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = np.zeros(3)
        return self.state.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        x, v, steps = self.state
        v += float(action[0])
        self.state = np.array([x + v, v, steps + 1])
        over = bool(self.state[0] > 5)
        return self.state.copy(), float(self.state[0]), over, False, {"success": over}


def make_slider_env() -> gymnasium.Env[Any, Any]:
    """Return the gymnasium rail with its time limit."""
    return gymnasium.make(gymnasium.envs.registration.EnvSpec("Slider-v0", SliderEnv, max_episode_steps=4))
