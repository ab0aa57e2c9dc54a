"""Whole episodes in groups that start from the same state, so that returns can be compared without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.batches import GroupRollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.rollout.on_policy import Act, EpisodeTally, concatenated, stacked
from robopolicy.sim.chunk import ChunkedSim


class GroupSampler:
    """Plays one episode per environment and call; `group_size` neighbouring environments share an episode seed.

    An episode is a function of its seed and of the actions, so the members of a group differ by exploration alone.
    Every call takes new seeds. Environments whose episode is over play on unrecorded until the last one is done.
    """

    def __init__(self, sim: ChunkedSim, *, group_size: int, seed: int = 0) -> None:
        """Get ready.

        Args:
            sim: Simulator with chunk execution and observation history.
            group_size: G, episodes per start state; must divide the number of environments.
            seed: First episode seed, and seed of the exploration noise.
        """
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
        self._tally = EpisodeTally(sim.sim)
        self.env_steps = 0  # control steps executed in recorded episodes since the start

    def first_observations(self) -> Observation:
        """Reset to the starts of the next call and return what it begins with `(N, To, ...)`."""
        count = self.sim.sim.num_envs
        return self.sim.reset([self._seed + i // self.group_size for i in range(count)])

    def collect(self, act: Act) -> GroupRollout:
        """Play one episode per environment; `act(obs, generator=...)` returns a `Sample`."""
        count = self.sim.sim.num_envs
        group = torch.arange(count, device=self.sim.sim.device) // self.group_size
        rollout = play_out(self.sim, act, self.first_observations(), self._generator, group, self._tally)
        self._seed += count // self.group_size
        self.env_steps += int(rollout.steps.sum())
        return rollout

    def episode_stats(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        return self._tally.pop()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next groups; the simulator holds nothing, as every call resets it."""
        return {
            "seed": self._seed,
            "generator": self._generator.get_state(),
            "tally": self._tally.state_dict(),
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next groups equal those of the uninterrupted run."""
        self._seed, self.env_steps = int(state["seed"]), int(state["env_steps"])
        self._generator.set_state(state["generator"])
        self._tally.load_state_dict(state["tally"])


def play_out(
    sim: ChunkedSim,
    act: Act,
    obs: Observation,
    generator: torch.Generator,
    group: Tensor,
    tally: EpisodeTally | None = None,
) -> GroupRollout:
    """Play until the episode of every environment has ended once.

    Args:
        sim: Simulator in the middle or at the beginning of episodes.
        act: `act(obs, generator=...)` returns a `Sample`.
        obs: What is to be decided on first `(N, To, ...)`.
        generator: Of the exploration noise.
        group: (N,) what the environments share, for the result.
        tally: Counts what is played.
    """
    rows: dict[str, list[Any]] = {key: [] for key in ("obs", "record", "logp", "step", "played")}
    final: list[Observation] = []
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
        values = {"obs": obs, "record": sample.record, "logp": sample.logp, "step": step, "played": running}
        for key, value in values.items():
            rows[key].append(value)
        if tally is not None:
            tally.observe(step)
        bootstrap = step.truncated & ~step.terminated
        if bool(bootstrap.any()):
            final.append({key: value[bootstrap] for key, value in step.final_obs.items()})
        running = running & ~step.done
        obs = step.obs
    return GroupRollout(
        obs=stacked(rows["obs"]),
        record=stacked(rows["record"]),
        logp=torch.stack(rows["logp"]),
        reward=torch.stack([step.reward for step in rows["step"]]),
        steps=torch.stack([step.steps for step in rows["step"]]),
        terminated=torch.stack([step.terminated for step in rows["step"]]),
        truncated=torch.stack([step.truncated for step in rows["step"]]),
        final_obs=concatenated(final, obs),
        last_obs=dict(obs),
        group=group,
        valid=torch.stack(rows["played"]),
    )
