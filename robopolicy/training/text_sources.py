"""Where text algorithms get their experience: solutions, pairs and logs of a task or a file, or the policy itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch

from robopolicy.algorithms.frames.base import Algorithm
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.samplers.attempts import groups_of
from robopolicy.samplers.collector import Batch, Collector
from robopolicy.samplers.protocols import Pool, Task, degenerate, rewards_of
from robopolicy.text.datasets import READERS, Written, read_demonstrations
from robopolicy.text.guard import Guard
from robopolicy.text.learner import TextRecipe, TextSFT, TextSFTConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.text.world import TextWorld, score
from robopolicy.training.sources import Source

SHOWN = 5  # faults written out per update
MOST_EMPTY = 20  # batches without a group to learn from, after which the run ends


class _TextSource:
    """What both have in common."""

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


class DemonstrationSource(_TextSource):
    """Solved conversations, in the order of their seeds."""

    def __init__(self, sim: TextSim, config: TextSFTConfig, seed: int) -> None:
        super().__init__(sim, seed)
        self.batch_size = config.batch_size
        written = [item.messages for item in read_demonstrations(config.data)] if config.data else []
        self.problems = len(written) or config.problems
        self._next = 0
        self._known: dict[int, list[str]] = dict(enumerate(written))

    def next(self, algorithm: Algorithm) -> list[list[str]]:
        """The next conversations."""
        numbers = range(self._next, self._next + self.batch_size)
        self._next += self.batch_size
        return [self._conversation(number) for number in numbers]

    def _conversation(self, number: int) -> list[str]:
        if not self.problems:
            return conversation(self.task, self.seed + number)
        place = number % self.problems
        if place not in self._known:
            self._known[place] = conversation(self.task, self.seed + place)
        return self._known[place]

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._next = int(state["next"])
        return True


class AttemptSource(_TextSource):
    """Attempts of the policy, played as the `rollout` section of a recipe says."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        self.algorithm = algorithm
        self.world = TextWorld(algorithm.policy, self.task, torch.Generator().manual_seed(seed))
        pool = Pool([Task(key, payload=key) for key in range(seed, seed + algorithm.config.problems)])
        plain = algorithm.recipe.rollout
        try:
            self.collector = Collector(plain, pool, self.world, group_size=algorithm.group_size, seed=seed)
        except ValueError as error:
            raise UserError(f"Recipe '{algorithm.config.recipe}': {error}") from error
        self._batch: Batch | None = None  # what the collector has not heard about

    def next(self, algorithm: Algorithm) -> Decisions:
        """Play the next groups; where all of them are dropped, others in their place."""
        self._report()
        self.world.version = algorithm.updates
        for _ in range(MOST_EMPTY):
            groups = self.collector.play(self.algorithm.config.prompts)
            if groups:
                break
        else:
            raise UserError(
                f"None of {MOST_EMPTY} batches had a group to learn from: {self._why()}; mend the reward of "
                f"{self.task.name}, imitate longer, or choose another recipe."
            )
        self._batch = self.collector.batch(groups)
        self._measure()
        return self._batch.decisions

    def _report(self) -> None:
        """Tell sampler and interventions what became of the last batch."""
        if self._batch is not None and self.algorithm.advantage is not None:
            self.collector.observe(self._batch, self.algorithm.advantage)
        self._batch = None

    def _why(self) -> str:
        faults = self.world.guard.take()
        return f"their rewards failed ({faults[0]})" if faults else "all rewards of a group are equal"

    def _measure(self) -> None:
        """Means over the attempts since the last batch, and the faults on the terminal."""
        played, self.world.played = self.world.played, []
        names = ("length", "turns", "success", "cut", "fault")
        self._metrics = {f"rollout/{name}": fmean(attempt.metrics[name] for attempt in played) for name in names}
        judged = [attempt for attempt in played if not attempt.metrics["fault"]]
        self._metrics["rollout/return"] = fmean(attempt.reward for attempt in judged)
        dead = [degenerate(rewards_of(group)) for group in groups_of(judged)]
        self._metrics["rollout/degenerate"] = fmean(map(float, dead))
        self._metrics["rollout/tokens"] = float(self.world.generated)
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
            "generated": self.world.generated,
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.collector.load_state_dict(state["collector"])
        self.world.generator.set_state(state["generator"])
        self.world.generated, self.env_steps = int(state["generated"]), int(state["env_steps"])
        return True

    def close(self) -> None:
        """End the threads of the rewards."""
        super().close()
        self.world.guard.close()


class WrittenSource(_TextSource):
    """Groups of a file of demonstrations, pairs or offline logs, in shuffled epochs."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        self.algorithm = algorithm
        kind, path = algorithm.recipe.data, algorithm.config.data
        if not path:
            raise UserError(f"Recipe '{algorithm.config.recipe}' learns from {kind}; pass algorithm.data=FILE.")
        self.groups: dict[int, list[Written]] = {}
        for item in READERS[kind](path):
            self.groups.setdefault(item.group, []).append(item)
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def next(self, algorithm: Algorithm) -> Decisions:
        """The next groups, scored by the reference, or by the policy where the recipe has none."""
        keys = list(self.groups)
        while len(self._order) < self.algorithm.config.prompts:
            self._order += [keys[place] for place in torch.randperm(len(keys), generator=self._generator).tolist()]
        count = self.algorithm.config.prompts
        chosen, self._order = self._order[:count], self._order[count:]
        items = [item for key in chosen for item in self.groups[key]]
        record = self.algorithm.policy.conversations([item.messages for item in items])
        mask = record.pop("mask")
        reward = torch.zeros(mask.shape, device=mask.device)
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        reward[torch.arange(len(items)), last] = torch.tensor([item.reward for item in items], device=mask.device)
        heat = torch.ones(len(items), device=mask.device)
        group = torch.tensor([place for place, key in enumerate(chosen) for _ in self.groups[key]], device=mask.device)
        extra = {**record, "temperature": heat, "cut": torch.zeros_like(heat, dtype=torch.bool)}
        rows = Decisions(reward, mask=mask, reward=reward, group=group, source=torch.ones_like(group), extra=extra)
        self._metrics = {"data/reward": fmean(item.reward for item in items)}
        with torch.no_grad():
            return rows.with_fields(logp_old=score(self.algorithm.reference or self.algorithm.policy, rows).logp)

    def state_dict(self) -> dict[str, Any]:
        """The rest of the epoch."""
        return {"order": list(self._order), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._order = [int(key) for key in state["order"]]
        self._generator.set_state(state["generator"])
        return True


def conversation(task: TextTask, seed: int) -> list[str]:
    """Prompt, message, reply, message, ... of the task's own solution.

    Raises:
        UserError: The task knows no solutions, or one that does not solve it.
    """
    episode, guard = task.episode(seed), Guard(task.seconds)
    solution = episode.demonstration()
    if not solution:
        raise UserError(f"Task {task.name} knows no solutions; pass algorithm.data=FILE with demonstrations.")
    said = [episode.prompt]
    if len(solution) == 1:
        return [*said, *solution]
    for message in solution:
        turn = guard.step(episode, message, seed)
        if turn is None:
            raise UserError(f"The solution of {guard.take()[0]}.")
        said += [message] if turn.done else [message, turn.reply]
    guard.close()
    return said


def text_source(sim: Any, algorithm: TextSFT | TextRecipe, seed: int) -> Source:
    """The source of a text algorithm.

    Raises:
        UserError: The task is no text.
    """
    if not isinstance(sim, TextSim):
        raise UserError(f"Algorithm '{algorithm.name}' needs a text task, e.g. text/arithmetic, not {sim.spec.task}.")
    if isinstance(algorithm, TextRecipe) and algorithm.recipe.data != "rollout":
        return WrittenSource(sim, algorithm, seed=seed)
    if isinstance(algorithm, TextRecipe):
        return AttemptSource(sim, algorithm, seed=seed)
    return DemonstrationSource(sim, algorithm.config, seed)
