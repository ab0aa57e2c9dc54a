"""Tasks of the fine-tuning benchmark, with their demonstrations and the budget of environment steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchTask:
    """One part of the table."""

    name: str  # short name, also in cell names
    task: str  # registered task
    demonstrations: int  # episodes of the scripted expert, or of the half-trained policy
    env_steps: int  # of every fine-tuner
    horizon: int  # actions of a chunk, all of them executed
    cloning_updates: int = 2000  # of the base policy
    evaluated: int = 100  # episodes of each of the ten evaluations during training
    steps_per_update: int = 8  # environment steps per critic step of off-policy learners
    num_envs: int = 64  # environments of on-policy and group methods
    rollout: int = 32  # control steps per environment and rollout; below half an episode, data has only early successes
    source_steps: int = 0  # steps of the SAC run that provides the episodes; 0: scripted expert

    @property
    def measure(self) -> str:
        """Outcome of an episode; tasks without an expert have no success."""
        return "return" if self.source_steps else "success"

    @property
    def utd(self) -> float:
        """Critic steps of off-policy learners per decision."""
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
            "ogbench_collect/cube-single-v0",
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
