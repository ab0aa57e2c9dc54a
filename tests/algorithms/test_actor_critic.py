"""Tests of the shared on-policy learner, with PPO, and of the closed forms of its surrogates."""

from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from on_policy_learners import (
    algorithm,
    check_moves_statistics_when_the_epochs_are_over,
    check_takes_the_statistics_of_the_policy,
)
from torch import Tensor

from robopolicy.algorithms.common.on_policy import LR_FACTOR, adapt_rate, value_loss
from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.algorithms.ppo import PPO
from robopolicy.core.surrogates import best_ratio, mirror
from robopolicy.errors import UserError


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


def test_bounded_target_ratios_never_lower_a_state_value_on_random_mdps() -> None:
    worst = 0.0
    for seed in range(200):
        transition, reward, policy = tabular(seed)
        v, q = values(transition, reward, policy)
        ratio = best_ratio(q - threshold(q, policy, 1e-3)[:, None], 0.7, 1.3, 1e-3)
        assert ((policy * ratio).sum(1) - 1).abs().max() < 1e-12
        improved, _ = values(transition, reward, policy * ratio)
        assert (improved - v).min() > -1e-12
        worst = max(worst, float(((policy * best_ratio(q - v[:, None], 0.7, 1.3, 1e-3)).sum(1) - 1).abs().max()))
    assert 0.2 < worst < 0.3  # with the mean in place of the median it is not a distribution


def test_the_best_ratio_is_a_scaled_sigmoid_and_a_step_in_the_limit() -> None:
    returns = torch.tensor([-1.0, -1e-4, 1e-4, 1.0])
    torch.testing.assert_close(best_ratio(returns, 0.8, 1.2, 1e-6), torch.tensor([0.8, 0.8, 1.2, 1.2]))
    x = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(best_ratio(x, 0.8, 1.2, 0.5), 1 - 0.2 + 0.4 * (x / 0.5).sigmoid())


def test_mirror_loss_minimum_is_the_exponentially_advantage_weighted_policy() -> None:
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


def test_the_adaptive_rate_falls_after_large_steps_and_rises_after_small_ones() -> None:
    learner: PPO = algorithm("ppo", lr=1e-3, lr_schedule="adaptive", target_kl=0.01)
    for kl, factor in ((0.03, 1 / LR_FACTOR), (0.015, 1.0), (0.004, LR_FACTOR), (0.0, 1.0)):
        before = learner.optimizer.param_groups[0]["lr"]
        adapt_rate(learner.optimizer, torch.tensor(kl, dtype=torch.float64), 0.01)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(before * factor)
    for kl, bound in ((1.0, 1e-5), (1e-6, 1e-2)):
        for _ in range(50):
            adapt_rate(learner.optimizer, torch.tensor(kl, dtype=torch.float64), 0.01)
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
    assert learner.optimizer.state[learner.optimizer.param_groups[0]["params"][0]]["step"] == steps


def test_running_statistics_move_when_the_epochs_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    check_moves_statistics_when_the_epochs_are_over("ppo", monkeypatch)


def test_the_linear_schedule_lowers_the_learning_rate_in_equal_steps() -> None:
    learner: PPO = algorithm("ppo", lr=1e-3, lr_schedule="linear")
    sampler = tools.sampler_for(learner)
    rates = [learner.update(sampler.collect(learner.act))["actor/lr"] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.95e-3, 0.9e-3])


def test_the_clipped_value_loss_takes_the_larger_error() -> None:
    rows = RolloutBatch({}, {}, torch.zeros(3), torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3))
    value = torch.tensor([0.1, 0.5, 3.0], requires_grad=True)
    loss = value_loss(value, rows, clip=0.2)
    assert loss.item() == pytest.approx((0.9**2 + 0.8**2 + 2.0**2) / 3)
    (gradient,) = torch.autograd.grad(loss, value)
    assert gradient[1] == 0.0 and gradient[0] != 0.0 and gradient[2] != 0.0
    assert value_loss(value, rows).item() == pytest.approx((0.9**2 + 0.5**2 + 2.0**2) / 3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"lr_schedule": "cosine"}, "adaptive, constant, linear"), ({"lr_schedule": "adaptive"}, "target_kl")],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        algorithm("ppo", **settings)


def test_a_critic_with_the_normalisation_of_the_policy_copies_its_statistics() -> None:
    check_takes_the_statistics_of_the_policy("ppo")
