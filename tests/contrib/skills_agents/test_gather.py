"""Tests of the gather task: rows that share a world, and a policy with more agents than in training."""

from __future__ import annotations

import torch
from sim_rules import check_refuses_actions_that_are_no_numbers
from torch.testing import assert_close

from robopolicy.contrib.skills_agents.gather import MAX_AGENTS, OTHERS, GatherExpert, GatherSim, assign_worlds
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.spec import PolicySpec


def open_sim(name: str = "toy/gather", num_envs: int = 9, reward: str = "sparse") -> GatherSim:
    sim = make_sim(name, SimOptions(num_envs=num_envs, reward=reward))
    assert isinstance(sim, GatherSim)
    return sim


def success_of(act, name: str, num_envs: int = 60) -> float:
    """Fraction of rows that meet in their first episode."""
    sim = open_sim(name, num_envs)
    obs = sim.reset(0)
    met, ended = torch.zeros(num_envs, dtype=torch.bool), torch.zeros(num_envs, dtype=torch.bool)
    for _ in range(sim.spec.max_episode_steps):
        step = sim.step(act(sim, obs))
        met |= step.terminated & ~ended
        ended |= step.done
        obs = step.obs
    return float(met.float().mean())


def test_the_tasks_meet_the_simulator_contract():
    for name in ("toy/gather", "toy/gather_more"):
        assert check_simulator(open_sim(name, 7, "shaped")) == []


def test_world_sizes_alternate_without_single_agents():
    assert assign_worlds(9, (2, 3, 4)).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert assign_worlds(10, (2, 3, 4)).tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert assign_worlds(3, (2, 3, 4)).tolist() == [0, 0, 0]
    assert assign_worlds(7, (6,)).tolist() == [0] * 5 + [1] * 2
    assert assign_worlds(1, (2,)).tolist() == [0]


def test_agents_observe_relative_positions_within_their_world_only():
    sim = open_sim()
    others = sim.reset(3)[OTHERS]
    assert others.shape == (9, MAX_AGENTS - 1, 4)
    assert (others != 0).any(-1).sum(1).tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert_close(others[0, 0, :2], -others[1, 0, :2])
    position = sim._state[:, :2]
    assert_close(others[2, 0, :2], position[3] - position[2])


def test_a_world_shares_its_reward_and_termination():
    sim = open_sim(reward="shaped")
    obs = sim.reset(0)
    for _ in range(60):
        step = sim.step(GatherExpert()(sim, obs))
        for world in range(3):
            rows = sim.world == world
            assert float(step.reward[rows].max() - step.reward[rows].min()) < 1e-6
            assert len(step.terminated[rows].unique()) == len(step.truncated[rows].unique()) == 1
        obs = step.obs


def test_the_expert_succeeds_and_a_single_agent_fails():
    assert success_of(GatherExpert(), "toy/gather") == success_of(GatherExpert(), "toy/gather_more") == 1.0
    assert success_of(GatherExpert(), "toy/gather", 1) == 0.0
    assert get_task("gather").make_expert is not None


def test_it_resumes_exactly():
    sim, again = open_sim(), open_sim()
    obs = sim.reset(0)
    for _ in range(5):
        obs = sim.step(GatherExpert()(sim, obs)).obs
    assert_close(again.load_state_dict(sim.state_dict()), obs)
    action = torch.full((9, 2), 0.2)
    assert_close(again.step(action).obs, sim.step(action).obs)


def test_a_policy_imitating_four_agent_worlds_succeeds_with_six_agents():
    torch.manual_seed(0)
    spec = PolicySpec(
        observation={"velocity": (2,), OTHERS: (MAX_AGENTS - 1, 4)}, obs_horizon=1, action_dim=2, horizon=1
    )
    encoders = {"entities": {"width": 32, "layers": 0, "features": 32}}
    config = GaussianConfig(hidden=(64,), normalization="identity", encoders=encoders)
    policy = GaussianPolicy(config, spec)
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    sim = open_sim(num_envs=180)
    obs, generator = sim.reset(0), torch.Generator().manual_seed(0)
    for _ in range(160):
        label = GatherExpert()(sim, obs)
        seen = {key: value[:, None] for key, value in obs.items()}
        loss = policy.imitation_loss(seen, label[:, None])[0].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        obs = sim.step(label + 0.5 * torch.randn(label.shape, generator=generator)).obs

    @torch.no_grad()
    def act(sim, obs):
        return policy.act({key: value[:, None] for key, value in obs.items()}, deterministic=True)[:, 0]

    assert success_of(act, "toy/gather") > 0.9 and success_of(act, "toy/gather_more") > 0.9


def test_a_nan_action_is_refused() -> None:
    check_refuses_actions_that_are_no_numbers("gather")
