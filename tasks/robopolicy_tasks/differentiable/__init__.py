"""Tasks of known, differentiable dynamics: ordinary simulators that `algorithm=hdpo` can also differentiate through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from robopolicy.sim.registry import Expert, SimOptions, TaskEntry
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim
    from robopolicy.sim.dynamics import Dynamics


def _maker(make: Callable[[], Dynamics]) -> Callable[[SimOptions], VectorSim]:
    def make_sim(options: SimOptions) -> VectorSim:
        from robopolicy.sim.dynamics import DynamicsSim

        dynamics = make()
        options.refuse_cameras(dynamics.spec.task)
        return DynamicsSim(dynamics, options.num_envs)

    return make_sim


def _newsvendor() -> Dynamics:
    from robopolicy_tasks.differentiable.inventory import NEWSVENDOR, Store

    return Store(NEWSVENDOR)


def _newsvendor_expert() -> Expert:
    from robopolicy_tasks.differentiable.inventory import NEWSVENDOR, BaseStock

    return BaseStock(NEWSVENDOR)


def _lost_sales() -> Dynamics:
    from robopolicy_tasks.differentiable.inventory import LOST_SALES, Store

    return Store(LOST_SALES)


def _lost_sales_expert() -> Expert:
    from robopolicy_tasks.differentiable.inventory import LOST_SALES, BaseStock

    return BaseStock(LOST_SALES)


def _cart_pole() -> Dynamics:
    from robopolicy_tasks.differentiable.cart_pole import CartPole

    return CartPole()


def _reservoir() -> Dynamics:
    from robopolicy_tasks.differentiable.reservoir import Reservoir

    return Reservoir()


def _full_reservoir() -> Expert:
    from robopolicy_tasks.differentiable.reservoir import HoldLevel

    return HoldLevel()


def register() -> None:
    """Register the family."""
    entries = [
        TaskEntry(
            name="differentiable/newsvendor",
            make=_maker(_newsvendor),
            description="Order stock for tomorrow's demand; unmet demand waits. The optimum is known.",
            make_expert=_newsvendor_expert,
            backends=("torch",),
        ),
        TaskEntry(
            name="differentiable/lost_sales",
            make=_maker(_lost_sales),
            description="Order stock that takes four days to come; unmet demand is lost. Base stock is not optimal.",
            make_expert=_lost_sales_expert,
            backends=("torch",),
        ),
        TaskEntry(
            name="differentiable/cart_pole",
            make=_maker(_cart_pole),
            description="Swing up a pole on a cart and balance it.",
            backends=("torch",),
        ),
        TaskEntry(
            name="differentiable/reservoir",
            make=_maker(_reservoir),
            description="Set the levels of two reservoirs for a year of uncertain inflow; a solver runs the turbines.",
            make_expert=_full_reservoir,
            backends=("torch",),
            requires="planning",
            module="clarabel",
        ),
    ]
    for entry in entries:
        register_entry(entry)
