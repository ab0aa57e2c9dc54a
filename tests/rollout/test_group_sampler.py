"""Tests of the group sampler: one start per group, no rows after an episode ends, exact resume."""

import copy
from typing import Any

import pytest
import torch

from robopolicy.data.batches import GroupRollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.groups import GroupSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import SimSpec
from robopolicy.sim.registry import SimOptions, make_sim


def group_sampler(num_envs: int = 12, group_size: int = 4, action_horizon: int = 3, seed: int = 100) -> GroupSampler:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped"))
    return GroupSampler(ChunkedSim(sim, action_horizon=action_horizon, obs_horizon=2), group_size=group_size, seed=seed)


def towards_goal(obs: dict[str, torch.Tensor], *, generator: Any = None) -> Sample:
    """Act with a noisy controller, so that some episodes of a group end early and others do not."""
    state = obs["state"][:, -1]
    error = 3 * (state[:, 4:] - state[:, :2]) - 1.5 * state[:, 2:4]
    chunk = error[:, None].expand(-1, 4, -1) + 0.8 * torch.randn(len(state), 4, 2, generator=generator)
    return Sample(chunk, {"state": state}, torch.zeros(len(state), 1))


def collect(sampler: GroupSampler) -> GroupRollout:
    return sampler.collect(towards_goal)


def test_members_of_a_group_share_a_start_and_groups_differ() -> None:
    sampler = group_sampler()
    starts = []
    for _ in range(2):
        rollout = collect(sampler)
        assert rollout.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        first = rollout.obs["state"][0].view(3, 4, 2, 6)
        assert torch.equal(first, first[:, :1].expand_as(first))
        starts += [tuple(row) for row in first[:, 0, 0].tolist()]
        second = rollout.obs["state"][1].view(3, 4, 2, 6)
        assert not torch.equal(second, second[:, :1].expand_as(second))  # exploration separates them
    assert len(set(starts)) == 6
    seed = make_sim("toy/point_mass", SimOptions(num_envs=1)).reset(101)["state"][0].tolist()
    assert starts[1] == pytest.approx(seed)  # group i runs episode seed + i


def test_every_episode_is_recorded_once_and_completely() -> None:
    rollout = collect(group_sampler())
    done = rollout.terminated | rollout.truncated
    assert done.sum(0).tolist() == [1] * 12
    for n in range(12):
        end = int(done[:, n].nonzero())
        assert rollout.valid[:, n].tolist() == [t <= end for t in range(len(done))]
        assert not bool(rollout.reward[end + 1 :, n].any()) and not bool(rollout.steps[end + 1 :, n].any())
    assert bool(rollout.terminated.any()) and not bool(rollout.valid.all())
    torch.testing.assert_close(rollout.returns, rollout.reward.sum(0))
    assert len(rollout.final_obs["state"]) == int((rollout.truncated & ~rollout.terminated).sum())


def test_an_episode_equals_a_single_environment_run() -> None:
    rollout = collect(group_sampler())
    for n in (2, 9):
        alone = make_sim("toy/point_mass", SimOptions(num_envs=1, reward="shaped"))
        sim = ChunkedSim(alone, action_horizon=3, obs_horizon=2)
        obs, total = sim.reset(100 + n // 4), 0.0
        generator = torch.Generator().manual_seed(100)
        for t in range(int(rollout.valid[:, n].sum())):
            torch.testing.assert_close(obs["state"][0], rollout.obs["state"][t, n])
            batch = {"state": rollout.obs["state"][t]}
            step = sim.step(towards_goal(batch, generator=generator).chunk[n : n + 1])
            obs, total = step.obs, total + float(step.reward)
        assert total == pytest.approx(float(rollout.returns[n]), rel=1e-5)


def test_steps_and_statistics_count_recorded_episodes_only() -> None:
    sampler = group_sampler()
    rollout = collect(sampler)
    assert sampler.env_steps == int(rollout.steps.sum())
    stats = sampler.episode_stats()
    assert stats["rollout/episodes"] == 12
    assert stats["rollout/return"] == pytest.approx(float(rollout.returns.mean()), rel=1e-5)
    assert stats["rollout/success"] == pytest.approx(float(rollout.terminated.any(0).float().mean()))


def test_a_resumed_sampler_collects_the_same_groups() -> None:
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), PolicySpec({"state": (6,)}, 2, 3, 3, 2))
    straight = group_sampler()
    straight.collect(policy.sample)
    state = copy.deepcopy(straight.state_dict())
    expected = straight.collect(policy.sample)
    resumed = group_sampler(seed=0)
    resumed.load_state_dict(state)
    again = resumed.collect(policy.sample)
    assert torch.equal(again.reward, expected.reward) and torch.equal(again.obs["state"], expected.obs["state"])
    assert resumed.env_steps == straight.env_steps


def test_invalid_groups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="12 is not a multiple of group_size 5"):
        group_sampler(group_size=5)
    with pytest.raises(UserError, match="at least 2 episodes"):
        group_sampler(group_size=1)
    sim = make_sim("toy/point_mass", SimOptions(num_envs=4))
    sim.spec = SimSpec(**(vars(sim.spec) | {"seeded_episodes": False}))
    with pytest.raises(UserError, match="cannot start several episodes from one state"):
        GroupSampler(ChunkedSim(sim), group_size=2)
