"""A text task as a simulator: a control step is a turn, an action is a message in bytes.

The tools that evaluate, compare and select robot policies therefore work for text policies. Episodes are held-out
problems, or with `held_out=False` training problems (`TextTask.held_out_seed`). A completion without a
valid reward ends its episode as a failure and is reported with the prompt id (`reward_errors`).
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
        """Create `options.num_envs` rows of `task`."""
        if options.cameras or options.point_clouds or options.reward != "sparse":
            raise UserError(f"{task.name} is a text task: it has no cameras or point clouds, and only sparse reward.")
        self.task = task
        self._problem = task.held_out_seed if options.held_out else task.training_seed  # of an episode seed
        spec = SimSpec(
            task=task.name,
            observation={KEY: TensorSpec((task.prompt_bytes,))},
            action_low=torch.zeros(task.completion_bytes),
            action_high=torch.full((task.completion_bytes,), 255.0),
            control_dt=1.0,
            max_episode_steps=task.max_turns,
            num_problems=len(task.held_out_problems) or None if options.held_out else None,
        )
        super().__init__(spec, options.num_envs)
        self.reward_runner = RewardRunner(task.reward_timeout)
        self._episodes: list[TextEpisode] = []  # of each row, empty before the first reset
        self._messages: list[list[str]] = [[] for _ in range(self.num_envs)]  # messages of each row, the prompt first

    @property
    def episodes(self) -> list[TextEpisode]:
        """Current episode of each row."""
        return self._episodes

    def reward_errors(self) -> list[RewardError]:
        """Return the completions without a valid reward since the last call."""
        return self.reward_runner.pop_errors()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step every row with its message."""
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
        """Return seeds, steps and messages; episodes are functions of seeds."""
        return super().state_dict() | {"responses": [list(row) for row in self._messages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restart the episodes and repeat their messages."""
        self._messages = [list(row) for row in state["responses"]]
        obs = super().load_state_dict(state)
        self._episodes = [self.task.episode(self._problem(int(seed))) for seed in self._seeds.current]
        for row, episode in enumerate(self._episodes):
            for completion in self._messages[row][1::2]:
                episode.step(completion)
        return obs

    def close(self) -> None:
        """Stop the reward thread and close the task."""
        self.reward_runner.close()
        self.task.close()

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Start the episodes of `seeds`."""
        problems = map(self._problem, seeds)
        started = {row: self.task.reset(problem) for row, problem in zip(rows.tolist(), problems, strict=True)}
        self._episodes = [started.get(row) or self._episodes[row] for row in range(self.num_envs)]
        for row, episode in started.items():
            self._messages[row] = [episode.prompt]

    def observe(self) -> Observation:
        """Return the conversations, truncated to `prompt_bytes`."""
        return {KEY: pack([TURN.join(row) for row in self._messages], self.task.prompt_bytes)}


class DemonstrationExpert:
    """Expert that follows the task's own solution."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return messages `(N, A)` in bytes, empty without a known solution."""
        solutions = [episode.demonstration() for episode in sim.episodes]  # type: ignore[attr-defined]
        texts = [solution[0] if solution else "" for solution in solutions]
        return pack(texts, sim.spec.action_dim)
