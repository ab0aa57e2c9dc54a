"""Where text algorithms get their experience: solutions of a task or a file, or attempts of the policy itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.samplers.attempts import groups_of
from robopolicy.samplers.curricula import SAMPLERS
from robopolicy.samplers.protocols import Attempt, Pool, Sampler, Task, degenerate, rewards_of
from robopolicy.samplers.topologies import Flat
from robopolicy.text.guard import Guard
from robopolicy.text.learner import TextRecipe, TextSFT
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.text.world import TextWorld

SHOWN = 5  # faults written out per update


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

    def __init__(self, sim: TextSim, *, batch_size: int, problems: int, seed: int) -> None:
        super().__init__(sim, seed)
        self.batch_size, self.problems = batch_size, problems
        self._next = 0
        self._known: dict[int, list[str]] = {}

    def next(self, algorithm: TextSFT) -> list[list[str]]:
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
    """Attempts of the policy at prompts that a sampler chooses."""

    def __init__(self, sim: TextSim, algorithm: TextRecipe, *, seed: int) -> None:
        super().__init__(sim, seed)
        config, plain = algorithm.config, algorithm.recipe.rollout
        self.prompts = config.prompts
        heat, size = float(plain.get("temperature", 1.0)), algorithm.group_size
        keys = range(seed, seed + config.problems)
        pool = Pool([Task(key, payload=key, temperature=heat, budget=size) for key in keys])
        self.sampler: Sampler = SAMPLERS[plain.get("sampler", {"name": "uniform"})["name"]]()
        self.sampler.begin(pool, seed)
        self.topology = Flat()
        self.world = TextWorld(algorithm.policy, self.task, torch.Generator().manual_seed(seed))

    def next(self, algorithm: TextRecipe) -> Decisions:
        """Tell the sampler what became of the last batch, and play the next one."""
        if algorithm.feedback:
            self.sampler.observe(**algorithm.feedback)
        self.world.version = algorithm.updates
        attempts = self.topology.rollout(self.world, self.sampler.propose(self.prompts))
        self._measure(attempts)
        judged = [attempt for attempt in attempts if not attempt.metrics["fault"]]
        if not judged:
            raise UserError(f"No attempt of this update could be judged; mend the reward of {self.task.name}.")
        return self.world.batch(judged)

    def _measure(self, attempts: Sequence[Attempt]) -> None:
        """Means over the attempts, and the faults on the terminal."""
        names = ("length", "turns", "success", "cut", "fault")
        self._metrics = {
            f"rollout/{name}": sum(attempt.metrics[name] for attempt in attempts) / len(attempts) for name in names
        }
        groups = groups_of(attempts)
        self._metrics["rollout/return"] = sum(attempt.reward for attempt in attempts) / len(attempts)
        dead = sum(degenerate(rewards_of(group)) for group in groups)
        self._metrics["rollout/degenerate"] = dead / len(groups)
        self._metrics["rollout/tokens"] = float(self.world.generated)
        self.env_steps += int(sum(attempt.metrics["turns"] for attempt in attempts))
        faults = self.world.guard.take()
        for fault in faults[:SHOWN]:
            print(f"{self.task.name}, {fault}", file=sys.stderr)
        if len(faults) > SHOWN:
            print(f"{self.task.name}: and {len(faults) - SHOWN} more", file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        """Sampler, choices and counts."""
        return {
            "sampler": self.sampler.state_dict(),
            "generator": self.world.generator.get_state(),
            "generated": self.world.generated,
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state["sampler"])
        self.world.generator.set_state(state["generator"])
        self.world.generated, self.env_steps = int(state["generated"]), int(state["env_steps"])
        return True

    def close(self) -> None:
        """End the threads of the rewards."""
        super().close()
        self.world.guard.close()


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


def text_source(sim: Any, algorithm: TextSFT | TextRecipe, seed: int) -> DemonstrationSource | AttemptSource:
    """The source of a text algorithm.

    Raises:
        UserError: The task is no text.
    """
    if not isinstance(sim, TextSim):
        raise UserError(f"Algorithm '{algorithm.name}' needs a text task, e.g. text/arithmetic, not {sim.spec.task}.")
    if isinstance(algorithm, TextRecipe):
        return AttemptSource(sim, algorithm, seed=seed)
    size = {"batch_size": algorithm.config.batch_size, "problems": algorithm.config.problems}
    return DemonstrationSource(sim, **size, seed=seed)
