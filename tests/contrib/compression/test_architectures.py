"""Tests of compression: the N2N reward, its two stages, invalid searches and the random baseline."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from robopolicy.contrib.compression.architectures import (
    SHARES,
    Controllers,
    ControllersConfig,
    RandomWidths,
    compression_reward,
    constrained_reward,
)
from robopolicy.errors import UserError

TEACHER = (64, 64, 64, 64)


def test_compression_reward_matches_the_published_formula():
    assert compression_reward(1.0, 1.0, 0.5) == pytest.approx(0.75)
    assert compression_reward(1.0, 1.0, 0.9) == pytest.approx(0.99)
    assert compression_reward(0.4, 0.8, 0.9) == pytest.approx(0.495)
    rising = [compression_reward(0.7, 0.8, c / 100) for c in range(101)]
    assert all(a < b for a, b in pairwise(rising))
    with pytest.raises(UserError, match="The teacher scores 0"):
        compression_reward(0.5, 0.0, 0.5)


def test_reward_of_a_violated_limit_decreases_over_search_rounds():
    assert constrained_reward(0.9, False, 99) == 0.9
    found = [constrained_reward(0.9, True, round_) for round_ in (0, 5, 10, 15, 30)]
    assert found[0] == 0.9 and found[-1] == found[-2] == -1.0
    leniency = (2 / 3) ** 4
    assert found[1] == pytest.approx((leniency - 1) + leniency * 0.9)
    assert found == sorted(found, reverse=True)


def run_search(search, reward, rounds):
    tried = []
    for _ in range(rounds):
        asked = search.ask()
        search.tell([reward(widths) for widths in asked])
        tried += asked
    return tried


def test_layers_are_removed_before_they_are_shrunk():
    search = Controllers(ControllersConfig(removal_rounds=5, population=3), TEACHER, seed=1)
    tried = run_search(search, lambda widths: 1.0 - len(widths) / 4 if widths else -1.0, 8)
    removed, shrunk = tried[:15], tried[15:]
    assert all(set(widths) <= {64} and len(widths) <= 4 for widths in removed)
    depth = min(len(widths) for widths in removed if widths)
    assert all(len(widths) == depth for widths in shrunk)
    assert {width for widths in shrunk for width in widths} <= {max(1, round(64 * share)) for share in SHARES}


@pytest.mark.parametrize("stage", ["removal", "shrinking"])
def test_controllers_converge_to_layer_widths_with_high_reward(stage):
    torch.manual_seed(0)
    rounds = 40 if stage == "removal" else 0
    search = Controllers(ControllersConfig(removal_rounds=rounds, population=16, lr=0.02), (64, 48, 32, 16), seed=0)
    if stage == "removal":  # only the last layer is worth its cost
        tried = run_search(search, lambda widths: float(16 in widths) - 0.25 * len(widths), 40)
        right = [widths == (16,) for widths in tried]
        assert sum(right[-64:]) > 48 > 16 > sum(right[:64])
    else:
        tried = run_search(search, lambda widths: -sum(widths) / 160, 40)
        first, last = (sum(map(sum, part)) / len(part) for part in (tried[:64], tried[-64:]))
        assert last < 0.5 * first


def test_a_restored_search_continues_identically():
    settings = ControllersConfig(removal_rounds=3, population=2)

    def worth(widths):
        return sum(widths) / 256

    whole, first, second = (Controllers(settings, TEACHER, seed=5) for _ in range(3))
    expected = run_search(whole, worth, 6)
    started = run_search(first, worth, 4)
    second.load_state_dict(first.state_dict())
    assert started + run_search(second, worth, 2) == expected
    original, restored = RandomWidths(TEACHER, seed=5), RandomWidths(TEACHER, seed=6)
    original.ask()
    restored.load_state_dict(original.state_dict())
    assert restored.ask() == original.ask()


def test_random_search_covers_all_depths_and_widths():
    tried = run_search(RandomWidths(TEACHER, population=50, seed=0), len, 4)
    assert {len(widths) for widths in tried} == {0, 1, 2, 3, 4}
    assert {width for widths in tried for width in widths} == {max(1, round(64 * share)) for share in SHARES}


def test_searches_without_layers_or_rounds_are_refused():
    with pytest.raises(UserError, match="no hidden layers"):
        Controllers(ControllersConfig(), ())
    with pytest.raises(UserError, match="population must be at least 1"):
        ControllersConfig(population=0)
