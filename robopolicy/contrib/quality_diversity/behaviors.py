"""Table of behavior descriptors by task, with the features of a control step.

Packages add rows through the entry points `robopolicy.behaviors`: name of the task -> "module:attribute" of a
`TaskBehavior`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.contrib.quality_diversity.behavior import BehaviorDescriptor
from robopolicy.contrib.quality_diversity.feet import PlanarFeet
from robopolicy.plugins import Registry
from robopolicy.sim.backends.mujoco.task import Array, BatchState
from robopolicy.sim.contract import Step


@dataclass(frozen=True)
class TaskBehavior:
    """Behavior of a task; its features come from exactly one of two functions."""

    descriptor: BehaviorDescriptor
    of_step: Callable[[Step], Tensor] | None = None  # features (N, D) of a step, on any backend
    of_state: Callable[[BatchState], Array] | None = None  # of the state after a step, on native MuJoCo only

    def __post_init__(self) -> None:
        if (self.of_step is None) == (self.of_state is None):
            raise ValueError("Set exactly one of `of_step` and `of_state`.")


def hand(angles: Tensor) -> Tensor:
    """Position `(..., 2)` [m] of the end of an arm, 1 m long with equal links, for joint angles `(..., L)`."""
    direction = angles.cumsum(-1)
    return torch.stack([direction.cos().mean(-1), direction.sin().mean(-1)], -1)


def position_behavior(axes: tuple[str, str], reach: float, of_step: Callable[[Step], Tensor]) -> TaskBehavior:
    """Final position in the plane, up to `reach` [m] from the origin; `of_step` returns x and y `(N, 2)`."""
    return TaskBehavior(BehaviorDescriptor(axes, (-reach, -reach), (reach, reach)), of_step=of_step)


def root_behavior(reach: float) -> TaskBehavior:
    """Final position in the plane of a MuJoCo robot, up to `reach` [m] from the origin."""
    descriptor = BehaviorDescriptor(("x [m]", "y [m]"), (-reach, -reach), (reach, reach))
    return TaskBehavior(descriptor, of_state=lambda state: state.qpos[:, :2])


def feet_behavior(*feet: str) -> TaskBehavior:
    """Fraction of time that each of the `feet`, geoms of a planar MuJoCo robot, is on the ground."""
    names = tuple(f"{foot} on the ground [share of time]" for foot in feet)
    descriptor = BehaviorDescriptor(names, [0.0] * len(names), [1.0] * len(names), "mean")
    return TaskBehavior(descriptor, of_state=lambda state: PlanarFeet(state.model, feet).touching(state.qpos))


BEHAVIORS: Registry[TaskBehavior] = Registry(
    "behaviors",
    {
        "locomotion/ant": root_behavior(30.0),
        "locomotion/half_cheetah": feet_behavior("bfoot", "ffoot"),
        "locomotion/hopper": feet_behavior("foot_geom"),
        "locomotion/swimmer": root_behavior(10.0),
        "locomotion/walker2d": feet_behavior("foot_geom", "foot_left_geom"),
        "toy/arm": position_behavior(  # the state ends with the time
            ("hand x [m]", "hand y [m]"), 1.0, lambda step: hand(step.final_obs["state"][:, :-1].contiguous())
        ),
        "toy/point_mass": position_behavior(("x [m]", "y [m]"), 2.0, lambda step: step.final_obs["state"][:, :2]),
    },
)
