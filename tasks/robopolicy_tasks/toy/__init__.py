"""Tiny tasks that need no physics engine: smoke runs, tests, first steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robopolicy.sim.registry import Expert, SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from torch import Tensor

    from robopolicy.sim.contract import Observation, VectorSim


def _make_point_mass(options: SimOptions) -> VectorSim:
    from robopolicy_tasks.toy.point_mass import PointMassSim

    return PointMassSim(options)


def _make_point_mass_expert() -> Expert:
    from robopolicy_tasks.toy.point_mass import PointMassExpert

    return PointMassExpert()


def _make_push(options: SimOptions) -> VectorSim:
    from robopolicy_tasks.toy.push import PushSim

    return PushSim(options)


def _make_push_expert() -> Expert:
    from robopolicy_tasks.toy.push import PushExpert

    return PushExpert()


def _push_solved(obs: Observation) -> Tensor:
    from robopolicy_tasks.toy.push import solved

    return solved(obs["block"])


def register() -> None:
    """Register the toy family without importing torch."""
    register_entry(
        TaskEntry(
            name="toy/point_mass",
            make=_make_point_mass,
            description="Accelerate a point mass to a goal in the plane; seconds to train.",
            make_expert=_make_point_mass_expert,
            backends=("torch",),
        )
    )
    register_entry(
        TaskEntry(
            name="toy/push",
            make=_make_push,
            description="Push a disc to a mark with another disc, seen from above; for fast video datasets.",
            make_expert=_make_push_expert,
            backends=("torch",),
            success_fn=_push_solved,
        )
    )
