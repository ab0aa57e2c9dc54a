"""Goals in hindsight: fractions, distances, windows cut at the goal, and values of a chain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_replay import generator, request

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.goals import GoalConfig, GoalReplay
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError

PUBLISHED = GoalConfig(current=0.2, trajectory=0.5, random=0.3)


def recording(*lengths: int) -> Episodes:
    """Episodes whose states and achieved goals are the number of the frame."""
    episodes, first = [], 0
    for length in lengths:
        frame = np.arange(first, first + length, dtype=np.float32)[:, None]
        arrays: dict[str, Any] = {"state": frame, "goal": -frame, "achieved_goal": frame, "action": frame}
        episodes.append(Episode(arrays | {"reward": np.zeros(length, np.float32)}))
        first += length
    return Episodes.from_list(episodes, 0.1)


def goals_of(config: GoalConfig, rows: int, slot: int, **settings: Any) -> torch.Tensor:
    replay = GoalReplay.from_episodes(recording(20, 30, 50))
    spec = request(goals=config, **settings)
    return replay.sample_goals(torch.full((rows,), slot), spec, generator())


def test_fractions_of_goals_are_as_configured() -> None:
    rows, slot = 40_000, 25  # frame 5 of an episode from 20 to 49
    goals = goals_of(PUBLISHED, rows, slot)
    chance = {  # a random state is one of 100
        "current": 0.2 + 0.3 / 100,
        "later": 0.5 + 0.3 * 24 / 100,
        "elsewhere": 0.3 * 75 / 100,
    }
    found = {
        "current": (goals == slot),
        "later": (goals > slot) & (goals < 50),
        "elsewhere": (goals < slot) | (goals >= 50),
    }
    for name, p in chance.items():
        assert abs(float(found[name].float().mean()) - p) < 3 * math.sqrt(p * (1 - p) / rows), name


@pytest.mark.parametrize("geometric", [False, True])
def test_later_goals_stay_within_the_episode(geometric: bool) -> None:
    config = GoalConfig(trajectory=1.0, geometric=geometric)
    rows = 20_000
    goals = goals_of(config, rows, 25, gamma=0.8)
    assert int(goals.min()) == 26 and int(goals.max()) == 49
    if geometric:  # P(distance = k) = .2 * .8 ** (k - 1), the rest at the last state
        for k in (1, 2, 5):
            p = 0.2 * 0.8 ** (k - 1)
            assert abs(float((goals == 25 + k).float().mean()) - p) < 3 * math.sqrt(p / rows)
        assert float((goals == 49).float().mean()) == pytest.approx(0.8**23, abs=0.003)
    else:  # rounded uniform numbers from 26 to 49: the ends have half of the mass
        share = torch.bincount(goals, minlength=50)[26:].float() / rows
        assert float(share[1:-1].mean()) == pytest.approx(1 / 23, rel=0.02)
        assert float(share[0]) == pytest.approx(0.5 / 23, rel=0.2)
    assert goals_of(config, 10, 49).tolist() == [49] * 10  # the last state has only itself


def test_windows_end_at_their_goal() -> None:
    """Windows of 4 steps from frame 3: goals at distance 0, 2, 4 and -1, computed by hand."""
    replay = GoalReplay.from_episodes(recording(12))
    spec = request(steps=4, horizon=4, gamma=0.5, goals=PUBLISHED)
    batch = replay.take(torch.tensor([3, 3, 3, 3]), spec)
    found = replay.relabel(batch, torch.tensor([3, 5, 7, 2]), spec)
    assert found.obs["goal"][:, 0, 0].tolist() == found.next_obs["goal"][:, 0, 0].tolist() == [3.0, 5.0, 7.0, 2.0]
    assert found.steps.tolist() == [0, 2, 4, 4]
    assert found.reward.tolist() == [1.0, 0.25, 0.0, 0.0]
    assert found.discount.tolist() == [0.0, 0.0, 0.5**4, 0.5**4]
    assert found.rewards.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(found.chunk, batch.chunk)  # actions beyond the goal stay, as in the public code of DQC
    assert torch.equal(found.next_obs["state"][2:], batch.next_obs["state"][2:])


def test_without_fractions_windows_are_those_of_the_dataset() -> None:
    data = recording(8, 8)
    assert not GoalConfig()
    plain = Replay.from_episodes(data).sample(request(), generator())
    for replay in (Replay, GoalReplay):
        batch = replay.from_episodes(data).take(plain.index, request())
        for key in ("state", "goal", "achieved_goal"):
            assert torch.equal(batch.obs[key], plain.obs[key])
        assert torch.equal(batch.reward, plain.reward) and torch.equal(batch.discount, plain.discount)


@pytest.mark.parametrize("steps", [1, 3])
def test_values_of_a_chain_are_powers_of_the_distance(steps: int) -> None:
    """Tabular values of states 0 to 7 that follow each other, learned from relabelled windows."""
    replay = GoalReplay.from_episodes(recording(8))
    spec = request(batch_size=512, steps=steps, horizon=steps, gamma=0.9, goals=PUBLISHED)
    value, source = torch.zeros(8, 8), generator()
    for _ in range(30):
        batch = replay.sample(spec, source)
        state, goal, after = (
            obs[:, 0, 0].long() for obs in (batch.obs["state"], batch.obs["goal"], batch.next_obs["state"])
        )
        whole = (batch.steps == steps) | (batch.discount == 0)
        target = batch.reward + batch.discount * value[after, goal]
        value[state[whole], goal[whole]] = target[whole]
    distance = torch.arange(8)[None] - torch.arange(8)[:, None]
    expected = torch.where(distance >= 0, 0.9 ** distance.clamp(min=0), 0.0)
    known = 8 - steps  # states that start whole windows; the last states only serve as successors
    reachable = distance[:known] + torch.arange(known)[:, None] < known  # goals whose values are learned
    torch.testing.assert_close(value[:known][reachable], expected[:known][reachable].float())


def test_fractions_must_sum_to_one_and_goals_must_be_known() -> None:
    with pytest.raises(UserError, match=r"sum to 1, or all be 0; they sum to 0\.7"):
        GoalConfig(current=0.2, trajectory=0.5)
    data = recording(8)
    without = Episodes(
        {key: value for key, value in data.arrays.items() if key != "achieved_goal"},
        data.ends,
        data.tasks,
        data.seeds,
        data.control_dt,
    )
    with pytest.raises(UserError, match="no 'achieved_goal'"):
        GoalReplay.from_episodes(without).sample(request(goals=PUBLISHED), generator())
