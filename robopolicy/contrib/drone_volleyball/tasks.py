"""Factories of the drills on the native MuJoCo backends."""

from __future__ import annotations

from robopolicy.contrib.drone_volleyball import drills
from robopolicy.sim.backends.mujoco.backend import make_mujoco
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions


def make_bump(options: SimOptions) -> VectorSim:
    """Simulator of `volley/bump`."""
    return make_mujoco(drills.Bump(options.reward), options)


def make_hit(options: SimOptions) -> VectorSim:
    """Simulator of `volley/hit`."""
    return make_mujoco(drills.Hit(options.reward), options)


def make_pass(options: SimOptions) -> VectorSim:
    """Simulator of `volley/pass`."""
    return make_mujoco(drills.Pass(options.reward), options)
