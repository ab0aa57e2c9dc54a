"""Text data sources: demonstrations, pairs and logs of a task or a file, and rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.text.datasets import READERS, WrittenConversation, read_demonstrations
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.reward_runner import RewardRunner
from robopolicy.text.sft import TextSFT, TextSFTConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.text.text_env import score, with_chosen_tokens
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.text_rollout_source import AsyncTextRolloutSource, TextRolloutSource, TextSource, allowed_age


class DemonstrationSource(TextSource):
    """Solved conversations, in the order of their seeds."""

    whole_episodes: ClassVar[bool] = True
    uses_replay: ClassVar[bool] = False

    def __init__(self, sim: TextSim, config: TextSFTConfig, policy: TextPolicy, seed: int) -> None:
        super().__init__(sim, seed)
        self.batch_size = config.batch_size
        found = check_lengths(read_demonstrations(config.data), policy) if config.data else []
        written = [item.messages for item in found]
        self.num_prompts = len(written) or config.num_prompts
        self._next = 0
        self._cache: dict[int, list[str]] = dict(enumerate(written))

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source from the settings."""
        algorithm = context.algorithm
        assert isinstance(algorithm, TextSFT)
        return cls(text_sim(context.sim(), algorithm), algorithm.config, algorithm.policy, context.seed)

    def next(self, algorithm: Algorithm) -> list[list[str]]:
        """Return the next conversations."""
        numbers = range(self._next, self._next + self.batch_size)
        self._next += self.batch_size
        if not self.num_prompts:
            return conversations(self.task, [self.seed + number for number in numbers])
        indices = [number % self.num_prompts for number in numbers]
        missing = [index for index in dict.fromkeys(indices) if index not in self._cache]
        self._cache |= zip(missing, conversations(self.task, [self.seed + index for index in missing]), strict=True)
        return [self._cache[index] for index in indices]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._next = int(state["next"])
        return True


class SFTThenRL(DemonstrationSource):
    """Solved conversations for the first updates of a recipe, then its rollouts."""

    def __init__(self, sim: TextSim, trajectories: TextRolloutSource, seed: int) -> None:
        super().__init__(sim, TextSFTConfig(), trajectories.algorithm.policy, seed)
        self.trajectories, self.updates = trajectories, trajectories.algorithm.config.sft_updates

    def next(self, algorithm: Algorithm) -> Any:
        """Return conversations or rollouts."""
        if algorithm.updates < self.updates:
            return super().next(algorithm)
        batch = self.trajectories.next(algorithm)
        self.env_steps, self._metrics = self.trajectories.env_steps, self.trajectories.metrics()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both sources."""
        return {**super().state_dict(), "trajectories": self.trajectories.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        exact = self.trajectories.load_state_dict(state["trajectories"])
        self.env_steps = self.trajectories.env_steps
        return exact

    def close(self) -> None:
        """Stop the workers and the reward threads."""
        self.trajectories.close()


class TextFileSource(TextSource):
    """Groups of a file of demonstrations, pairs or offline logs, in shuffled epochs."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        self.algorithm = algorithm
        kind, path = algorithm.recipe.data, algorithm.config.data
        if not path:
            raise UserError(f"Recipe '{algorithm.config.recipe}' learns from {kind}; pass algorithm.data=FILE.")
        self.groups: dict[int, list[WrittenConversation]] = {}
        for item in check_lengths(READERS[kind](path), algorithm.policy):
            self.groups.setdefault(item.group, []).append(item)
        self.means = {key: fmean(item.reward for item in items) for key, items in self.groups.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def next(self, algorithm: Algorithm) -> Decisions:
        """Return the next groups, scored by the reference, or by the policy if the recipe has none.

        `extra["mean_ref"]` (N,) is the mean reward of the group in the file.
        """
        keys, count = list(self.groups), self.algorithm.config.prompts_per_update
        while len(self._order) < count:
            self._order += [keys[index] for index in torch.randperm(len(keys), generator=self._generator).tolist()]
        chosen, self._order = self._order[:count], self._order[count:]
        items = [item for key in chosen for item in self.groups[key]]
        policy = self.algorithm.policy
        transcripts = [item.messages for item in items]
        record, turn = policy.conversations(transcripts, self._generator)
        mask = record.pop("mask")
        reward = torch.zeros(mask.shape, device=mask.device)
        for row, item in enumerate(items):
            for number, value in enumerate(item.rewards):
                reward[row, int((mask[row] & (turn[row] == number)).nonzero()[-1])] = value
        temperatures = torch.ones(len(items), device=mask.device)
        group = torch.tensor([index for index, key in enumerate(chosen) for _ in self.groups[key]], device=mask.device)
        mean = torch.tensor([self.means[item.group] for item in items], device=mask.device)
        extra = {
            **record,
            "temperature": temperatures,
            "truncated": torch.zeros_like(temperatures, dtype=torch.bool),
            "mean_ref": mean,
        }
        source = torch.ones_like(group)
        fields = {"mask": mask, "reward": reward, "unit": turn, "group": group, "source": source}
        rows = with_chosen_tokens(Decisions(reward, **fields, extra=extra))
        self._metrics = {"data/reward": fmean(item.reward for item in items)}
        rows = policy.attach_likelihood(rows, self._generator)
        with torch.no_grad():
            return rows.with_fields(logp_old=score(self.algorithm.reference_policy or policy, rows).logp)

    def state_dict(self) -> dict[str, Any]:
        """Return the rest of the epoch and the generator."""
        return {"order": list(self._order), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._order = [int(key) for key in state["order"]]
        self._generator.set_state(state["generator"])
        return True


def check_lengths(written: list[WrittenConversation], policy: TextPolicy) -> list[WrittenConversation]:
    """Return the conversations of a file; one that exceeds the length of the policy raises a UserError."""
    for item in written:
        policy.check_conversation_fits(item.messages, item.location)
    return written


def conversations(task: TextTask, seeds: Sequence[int]) -> list[list[str]]:
    """Build the conversations (prompt, message, reply, message, ...) of demonstrations of training problems.

    Raises:
        UserError: The task has no demonstrations, or one that fails.
    """
    problems = [task.training_seed(seed) for seed in seeds]
    episodes, reward_runner = [task.reset(problem) for problem in problems], RewardRunner(task.reward_timeout)
    solutions = [episode.demonstration() or [] for episode in episodes]
    if not all(solutions):
        raise UserError(f"Task {task.name} has no demonstrations; pass algorithm.data=FILE.")
    transcripts = [[episode.prompt] for episode in episodes]
    for turn in range(max(map(len, solutions), default=0)):
        for row, solution in enumerate(solutions):
            transcripts[row] += solution[turn : turn + 1]
        active = [row for row, solution in enumerate(solutions) if turn + 1 < len(solution)]
        messages = [solutions[row][turn] for row in active]
        reward_runner.prepare(task, [episodes[row] for row in active], messages)
        for row, message in zip(active, messages, strict=True):
            answer = reward_runner.step(episodes[row], message, problems[row])
            if answer is None:
                raise UserError(f"The solution of {reward_runner.pop_errors()[0]}.")
            transcripts[row].append(answer.reply)
    reward_runner.close()
    return transcripts


class RecipeSource:
    """Rollouts, or a file of demonstrations, pairs or logs, as the recipe requires."""

    whole_episodes: ClassVar[bool] = True
    uses_replay: ClassVar[bool] = False

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source for the recipe."""
        assert isinstance(context.algorithm, TextRecipe)
        return recipe_source(context.sim(), context.algorithm, context.seed)


def recipe_source(sim: VectorSim, algorithm: TextRecipe, seed: int) -> DataSource:
    """Create the source of a recipe.

    Raises:
        UserError: The task is not a text task, or the settings lack the teacher or file that the recipe requires.
    """
    sim = text_sim(sim, algorithm)
    if algorithm.recipe.data != "rollout":
        return TextFileSource(sim, algorithm, seed=seed)
    if algorithm.requires_teacher and algorithm.teacher is None:
        if not algorithm.config.teacher:
            raise UserError(f"Recipe '{algorithm.config.recipe}' requires a teacher; set algorithm.teacher=CHECKPOINT.")
        algorithm.set_teacher(load_policy(algorithm.config.teacher)[0])
    asynchronous = allowed_age(algorithm).in_flight(1) > 1 or algorithm.config.num_workers
    trajectories = (AsyncTextRolloutSource if asynchronous else TextRolloutSource)(sim, algorithm, seed=seed)
    return SFTThenRL(sim, trajectories, seed) if algorithm.config.sft_updates else trajectories


def text_sim(sim: VectorSim, algorithm: Algorithm) -> TextSim:
    """Return `sim` as the simulator of a text task; another simulator raises a UserError."""
    if not isinstance(sim, TextSim):
        raise UserError(
            f"Algorithm '{algorithm.name}' requires a text task, e.g. text/arithmetic, not {sim.spec.task}."
        )
    return sim
