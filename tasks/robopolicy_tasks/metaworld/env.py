"""One Meta-World task as a gymnasium environment whose episodes depend only on their seed."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import gymnasium
import metaworld
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from metaworld.policies import ENV_POLICY_MAP
from metaworld.wrappers import AutoTerminateOnSuccessWrapper, RandomTaskSelectWrapper
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import Expert, SimOptions

MAX_STEPS = 500
_VARIANTS = 0  # seed of the 50 start and goal positions of the benchmark, equal in every environment


class MetaworldEnv(gymnasium.Wrapper):
    """Environment that ends at success; the reward is 1 at success (sparse) or the reward of Meta-World (shaped)."""

    observation: NDArray[np.float64]  # (39,) last observation, for the expert

    def __init__(self, task: str, reward: str) -> None:
        benchmark = variants(task)
        simulator: Any = benchmark.train_classes[task](render_mode="rgb_array", camera_name="corner")
        ending = AutoTerminateOnSuccessWrapper(TimeLimit(simulator, MAX_STEPS))
        ending.toggle_terminate_on_success(True)
        super().__init__(RandomTaskSelectWrapper(ending, benchmark.train_tasks))
        self._shaped = reward == "shaped"
        simulator.touching_object = partial(touching, simulator)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Select one of the 50 variants by `seed`, which `reset` of Meta-World ignores."""
        if seed is not None:
            simulator: Any = self.unwrapped
            simulator.seed(seed)
        self.observation, info = super().reset(seed=seed, options=options)
        return self.observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action."""
        self.observation, reward, terminated, truncated, info = super().step(action)
        return self.observation, float(reward if self._shaped else info["success"]), terminated, truncated, info

    def render(self) -> Any:
        """Frame `(height, width, 3)`, rotated, as the corner camera of the package is upside down."""
        frame: Any = super().render()
        return np.ascontiguousarray(frame[::-1, ::-1])


@cache
def variants(task: str) -> metaworld.MT1:
    """Benchmark of `task`, sampled as in `gymnasium.make("Meta-World/MT1")`, but shared by all environments.

    Sampling its start and goal positions takes a hundred resets of the arm, the slowest part of the construction.
    """
    return metaworld.MT1(task, seed=_VARIANTS)


def touching(simulator: Any, geom: int) -> bool:
    """Whether both pads of the gripper press on `geom`, computed faster than by Meta-World.

    Meta-World reads the geoms of every contact four times, which takes longer than the physics.
    """
    data = simulator.data
    pairs, forces = data.contact.geom, []
    on_geom = (pairs == geom).any(1)
    for pad in ("leftpad_geom", "rightpad_geom"):
        pressed = on_geom & (pairs == data.geom(pad).id).any(1)
        forces.append(sum(data.efc_force[data.contact.efc_address[pressed]]) if pressed.any() else 0)
    return all(force > 0 for force in forces)


class MetaworldExpert:
    """Scripted policy of the package for one task, a function of the observation."""

    def __init__(self, task: str) -> None:
        self._policy = ENV_POLICY_MAP[task]()

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, 4)`."""
        assert isinstance(sim, GymnasiumSim)
        actions = [self._policy.get_action(env.observation) for env in sim.envs if isinstance(env, MetaworldEnv)]
        return torch.from_numpy(np.stack(actions).astype(np.float32))


def make_env(task: str, options: SimOptions) -> MetaworldEnv:
    """Make one environment of `task`, e.g. "reach-v3"."""
    return MetaworldEnv(task, options.reward)


def make_expert(task: str) -> Expert:
    """Make the scripted expert of `task`."""
    return MetaworldExpert(task)
