"""Replay buffers whose windows have goals chosen in hindsight.

`GoalReplay` holds a dataset (OGBench, Park et al. 2024). The goal of a window is its own first state, a later state of
the same episode, or any state of the data. The reward is 1 in the step from a state that is the goal, and the window
ends there without a bootstrap: the value of a state at k steps from its goal is gamma ** k. A state reaches a goal only
if both are the same frame.

`HindsightReplay` holds steps of environments with goals, or a dataset of them (HER, Andrychowicz et al. 2017). The
goal of some windows is one that a later state of the same episode achieved, and the task computes their rewards again.
Terminal states are not recomputed: they follow the original goals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, Validated
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError, unknown_name

GOAL, ACHIEVED = "goal", "achieved_goal"  # observation keys: goal of a task, and the goal that a state satisfies
DESIRED = "desired_goal"  # observation key of the goal in environments of gymnasium-robotics
LAST_AGE = "last_age"  # column: at the first step of an ended episode, its number of steps; else 0
STRATEGIES = ("none", "future", "final")


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
        goals = self._rows(f"obs.{ACHIEVED}", self._array(goal))  # (B, G)
        return replace(
            show_goals(batch, GOAL, goals),
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
            self._last = episode_ends(self._tensor(self._columns["age"])[:-1])  # without the spare row
        return self._last


@dataclass(frozen=True)
class HindsightConfig(Validated):
    """Goals in hindsight for environments with goals."""

    strategy: str = "none"  # none | future: of any later state of the episode | final: of its last state
    fraction: Fraction = 0.8  # of the windows; published: four of five

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy not in STRATEGIES:
            raise unknown_name("strategy", self.strategy, STRATEGIES, "of goals in hindsight")

    def __bool__(self) -> bool:
        return self.strategy != "none"


class HindsightReplay(Replay):
    """Buffer whose windows of ended episodes have goals in hindsight, with rewards by `goal_reward`."""

    hindsight: HindsightConfig
    goal_reward: Callable[[Tensor, Tensor], Tensor]  # (achieved, desired), both (B, G) -> (B,), see `VectorSim`

    @classmethod
    def from_episodes(cls, episodes: Episodes, **options: Any) -> Self:
        """Store a dataset, as `Replay.from_episodes`."""
        replay = super().from_episodes(episodes, **options)
        for key in (ACHIEVED, DESIRED):
            if f"obs.{key}" not in replay._columns:
                raise UserError(f"The dataset has no '{key}', which goals in hindsight need.")
        age = replay._tensor(replay._columns["age"])[:-1]  # without the spare row
        last = torch.where(age == 0, episode_ends(age) - torch.arange(len(age), device=age.device), 0)
        replay._columns[LAST_AGE] = replay._array(torch.nn.functional.pad(last, (0, 1)))
        return replay

    def add(
        self,
        lanes: Tensor,
        obs: Mapping[str, Tensor],
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        final_obs: Mapping[str, Tensor],
        *,
        active: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Append one control step of K environments, as `Replay.add`."""
        lane, ended = self._array(lanes), self._array(terminated | truncated)
        age, start = self._age[lane], self._written[lane] - self._age[lane]
        super().add(lanes, obs, action, reward, terminated, truncated, final_obs, active=active, **options)
        if not self._columns:  # no row was active
            return
        if LAST_AGE not in self._columns:
            self._columns[LAST_AGE] = self._zeros((self.length * self.lanes + 1,), self._xp.int64)
        place = self._place(lane, start)
        if active is not None:  # other rows write to the spare row
            place = self._xp.where(self._array(active), place, self.length * self.lanes)
        self._columns[LAST_AGE][place] = (age + 1) * ended

    def sample(self, sample_spec: ReplaySampleSpec, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw windows, then goals for some of them."""
        batch = super().sample(sample_spec, generator, batches=batches)
        return self.relabel(batch, self.sample_goals(batch.index, generator), sample_spec)

    def sample_goals(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Steps `(B,)` from the first states of windows at `index` `(B,)` to the states of their goals; 0: own goal."""
        lane, slot = self._array(index) // self.length, self._array(index) % self.length
        age = self._columns["age"][self._place(lane, slot)]
        last = self._columns[LAST_AGE][self._place(lane, slot - age)]
        stored = self._newer(lane, slot) + age < self._filled()[lane]  # the first step of the episode is in the ring
        left = self._tensor(self._xp.where(stored, last - age, 0)).clamp(min=0)
        draw = torch.rand(2, len(index), generator=generator, dtype=torch.float64, device=index.device)
        later = left if self.hindsight.strategy == "final" else 1 + (draw[0] * left).long()
        return torch.where((left > 0) & (draw[1] < self.hindsight.fraction), later, 0)

    def relabel(self, batch: Transitions, distance: Tensor, sample_spec: ReplaySampleSpec) -> Transitions:
        """Windows with the goals achieved `distance` `(B,)` steps after their first states; 0 keeps the own goal."""
        n, index = sample_spec.steps, self._array(batch.index)
        lane, slot, key = index // self.length, index % self.length, f"obs.{ACHIEVED}"
        goals = self._rows(key, self._place(lane, slot + self._array(distance)))  # (B, G)
        chosen = distance > 0
        goals = torch.where(chosen[:, None], goals, batch.obs[DESIRED][:, -1])
        achieved = self._rows(key, self._ahead(lane, slot + 1, n))  # (n, B, G) after each step
        found = self.goal_reward(achieved.flatten(0, 1), goals.repeat(n, 1)).view(n, -1).T  # (B, n)
        played = torch.arange(n, device=found.device) < batch.steps[:, None]
        rewards = torch.where(chosen[:, None], torch.where(played, found, 0.0), batch.rewards)
        powers = sample_spec.gamma ** torch.arange(n, dtype=torch.float64, device=found.device)
        return replace(
            show_goals(batch, DESIRED, goals),
            rewards=rewards,
            reward=(rewards.double() @ powers).float(),
            returns=torch.where(chosen, torch.nan, batch.returns),
        )


def episode_ends(age: Tensor) -> Tensor:
    """Last slot `(S,)` of the episode of every slot, from the steps since the start of its episode."""
    starts = torch.cat([(age == 0).nonzero()[:, 0], age.new_tensor([len(age)])])
    return starts[torch.searchsorted(starts, torch.arange(len(age), device=age.device), right=True)] - 1


def show_goals(batch: Transitions, key: str, goals: Tensor) -> Transitions:
    """Windows whose observation `key` is the goal `(B, G)` in every step."""
    shown = {key: goals[:, None].expand(-1, batch.obs[ACHIEVED].shape[1], *goals.shape[1:])}
    return replace(batch, obs=batch.obs | shown, next_obs=batch.next_obs | shown)
