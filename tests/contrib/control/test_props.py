"""Tests of PROPS: the behaviour policy reduces the sampling error, and PPO's invariants hold on kept rollouts."""

from __future__ import annotations

import copy
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from robopolicy.algorithms.common.rollout_batch import compute_advantages
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.contrib.control.props import PROPS, BehaviourConfig, PROPSConfig, push_loss
from robopolicy.contrib.control.sampling_error import sampling_error
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import DecisionOutput, Observation, Policy, PolicySpec, Record, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy


def rollout_of(obs: dict[str, Tensor], record: dict[str, Tensor], steps: int) -> Rollout:
    """A rollout of `steps` steps of which only the observations and records `(B, ...)` matter."""
    split = lambda tree: {key: value.unflatten(0, (steps, -1)) for key, value in tree.items()}  # noqa: E731
    seen, decided = split(obs), split(record)
    none = torch.zeros(next(iter(seen.values())).shape[:2])
    last = {key: value[-1] for key, value in seen.items()}
    return Rollout(seen, decided, none.unsqueeze(-1), none, none.long(), none.bool(), none.bool(), {}, last)


def algorithm(kind: type[PPO] = PROPS, seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), PolicySpec({"state": (6,)}, 2))
    config: Any = PROPSConfig if kind is PROPS else PPOConfig
    settings: dict[str, Any] = {"num_steps": 16, "epochs": 2, "batch_size": 64} | overrides
    return kind(config(**settings), policy, total_updates=20)


def constant(num: int) -> dict[str, Tensor]:
    return {"state": torch.ones(num, 1, 3)}


def error_of(decisions: int, envs: int, pushed: bool, seed: int) -> float:
    """Sampling error of `decisions` kept and as many new decisions in one state, where it has a closed form."""
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(), PolicySpec({"state": (3,)}, 2))
    rounds, generator = decisions // envs, torch.Generator().manual_seed(seed)
    learner = PROPS(PROPSConfig(num_steps=rounds), policy, total_updates=10)
    kept = policy.sample(constant(decisions), generator=generator).record["raw"]
    learner.kept_batches = [rollout_of(constant(decisions), {"raw": kept}, rounds)]
    act = learner.act if pushed else policy.sample
    new = [act(constant(envs), generator=generator).record["raw"] for _ in range(rounds)]
    raw = torch.cat([kept, *new])  # (B, 1, A)
    mean, log_std = policy.distribution(constant(1))
    likeliest = Normal(raw.mean(0), raw.std(0, unbiased=False))
    return float((likeliest.log_prob(raw) - Normal(mean, log_std.exp()).log_prob(raw)).detach().sum((1, 2)).mean())


@pytest.mark.parametrize(
    ("decisions", "envs", "trials"),
    [(32, 4, 10), (256, 16, 10), pytest.param(2048, 16, 3, marks=pytest.mark.slow)],
)
def test_behaviour_policy_has_a_smaller_sampling_error_than_on_policy_sampling(
    decisions: int, envs: int, trials: int
) -> None:
    plain, pushed = ([error_of(decisions, envs, push, seed) for seed in range(trials)] for push in (False, True))
    assert sum(b < a for a, b in zip(plain, pushed, strict=True)) >= 0.7 * trials
    assert sum(pushed) < 0.9 * sum(plain)


SEEDS, SIDE = 10, 5
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Table(Policy):
    """A tabular policy over four moves per numbered cell, with logits `(C, 4)`."""

    name = "table"

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.spec = PolicySpec({"state": (1,)}, 1)
        self.logits = nn.Parameter(logits)

    def log_probabilities(self, obs: Observation) -> Tensor:
        return self.logits[obs["state"][:, -1, 0].long()].log_softmax(-1)

    def sample(self, obs: Observation, *, generator: Any = None) -> Sample:
        log = self.log_probabilities(obs).detach()
        move = torch.multinomial(log.exp(), 1, generator=generator)
        return Sample(move[:, None].float(), {"move": move}, log.gather(1, move))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        log = self.log_probabilities(obs)
        return DecisionOutput(log.gather(1, record["move"]), -(log.exp() * log).sum(1, keepdim=True))

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Any = None) -> Tensor:
        return self.sample(obs, generator=generator).chunk


def errors_on_a_grid(decisions: int, pushed: bool) -> Tensor:
    """Sampling errors `(SEEDS,)` of a fixed policy; each seed has its own grid and its own cells of the table."""
    torch.manual_seed(0)
    table = Table(0.7 * torch.randn(SEEDS * SIDE**2, 4))
    learner = PROPS(PROPSConfig(behaviour=BehaviourConfig(every=16, lr=0.1)), table, total_updates=1)
    place, generator = torch.randint(0, SIDE, (SEEDS, 2)), torch.Generator().manual_seed(0)
    counts = torch.zeros(SEEDS * SIDE**2, 4)
    for _ in range(decisions):
        cell = torch.arange(SEEDS) * SIDE**2 + place @ torch.tensor([SIDE, 1])
        obs = {"state": cell.float().view(-1, 1, 1)}
        sample = (learner.act if pushed else table.sample)(obs, generator=generator)
        move = sample.record["move"][:, 0]
        counts[cell, move] += 1
        place = (place + MOVES[move]).clamp(0, SIDE - 1)
    likeliest = counts / counts.sum(1, keepdim=True).clamp(min=1)
    excess = likeliest.clamp(min=1e-9).log() - table.logits.detach().log_softmax(-1)
    return (counts * excess).view(SEEDS, -1).sum(1) / decisions


@pytest.mark.parametrize(("decisions", "plain", "pushed", "wins"), [(128, 0.26, 0.20, 8), (512, 0.085, 0.036, 10)])
def test_sampling_error_on_a_grid_matches_the_measured_values(
    decisions: int, plain: float, pushed: float, wins: int
) -> None:
    by_play, by_push = (errors_on_a_grid(decisions, push) for push in (False, True))
    assert float(by_play.mean()) == pytest.approx(plain, rel=0.15)
    assert float(by_push.mean()) == pytest.approx(pushed, rel=0.15)
    assert int((by_push < by_play).sum()) >= wins


def test_behaviour_shift_is_opposite_and_proportional_to_the_kept_action_offset() -> None:
    learner: PROPS = algorithm(num_kept_batches=2)
    learner.policy = GaussianPolicy(GaussianConfig(), PolicySpec({"state": (3,)}, 2))
    learner.behavior_policy = copy.deepcopy(learner.policy)
    mean, _ = learner.policy.distribution(constant(1))
    for share in (0.05, 0.2):
        raw = mean.detach() + torch.randn(4000, 1, 2)
        raw = raw - raw.mean(0) + mean.detach()[0] + share / 2  # offset of the kept actions
        learner.kept_batches = [rollout_of(constant(4000), {"raw": raw}, 4)]
        learner._update_behavior_policy(2000)
        moved = learner.behavior_policy.distribution(constant(1))[0] - mean
        torch.testing.assert_close(moved.detach(), torch.full((1, 1, 2), -share), rtol=0.5, atol=0.02)


def test_behaviour_policy_is_regularised_by_the_forward_kl() -> None:
    settings = BehaviourConfig(lr=0.03, steps=5, bound=0.9, kl_coef=0.01, target_kl=10.0)
    learner: PROPS = algorithm(num_kept_batches=2, behaviour=settings)
    learner.policy = GaussianPolicy(GaussianConfig(hidden=()), PolicySpec({"state": (3,)}, 2))
    learner.behavior_policy = copy.deepcopy(learner.policy)
    raw = learner.policy.sample(constant(20_000), generator=learner.generator).record["raw"]
    learner.kept_batches = [rollout_of(constant(20_000), {"raw": raw}, 4)]
    learner._update_behavior_policy(5000)
    with torch.no_grad():
        policy, pushed = (
            Normal(mean, log_std.exp())
            for mean, log_std in (net.distribution(constant(1)) for net in (learner.policy, learner.behavior_policy))
        )
    forward, reverse = (float(kl_divergence(*pair).sum()) for pair in ((policy, pushed), (pushed, policy)))
    assert forward > 1.2 * reverse
    assert learner.pushes[-1] == pytest.approx(forward, rel=0.05)


def test_sampling_error_equals_the_log_likelihood_gap_to_the_best_fit() -> None:
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianConfig(hidden=()), PolicySpec({"state": (3,)}, 2))
    raw = torch.randn(40, 1, 2) + 0.3
    likeliest, mine = Normal(raw.mean(0), raw.std(0, unbiased=False)), Normal(policy.distribution(constant(1))[0], 1.0)
    expected = float((likeliest.log_prob(raw) - mine.log_prob(raw)).detach().sum((1, 2)).mean())
    found = sampling_error(policy, copy.deepcopy(policy), constant(40), {"raw": raw}, steps=300, lr=0.02)
    assert found == pytest.approx(expected, rel=0.01)


def test_push_loss_gradient_is_zero_beyond_its_bound() -> None:
    change = torch.tensor([-0.1, 0.0, 0.1, -0.5, 1.0], requires_grad=True)
    loss = push_loss(change, 0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), change)
    assert gradient[3] == 0.0  # ratio 0.61, below 0.7
    torch.testing.assert_close(gradient[[0, 1, 2, 4]], change.detach()[[0, 1, 2, 4]].exp())


def test_ratios_of_kept_and_new_decisions_start_at_one() -> None:
    learner: PROPS = algorithm(num_kept_batches=2)
    sampler = tools.sampler_for(learner, 8)
    learner.update(sampler.collect(learner.act))
    rollout = sampler.collect(learner.act)
    rows = learner.process_rollout(rollout)
    assert len(rows) == 2 * 16 * 8
    _, info = learner.loss(rows, log_stats=True)
    assert float(info["ratio_max"]) < 1e-5
    assert not torch.allclose(rollout.logp.flatten(0, 1), rows.logp[-16 * 8 :])  # the behaviour policy collected it


def test_kept_decisions_have_the_advantages_of_their_own_rollout() -> None:
    learner: PROPS = algorithm(num_kept_batches=3)
    sampler = tools.sampler_for(learner, 8)
    rollouts = []
    for _ in range(2):
        rollouts.append(sampler.collect(learner.act))
        learner.update(rollouts[-1])
    rollouts.append(sampler.collect(learner.act))
    rows, scale = learner.process_rollout(rollouts[-1]), learner.reward_normalizer
    scored = [
        compute_advantages(rollout, learner.critic, gamma=0.99, gae_lambda=0.95, reward_scale=scale)
        for rollout in rollouts
    ]
    for name in ("advantage", "value_target"):
        torch.testing.assert_close(getattr(rows, name), torch.cat([getattr(part, name) for part in scored]))


def test_behaviour_policy_acts_near_the_unchanged_policy() -> None:
    learner: PROPS = algorithm(num_kept_batches=2, behaviour=BehaviourConfig(target_kl=0.02))
    sampler = tools.sampler_for(learner, 8)
    learner.update(sampler.collect(learner.act))
    before = [p.clone() for p in learner.policy.parameters()]
    rollout = sampler.collect(learner.act)
    assert len(learner.pushes) == 2  # every 8 of 16 decisions
    assert all(0 < kl <= 0.02 for kl in learner.pushes)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.behavior_policy.parameters(), strict=True))
    assert 0 < learner.update(rollout)["behaviour/kl"] <= 0.02


def test_one_kept_rollout_without_behaviour_update_equals_ppo() -> None:
    mine, plain = algorithm(num_kept_batches=1, behaviour=BehaviourConfig(every=16)), algorithm(PPO)
    for learner in (mine, plain):
        sampler = tools.sampler_for(learner, 8)
        for _ in range(2):
            learner.update(sampler.collect(learner.act))
    for a, b in zip(mine.policy.parameters(), plain.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match="num_kept_batches"):
        PROPSConfig(num_kept_batches=0)
    with pytest.raises(UserError, match="bound"):
        BehaviourConfig(bound=1.5)
    with pytest.raises(UserError, match="every"):
        BehaviourConfig(every=0)
