"""Samplers that choose tasks by category, difficulty, regret, stage, share or instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from robopolicy.core.trackers import Tracker, floats, integers
from robopolicy.errors import UserError
from robopolicy.text.rollouts.prompt_samplers import Tracked, Uniform
from robopolicy.text.rollouts.protocols import PromptPool, Task


class MeanTracker(Tracker):
    """Exponential moving average per key; the first observation of a key replaces the prior."""

    def __init__(self, decay: Fraction = 0.9, prior: float = 0.0) -> None:
        self.decay, self.prior = decay, prior
        self._mean: dict[int, float] = {}

    def read(self, keys: Tensor) -> Tensor:
        """Return averages `(N,)`."""
        return torch.tensor([self._mean.get(key, self.prior) for key in integers(keys)], dtype=torch.float64)

    def write(self, keys: Tensor, values: Tensor, keep: Tensor | None = None) -> None:
        """Update the averages."""
        kept = floats(torch.full_like(values, self.decay) if keep is None else keep)
        for key, value, decay in zip(integers(keys), floats(values), kept, strict=True):
            old = self._mean.get(key, value)
            self._mean[key] = decay * old + (1.0 - decay) * value

    def state_dict(self) -> dict[str, Any]:
        """Return keys (M,) and averages (M,)."""
        return {
            "keys": torch.tensor(list(self._mean), dtype=torch.int64),
            "mean": torch.tensor(list(self._mean.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._mean = dict(zip(integers(state["keys"]), floats(state["mean"]), strict=True))


class CategoryBandit(Uniform):
    """SEC: categories are drawn with `softmax(Q / temperature)`, Q a running mean |advantage| of the category.

    Source: Chen et al. 2025.

    Solved and unsolvable categories have no advantage and are sampled less. An infinite temperature is uniform over
    categories. If a category has too few tasks for a proposal, others replace it.
    """

    def __init__(self, temperature: Positive = 1.0, rate: NonNegative = 0.1) -> None:
        self.temperature, self.rate = temperature, rate

    def setup(self, pool: PromptPool, seed: int) -> None:
        """Initialise for the categories of the pool."""
        super().setup(pool, seed)
        self._category = pool.require("category").long()
        self.value = torch.zeros(int(self._category.max()) + 1, dtype=torch.float64)  # Q

    def propose(self, n: int) -> list[Task]:
        """Draw categories by value, and tasks uniformly within categories."""
        probability = torch.softmax(self.value / self.temperature, 0)[self._category]
        size = torch.bincount(self._category, minlength=len(self.value))[self._category]
        return [self.pool.tasks[place] for place in self.weighted(probability / size, n)]

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Update the values of the sampled categories."""
        places = torch.tensor([self._indices.get(key, -1) for key in keys.tolist()])
        known = places >= 0
        category = self._category[places[known]]
        for index in category.unique().tolist():
            mean = float(advantage[known][category == index].abs().mean())
            self.value[index] += self.rate * (mean - float(self.value[index]))

    def state_dict(self) -> dict[str, Any]:
        """Return values and generator."""
        return {**super().state_dict(), "value": self.value.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.value = state["value"].clone()


class Frontier(Tracked):
    """Prompt curriculum: tasks with success rates nearest `target` among `factor` times as many candidates.

    Source: PCL, Gao et al. 2025.

    Tasks without rollouts have the rate `target`, so that they are sampled. `factor = 1` is uniform.
    """

    def __init__(self, factor: PositiveInt = 4, target: float = 0.5, decay: Fraction = 0.5) -> None:
        """Validate and store the options.

        Args:
            factor: k, candidates per task.
            target: Success rate with the largest learning signal.
            decay: Decay of the running success rates.
        """
        super().__init__(MeanTracker(decay, prior=target))
        self.factor, self.target = factor, target

    def propose(self, n: int) -> list[Task]:
        """Return the nearest candidates."""
        places = torch.tensor(self.draw(min(self.factor * n, self._check_size(n))))
        distance = (self.rates()[places] - self.target).abs()
        nearest = torch.argsort(distance, stable=True)[:n]
        return [self.pool.tasks[place] for place in places[nearest].tolist()]


class Regret(Tracked):
    """Resampling of tasks on which the policy is worse than the best rollout so far (GROOVE, Jackson et al. 2023).

    The regret of a task is the best reward of its rollouts minus the running mean. With probability `replay`, each task
    of a proposal is a known task drawn with weight `rank^(-1 / temperature)`; rank 1 is the largest regret, and equal
    regrets share a rank. The others are the next tasks of the epoch.
    """

    def __init__(self, replay: Fraction = 0.5, temperature: Positive = 0.3, decay: Fraction = 0.5) -> None:
        if not 0 <= replay <= 1 or temperature <= 0:
            raise UserError(f"regret needs replay in [0, 1] and temperature > 0, got {replay} and {temperature}.")
        super().__init__(MeanTracker(decay))
        self.replay, self.temperature = replay, temperature

    def setup(self, pool: PromptPool, seed: int) -> None:
        """Initialise for the tasks of the pool."""
        super().setup(pool, seed)
        self.best = torch.full((len(pool.tasks),), -torch.inf, dtype=torch.float64)  # no rollout yet

    def propose(self, n: int) -> list[Task]:
        """Draw known tasks, then new ones."""
        known = int((torch.rand(n, generator=self._generator) < self.replay).sum())
        known = min(known, int(self.best.isfinite().sum()))
        again = self.weighted(self.weight(), known) if known else []
        fresh = [place for place in self.draw(min(n + known, self._check_size(n))) if place not in again]
        return [self.pool.tasks[place] for place in (*again, *fresh[: n - known])]

    def weight(self) -> Tensor:
        """Compute the weight (K,) of sampling each task again; 0 for tasks without rollouts."""
        regret = self.best - self.tracker.read(self.keys())
        rank = 1 + len(regret) - torch.searchsorted(regret.sort().values, regret, right=True)
        return torch.where(self.best.isfinite(), rank.double() ** (-1 / self.temperature), 0.0)

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Update mean and best rewards."""
        super().observe(keys, rewards, advantage)
        for key, reward in zip(keys.tolist(), rewards.tolist(), strict=True):
            if (place := self._indices.get(key)) is not None:  # skip tasks created by a strategy
                self.best[place] = max(float(self.best[place]), reward)

    def state_dict(self) -> dict[str, Any]:
        """Return mean and best rewards, and the generator."""
        return {**super().state_dict(), "best": self.best.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.best = state["best"].clone()


class StageCurriculum(Uniform):
    """Stages of rising difficulty: the next opens when the mean reward reaches `threshold`.

    Source: CRAFT-GUI, Nong et al. 2025.

    Tasks of open stages are drawn uniformly. One stage is the uniform sampler.
    """

    def __init__(self, stages: PositiveInt = 3, threshold: float = 0.7, rate: NonNegative = 0.1) -> None:
        """Validate and store the options.

        Args:
            stages: Number of equal parts of the pool, by difficulty.
            threshold: Running mean reward at which the next stage opens.
            rate: Update rate of the running mean.
        """
        self.stages, self.threshold, self.rate = stages, threshold, rate
        self.stage, self.mean = 1, 0.0

    def setup(self, pool: PromptPool, seed: int) -> None:
        """Sort the tasks into stages."""
        super().setup(pool, seed)
        order = (
            torch.argsort(pool.require("difficulty"), stable=True) if self.stages > 1 else torch.arange(len(pool.tasks))
        )
        self._stage = torch.empty_like(order)
        self._stage[order] = torch.arange(len(order)) * self.stages // len(order)

    def draw(self, n: int) -> list[int]:
        """Draw indices of tasks of open stages."""
        if self.stage >= self.stages:
            return super().draw(n)
        places = (self._stage < self.stage).nonzero().flatten()
        if n > len(places):
            raise UserError(f"The first {self.stage} stages have {len(places)} tasks, fewer than a batch of {n}.")
        return places[torch.randperm(len(places), generator=self._generator)[:n]].tolist()

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Open the next stage once the mean reward reaches the threshold."""
        self.mean += self.rate * (float(rewards.double().mean()) - self.mean)
        if self.mean >= self.threshold and self.stage < self.stages:
            self.stage, self.mean = self.stage + 1, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return stage, mean reward and generator."""
        return {**super().state_dict(), "stage": self.stage, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.stage, self.mean = int(state["stage"]), float(state["mean"])


class MixtureSampler(Uniform):
    """Fixed shares of categories, e.g. a fifth of critique tasks among the problems.

    Source: Critique-Coder, Ruan et al. 2025.
    """

    def __init__(self, shares: Sequence[NonNegative]) -> None:
        """Validate and store the options.

        Args:
            shares: Fractions of categories 0, 1, ...; they sum to 1.
        """
        if abs(sum(shares) - 1.0) > 1e-6 or min(shares) < 0.0:
            raise UserError(f"Shares of categories must not be negative and sum to 1, got {list(shares)}.")
        self.shares = tuple(shares)

    def setup(self, pool: PromptPool, seed: int) -> None:
        """Initialise for the categories of the pool."""
        super().setup(pool, seed)
        self._category = pool.require("category").long()
        if (found := int(self._category.max()) + 1) > len(self.shares):
            raise UserError(f"These tasks have {found} categories, but there are shares of {len(self.shares)}.")

    def propose(self, n: int) -> list[Task]:
        """Draw the share of each category, rounded by largest remainder."""
        places: list[int] = []
        for category, count in enumerate(allocate(torch.tensor(self.shares), n)):
            own = (self._category == category).nonzero().flatten()
            if count > len(own):
                raise UserError(f"Category {category} has {len(own)} tasks, fewer than its share of {count}.")
            places += own[torch.randperm(len(own), generator=self._generator)[:count]].tolist()
        return [self.pool.tasks[place] for place in places]


class Instructions(Uniform):
    """A population of instructions (INSPO, Zhou et al. 2025), one of which is the context of each task.

    Instructions with fewer than `trial` uses are drawn first, then with `softmax(mean reward / temperature)`. With more
    than `most`, the worst evaluated instruction is dropped. `admit` adds instructions.
    """

    def __init__(
        self, instructions: Sequence[str], temperature: Positive = 0.1, most: NonNegativeInt = 8, trial: PositiveInt = 4
    ) -> None:
        self.temperature, self.most, self.trial = temperature, most, trial
        self.population: dict[str, tuple[float, int]] = dict.fromkeys(instructions, (0.0, 0))  # sum, uses
        self._given: dict[int, str] = {}  # key -> instruction of the last proposal

    def propose(self, n: int) -> list[Task]:
        """Return tasks of the epoch, each with an instruction as context."""
        tasks = super().propose(n)
        self._given = {task.key: self._choose() for task in tasks}
        return [replace(task, context={"kind": "instruction", "text": self._given[task.key]}) for task in tasks]

    def _choose(self) -> str:
        names = list(self.population)
        if untried := [name for name in names if self.population[name][1] < self.trial]:
            return untried[int(torch.randint(len(untried), (1,), generator=self._generator))]
        means = torch.tensor([total / uses for total, uses in self.population.values()], dtype=torch.float64)
        return names[self.weighted(torch.softmax(means / self.temperature, 0), 1)[0]]

    def observe(self, keys: Tensor, rewards: Tensor, advantage: Tensor) -> None:
        """Credit rewards to the instructions of their tasks."""
        for key, reward in zip(keys.tolist(), rewards.tolist(), strict=True):
            if (name := self._given.get(key)) in self.population:
                total, uses = self.population[name]
                self.population[name] = (total + reward, uses + 1)

    def admit(self, instruction: str) -> None:
        """Add an instruction, and drop the worst if there are too many."""
        self.population.setdefault(instruction, (0.0, 0))
        tried = {name: total / uses for name, (total, uses) in self.population.items() if uses >= self.trial}
        if len(self.population) > self.most and tried:
            del self.population[min(tried, key=lambda name: tried[name])]

    def state_dict(self) -> dict[str, Any]:
        """Return the population, the instructions of the last proposal, and the generator."""
        population = [[name, total, uses] for name, (total, uses) in self.population.items()]
        return {**super().state_dict(), "population": population, "given": dict(self._given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.population = {name: (float(total), int(uses)) for name, total, uses in state["population"]}
        self._given = {int(key): name for key, name in state["given"].items()}


def allocate(weight: Tensor, total: int) -> list[int]:
    """Split `total` into integers in proportion to weights `(K,)`, by largest remainder."""
    ideal = weight.double() / weight.double().sum() * total
    share = (ideal + 1e-6).floor().long()
    share[torch.argsort(share - ideal, stable=True)[: total - int(share.sum())]] += 1
    return share.tolist()
