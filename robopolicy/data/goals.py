"""Replay buffer of a dataset whose windows have goals chosen in hindsight (OGBench, Park et al. 2024).

The goal of a window is its own first state, a later state of the same episode, or any state of the data. The reward is
1 in the step from a state that is the goal, and the window ends there without a bootstrap: the value of a state at k
steps from its goal is gamma ** k. A state reaches a goal only if both are the same frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, Validated
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError

GOAL, ACHIEVED = "goal", "achieved_goal"  # observation keys: goal of a task, and the goal that a state satisfies


@dataclass(frozen=True)
class GoalConfig(Validated):
    """Fractions of goals; all 0: goals and rewards of the dataset."""

    current: Fraction = 0.0  # the first state of the window (published: .2)
    trajectory: Fraction = 0.0  # a later state of the episode (published: .5)
    random: Fraction = 0.0  # any state of the dataset (published: .3)
    geometric: bool = False  # later states: geometric distances with mean 1 / (1 - gamma) instead of uniform ones

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.current + self.trajectory + self.random
        if total and abs(total - 1) > 1e-6:
            raise UserError(f"Fractions of goals must sum to 1, or all be 0; they sum to {total:g}.")

    def __bool__(self) -> bool:
        return bool(self.current + self.trajectory + self.random)


class GoalReplay(Replay):
    """Dataset whose windows have goals sampled by `ReplaySampleSpec.goals`."""

    _last: Tensor | None = None  # (slots,) last slot of the episode of every slot

    def sample(self, sample_spec: ReplaySampleSpec, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw windows, then a goal for each."""
        batch = super().sample(sample_spec, generator, batches=batches)
        return self.relabel(batch, self.sample_goals(batch.index, sample_spec, generator), sample_spec)

    def sample_goals(self, index: Tensor, sample_spec: ReplaySampleSpec, generator: torch.Generator) -> Tensor:
        """Slots `(B,)` of the goals of the windows that start at slots `index` `(B,)`."""
        config, last = sample_spec.goals, self._episode_ends()[index]
        assert config is not None
        draw = torch.rand(4, len(index), generator=generator, dtype=torch.float64, device=index.device)
        if config.geometric:
            distance = 1 + (torch.log1p(-draw[0]) / math.log(sample_spec.gamma)).floor().long()
            later = torch.minimum(index + distance, last)
        else:
            first = torch.minimum(index + 1, last)
            later = (first * draw[0] + last * (1 - draw[0])).round().long()
        anywhere = (draw[1] * self.length).long()
        goal = torch.where(draw[2] * (1 - config.current) < config.trajectory, later, anywhere)
        return torch.where(draw[3] < config.current, index, goal)

    def relabel(self, batch: Transitions, goal: Tensor, sample_spec: ReplaySampleSpec) -> Transitions:
        """Windows with the goals of slots `goal` `(B,)`, cut at the goal if they contain it."""
        n, gamma = sample_spec.steps, sample_spec.gamma
        offset = goal - batch.index
        reached = (offset >= 0) & (offset < batch.steps)
        steps = torch.where(reached, offset, batch.steps)
        rewards = (reached[:, None] & (torch.arange(n, device=goal.device) == offset[:, None])).float()
        power = (gamma ** steps.double()).float()
        goals = self._rows(f"obs.{ACHIEVED}", self._array(goal))[:, None]  # (B, 1, G)
        shown = {GOAL: goals.expand(-1, sample_spec.obs_horizon, *goals.shape[2:])}
        return replace(
            batch,
            obs=batch.obs | shown,
            next_obs=batch.next_obs | shown,
            rewards=rewards,
            reward=torch.where(reached, power, 0.0),
            steps=steps,
            discount=torch.where(reached, 0.0, power),
            returns=torch.full_like(power, torch.nan),
        )

    def _episode_ends(self) -> Tensor:
        """Last slot of the episode of every slot, computed once."""
        if self._last is None:
            if f"obs.{ACHIEVED}" not in self._columns:
                raise UserError(f"The dataset has no '{ACHIEVED}', which goals in hindsight need.")
            age = self._tensor(self._columns["age"])[:-1]  # without the spare row
            starts = torch.cat([(age == 0).nonzero()[:, 0], age.new_tensor([len(age)])])
            slots = torch.arange(len(age), device=age.device)
            self._last = starts[torch.searchsorted(starts, slots, right=True)] - 1
        return self._last
