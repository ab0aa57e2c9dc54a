"""Updates of a run at which it logs, evaluates and saves, and the number of episodes of its evaluations.

All follow from the configuration, never from measured times, so that a run depends only on its seed.
"""

from __future__ import annotations

from typing import Any

from robopolicy.algorithms.common.algorithm import IMITATION
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.core.distributed import all_reduce_max
from robopolicy.sim.contract import VectorSim
from robopolicy.training.config import TrainConfig, section
from robopolicy.training.guards import MIN_EPISODES
from robopolicy.training.learner import steps_per_decision
from robopolicy.training.make_source import SOURCES

GRADIENT_STEP = 10  # control steps of an evaluation that take as long; measured: 5 on lift to 26 on the point mass


class Schedule:
    """Schedule of a run of `total` updates; `sim` is its simulator for evaluation, if any."""

    def __init__(self, config: Any, total: int, sim: VectorSim | None) -> None:
        tenth = max(1, total // 10)
        self.total = total
        self.evaluate_every = config.evaluation.every or tenth
        self.checkpoint_every = config.checkpoint_every or tenth
        self.log_every = config.logging.every or max(1, total // 100)
        self._last_episodes = 0 if sim is None else config.evaluation.episodes
        self._episodes = self._last_episodes
        episode_steps = all_reduce_max(0 if sim is None else sim.spec.max_episode_steps)  # process 0 evaluates
        if episode_steps and config.evaluation.max_fraction:
            self._limit_evaluations(config, episode_steps)

    def logs(self, update: int) -> bool:
        """Whether metrics are logged after `update`."""
        return self._due(self.log_every, update)

    def evaluates(self, update: int) -> bool:
        """Whether the policy is evaluated after `update`."""
        return self._due(self.evaluate_every, update)

    def saves(self, update: int) -> bool:
        """Whether the resume point is saved after `update`."""
        return self._due(self.checkpoint_every, update)

    def episodes(self, update: int) -> int:
        """Return the episodes of an evaluation after `update`; the last one has all of them."""
        return self._last_episodes if update == self.total else self._episodes

    @property
    def grows(self) -> bool:
        """Whether the last evaluation has more episodes than the others."""
        return self._last_episodes > self._episodes

    def _due(self, every: int, update: int) -> bool:
        return update % every == 0 or update == self.total

    def _limit_evaluations(self, config: TrainConfig, episode_steps: int) -> None:
        """Limit the evaluations before the last to `max_fraction` of the training.

        First they have fewer episodes, then there are fewer of them, unless `evaluation.every` is set.
        """
        settings = config.evaluation
        affordable = int(settings.max_fraction * training_steps(config, self.total, episode_steps) / episode_steps)
        least = min(MIN_EPISODES, settings.episodes)
        if not settings.every and affordable < least * (self.total // self.evaluate_every):
            self.evaluate_every = -(-self.total // max(affordable // least, 1))
        episodes = affordable // max(self.total // self.evaluate_every, 1)
        self._episodes = min(max(episodes, least), self._last_episodes)


def training_steps(config: TrainConfig, updates: int, episode_steps: int) -> int:
    """Return the most control steps of `updates`; those without a simulator count as `GRADIENT_STEP` each."""
    name, settings = section("algorithm", config.algorithm)
    source = ALGORITHMS[name].data_source
    offline = {"replay": config.replay.offline_updates, **dict.fromkeys((*IMITATION, "text_demonstrations"), updates)}
    without_sim = min(offline.get(source, 0), updates)
    if without_sim == updates:
        return GRADIENT_STEP * updates
    if SOURCES[source].whole_episodes:
        per_update = config.sim.num_envs * episode_steps
    else:
        per_update = settings.num_steps * steps_per_decision(config)
    return GRADIENT_STEP * without_sim + per_update * (updates - without_sim)
