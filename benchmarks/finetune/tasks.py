"""Where the fine-tuners compete: tasks, their demonstrations and the budget of environment steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchTask:
    """One column of the table."""

    name: str  # short name, also of the cells
    task: str  # registered task
    demonstrations: int  # episodes of the scripted expert, or of the half-trained policy
    env_steps: int  # of every fine-tuner
    settings: tuple[str, ...] = ()  # chunk shape and what else all methods share
    cloning_updates: int = 2000  # of the base policy
    source: str = "expert"  # expert | sac (a policy trained by SAC for `source_steps`)
    source_steps: int = 0


TASKS = {
    task.name: task
    for task in (
        BenchTask("lift", "manipulation/lift", 7, 200_000, ("chunk.horizon=4", "chunk.execute=4")),
        BenchTask("pick_place", "manipulation/pick_place", 20, 200_000, ("chunk.horizon=4", "chunk.execute=4")),
        BenchTask(
            "drawer-open",
            "metaworld/drawer-open-v3",
            3,
            100_000,
            ("chunk.horizon=4", "chunk.execute=4"),
        ),
        BenchTask("push", "metaworld/push-v3", 10, 100_000, ("chunk.horizon=4", "chunk.execute=4")),
        BenchTask(
            "hopper",
            "locomotion/hopper",
            40,
            200_000,
            ("chunk.horizon=1", "chunk.execute=1"),
            source="sac",
            source_steps=60_000,
        ),
        BenchTask("cube", "ogbench/cube-single-v0", 40, 100_000, ("chunk.horizon=5", "chunk.execute=5")),
    )
}
