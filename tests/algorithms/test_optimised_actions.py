"""Tests of PA-RL and EXPO: frozen parts, bootstrap and imitation targets, and improvement beyond the data."""

from typing import Any

import pytest
import torch
from chunk_bandit import SPEC, STATISTICS, Known, batch, first_actions, flow, two_modes
from value_learners import MAKERS, expo, pa_rl, pa_rl_iql, peak, same, snapshot

from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.algorithms.common.offline import imitation_loss
from robopolicy.algorithms.expo import edit_loss, selection_bonus
from robopolicy.algorithms.pa_rl import imitation_target
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.best_of_n import Candidates


def test_the_policy_is_frozen_offline_and_trained_online() -> None:
    for name in ("pa_rl", "pa_rl_iql"):
        policy = flow()
        algorithm = MAKERS[name](policy)
        before, critic = snapshot(policy), snapshot(algorithm.critic)
        for _ in range(3):
            assert "actor/loss" not in algorithm.update(batch(two_modes(128), peak))
        assert same(before, policy) and not same(critic, algorithm.critic)
        assert "actor/loss" in algorithm.update(batch(two_modes(128), peak, online=True))
        assert not same(before, policy)


def test_policy_normalizers_are_frozen_offline() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(32, 32), normalization="running"), SPEC)
    policy.fit_normalizer({"action": STATISTICS["action"]})
    policy.update_stats({"state": torch.randn(64, 1, 2)})
    algorithm = MAKERS["pa_rl"](policy)
    before, critic = snapshot(policy), snapshot(algorithm.critic)
    algorithm.update(batch(two_modes(128), peak))
    assert same(before, policy) and not same(critic, algorithm.critic)
    algorithm.update(batch(two_modes(128), peak, online=True))
    assert not torch.equal(before["encoder.normalizer.mean"], snapshot(policy)["encoder.normalizer.mean"])


def test_imitation_target_is_sampled_by_value_and_masked_only_for_the_batch_chunk() -> None:
    data = batch(two_modes(6), peak)
    data.mask[:, 1] = 0
    chunks = torch.arange(3.0).view(1, 3, 1, 1).expand(6, 3, 2, 1)
    for winner in range(3):
        values = torch.full((6, 3), -50.0)
        values[:, winner] = 50.0
        chunk, mask = imitation_target(Candidates(chunks, values), data, 1.0, torch.Generator().manual_seed(0))
        assert bool((chunk == winner).all())
        assert torch.equal(mask, data.mask if winner == 2 else torch.ones(6, 2))


def test_the_bootstrap_is_the_value_of_the_best_optimised_chunk() -> None:
    algorithm = pa_rl()
    data = batch(two_modes(16), peak, discount=0.9)
    state = algorithm.generator.get_state()
    target = algorithm.target(data)
    algorithm.generator.set_state(state)
    best = algorithm.acting_policy.propose(data.next_obs, generator=algorithm.generator).best()
    expected = data.reward + 0.9 * algorithm.target_critic(data.next_obs, best).min(0).values
    torch.testing.assert_close(target, expected)


def test_pa_rl_online_updates_move_the_policy_beyond_the_imitated_actions() -> None:
    algorithm = pa_rl_iql(ascent_rate=0.1, ascent_steps=5, temperature=0.02)
    for _ in range(40):  # imitate the data first
        data = batch(0.5 + 0.05 * torch.randn(256, 2, 1), peak)
        loss = imitation_loss(algorithm.policy, data.obs, data.chunk, generator=algorithm.generator, progress=0.0)
        optimizer_step(algorithm.optimizer, loss.mean(), algorithm.policy, algorithm.config.grad_clip)
    start = first_actions(algorithm.policy).mean()
    for _ in range(40):
        algorithm.update(batch(0.5 + 0.3 * torch.randn(128, 2, 1).clamp(-3, 1.6), peak))
    assert torch.equal(first_actions(algorithm.policy).mean(), start)
    assert first_actions(algorithm.inference_policy()).mean() > start + 0.1
    for _ in range(40):
        algorithm.update(batch(0.5 + 0.3 * torch.randn(128, 2, 1).clamp(-3, 1.6), peak, online=True))
    assert first_actions(algorithm.policy).mean() > start + 0.15


def test_chosen_chunk_value_is_at_least_the_best_base_sample_value() -> None:
    algorithm = expo()
    obs = batch(two_modes(32), peak).obs
    found = algorithm.acting_policy.propose(obs, generator=algorithm.generator)
    chosen = algorithm.acting_policy.score(obs, found.best()[:, None])[:, 0]
    assert bool((chosen >= found.values[:, :4].max(1).values - 1e-6).all())


def test_base_backup_bootstraps_from_a_single_policy_sample() -> None:
    data = batch(two_modes(16), peak, discount=0.9)
    policy = flow()
    algorithm = expo(policy, backup="base")
    state = algorithm.generator.get_state()
    target = algorithm.target(data)
    algorithm.generator.set_state(state)
    chunk = policy.act(data.next_obs, generator=algorithm.generator)
    torch.testing.assert_close(target, data.reward + 0.9 * algorithm.target_critic(data.next_obs, chunk).min(0).values)


def test_the_softmax_bonus_is_zero_for_equal_values_and_never_positive_on_average() -> None:
    index = torch.tensor([0, 3])
    torch.testing.assert_close(selection_bonus(torch.full((2, 4), 7.0), index, 0.5), torch.zeros(2), atol=1e-6, rtol=0)
    values = torch.randn(1, 5)
    p = (values / 0.5).softmax(1)[0]
    mean = sum(p[i] * selection_bonus(values, torch.tensor([i]), 0.5)[0] for i in range(5))
    assert float(mean) < 0
    # Soft maximum: under p, the mean of value plus bonus is temperature * log mean exp(value / temperature).
    soft = 0.5 * ((values / 0.5).exp().mean().log())
    assert float((p * values[0]).sum() + mean) == pytest.approx(float(soft), abs=1e-5)


def test_base_edit_and_temperature_update_once_per_policy_delay() -> None:
    algorithm = expo(policy_delay=4)
    algorithm.update(batch(two_modes(64 * 4), peak, online=True))
    steps = [int(next(iter(o.state.values()))["step"]) for o in (algorithm.optimizer, algorithm.edit_optimizer)]
    assert steps == [1, 1] and algorithm.critic_steps == 4 and int(algorithm.ema.updates) == 1


def test_edited_actions_exceed_the_base_samples_towards_higher_value() -> None:
    algorithm = expo(temperature=0.01, temperature_lr=0.0, edit_lr=3e-3)
    for _ in range(40):
        algorithm.update(batch(0.5 + 0.1 * torch.randn(256, 2, 1), peak, online=True))
    base, improved = first_actions(algorithm.ema.module), first_actions(algorithm.inference_policy())
    assert abs(float(base.mean()) - 0.5) < 0.1
    assert float(improved.mean()) > float(base.mean()) + 0.15


def test_edit_loss_is_weighted_log_density_minus_the_mean_value() -> None:
    algorithm, data = expo(), batch(two_modes(64), peak)
    critic: Any = Known(lambda state, a: state[:, 0] + a[:, 0], lambda state, a: 3 * a[:, 0])
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    loss, logp = edit_loss(algorithm.edit, critic, data.obs, data.chunk, torch.tensor(0.2), generators[0])
    edited, expected = algorithm.edit.rsample(algorithm.edit.encode(data.obs), data.chunk, generators[1])
    value = 0.5 * data.obs["state"][:, -1, 0] + 2 * edited[:, 0, 0]
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(loss, (0.2 * expected - value).mean())
    assert algorithm.target_entropy == -0.5  # minus half the executed action dimensions


def test_edit_policy_is_not_trained_without_edits() -> None:
    algorithm = expo(edits=0)
    before = snapshot(algorithm.edit)
    metrics = algorithm.update(batch(two_modes(64), peak, online=True))
    assert same(before, algorithm.edit) and "actor/edit_loss" not in metrics
