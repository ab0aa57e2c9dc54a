"""Attempts of a text policy, played between updates, or beside them on a thread or in processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, frozen_copy
from robopolicy.core.decisions import Decisions, MissingField
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.text.annotators import Worlds
from robopolicy.text.engines import ENGINES, OWN
from robopolicy.text.evaluation import pass_at_k
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.rollouts.async_queue import Bounded, Players, Stream
from robopolicy.text.rollouts.collector import DEFAULTS, Batch, Collector, build
from robopolicy.text.rollouts.protocols import Attempt, Pool, Staleness, Task, World, degenerate, rewards_of
from robopolicy.text.rollouts.trajectories import groups_of
from robopolicy.text.scoring_options import SCORING_OPTIONS
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.text.text_env import TextWorld
from robopolicy.training.workers import RemoteRolloutEnv, packed_weights, start_workers

SHOWN = 5  # faults written out per update
MOST_EMPTY = 20  # batches without a group to learn from, after which the run ends


@dataclass(frozen=True)
class TextPool(Pool):
    """Problems of a task, which tells their categories and difficulties when a sampler asks."""

    task: TextTask | None = None

    def require(self, name: str) -> Tensor:
        """See `Pool`."""
        found = [getattr(self.task, name)(int(task.payload)) for task in self.tasks]
        return super().require(name) if None in found else torch.tensor(found)


class TextSource:
    """What the sources of text have in common."""

    def __init__(self, sim: TextSim, seed: int) -> None:
        self.sim, self.task, self.seed = sim, sim.task, seed
        self.env_steps = 0  # messages of the policy
        self._metrics: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def observations(self) -> Observation:
        """The first prompts of training."""
        return {key: value.unsqueeze(1) for key, value in self.sim.reset(self.seed).items()}

    def close(self) -> None:
        """End the thread of the rewards."""
        self.sim.close()


class TextRolloutSource(TextSource):
    """Attempts of the policy, played as the `rollout` section of a recipe says."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        self.algorithm = algorithm
        self.world = self._world(algorithm.policy)
        self.asides = algorithm.asides()
        self._chance = torch.Generator().manual_seed(seed + 1)  # of these
        self._beside = 0  # tokens that they have written; the world's are counted where it plays, maybe on a thread
        seeds = range(seed, seed + algorithm.config.problems)
        pool = TextPool([Task(key, payload=key) for key in seeds], task=self.task)
        plain = algorithm.recipe.rollout
        try:
            size = algorithm.group_size
            self.collector = Collector(plain, pool, self.world, group_size=size, seed=seed, others=SCORING_OPTIONS)
            self.collector.topology.check(self.task)
        except ValueError as error:
            raise UserError(f"Recipe '{algorithm.config.recipe}': {error}") from error
        self._batch: Batch | None = None  # what the collector has not heard about

    @property
    def generated(self) -> int:
        """Tokens written so far."""
        return self.world.generated + self._beside

    def next(self, algorithm: Algorithm) -> Decisions:
        """Play the next groups; where all of them are dropped, others in their place."""
        self._report()
        self.world.renew(algorithm.updates)
        for _ in range(MOST_EMPTY):
            groups = self._played()
            if groups:
                break
        else:
            raise UserError(
                f"None of {MOST_EMPTY} batches had a group to learn from: {self._why()}; mend the reward of "
                f"{self.task.name}, imitate longer, or choose another recipe."
            )
        self._batch = self._rewarded(groups)
        played, self.world.played = self.world.played, []
        self._measure(played)
        return self._with_asides(self._batch)

    def _with_asides(self, batch: Batch) -> Decisions:
        """The rows with what the recipe reads beside them."""
        rows = batch.decisions
        if self.asides:
            worlds = self._worlds()
            for aside in self.asides.values():
                rows = aside(worlds, batch.attempts, rows)
            for world in (worlds.own, worlds.start):
                self._beside += world.generated
                world.guard.close()
        return rows

    def _worlds(self) -> Worlds:
        """Where asides are played: with the policy, and with what it was when the run began."""
        start = self.algorithm.reference_policy or self.algorithm.policy
        players = (self.algorithm.policy, start)
        return Worlds(*(player.env_class(player, self.task, self._chance) for player in players))

    def _world(self, policy: TextPolicy) -> TextWorld:
        world = policy.env_class(policy, self.task, torch.Generator().manual_seed(self.seed))
        for option in self.algorithm.options.values():
            option.prepare(world, self.algorithm)
        if self.algorithm.config.engine != OWN:
            world.engine = ENGINES[self.algorithm.config.engine](policy)
        return world

    def _played(self) -> list[list[Attempt]]:
        try:
            return self.collector.play(self.algorithm.config.prompts)
        except MissingField as error:
            raise self._asks(error) from error

    def _rewarded(self, groups: Sequence[Sequence[Attempt]]) -> Batch:
        try:
            return self.collector.batch(groups)
        except MissingField as error:
            raise self._asks(error) from error

    def _asks(self, error: MissingField) -> UserError:
        return UserError(f"Recipe '{self.algorithm.config.recipe}' asks for more than text measures: {error}")

    def _report(self) -> None:
        """Tell sampler and interventions what became of the last batch."""
        if self._batch is not None and self.algorithm.advantage is not None:
            self.collector.observe(self._batch, self.algorithm.advantage, self.algorithm.influence)
        self._batch = None

    def _why(self) -> str:
        faults = self.world.guard.take()
        return f"their rewards failed ({faults[0]})" if faults else "all rewards of a group are equal"

    def _measure(self, played: Sequence[Attempt]) -> None:
        """What the attempts show, and the faults since the last batch on the terminal."""
        self._metrics = {f"rollout/{name}": value for name, value in measured(played).items()}
        self._metrics["rollout/tokens"] = float(self.generated)
        self.env_steps += int(sum(attempt.metrics["turns"] for attempt in played))
        faults = {str(fault) for fault in self.world.guard.take()}
        for fault in sorted(faults)[:SHOWN]:
            sys.stderr.write(f"{self.task.name}, {fault}\n")
        if len(faults) > SHOWN:
            sys.stderr.write(f"{self.task.name}: and {len(faults) - SHOWN} more\n")

    def state_dict(self) -> dict[str, Any]:
        """The parts of the sampling side, the choices of the policy, and counts."""
        self._report()
        return {
            "collector": self.collector.state_dict(),
            "generator": self.world.generator.get_state(),
            "asides": {name: aside.state_dict() for name, aside in self.asides.items()},
            "chance": self._chance.get_state(),
            "generated": self.generated,
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.collector.load_state_dict(state["collector"])
        self.world.generator.set_state(state["generator"])
        self._chance.set_state(state["chance"])
        for name, aside in self.asides.items():
            aside.load_state_dict(state["asides"][name])
        self.world.generated, self._beside, self.env_steps = int(state["generated"]), 0, int(state["env_steps"])
        return True

    def close(self) -> None:
        """End the threads of the rewards."""
        super().close()
        self.world.guard.close()


def allowed_age(algorithm: TextRecipe) -> Staleness:
    """How old the weights may be that played: as configured, or as the recipe says.

    Raises:
        UserError: The recipe says nothing sensible.
    """
    if algorithm.config.staleness is not None:
        return Bounded(algorithm.config.staleness)
    try:
        return build("staleness", {**DEFAULTS, **algorithm.recipe.rollout}["staleness"])
    except ValueError as error:
        raise UserError(f"Recipe '{algorithm.config.recipe}': {error}") from error


def measured(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Means over attempts and groups, by name.

    Of attempts without help, where there are any, that could be judged: all that every one of them measures (`length`,
    `success`, `format`, `calls`, ...); `return`; `entropy` of the tokens as they were drawn [nats]; `degenerate`, the
    share of groups whose verdicts are all equal; and pass@k for k the size of the smallest group of at least two. Of
    all attempts: `fault` and `helped`.
    """
    alone = [attempt for attempt in attempts if not attempt.metrics["helped"]] or attempts
    judged = [attempt for attempt in alone if not attempt.metrics["fault"]]
    names = set[str].intersection(*(set(attempt.metrics) for attempt in judged))
    found = {name: fmean(attempt.metrics[name] for attempt in judged) for name in sorted(names)}
    found |= {name: fmean(attempt.metrics[name] for attempt in attempts) for name in ("fault", "helped")}
    found["return"] = fmean(attempt.reward for attempt in judged)
    tokens = sum(attempt.metrics["length"] for attempt in judged)
    found["entropy"] = sum(float(attempt.decisions.require("entropy").sum()) for attempt in judged) / max(tokens, 1.0)
    groups = [group for group in groups_of(judged) if len(group) > 1]
    if groups:
        found["degenerate"] = fmean(float(degenerate(rewards_of(group))) for group in groups)
        k = min(map(len, groups))
        wins = torch.tensor([sum(attempt.metrics["success"] > 0 for attempt in group) for group in groups])
        found[f"pass_at_{k}"] = float(pass_at_k(wins, torch.tensor([len(group) for group in groups]), k).mean())
    return found


class OverlappedSource(TextRolloutSource):
    """Attempts that are played while the policy learns, by copies with weights of bounded age.

    What is learned from is as old as `allowed_age` at most. Its recorded log-probabilities are those of the weights
    that wrote it, so that the recipe's ratios and bounds see the difference. One copy plays on a second thread, or
    `algorithm.players` do in processes of their own, which share the groups of an update. What comes first is not the
    same twice: a resumed run plays fresh attempts. Source: Han et al. 2025, AsyncFlow.
    """

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, algorithm, seed=seed)
        self._player = frozen_copy(algorithm.policy)
        self.world = self._world(self._player)
        self._remote: list[RemoteRolloutEnv] = []
        self._players: Players | None = None  # start with the first batch, when a resumed run has its weights
        self.stream = Stream(allowed_age(algorithm), algorithm.config.prompts)

    def _start(self) -> Players:
        config = self.algorithm.config
        if not config.players:
            worlds: list[tuple[World, Callable[[Any], Any]]] = [(self.world, self._load)]
            return Players(self.stream, self.collector.play, worlds, chunk=config.prompts)
        place = {"count": config.players, "where": config.players_on, "seed": self.seed}
        self._remote = start_workers(self.algorithm.policy, self.task.name, self.world, **place)
        share = max(1, config.prompts // config.players)
        return Players(self.stream, self.collector.play, [(world, world.load) for world in self._remote], chunk=share)

    def _load(self, weights: bytes) -> None:
        self._player.load_state_dict(load(weights))

    def next(self, algorithm: Algorithm) -> Decisions:
        """Publish the weights of the last update, and take the oldest groups that are recent enough."""
        self._report()
        if self._players is None:
            self.stream.version, self.stream.weights = algorithm.updates, packed_weights(self.algorithm.policy)
            self._players = self._start()
        elif algorithm.updates > self.stream.version:
            self.stream.learned(packed_weights(self.algorithm.policy))
        self._batch = self._rewarded(self._taken())
        self.world.played.clear()
        self._measure(self._batch.attempts)  # others may be under way
        age = [float(algorithm.updates - attempt.version) for attempt in self._batch.attempts]
        self._metrics["rollout/staleness"] = fmean(age)
        self._metrics["rollout/stale_dropped"] = float(self.stream.stale)
        return self._with_asides(self._batch)

    def _taken(self) -> list[list[Attempt]]:
        try:
            return self.stream.take(self.algorithm.config.prompts)
        except RuntimeError as error:
            if isinstance(error.__cause__, UserError):  # e.g. a recipe asks for more than these players can
                raise error.__cause__ from error
            if isinstance(error.__cause__, MissingField):
                raise self._asks(error.__cause__) from error
            raise

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore counts and samplers; what was under way is played again, otherwise."""
        super().load_state_dict(state)
        return False

    def close(self) -> None:
        """Stop threads and processes."""
        if self._players is not None:
            self._players.stop()
        for world in self._remote:
            world.close()
        super().close()
