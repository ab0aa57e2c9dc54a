"""Where the fine-tuners compete: tasks, their demonstrations and the budget of environment steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchTask:
    """One part of the table."""

    name: str  # short name, also of the cells
    task: str  # registered task
    demonstrations: int  # episodes of the scripted expert, or of the half-trained policy
    env_steps: int  # of every fine-tuner
    horizon: int  # actions of a chunk, all of which are played
    cloning_updates: int = 2000  # of the base policy
    evaluated: int = 100  # episodes of each evaluation while training, of which there are ten
    steps_per_update: int = 8  # environment steps for every critic step of the replay learners
    num_envs: int = 64  # environments of the learners from rollouts and groups
    rollout: int = 32  # control steps of each of them per rollout: half an episode or more, or all is early successes
    source_steps: int = 0  # train SAC for so long and take its episodes; 0 takes those of the scripted expert

    @property
    def utd(self) -> float:
        """Critic steps of the replay learners per decision."""
        return self.horizon / self.steps_per_update

    @property
    def chunk(self) -> tuple[str, ...]:
        """Settings of a new policy."""
        return (f"chunk.horizon={self.horizon}", f"chunk.action_horizon={self.horizon}")


TASKS = {
    task.name: task
    for task in (
        BenchTask("lift", "manipulation/lift", 6, 60_000, 4, steps_per_update=4),
        BenchTask("pick_place", "manipulation/pick_place", 15, 60_000, 4, rollout=64),
        BenchTask("drawer", "manipulation/drawer", 10, 30_000, 4, rollout=64),
        BenchTask("pick-place", "metaworld/pick-place-v3", 10, 30_000, 4, evaluated=20, num_envs=16, rollout=128),
        BenchTask("push", "metaworld/push-v3", 6, 50_000, 4, evaluated=20, num_envs=16, rollout=128),
        BenchTask("hopper", "locomotion/hopper", 40, 30_000, 1, evaluated=20, source_steps=60_000),
        BenchTask(
            "cube",
            "ogbench/cube-single-v0",
            300,
            30_000,
            5,
            cloning_updates=12_000,
            evaluated=20,
            num_envs=32,
            rollout=100,
        ),
    )
}
