"""Shared tests of FPO, FPO++, AWM, AC-Flow and PolicyFlow: initial ratios, stored points, frozen parts, checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matching_tools import NAMES, SPEC, bandit, head, observations, prepared, tuner

from robopolicy.algorithms.common.rollout_batch import minibatches
from robopolicy.errors import UserError
from robopolicy.policies.exploration.sampled import SUPPORTED, SampledPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint

names = pytest.mark.parametrize("name", NAMES)
heads = pytest.mark.parametrize("family", SUPPORTED)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@names
@heads
def test_fresh_rollout_ratios_are_one(name: str, family: str) -> None:
    algorithm = tuner(name, head(family))
    for _ in range(2):  # the second pass uses updated weights
        rollout = bandit(algorithm.policy, 100)
        rows = prepared(algorithm, rollout)
        for batch, _ in minibatches(rows, 33, torch.Generator().manual_seed(0)):
            assert float(((algorithm.logp(batch) - batch.logp).exp() - 1).detach().abs().max()) < 1e-5
        _, info = algorithm.loss(rows)
        assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9)
        assert float(info["clip_fraction"]) == 0.0
        algorithm.update(rollout)


@names
def test_points_are_sampled_once_per_rollout(name: str) -> None:
    algorithm, seen = tuner(name, epochs=3, critic_warmup=0), {}
    original = algorithm.loss

    def spy(rows: Any) -> Any:
        for row in range(len(rows)):  # observations identify rows
            key = tuple(rows.obs["state"][row].flatten().tolist())
            stored = {name: value[row].clone() for name, value in rows.record.items()}
            seen.setdefault(key, []).append(stored | {"logp": rows.logp[row].clone()})
        return original(rows)

    algorithm.loss = spy
    rollout = bandit(algorithm.policy, 100)
    algorithm.update(rollout)
    assert len(seen) == 100
    for records in seen.values():
        assert len(records) == 3
        assert {"noise", "t", "logp"} <= set(records[0])
        assert all(torch.equal(value, records[0][name]) for stored in records for name, value in stored.items())
    first = {key: records[0] for key, records in seen.items()}
    seen.clear()
    algorithm.update(rollout)
    resampled = {"t"} if name == "policyflow" else {"t", "noise"}  # PolicyFlow reuses the sampler's noise
    for part in ("t", "noise"):
        changed = any(not torch.equal(first[key][part], records[0][part]) for key, records in seen.items())
        assert changed == (part in resampled)


@names
def test_loss_consumes_no_random_numbers(name: str) -> None:
    algorithm = tuner(name)
    rows = prepared(algorithm, bandit(algorithm.policy, 40))
    states, losses = [], []
    for _ in range(2):
        losses.append(algorithm.loss(rows)[0].detach())
        states.append((torch.get_rng_state(), algorithm.generator.get_state()))
    assert torch.equal(*losses) and all(torch.equal(*pair) for pair in zip(*states, strict=True))


@names
@heads
def test_an_update_trains_the_head_and_not_the_base(name: str, family: str) -> None:
    algorithm = tuner(name, head(family), critic_warmup=0)
    base, before = weights(algorithm.base), weights(algorithm.policy.head)
    metrics = algorithm.update(bandit(algorithm.policy, 100))
    assert same(algorithm.base, base) and not same(algorithm.policy.head, before)
    assert all(math.isfinite(value) for value in metrics.values())


@names
def test_critic_warmup_does_not_change_the_policy(name: str) -> None:
    algorithm = tuner(name, critic_warmup=1)
    policy, critic = weights(algorithm.policy), weights(algorithm.critic)
    rollout = bandit(algorithm.policy, 100)
    algorithm.update(rollout)
    assert same(algorithm.policy, policy) and not same(algorithm.critic, critic)
    algorithm.update(rollout)
    assert not same(algorithm.policy, policy)


@names
@heads
def test_deployed_policy_survives_a_checkpoint(name: str, family: str, tmp_path: Path) -> None:
    algorithm = tuner(name, head(family), critic_warmup=0)
    algorithm.update(bandit(algorithm.policy, 80))
    deployed, obs = algorithm.inference_policy(), observations(5)
    save_checkpoint(tmp_path / "saved", deployed, task="toy/point_mass", obs_sample=obs)
    loaded, _ = load_policy(tmp_path / "saved")
    chunks = [policy.act(obs, generator=torch.Generator().manual_seed(3)) for policy in (deployed, loaded)]
    assert torch.equal(*chunks)
    assert not any("raw_log_std" in key for key in loaded.state_dict())


@names
@pytest.mark.parametrize("family", ["shortcut", "meanflow", "consistency", "gaussian"])
def test_unsupported_policies_are_refused_with_a_reason(name: str, family: str) -> None:
    policy = GaussianPolicy(GaussianConfig(), SPEC) if family == "gaussian" else head(family)
    reason = "learned steps of length 1/K" if family in ("shortcut", "meanflow") else "of the kind flow or diffusion"
    with pytest.raises(UserError, match=reason):
        tuner(name, policy)


def test_only_executed_steps_are_scored() -> None:
    policy = SampledPolicy(head(), num_mc_samples=5)
    obs = observations(6)
    record = policy.complete(obs, policy.sample(obs).record, torch.Generator().manual_seed(0))
    losses = policy.losses(obs, record)
    assert losses.shape == (6, 5, SPEC.action_horizon)
    features = policy.head.encode(obs)
    for pair in range(5):
        whole = policy.head.matching_loss(features, record["data"], record["noise"][:, pair], record["t"][:, pair])
        torch.testing.assert_close(losses[:, pair], whole[:, : SPEC.action_horizon])
    torch.testing.assert_close(policy.decisions(obs, record).logp, -losses.mean(-1))


def test_exploration_noise_is_executed_and_scored() -> None:
    obs = observations(2000)
    plain, noisy = (SampledPolicy(head(), num_mc_samples=1, exploration_std=std) for std in (0.0, 0.05))
    samples = [policy.sample(obs, generator=torch.Generator().manual_seed(0)) for policy in (plain, noisy)]
    assert torch.equal(samples[0].chunk, plain.act(obs, deterministic=True, generator=torch.Generator().manual_seed(0)))
    moved = samples[1].record["data"] - samples[0].record["data"]
    inside = samples[1].record["data"].abs() < 1
    assert float(moved[inside].std()) == pytest.approx(0.05, rel=0.1)
    assert float(samples[1].record["data"].abs().max()) <= 1.0
    chunk = noisy.head.action_normalizer.denormalize(samples[1].record["data"])
    torch.testing.assert_close(chunk, samples[1].chunk)


@heads
def test_stratified_times_cover_every_quantile_of_the_time_distribution(family: str) -> None:
    policy = head(family)
    many = policy.sample_times(20_000, torch.Generator().manual_seed(1)).sort().values
    sampled = SampledPolicy(policy, num_mc_samples=4, stratified=True)
    obs = observations(500)
    t = sampled.complete(obs, sampled.sample(obs).record, torch.Generator().manual_seed(0))["t"]
    quarters = many[[4999, 9999, 14999]]
    for row in t.sort(1).values.T[:3].unsqueeze(0):
        for index, edge in enumerate(quarters):
            assert float((row[index] <= edge + 0.02).float().mean()) > 0.99
    assert float((t.flatten().sort().values - many[::10]).abs().max()) < 0.05


def test_running_statistics_update_between_rollouts_only() -> None:
    algorithm = tuner("fpo", head(normalization="running"))
    rollout = bandit(algorithm.policy, 100)
    rows = prepared(algorithm, rollout)
    assert torch.equal(algorithm.logp(rows), rows.logp)
    count = algorithm.policy.head.encoder.normalizer.count
    assert float(count) == 0
    algorithm.update(rollout)
    assert float(count) == 100
