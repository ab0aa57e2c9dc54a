"""Tasks of the composition benchmark, and pairs of parents that differ in head, observations, data or training.

Parents are trained until their success no longer rises, and demonstrations are few, so that they succeed in 50 to 90 %
of the episodes: a composition cannot improve on parents that always or never succeed, and gains little where one parent
is far better than the other. The numbers were chosen by the parents' success alone, with a seed that the table does not
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from robopolicy.sim.registry import SimOptions


@dataclass(frozen=True)
class Parent:
    """One of the two policies of a task, cloned unless it has an `experiment`."""

    label: str  # for the table
    head: str  # policy to clone
    keys: tuple[str, ...]  # observations it sees
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the head, as in `robopolicy train`
    demonstrations: int = 20  # episodes of the scripted expert, which the other parent does not see
    updates: int = 2000  # gradient steps
    batch_size: int = 256
    experiment: tuple[str, ...] = ()  # settings of `robopolicy train` that fine-tune the first parent instead


@dataclass(frozen=True)
class PairTask:
    """One part of the table."""

    name: str  # short name, also in cell names
    task: str  # registered task
    horizon: int  # actions of a chunk, all of them executed
    first: Parent
    second: Parent
    cameras: tuple[str, ...] = ()  # cameras of the observations
    image_size: int = 48  # pixels, square
    mode: tuple[str, int] | None = None  # observation key and element that sort demonstrations by their first value

    @property
    def parents(self) -> tuple[Parent, Parent]:
        """Both parents."""
        return self.first, self.second

    def options(self, num_envs: int) -> SimOptions:
        """Simulator options with the observations of both parents."""
        return SimOptions(num_envs=num_envs, cameras=self.cameras, image_size=self.image_size)


DIFFUSION = {"steps": 10, "sampler": "ddim"}
FLOW = {"steps": 10}
STATE = ("state",)
REINFLOW = (
    "experiment=fine_tune",
    "sim.num_envs=64",
    "algorithm.num_steps=8",
    "algorithm.epochs=10",
    "budget.updates=0",
    "budget.env_steps=60000",
    "evaluation.episodes=0",
)

TASKS = {
    task.name: task
    for task in (
        PairTask(
            "lift",
            "manipulation/lift",
            horizon=4,
            first=Parent("diffusion, state", "diffusion", STATE, DIFFUSION, demonstrations=6),
            second=Parent(
                "flow, image", "flow", ("image.front",), FLOW, demonstrations=50, updates=5000, batch_size=64
            ),
            cameras=("front",),
        ),
        PairTask(
            "pick_place",
            "manipulation/pick_place",
            horizon=4,
            first=Parent("diffusion, state", "diffusion", STATE, DIFFUSION, updates=6000),
            second=Parent("flow, state", "flow", STATE, FLOW),
        ),
        PairTask(
            "push",
            "metaworld/push-v3",
            horizon=4,
            first=Parent("diffusion, left goals", "diffusion", STATE, DIFFUSION, demonstrations=10, updates=6000),
            second=Parent("flow, right goals", "flow", STATE, FLOW, demonstrations=10),
            mode=("state", 36),  # x of the goal
        ),
        PairTask(
            "lift_tuned",
            "manipulation/lift",
            horizon=4,
            first=Parent("flow", "flow", STATE, FLOW, demonstrations=6),
            second=Parent("flow, ReinFlow", "flow", STATE, FLOW, experiment=REINFLOW),
        ),
    )
}
