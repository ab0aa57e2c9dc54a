"""Groups of whole episodes from the same initial state, for critic-free comparison of returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.batches import GroupRollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.rollout.on_policy import Act, EpisodeStats, FinalObservations, stack_steps
from robopolicy.sim.chunk import ChunkedSim


class GroupSampler:
    """Sampler of one episode per environment and call; `group_size` neighbouring environments share an episode seed.

    An episode depends on its seed and actions, so the members of a group differ only by exploration. Every call uses
    new seeds. Environments that finish early continue unrecorded until the last one is done.
    """

    def __init__(self, sim: ChunkedSim, *, group_size: int, seed: int = 0) -> None:
        """Set the group size G, which must divide the number of environments, and the first episode and noise seed."""
        count = sim.sim.num_envs
        if group_size < 2 or count % group_size:
            raise UserError(
                f"Groups need at least 2 episodes and must fill the environments: {count} is not a multiple of "
                f"group_size {group_size}; change sim.num_envs or algorithm.group_size."
            )
        if not sim.sim.spec.seeded_episodes:
            raise UserError(
                f"The backend of {sim.sim.spec.task} cannot start several episodes from one state; choose another "
                "backend, or an algorithm with a critic."
            )
        self.sim = sim
        self.group_size = group_size
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)
        self._seed = seed  # of the next group
        self._episode_stats = EpisodeStats(sim.sim)
        self.env_steps = 0  # control steps executed in recorded episodes since the start

    def first_observations(self) -> Observation:
        """Reset to the initial states of the next call; returns its first observations `(N, To, ...)`."""
        count = self.sim.sim.num_envs
        return self.sim.reset([self._seed + i // self.group_size for i in range(count)])

    def collect(self, act: Act) -> GroupRollout:
        """Run one episode per environment; `act(obs, generator=...)` returns a `Sample`."""
        count = self.sim.sim.num_envs
        group = torch.arange(count, device=self.sim.sim.device) // self.group_size
        rollout = rollout_to_end(self.sim, act, self.first_observations(), self._generator, group, self._episode_stats)
        self._seed += count // self.group_size
        self.env_steps += int(rollout.steps.sum())
        return rollout

    def episode_stats(self) -> dict[str, float]:
        """Mean statistics of the episodes finished since the last call; empty if there are none."""
        return self._episode_stats.flush()

    def state_dict(self) -> dict[str, Any]:
        """State of the next groups; the simulator is not part of it, because every call resets it."""
        return {
            "seed": self._seed,
            "generator": self._generator.get_state(),
            "tally": self._episode_stats.state_dict(),
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next groups equal the ones of the uninterrupted run."""
        self._seed, self.env_steps = int(state["seed"]), int(state["env_steps"])
        self._generator.set_state(state["generator"])
        self._episode_stats.load_state_dict(state["tally"])


def rollout_to_end(
    sim: ChunkedSim,
    act: Act,
    obs: Observation,
    generator: torch.Generator,
    group: Tensor,
    stats: EpisodeStats | None = None,
) -> GroupRollout:
    """Run the current episode of every environment to its end, from the current observations `(N, To, ...)`.

    `act(obs, generator=...)` returns a `Sample`; `group` (N,) has the group ids of the result.
    """
    rows: dict[str, list[Any]] = {key: [] for key in ("obs", "record", "logp", "step", "valid")}
    final = FinalObservations()
    running = torch.ones(sim.sim.num_envs, dtype=torch.bool, device=sim.sim.device)
    while bool(running.any()):
        with torch.no_grad():
            sample = act(obs, generator=generator)
        step = sim.step(sample.chunk)
        step = replace(
            step,
            reward=torch.where(running, step.reward, 0.0),
            undiscounted=torch.where(running, step.undiscounted, 0.0),
            steps=torch.where(running, step.steps, 0),
            terminated=step.terminated & running,
            truncated=step.truncated & running,
        )
        values = {"obs": obs, "record": sample.record, "logp": sample.logp, "step": step, "valid": running}
        for key, value in values.items():
            rows[key].append(value)
        if stats is not None:
            stats.observe(step)
        final.add(step)
        running = running & ~step.done
        obs = step.obs
    return GroupRollout(
        obs=stack_steps(rows["obs"]),
        record=stack_steps(rows["record"]),
        logp=torch.stack(rows["logp"]),
        reward=torch.stack([step.reward for step in rows["step"]]),
        steps=torch.stack([step.steps for step in rows["step"]]),
        terminated=torch.stack([step.terminated for step in rows["step"]]),
        truncated=torch.stack([step.truncated for step in rows["step"]]),
        final_obs=final.result(obs),
        last_obs=dict(obs),
        group=group,
        valid=torch.stack(rows["valid"]),
    )
