"""On-policy rollouts: T chunk decisions of all environments, with what each decision was scored at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.rollout import Rollout
from robopolicy.policies.base import Observation, Sample
from robopolicy.samplers.tally import EpisodeTally
from robopolicy.sim.chunk import ChunkedSim, ChunkStep
from robopolicy.sim.contract import EARNED_PREFIX, TERM_PREFIX
from robopolicy.spec import MEMORY

Act = Callable[..., Sample]


class RolloutSampler:
    """Collects `Rollout`s from a `ChunkedSim`; episodes run on across calls and are numbered by the seed rule."""

    def __init__(self, sim: ChunkedSim, *, decisions: int, seed: int = 0, memory: int = 0) -> None:
        """Reset `sim` and get ready.

        Args:
            sim: Simulator with chunk execution and observation history.
            decisions: T, chunk decisions per environment in one rollout.
            seed: First episode seed, and seed of the exploration noise.
            memory: M, size of the memory of a recurrent policy; `act` then returns it with every `Sample`.
        """
        self.sim = sim
        self.decisions = decisions
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)
        self._memory = torch.zeros(sim.sim.num_envs, 1, memory, device=sim.sim.device)  # (N, 1, M)
        self._obs = self._with(self._memory, sim.reset(seed))
        self._tally = EpisodeTally(sim.sim)
        self.env_steps = 0  # control steps executed since the start

    def collect(self, act: Act) -> Rollout:
        """Play `decisions` chunks per environment; `act(obs, generator=...)` returns a `Sample`."""
        rows: dict[str, list[Any]] = {
            key: [] for key in ("obs", "record", "logp", "reward", "steps", "term", "trunc", "parts", "earned")
        }
        final: list[Observation] = []
        for _ in range(self.decisions):
            with torch.no_grad():
                sample = act(self._obs, generator=self._generator)
            step = self._step(sample)
            rows["obs"].append(self._obs)
            rows["record"].append(sample.record)
            rows["logp"].append(sample.logp)
            rows["reward"].append(step.reward)
            rows["steps"].append(step.steps)
            rows["term"].append(step.terminated)
            rows["trunc"].append(step.truncated)
            rows["parts"].append(reward_terms(step.info))
            rows["earned"].append(reward_terms(step.info, EARNED_PREFIX))
            if self._tally.observe(step):
                bootstrap = step.truncated & ~step.terminated
                final.append({key: value[bootstrap] for key, value in step.final_obs.items()})
            self._obs = step.obs
        steps = torch.stack(rows["steps"])
        self.env_steps += int(steps.sum())
        return Rollout(
            obs=stacked(rows["obs"]),
            record=stacked(rows["record"]),
            logp=torch.stack(rows["logp"]),
            reward=torch.stack(rows["reward"]),
            steps=steps,
            terminated=torch.stack(rows["term"]),
            truncated=torch.stack(rows["trunc"]),
            final_obs=concatenated(final, self._obs),
            last_obs=dict(self._obs),
            terms=stacked(rows["parts"]),
            earned=stacked(rows["earned"]),
        )

    def observations(self) -> Observation:
        """What is to be decided on next `(N, To, ...)`, memories included."""
        return dict(self._obs)

    def _step(self, sample: Sample) -> ChunkStep:
        """Play the chunks; what was remembered belongs to the next observation unless an episode has ended."""
        step = self.sim.step(sample.chunk)
        if sample.memory is None:
            return step
        self._memory = torch.where(step.done[:, None, None], 0.0, sample.memory)
        return replace(
            step, obs=self._with(self._memory, step.obs), final_obs=self._with(sample.memory, step.final_obs)
        )

    @staticmethod
    def _with(memory: Tensor, obs: Observation) -> Observation:
        return obs | {MEMORY: memory} if memory.shape[-1] else obs

    def episode_stats(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        return self._tally.pop()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next rollout, the simulator included."""
        return {
            "sim": self.sim.state_dict(),
            "generator": self._generator.get_state(),
            "tally": self._tally.state_dict(),
            "env_steps": self.env_steps,
            "memory": self._memory,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next rollout equals that of the uninterrupted run."""
        self._memory = state["memory"].to(self.sim.sim.device, copy=True)
        self._obs = self._with(self._memory, self.sim.load_state_dict(state["sim"]))
        self._generator.set_state(state["generator"])
        self._tally.load_state_dict(state["tally"])
        self.env_steps = int(state["env_steps"])


def reward_terms(info: Mapping[str, Tensor], prefix: str = TERM_PREFIX) -> dict[str, Tensor]:
    """Parts `(N,)` of the reward by name, summed over a chunk as `prefix` says."""
    return {key.removeprefix(prefix): value for key, value in info.items() if key.startswith(prefix)}


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Decisions in time order, `(T, N, ...)`."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def concatenated(rows: list[Observation], like: Observation) -> Observation:
    """Observations one after the other; none of the shape of `like` where there are none."""
    if not rows:
        return {key: value[:0] for key, value in like.items()}
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
