"""Tests of PPO and ReinFlow: initial ratios, gradients, frozen parts, normalisation and learning on the point mass."""

import copy
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch

from robopolicy.algorithms.common import rollout_batch
from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.common.rollout_batch import (
    RewardNormalizer,
    RolloutBatch,
    compute_advantages,
    explained_variance,
    minibatches,
    normalize,
)
from robopolicy.algorithms.gorl import EpisodeReturns
from robopolicy.algorithms.ppo import PPO, PPOConfig, ppo_loss
from robopolicy.algorithms.reinflow import ReinFlow, ReinFlowConfig, reinflow_loss
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

FLAT = {"min": [-2.0] * 6, "max": [2.0] * 6}
ACTION = {"min": [-1.0, -1.0], "max": [1.0, 1.0]}


def ppo(seed: int = 0, **overrides: Any) -> PPO:
    torch.manual_seed(seed)
    spec = PolicySpec({"state": (6,)}, 2)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), spec)
    settings: dict[str, Any] = {"num_steps": 16, "epochs": 2, "batch_size": 64} | overrides
    return PPO(PPOConfig(**settings), policy, total_updates=100)


def reinflow(seed: int = 0, **overrides: Any) -> ReinFlow:
    torch.manual_seed(seed)
    spec = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2)
    policy = FlowPolicy(FlowConfig(hidden=(64, 64)), spec)
    policy.fit_normalizer({"state": FLAT, "action": ACTION})
    settings: dict[str, Any] = {"num_steps": 8, "batch_size": 64} | overrides
    return ReinFlow(ReinFlowConfig(**settings), policy, total_updates=20)


def test_reset_episodes_clears_running_returns() -> None:
    algorithm, returns = ppo(), EpisodeReturns()
    algorithm.reward_normalizer.running = returns.running = torch.ones(2)
    returns.discard()
    algorithm.reset_episodes()
    returns.reset_episodes()
    assert (algorithm.reward_normalizer.running, returns.running, returns.fresh) == (None, None, None)


@pytest.mark.parametrize("value", [0.1, -3.3, 57.7])
def test_equal_advantages_are_normalised_to_zero(value: float) -> None:
    assert not normalize(torch.full((1000,), value)).any()  # the float32 mean differs from the value


def sampler_for(algorithm: Algorithm, num_envs: int = 16, reward: str = "shaped") -> RolloutSampler:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward=reward))
    spec = algorithm.policy.spec
    chunked = ChunkedSim(
        sim, action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon, gamma=algorithm.step_discount
    )
    return RolloutSampler(chunked, decisions=algorithm.config.num_steps, seed=0)  # type: ignore[attr-defined]


def rows_of(algorithm: Any, rollout: Rollout) -> Any:
    return compute_advantages(rollout, algorithm.critic, gamma=0.99, gae_lambda=0.95)


def snapshot(algorithm: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in algorithm.policy.state_dict().items()}


@pytest.mark.parametrize("make", [ppo, reinflow])
def test_first_minibatch_ratios_are_one(make: Any) -> None:
    algorithm = make()
    sampler = sampler_for(algorithm)
    for _ in range(2):  # the second pass uses running statistics and updated weights
        rollout = sampler.collect(algorithm.act)
        rows = rows_of(algorithm, rollout)
        for batch, _ in minibatches(rows, 50, torch.Generator().manual_seed(0)):
            logp = algorithm.policy.decisions(batch.obs, batch.record).logp
            assert (torch.exp(logp - batch.logp) - 1).abs().max() < 1e-5
        batch, _ = next(minibatches(rows, 64, torch.Generator().manual_seed(1)))
        if isinstance(algorithm, PPO):
            _, info = ppo_loss(algorithm.policy, batch, algorithm.estimator)
        else:
            _, info = reinflow_loss(algorithm.policy, batch, algorithm.estimator, algorithm.config)
        assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9)
        assert float(info["clip_fraction"]) == 0.0
        algorithm.update(rollout)


@pytest.mark.parametrize("make", [ppo, reinflow])
def test_the_first_gradient_is_the_policy_gradient(make: Any) -> None:
    algorithm = make(entropy_coef=0.0, **({} if make is ppo else {"logp_clamp": None}))
    rows = rows_of(algorithm, sampler_for(algorithm).collect(algorithm.act))
    if isinstance(algorithm, PPO):
        loss, _ = ppo_loss(algorithm.policy, rows, algorithm.estimator)
        dims = 1
    else:
        loss, _ = reinflow_loss(algorithm.policy, rows, algorithm.estimator, algorithm.config)
        dims = 4 * 4 * 2  # the log-density is a mean over chain steps and chunk dimensions
    advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
    plain = -(advantage * algorithm.policy.decisions(rows.obs, rows.record).logp.sum(1)).mean() / dims
    parameters = list(algorithm.policy.parameters())
    tools.assert_close(tools.gradient(loss, parameters), tools.gradient(plain, parameters))


def test_reinflow_update_trains_flow_and_noise_networks_but_not_the_base() -> None:
    algorithm = reinflow(bc_coef=0.1)
    base = {key: value.clone() for key, value in algorithm.base.state_dict().items()}
    before = snapshot(algorithm)
    sampler = sampler_for(algorithm)
    algorithm.update(sampler.collect(algorithm.act))
    assert all(torch.equal(base[key], value) for key, value in algorithm.base.state_dict().items())
    changed = {key for key, value in algorithm.policy.state_dict().items() if not torch.equal(before[key], value)}
    assert any(key.startswith("head.") for key in changed)
    assert any(not key.startswith("head.") for key in changed)


def test_critic_warmup_does_not_change_the_policy() -> None:
    algorithm = reinflow(critic_warmup=1)
    sampler = sampler_for(algorithm)
    before = snapshot(algorithm)
    critic = copy.deepcopy(algorithm.critic.state_dict())
    algorithm.update(sampler.collect(algorithm.act))
    assert all(torch.equal(before[key], value) for key, value in algorithm.policy.state_dict().items())
    assert any(not torch.equal(critic[key], value) for key, value in algorithm.critic.state_dict().items())
    algorithm.update(sampler.collect(algorithm.act))
    assert any(not torch.equal(before[key], value) for key, value in algorithm.policy.state_dict().items())


def test_normalizer_statistics_update_after_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = reinflow()
    statistics = lambda: [b.clone() for net in (algorithm.policy, algorithm.critic) for b in net.buffers()]  # noqa: E731
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    before, original, seen = statistics(), algorithm.loss, []

    def spy(rows: Any) -> Any:
        seen.append(statistics())
        return original(rows)

    monkeypatch.setattr(algorithm, "loss", spy)
    algorithm.update(sampler_for(algorithm).collect(algorithm.act))
    assert seen and all(same(before, during) for during in seen)
    assert not same(before, statistics())


def test_the_deployed_flow_has_no_noise_network() -> None:
    algorithm = reinflow()
    deployed = algorithm.inference_policy()
    assert isinstance(deployed, FlowPolicy)
    assert not [key for key in deployed.state_dict() if "noise" in key]


@pytest.mark.parametrize(("unit", "discount"), [("step", 0.9**4), ("chunk", 0.9)])
def test_reward_normalizer_merges_rollouts_and_discounts_like_the_advantages(unit: str, discount: float) -> None:
    def observe(scale: RewardNormalizer, part: slice) -> None:
        empty: dict[str, torch.Tensor] = {}
        ended, earned = done[part], reward[part]
        rollout = Rollout(empty, empty, earned, earned, steps[part], ended, ended & False, empty, empty)
        scale.update(rollout, 0.9, unit)

    torch.manual_seed(0)
    reward, done = torch.rand(40, 3), torch.rand(40, 3) < 0.1
    steps = torch.where(done, 2, 4)  # an episode ends after 2 of 4 chunk steps
    whole, parts = RewardNormalizer(), RewardNormalizer()
    observe(whole, slice(None))
    observe(parts, slice(13))
    observe(parts, slice(13, None))
    assert float(whole.factor) == pytest.approx(float(parts.factor), rel=1e-9)
    running, seen = torch.zeros(3), []
    for row, end in zip(reward, done, strict=True):
        running = running * discount + row
        seen.append(running)
        running = torch.where(end, 0.0, running)
    assert float(whole.factor) == pytest.approx(1 / float(torch.stack(seen).double().std(unbiased=False)), rel=1e-6)


def test_reward_scale_is_one_until_returns_vary() -> None:
    scale, reward = RewardNormalizer(), torch.tensor([3.0, -50.0])
    assert scale.factor == 1.0
    torch.testing.assert_close(scale(reward), reward)
    scale.moments.observe(torch.full((4,), 7.0))
    assert scale.factor == 1.0
    scale.moments.observe(torch.tensor([9.0, 9.0, 9.0, 9.0]))  # four 7s and four 9s: standard deviation 1
    assert float(scale.factor) == pytest.approx(1.0)
    scale.moments.observe(torch.tensor([4.0, 12.0]))  # variance (8 * 1 + 2 * 16) / 10 = 4
    assert float(scale.factor) == pytest.approx(0.5)
    torch.testing.assert_close(scale(reward), torch.tensor([1.5, -10.0]))  # clipped to 10


def test_advantages_are_normalised_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.tensor([1.0, 2.0, 6.0])
    expected = normalize(torch.cat([own, own]))[:3]
    monkeypatch.setattr(rollout_batch, "world_size", lambda: 2)
    monkeypatch.setattr(rollout_batch, "all_reduce_mean", lambda mean: mean)  # the other process has the same rows
    torch.testing.assert_close(normalize(own), expected)


def test_a_single_row_has_a_finite_explained_variance() -> None:
    one = torch.ones(1)
    # No variance is left unexplained.
    assert explained_variance(RolloutBatch({}, {}, one[:, None], one, 3 * one, one)) == 1.0


@pytest.mark.slow
def test_ppo_learns_the_point_mass() -> None:
    algorithm = ppo(num_steps=40, epochs=6, batch_size=512, lr=1e-3)
    sampler = sampler_for(algorithm, num_envs=64)
    for _ in range(30):
        algorithm.update(sampler.collect(algorithm.act))
    sampler.episode_stats()
    sampler.collect(algorithm.act)
    assert sampler.episode_stats()["rollout/success"] > 0.9
