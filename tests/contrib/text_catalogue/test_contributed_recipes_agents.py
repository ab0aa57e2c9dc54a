"""Tests of agent and checklist recipes: advantages over turns, steps, histories and subgoals."""

from __future__ import annotations

import pytest
import torch
from agent_steps import steps
from tabular import Tabular, check_recipe, ppo, recipe_of, tabular
from torch import Tensor

from robopolicy.contrib.text_catalogue.advantage_sources import Subgoals
from robopolicy.contrib.text_catalogue.comparisons import SharedSteps
from robopolicy.core.advantage_sources import Gae, ReturnToGo
from robopolicy.core.decisions import Decisions

DOUBLE = torch.float64


def lines(case: Tabular) -> list[list[tuple[int, list[int]]]]:
    """Units of each row as (number, columns of its decisions), in temporal order."""
    found = []
    for row, keep in enumerate(case.decisions.valid()):
        units: dict[int, list[int]] = {}
        for t in torch.nonzero(keep).flatten().tolist():
            units.setdefault(int(case.decisions.unit[row, t]), []).append(t)
        found.append(list(units.items()))
    return found


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    kept = values[mask]
    return (values - kept.mean()) / (kept.std() + 1e-6)


def unit_gae(case: Tabular, gamma: float, lam: float, value: Tensor | None = None) -> Tensor:
    d, result = case.decisions, torch.zeros_like(case.decisions.logp_old)
    value = d.value if value is None else value
    for row, units in enumerate(lines(case)):
        running, after = 0.0, 0.0
        for _, columns in reversed(units):
            own = float(value[row, columns[0]])
            running = float(d.reward[row, columns].sum()) + gamma * after - own + gamma * lam * running
            after = own
            result[row, columns] = running
    return result


def test_poad_does_not_discount_inside_an_action() -> None:
    """delta = V' - V inside, r + gamma V' - V at the end; the trace decays by lambda inside, gamma lambda outside."""

    def formula(case: Tabular) -> Tensor:
        d, advantage = case.decisions, torch.zeros_like(case.decisions.logp_old)
        for row, units in enumerate(lines(case)):
            running, after = 0.0, 0.0
            for _, columns in reversed(units):
                for t in reversed(columns):
                    gamma = 0.99 if t == columns[-1] else 1.0
                    delta = float(d.reward[row, t]) + gamma * after - float(d.value[row, t])
                    running = delta + gamma * 0.95 * running
                    after = float(d.value[row, t])
                    advantage[row, t] = running
        return ppo(case, whitened(advantage, d.valid()))[d.valid()].mean()

    check_recipe("poad", formula)


def test_vl_dac_tokens_of_a_step_share_its_advantage() -> None:
    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        advantage = whitened(unit_gae(case, 0.99, 0.95), d.valid())
        difference = case.logp() - d.logp_ref
        kl = torch.exp(-difference) - 1.0 + difference
        return (ppo(case, advantage, 0.1, 0.1) + 0.04 * kl)[d.valid()].mean()

    check_recipe("vl_dac", formula)
    single = tabular().decisions.with_fields(unit=torch.arange(6).expand(16, 6))
    torch.testing.assert_close(Gae(0.99, 0.95, level="unit")(single), Gae(0.99, 0.95)(single))


def test_hgpo_without_shared_observations_equals_the_episode_term() -> None:
    """Statistics of the episode term count every turn, as in the source."""
    case = tabular(extra={"observation": torch.arange(96).view(16, 6)})
    found = recipe_of("hgpo").advantage(case.decisions)
    turns: dict[int, list[float]] = {}
    reward = (case.decisions.reward * case.decisions.valid()).sum(1)
    for row, units in enumerate(lines(case)):
        turns.setdefault(int(case.decisions.group[row]), []).extend([float(reward[row])] * len(units))
    for row, keep in enumerate(case.decisions.valid()):
        peers = torch.tensor(turns[int(case.decisions.group[row])], dtype=DOUBLE)
        expected = (reward[row] - peers.mean()) / (peers.std() + 1e-6)
        assert found[row][keep].tolist() == pytest.approx([float(expected)] * int(keep.sum()), abs=1e-6)


def test_salt_averages_steps_shared_by_successes_and_failures() -> None:
    case = steps([[0.0, 1.0], [0.0, 0.0]], [[1, 2], [1, 2]], [0, 0], action=[[4, 5], [4, 6]])
    own = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    assert SharedSteps()(own, case).tolist() == [[0.0, 1.0], [0.0, -1.0]]
    apart = case.with_fields(extra={**case.extra, "observation": torch.tensor([[1, 2], [3, 4]])})
    assert SharedSteps()(own, apart).tolist() == [[1.0, 1.0], [-1.0, -1.0]]  # no shared steps: GRPO
    again = steps([[0.0] * 3, [0.0] * 3], [[1, 1, 2], [1, 3, 4]], [0, 0], action=[[4, 4, 5], [4, 6, 7]])
    assert SharedSteps()(own, again)[0].tolist() == [0.0, 0.0, 1.0]  # a rollout counts once


def subgoal_case(switch: list[int], high: list[float], low: list[float], reward: list[float]) -> Decisions:
    row = lambda x: torch.tensor([x], dtype=DOUBLE)  # noqa: E731
    extra = {"switch": row(switch) > 0, "high_value": row(high), "subgoal": torch.tensor([[True] + [False] * 3])}
    return Decisions(row([0.0] * 4), reward=row(reward), value=row(low), unit=torch.arange(4).unsqueeze(0), extra=extra)


def test_hiper_without_switches_equals_gae_over_turns() -> None:
    value, reward = [0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 2.0]
    case = subgoal_case([0, 0, 0, 0], value, value, reward)
    found = Subgoals(0.9, 0.8)(case)
    torch.testing.assert_close(found[:, 1:], Gae(0.9, 0.8, level="unit")(case)[:, 1:])
    total = 0.9 * 1.0 + 0.9**3 * 2.0  # one segment: its whole return minus the high value
    assert float(found[0, 0]) == pytest.approx(total - 0.1)


def test_hiper_steps_once_per_subgoal_and_its_low_level_bootstraps_from_the_high() -> None:
    gamma, lam = 0.9, 0.8
    high, low, reward = [0.5, 9.0, 0.7, 9.0], [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    case = subgoal_case([1, 0, 1, 0], high, low, reward)
    found = Subgoals(gamma, lam)(case)[0]
    second = 3.0 + gamma * 4.0 - 0.7
    first = 1.0 + gamma * 2.0 + gamma**2 * 0.7 - 0.5
    assert float(found[0]) == pytest.approx(first + gamma**2 * lam * second)
    delta = [2.0 + gamma * 0.7 - 0.2, 3.0 + gamma * 0.4 - 0.3, 4.0 - 0.4]
    assert found[1:].tolist() == pytest.approx([delta[0], delta[1] + gamma * lam * delta[2], delta[2]])


def test_hiper_with_one_critic_equals_two_and_fits_lambda_returns() -> None:
    """Its targets are lambda returns, of the high level where a subgoal begins, else of the low level."""
    value, reward = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    two = subgoal_case([1, 0, 1, 0], value, value, reward)
    one = two.with_fields(extra={key: entry for key, entry in two.extra.items() if key != "high_value"})
    start = Subgoals(0.9, 0.8)
    torch.testing.assert_close(start(one), start(two))
    target, fitted = start.targets(one)
    above = start(one.with_fields(extra={**one.extra, "subgoal": torch.ones(1, 4, dtype=torch.bool)}))
    below = start(one.with_fields(extra={**one.extra, "subgoal": torch.zeros(1, 4, dtype=torch.bool)}))
    expected = torch.where(one.extra["switch"], above, below) + one.require("value")
    torch.testing.assert_close(target, expected)
    assert bool(fitted.all())


def test_mixed_advantage_averages_the_turn_and_batch_normalised_returns() -> None:
    case = tabular(reward=torch.randn(16, 6, generator=torch.Generator().manual_seed(5), dtype=DOUBLE))
    d, found = case.decisions, recipe_of("mixed_advantage").advantage(case.decisions)
    returns: dict[tuple[int, int], float] = {}
    for row, units in enumerate(lines(case)):
        for i, (number, _) in enumerate(units):
            returns[row, number] = float(sum(d.reward[row, columns].sum() for _, columns in units[i:]))
    every = torch.tensor(list(returns.values()), dtype=DOUBLE)
    for row, units in enumerate(lines(case)):
        for number, columns in units:
            key = (int(d.group[row]), number)
            turn = torch.tensor([v for (r, n), v in returns.items() if (int(d.group[r]), n) == key], dtype=DOUBLE)
            own = returns[row, number]
            local = (own - turn.mean()) / (turn.std() + 1e-6) if len(turn) > 1 else torch.tensor(0.0)
            expected = 0.5 * local + 0.5 * (own - every.mean()) / (every.std() + 1e-6)
            torch.testing.assert_close(
                found[row, columns], expected.double().expand(len(columns)), atol=1e-5, rtol=1e-5
            )


def test_cm2_rewards_stay_in_their_turn_and_need_a_minimum_group_size() -> None:
    group = torch.zeros(6, dtype=torch.long)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[4:, 2:] = False  # two of six rollouts end after the first turn; four are too few to compare
    reward = torch.tensor([[1.0, 0, 5, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    case = Decisions(
        torch.zeros(6, 4, dtype=DOUBLE),
        reward=reward.double(),
        mask=mask,
        group=group,
        unit=torch.tensor([[0, 0, 1, 1]]).expand(6, 4),
    )
    found = recipe_of("cm2").advantage(case)
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, -0.5, 0.5], dtype=DOUBLE)
    torch.testing.assert_close(found[:, :2], expected[:, None].expand(6, 2))
    assert float(found[:, 2:].abs().max()) == 0.0


def test_cm2_with_one_turn_equals_dr_grpo() -> None:
    case = tabular(rollouts=6, unit=torch.zeros(24, 6, dtype=torch.long))
    found, base = (recipe_of(name).advantage(case.decisions) for name in ("cm2", "dr_grpo"))
    torch.testing.assert_close(found, base * case.decisions.valid())


def test_pcpg_spreads_each_reward_over_the_preceding_window() -> None:
    """PCPG: a reward reaches the decisions in the window before it; a window of one is REINFORCE."""
    reward = torch.tensor([[0.0, 0.0, 6.0, 0.0], [3.0, 0.0, 0.0, 9.0]], dtype=DOUBLE)
    case = Decisions(torch.zeros(2, 4, dtype=DOUBLE), reward=reward)
    seen = ReturnToGo(gamma=0.0, window=3)(case)
    assert seen.tolist() == [[2.0, 2.0, 3.0, 0.0], [1.0, 3.0, 4.5, 9.0]]
    early = case.with_fields(reward=torch.tensor([[0.0, 3.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]], dtype=DOUBLE))
    mean = case.with_fields(reward=torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=DOUBLE))
    torch.testing.assert_close(ReturnToGo(gamma=0.9, window=3)(early), ReturnToGo(gamma=0.9)(mean))
    torch.testing.assert_close(ReturnToGo(gamma=0.9, window=1)(case), ReturnToGo(gamma=0.9)(case))
    one = recipe_of("pcpg", advantage_source={"name": "return_to_go", "window": 1})
    found, valid = one.advantage(tabular().decisions), tabular().decisions.valid()
    plain = recipe_of("reinforce").advantage(tabular().decisions).expand_as(found)
    torch.testing.assert_close(found[valid], plain[valid])


def test_pcpg_gives_every_success_a_positive_advantage() -> None:
    """PCPG: steps after the end of a trajectory do not count as reward 0; here three of four are right."""
    length = torch.tensor([[5], [3], [4], [5]])
    mask = torch.arange(5) < length
    reward = (torch.arange(5) == length - 1) * torch.tensor([[1.0], [1.0], [1.0], [0.0]], dtype=DOUBLE)
    case = Decisions(torch.zeros(4, 5, dtype=DOUBLE), mask=mask, reward=reward, group=torch.arange(4))
    found = recipe_of("pcpg").advantage(case)
    right = torch.tensor([True, True, True, False])[:, None]
    assert (found[mask & right] > 0).all() and (found[mask & ~right] == 0).all()
