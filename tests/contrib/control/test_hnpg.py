"""Tests of HNPG: closed-form targets, initial ratios of one, and a lock that needs data to open."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from lock import LockSim, dataset, rows

from robopolicy.algorithms.ppo import PPOConfig
from robopolicy.algorithms.registry import make_algorithm
from robopolicy.contrib.control.hnpg import HNPG, HNPGConfig
from robopolicy.contrib.control.hybrid_rollout import HybridRollout
from robopolicy.contrib.control.hybrid_source import HybridSource
from robopolicy.critics.q import CriticConfig
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.chunk import ChunkedSim

FAST = {"gamma": 0.99, "epochs": 8, "batch_size": 512, "lr": 5e-3, "normalize_reward": False}
HYBRID = {"q": CriticConfig(hidden=(64, 64)), "q_lr": 4e-3, "q_epochs": 6, "offline_batch": 512}


class Learning:
    """An algorithm, a rollout sampler in a lock, and a dataset of the lock."""

    def __init__(
        self,
        length: int,
        hybrid: bool = True,
        seed: int = 0,
        wrong: float = 0.1,
        normalization: str = "identity",
        **overrides: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.length = length
        policy = GaussianPolicy(
            GaussianConfig(normalization=normalization, log_std_init=-0.3), PolicySpec({"state": (length,)}, 1)
        )
        settings = {"num_steps": length, **FAST, **(HYBRID if hybrid else {}), **overrides}
        config: Any = HNPGConfig(**settings) if hybrid else PPOConfig(**settings)
        self.algorithm: Any = make_algorithm("hnpg" if hybrid else "ppo", config, policy, total_updates=50)
        self.sampler = RolloutSampler(ChunkedSim(LockSim(32, length)), decisions=length)
        self.windows = dataset(length, 400, wrong, 0.99, self.generator)

    def batch(self) -> Any:
        rollout = self.sampler.collect(self.algorithm.act)
        if not isinstance(self.algorithm, HNPG):
            return rollout
        index = torch.randint(len(self.windows), (self.algorithm.config.offline_batch,), generator=self.generator)
        return HybridRollout(**vars(rollout), offline=rows(self.windows, index))

    def train(self, updates: int) -> float:
        for _ in range(updates):
            self.algorithm.update(self.batch())
        result = evaluate(self.algorithm.inference_policy(), LockSim(8, self.length), episodes=8)
        return float(result.returns.mean())


def test_lock_simulator_satisfies_the_contract() -> None:
    assert check_simulator(LockSim(3, 4), lambda count: LockSim(count, 4)) == []


def test_bellman_target_is_reward_plus_discounted_q_of_a_sampled_next_chunk() -> None:
    learning = Learning(4)
    algorithm, windows = learning.algorithm, learning.windows
    algorithm.reward_normalizer.update(replace(learning.batch(), reward=5 * torch.rand(4, 32)), 0.99)
    reward = algorithm.reward_normalizer.factor * windows.reward  # in the units of online rewards
    assert 0 < algorithm.reward_normalizer.factor < 0.5
    state = algorithm.generator.get_state()
    target = algorithm.bellman_target(windows)
    algorithm.generator.set_state(state)
    chunk = algorithm.policy.sample(windows.next_obs, generator=algorithm.generator).chunk
    with torch.no_grad():
        after = algorithm.q_target(windows.next_obs, chunk).mean(0)
    torch.testing.assert_close(target, reward + windows.discount * after)
    last = windows.discount == 0
    assert bool(last.any()) and torch.equal(target[last], reward[last])


def test_initial_ratios_are_one_and_dataset_rows_have_zero_mean_advantage() -> None:
    learning = Learning(4, offline_batch=2000, value_samples=30)
    found = learning.algorithm.process_rollout(learning.batch())
    assert len(found) == 32 * 4 + 2000
    _, info = learning.algorithm.loss(found, log_stats=True)
    assert float(info["ratio_max"]) < 1e-5
    offline = found.advantage[128:]
    assert float(offline.mean().abs()) < 4 * float(offline.std()) / 2000**0.5
    assert set(found.record) == {"raw"}


def test_q_fits_online_and_dataset_returns() -> None:
    learning = Learning(3, q_epochs=60)
    algorithm, batch = learning.algorithm, learning.batch()
    chunk, earned = batch.record["chunk"], torch.zeros(3, 32)
    earned[-1] = 2 * chunk[-1, :, 0, 0].clamp(-1, 1)  # not in the dataset
    algorithm.process_rollout(replace(batch, reward=earned))
    last = batch.offline.discount == 0
    obs = {key: value[last] for key, value in batch.offline.obs.items()}
    with torch.no_grad():
        offline = algorithm.q(obs, batch.offline.chunk[last]).mean(0)
        online = algorithm.q({key: value[-1] for key, value in batch.obs.items()}, chunk[-1]).mean(0)
    reward = batch.offline.reward[last]
    assert float(offline[reward > 0].mean() - offline[reward == 0].mean()) > 0.5
    assert float((online - earned[-1]).square().mean() / earned[-1].var()) < 0.4


def test_q_statistics_follow_the_rollouts() -> None:
    learning = Learning(3, normalization="running", q_epochs=1)
    normalizer = learning.algorithm.q.encoder.normalizer
    before = float(normalizer.count)
    learning.algorithm.update(learning.batch())
    assert float(normalizer.count) == before + 3 * 32
    torch.testing.assert_close(normalizer.mean, learning.algorithm.policy.encoder.normalizer.mean)


@pytest.mark.parametrize("windows", [1, 4, 10, 512])
def test_q_trains_on_every_online_decision_for_any_number_of_windows(
    windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning, steps = Learning(3, batch_size=16, offline_batch=windows), list[int]()
    optimizer = learning.algorithm.q_optimizer
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (steps.append(1), step()))
    learning.algorithm.update(learning.batch())
    assert len(steps) == 6 * -(-3 * 32 // 16)


def test_hnpg_solves_a_lock_with_offline_data_that_ppo_never_solves() -> None:
    assert Learning(5, hybrid=False).train(30) < 0.1
    assert Learning(5).train(30) > 0.9


@pytest.mark.slow
def test_hnpg_solves_a_combination_lock_of_length_ten() -> None:
    assert Learning(10, offline_batch=1024).train(50) > 0.9


def test_hnpg_with_random_dataset_rewards_performs_nearly_as_well_as_ppo() -> None:
    learning = Learning(2, offline_batch=64)
    noise = torch.rand(len(learning.windows), generator=learning.generator) * 2 - 1
    learning.windows = replace(learning.windows, reward=noise)
    assert learning.train(20) > Learning(2, hybrid=False).train(20) - 0.1


def test_losses_are_finite_under_autocast_and_propagate_nan() -> None:
    learning = Learning(3, q_epochs=2)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            metrics = learning.algorithm.update(learning.batch())
            assert all(math.isfinite(value) for value in metrics.values())
    batch = learning.batch()
    batch.offline.reward[3] = float("nan")
    assert math.isnan(learning.algorithm.update(batch)["critic/q_loss"])
    learning = Learning(3, q_epochs=2)
    batch = learning.batch()
    batch.reward[1, 2] = float("nan")
    metrics = learning.algorithm.update(batch)
    assert math.isnan(metrics["critic/q_loss"]) and math.isnan(metrics["critic/loss"])


def test_a_restored_source_gives_the_same_windows_and_rollout() -> None:
    learning = Learning(3)
    replay = Replay(100)
    for step in range(40):
        state = {"state": torch.full((1, 3), float(step))}
        flags = torch.zeros(1, dtype=torch.bool)
        replay.add(torch.zeros(1).long(), state, torch.zeros(1, 1), torch.ones(1), flags, flags, state)
    sources = [
        HybridSource(
            ChunkedSim(LockSim(4, 3)),
            torch.device("cpu"),
            replay,
            sample_spec=learning.algorithm.sample_spec,
            decisions=3,
            seed=seed,
        )
        for seed in (0, 5)
    ]
    sources[0].next(learning.algorithm)
    sources[1].load_state_dict(copy.deepcopy(sources[0].state_dict()))
    one, other = (source.next(learning.algorithm) for source in sources)
    assert torch.equal(one.offline.index, other.offline.index) and torch.equal(one.logp, other.logp)


def test_impossible_settings_are_refused() -> None:
    settings: list[dict[str, Any]] = [{"offline_batch": 0}, {"q_epochs": 0}, {"q_lr": 0.0}]
    for setting in settings:
        with pytest.raises(UserError, match=f"{next(iter(setting))} must be"):
            HNPGConfig(**setting)
