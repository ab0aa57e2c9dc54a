"""SubPO: submodular policy optimisation, for objectives with diminishing returns (Prajapat et al. 2023).

The objective is a set function F of all states of an episode with diminishing returns: covered cells, collected
information. It is not a sum of rewards of single states, but its marginal gains `F(tau_{0:t+1}) - F(tau_{0:t})` sum to
it, and a policy gradient on the gains from each step onward maximises it: an action gets credit for what is new after
it.

Use it to inspect, map or cover, with `place.indices` of an observation as the position and `place.scale` as the range
of a sensor. The gain depends on the visited positions, so a recurrent policy (`policy.recurrent.kind`), or one that
observes the time, does better than one that observes the position only. For rewards that repeat, use `ppo`. Only
positions at decisions count: positions within a chunk and at the termination of an episode are ignored.

The formulas follow the paper; the public code weights a step by the whole F so far in its grid worlds and by gains in
its robot task, of which the latter is right. Deviations: epochs of PPO on GAE of the gains (the paper: one step), a
discount, and optionally the task's reward added to the gains, which keeps the objective submodular.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.constraints import NonNegative
from robopolicy.contrib.control.positions import PositionConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Policy

NOISE = 0.1  # variance of a measurement, for `information`


def coverage(place: Tensor, seen: Tensor, count: Tensor) -> Tensor:
    """1 where the unit cell of `place` has not been visited, else 0; sums to the number of cells."""
    same = (place.floor().unsqueeze(1) == seen.floor()).all(2) & _filled(seen, count)
    return (~same.any(1)).to(place.dtype)


def information(place: Tensor, seen: Tensor, count: Tensor) -> Tensor:
    """`log(1 + var / noise) / 2` with the variance of a Gaussian process after measurements at the visited places.

    Its kernel is `exp(-d^2 / 2)`; the gains sum to `log det(1 + K / noise) / 2`. The cost is cubic in their number.
    """
    filled = _filled(seen, count)
    kernel = _kernel(seen, seen) * (filled.unsqueeze(1) & filled.unsqueeze(2))
    cross = _kernel(seen, place.unsqueeze(1)) * filled.unsqueeze(2)  # (N, L, 1)
    factor = torch.linalg.cholesky(kernel + NOISE * torch.eye(seen.shape[1], device=seen.device))
    known = torch.linalg.solve_triangular(factor, cross, upper=False).square().sum((1, 2))
    return (1 + (1 - known).clamp(min=0) / NOISE).log() / 2


def _kernel(one: Tensor, other: Tensor) -> Tensor:
    return (-(one.unsqueeze(2) - other.unsqueeze(1)).square().sum(-1) / 2).exp()


def _filled(seen: Tensor, count: Tensor) -> Tensor:
    """(N, L) bool, which places are valid."""
    return torch.arange(seen.shape[1], device=seen.device) < count.unsqueeze(1)


Gain = Callable[[Tensor, Tensor, Tensor], Tensor]

OBJECTIVES: dict[str, Gain] = {"coverage": coverage, "information": information}
"""Name -> gain `(N,)` of places `(N, D)` given visited `(N, L, D)`, of which the first `count` `(N,)` are valid."""


@dataclass(frozen=True)
class SubPOConfig(PPOConfig):
    """Settings of PPO and the set function."""

    objective: str = "coverage"  # coverage (of cells) | information (of a Gaussian process)
    place: PositionConfig = field(default_factory=PositionConfig)  # position of an episode; its scale is a cell's side
    task_coef: NonNegative = 0.0  # weight of the task's reward, added to the gains

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise unknown_name("objective", self.objective, OBJECTIVES)


class Visited:
    """Places of the running episodes, oldest first; state in `state_dict`."""

    def __init__(self, dims: int) -> None:
        self.places = torch.zeros(0, 1, dims)  # (N, L, D)
        self.count = torch.zeros(0, dtype=torch.int64)  # (N,)

    def resume(self, place: Tensor) -> None:
        """Continue rows whose latest place is `place` `(N, D)`, and restart the others."""
        rows = torch.arange(len(place), device=place.device)
        if len(self.count) != len(rows):
            self.places, self.count = place.unsqueeze(1).clone(), torch.ones_like(rows)
        self.begin((self.places[rows, self.count - 1] != place).any(1), place)

    def begin(self, new: Tensor, place: Tensor) -> None:
        """Discard all places but `place` `(N, D)` in the rows that are `new` `(N,)`."""
        self.places[:, 0] = torch.where(new.unsqueeze(1), place, self.places[:, 0])
        self.count = torch.where(new, 1, self.count)

    def add(self, place: Tensor) -> None:
        """Append a place to every row."""
        if int(self.count.max()) == self.places.shape[1]:
            self.places = torch.cat([self.places, torch.zeros_like(self.places)], 1)
        self.places[torch.arange(len(place), device=place.device), self.count] = place
        self.count = self.count + 1

    def reset_episodes(self) -> None:
        """Discard the running episodes, whose remaining steps will not be collected."""
        self.places, self.count = self.places[:0], self.count[:0]

    def state_dict(self) -> dict[str, Any]:
        """Places and counts."""
        return {"places": self.places.clone(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        device = self.places.device
        self.places, self.count = (state[name].to(device, copy=True) for name in ("places", "count"))


class SubPO(PPO):
    """PPO on marginal gains."""

    name = "subpo"
    config_class = SubPOConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "prajapat2023submodular"
    config: SubPOConfig

    def __init__(self, config: SubPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        config.place.check(policy)
        super().__init__(config, policy, total_updates=total_updates)
        self.gain = OBJECTIVES[config.objective]
        self.visited = Visited(len(config.place.indices))

    @torch.no_grad()
    def gains(self, batch: Rollout) -> Tensor:
        """Marginal gains `(T, N)` of the positions after each decision, given the episode's earlier positions."""
        place_of = self.config.place.extract
        places = place_of(batch.obs)
        following = torch.cat([places[1:], place_of(batch.last_obs).unsqueeze(0)])
        reached = following.clone()
        reached[batch.truncated & ~batch.terminated] = place_of(batch.final_obs)
        done = batch.truncated | batch.terminated
        self.visited.resume(places[0])
        gains: list[Tensor] = []
        for place, after, end, lost in zip(reached, following, done, batch.terminated, strict=True):
            gain = self.gain(place, self.visited.places, self.visited.count)
            gains.append(torch.where(lost, 0.0, gain))
            self.visited.add(place)
            self.visited.begin(end, after)
        return torch.stack(gains)

    def update(self, batch: Rollout) -> Metrics:
        """Learn from the gains of one rollout."""
        gains = self.gains(batch)
        metrics = super().update(replace(batch, reward=gains + self.config.task_coef * batch.reward))
        return metrics | {"actor/gain": float(gains.mean())}

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of PPO and the places of the running episodes."""
        return {**super().checkpoint_items(), "visited": self.visited}
