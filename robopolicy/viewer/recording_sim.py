"""Simulator wrapper that reports what its first environment does as frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.physics_state import PhysicsState
from robopolicy.sim.wrappers.base import SimWrapper
from robopolicy.viewer.frames import EpisodeFrame, split_observation

FrameReceiver = Callable[[EpisodeFrame, int, int], None]
"""Called with a frame, the seed of its episode, and its step."""


class RecordingSim(SimWrapper):
    """Simulator that passes the frames of its first environment to `receive`; pauses of a chunk give no frame."""

    def __init__(self, sim: VectorSim, receive: FrameReceiver) -> None:
        super().__init__(sim, None)
        self._receive = receive
        self._state: PhysicsState | None = None
        self._steps = 0  # of the current episode

    @classmethod
    def observation(cls, spec: SimSpec, config: Any) -> dict[str, TensorSpec]:
        """Return nothing; the observations do not change."""
        return {}

    @classmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        """Return None; no policy needs this wrapper."""
        return None

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset the simulator and report its first frame."""
        obs = self.sim.reset(seed)
        self._begin(obs)
        return obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator and report the frame, and the first frame of the next episode after the last one."""
        seed = int(self.sim.episode_seed[0])
        step = self.sim.step(action, active)
        if active is None or bool(active[0]):
            self._steps, done = self._steps + 1, bool(step.done[0])
            if not done:  # otherwise the bodies already show the next episode
                self._state = self.sim.physics_state()
            images, vectors = split_observation(_first(step.final_obs))
            success = bool(step.info["success"][0]) if "success" in step.info else None
            vectors["action"] = action[0].float().cpu().numpy()
            frame = EpisodeFrame(self._state, images, vectors, float(step.reward[0]), success)
            self._receive(frame, seed, self._steps)
            if done and (active is None or self.spec.supports_masked_step):
                self._begin(step.obs)
        return step

    def reset_rows(self, ended: Tensor) -> tuple[Observation, dict[str, Tensor]]:
        """Start the next episodes of the rows `ended`, and report the first frame if the first row is one of them."""
        obs, logged = self.sim.reset_rows(ended)
        if bool(ended[0]):
            self._begin(obs)
        return obs, logged

    def _begin(self, obs: Observation) -> None:
        self._state, self._steps = self.sim.physics_state(), 0
        frame = EpisodeFrame(self._state, *split_observation(_first(obs)))
        self._receive(frame, int(self.sim.episode_seed[0]), 0)


def _first(obs: Observation) -> dict[str, Tensor]:
    return {key: value[0].cpu() for key, value in obs.items()}
