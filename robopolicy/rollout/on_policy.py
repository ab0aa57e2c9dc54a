"""On-policy rollouts: T chunk decisions of all environments with their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Observation, Sample
from robopolicy.sim.chunk import ChunkedSim, ChunkStep
from robopolicy.sim.contract import LOG_PREFIX, TERM_PREFIX, UNDISCOUNTED_PREFIX, VectorSim
from robopolicy.spec import HIDDEN_STATE

OUTCOMES = ("success", "diverged")  # keys of `Step.info` that are averaged over episodes, in addition to logged ones


class EpisodeStats:
    """Mean statistics of the finished episodes of a simulator.

    Blocks of steps are reduced together: few launches on a device, and no wait before `flush`.
    """

    BLOCK = 32  # steps

    def __init__(self, sim: VectorSim) -> None:
        self._running = torch.zeros(2, sim.num_envs, device=sim.device)  # return and length of the running episodes
        self._pending: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = []  # steps to reduce, and their entries
        self._sums: dict[str, Tensor] = {}  # (2,) total over finished episodes, and their number
        self._exact = sim.spec.final_obs_exact

    def observe(self, step: ChunkStep) -> None:
        """Update with one chunk of every environment."""
        logged = {key: value for key, value in step.info.items() if key in OUTCOMES or key.startswith(LOG_PREFIX)}
        if self._pending and (len(self._pending) == self.BLOCK or self._pending[0][1].keys() != logged.keys()):
            self._reduce()
        self._pending.append(((step.undiscounted, step.steps, step.terminated, step.truncated), logged))

    def _reduce(self) -> None:
        """Add the pending steps to the sums."""
        if not self._pending:
            return
        steps, entries = zip(*self._pending, strict=True)
        self._pending = []
        undiscounted, lengths, terminated, truncated = (torch.stack(column) for column in zip(*steps, strict=True))
        done = terminated | truncated  # (B, N)
        totals: list[Tensor] = []
        for gain, ended in zip(torch.stack([undiscounted, lengths], 1), done, strict=True):
            totals.append(self._running + gain)
            self._running = torch.where(ended, 0.0, totals[-1])
        if done.device.type == "cpu" and not bool(done.any()):
            return
        logged = [torch.stack([entry[key] for entry in entries]) for key in entries[0]]
        values = torch.where(done, torch.stack([*torch.stack(totals, 1), *logged, torch.ones_like(undiscounted)]), 0)
        sums = values.sum(2, dtype=torch.float64)  # (K, B)
        keys = ("return", "length", *entries[0])
        before = torch.stack([self._sums.get(key, sums.new_zeros(2)) for key in keys])  # (K, 2)
        added = torch.stack([sums[:-1], sums[-1:].expand_as(sums[:-1])], 1)  # (K, 2, B)
        # Steps are added in their order, so that the result does not depend on the blocks.
        self._sums |= zip(keys, torch.cat([before[..., None], added], 2).cumsum(2)[..., -1], strict=True)

    def flush(self) -> dict[str, float]:
        """Return and reset the means over finished episodes; empty if there are none.

        `rollout/diverged` is the fraction of episodes that ended because the physics diverged.
        `rollout/final_obs_exact` is 0 if the simulator does not report the last observation of episodes, else absent:
        truncated episodes then bootstrap from the observation before it.
        """
        self._reduce()
        sums = dict(zip(self._sums, torch.stack([*self._sums.values()]).tolist(), strict=True)) if self._sums else {}
        self._sums = {}
        stats = {f"rollout/{key}": total / count for key, (total, count) in sums.items() if count}
        if stats:
            stats["rollout/episodes"] = sums["return"][1]
            if not self._exact:
                stats["rollout/final_obs_exact"] = 0.0
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Running episodes, and totals of the finished ones since the last `flush`."""
        self._reduce()
        sums = {key: (pair[0], pair[1]) for key, pair in self._sums.items()}
        return {"return": self._running[0], "length": self._running[1].long(), "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        device = self._running.device
        self._pending = []
        self._running = torch.stack([state["return"], state["length"]]).to(device)
        self._sums = {key: torch.stack(list(pair)).to(device) for key, pair in state["sums"].items()}


class FinalObservations:
    """Last observations of the truncated entries of a rollout, which are read once per rollout on a device."""

    MAX_BYTES = 2**28  # of observations that are held; beyond, the truncated ones are selected earlier

    def __init__(self) -> None:
        self._steps: list[ChunkStep] = []
        self._bytes = 0
        self._found: list[Observation] = []

    def add(self, step: ChunkStep) -> None:
        """Add a step of all environments."""
        on_cpu = step.truncated.device.type == "cpu"
        if on_cpu and not bool(step.truncated.any()):
            return
        self._steps.append(step)
        self._bytes += sum(value.nbytes for value in step.final_obs.values())
        if on_cpu or self._bytes > self.MAX_BYTES:
            self._select()

    def _select(self) -> None:
        steps, self._steps, self._bytes = self._steps, [], 0
        truncated = torch.stack([step.truncated for step in steps])
        rows = (truncated & ~torch.stack([step.terminated for step in steps])).flatten().nonzero().flatten()
        if len(rows):
            keys = steps[0].final_obs
            self._found.append({key: torch.cat([step.final_obs[key] for step in steps])[rows] for key in keys})

    def result(self, like: Observation) -> Observation:
        """Observations `(M, ...)`, row-major; 0 rows of the shape of `like` if there are none."""
        if self._steps:
            self._select()
        if not self._found:
            return {key: value[:0] for key, value in like.items()}
        return {key: torch.cat([found[key] for found in self._found]) for key in like}


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
        final = FinalObservations()
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
            self._episode_stats.observe(step)
            final.add(step)
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
            final_obs=final.result(self._obs),
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
