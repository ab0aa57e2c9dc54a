"""Sources of text: solutions, pairs and logs of a task or a file, or answers of the policy itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.text.datasets import READERS, Written, read_demonstrations
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.reward_runner import Guard
from robopolicy.text.sft import TextSFT, TextSFTConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.text.text_env import score, with_choices
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.text_rollout_source import OverlappedSource, TextRolloutSource, TextSource, allowed_age


class DemonstrationSource(TextSource):
    """Solved conversations, in the order of their seeds."""

    whole_episodes: ClassVar[bool] = True

    def __init__(self, sim: TextSim, config: TextSFTConfig, policy: TextPolicy, seed: int) -> None:
        super().__init__(sim, seed)
        self.batch_size = config.batch_size
        found = checked(read_demonstrations(config.data), policy) if config.data else []
        written = [item.messages for item in found]
        self.problems = len(written) or config.problems
        self._next = 0
        self._known: dict[int, list[str]] = dict(enumerate(written))

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Solutions of the task or of a file, as the settings say."""
        algorithm = context.algorithm
        assert isinstance(algorithm, TextSFT)
        return cls(text_sim(context.sim(), algorithm), algorithm.config, algorithm.policy, context.seed)

    def next(self, algorithm: Algorithm) -> list[list[str]]:
        """The next conversations."""
        numbers = range(self._next, self._next + self.batch_size)
        self._next += self.batch_size
        if not self.problems:
            return conversations(self.task, [self.seed + number for number in numbers])
        places = [number % self.problems for number in numbers]
        missing = [place for place in dict.fromkeys(places) if place not in self._known]
        self._known |= zip(missing, conversations(self.task, [self.seed + place for place in missing]), strict=True)
        return [self._known[place] for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._next = int(state["next"])
        return True


class SFTThenRL(DemonstrationSource):
    """Solved conversations for the first updates of a recipe, then its attempts."""

    def __init__(self, sim: TextSim, attempts: TextRolloutSource, seed: int) -> None:
        super().__init__(sim, TextSFTConfig(), attempts.algorithm.policy, seed)
        self.attempts, self.updates = attempts, attempts.algorithm.config.imitation

    def next(self, algorithm: Algorithm) -> Any:
        """Conversations or attempts."""
        if algorithm.updates < self.updates:
            return super().next(algorithm)
        batch = self.attempts.next(algorithm)
        self.env_steps, self._metrics = self.attempts.env_steps, self.attempts.metrics()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {**super().state_dict(), "attempts": self.attempts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        exact = self.attempts.load_state_dict(state["attempts"])
        self.env_steps = self.attempts.env_steps
        return exact

    def close(self) -> None:
        """Stop what plays and judges."""
        self.attempts.close()


class TextFileSource(TextSource):
    """Groups of a file of demonstrations, pairs or offline logs, in shuffled epochs."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        self.algorithm = algorithm
        kind, path = algorithm.recipe.data, algorithm.config.data
        if not path:
            raise UserError(f"Recipe '{algorithm.config.recipe}' learns from {kind}; pass algorithm.data=FILE.")
        self.groups: dict[int, list[Written]] = {}
        for item in checked(READERS[kind](path), algorithm.policy):
            self.groups.setdefault(item.group, []).append(item)
        self.means = {key: fmean(item.reward for item in items) for key, items in self.groups.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def next(self, algorithm: Algorithm) -> Decisions:
        """The next groups, scored by the reference, or by the policy where the recipe has none.

        `extra["mean_ref"]` (N,) is the mean reward of the group in the file.
        """
        keys = list(self.groups)
        while len(self._order) < self.algorithm.config.prompts:
            self._order += [keys[place] for place in torch.randperm(len(keys), generator=self._generator).tolist()]
        count = self.algorithm.config.prompts
        chosen, self._order = self._order[:count], self._order[count:]
        items = [item for key in chosen for item in self.groups[key]]
        policy = self.algorithm.policy
        said = [item.messages for item in items]
        record, turn = policy.conversations(said, self._generator)
        mask = record.pop("mask")
        reward = torch.zeros(mask.shape, device=mask.device)
        for row, item in enumerate(items):
            for number, paid in enumerate(item.rewards):
                reward[row, int((mask[row] & (turn[row] == number)).nonzero()[-1])] = paid
        heat = torch.ones(len(items), device=mask.device)
        group = torch.tensor([place for place, key in enumerate(chosen) for _ in self.groups[key]], device=mask.device)
        mean = torch.tensor([self.means[item.group] for item in items], device=mask.device)
        extra = {**record, "temperature": heat, "cut": torch.zeros_like(heat, dtype=torch.bool), "mean_ref": mean}
        source = torch.ones_like(group)
        told = {"mask": mask, "reward": reward, "unit": turn, "group": group, "source": source}
        rows = with_choices(Decisions(reward, **told, extra=extra))
        self._metrics = {"data/reward": fmean(item.reward for item in items)}
        rows = policy.decided(rows, self._generator)
        with torch.no_grad():
            return rows.with_fields(logp_old=score(self.algorithm.reference_policy or policy, rows).logp)

    def state_dict(self) -> dict[str, Any]:
        """The rest of the epoch."""
        return {"order": list(self._order), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._order = [int(key) for key in state["order"]]
        self._generator.set_state(state["generator"])
        return True


def checked(written: list[Written], policy: TextPolicy) -> list[Written]:
    """What was read, all of which the policy can learn from.

    Raises:
        UserError: Something is too long.
    """
    for item in written:
        policy.check_written(item.messages, item.where)
    return written


def conversations(task: TextTask, seeds: Sequence[int]) -> list[list[str]]:
    """Prompt, message, reply, message, ... of the task's own solutions.

    Raises:
        UserError: The task knows no solutions, or one that does not solve it.
    """
    episodes, guard = [task.pose(seed) for seed in seeds], Guard(task.seconds)
    solutions = [episode.demonstration() or [] for episode in episodes]
    if not all(solutions):
        raise UserError(f"Task {task.name} knows no solutions; pass algorithm.data=FILE with demonstrations.")
    said = [[episode.prompt] for episode in episodes]
    for turn in range(max(map(len, solutions), default=0)):
        for row, solution in enumerate(solutions):
            said[row] += solution[turn : turn + 1]
        going = [row for row, solution in enumerate(solutions) if turn + 1 < len(solution)]
        messages = [solutions[row][turn] for row in going]
        guard.prepare(task, [episodes[row] for row in going], messages)
        for row, message in zip(going, messages, strict=True):
            answer = guard.step(episodes[row], message, seeds[row])
            if answer is None:
                raise UserError(f"The solution of {guard.take()[0]}.")
            said[row].append(answer.reply)
    guard.close()
    return said


class RecipeSource:
    """Answers to prompts, or a file of solutions, pairs or logs, as a recipe says."""

    whole_episodes: ClassVar[bool] = True

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """The source that suits the recipe."""
        assert isinstance(context.algorithm, TextRecipe)
        return recipe_source(context.sim(), context.algorithm, context.seed)


def recipe_source(sim: VectorSim, algorithm: TextRecipe, seed: int) -> DataSource:
    """The source of a recipe.

    Raises:
        UserError: The task is no text, or the recipe needs a second policy or a file that the settings do not name.
    """
    sim = text_sim(sim, algorithm)
    if algorithm.recipe.data != "rollout":
        return TextFileSource(sim, algorithm, seed=seed)
    if algorithm.needs_companion and algorithm.companion is None:
        if not algorithm.config.companion:
            raise UserError(
                f"Recipe '{algorithm.config.recipe}' needs a second policy; set algorithm.companion=CHECKPOINT."
            )
        algorithm.accompany(load_policy(algorithm.config.companion)[0])
    overlapped = allowed_age(algorithm).in_flight(1) > 1 or algorithm.config.players
    attempts = (OverlappedSource if overlapped else TextRolloutSource)(sim, algorithm, seed=seed)
    return SFTThenRL(sim, attempts, seed) if algorithm.config.imitation else attempts


def text_sim(sim: VectorSim, algorithm: Algorithm) -> TextSim:
    """`sim` as the simulator of a text task.

    Raises:
        UserError: The task is no text.
    """
    if not isinstance(sim, TextSim):
        raise UserError(f"Algorithm '{algorithm.name}' needs a text task, e.g. text/arithmetic, not {sim.spec.task}.")
    return sim
