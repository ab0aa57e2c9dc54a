"""PushT of gym-pusht as a gymnasium environment with the same observations for all policies.

Observations in pixels of the 512 x 512 arena: `agent` `(2,)` is the finger, `keypoints` `(16,)` are the corners of the
two rectangles of the block. `image.top` is the arena from above.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must render offscreen
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

import gym_pusht  # noqa: F401  registers its environment
import gymnasium
import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.registry import Expert, SimOptions
from robopolicy_tasks.push_t import tee

ARENA = 512.0  # [px] side
MAX_STEPS = {"push_t": 300, "near": 150}
NEAR = (60.0, 0.6)  # [px] along x and y, and [rad]: maximum initial offset of the block in `near`
MIN_GAP = 10.0  # [px] minimum initial gap between finger and block in `near`


class PushTEnv(gymnasium.Wrapper):
    """Environment that ends when the block covers 95 % of its target.

    The reward is 1 at that end (sparse), or the gain over the best coverage so far (shaped): a return is then the
    maximum coverage of the episode, divided by 0.95 and at most 1, the score that Diffusion Policy reports.
    """

    control_dt = 0.1  # [s] `dt` of gym-pusht is its physics step

    def __init__(self, options: SimOptions, *, near: bool = False) -> None:
        """Create an environment; with `near`, episodes start close to the goal and have half the time limit."""
        super().__init__(
            gymnasium.make(
                "gym_pusht/PushT-v0",
                obs_type="state",
                render_mode="rgb_array",
                observation_width=options.image_size,
                observation_height=options.image_size,
                max_episode_steps=MAX_STEPS["near" if near else "push_t"],
                disable_env_checker=True,
            )
        )
        self.base_env: Any = self.unwrapped
        self._near = near
        self._shaped = options.reward == "shaped"
        self._best = 0.0
        spaces: dict[str, gymnasium.Space[Any]] = {
            "agent": gymnasium.spaces.Box(0.0, ARENA, (2,), np.float32),
            "keypoints": gymnasium.spaces.Box(-ARENA, 2 * ARENA, (16,), np.float32),
        }
        self._renders = bool(options.cameras)
        if self._renders:
            size = options.image_size
            spaces["top"] = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(spaces)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Sample the initial positions of finger and block."""
        _, info = super().reset(seed=seed, options=options)
        if self._near and options is None:
            _, info = super().reset(options={"reset_to_state": self._start()})
        self._best = 0.0
        return self._observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the finger towards `action` `(2,)` [px] for 0.1 s."""
        _, coverage, terminated, truncated, info = super().step(action)
        gain = max(float(coverage) - self._best, 0.0)
        self._best += gain
        reward = gain if self._shaped else float(info["is_success"])
        return self._observe(), reward, bool(terminated), truncated, info

    def _start(self) -> list[float]:
        """Sample the finger and a block near its target."""
        shift, turn = NEAR
        while True:
            finger = self.np_random.uniform(50.0, 450.0, 2)
            pose = tee.GOAL + self.np_random.uniform((-shift, -shift, -turn), (shift, shift, turn))
            if tee.clearance(tee.to_block(finger[None, None], pose[None]))[0, 0] > tee.FINGER + MIN_GAP:
                return [*finger, *(pose[:2] - tee.CENTRE), pose[2]]  # gym-pusht sets the position, then the angle

    def keypoints(self) -> NDArray[np.float64]:
        """Corners of the two rectangles of the block `(8, 2)` [px]."""
        block = self.base_env.block
        return np.array(
            [block.local_to_world(v) for shape in self.base_env._block_shapes for v in shape.get_vertices()]
        )

    def _observe(self) -> dict[str, NDArray[Any]]:
        observation: dict[str, NDArray[Any]] = {
            "agent": np.asarray(self.base_env.agent.position, np.float32),
            "keypoints": self.keypoints().astype(np.float32).reshape(-1),
        }
        return observation | {"top": self.base_env._render()} if self._renders else observation


def make_env(task: str, options: SimOptions) -> PushTEnv:
    """Make one environment."""
    return PushTEnv(options, near=task == "near")


def make_expert(task: str) -> Expert:
    """Make the planning expert."""
    from robopolicy_tasks.push_t.expert import PushTExpert

    return PushTExpert()
