"""On-policy rollouts: T chunk decisions of all environments with their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.batches import Rollout
from robopolicy.device import move
from robopolicy.policies.base import Observation, Sample
from robopolicy.sim.chunk import ChunkedSim, ChunkStep
from robopolicy.sim.contract import LOG_PREFIX, TERM_PREFIX, UNDISCOUNTED_PREFIX, VectorSim
from robopolicy.spec import HIDDEN_STATE

OUTCOMES = ("success", "diverged")  # keys of `Step.info` that are averaged over episodes, in addition to logged ones


class EpisodeStats:
    """Mean statistics of the finished episodes of a simulator."""

    def __init__(self, sim: VectorSim) -> None:
        self._return = torch.zeros(sim.num_envs, device=sim.device)
        self._length = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}  # total over finished episodes, and their number
        self._exact = sim.spec.final_obs_exact

    def observe(self, step: ChunkStep) -> bool:
        """Update with one chunk of every environment; returns whether any episode ended."""
        self._return += step.undiscounted
        self._length += step.steps
        done = step.done
        if not bool(done.any()):
            return False
        ended = {"return": self._return, "length": self._length}
        ended |= {key: value for key, value in step.info.items() if key in OUTCOMES or key.startswith(LOG_PREFIX)}
        zero = torch.zeros((), dtype=torch.float64, device=done.device)
        for key, value in ended.items():
            total, count = self._sums.get(key, (zero, zero))
            # Totals of whole batches need no synchronisation with the GPU per episode.
            self._sums[key] = total + torch.where(done, value, 0).sum(dtype=torch.float64), count + done.sum()
        self._return = torch.where(done, 0.0, self._return)
        self._length = torch.where(done, 0, self._length)
        return True

    def flush(self) -> dict[str, float]:
        """Return and reset the means over finished episodes; empty if there are none.

        `rollout/diverged` is the fraction of episodes that ended because the physics diverged.
        `rollout/final_obs_exact` is 0 if the simulator does not report the last observation of episodes, else absent:
        truncated episodes then bootstrap from the observation before it.
        """
        if not self._sums:
            return {}
        stats = {f"rollout/{key}": float(total) / float(count) for key, (total, count) in self._sums.items()}
        stats["rollout/episodes"] = float(self._sums["return"][1])
        if not self._exact:
            stats["rollout/final_obs_exact"] = 0.0
        self._sums = {}
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Running episodes, and totals of the finished ones since the last `flush`."""
        return {"return": self._return, "length": self._length, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._return, self._length, self._sums = move(
            (state["return"], state["length"], dict(state["sums"])), self._return.device
        )


Act = Callable[..., Sample]


class RolloutSampler:
    """Sampler of `Rollout`s; episodes continue across calls, and their seeds follow the seed rule."""

    def __init__(self, sim: ChunkedSim, *, decisions: int, seed: int = 0, memory: int = 0) -> None:
        """Reset `sim` for rollouts of T `decisions` per environment; `seed` is the first episode and noise seed.

        `memory` is M, the size of the hidden state of a recurrent policy, which `act` returns with every `Sample`.
        """
        self.sim = sim
        self.decisions = decisions
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)
        self._memory = torch.zeros(sim.sim.num_envs, 1, memory, device=sim.sim.device)  # (N, 1, M)
        self._obs = self._with(self._memory, sim.reset(seed))
        self._episode_stats = EpisodeStats(sim.sim)
        self.env_steps = 0  # control steps executed since the start

    def collect(self, act: Act) -> Rollout:
        """Run `decisions` chunks per environment; `act(obs, generator=...)` returns a `Sample`."""
        rows: dict[str, list[Any]] = {
            key: [] for key in ("obs", "record", "logp", "reward", "steps", "term", "trunc", "parts", "undiscounted")
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
            rows["undiscounted"].append(reward_terms(step.info, UNDISCOUNTED_PREFIX))
            if self._episode_stats.observe(step):
                bootstrap = step.truncated & ~step.terminated
                final.append({key: value[bootstrap] for key, value in step.final_obs.items()})
            self._obs = step.obs
        steps = torch.stack(rows["steps"])
        self.env_steps += int(steps.sum())
        return Rollout(
            obs=stack_steps(rows["obs"]),
            record=stack_steps(rows["record"]),
            logp=torch.stack(rows["logp"]),
            reward=torch.stack(rows["reward"]),
            steps=steps,
            terminated=torch.stack(rows["term"]),
            truncated=torch.stack(rows["trunc"]),
            final_obs=concat_obs(final, self._obs),
            last_obs=dict(self._obs),
            terms=stack_steps(rows["parts"]),
            undiscounted=stack_steps(rows["undiscounted"]),
        )

    def observations(self) -> Observation:
        """Current observations `(N, To, ...)`, including hidden states."""
        return dict(self._obs)

    def _step(self, sample: Sample) -> ChunkStep:
        """Run the chunks, and add the hidden state, reset where an episode ended, to the next observation."""
        step = self.sim.step(sample.chunk)
        if sample.memory is None:
            return step
        self._memory = torch.where(step.done[:, None, None], 0.0, sample.memory)
        return replace(
            step, obs=self._with(self._memory, step.obs), final_obs=self._with(sample.memory, step.final_obs)
        )

    @staticmethod
    def _with(memory: Tensor, obs: Observation) -> Observation:
        return obs | {HIDDEN_STATE: memory} if memory.shape[-1] else obs

    def episode_stats(self) -> dict[str, float]:
        """Mean statistics of the episodes finished since the last call; empty if there are none."""
        return self._episode_stats.flush()

    def state_dict(self) -> dict[str, Any]:
        """State of the next rollout, including the simulator."""
        return {
            "sim": self.sim.state_dict(),
            "generator": self._generator.get_state(),
            "tally": self._episode_stats.state_dict(),
            "env_steps": self.env_steps,
            "memory": self._memory,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next rollout equals the one of the uninterrupted run."""
        self._memory = state["memory"].to(self.sim.sim.device, copy=True)
        self._obs = self._with(self._memory, self.sim.load_state_dict(state["sim"]))
        self._generator.set_state(state["generator"])
        self._episode_stats.load_state_dict(state["tally"])
        self.env_steps = int(state["env_steps"])


def reward_terms(info: Mapping[str, Tensor], prefix: str = TERM_PREFIX) -> dict[str, Tensor]:
    """Reward terms `(N,)` by name, from the entries of `info` with `prefix`."""
    return {key.removeprefix(prefix): value for key, value in info.items() if key.startswith(prefix)}


def stack_steps(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the steps of a rollout, `(T, N, ...)`."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def concat_obs(rows: list[Observation], like: Observation) -> Observation:
    """Concatenate observations; if there are none, the result has 0 rows of the shape of `like`."""
    if not rows:
        return {key: value[:0] for key, value in like.items()}
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
