"""Tests of the optimistic actor-critic: closed-form targets and switches, a bandit, and its parts on river swim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chunk_bandit import batch, first_actions, flow, gaussian
from resumed_updates import assert_resumes
from torch import Tensor

from robopolicy.contrib.control.optimism import LazyUpdate, upper_value
from robopolicy.contrib.control.optimistic_ac import OptimisticAC, OptimisticACConfig, bellman_error
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError

CRITIC = CriticConfig(members=3, hidden=(32, 32), activation="relu", layer_norm=False)


def optimistic(seed: int = 0, **config: Any) -> OptimisticAC:
    torch.manual_seed(seed)
    settings = {
        "critic": CRITIC,
        "batch_size": 128,
        "lr": 3e-3,
        "critic_lr": 3e-3,
        "tau": 0.05,
        "min_switch_interval": 5,
    } | config
    return OptimisticAC(OptimisticACConfig(**settings), gaussian(log_std_init=-1.0), total_updates=1000)


def bandit(rows: int = 128, discount: float = 0.0) -> Transitions:
    peak = lambda action: 1 - 4 * (action.squeeze(1) - 0.4).square()  # noqa: E731
    return batch(torch.rand(rows, 2, 1) * 2 - 1, peak, discount=discount)


def test_the_upper_value_is_a_quantile_of_the_members() -> None:
    values = torch.tensor([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]])
    assert upper_value(values, 1.0).tolist() == [4.0, 5.0]
    assert upper_value(values, 0.5).tolist() == [1.0, 5.0]
    assert upper_value(values, 0.75).tolist() == [2.5, 5.0]


def test_each_critic_member_bootstraps_from_its_own_best_candidate_chunk() -> None:
    algorithm, data = optimistic(candidates=6), bandit(16, discount=0.9)
    with torch.no_grad():
        algorithm.generator.manual_seed(2)
        found = algorithm.target(data)
        algorithm.generator.manual_seed(2)
        chunks = algorithm.candidates(data)
        each = torch.stack([algorithm.target_critic(data.next_obs, chunks[:, c]) for c in range(7)], -1)
    assert chunks.shape == (16, 7, 2, 1) and float(chunks.abs().max()) <= 1
    assert float(chunks[:, 1:].min()) < -0.8 and float(chunks[:, 1:].max()) > 0.8  # candidates cover the bounds
    torch.testing.assert_close(found, data.reward + 0.9 * each.amax(-1))


def test_bellman_error_uses_the_optimistic_value() -> None:
    algorithm, data = optimistic(), bandit(16, discount=0.9)
    with torch.no_grad():
        chunks = algorithm.candidates(data)
        ahead = algorithm.critic.candidate_values(data.next_obs, chunks).amax(0).amax(-1)
        value = algorithm.critic(data.obs, data.chunk).amax(0)
        expected = (value - data.reward - 0.9 * ahead).square().mean()
        torch.testing.assert_close(bellman_error(algorithm.critic, data, chunks, 1.0), expected)


def test_actor_maximises_only_the_kept_critic() -> None:
    algorithm, data = optimistic(factor=1e9), bandit()
    for _ in range(3):
        algorithm.update(bandit())
    with torch.no_grad():
        for parameter in algorithm.critic.parameters():
            parameter.add_(1.0)
    algorithm.generator.manual_seed(4)
    loss, logp, _ = algorithm.actor_loss(data, torch.tensor(0.3))
    algorithm.generator.manual_seed(4)
    chunk, again = algorithm.policy.rsample(data.obs, generator=algorithm.generator)
    torch.testing.assert_close(logp, again)
    kept = algorithm.kept(data.obs, chunk).quantile(0.9, dim=0)
    torch.testing.assert_close(loss, (0.3 * logp - kept).mean())


def test_kept_critic_is_frozen_until_a_switch_that_resets_the_policy() -> None:
    algorithm = optimistic(min_switch_interval=1000)
    first = [p.clone() for p in algorithm.policy.parameters()]
    kept = [p.clone() for p in algorithm.kept.parameters()]
    for _ in range(4):
        metrics = algorithm.update(bandit())
    assert metrics["actor/switches"] == 0 and algorithm.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(kept, algorithm.kept.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, algorithm.policy.parameters(), strict=True))
    algorithm.reset_actor()
    assert all(torch.equal(a, b) for a, b in zip(first, algorithm.policy.parameters(), strict=True))
    for mine, current in zip(algorithm.kept.parameters(), algorithm.critic.parameters(), strict=True):
        assert torch.equal(mine, current) and not mine.requires_grad
    assert not algorithm.optimizer.state


def test_equal_critics_have_equal_errors_with_dropout() -> None:
    algorithm = optimistic(critic=CriticConfig(members=3, hidden=(32, 32), dropout=0.5))
    errors = algorithm.switch_critic(bandit(discount=0.9))
    assert torch.equal(errors["kept_error"], errors["current_error"])


def test_switch_is_due_when_the_kept_critic_error_exceeds_the_threshold() -> None:
    switch = LazyUpdate(2.0, 0.1)
    assert not switch.due(2.1, 1.0) and switch.due(2.11, 1.0) and switch.changes == 1
    patient = LazyUpdate(2.0, 0.0, min_switch_interval=2)
    assert [patient.due(9.0, 1.0) for _ in range(6)] == [False, False, True, False, False, True]
    smooth = LazyUpdate(2.0, 0.0, memory=0.5)
    found = [smooth.due(kept, 1.0) for kept in (1.0, 2.6, 2.6)]  # averages 1, 1.8, 2.2
    assert found == [False, False, True]
    resumed = LazyUpdate(2.0, 0.0, memory=0.5)
    resumed.load_state_dict(smooth.state_dict())
    assert resumed.state_dict() == smooth.state_dict()


def test_it_finds_the_best_action_of_a_bandit() -> None:
    algorithm = optimistic(temperature=0.05, temperature_lr=0.0, min_switch_interval=60)
    for _ in range(350):
        metrics = algorithm.update(bandit())
    assert (first_actions(algorithm.inference_policy()) - 0.4).abs().mean() < 0.15
    assert 1 <= metrics["actor/switches"] <= 4


@pytest.mark.parametrize("bins", [0, 21])
def test_a_resumed_run_ends_with_the_same_weights(bins: int) -> None:
    critic = CriticConfig(members=3, hidden=(16,), bins=bins, value_min=-5.0, value_max=5.0)
    assert_resumes(
        lambda seed: optimistic(seed, critic=critic, min_switch_interval=1), lambda: bandit(32, discount=0.9)
    )


def test_invalid_settings_are_refused() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"quantile": 0.0}, r"quantile must lie in \(0, 1\]"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"factor": 1}, "factor > 1"),
        ({"min_switch_interval": -1}, "min_switch_interval must be at least 0"),
        ({"num_min_qs": 1}, "'optimistic_ac' bootstraps from all members"),
        ({"backup_entropy": False}, "backup_entropy=false has no effect"),
        ({"average_members": True}, "average_members=true has no effect"),
    )
    for settings, reason in refused:
        with pytest.raises(UserError, match=reason):
            optimistic(**settings)
    with pytest.raises(UserError, match="needs policy=squashed_gaussian"):
        OptimisticAC(OptimisticACConfig(), flow(), total_updates=1)


# River swim: six states with a leftward current, a small reward at the left end and a large one at the right end.

PLACES, LENGTH, GAMMA = 6, 40, 0.95
MOVE = torch.zeros(PLACES, 2, PLACES)
for _place in range(PLACES):
    MOVE[_place, 0, max(_place - 1, 0)] = 1.0
    MOVE[_place, 1, max(_place - 1, 0)] += 0.4 if _place in (0, PLACES - 1) else 0.05
    MOVE[_place, 1, _place] += 0.6 if _place > 0 else 0.0
    MOVE[_place, 1, min(_place + 1, PLACES - 1)] += {0: 0.6, PLACES - 1: 0.0}.get(_place, 0.35)
EARNED = torch.zeros(PLACES, 2)
EARNED[0, 0], EARNED[PLACES - 1, 1] = 0.005, 1.0


def worth(policy: Tensor) -> float:
    """Value of the left end, where episodes start, under `policy` `(PLACES, 2)`."""
    move = (policy[:, :, None] * MOVE).sum(1)
    return float(torch.linalg.solve(torch.eye(PLACES) - GAMMA * move, (policy * EARNED).sum(1))[0])


def best() -> float:
    """Highest value of the left end."""
    table = torch.zeros(PLACES, 2)
    for _ in range(500):
        table = EARNED + GAMMA * MOVE @ table.amax(1)
    return float(table[0].amax())


def swim(policy: Tensor, counts: Tensor, generator: torch.Generator) -> None:
    """Run one episode and add its transitions to `counts` `(PLACES, 2, PLACES)`."""
    place = 0
    for _ in range(LENGTH):
        action = int(torch.multinomial(policy[place], 1, generator=generator))
        after = int(torch.multinomial(MOVE[place, action], 1, generator=generator))
        counts[place, action, after] += 1
        place = after


def fitted(counts: Tensor, prior: Tensor, table: Tensor, ahead: Callable[[Tensor], Tensor]) -> Tensor:
    """Tables `(M, PLACES, 2)` after sweeps of Bellman backups; each prior counts as one visit."""
    visits = counts.sum(2)
    for _ in range(30):
        total = visits * EARNED + GAMMA * torch.einsum("sap,mp->msa", counts, ahead(table))
        table = (prior + total) / (1 + visits)
    return table


def excess(table: Tensor, counts: Tensor) -> float:
    """Mean squared Bellman error of a table `(PLACES, 2)` on the counted transitions."""
    visits = counts.sum(2)
    after = torch.einsum("sap,p->sa", counts, table.amax(1)) / visits.clamp(min=1)
    return float(((table - EARNED - GAMMA * after).square() * visits).sum() / visits.sum())


def sharpened(logits: Tensor, table: Tensor) -> Tensor:
    """Exponential-weights update of the logits with a table."""
    logits = logits + 20 * table
    return logits - logits.amax(1, keepdim=True)


def episodes_of_optimism(seed: int, enough: float, limit: int, quantile: float = 1.0) -> int:
    generator, counts = torch.Generator().manual_seed(seed), torch.zeros(PLACES, 2, PLACES)
    prior = torch.rand(10, PLACES, 2, generator=generator) / (1 - GAMMA)
    table, logits, switch = prior, torch.zeros(PLACES, 2), LazyUpdate(2.0, 0.02)
    kept = upper_value(table, quantile)
    for episode in range(limit):
        if worth(logits.softmax(1)) >= enough:
            return episode
        swim(logits.softmax(1), counts, generator)
        table = fitted(counts, prior, table, lambda table: table.amax(2))
        current = upper_value(table, quantile)
        if switch.due(excess(kept, counts), excess(current, counts)):
            kept, logits = current, torch.zeros(PLACES, 2)
        logits = sharpened(logits, kept)
    return limit


def episodes_of_epsilon_greedy(seed: int, enough: float, limit: int, epsilon: float = 0.1) -> int:
    generator, counts = torch.Generator().manual_seed(seed), torch.zeros(PLACES, 2, PLACES)
    prior = torch.zeros(1, PLACES, 2)
    table, logits = prior, torch.zeros(PLACES, 2)
    for episode in range(limit):
        policy = logits.softmax(1)
        if worth(policy) >= enough:
            return episode
        swim((1 - epsilon) * policy + epsilon / 2, counts, generator)
        table = fitted(counts, prior, table, lambda table, policy=policy: (table * policy).sum(2))
        logits = sharpened(logits, table[0])
    return limit


def test_optimistic_agent_solves_riverswim_in_fewer_episodes_than_epsilon_greedy() -> None:
    torch.testing.assert_close(MOVE.sum(2), torch.ones(PLACES, 2))
    right = torch.tensor([[0.0, 1.0]]).expand(PLACES, 2)
    assert worth(right) == pytest.approx(best(), rel=1e-4) and best() > 10 * worth(right.flip(1))
    enough, limit, seeds = 0.95 * best(), 50, range(4)
    optimism = [episodes_of_optimism(seed, enough, limit) for seed in seeds]
    assert max(optimism) < limit
    assert sum(optimism) < sum(episodes_of_epsilon_greedy(seed, enough, limit) for seed in seeds) / 2
    assert sum(optimism) < sum(episodes_of_optimism(seed, enough, limit, quantile=0.5) for seed in seeds) / 2
