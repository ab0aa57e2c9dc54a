"""Tiny tasks that need no physics engine: smoke runs, tests, first steps."""

from __future__ import annotations

from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import Expert, SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry


def _make_point_mass(options: SimOptions) -> VectorSim:
    from tasks.toy.point_mass import PointMassSim

    return PointMassSim(options)


def _make_point_mass_expert() -> Expert:
    from tasks.toy.point_mass import PointMassExpert

    return PointMassExpert()


def register() -> None:
    """Register the toy family."""
    register_entry(
        TaskEntry(
            name="toy/point_mass",
            make=_make_point_mass,
            description="Accelerate a point mass to a goal in the plane; seconds to train.",
            make_expert=_make_point_mass_expert,
            backends=("torch",),
        )
    )
