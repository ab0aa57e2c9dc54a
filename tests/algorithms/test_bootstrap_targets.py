"""Tests of the regression targets of methods that select or optimise actions, with given critics and policies."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import Known, always, batch, flow, output_layer, seeded, shifted, two_modes
from chunking_learners import dqc, fql, qc
from torch import Tensor
from value_learners import cal_ql, expo, idql, iql, pa_rl, peak

from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.dqc import quantile_loss
from robopolicy.algorithms.fql import actor_loss, one_step_copy
from robopolicy.algorithms.pa_rl import imitation_target
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Observation
from robopolicy.policies.wrappers.best_of_n import BestOfNPolicy, Candidates

ROWS = 64


def data() -> Transitions:
    return batch(two_modes(ROWS), peak, discount=0.9)


def negate_target_critic(algorithm: OffPolicy) -> None:
    """Give the target critic the negated values of the online critic."""
    algorithm.target_critic.load_state_dict(algorithm.critic.state_dict())
    with torch.no_grad():
        for parameter in algorithm.target_critic.body.layers[-1].parameters():
            parameter.neg_()


def target_and_candidates(algorithm: OffPolicy, policy: BestOfNPolicy, batch: Transitions) -> tuple[Tensor, Candidates]:
    """The target of `batch`, and the candidates of `policy` behind it."""
    state = algorithm.generator.get_state()
    target = algorithm.target(batch)
    algorithm.generator.set_state(state)
    return target, policy.propose(batch.next_obs, generator=algorithm.generator)


# FQL.


def test_fql_bootstraps_from_the_mean_value_of_its_one_step_policy() -> None:
    algorithm, seen = fql(), data()
    shifted(algorithm.student)
    algorithm.target_critic = Known(  # type: ignore[assignment]
        lambda state, a: state[:, 0] + a[:, 0], lambda state, a: state[:, 0] + 3 * a[:, 0]
    )
    generator = seeded(algorithm)
    target = algorithm.target(seen)
    action = algorithm.student.act(seen.next_obs, generator=generator)[:, 0, 0]
    torch.testing.assert_close(target, seen.reward + 0.9 * (seen.next_obs["state"][:, -1, 0] + 2 * action))


def test_a_one_step_policy_equal_to_the_flow_has_zero_distance() -> None:
    algorithm, seen = fql(flow(action_clip=0.0)), data()
    teacher, student = one_step_copy(algorithm.policy), algorithm.student
    _, info = actor_loss(student, teacher, algorithm.critic, seen.obs, algorithm.config)
    assert float(info["distance"].detach()) < 1e-10
    with torch.no_grad():
        output_layer(student).bias.add_(0.3)
    _, info = actor_loss(student, teacher, algorithm.critic, seen.obs, algorithm.config)
    assert float(info["distance"].detach()) == pytest.approx(0.3**2, rel=1e-4)


@pytest.mark.parametrize("normalize_q", [True, False])
def test_the_one_step_policy_minimises_its_distance_minus_the_mean_value(normalize_q: bool) -> None:
    algorithm, seen = fql(flow(action_clip=0.0), alpha=3.0, normalize_q=normalize_q), data()
    student: Any = shifted(algorithm.student, 0.1)
    critic: Any = Known(lambda state, a: state[:, 0] + a[:, 0] - 1, lambda state, a: 3 * a[:, 0].square())
    generator = seeded(algorithm)
    loss, _ = actor_loss(student, algorithm.policy, critic, seen.obs, algorithm.config, algorithm.generator)
    noise = student.draw_noise(ROWS, generator, torch.device("cpu"))
    chunk, wanted = student.decode(seen.obs, noise), algorithm.policy.decode(seen.obs, noise).detach()
    value = critic(seen.obs, chunk).mean(0)
    scale = 1 / value.detach().abs().mean() if normalize_q else 1.0
    expected = 3.0 * (chunk - wanted).square().mean() - scale * value.mean()
    torch.testing.assert_close(loss, expected)
    weights = list(student.backbone.parameters())
    slopes = (torch.autograd.grad(value, weights) for value in (loss, expected))
    torch.testing.assert_close(*slopes, atol=1e-5, rtol=1e-4)


def test_fql_updates_sample_only_from_their_own_generator() -> None:
    found = []
    torch.manual_seed(0)
    first = fql()
    seen = data()
    for seed in (1, 2):
        algorithm = copy.deepcopy(first)
        torch.manual_seed(seed)
        algorithm.update(seen)
        found.append(torch.cat([weights.flatten() for weights in algorithm.student.parameters()]))
    assert torch.equal(*found)


# DQC.


def test_dqc_bootstraps_the_long_critic_from_v_as_a_probability() -> None:
    algorithm, seen = dqc(n_step=1), batch(two_modes(4), peak)
    algorithm.value = lambda obs: obs["state"][:, -1, 0]  # type: ignore[assignment]
    seen.next_obs["state"][:, -1, 0] = torch.tensor([0.0, math.log(3), math.log(3), 9.0])
    seen = replace(seen, reward=torch.tensor([0.0, 0.2, 0.7, 1.0]), discount=torch.tensor([0.9, 0.8, 0.8, 0.0]))
    expected = torch.tensor([0.9 / 2, 0.2 + 0.8 * 3 / 4, 1.0, 1.0])
    torch.testing.assert_close(algorithm.target(seen), expected)


def test_v_of_dqc_regresses_on_the_lowest_target_value_of_the_executed_prefix() -> None:
    algorithm, seen = dqc(n_step=1, quantile=0.75), data()
    seen = replace(seen, reward=torch.zeros(ROWS))
    algorithm.target_critic = Known(lambda _, a: 3 * a[:, 0], lambda _, a: a[:, 0])  # type: ignore[assignment]
    lowest = torch.minimum(3 * seen.chunk[:, 0, 0], seen.chunk[:, 0, 0])  # either member in some rows
    with torch.no_grad():
        expected = quantile_loss(algorithm.value(seen.obs), lowest, 0.75).mean()
    torch.testing.assert_close(algorithm.critic_loss(seen)[1]["state_loss"].detach(), expected)


def test_a_prefix_critic_equal_to_the_long_critic_has_no_gradient_on_the_same_chunk() -> None:
    """If Q_p equals Q_h, the gradient of Q_p is zero for every Q_h and expectile."""
    for expectile in (0.5, 0.9):
        algorithm = dqc(n_step=1, expectile=expectile)
        seen = replace(data(), reward=torch.rand(ROWS))
        parameters = list(algorithm.critic.parameters())
        apart = torch.autograd.grad(algorithm.critic_loss(seen)[0], parameters)
        algorithm.critic.load_state_dict(algorithm.long_critic.state_dict())
        equal = torch.autograd.grad(algorithm.critic_loss(seen)[0], parameters)
        assert max(float(gradient.abs().max()) for gradient in apart) > 1e-3
        assert max(float(gradient.abs().max()) for gradient in equal) < 1e-7


# QC.


def test_qc_selects_by_the_mean_online_value_and_evaluates_with_the_target_critics() -> None:
    algorithm, seen = qc(), data()
    negate_target_critic(algorithm)
    target, found = target_and_candidates(algorithm, algorithm.acting_policy, seen)
    values = algorithm.critic.candidate_values(seen.next_obs, found.chunks).mean(0)
    chosen = found.chunks[torch.arange(ROWS), values.argmax(1)]
    torch.testing.assert_close(target, seen.reward + 0.9 * algorithm.target_critic(seen.next_obs, chosen).mean(0))
    executed = algorithm.act(seen.next_obs, generator=torch.Generator().manual_seed(0)).chunk
    found = algorithm.acting_policy.propose(seen.next_obs, generator=torch.Generator().manual_seed(0))
    values = algorithm.critic.candidate_values(seen.next_obs, found.chunks).mean(0)
    assert torch.equal(executed, found.chunks[torch.arange(ROWS), values.argmax(1)])


# IDQL.


def test_idql_executes_the_sample_of_its_average_with_the_highest_minimum_target_value() -> None:
    algorithm, obs = idql(), data().obs
    negate_target_critic(algorithm)
    shifted(algorithm.ema.module, 0.1)
    executed = algorithm.act(obs, generator=torch.Generator().manual_seed(0)).chunk
    rows = {key: value.repeat_interleave(16, 0) for key, value in obs.items()}
    chunks = algorithm.ema.module.act(rows, generator=torch.Generator().manual_seed(0)).unflatten(0, (ROWS, 16))
    best = algorithm.target_critic.candidate_values(obs, chunks).amin(0).argmax(1)
    assert torch.equal(executed, chunks[torch.arange(ROWS), best])


# Cal-QL.


def test_cal_ql_bootstraps_from_the_highest_minimum_target_value_of_sampled_chunks() -> None:
    algorithm, seen = cal_ql(), data()
    queries: list[Observation] = []
    sampled = torch.tensor([-0.5, 0.8, 0.3, 0.1]).view(1, 4, 1, 1).expand(ROWS, 4, 2, 1)

    def sample(obs: Observation) -> Tensor:
        """Record the observations of the sampled chunks."""
        queries.append(obs)
        return sampled

    algorithm.sample_candidates = sample  # type: ignore[method-assign]
    algorithm.target_critic = Known(  # type: ignore[assignment]
        lambda state, a: state[:, 0] + a[:, 0], lambda state, a: state[:, 0] + 0.9 - 2 * a[:, 0]
    )
    expected = seen.reward + 0.9 * (seen.next_obs["state"][:, -1, 0] + 0.3)
    torch.testing.assert_close(algorithm.target(seen), expected)
    assert queries == [seen.next_obs]


def test_cal_ql_samples_its_policy_and_subtracts_no_entropy() -> None:
    algorithm, seen = cal_ql(), data()
    state = algorithm.generator.get_state()
    target = algorithm.target(seen)
    algorithm.generator.set_state(state)
    chunks = algorithm.sample_candidates(seen.next_obs)
    assert chunks.shape == (ROWS, 4, 2, 1) and float(chunks.std(1).min()) > 0
    lowest = algorithm.target_critic.candidate_values(seen.next_obs, chunks).min(0).values
    torch.testing.assert_close(target, seen.reward + 0.9 * lowest.max(1).values)


def test_cal_ql_subtracts_the_entropy_of_the_best_candidate_if_enabled() -> None:
    algorithm, seen = cal_ql(backup_entropy=True, temperature=0.5), data()
    sampled = algorithm.sample_candidates(seen.next_obs)
    algorithm.sample_candidates = lambda obs: sampled  # type: ignore[method-assign]
    values = algorithm.target_critic.candidate_values(seen.next_obs, sampled).min(0).values
    best = sampled[torch.arange(ROWS), values.argmax(1)]
    logp = algorithm.policy.log_density(seen.next_obs, best)
    expected = seen.reward + 0.9 * (values.max(1).values - 0.5 * logp)
    torch.testing.assert_close(algorithm.target(seen), expected)


# EXPO.


def test_expo_bootstraps_from_the_candidate_of_highest_mean_value() -> None:
    algorithm, seen = expo(), data()
    target, found = target_and_candidates(algorithm, algorithm.backup_policy, seen)
    best = algorithm.target_critic.candidate_values(seen.next_obs, found.chunks).mean(0).argmax(1)
    assert found.chunks.shape[1] == 8 and len(best.unique()) > 1  # samples and edits
    chosen = found.chunks[torch.arange(ROWS), best]
    lowest = algorithm.target_critic(seen.next_obs, chosen).min(0).values
    torch.testing.assert_close(target, seen.reward + 0.9 * lowest)


def test_expo_adds_the_entropy_of_softmax_selection_to_its_target() -> None:
    algorithm, seen = expo(selection="softmax", selection_temperature=0.2), data()
    state = algorithm.generator.get_state()
    target, found = target_and_candidates(algorithm, algorithm.backup_policy, seen)
    algorithm.generator.set_state(state)
    algorithm.backup_policy.propose(seen.next_obs, generator=algorithm.generator)
    index = algorithm.backup_policy.choose(found.values, generator=algorithm.generator)
    chosen = found.chunks[torch.arange(ROWS), index]
    lowest = algorithm.target_critic(seen.next_obs, chosen).min(0).values
    logp = (found.values / 0.2).log_softmax(1)[torch.arange(ROWS), index]
    bonus = -0.2 * (logp + math.log(8))
    assert float(bonus.abs().max()) > 0.1
    torch.testing.assert_close(target, seen.reward + 0.9 * (lowest + bonus))


@pytest.mark.parametrize("backup", ["best", "base"])
def test_expo_acts_with_the_averaged_base_and_bootstraps_from_the_trained_base(backup: str) -> None:
    algorithm, seen = expo(edits=0, backup=backup), data()
    always(algorithm.policy, 1.0)  # type: ignore[arg-type]
    always(algorithm.ema.module, -1.0)  # type: ignore[arg-type]
    one = torch.ones(ROWS, 2, 1)
    for draw in (algorithm.act, algorithm.warmup_action):
        assert torch.equal(draw(seen.obs).chunk, -one)
    assert torch.equal(algorithm.inference_policy().act(seen.obs), -one)
    lowest = algorithm.target_critic(seen.next_obs, one).min(0).values
    torch.testing.assert_close(algorithm.target(seen), seen.reward + 0.9 * lowest)


# PA-RL.


def test_pa_rl_bootstraps_from_the_best_optimised_chunk_at_any_index() -> None:
    algorithm, seen = pa_rl(), data()
    best = torch.arange(ROWS) % 3
    chunks = (torch.arange(3.0) / 4).view(1, 3, 1, 1).expand(ROWS, 3, 2, 1)
    values = torch.nn.functional.one_hot(best, 3).float()

    def propose(obs: Observation, **_: Any) -> Candidates:
        """Three chunks, with the best at a different index in each row."""
        assert obs is seen.next_obs
        return Candidates(chunks, values)

    algorithm.acting_policy.propose = propose  # type: ignore[method-assign]
    algorithm.target_critic = Known(lambda _, a: a[:, 0], lambda _, a: 2 * a[:, 0])  # type: ignore[assignment]
    torch.testing.assert_close(algorithm.target(seen), seen.reward + 0.9 * best / 4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_imitated_chunk_is_sampled_by_the_softmax_of_its_value(temperature: float) -> None:
    rows, share = 4000, torch.tensor([0.5, 0.2, 0.3])
    seen = batch(two_modes(rows), peak)
    chunks = torch.arange(3.0).view(1, 3, 1, 1).expand(rows, 3, 2, 1)
    found = Candidates(chunks, (temperature * share.log()).expand(rows, 3))
    chunk, _ = imitation_target(found, seen, temperature, torch.Generator().manual_seed(0))
    frequency = torch.bincount(chunk[:, 0, 0].long(), minlength=3) / rows
    assert bool(((frequency - share).abs() < 4 * (share * (1 - share) / rows).sqrt()).all())


# Imitation.


@pytest.mark.parametrize("make", [qc, fql, dqc, expo, iql, idql])
def test_padded_steps_of_a_chunk_do_not_train_the_policy(make: Callable[..., OffPolicy]) -> None:
    """The output weights of the flow for padded steps stay bit-identical."""
    policy = flow()
    algorithm, seen = make(policy), batch(two_modes(ROWS), lambda action: (action[:, 0] > 0).float())
    seen.mask[:, 1] = 0.0
    before = [parameter.detach().clone() for parameter in output_layer(policy).parameters()]
    algorithm.update(seen)
    for old, new in zip(before, output_layer(policy).parameters(), strict=True):
        assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])
