"""Small tasks without a physics engine, for smoke runs, tests and first steps."""

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
            "toy/point_mass",
            _make_point_mass,
            "Accelerate a point mass to a goal in the plane; trains in seconds.",
            _make_point_mass_expert,
            backends=("torch",),
            success="end",
            chunk=(4, 2),
        )
    )
    register_entry(
        TaskEntry(
            "toy/push",
            _make_push,
            "Push a disc to a target with another disc, seen from above; for fast video datasets.",
            _make_push_expert,
            backends=("torch",),
            success="end",
            success_fn=_push_solved,
        )
    )
