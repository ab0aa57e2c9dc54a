"""Tasks of the fine-tuning benchmark, with their demonstrations and the budget of environment steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BenchTask:
    """One part of the table."""

    name: str  # short name, also in cell names
    task: str  # registered task
    demonstrations: Mapping[str, int]  # kind of head -> episodes of the scripted expert, or of the half-trained policy;
    # their clones succeed in about half of the episodes (benchmarks/finetune/bases.py adapts the number to the seed)
    horizon: int = 4  # actions of a chunk, all of them executed
    env_steps: int = 450_000  # of on-policy and group methods
    replay_steps: int = 60_000  # of learners from replay, which then cost about as much
    published_steps: int = 30_000  # of learners from replay at their published update ratios
    evaluated: int = 100  # episodes of each of the ten evaluations during training
    steps_per_update: int = 4  # environment steps per critic step of learners from replay
    num_envs: int = 64  # environments of on-policy and group methods
    rollout: int = 32  # control steps per environment and rollout; below half an episode, data has only early successes
    source_steps: int = 0  # steps of the SAC run that provides the episodes; 0: scripted expert

    @property
    def measure(self) -> str:
        """Outcome of an episode; tasks without an expert have no success."""
        return "return" if self.source_steps else "success"

    @property
    def chunk(self) -> tuple[str, ...]:
        """Settings of a new policy."""
        return (f"chunk.horizon={self.horizon}", f"chunk.action_horizon={self.horizon}")


TASKS = {
    task.name: task
    for task in (
        BenchTask("lift", "manipulation/lift", {"flow": 5, "diffusion": 5}),
        BenchTask("drawer", "manipulation/drawer", {"flow": 10, "diffusion": 6}, rollout=64),
        BenchTask(
            "pick_place",
            "manipulation/pick_place",
            {"flow": 15, "diffusion": 14},
            env_steps=1_500_000,
            replay_steps=120_000,
            published_steps=60_000,
            rollout=64,
        ),
        BenchTask("pick-place", "metaworld/pick-place-v3", {"flow": 10, "diffusion": 6}, evaluated=50, rollout=128),
        BenchTask(
            "peg-insert", "metaworld/peg-insert-side-v3", {"flow": 10, "diffusion": 8}, evaluated=50, rollout=128
        ),
        BenchTask(
            "hopper", "locomotion/hopper", {"flow": 40, "diffusion": 40}, horizon=1, evaluated=50, source_steps=60_000
        ),
    )
}
MAIN = ("lift", "drawer", "pick_place")  # tasks of most methods
