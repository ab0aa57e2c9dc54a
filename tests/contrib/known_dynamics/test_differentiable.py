"""Tests of known-dynamics tasks: simulator contract, store steps by hand, reservoir limits, and rendering."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from robopolicy.contrib.known_dynamics.cart_pole import CartPole
from robopolicy.contrib.known_dynamics.inventory import LOST_SALES, NEWSVENDOR, BaseStock, Store
from robopolicy.contrib.known_dynamics.scenarios import Scenarios, unroll
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASKS = ("newsvendor", "lost_sales", "cart_pole", "reservoir")


def make(task: str, num_envs: int):
    if task == "reservoir":
        pytest.importorskip("clarabel")
    return make_sim(f"differentiable/{task}", SimOptions(num_envs=num_envs))


@pytest.mark.parametrize("task", TASKS)
def test_tasks_satisfy_the_simulator_contract(task: str) -> None:
    assert check_simulator(make(task, 3), lambda num_envs: make(task, num_envs)) == []


@pytest.mark.parametrize("task", TASKS)
def test_differentiable_rollout_equals_the_simulator_episode(task: str) -> None:
    sim = make(task, 2)
    span = sim.spec.action_high - sim.spec.action_low
    decide = lambda obs: (sim.spec.action_low + span * torch.sigmoid(obs.sum(-1, keepdim=True) / 50))[:, None]  # noqa: E731
    key = next(iter(sim.spec.observation))
    rollout = unroll(Scenarios(sim.dynamics, *sim.dynamics.scenarios([5, 6])), lambda obs: decide(obs[key][:, -1]))
    seen, total = sim.reset(5), torch.zeros(2)
    for t in range(sim.spec.max_episode_steps):
        assert torch.equal(seen[key], rollout.obs[key].unflatten(0, (2, -1))[:, t, 0])
        step = sim.step(decide(seen[key])[:, 0])
        seen, total = step.obs, total + step.reward
    assert bool(step.truncated.all())
    torch.testing.assert_close(total, rollout.reward.detach().sum(1))


def test_a_store_serves_demand_from_arrived_stock() -> None:
    backlog, lost = Store(NEWSVENDOR), Store(LOST_SALES)
    order, demand = torch.tensor([[3.0]]), torch.tensor([[5.0]])
    day = backlog.step(torch.tensor([[1.0]]), order, demand)
    assert day.state.tolist() == [[-1.0]] and day.reward.tolist() == [-9.0]  # one unit on backlog
    day = backlog.step(torch.tensor([[4.0]]), order, demand)
    assert day.state.tolist() == [[2.0]] and day.reward.tolist() == [-2.0]
    day = lost.step(torch.tensor([[1.0, 2.0, 4.0, 6.0, 8.0]]), order, demand)
    assert day.state.tolist() == [[0.0, 4.0, 6.0, 8.0, 3.0]] and day.reward.tolist() == [-18.0]  # two units are lost


def test_base_stock_cost_equals_the_newsvendor_formula() -> None:
    score = evaluate(ExpertActor(BaseStock(NEWSVENDOR)), make("newsvendor", 32), episodes=200)
    optimum = 10.0 * 1.6 * np.exp(-0.5 * 1.2815516**2) / np.sqrt(2 * np.pi)  # (h + p) std phi(z) = 2.808
    assert -score.summary()["return_mean"] / 50 == pytest.approx(optimum, rel=0.02)


def test_a_hanging_pole_is_stable_and_an_upright_pole_falls() -> None:
    dynamics = CartPole()
    still = torch.zeros(1, 1)
    hanging = torch.tensor([[0.0, np.pi, 0.0, 0.0]])
    assert dynamics.step(hanging, still, still).state.allclose(hanging, atol=1e-5)
    state = torch.tensor([[0.0, 0.1, 0.0, 0.0]])
    assert bool(dynamics.is_success(state))
    for _ in range(20):
        state = dynamics.step(state, still, still).state
    assert float(state[0, 1]) > 1.0 and not bool(dynamics.is_success(state))


def test_the_rendered_pole_matches_its_angle() -> None:
    picture = CartPole().draw(torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, np.pi, 0.0, 0.0]]), 60, 80)
    red = (picture[:, 0] == 217) & (picture[:, 1] == 51)
    assert bool(red[0, 20:25, 39:41].all()) and not bool(red[0, 40:].any())
    assert bool(red[1, 35:40, 39:41].all()) and not bool(red[1, :20].any())


def test_reservoir_levels_stay_within_limits_for_random_targets() -> None:
    sim = make("reservoir", 4)
    sim.reset(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(11):
        step = sim.step(torch.rand(4, 2, generator=generator) * sim.spec.action_high)
        assert bool((step.obs["state"] >= -1e-4).all() and (step.obs["state"] <= sim.spec.action_high + 1e-4).all())
        parts = step.info["reward.operation"] + step.info["reward.missed"]
        torch.testing.assert_close(parts, step.reward)
        assert bool((step.info["reward.operation"] < 1e-6).all() and (step.info["reward.missed"] < 1e-6).all())


def test_the_expert_holds_the_reservoir_levels() -> None:
    sim = make("reservoir", 4)
    start = sim.reset(0)["state"]
    step = sim.step(get_task("reservoir").require_expert()()(sim, {"state": start}))
    torch.testing.assert_close(step.obs["state"], start, atol=1e-3, rtol=0)


def test_cameras_are_refused() -> None:
    with pytest.raises(UserError, match="no cameras"):
        make_sim("differentiable/cart_pole", SimOptions(cameras=("top",)))
