"""Evaluation of many policies in parallel, one candidate per environment for a whole episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.contrib.quality_diversity.behavior import DESCRIPTOR
from robopolicy.contrib.quality_diversity.generation import EvaluationBatch, Scores
from robopolicy.contrib.quality_diversity.individuals import EvaluatedPolicies, flatten_obs
from robopolicy.data.replay import Replay
from robopolicy.policies.base import Observation
from robopolicy.rollout.off_policy import add_step
from robopolicy.rollout.on_policy import EpisodeStats
from robopolicy.sim.chunk import ChunkedSim, ChunkStep, StepTrace

ActMembers = Callable[[Tensor, Observation], Tensor]
"""Chunks `(N, H, A)` of members `(N, D)`, one observation `{key: (N, To, ...)}` each."""


class PopulationRunner:
    """Runs rounds with one member per environment; subclasses record data."""

    def __init__(self, sim: ChunkedSim) -> None:
        self.sim = sim
        self._episode_stats = EpisodeStats(sim.sim)
        self.env_steps = 0  # control steps of the members since the start

    def _round(self, act: ActMembers, members: Tensor, seeds: Sequence[int]) -> Tensor:
        """Returns `(K,)` float64 of at most as many members `(K, D)` as environments, each with its seed."""
        device, count = self.sim.sim.device, self.sim.sim.num_envs
        places = torch.arange(count) % len(members)  # surplus environments repeat members without recording
        acting = members[places.to(members.device)]
        obs = self.sim.reset([seeds[place] for place in places.tolist()])
        running = torch.arange(count, device=device) < len(members)
        fitness = torch.zeros(count, device=device)
        self._begin(obs)
        while bool(running.any()):
            trace: list[StepTrace] = []
            before = {key: value[:, -1] for key, value in obs.items()}
            step = self.sim.step(act(acting, obs).to(device), trace)
            for number, control in enumerate(trace):
                rows = running & control.active
                self._record(before, control, rows, number == 0)
                fitness = fitness + torch.where(rows, control.step.reward, 0.0)
                before = control.step.obs
                self.env_steps += int(rows.sum())
            self._end(step, running & step.done)
            self._episode_stats.observe(
                replace(
                    step,
                    reward=torch.where(running, step.reward, 0.0),
                    undiscounted=torch.where(running, step.undiscounted, 0.0),
                    steps=torch.where(running, step.steps, 0),
                    terminated=step.terminated & running,
                    truncated=step.truncated & running,
                )
            )
            running = running & ~step.done
            obs = step.obs
        return fitness[: len(members)].double().cpu()

    def _begin(self, obs: Observation) -> None:
        """Handle the start of a round at `obs` `{key: (N, To, ...)}`."""

    def _record(self, before: Observation, control: StepTrace, rows: Tensor, decision: bool) -> None:
        """Handle a control step of the environments `rows` `(N,)` bool, after `before` `{key: (N, ...)}`."""

    def _end(self, step: ChunkStep, ended: Tensor) -> None:
        """Handle the end of the episodes in the environments `ended` `(N,)` bool."""

    def episode_stats(self) -> dict[str, float]:
        """Return means over the episodes finished since the last call and reset them; empty if none finished."""
        return self._episode_stats.flush()

    def state_dict(self) -> dict[str, Any]:
        """Counts; every round starts with a reset."""
        return {"tally": self._episode_stats.state_dict(), "env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._episode_stats.load_state_dict(state["tally"])
        self.env_steps = int(state["env_steps"])


class PopulationSampler(PopulationRunner):
    """Evaluates candidates with target descriptors and stores every control step in replay.

    A step is stored with the achieved descriptor of its episode, which is computed at the end, and with its target: the
    candidate's descriptor, or the achieved one for a candidate without target.
    """

    def __init__(self, sim: ChunkedSim, replay: Replay, *, seed: int = 0) -> None:
        """Create the sampler.

        Args:
            sim: Simulator with descriptors (`DescriptorSim`).
            replay: Replay buffer with one lane per environment.
            seed: First episode seed; every round uses new ones.
        """
        super().__init__(sim)
        self.replay = replay
        self._seed = seed  # of the next round
        self._steps: list[tuple[Observation, StepTrace, Tensor, bool]] = []
        self._found = torch.zeros(0)  # (N, C) descriptors of the finished episodes

    def evaluate(self, act: ActMembers, candidates: EvaluationBatch) -> Scores:
        """Run one episode of every candidate."""
        count = self.sim.sim.num_envs
        starts = range(0, len(candidates), count)
        rounds = [self._evaluate_round(act, candidates.rows(slice(start, start + count))) for start in starts]
        return Scores(*(torch.cat(column) for column in zip(*rounds, strict=True)))

    def _evaluate_round(self, act: ActMembers, candidates: EvaluationBatch) -> tuple[Tensor, Tensor]:
        """Fitness `(K,)` and descriptors `(K, C)` of a round."""
        count = self.sim.sim.num_envs
        fitness = self._round(act, candidates.members, range(self._seed, self._seed + count))
        self._seed += count
        found = self._found
        places = torch.arange(count) % len(candidates)
        asked = candidates.asked.cpu()[places].to(found.device)
        constants = candidates.members[:, -found.shape[1] :].to(found.device)[places.to(found.device)]
        record = {"achieved": found, "wanted": torch.where(asked[:, None], constants, found)}
        for before, control, rows, decision in self._steps:
            add_step(self.replay, self.sim, before, control, rows, record, decision=decision)
        self._steps.clear()
        return fitness, found[: len(candidates)].cpu()

    def _begin(self, obs: Observation) -> None:
        self._found = torch.zeros_like(obs[DESCRIPTOR][:, 0])

    def _record(self, before: Observation, control: StepTrace, rows: Tensor, decision: bool) -> None:
        self._steps.append((before, control, rows, decision))

    def _end(self, step: ChunkStep, ended: Tensor) -> None:
        self._found = torch.where(ended[:, None], step.info[DESCRIPTOR], self._found)

    def state_dict(self) -> dict[str, Any]:
        """Seeds, replay and counts; the simulator needs no state, because every round resets it."""
        return {**super().state_dict(), "seed": self._seed, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next candidates run as without interruption."""
        super().load_state_dict(state)
        self._seed = int(state["seed"])
        self.replay.load_state_dict(state["replay"])


class ObservationSampler(PopulationRunner):
    """Evaluates all members on the same episodes, whose observations describe their behavior."""

    def __init__(self, sim: ChunkedSim, *, views: int, starts: int, seed: int = 0) -> None:
        """Create the sampler.

        Args:
            sim: Simulator.
            views: Stored observations per episode, evenly spaced, including the last.
            starts: Episodes of every member.
            seed: Seed of the first episode.
        """
        super().__init__(sim)
        self._views, self._seeds = views, range(seed, seed + starts)
        self._trace: list[tuple[Tensor, Tensor]] = []  # views (N, V) after each control step, and which rows stepped

    def evaluate(self, act: ActMembers, members: Tensor) -> EvaluatedPolicies:
        """Run all episodes of every member `(P, D)`; fitness is the mean over them."""
        count, starts = self.sim.sim.num_envs, len(self._seeds)
        rows, seeds = members.repeat_interleave(starts, 0), [*self._seeds] * len(members)
        fitness, views = list[Tensor](), list[Tensor]()
        for start in range(0, len(rows), count):
            batch = slice(start, start + count)
            fitness.append(self._round(act, rows[batch], seeds[batch]))
            views.append(self._selected_views()[: len(fitness[-1])])
        stacked = torch.cat(views)
        folded = torch.cat(fitness).view(len(members), starts).mean(1)
        return EvaluatedPolicies(members.cpu(), folded, stacked.reshape(len(members), -1, stacked.shape[-1]))

    def _begin(self, obs: Observation) -> None:
        self._trace.clear()

    def _record(self, before: Observation, control: StepTrace, rows: Tensor, decision: bool) -> None:
        self._trace.append((flatten_obs(control.step.final_obs).cpu(), rows.cpu()))

    def _selected_views(self) -> Tensor:
        """Views `(N, S, V)` of the last round."""
        views = torch.stack([view for view, _ in self._trace], 1)
        moved = torch.stack([rows for _, rows in self._trace], 1)
        lengths, number = moved.sum(1, keepdim=True), moved.cumsum(1)
        numbers = (lengths * torch.arange(1, self._views + 1) / self._views).ceil().clamp(min=1)
        place = (number[:, None] >= numbers[:, :, None]).int().argmax(2)  # of the step with that number
        return views.gather(1, place[..., None].expand(-1, -1, views.shape[2]))
