"""Tests of trajectory quality, coverage and the faults of a dataset."""

import numpy as np
import pytest

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.quality import (
    clipped_actions,
    constant_entries,
    coverage,
    idle_fraction,
    repeated_episodes,
    returns_of,
    trajectory_quality,
)
from robopolicy.errors import UserError


def walk(episodes: int, steps: int, seed: int, spread: float = 1.0) -> Episodes:
    """Random states and actions within `spread`, rewarded for small actions."""
    rng = np.random.default_rng(seed)

    def one() -> Episode:
        state, action = rng.uniform(-spread, spread, (steps, 1)), rng.uniform(-spread, spread, (steps, 1))
        return Episode({"state": state, "action": action, "reward": -np.abs(action[:, 0])})

    return Episodes.from_list([one() for _ in range(episodes)], 0.1)


def of_rows(states: list[int], actions: list[int]) -> Episodes:
    arrays = {"state": np.array(states, np.float32)[:, None], "action": np.array(actions, np.float32)[:, None]}
    return Episodes.from_list([Episode(arrays)], 0.1)


def test_trajectory_quality_is_zero_for_random_data_and_one_for_the_best() -> None:
    random, best = walk(200, 10, 0), walk(200, 10, 1, spread=0.1)
    low, high = (float(returns_of(data).mean()) for data in (random, best))
    assert trajectory_quality(returns_of(random), low, high) == pytest.approx(0.0)
    assert trajectory_quality(returns_of(best), low, high) == pytest.approx(1.0)
    assert trajectory_quality([-4.0, -2.0], -5.0, -1.0) == pytest.approx(0.5)  # by hand


def test_the_best_must_be_better_than_random() -> None:
    with pytest.raises(UserError, match="above the return of random actions, got 1 and 1"):
        trajectory_quality([1.0], 1.0, 1.0)


def test_coverage_equals_the_hand_computed_value_and_ignores_duplicates() -> None:
    data, replay = of_rows([0, 0, 1, 1], [0, 0, 0, 1]), of_rows([0, 1, 2, 3], [0, 1, 1, 0])
    seen = coverage(data, replay, bins=0)
    assert (seen.unique, seen.steps, seen.reference, seen.saco) == (3, 4, 4, 0.75)
    twice = coverage(Episodes.concat([data, data]), bins=0)
    assert twice.unique == 3 and twice.steps == 8 and twice.saco is None


def test_coverage_does_not_depend_on_episode_order() -> None:
    data, replay = walk(10, 20, 0, spread=0.5), walk(10, 20, 1)
    shuffled = data.subset(np.random.default_rng(0).permutation(10))
    assert coverage(data, replay, bins=10) == coverage(shuffled, replay, bins=10)


def test_coverage_uses_common_bins_and_is_lower_for_narrow_data() -> None:
    wide, narrow = walk(40, 50, 0), walk(40, 50, 1, spread=0.1)
    assert coverage(narrow, wide, bins=10).saco == pytest.approx(4 / 100, abs=0.02)  # 2 of 10 bins per axis
    assert coverage(wide, wide, bins=10).saco == 1.0


def test_coverage_cuts_the_larger_dataset_to_the_smaller() -> None:
    data, replay = walk(4, 10, 0), walk(30, 10, 1)
    assert coverage(data, replay).steps == coverage(replay, data).steps == 40


def test_coverage_refuses_incomparable_data() -> None:
    data = walk(1, 5, 0)
    with pytest.raises(UserError, match="same vectors"):
        coverage(data, Episodes.from_list([Episode({"other": np.zeros((5, 1)), "action": np.zeros((5, 1))})], 0.1))
    with pytest.raises(UserError, match="has no vectors"):
        coverage(Episodes.from_list([Episode({"action": np.zeros((5, 1))})], 0.1))
    with pytest.raises(UserError, match="0 or more, got -1"):
        coverage(data, bins=-1)


def test_faults_are_found_and_named() -> None:
    rng = np.random.default_rng(0)
    state = np.stack([rng.normal(size=100), np.full(100, 3.0)], 1)
    action = np.stack([rng.normal(size=100).clip(-0.5, 0.5), rng.integers(2, size=100), rng.normal(size=100)], 1)
    state[40:60], action[40:60] = state[40], action[40]
    episode = Episode({"state": state, "action": action})
    data = Episodes.from_list([episode, episode], 0.1, {"action": ("reach", "grip", "turn")})
    assert constant_entries(data) == ["state[1]"]
    clipped = clipped_actions(data)
    assert clipped["action[0] (reach)"] > 0.4 and clipped["action[2] (turn)"] == pytest.approx(0.02, abs=0.2)
    assert "action[1] (grip)" not in clipped  # a binary action is always at a bound
    assert idle_fraction(data) == pytest.approx(19 / 99)
    assert repeated_episodes(data) == 1
