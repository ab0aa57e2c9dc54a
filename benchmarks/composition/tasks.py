"""Pairs of parents that differ on purpose: in head, in what they see, and always in the demonstrations they had.

Data and training are kept so short that parents succeed in about a third to three quarters of the episodes: between
parents that always or never succeed nothing can be gained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from robopolicy.sim.registry import SimOptions


@dataclass(frozen=True)
class Parent:
    """One of the two policies of a task; the first has the first half of the demonstrations, the second the other."""

    label: str  # for the table
    head: str  # policy to clone
    keys: tuple[str, ...]  # observations it sees
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the head, as in `robopolicy train`
    updates: int = 2000  # gradient steps
    batch_size: int = 256


@dataclass(frozen=True)
class ComposeTask:
    """One part of the table."""

    name: str  # short name, also of the cells
    task: str  # registered task
    demonstrations: int  # episodes of the scripted expert for each parent
    horizon: int  # actions of a chunk, all of which are played
    first: Parent
    second: Parent
    cameras: tuple[str, ...] = ()  # whose images some parent sees
    point_clouds: tuple[str, ...] = ()  # cameras whose point clouds some parent sees
    image_size: int = 48  # pixels, square, of both
    points: int = 96  # of each cloud

    @property
    def parents(self) -> tuple[Parent, Parent]:
        """Both."""
        return self.first, self.second

    def options(self, num_envs: int) -> SimOptions:
        """How to build the simulator that both parents fit."""
        return SimOptions(
            num_envs=num_envs,
            cameras=self.cameras,
            image_size=self.image_size,
            point_clouds=self.point_clouds,
            points=self.points,
        )


STATE = ("state",)
DIFFUSION = {"steps": 10, "sampler": "ddim"}
FLOW = {"steps": 10}

TASKS = {
    task.name: task
    for task in (
        ComposeTask(
            "lift",
            "manipulation/lift",
            demonstrations=5,
            horizon=4,
            first=Parent("diffusion, state", "diffusion", STATE, DIFFUSION),
            second=Parent("flow, state", "flow", STATE, FLOW),
        ),
    )
}
