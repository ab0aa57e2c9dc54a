"""Tasks of the composition benchmark, and pairs of parents that differ in head, observations and data.

Data and training are short, so that parents fail often: a composition cannot improve on parents that always or never
succeed. It gains little where one parent is far better than the other, so the training lengths make them equally good.
The lengths were chosen by the parents' success alone, with a seed that the table does not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from robopolicy.sim.registry import SimOptions


@dataclass(frozen=True)
class Parent:
    """One of the two policies of a task."""

    label: str  # for the table
    head: str  # policy to clone
    keys: tuple[str, ...]  # observations it sees
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the head, as in `robopolicy train`
    updates: int = 2000  # gradient steps
    batch_size: int = 256


@dataclass(frozen=True)
class PairTask:
    """One part of the table. Each parent is trained on its own half of the demonstrations."""

    name: str  # short name, also in cell names
    task: str  # registered task
    demonstrations: int  # episodes of the scripted expert for each parent
    horizon: int  # actions of a chunk, all of them executed
    first: Parent
    second: Parent
    cameras: tuple[str, ...] = ()  # cameras of the observations
    image_size: int = 48  # pixels, square
    reward: str = "sparse"  # of the returns in the table
    measure: str = "success"  # measure of search and comparison; `return` where success is too rare
    mode: tuple[str, int] | None = None  # observation key and element that sort demonstrations by their first value

    @property
    def parents(self) -> tuple[Parent, Parent]:
        """Both parents."""
        return self.first, self.second

    def options(self, num_envs: int) -> SimOptions:
        """Simulator options with the observations of both parents."""
        return SimOptions(num_envs=num_envs, cameras=self.cameras, image_size=self.image_size, reward=self.reward)


DIFFUSION = {"steps": 10, "sampler": "ddim"}
FLOW = {"steps": 10}
WIDE = {"hidden": (512, 512, 512)}
STATE = ("state",)

TASKS = {
    task.name: task
    for task in (
        PairTask(
            "lift",
            "manipulation/lift",
            demonstrations=25,
            horizon=4,
            first=Parent("diffusion, state", "diffusion", STATE, DIFFUSION, updates=500),
            second=Parent("flow, image", "flow", ("image.front",), FLOW, updates=4000, batch_size=64),
            cameras=("front",),
        ),
        PairTask(
            "pick_place",
            "manipulation/pick_place",
            demonstrations=20,
            horizon=4,
            first=Parent("diffusion, state", "diffusion", STATE, DIFFUSION, updates=6000),
            second=Parent("flow, state", "flow", STATE, FLOW),
        ),
        PairTask(
            "push",
            "metaworld/push-v3",
            demonstrations=10,
            horizon=4,
            first=Parent("diffusion, left goals", "diffusion", STATE, DIFFUSION, updates=6000),
            second=Parent("flow, right goals", "flow", STATE, FLOW),
            mode=("state", 36),  # x of the goal
        ),
        PairTask(
            "push_t",
            "push_t/near",
            demonstrations=400,
            horizon=16,
            first=Parent("diffusion, state", "diffusion", ("agent", "keypoints"), DIFFUSION | WIDE, updates=20_000),
            second=Parent("flow, state", "flow", ("agent", "keypoints"), FLOW | WIDE, updates=12_000),
            reward="shaped",  # a return is then the largest coverage
            measure="return",
        ),
    )
}
