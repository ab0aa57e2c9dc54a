"""Tests of AILBoost: mixture and discriminator in closed form, training signals, and a task where cloning fails."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chunk_bandit import SMALL, batch, flow
from chunk_bandit import gaussian as bandit_policy
from line import STEPS, LineSim, demonstrations, distance, gaussian
from torch import Tensor, nn

from robopolicy.contrib.offline.ailboost import AILBoost, AILBoostConfig, LearnerMixture, discriminator_loss
from robopolicy.contrib.offline.discriminator import DiscriminatorConfig, gradient_penalty, reverse_kl_loss
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.config import ReplayConfig
from robopolicy.training.replay_source import ReplaySource


def ailboost(seed: int = 0, **config: Any) -> AILBoost:
    torch.manual_seed(seed)
    settings = {"critic": SMALL, "batch_size": 32, "discriminator": DiscriminatorConfig(hidden=(16,))} | config
    return AILBoost(AILBoostConfig(**settings), bandit_policy(), total_updates=100)


def mixed(rows: int = 32, discount: float = 0.9, **more: Any) -> Transitions:
    """Half demonstrations near 0.6, half uniform online actions."""
    zero = lambda action: torch.zeros(len(action))  # noqa: E731
    expert = batch(0.6 + 0.05 * torch.randn(rows // 2, 2, 1), zero, discount=discount)
    rolled_out = batch(torch.rand(rows // 2, 2, 1) * 2 - 1, zero, online=True, discount=discount)
    return replace(Transitions.interleave([expert, rolled_out], 1), **more)


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


# The mixture of learners.


def test_learner_masses_equal_the_boosting_weights() -> None:
    mixture = LearnerMixture(0.05, 10)
    for learners in (1, 2, 10, 60):
        assert mixture.masses(learners).sum() == pytest.approx(1.0)
    assert mixture.masses(2).tolist() == pytest.approx([0.05, 0.95])
    ten = mixture.masses(10)
    assert ten[0] == pytest.approx(0.05) and ten[-1] == pytest.approx(0.6302, abs=1e-4)
    eleven = mixture.masses(11)
    assert eleven[1:] == pytest.approx(0.95 * ten)  # a new learner takes its share from all others


@pytest.mark.parametrize(("steps", "learners"), [(7, 1), (19, 1), (20, 2), (45, 4), (170, 10)])
def test_replay_steps_are_weighted_by_the_mixture_mass_of_their_learner(steps: int, learners: int) -> None:
    mixture, replay, no = LearnerMixture(0.2, 10), Replay(100), torch.zeros(1, dtype=torch.bool)
    for t in range(steps):
        obs = {"state": torch.full((1, 1), float(t))}
        replay.add(torch.tensor([0]), obs, torch.zeros(1, 1), torch.zeros(1), no, no, obs)
    sampled = replay.take(
        torch.arange(len(replay)), ReplaySampleSpec(8, horizon=1, steps=1, gamma=0.9, weighting=mixture)
    )
    age = (steps - 1 - sampled.obs["state"][:, 0, 0].long()) // 10  # number of newer learners
    mixture_rate = sampled.weight.double() / len(replay)
    found = [float(mixture_rate[age.clamp(max=learners - 1) == number].sum()) for number in range(learners)]
    assert found == pytest.approx(mixture.masses(learners), rel=1e-5)
    assert float(sampled.weight.mean()) == pytest.approx(1.0, rel=1e-5)
    assert learners > 1 or bool((sampled.weight == 1).all())


@pytest.mark.parametrize(
    ("mixture_rate", "block", "message"),
    [
        (0.0, 5, r"mixture_rate must lie in \(0, 1\)"),
        (1.0, 5, r"mixture_rate must lie in \(0, 1\)"),
        (0.1, 0, "block must be at least 1"),
    ],
)
def test_invalid_mixtures_are_refused(mixture_rate: float, block: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LearnerMixture(mixture_rate, block)


# The discriminator.


def test_optimal_discriminator_is_the_log_ratio_and_its_loss_gives_the_reverse_kl() -> None:
    g = torch.Generator().manual_seed(0)
    expert, learner = (torch.randn(6, generator=g, dtype=torch.float64).softmax(0) for _ in range(2))
    output = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    best = (expert / learner).log()
    loss = reverse_kl_loss(best.requires_grad_(), best, 3.0 * expert, 0.1 * learner)  # unnormalised weights
    assert float(torch.autograd.grad(loss, best)[0].abs().max()) < 1e-12
    divergence = (learner * (learner / expert).log()).sum()
    assert float(loss.detach()) == pytest.approx(1 - float(divergence))
    optimizer = torch.optim.LBFGS([output], max_iter=200, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = reverse_kl_loss(output, output, expert, learner)
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(output.detach(), best.detach(), rtol=0, atol=1e-5)


def test_row_weights_are_equivalent_to_repeated_rows() -> None:
    expert, learner = torch.randn(4), torch.tensor([0.3, -0.8])
    weighed = reverse_kl_loss(expert, learner, torch.ones(4), torch.tensor([3.0, 1.0]))
    repeated = reverse_kl_loss(expert, learner[[0, 0, 0, 1]], torch.ones(4), torch.ones(4))
    torch.testing.assert_close(weighed, repeated)


def test_the_gradient_penalty_targets_unit_norm() -> None:
    linear = nn.Linear(3, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[3.0, 0.0, 4.0]]))
    rows = torch.randn(2, 5, 3)
    penalty = gradient_penalty(linear, rows[0], rows[1], torch.rand(5, 1))
    assert float(penalty.detach()) == pytest.approx(16.0)


def test_the_end_of_an_episode_has_its_own_discriminator_input() -> None:
    algorithm, data = ailboost(), mixed()
    discriminator = algorithm.discriminator
    assert discriminator.ended(2).tolist() == [[0.0] * (discriminator.size - 1) + [1.0]] * 2
    assert not bool(discriminator.inputs(data.obs, data.chunk)[:, -1].any())
    expert, rolled_out, mix = data.select(~data.online), data.select(data.online), torch.rand(16)
    _, continuing = discriminator_loss(discriminator, expert, rolled_out, mix, 0.0)
    _, ending = discriminator_loss(discriminator, replace(expert, discount=torch.zeros(16)), rolled_out, mix, 0.0)
    end = float(discriminator(discriminator.ended(1)).detach())
    assert float(ending["expert"]) == pytest.approx((float(continuing["expert"]) + end) / 2, abs=1e-6)
    assert float(ending["played"]) == float(continuing["played"])


def test_the_discriminator_separates_demonstrations_from_online_data() -> None:
    free = DiscriminatorConfig(hidden=(16,), penalty=0.0)
    algorithm = ailboost(discriminator_lr=3e-2, discriminator_delay=1, discriminator=free, batch_size=128)
    torch.manual_seed(1)
    for _ in range(50):
        metrics = algorithm.update(mixed(128))
    assert metrics["critic/expert"] - metrics["critic/played"] > 0.4 and metrics["critic/divergence"] > 0.1


# Training signals.


def test_reward_is_the_discriminator_output_and_an_end_adds_its_discounted_sum() -> None:
    algorithm, data = ailboost(gamma=0.5), mixed(discount=0.5)
    rolled_out = data.select(data.online)
    rolled_out = replace(rolled_out, discount=torch.where(torch.arange(16) < 4, 0.0, 0.5), weight=torch.rand(16))
    scorer, relabelled = algorithm.reward_discriminator, algorithm.imitation_reward(rolled_out)
    with torch.no_grad():
        score = scorer(scorer.inputs(rolled_out.obs, rolled_out.chunk))
        end = scorer(scorer.ended(1))
    torch.testing.assert_close(relabelled.reward[4:], score[4:])
    torch.testing.assert_close(relabelled.reward[:4], score[:4] + end)  # 0.5 + 0.25 + 0.125 + ... = 1
    assert torch.equal(relabelled.weight, torch.ones(16)) and torch.equal(relabelled.chunk, rolled_out.chunk)


def test_policy_and_critic_learn_only_from_online_data() -> None:
    learners = [ailboost(discriminator_delay=1) for _ in range(2)]
    for number in range(2):
        torch.manual_seed(number)
        data = mixed()
        other = replace(data, next_obs={"state": torch.where(data.online[:, None, None], data.next_obs["state"], 9.0)})
        for learner, part in zip(learners, (data, other), strict=True):
            learner.update(part)
    one, two = learners
    assert same(one.policy, two.policy) and same(one.critic, two.critic)


def test_later_learners_keep_the_reward_discriminator_of_their_start() -> None:
    algorithm = ailboost(learner_decisions=3, discriminator_delay=1)
    agrees: list[bool] = []
    for _ in range(10):
        algorithm.update(mixed())
        agrees.append(same(algorithm.reward_discriminator, algorithm.discriminator))
    assert agrees == [True, True, True, False, False, True, False, False, True, False]
    assert algorithm.learner == 3


def test_a_single_learner_uses_the_current_discriminator_and_uniform_replay() -> None:
    algorithm = ailboost(learner_decisions=10_000, discriminator_delay=1)
    for _ in range(4):
        algorithm.update(mixed())
        assert same(algorithm.reward_discriminator, algorithm.discriminator)
    mixture = algorithm.sample_spec.weighting
    assert mixture is not None and bool((mixture(torch.arange(900), torch.full((900,), 900)) == 1).all())


def test_replay_samples_are_weighted_by_the_learner_mixture() -> None:
    algorithm = ailboost(learner_decisions=7, mixture_rate=0.2)
    assert algorithm.sample_spec.weighting == LearnerMixture(0.2, 7 * algorithm.policy.spec.action_horizon)


def test_unsupported_settings_and_data_are_refused() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"n_step": 3}, "n_step=0"),
        ({"gamma": 1.0}, "gamma < 1"),
        ({"learner_decisions": 0}, "learner_decisions must be at least 1"),
        ({"mixture_rate": 1.0}, r"mixture_rate must lie in \(0, 1\)"),
    )
    for settings, reason in refused:
        with pytest.raises(UserError, match=reason):
            ailboost(**settings)
    with pytest.raises(UserError, match="must not be negative"):
        DiscriminatorConfig(penalty=-1.0)
    with pytest.raises(UserError, match="needs policy=squashed_gaussian"):
        AILBoost(AILBoostConfig(), flow(), total_updates=1)
    for online in (True, False):
        with pytest.raises(UserError, match=r"0 < replay.offline_fraction < 1"):
            ailboost().update(mixed(online=torch.full((32,), online)))


# Learning.


def source(algorithm: AILBoost, seed: int, **settings: Any) -> ReplaySource:
    data = demonstrations(seed=seed)
    data = replace(data, arrays={**data.arrays, "reward": np.zeros(len(data), np.float32)})
    return ReplaySource(
        ChunkedSim(LineSim(16), action_horizon=1, obs_horizon=1, gamma=1.0),
        Replay.from_episodes(data, gamma=algorithm.config.gamma),
        torch.device("cpu"),
        sample_spec=algorithm.sample_spec,
        settings=ReplayConfig(capacity=20_000, learning_starts=320, **settings),
        num_steps=1,
        utd=1 / 16,
        seed=seed,
    )


def on_the_line(seed: int) -> AILBoost:
    torch.manual_seed(seed)
    config = AILBoostConfig(
        critic=CriticConfig(hidden=(32, 32), activation="relu", layer_norm=False),
        gamma=0.9,
        batch_size=128,
        lr=2e-3,
        critic_lr=2e-3,
        tau=0.05,
        temperature=0.1,
        target_entropy=-2.0,
        mixture_rate=0.1,
        learner_decisions=2 * STEPS,
        discriminator_lr=2e-3,
        discriminator_delay=1,
        seed=seed,
    )
    return AILBoost(config, gaussian(), total_updates=330)


def test_prioritized_replay_is_refused() -> None:
    with pytest.raises(UserError, match=r"replay.prioritized=0"):
        source(on_the_line(0), 0, prioritized=0.5)


@pytest.mark.slow
def test_ailboost_reaches_the_demonstrated_position_where_cloning_fails() -> None:
    data, clone = demonstrations(), on_the_line(0).policy
    optimizer = torch.optim.Adam(clone.parameters(), lr=3e-3)
    state, action = (torch.from_numpy(data.arrays[key])[:, None] for key in ("state", "action"))
    for _ in range(300):
        loss = clone.imitation_loss({"state": state}, action)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert distance(clone) > 0.45
    algorithm = on_the_line(0)
    feed = source(algorithm, 0)
    for _ in range(algorithm.total_updates):
        algorithm.update(feed.next(algorithm))
    assert algorithm.learner == 11 and distance(algorithm.policy) < 0.25
    assert distance(copy.deepcopy(algorithm.inference_policy())) == distance(algorithm.policy)  # type: ignore[arg-type]
