"""BPO and MDPO against their closed forms, and what the frame of on-policy control shares."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from robopolicy.algorithms.frames.actor_critic import LR_FACTOR, ActorCritic, value_loss
from robopolicy.algorithms.frames.on_policy import Rows, flatten, normalize, rows_with_advantages
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.algorithms.registry import make_algorithm
from robopolicy.contrib.control.bpo import BPO, BPOConfig, median_loss
from robopolicy.contrib.control.mdpo import MDPO, MDPOConfig
from robopolicy.contrib.control.ta_lpo import TALPO, TALPOConfig
from robopolicy.core.surrogates import best_ratio, importance, mirror
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SMALL = {"decisions": 16, "epochs": 2, "batch_size": 64}
CONFIGS = {"bpo": BPOConfig, "mdpo": MDPOConfig, "ppo": PPOConfig, "ta_lpo": TALPOConfig}


def algorithm(name: str, seed: int = 0, updates: int = 20, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), PolicySpec({"state": (6,)}, 2))
    return make_algorithm(name, CONFIGS[name](**(SMALL | overrides)), policy, total_updates=updates)


def rows_of(learner: ActorCritic) -> Rows:
    rollout = tools.sampler_for(learner).collect(learner.act)
    return rows_with_advantages(rollout, learner.critic, gamma=0.99, lam=0.95)


def tabular(seed: int, states: int = 4, actions: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Transitions `(S, A, S)`, rewards `(S, A)` and a policy `(S, A)`, in double precision."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    transition = draw(states, actions, states)
    return transition / transition.sum(-1, keepdim=True), draw(states, actions), draw(states, actions).softmax(-1)


def values(transition: Tensor, reward: Tensor, policy: Tensor, gamma: float = 0.9) -> tuple[Tensor, Tensor]:
    """Exact V `(S,)` and Q `(S, A)`."""
    step = torch.einsum("sa,sat->st", policy, transition)
    v = torch.linalg.solve(torch.eye(len(step), dtype=step.dtype) - gamma * step, (policy * reward).sum(1))
    return v, reward + gamma * transition @ v


def threshold(q: Tensor, policy: Tensor, temperature: float) -> Tensor:
    """U `(S,)` at which the mean of sigmoid((Q - U) / temperature) is a half, by bisection."""
    low, high = q.min(1).values - 50 * temperature, q.max(1).values + 50 * temperature
    for _ in range(200):
        middle = (low + high) / 2
        above = (policy * ((q - middle[:, None]) / temperature).sigmoid()).sum(1) > 0.5
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return low


def test_bounded_targets_are_a_policy_that_is_nowhere_worse_on_random_decision_processes() -> None:
    worst = 0.0
    for seed in range(200):
        transition, reward, policy = tabular(seed)
        v, q = values(transition, reward, policy)
        ratio = best_ratio(q - threshold(q, policy, 1e-3)[:, None], 0.7, 1.3, 1e-3)
        assert ((policy * ratio).sum(1) - 1).abs().max() < 1e-12
        improved, _ = values(transition, reward, policy * ratio)
        assert (improved - v).min() > -1e-12
        worst = max(worst, float(((policy * best_ratio(q - v[:, None], 0.7, 1.3, 1e-3)).sum(1) - 1).abs().max()))
    assert 0.2 < worst < 0.3  # the mean in place of the median is no distribution


def test_the_target_is_a_step_in_the_limit_and_its_slope_that_of_the_sigmoid() -> None:
    returns = torch.tensor([-1.0, -1e-4, 1e-4, 1.0])
    torch.testing.assert_close(best_ratio(returns, 0.8, 1.2, 1e-6), torch.tensor([0.8, 0.8, 1.2, 1.2]))
    x = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(best_ratio(x, 0.8, 1.2, 0.5), 1 - 0.2 + 0.4 * (x / 0.5).sigmoid())


def test_the_median_loss_is_least_where_half_of_the_mass_lies_above() -> None:
    returns = torch.tensor([0.0, 0.0, 0.0, 40.0, 80.0], dtype=torch.float64)
    u = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([u], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = median_loss(returns - u).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (returns - u.detach()).sigmoid().mean() == pytest.approx(0.5, abs=1e-6)
    assert float(u.detach()) < 3  # near the median 0, far from the mean 24


def test_the_trained_median_normalises_the_targets_of_skewed_returns_and_the_value_does_not() -> None:
    learner: BPO = algorithm("bpo")
    heavy = torch.randn(4096, generator=torch.Generator().manual_seed(0)).exp()
    returns = (heavy - heavy.mean()) / heavy.std()  # spread 1, as those of normalised rewards
    obs, zero = {"state": torch.zeros(len(returns), 1, 6)}, torch.zeros(len(returns))
    rows = Rows(obs, {}, zero[:, None], zero, returns, zero)
    optimizer = torch.optim.Adam([*learner.median.parameters(), *learner.critic.parameters()], lr=3e-3)
    for at in torch.arange(4096).view(64, 64).repeat(4, 1):
        optimizer.zero_grad()
        learner.critic_loss(rows[at]).backward()
        optimizer.step()
    with torch.no_grad():
        thresholds = [net(rows[slice(1)].obs) for net in (learner.median, learner.critic)]
    by_median, by_value = (float(best_ratio(returns - u, 0.7, 1.3, 0.001).mean()) for u in thresholds)
    assert by_median == pytest.approx(1.0, abs=0.03)
    assert by_value < 0.93


def test_bpo_starts_at_ratio_one_and_pushes_towards_better_actions() -> None:
    learner: BPO = algorithm("bpo", temperature=1e-6)
    rows = rows_of(learner)
    loss, info = learner.actor_loss(rows, diagnose=True)
    assert float(info["approx_kl"]) == pytest.approx(0, abs=1e-9)
    assert float(info["outside"]) == 0.0
    actual = torch.autograd.grad(loss, list(learner.policy.parameters()))
    with torch.no_grad():
        side = torch.sign(rows.value_target - learner.median(rows.obs))
        weight = (rows.value_target - learner.critic(rows.obs)).abs()
    plain = -(side * weight * learner.policy.decisions(rows.obs, rows.record).logp.sum(1)).mean()
    for a, b in zip(actual, torch.autograd.grad(plain, list(learner.policy.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_bpo_pulls_a_ratio_beyond_its_target_back() -> None:
    learner: BPO = algorithm("bpo", temperature=1e-6)
    rows = rows_of(learner)
    rows = Rows(rows.obs, rows.record, rows.logp - 1.0, rows.advantage, rows.value_target, rows.value)  # ratio e
    loss, _ = learner.actor_loss(rows, diagnose=False)
    actual = torch.autograd.grad(loss, list(learner.policy.parameters()))
    with torch.no_grad():
        weight = (rows.value_target - learner.critic(rows.obs)).abs()
    down = (weight * torch.e * learner.policy.decisions(rows.obs, rows.record).logp.sum(1)).mean()
    for a, b in zip(actual, torch.autograd.grad(down, list(learner.policy.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_many_mirror_steps_end_at_the_exponential_of_the_advantage() -> None:
    g = torch.Generator().manual_seed(0)
    old = torch.randn(5, generator=g, dtype=torch.float64).softmax(0)
    advantage = torch.randn(5, generator=g, dtype=torch.float64)
    logits = old.log().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        change = logits.log_softmax(0) - old.log()
        loss = (old * mirror(change, 0.7 * advantage, 0.0, 0.0).loss).sum()  # expectation under the old policy
        loss.backward()
        return loss

    optimizer.step(closure)
    wanted = (old.log() + 0.7 * advantage).softmax(0)
    torch.testing.assert_close(logits.detach().softmax(0), wanted, rtol=0, atol=3e-8)


def assert_same_gradient(loss: Tensor, expected: Tensor, learner: ActorCritic) -> None:
    parameters = list(learner.policy.parameters())
    tools.assert_close(tools.gradient(loss, parameters), tools.gradient(expected, parameters))


def test_mdpo_follows_the_advantage_times_its_step_less_the_log_ratio() -> None:
    learner: MDPO = algorithm("mdpo", step_size=0.5)
    rows = rows_of(learner)
    logp = learner.policy.decisions(rows.obs, rows.record).logp.sum(1)
    advantage = 0.5 * normalize(rows.advantage)
    loss, _ = learner.actor_loss(rows, diagnose=False)
    assert_same_gradient(loss, -(advantage * logp).mean(), learner)
    moved = replace(rows, logp=rows.logp - 0.3)  # all ratios are exp(0.3), of which the KL pulls back 0.3
    loss, _ = learner.actor_loss(moved, diagnose=False)
    assert_same_gradient(loss, ((0.3 - advantage) * math.exp(0.3) * logp).mean(), learner)


def divergence(learner: Any, rollout: Rollout) -> float:
    """Mean KL of the policy after an update to the one before, in the states of the rollout."""
    obs = flatten(rollout.obs)
    old = copy.deepcopy(learner.policy)
    metrics = learner.update(rollout)
    assert metrics["actor/epochs"] == learner.config.epochs
    learner.policy.load_state_dict(learner.policy.state_dict() | dict(old.named_buffers()))
    with torch.no_grad():
        new_mean, new_log_std = learner.policy.distribution(obs)
        old_mean, old_log_std = old.distribution(obs)
        apart = kl_divergence(Normal(new_mean, new_log_std.exp()), Normal(old_mean, old_log_std.exp()))
    return float(apart.flatten(1).sum(1).mean())


def test_the_kl_of_an_update_of_mdpo_falls_as_training_proceeds() -> None:
    found = []
    for done in (0, 10, 15, 19):
        learner: MDPO = algorithm("mdpo", epochs=40, batch_size=256, lr=3e-3, lr_schedule="constant")
        rollout = tools.sampler_for(learner).collect(learner.act)
        learner.updates = done
        found.append(divergence(learner, rollout))
    assert [kl / found[0] for kl in found[1:]] == pytest.approx([0.5**2, 0.25**2, 0.05**2], rel=0.4)


def test_on_the_same_rollout_bpo_moves_the_policy_about_as_far_as_ppo_does() -> None:
    bpo, ppo = (algorithm(name, epochs=10, lr=1e-3) for name in ("bpo", "ppo"))
    rollout = tools.sampler_for(bpo).collect(bpo.act)
    by_bpo, by_ppo = (divergence(learner, rollout) for learner in (bpo, ppo))
    assert 0.003 < min(by_bpo, by_ppo) < max(by_bpo, by_ppo) < 0.03
    assert 1 / 3 < by_bpo / by_ppo < 3


def test_the_steps_of_mdpo_shrink_to_nothing() -> None:
    learner: MDPO = algorithm("mdpo", step_size=2.0)
    assert learner.step_size == 2.0
    learner.updates = 15
    assert learner.step_size == pytest.approx(0.5)
    learner.updates = 20
    rows = rows_of(learner)
    loss, _ = learner.actor_loss(rows, diagnose=True)
    assert max(float(g.abs().max()) for g in torch.autograd.grad(loss, list(learner.policy.parameters()))) < 1e-6


def test_the_drift_of_ta_lpo_narrows_with_the_budget_and_resumes() -> None:
    make = partial(algorithm, "ta_lpo", updates=4, entropy_coef=0.01, final=0.2)
    learner, other = tools.resumed(make)
    for trained in (learner, other):
        left = {name: controller.value for name, controller in trained.estimator.controllers.items()}
        assert left == pytest.approx({"alpha": 1.2, "beta": 0.36, "entropy": 0.006, "kl": 0.0, "ratio_variance": 0.0})
    sampler = tools.sampler_for(learner)
    for _ in range(2):
        metrics = learner.update(sampler.collect(learner.act))
    assert metrics["actor/drift_width"] == pytest.approx(0.8)  # of the last update; what comes after is final
    assert learner.estimator.controllers["alpha"].value == pytest.approx(0.4)


def test_ta_lpo_with_wide_drifts_is_the_unclipped_gradient() -> None:
    learner: TALPO = algorithm("ta_lpo", alpha=1e6, beta=1e6)
    rows = rows_of(learner)
    rows = Rows(rows.obs, rows.record, rows.logp - 0.3, rows.advantage, rows.value_target, rows.value)
    parameters = list(learner.policy.parameters())
    actual = torch.autograd.grad(learner.actor_loss(rows, diagnose=False)[0], parameters)
    change = learner.policy.decisions(rows.obs, rows.record).logp.sum(1) - rows.logp.sum(1)
    advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
    plain = torch.autograd.grad(importance(change, advantage, 0.8, 1.2).loss.mean(), parameters)
    for a, b in zip(actual, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["bpo", "mdpo", "ppo", "ta_lpo"])
def test_a_resumed_run_ends_with_the_same_weights(name: str) -> None:
    learner, other = tools.resumed(partial(algorithm, name, lr_schedule="adaptive", target_kl=0.01))
    for key, value in learner.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[key]), key
    for mine, theirs in zip(learner.critics().values(), other.critics().values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_the_adaptive_rate_falls_after_large_steps_and_rises_after_small_ones() -> None:
    learner: PPO = algorithm("ppo", lr=1e-3, lr_schedule="adaptive", target_kl=0.01)
    for kl, factor in ((0.03, 1 / LR_FACTOR), (0.015, 1.0), (0.004, LR_FACTOR), (0.0, 1.0)):
        before = learner.optimizer.param_groups[0]["lr"]
        learner._adapt_lr(kl)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(before * factor)
    for kl, bound in ((1.0, 1e-5), (1e-6, 1e-2)):
        for _ in range(50):
            learner._adapt_lr(kl)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(bound)


@pytest.mark.parametrize(("lr", "target_kl", "factor"), [(1e-4, 1e3, LR_FACTOR), (5e-3, 1e-7, 1 / LR_FACTOR)])
def test_every_step_but_the_first_adapts_the_rate_to_its_kl(lr: float, target_kl: float, factor: float) -> None:
    learner: PPO = algorithm("ppo", lr=lr, lr_schedule="adaptive", target_kl=target_kl)
    metrics = learner.update(tools.sampler_for(learner).collect(learner.act))
    assert metrics["actor/lr"] == pytest.approx(lr * factor**7)  # two epochs of four minibatches
    assert metrics["actor/epochs"] == 2


@pytest.mark.parametrize(("target_kl", "epochs", "steps"), [(1e-7, 0, 1), (1e3, 2, 8), (None, 2, 8)])
def test_the_epochs_end_once_the_kl_is_too_large(target_kl: float | None, epochs: int, steps: int) -> None:
    learner: PPO = algorithm("ppo", target_kl=target_kl)
    metrics = learner.update(tools.sampler_for(learner).collect(learner.act))
    assert metrics["actor/epochs"] == epochs
    assert learner.optimizer.state[learner.parameters[0]]["step"] == steps


@pytest.mark.parametrize("name", ["bpo", "mdpo", "ppo", "ta_lpo"])
def test_running_statistics_move_when_the_epochs_are_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = algorithm(name)
    statistics = lambda: [b.clone() for net in learner.observers() for b in net.buffers()]  # noqa: E731
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    before, actor_loss, seen = statistics(), learner.actor_loss, []

    def spy(rows: Rows, *, diagnose: bool) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(statistics())
        return actor_loss(rows, diagnose=diagnose)

    monkeypatch.setattr(learner, "actor_loss", spy)
    learner.update(tools.sampler_for(learner).collect(learner.act))
    assert len(seen) == 8 and all(same(before, during) for during in seen)
    assert not same(before, statistics())


def test_the_linear_rate_ends_at_nothing() -> None:
    learner: PPO = algorithm("ppo", lr=1e-3, lr_schedule="linear")
    sampler = tools.sampler_for(learner)
    rates = [learner.update(sampler.collect(learner.act))["actor/lr"] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.95e-3, 0.9e-3])


def test_a_clipped_value_counts_the_larger_error() -> None:
    rows = Rows({}, {}, torch.zeros(3), torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3))
    value = torch.tensor([0.1, 0.5, 3.0], requires_grad=True)
    loss = value_loss(value, rows, clip=0.2)
    assert loss.item() == pytest.approx((0.9**2 + 0.8**2 + 2.0**2) / 3)
    (gradient,) = torch.autograd.grad(loss, value)
    assert gradient[1] == 0.0 and gradient[0] != 0.0 and gradient[2] != 0.0
    assert value_loss(value, rows).item() == pytest.approx((0.9**2 + 0.5**2 + 2.0**2) / 3)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("ppo", {"lr_schedule": "cosine"}, "adaptive, constant, linear"),
        ("ppo", {"lr_schedule": "adaptive"}, "target_kl"),
        ("ppo", {"value_clip": -1.0}, "value_clip"),
        ("bpo", {"bound": 1.0}, "bound"),
        ("bpo", {"temperature": 0.0}, "temperature"),
        ("mdpo", {"step_size": 0.0}, "step_size"),
        ("ta_lpo", {"final": 0.0}, "final must be positive"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        algorithm(name, **settings)


@pytest.mark.parametrize("name", ["ppo", "bpo"])
def test_a_critic_that_normalises_as_the_policy_takes_its_statistics(name: str) -> None:
    policy = GaussianPolicy(GaussianConfig(normalization="minmax"), PolicySpec({"state": (2,)}, 2))
    policy.fit_normalizer({"state": {"min": [0.0, -2.0], "max": [4.0, 0.0]}})
    make = lambda mode: make_algorithm(  # noqa: E731
        name, CONFIGS[name](critic=ValueConfig(normalization=mode)), policy, total_updates=9
    )
    learner: Any = make("minmax")
    for critic in learner.critics().values():
        assert critic.encoder.normalizer.offset.tolist() == [2.0, -1.0]
        assert critic.encoder.normalizer.scale.tolist() == [2.0, 1.0] and bool(critic.encoder.normalizer.fitted)
    with pytest.raises(UserError, match=r"algorithm\.critic\.normalization=running"):
        make("meanstd")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bpo", "mdpo", "ta_lpo"])
def test_they_learn_the_point_mass(name: str) -> None:
    learner = algorithm(name, updates=100, decisions=40, epochs=6, batch_size=512, lr=1e-3)
    sampler = tools.sampler_for(learner, num_envs=64)
    for _ in range(30):
        learner.update(sampler.collect(learner.act))
    for _ in range(2):
        sampler.episode_stats()
        sampler.collect(learner.act)
    assert sampler.episode_stats()["rollout/success"] > 0.85
