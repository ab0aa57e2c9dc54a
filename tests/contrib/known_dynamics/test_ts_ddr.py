"""Tests of TS-DDR: plan and step duals against finite differences, limits, and costs of trained targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scenario_learners import learner
from torch import Tensor

from robopolicy.contrib.known_dynamics.linear import Array, LinearDynamics, LinearSystem
from robopolicy.contrib.known_dynamics.scenarios import Plans, Scenarios, unroll
from robopolicy.sim.contract import SimSpec, TensorSpec

pytest.importorskip("clarabel")

from robopolicy.contrib.known_dynamics.reservoir import MONTHS, Reservoir

DT, STEPS = 0.5, 4


class Slider(LinearDynamics):
    """A mass on a line under wind, pushed with at most 1 N, with its goal at 1 m."""

    def __init__(self, penalty: float = 20.0) -> None:
        self.spec = SimSpec(
            task="test/slider",
            observation={"state": TensorSpec((2,)), "disturbance": TensorSpec((2,)), "clock": TensorSpec((1,))},
            action_low=-torch.full((2,), 2.0),
            action_high=torch.full((2,), 2.0),
            control_dt=DT,
            max_episode_steps=STEPS,
        )
        super().__init__(
            LinearSystem(
                a=np.array([[1.0, DT], [0.0, 1.0]]),
                b=np.array([[DT**2 / 2], [DT]]),
                low=np.full(2, -50.0),
                high=np.full(2, 50.0),
                control_low=-np.ones(1),
                control_high=np.ones(1),
                control_cost=np.full((1, 1), 0.1),
                control_price=np.zeros(1),
                state_cost=np.diag([1.0, 0.2]),
                goal=np.array([1.0, 0.0]),
                fixed=0.0,
                penalty=penalty,
            )
        )

    def inflow(self, seed: int) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        return rng.normal(size=2), 0.1 * rng.normal(size=(STEPS + 1, 2))


def double(dynamics: LinearDynamics, count: int) -> tuple[Tensor, Tensor]:
    state, noise = dynamics.scenarios(range(count))
    return state.double(), noise.double()


def slopes(function, at: Tensor, step: float = 1e-4) -> Tensor:
    """Central differences of a scalar function in every coordinate of `at`."""
    flat = []
    for index in range(at.numel()):
        move = torch.zeros(at.numel(), dtype=at.dtype)
        move[index] = step
        flat.append((function(at + move.view_as(at)) - function(at - move.view_as(at))) / (2 * step))
    return torch.stack(flat).view_as(at)


def test_plan_duals_equal_the_cost_gradient_also_at_binding_limits() -> None:
    dynamics = Slider()
    state, noise = double(dynamics, 2)
    targets = torch.tensor([[0.3, 0.1], [0.6, 0.4], [9.0, 0.2], [0.9, 0.0]], dtype=torch.float64).repeat(2, 1, 1)
    targets.requires_grad_()
    dynamics.plan(state, targets, noise).sum().backward()
    measured = slopes(lambda moved: dynamics.plan(state, moved, noise).sum(), targets.detach())
    torch.testing.assert_close(targets.grad, measured, atol=1e-4, rtol=1e-4)
    assert float(targets.grad.abs().max()) == pytest.approx(20.0, abs=1e-4)  # the penalty for an unreachable target


def test_step_gradients_include_the_effect_on_later_steps() -> None:
    dynamics = Slider(penalty=0.5)
    state, noise = double(dynamics, 1)
    targets = torch.tensor([[[0.35, 0.1], [0.6, 0.4], [0.8, 0.2], [0.9, 0.0]]], dtype=torch.float64)

    def total(moved: Tensor) -> Tensor:
        current, reward = state, torch.zeros((), dtype=torch.float64)
        for t in range(STEPS):
            outcome = dynamics.step(current, moved[:, t], noise[:, t])
            current, reward = outcome.state, reward + outcome.reward.sum()
        return reward

    targets.requires_grad_()
    total(targets).backward()
    measured = slopes(lambda moved: total(moved).detach(), targets.detach())
    torch.testing.assert_close(targets.grad, measured, atol=1e-3, rtol=1e-3)
    assert float(targets.grad[:, 0].abs().max()) > 1e-3


def test_plan_cost_of_met_targets_equals_the_rollout_cost() -> None:
    dynamics = Reservoir()
    state, noise = double(dynamics, 3)
    hold = state[:, None, :2].expand(-1, MONTHS, -1)
    rollout = unroll(Scenarios(dynamics, state, noise), lambda obs: obs["state"])
    torch.testing.assert_close(dynamics.plan(state, hold, noise), -rollout.reward.sum(1), atol=1e-4, rtol=1e-5)


def test_planned_states_are_the_targets_and_future_disturbances_stay_hidden() -> None:
    dynamics = Reservoir()
    state, noise = dynamics.scenarios([3])
    seen: list[dict[str, Tensor]] = []

    def decide(obs: dict[str, Tensor]) -> Tensor:
        seen.append(obs)
        return torch.tensor([[[40.0, 20.0]]])

    unroll(Scenarios(dynamics, state, noise), decide, step=dynamics.step_to_target)
    assert torch.equal(seen[0]["state"][:, 0], state[:, :2]) and seen[5]["state"].flatten().tolist() == [40.0, 20.0]
    assert torch.equal(seen[5]["disturbance"][:, 0], noise[:, 4])  # the disturbance of the coming step
    assert seen[6]["clock"].item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["ts_ddr", "hdpo"])
def test_trained_cost_lies_between_the_hindsight_bound_and_holding_the_level(name: str) -> None:
    dynamics = Reservoir()
    algorithm = learner(name, dynamics.spec, lr=3e-3)
    pool, generator = dynamics.scenarios(range(1000, 1256)), torch.Generator().manual_seed(0)
    held_out = Plans(dynamics, *dynamics.scenarios(range(64)))

    def cost() -> float:
        with torch.no_grad():
            return -float(unroll(held_out, algorithm.policy.mode).reward.sum(1).mean())

    untrained = cost()
    for _ in range(80 if name == "ts_ddr" else 30):
        rows = torch.randint(256, (16,), generator=generator)
        algorithm.update(Plans(dynamics, pool[0][rows], pool[1][rows]))
    cost_of_holding = -float(unroll(held_out, lambda obs: obs["state"]).reward.sum(1).mean())
    free = Reservoir()
    free.set_system(replace(free.system, penalty=1e-6))  # missed targets cost nothing: the bound by hindsight
    bound = float(
        free.plan(held_out.state.double(), torch.zeros(64, MONTHS, 2).double(), held_out.noise.double()).mean()
    )
    assert bound < cost() < min(0.55 * cost_of_holding, 0.5 * untrained)
