"""Off-policy play: chunk decisions of all environments, every control step written to a replay memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.replay import Replay
from robopolicy.policies.base import Observation
from robopolicy.rollout.on_policy import Act, EpisodeTally
from robopolicy.sim.chunk import ChunkedSim, StepTrace


class ReplaySampler:
    """Plays on across calls; episodes are numbered by the seed rule."""

    def __init__(self, sim: ChunkedSim, replay: Replay, *, seed: int = 0) -> None:
        """Reset `sim` and get ready.

        Args:
            sim: Simulator with chunk execution and observation history.
            replay: Memory with one lane per environment; episodes that were running in it are cut.
            seed: First episode seed, and seed of the exploration noise.
        """
        self.sim, self.replay = sim, replay
        replay.end_episodes()
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)
        self._obs = sim.reset(seed)
        self._tally = EpisodeTally(sim.sim)
        self.env_steps = 0  # control steps executed since the start

    def play(self, act: Act, decisions: int = 1) -> None:
        """Play `decisions` chunks per environment.

        Args:
            act: `act(obs, generator=...)` returns a `Sample`, whose record is kept.
            decisions: Chunks per environment.
        """
        for _ in range(decisions):
            with torch.no_grad():
                sample = act(self._obs, generator=self._generator)
            trace: list[StepTrace] = []
            obs = {key: value[:, -1] for key, value in self._obs.items()}
            step = self.sim.step(sample.chunk, trace)
            for number, played in enumerate(trace):
                record = sample.record if number == 0 else {}
                remember(self.replay, self.sim, obs, played, played.active, record, decision=number == 0)
                obs = played.step.obs
            self._tally.observe(step)
            self.env_steps += int(step.steps.sum())
            self._obs = step.obs

    def episode_stats(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        return self._tally.pop()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next steps, simulator and memory included."""
        return {
            "sim": self.sim.state_dict(),
            "replay": self.replay.state_dict(),
            "generator": self._generator.get_state(),
            "tally": self._tally.state_dict(),
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; what is played next equals that of the uninterrupted run."""
        self._obs = self.sim.load_state_dict(state["sim"])
        self.replay.load_state_dict(state["replay"])
        self._generator.set_state(state["generator"])
        self._tally.load_state_dict(state["tally"])
        self.env_steps = int(state["env_steps"])


def remember(
    replay: Replay,
    sim: ChunkedSim,
    obs: Observation,
    played: StepTrace,
    moved: Tensor,
    record: Mapping[str, Tensor],
    *,
    decision: bool,
) -> None:
    """Write one control step to a memory.

    Args:
        replay: Memory with one lane per environment.
        sim: Simulator that was played, whose bounds the remembered actions keep.
        obs: Observation `{key: (N, ...)}` before the step.
        played: The step.
        moved: `(N,)` True in environments whose step is kept.
        record: What else to remember of every environment, `{key: (N, ...)}`.
        decision: Whether a chunk began here.
    """
    rows = moved.nonzero().flatten()
    if not len(rows):
        return
    spec, step = sim.sim.spec, played.step
    low, high = spec.action_low.to(played.action.device), spec.action_high.to(played.action.device)
    replay.add(
        rows.cpu(),
        {key: value[rows] for key, value in obs.items()},
        played.action.clamp(low, high)[rows],
        step.reward[rows],
        step.terminated[rows],
        step.truncated[rows],
        {key: value[rows] for key, value in step.final_obs.items()},
        decision=decision,
        record={key: value[rows.to(value.device)] for key, value in record.items()},
    )
