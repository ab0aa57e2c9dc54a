"""Episodes of many policies at once, one candidate per environment, each of them played to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.contrib.quality_diversity.behavior import DESCRIPTOR
from robopolicy.contrib.quality_diversity.generation import EvaluationBatch, Scores
from robopolicy.contrib.quality_diversity.individuals import Individuals, view_of
from robopolicy.data.replay import Replay
from robopolicy.policies.base import Observation
from robopolicy.rollout.off_policy import add_step
from robopolicy.rollout.on_policy import EpisodeStats
from robopolicy.sim.chunk import ChunkedSim, ChunkStep, StepTrace

PlayMembers = Callable[[Tensor, Observation], Tensor]
"""Chunks `(N, H, A)` of members `(N, D)`, one observation `{key: (N, To, ...)}` each."""


class Rounds:
    """Plays rounds of as many members as there are environments; subclasses watch."""

    def __init__(self, sim: ChunkedSim) -> None:
        self.sim = sim
        self._episode_stats = EpisodeStats(sim.sim)
        self.env_steps = 0  # control steps of the members since the start

    def _round(self, act: PlayMembers, members: Tensor, seeds: Sequence[int]) -> Tensor:
        """Returns `(K,)` float64 of at most as many members `(K, D)` as there are environments, each with its seed."""
        device, count = self.sim.sim.device, self.sim.sim.num_envs
        places = torch.arange(count) % len(members)  # environments left over play somebody's episode unrecorded
        shown = members[places.to(members.device)]
        obs = self.sim.reset([seeds[place] for place in places.tolist()])
        running = torch.arange(count, device=device) < len(members)
        fitness = torch.zeros(count, device=device)
        self._begin(obs)
        while bool(running.any()):
            trace: list[StepTrace] = []
            before = {key: value[:, -1] for key, value in obs.items()}
            step = self.sim.step(act(shown, obs).to(device), trace)
            for number, control in enumerate(trace):
                rows = running & control.active
                self._see(before, control, rows, number == 0)
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
        """A round begins with `obs` `{key: (N, To, ...)}`."""

    def _see(self, before: Observation, control: StepTrace, rows: Tensor, decision: bool) -> None:
        """One control step of the environments `rows` `(N,)` bool, after `before` `{key: (N, ...)}`."""

    def _end(self, step: ChunkStep, ended: Tensor) -> None:
        """Episodes of the environments `ended` `(N,)` bool are over."""

    def episode_stats(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        return self._episode_stats.flush()

    def state_dict(self) -> dict[str, Any]:
        """Counts; every round begins anew."""
        return {"tally": self._episode_stats.state_dict(), "env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._episode_stats.load_state_dict(state["tally"])
        self.env_steps = int(state["env_steps"])


class PopulationSampler(Rounds):
    """Candidates that may be asked for a descriptor; every control step of theirs is remembered.

    A step is remembered with the descriptor that its episode achieved, known at the end alone, and with the one that
    was wanted: what the candidate was asked for or, of one that was asked for nothing, what it achieved.
    """

    def __init__(self, sim: ChunkedSim, replay: Replay, *, seed: int = 0) -> None:
        """Get ready.

        Args:
            sim: Simulator that shows and measures descriptors (`DescriptorSim`).
            replay: Memory with one lane per environment.
            seed: First episode seed; every round takes new ones.
        """
        super().__init__(sim)
        self.replay = replay
        self._seed = seed  # of the next round
        self._played: list[tuple[Observation, StepTrace, Tensor, bool]] = []
        self._found = torch.zeros(0)  # (N, C) descriptors of the episodes that are over

    def play(self, act: PlayMembers, candidates: EvaluationBatch) -> Scores:
        """One episode of every candidate."""
        count = self.sim.sim.num_envs
        starts = range(0, len(candidates), count)
        rounds = [self._scored(act, candidates.rows(slice(start, start + count))) for start in starts]
        return Scores(*(torch.cat(column) for column in zip(*rounds, strict=True)))

    def _scored(self, act: PlayMembers, candidates: EvaluationBatch) -> tuple[Tensor, Tensor]:
        """Fitness `(K,)` and descriptors `(K, C)` of a round."""
        count = self.sim.sim.num_envs
        fitness = self._round(act, candidates.members, range(self._seed, self._seed + count))
        self._seed += count
        found = self._found
        places = torch.arange(count) % len(candidates)
        asked = candidates.asked.cpu()[places].to(found.device)
        constants = candidates.members[:, -found.shape[1] :].to(found.device)[places.to(found.device)]
        record = {"achieved": found, "wanted": torch.where(asked[:, None], constants, found)}
        for before, control, rows, decision in self._played:
            add_step(self.replay, self.sim, before, control, rows, record, decision=decision)
        self._played.clear()
        return fitness, found[: len(candidates)].cpu()

    def _begin(self, obs: Observation) -> None:
        self._found = torch.zeros_like(obs[DESCRIPTOR][:, 0])

    def _see(self, before: Observation, control: StepTrace, rows: Tensor, decision: bool) -> None:
        self._played.append((before, control, rows, decision))

    def _end(self, step: ChunkStep, ended: Tensor) -> None:
        self._found = torch.where(ended[:, None], step.info[DESCRIPTOR], self._found)

    def state_dict(self) -> dict[str, Any]:
        """Seeds, memory and counts; the simulator holds nothing, as every round resets it."""
        return {**super().state_dict(), "seed": self._seed, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next candidates are played as in the uninterrupted run."""
        super().load_state_dict(state)
        self._seed = int(state["seed"])
        self.replay.load_state_dict(state["replay"])


class ViewSampler(Rounds):
    """Members that all play the same episodes; what they see on the way tells them apart."""

    def __init__(self, sim: ChunkedSim, *, views: int, starts: int, seed: int = 0) -> None:
        """Get ready.

        Args:
            sim: Simulator.
            views: Observations to keep of an episode, evenly spaced, the last included.
            starts: Episodes of every member.
            seed: Of the first of them.
        """
        super().__init__(sim)
        self._views, self._seeds = views, range(seed, seed + starts)
        self._seen: list[tuple[Tensor, Tensor]] = []  # views (N, V) after each control step, and where there was one

    def play(self, act: PlayMembers, members: Tensor) -> Individuals:
        """Every start of every member `(P, D)`; fitness is the mean over them."""
        count, starts = self.sim.sim.num_envs, len(self._seeds)
        rows, seeds = members.repeat_interleave(starts, 0), [*self._seeds] * len(members)
        fitness, views = list[Tensor](), list[Tensor]()
        for start in range(0, len(rows), count):
            played = slice(start, start + count)
            fitness.append(self._round(act, rows[played], seeds[played]))
            views.append(self._kept()[: len(fitness[-1])])
        seen = torch.cat(views)
        folded = torch.cat(fitness).view(len(members), starts).mean(1)
        return Individuals(members.cpu(), folded, seen.reshape(len(members), -1, seen.shape[-1]))

    def _begin(self, obs: Observation) -> None:
        self._seen.clear()

    def _see(self, before: Observation, control: StepTrace, rows: Tensor, decision: bool) -> None:
        self._seen.append((view_of(control.step.final_obs).cpu(), rows.cpu()))

    def _kept(self) -> Tensor:
        """Views `(N, S, V)` of the last round."""
        views = torch.stack([view for view, _ in self._seen], 1)
        moved = torch.stack([rows for _, rows in self._seen], 1)
        lengths, number = moved.sum(1, keepdim=True), moved.cumsum(1)
        wanted = (lengths * torch.arange(1, self._views + 1) / self._views).ceil().clamp(min=1)
        place = (number[:, None] >= wanted[:, :, None]).int().argmax(2)  # of the step with that number
        return views.gather(1, place[..., None].expand(-1, -1, views.shape[2]))
