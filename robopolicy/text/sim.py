"""A text task on the simulator contract: a control step is a turn, an action is a message in bytes.

So a text policy is evaluated, compared and chosen by the code that does it for robots. A completion that cannot be
judged ends its episode as a failure and is reported with the prompt id (`reward_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import TorchVectorEnv
from robopolicy.text.reward_runner import RewardError, RewardRunner
from robopolicy.text.task import KEY, TURN, TextEpisode, TextTask, pack, unpack


class TextSim(TorchVectorEnv):
    """N episodes of a text task."""

    def __init__(self, task: TextTask, options: SimOptions) -> None:
        """Play `task` in `options.num_envs` rows."""
        if options.cameras or options.point_clouds or options.reward != "sparse":
            raise UserError(f"Task {task.name} is text: it has no cameras, and its reward is what it verifies.")
        self.task = task
        spec = SimSpec(
            task=task.name,
            observation={KEY: TensorSpec((task.prompt_bytes,))},
            action_low=torch.zeros(task.completion_bytes),
            action_high=torch.full((task.completion_bytes,), 255.0),
            control_dt=1.0,
            max_episode_steps=task.max_turns,
        )
        super().__init__(spec, options.num_envs)
        self.reward_runner = RewardRunner(task.reward_timeout)
        self._episodes: list[TextEpisode] = []  # of each row, none before the first reset
        self._messages: list[list[str]] = [[] for _ in range(self.num_envs)]  # messages of each row, the world's first

    @property
    def episodes(self) -> list[TextEpisode]:
        """The problems now running."""
        return self._episodes

    def reward_errors(self) -> list[RewardError]:
        """Completions since the last call that could not be judged."""
        return self.reward_runner.pop_errors()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Hand every row its message."""
        active = self.active_rows(active)
        rows = active.nonzero().flatten().tolist()
        self.episode_step = self.episode_step + active
        reward = torch.zeros(self.num_envs)
        terminated, truncated, success = (torch.zeros(self.num_envs, dtype=torch.bool) for _ in range(3))
        responses = unpack(action[rows])
        self.reward_runner.prepare(self.task, [self._episodes[row] for row in rows], responses)
        for row, completion in zip(rows, responses, strict=True):
            turn = self.reward_runner.step(self._episodes[row], completion, int(self._seeds.current[row]))
            if turn is None:
                terminated[row] = True
                continue
            reward[row], success[row], terminated[row] = turn.reward, turn.success, turn.done
            truncated[row] = not turn.done and int(self.episode_step[row]) >= self.task.max_turns
            self._messages[row] += [completion, turn.reply] if not turn.done else [completion]
        final = self.observe()
        self.restart(terminated | truncated)
        return Step(self.observe(), reward, terminated, truncated, final, {"success": success})

    def state_dict(self) -> dict[str, Any]:
        """What was said beside seeds and steps; problems are functions of these."""
        return super().state_dict() | {"responses": [list(row) for row in self._messages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Begin the problems again and say the same."""
        self._messages = [list(row) for row in state["responses"]]
        shown = super().load_state_dict(state)
        self._episodes = [self.task.episode(int(seed)) for seed in self._seeds.current]
        for row, episode in enumerate(self._episodes):
            for completion in self._messages[row][1::2]:
                episode.step(completion)
        return shown

    def close(self) -> None:
        """End the thread of the rewards, and what the task holds."""
        self.reward_runner.close()
        self.task.close()

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Pose the problems of `seeds`."""
        started = {row: self.task.reset(seed) for row, seed in zip(rows.tolist(), seeds, strict=True)}
        self._episodes = [started.get(row) or self._episodes[row] for row in range(self.num_envs)]
        for row, episode in started.items():
            self._messages[row] = [episode.prompt]

    def observe(self) -> Observation:
        """What was said, as far as the window of the prompt goes."""
        return {KEY: pack([TURN.join(row) for row in self._messages], self.task.prompt_bytes)}


class DemonstrationExpert:
    """Says what the task's own solution says."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Messages `(N, A)` in bytes; empty where the task knows none."""
        solutions = [episode.demonstration() for episode in sim.episodes]  # type: ignore[attr-defined]
        texts = [solution[0] if solution else "" for solution in solutions]
        return pack(texts, sim.spec.action_dim)
