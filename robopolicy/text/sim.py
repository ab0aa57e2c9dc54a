"""A text task on the simulator contract: a control step is a turn, an action is a message in bytes.

So a text policy is evaluated, compared and chosen by the code that does it for robots. A completion that cannot be
judged ends its episode as a failure and is reported with the prompt id (`faults`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.seeds import SeedCounter
from robopolicy.text.guard import Fault, Guard
from robopolicy.text.task import Episode, TextTask
from robopolicy.text.wire import KEY, TURN, check_fits, pack, unpack


class TextSim(VectorSim):
    """N episodes of a text task."""

    def __init__(self, task: TextTask, options: SimOptions) -> None:
        """Play `task` in `options.num_envs` rows."""
        if options.cameras or options.point_clouds or options.reward != "sparse":
            raise UserError(f"Task {task.name} is text: it has no cameras, and its reward is what it verifies.")
        self.task = task
        self.spec = SimSpec(
            task=task.name,
            observation={KEY: TensorSpec((task.prompt_bytes,))},
            action_low=torch.zeros(task.completion_bytes),
            action_high=torch.full((task.completion_bytes,), 255.0),
            control_dt=1.0,
            max_episode_steps=task.max_turns,
        )
        self.num_envs = options.num_envs
        self.device = torch.device("cpu")
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)
        self.guard = Guard(task.seconds)
        self._seeds = SeedCounter(self.num_envs)
        self._episodes: list[Episode] = []
        self._said: list[list[str]] = [[] for _ in range(self.num_envs)]  # messages of each row, the world's first

    @property
    def episode_seed(self) -> Tensor:  # type: ignore[override]
        """(N,) seeds of the episodes now running."""
        return torch.from_numpy(self._seeds.current.copy())

    @property
    def episodes(self) -> list[Episode]:
        """The problems now running."""
        return self._episodes

    def faults(self) -> list[Fault]:
        """Completions since the last call that could not be judged."""
        return self.guard.take()

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every row anew."""
        self._seeds.reset(seed)
        seeds = self._seeds.take(np.arange(self.num_envs))
        self._episodes = [self._begin(row, seed) for row, seed in enumerate(seeds)]
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Hand every row its message."""
        moving = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active.cpu()
        rows = moving.nonzero().flatten().tolist()
        reward = torch.zeros(self.num_envs)
        terminated, truncated, success = (torch.zeros(self.num_envs, dtype=torch.bool) for _ in range(3))
        said = unpack(action[rows])
        self.guard.prepare(self.task, [self._episodes[row] for row in rows], said)
        for row, completion in zip(rows, said, strict=True):
            turn = self.guard.step(self._episodes[row], completion, int(self._seeds.current[row]))
            self.episode_step[row] += 1
            if turn is None:
                terminated[row] = True
                continue
            reward[row], success[row], terminated[row] = turn.reward, turn.success, turn.done
            truncated[row] = not turn.done and int(self.episode_step[row]) >= self.task.max_turns
            self._said[row] += [completion, turn.reply] if not turn.done else [completion]
        final = self._observe()
        self.episode_step = self.episode_step.clone()
        ended = (terminated | truncated).nonzero().flatten()
        if len(ended):
            for row, seed in zip(ended.tolist(), self._seeds.take(ended.numpy()), strict=True):
                self._episodes[row] = self._begin(row, seed)
        return Step(self._observe(), reward, terminated, truncated, final, {"success": success})

    def state_dict(self) -> dict[str, Any]:
        """Seeds and what was said; problems are functions of both."""
        return {"seeds": self._seeds.state_dict(), "said": [list(row) for row in self._said]}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Begin the problems again and say the same."""
        self._seeds.load_state_dict(state["seeds"])
        self._said = [list(row) for row in state["said"]]
        self._episodes = [self.task.episode(int(seed)) for seed in self._seeds.current]
        for row, episode in enumerate(self._episodes):
            for completion in self._said[row][1::2]:
                episode.step(completion)
        self.episode_step = torch.tensor([len(row) // 2 for row in self._said])
        return self._observe()

    def close(self) -> None:
        """End the thread of the rewards, and what the task holds."""
        self.guard.close()
        self.task.close()

    def _begin(self, row: int, seed: int) -> Episode:
        episode = self.task.episode(seed)
        check_fits(episode.prompt, self.task.prompt_bytes, f"Prompt {seed} of {self.task.name}")
        self._said[row], self.episode_step[row] = [episode.prompt], 0
        return episode

    def _observe(self) -> Observation:
        return {KEY: pack([TURN.join(row) for row in self._said], self.task.prompt_bytes)}
