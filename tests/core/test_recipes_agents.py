"""Agent recipes: advantages that use turns, steps and histories."""

import pytest
import torch
from agent_steps import steps
from tabular import recipe_of, tabular

from robopolicy.core.advantage_sources import Gae, ReturnToGo
from robopolicy.core.decisions import Decisions, row_numbers, unit_numbers
from robopolicy.core.group_statistics import HistoryGroups

DOUBLE = torch.float64


def test_poad_equals_gae_for_single_token_actions_or_without_discount() -> None:
    case = tabular()
    single = case.decisions.with_fields(unit=torch.arange(6).expand(16, 6))
    both = Gae(0.99, 0.95, inner_gamma=1.0, inner_lam=0.95)
    torch.testing.assert_close(both(single), Gae(0.99, 0.95)(single))
    undiscounted = Gae(1.0, 0.95, inner_gamma=1.0, inner_lam=0.95)
    torch.testing.assert_close(undiscounted(case.decisions), Gae(1.0, 0.95)(case.decisions))


@pytest.mark.parametrize("level", ["token", "unit"])
def test_returns_and_gae_are_the_same_for_one_row_per_trajectory_and_one_row_per_unit(level: str) -> None:
    """A robot's chunks are separate rows, a sentence is one row: the numbers do not depend on the layout."""
    generator = torch.Generator().manual_seed(3)
    reward, value = torch.randn(2, 2, 6, generator=generator, dtype=DOUBLE)
    unit = (torch.arange(6) // 2).expand(2, 6)
    long = Decisions(torch.zeros(2, 6, dtype=DOUBLE), reward=reward, value=value, unit=unit)
    order = torch.tensor([3, 0, 4, 1, 5, 2])  # rows of two trajectories interleaved, each in order of time
    rows = lambda x: x.reshape(6, 2)[order]  # noqa: E731
    trajectory = torch.tensor([7, 7, 7, 2, 2, 2])[order]
    short = Decisions(torch.zeros(6, 2, dtype=DOUBLE), reward=rows(reward), value=rows(value), trajectory=trajectory)
    assert row_numbers(short).tolist() == unit_numbers(short)[:, 1].tolist() == [0, 0, 1, 1, 2, 2]
    for start in (Gae(0.9, 0.8, inner_gamma=1.0, inner_lam=1.0, level=level), ReturnToGo(0.9, level)):
        torch.testing.assert_close(start(short), rows(start(long)))


def test_gigpo_compares_steps_from_the_same_observation() -> None:
    case = steps([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [[1, 2], [1, 2], [1, 3]], [0, 0, 0])
    found = HistoryGroups(longest=0, gamma=0.5, base=False)(torch.zeros(3, 1), case)
    mean = (0.5 + 0.0 + 1.0) / 3
    expected = [[0.5 - mean, 0.5], [0.0 - mean, -0.5], [1.0 - mean, 0.0]]  # observation 3 occurs once
    torch.testing.assert_close(found, torch.tensor(expected, dtype=DOUBLE))
    other = HistoryGroups(longest=0, gamma=0.5, base=False)(torch.zeros(3, 1), case.with_fields(group=torch.arange(3)))
    assert float(other.abs().max()) == 0.0  # all groups are singletons: only the episode term remains


def test_hgpo_weights_longer_shared_histories_more() -> None:
    case = steps([[0.0, 1.0], [0.0, 0.0], [1.0, 0.75]], [[1, 2], [1, 2], [9, 2]], [0, 0, 0])
    episode = torch.tensor([[0.3], [-0.3], [0.0]], dtype=DOUBLE)
    found = HistoryGroups(longest=1, gamma=1.0)(episode, case)
    mean = (1.0 + 0.0 + 0.75) / 3  # all three observe 2; the first two observe 1 before it
    first = (0.3 + 2 * (1.0 - mean) + 3 * 0.5) / 6
    second = (-0.3 + 2 * (0.0 - mean) - 3 * 0.5) / 6
    assert found[:2, 1].tolist() == pytest.approx([first, second])
    assert float(found[2, 1]) == pytest.approx(0.75 - mean)  # its history is unique, and its episode advantage is 0
    assert found[:2, 0].tolist() == pytest.approx([(0.3 + 2 * 0.5) / 3, (-0.3 - 2 * 0.5) / 3])
    assert float(found[2, 0]) == 0.0
    spread = HistoryGroups(longest=0, gamma=1.0, base=False, standardise=True)(episode, case)
    assert spread[:2, 0].tolist() == pytest.approx([1.0, -1.0], abs=1e-5)


def test_gigpo_adds_the_step_term_to_the_episode_term() -> None:
    case = tabular()
    base = recipe_of("grpo").advantage(case.decisions)
    step = HistoryGroups(longest=0, gamma=0.95, base=False)(base, case.decisions)
    torch.testing.assert_close(recipe_of("gigpo").advantage(case.decisions), base + step)
