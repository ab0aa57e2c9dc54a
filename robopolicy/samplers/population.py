"""Episodes of many policies at once, one candidate per environment, each of them played to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.generation import Candidates, Scores
from robopolicy.data.replay import Replay
from robopolicy.policies.base import Observation
from robopolicy.samplers.replay import remember
from robopolicy.samplers.tally import EpisodeTally
from robopolicy.sim.chunk import ChunkedSim, PlayedStep
from robopolicy.spec import DESCRIPTOR

PlayMembers = Callable[[Tensor, Observation], Tensor]
"""Chunks `(N, H, A)` of members `(N, D)`, one observation `{key: (N, To, ...)}` each."""


class PopulationSampler:
    """Plays candidates in rounds of as many as there are environments, and remembers every control step.

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
        self.sim, self.replay = sim, replay
        self._seed = seed  # of the next round
        self._tally = EpisodeTally(sim.sim)
        self.env_steps = 0  # control steps of the candidates since the start

    def play(self, act: PlayMembers, candidates: Candidates) -> Scores:
        """One episode of every candidate."""
        count = self.sim.sim.num_envs
        starts = range(0, len(candidates), count)
        rounds = [self._round(act, candidates.rows(slice(start, start + count))) for start in starts]
        return Scores(*(torch.cat(column) for column in zip(*rounds, strict=True)))

    def _round(self, act: PlayMembers, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Fitness `(K,)` and descriptors `(K, C)` of at most as many candidates as there are environments."""
        device, count = self.sim.sim.device, self.sim.sim.num_envs
        places = torch.arange(count) % len(candidates)  # environments left over play somebody's episode unrecorded
        members = candidates.members[places.to(candidates.members.device)]
        obs = self.sim.reset(self._seed)
        self._seed += count
        running = torch.arange(count, device=device) < len(candidates)
        fitness, found = torch.zeros(count, device=device), torch.zeros_like(obs[DESCRIPTOR][:, 0])
        played: list[tuple[Observation, PlayedStep, Tensor, bool]] = []
        while bool(running.any()):
            chunk = act(members, obs).to(device)
            trace: list[PlayedStep] = []
            before = {key: value[:, -1] for key, value in obs.items()}
            step = self.sim.step(chunk, trace)
            for number, control in enumerate(trace):
                rows = running & control.active
                played.append((before, control, rows, number == 0))
                fitness = fitness + torch.where(rows, control.step.reward, 0.0)
                before = control.step.obs
                self.env_steps += int(rows.sum())
            ended = running & step.done
            self._tally.observe(
                replace(
                    step,
                    reward=torch.where(running, step.reward, 0.0),
                    steps=torch.where(running, step.steps, 0),
                    terminated=step.terminated & running,
                    truncated=step.truncated & running,
                )
            )
            found = torch.where(ended[:, None], step.info[DESCRIPTOR], found)
            running = running & ~step.done
            obs = step.obs
        asked = candidates.asked.cpu()[places].to(device)
        wanted = torch.where(asked[:, None], members[:, -found.shape[1] :].to(device), found)
        for before, control, rows, decision in played:
            record = {"achieved": found, "wanted": wanted}
            remember(self.replay, self.sim, before, control, rows, record, decision=decision)
        return fitness[: len(candidates)].double().cpu(), found[: len(candidates)].cpu()

    def episode_stats(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        return self._tally.pop()

    def state_dict(self) -> dict[str, Any]:
        """Seeds, memory and counts; the simulator holds nothing, as every round resets it."""
        return {"seed": self._seed, "replay": self.replay.state_dict(), "env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next candidates are played as in the uninterrupted run."""
        self._seed, self.env_steps = int(state["seed"]), int(state["env_steps"])
        self.replay.load_state_dict(state["replay"])
