"""Off-policy sampling: runs chunks in all environments and writes every control step to a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.replay import Replay
from robopolicy.device import copy_to, restore_generator
from robopolicy.policies.base import Observation
from robopolicy.policies.noise import RepeatedNoise
from robopolicy.rollout.on_policy import Act, EpisodeStats
from robopolicy.sim.chunk import ChunkedSim, StepTrace


class StepLog:
    """Control steps to write to a replay buffer later."""

    def __init__(self, env_steps: int = 0) -> None:
        self.env_steps = env_steps  # control steps of the sampler so far, these included
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # arguments of `Replay.add`
        self._written = 0

    def add(self, *arguments: Any, **keywords: Any) -> None:
        """Store the arguments of `Replay.add`."""
        self.calls.append((arguments, keywords))

    def write(self, replay: Replay) -> None:
        """Write the steps to `replay` that have not been written."""
        for arguments, keywords in self.calls[self._written :]:
            replay.add(*arguments, **keywords)
        self._written = len(self.calls)


class ReplaySampler:
    """Sampler whose episodes continue across calls; episode seeds follow the seed rule."""

    def __init__(
        self,
        sim: ChunkedSim,
        replay: Replay,
        *,
        seed: int = 0,
        noise_repeat: int = 1,
    ) -> None:
        """Reset `sim` to the first episode seed, and end the running episodes of `replay`; `seed` also seeds noise.

        `noise_repeat` is the largest number of decisions with the same noise (`RepeatedNoise`).
        """
        self.sim, self.replay = sim, replay
        replay.end_episodes()
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)
        self._noise = RepeatedNoise(noise_repeat, self._generator) if noise_repeat > 1 else None
        self._obs = sim.reset(seed)
        self._episode_stats = EpisodeStats(sim.sim)
        self.env_steps = 0  # control steps executed since the start

    def collect(self, act: Act, decisions: int = 1, log: StepLog | None = None) -> None:
        """Run `decisions` chunks per environment and store them in the buffer, or in `log` if it is given.

        `act(obs, generator=...)` returns a `Sample`.
        """
        target = self.replay if log is None else log
        steps: list[Tensor] = []
        for _ in range(decisions):
            with torch.no_grad():
                sample = act(self._obs, generator=self._generator if self._noise is None else self._noise)
            traces: list[StepTrace] = []
            obs = {key: value[:, -1] for key, value in self._obs.items()}
            step = self.sim.step(sample.chunk, traces)
            for number, trace in enumerate(traces):
                record = sample.record if number == 0 else {}
                add_step(target, self.sim, obs, trace, trace.active, record, decision=number == 0)
                obs = trace.step.obs
            self._episode_stats.observe(step)
            steps.append(step.steps)
            self._obs = step.obs
        if steps:
            self.env_steps += int(torch.stack(steps).sum())

    def episode_stats(self) -> dict[str, float]:
        """Mean statistics of the episodes finished since the last call; empty if there are none."""
        return self._episode_stats.flush()

    def state_dict(self) -> dict[str, Any]:
        """State of the next steps, including simulator and buffer."""
        return {
            "sim": self.sim.state_dict(),
            "replay": self.replay.state_dict(),
            "generator": self._generator.get_state(),
            "tally": self._episode_stats.state_dict(),
            "env_steps": self.env_steps,
            **({"noise": self._noise.state_dict()} if self._noise is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next steps equal the ones of the uninterrupted run."""
        self._obs = self.sim.load_state_dict(state["sim"])
        self.replay.load_state_dict(state["replay"])
        restore_generator(self._generator, state["generator"])
        self._episode_stats.load_state_dict(state["tally"])
        if self._noise is not None:
            self._noise.load_state_dict(state["noise"])
        self.env_steps = int(state["env_steps"])


def add_step(
    replay: Replay | StepLog,
    sim: ChunkedSim,
    obs: Observation,
    trace: StepTrace,
    active: Tensor,
    record: Mapping[str, Tensor],
    *,
    decision: bool,
) -> None:
    """Write the step `trace` of `active` (N,) environments to a replay buffer, with actions clipped to the bounds.

    `obs` `{key: (N, ...)}` is before the step, `record` `{key: (N, ...)}` has further data, and `decision` is whether
    a chunk begins here.
    """
    spec, step, device = sim.sim.spec, trace.step, trace.action.device
    low, high = (copy_to(bound, device) for bound in (spec.action_low, spec.action_high))
    replay.add(
        torch.arange(len(active), device=device),
        obs,
        trace.action.clamp(low, high),
        step.reward,
        step.terminated,
        step.truncated,
        step.final_obs,
        decision=decision,
        record=record,
        active=active,
    )
