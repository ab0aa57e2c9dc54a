"""Tests of HDPO: gradient against finite differences, known inventory optima, chunks, and refused input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chunk_bandit import flow
from scenario_learners import learner, small_policy
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from robopolicy.contrib.known_dynamics.cart_pole import CartPole
from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics
from robopolicy.contrib.known_dynamics.hdpo import HDPO, HDPOConfig, hdpo_loss
from robopolicy.contrib.known_dynamics.inventory import LOST_SALES, NEWSVENDOR, BaseStock, Store
from robopolicy.contrib.known_dynamics.scenarios import Scenarios, unroll
from robopolicy.errors import UserError


def scenarios(dynamics: DifferentiableDynamics, first: int, count: int) -> Scenarios:
    return Scenarios(dynamics, *dynamics.scenarios(range(first, first + count)))


def trained(algorithm: HDPO, pool: Scenarios, updates: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        rows = torch.randint(len(pool.state), (batch,), generator=generator)
        algorithm.update(Scenarios(pool.dynamics, pool.state[rows], pool.noise[rows]))


def cost(found: Scenarios, decide) -> float:
    """Mean cost per day."""
    with torch.no_grad():
        return -float(unroll(found, decide).reward.mean())


@pytest.mark.parametrize("dynamics", [Store(LOST_SALES), CartPole()], ids=["hinges", "cart_pole"])
def test_hdpo_gradient_equals_finite_differences(dynamics: DifferentiableDynamics) -> None:
    torch.manual_seed(0)
    key, entry = next(iter(dynamics.spec.observation.items()))
    network = nn.Sequential(nn.Linear(entry.shape[0], 8), nn.Tanh(), nn.Linear(8, 1)).double()
    found = scenarios(dynamics, 0, 3)
    found = Scenarios(dynamics, found.state.double(), found.noise[:, :20].double())
    parameters = list(network.parameters())

    def loss() -> torch.Tensor:
        return hdpo_loss(unroll(found, lambda obs: 5 + network(obs[key])).reward)[0]

    gradient = parameters_to_vector(list(torch.autograd.grad(loss(), parameters)))
    start = parameters_to_vector(parameters).detach()
    direction = torch.randn(len(start), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = []
    for step in (1e-6, -1e-6):
        vector_to_parameters(start + step * direction, parameters)
        values.append(float(loss().detach()))
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(gradient @ direction), rel=1e-5)


def test_hdpo_finds_the_base_stock_optimum_of_the_newsvendor() -> None:
    dynamics = Store(NEWSVENDOR)
    algorithm = learner("hdpo", dynamics.spec)
    trained(algorithm, scenarios(dynamics, 1000, 1024), 120, 128)
    held_out = scenarios(dynamics, 0, 512)
    best = cost(held_out, lambda obs: BaseStock(NEWSVENDOR).order(obs["inventory"]))
    assert cost(held_out, algorithm.policy.mode) < 1.02 * best


@pytest.mark.slow
def test_hdpo_beats_every_base_stock_with_a_lead_time_and_lost_sales() -> None:
    dynamics = Store(LOST_SALES)
    algorithm = learner("hdpo", dynamics.spec)
    trained(algorithm, scenarios(dynamics, 1000, 2048), 150, 128)
    held_out = scenarios(dynamics, 0, 512)
    levels = np.arange(20.0, 36.0)
    heuristics = [
        cost(held_out, lambda obs, level=level: BaseStock(LOST_SALES, level).order(obs["inventory"]))
        for level in levels
    ]
    assert 20.0 < levels[int(np.argmin(heuristics))] < 35.0  # the best level is inside the search range
    assert cost(held_out, algorithm.policy.mode) < 0.96 * min(heuristics)


def test_unroll_executes_chunks_and_histories_as_in_deployment() -> None:
    dynamics = Store(NEWSVENDOR)
    seen: list[torch.Tensor] = []

    def decide(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(obs["inventory"])
        return torch.tensor([1.0, 2.0, 30.0]).view(1, 3, 1)

    found = scenarios(dynamics, 0, 1)
    rollout = unroll(found, decide, action_horizon=3, obs_horizon=2)
    assert len(seen) == 17 and seen[0].shape == (1, 2, 1)
    assert torch.equal(seen[0][:, 0], seen[0][:, 1]) and torch.equal(seen[0][:, 0], found.state)
    assert rollout.action[0, :4, 0].tolist() == [1.0, 2.0, 20.0, 1.0]  # orders are clipped at the bound


def test_an_update_clips_its_gradient_and_updates_the_normalizer() -> None:
    dynamics = Store(NEWSVENDOR)
    algorithm = learner("hdpo", dynamics.spec, grad_clip=1e-9)
    found = scenarios(dynamics, 0, 4)
    metrics = algorithm.update(found)
    assert metrics["actor/grad_norm"] > 1e-3
    norm = sum(float(p.grad.square().sum()) for p in algorithm.policy.parameters() if p.grad is not None) ** 0.5
    assert norm == pytest.approx(1e-9, rel=1e-2)
    assert float(algorithm.policy.encoder.normalizer.count) == 4 * 50
    assert metrics["actor/return"] == pytest.approx(-50 * metrics["actor/loss"], rel=1e-5)


def test_policies_without_a_bounded_mode_are_refused() -> None:
    with pytest.raises(UserError, match=r"squashed Gaussian.*'flow'"):
        HDPO(HDPOConfig(), flow(), total_updates=1)
    with pytest.raises(UserError, match="scenarios must be at least 0"):
        HDPO(HDPOConfig(scenarios=-1), small_policy(Store(NEWSVENDOR).spec), total_updates=1)


def test_recorded_disturbances_can_be_replayed() -> None:
    class Logged(Store):
        def scenario(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(1), torch.full((50, 1), float(seed % 3))

    rollout = unroll(scenarios(Logged(NEWSVENDOR), 0, 4), lambda obs: torch.zeros(len(obs["inventory"]), 1, 1))
    assert rollout.reward[:, 0].tolist() == [0.0, -9.0, -18.0, 0.0]
