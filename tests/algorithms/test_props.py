"""PROPS: pushed play makes small samples look on-policy, and PPO's invariants hold on kept rollouts."""

from __future__ import annotations

from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.algorithms.props import PROPS, BehaviourConfig, PROPSConfig, push_loss
from robopolicy.core.regularizers import k3
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy


def algorithm(kind: type[PPO] = PROPS, seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), PolicySpec({"state": (6,)}, 2))
    config = PROPSConfig if kind is PROPS else PPOConfig
    return kind(config(**({"decisions": 16, "epochs": 2, "batch_size": 64} | overrides)), policy, total_updates=20)


def sampling_error(target: Tensor, counts: Tensor) -> float:
    """KL of the empirical distribution to the target [nats]."""
    share = counts / counts.sum()
    return float(torch.where(counts > 0, share * (share / target).log(), 0.0).sum())


def draw(target: Tensor, steps: int, pushed: bool, generator: torch.Generator) -> float:
    """Sampling error after `steps` draws in batches of eight, with or without pushing after each of them."""
    counts, played = torch.zeros_like(target), target
    for _ in range(steps // 8):
        counts += torch.bincount(torch.multinomial(played, 8, True, generator=generator), minlength=len(target))
        if not pushed:
            continue
        logits = target.log().clone().requires_grad_(True)
        optimizer = torch.optim.Adam([logits], lr=0.05)
        for _ in range(30):
            change = logits.log_softmax(0) - target.log()
            weight = counts / counts.sum()
            if float((weight * k3(-change)).sum().detach()) > 0.05:
                break
            loss = (weight * push_loss(change, 0.3)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        played = logits.detach().softmax(0)
    return sampling_error(target, counts)


def test_pushed_play_leaves_a_smaller_sampling_error_than_play() -> None:
    g = torch.Generator().manual_seed(0)
    wins, errors = 0, torch.zeros(2)
    for _ in range(20):
        target = torch.rand(8, generator=g).softmax(0)
        pair = [draw(target, 128, pushed, g) for pushed in (False, True)]
        wins += pair[1] < pair[0]
        errors += torch.tensor(pair) / 20
    assert wins >= 14 and errors[1] < 0.8 * errors[0], (wins, errors)


def test_the_push_ends_at_its_bound() -> None:
    change = torch.tensor([-0.1, 0.0, 0.1, -0.5, 1.0], requires_grad=True)
    loss = push_loss(change, 0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), change)
    assert gradient[3] == 0.0  # ratio 0.61, below 0.7
    torch.testing.assert_close(gradient[[0, 1, 2, 4]], change.detach()[[0, 1, 2, 4]].exp())


def test_every_ratio_of_kept_and_new_decisions_starts_at_one() -> None:
    learner: PROPS = algorithm(kept=2)
    sampler = tools.sampler_for(learner, 8)
    learner.update(sampler.collect(learner.act))
    rollout = sampler.collect(learner.act)
    rows = learner.rows_of(rollout)
    assert len(rows) == 2 * 16 * 8
    _, info = learner.actor_loss(rows, diagnose=True)
    assert float(info["ratio_max"]) < 1e-5
    assert not torch.allclose(rollout.logp.flatten(0, 1), rows.logp[-16 * 8 :])  # it was played by the pushed copy


def test_the_copy_plays_stays_near_the_policy_and_leaves_it_alone() -> None:
    learner: PROPS = algorithm(kept=2, behaviour=BehaviourConfig(target_kl=0.02))
    sampler = tools.sampler_for(learner, 8)
    metrics = learner.update(sampler.collect(learner.act))
    assert 0 < metrics["behaviour/kl"] < 0.2
    before = [p.clone() for p in learner.policy.parameters()]
    learner._push()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.player.parameters(), strict=True))


def test_with_one_kept_rollout_it_is_ppo() -> None:
    mine, plain = algorithm(kept=1), algorithm(PPO)
    for learner in (mine, plain):
        sampler = tools.sampler_for(learner, 8)
        for _ in range(2):
            learner.update(sampler.collect(learner.act))
    for a, b in zip(mine.policy.parameters(), plain.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_ends_with_the_same_weights() -> None:
    learner, other = tools.resumed(algorithm, 8)
    for mine, theirs in ((learner.policy, other.policy), (learner.player, other.player)):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match="kept"):
        PROPSConfig(kept=0)
    with pytest.raises(UserError, match="bound"):
        BehaviourConfig(bound=1.5)
