"""Factories of the tasks with known dynamics and of their experts."""

from __future__ import annotations

from robopolicy.contrib.known_dynamics.cart_pole import CartPole
from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics, DynamicsSim
from robopolicy.contrib.known_dynamics.inventory import LOST_SALES, NEWSVENDOR, BaseStock, Store
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import Expert, SimOptions


def _simulator(dynamics: DifferentiableDynamics, options: SimOptions) -> VectorSim:
    options.reject_cameras(dynamics.spec.task)
    return DynamicsSim(dynamics, options.num_envs)


def make_newsvendor(options: SimOptions) -> VectorSim:
    """Simulator of `differentiable/newsvendor`."""
    return _simulator(Store(NEWSVENDOR), options)


def newsvendor_expert() -> Expert:
    """Expert of `differentiable/newsvendor`."""
    return BaseStock(NEWSVENDOR)


def make_lost_sales(options: SimOptions) -> VectorSim:
    """Simulator of `differentiable/lost_sales`."""
    return _simulator(Store(LOST_SALES), options)


def lost_sales_expert() -> Expert:
    """Expert of `differentiable/lost_sales`."""
    return BaseStock(LOST_SALES)


def make_cart_pole(options: SimOptions) -> VectorSim:
    """Simulator of `differentiable/cart_pole`."""
    return _simulator(CartPole(), options)


def make_reservoir(options: SimOptions) -> VectorSim:
    """Simulator of `differentiable/reservoir`."""
    from robopolicy.contrib.known_dynamics.reservoir import Reservoir

    return _simulator(Reservoir(), options)


def reservoir_expert() -> Expert:
    """Expert of `differentiable/reservoir`."""
    from robopolicy.contrib.known_dynamics.reservoir import HoldLevel

    return HoldLevel()
