"""On-policy rollouts: T chunk decisions of all environments, with what each decision was scored at."""

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

OUTCOMES = ("success", "diverged")  # of `Step.info`, averaged over episodes beside what the simulator logs


class EpisodeTally:
    """Follows the running episodes of a simulator and averages those that have finished."""

    def __init__(self, sim: VectorSim) -> None:
        self._return = torch.zeros(sim.num_envs, device=sim.device)
        self._length = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}  # total over finished episodes, and their number
        self._exact = sim.spec.final_obs_exact

    def observe(self, step: ChunkStep) -> bool:
        """Count one chunk of every environment; returns whether any episode has ended."""
        self._return += step.undiscounted
        self._length += step.steps
        done = step.done
        if not bool(done.any()):
            return False
        ended = {"return": self._return, "length": self._length}
        ended |= {key: value for key, value in step.info.items() if key in OUTCOMES or key.startswith(LOG_PREFIX)}
        nothing = torch.zeros((), dtype=torch.float64, device=done.device)
        for key, value in ended.items():
            total, count = self._sums.get(key, (nothing, nothing))
            # Totals of whole batches: a simulator on a GPU ends episodes in most steps, and waits for no row of them.
            self._sums[key] = total + torch.where(done, value, 0).sum(dtype=torch.float64), count + done.sum()
        self._return = torch.where(done, 0.0, self._return)
        self._length = torch.where(done, 0, self._length)
        return True

    def pop(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished.

        `rollout/diverged` is the share of episodes that ended because the physics did. `rollout/final_obs_exact` is
        there, and 0, where the simulator hides the last observation of an episode: values of episodes cut by the time
        limit are then taken from the observation before it.
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
        """The running episodes, and the totals of those that `pop` has not reported yet."""
        return {"return": self._return, "length": self._length, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._return, self._length, self._sums = move(
            (state["return"], state["length"], dict(state["sums"])), self._return.device
        )


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
            undiscounted=stacked(rows["undiscounted"]),
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
        return obs | {HIDDEN_STATE: memory} if memory.shape[-1] else obs

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
