"""Tests of nearest pairs: brute-force search, the limits of beta, and novelty."""

from __future__ import annotations

import numpy as np
import pytest

from robopolicy.errors import UserError

pytest.importorskip("scipy")

from robopolicy.contrib.offline.nearest_neighbors import NearestPairs

RNG = np.random.default_rng(0)
STATE, ACTION = 5.0 + 3.0 * RNG.normal(size=(300, 3)), RNG.uniform(-1, 1, (300, 2))


def brute_force(beta: float, state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    key = np.concatenate([beta * (STATE - STATE.mean(0)) / STATE.std(0), ACTION], 1)
    asked = np.concatenate([beta * (state - STATE.mean(0)) / STATE.std(0), action], 1)
    distance = np.linalg.norm(asked[:, None] - key[None], axis=-1)
    return distance.min(1), distance.argmin(1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
def test_nearest_pair_equals_the_brute_force_result(beta: float) -> None:
    state, action = 5.0 + 3.0 * RNG.normal(size=(40, 3)), RNG.uniform(-1, 1, (40, 2))
    distance, row = NearestPairs(STATE, ACTION, beta=beta).nearest(state, action)
    expected, expected_row = brute_force(beta, state, action)
    np.testing.assert_allclose(distance, expected)
    np.testing.assert_array_equal(row, expected_row)


def test_a_large_beta_matches_states_and_zero_beta_matches_actions() -> None:
    shuffled = np.roll(ACTION, 7, 0)
    _, row = NearestPairs(STATE, ACTION, beta=1e6).nearest(STATE, shuffled)
    np.testing.assert_array_equal(row, np.arange(300))
    _, row = NearestPairs(STATE, ACTION, beta=0.0).nearest(STATE, shuffled)
    np.testing.assert_array_equal(row, np.roll(np.arange(300), 7))


def test_distances_ignore_state_units_and_constant_dimensions() -> None:
    constant = np.concatenate([STATE * [1.0, 1e3, 1e-3], np.full((300, 1), 4.0)], 1)
    _, row = NearestPairs(STATE, ACTION).nearest(STATE[:50] + 0.1, ACTION[:50])
    moved = np.concatenate([(STATE[:50] + 0.1) * [1.0, 1e3, 1e-3], np.full((50, 1), 4.0)], 1)
    _, other = NearestPairs(constant, ACTION).nearest(moved, ACTION[:50])
    np.testing.assert_array_equal(row, other)


def test_novelty_separates_in_distribution_from_out_of_distribution_pairs() -> None:
    pairs = NearestPairs(STATE, ACTION)
    more = pairs.nearest(5.0 + 3.0 * RNG.normal(size=(400, 3)), RNG.uniform(-1, 1, (400, 2)))[0]
    assert float((pairs.novelty(more) < 1).mean()) == pytest.approx(0.95, abs=0.05)
    far = pairs.nearest(STATE + 30.0, ACTION)[0]
    assert float(pairs.novelty(far).min()) > 3


def test_the_usual_distance_excludes_the_pair_itself() -> None:
    line = np.arange(11.0)[:, None]
    pairs = NearestPairs(np.zeros((11, 1)), line, beta=1.0)
    assert pairs.usual == 1.0
    assert pairs.novelty(np.array([0.5, 2.0])).tolist() == [0.5, 2.0]


def test_data_without_neighbours_is_refused() -> None:
    with pytest.raises(UserError, match="two pairs"):
        NearestPairs(STATE[:1], ACTION[:1])
    with pytest.raises(UserError, match="finite"):
        NearestPairs(np.full((4, 1), np.nan), np.zeros((4, 1)))
