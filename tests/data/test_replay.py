"""Tests of replay windows with hand-computed numbers, and of replay sampling against brute force."""

import pytest
import torch
from small_replay import drawn, generator, play, random_replay, request, state, successor, window

from robopolicy.data.batches import Transitions
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError


def test_a_window_inside_an_episode() -> None:
    replay = Replay(20, gamma=0.5)
    play(replay, 10, 5, "truncated")
    batch = window(replay, 1, horizon=3, steps=2)
    assert state(batch) == [11]
    assert batch.chunk[0, :, 0].tolist() == [-11, -12, -13]
    assert batch.mask.tolist() == [[1, 1, 1]]
    assert batch.rewards.tolist() == [[12, 13]]
    assert batch.reward.tolist() == [12 + 0.5 * 13]
    assert (batch.steps.tolist(), batch.discount.tolist()) == ([2], [0.25])
    assert successor(batch) == [13]


def test_termination_inside_a_chunk_cuts_rewards_and_bootstrap() -> None:
    replay = Replay(20, gamma=0.5)
    play(replay, 10, 3, "terminated")
    play(replay, 50, 3)
    batch = window(replay, 1, horizon=4, steps=3)
    assert batch.chunk[0, :, 0].tolist() == [-11, -12, -12, -12]  # the last action is repeated
    assert batch.mask.tolist() == [[1, 1, 0, 0]]
    assert batch.rewards.tolist() == [[12, 13, 0]]
    assert batch.reward.tolist() == [12 + 0.5 * 13]
    assert (batch.steps.tolist(), batch.discount.tolist()) == ([2], [0.0])
    assert successor(batch) == [13]


def test_truncation_inside_a_chunk_bootstraps_from_the_true_last_observation() -> None:
    replay = Replay(20, gamma=0.5)
    play(replay, 10, 3, "truncated")
    play(replay, 50, 3)
    batch = window(replay, 1, horizon=2, steps=3)
    assert (batch.steps.tolist(), batch.discount.tolist()) == ([2], [0.25])
    assert successor(batch) == [13]
    assert batch.returns.isnan().all()


def test_terminated_wins_over_truncated() -> None:
    replay = Replay(9, gamma=0.5)
    yes, obs = torch.tensor([True]), {"state": torch.zeros(1, 1)}
    replay.add(torch.tensor([0]), obs, torch.zeros(1, 1), torch.ones(1), yes, yes, obs)
    assert window(replay, 0).discount.tolist() == [0.0]
    assert window(replay, 0).returns.tolist() == [1.0]


def test_only_steps_with_a_known_successor_start_windows() -> None:
    replay = Replay(20)
    play(replay, 10, 3, "truncated")  # slots 0-2, last observation in 3
    play(replay, 50, 4)  # slots 4-7, still running
    assert drawn(replay, steps=1) == [0, 1, 2, 4, 5, 6]
    assert drawn(replay, steps=3) == [0, 1, 2, 4]
    assert drawn(replay, steps=1, horizon=5) == [0, 1, 2, 4, 5, 6]
    with pytest.raises(UserError, match="has no window of 9 steps"):
        running = Replay(20)
        play(running, 0, 5)
        running.sample(request(steps=9), generator())


def test_empty_replay_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        Replay(20).sample(request(), generator())
    with pytest.raises(UserError, match="at least 2 slots"):
        Replay(3, lanes=2)


def test_history_repeats_the_first_observation_of_its_own_episode() -> None:
    replay = Replay(20)
    play(replay, 10, 3, "truncated")
    play(replay, 50, 4)
    assert state(window(replay, 0, obs_horizon=3)) == [10, 10, 10]
    assert state(window(replay, 2, obs_horizon=3)) == [10, 11, 12]
    assert state(window(replay, 5, obs_horizon=3)) == [50, 50, 51]
    assert successor(window(replay, 2, obs_horizon=3)) == [11, 12, 13]
    assert successor(window(replay, 0, obs_horizon=3, steps=5)) == [11, 12, 13]


def test_ring_overwrites_the_oldest_steps_and_never_joins_old_with_new() -> None:
    replay = Replay(6)
    play(replay, 0, 10)  # slots hold 6 7 8 9 4 5; the head is at slot 4
    assert len(replay) == 6
    # Slot 3 (9) has no successor yet. Slot 4 (4) is the oldest.
    assert drawn(replay) == [0, 1, 2, 4, 5]
    assert successor(window(replay, 5)) == [6]
    batch = window(replay, 2, horizon=4, steps=1)
    assert batch.chunk[0, :, 0].tolist() == [-8, -9, -9, -9]
    assert batch.mask.tolist() == [[1, 1, 0, 0]]  # steps after the newest one are not part of the chunk
    assert drawn(replay, steps=3) == [0, 4, 5]


def test_windows_whose_history_was_overwritten_are_not_sampled() -> None:
    replay = Replay(6)
    play(replay, 0, 10)  # the oldest step is 4: it lacks 2 and 3, and 5 lacks 3
    assert drawn(replay, obs_horizon=3) == [0, 1, 2]
    assert state(window(replay, 0, obs_horizon=3)) == [4, 5, 6]
    fresh = Replay(6)
    play(fresh, 0, 3, "truncated")
    play(fresh, 50, 4)  # slots hold 52 53 | 2 3(final) 50 51
    assert drawn(fresh, obs_horizon=3) == [0, 4, 5]  # 2 lacks its history; 50 needs none, 53 has no successor


def test_returns_to_go_follow_termination_only() -> None:
    replay = Replay(30, gamma=0.5)
    play(replay, 0, 3, "terminated")
    play(replay, 10, 2, "truncated")
    play(replay, 20, 2)
    returns = replay.take(torch.tensor([0, 1, 2, 4, 5, 7]), request()).returns
    assert returns[:3].tolist() == [1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3]
    assert returns[3:].isnan().all()


def test_returns_of_an_episode_longer_than_the_ring() -> None:
    replay = Replay(4, gamma=0.5)
    play(replay, 0, 9, "terminated")  # slots 0 and 1 hold 8 and the last observation, 2 and 3 hold 6 and 7
    assert replay.take(torch.tensor([0, 3, 2]), request()).returns.tolist() == [9, 12.5, 13.25]
    assert drawn(replay) == [0, 2, 3]


def test_lanes_are_separate_and_may_pause() -> None:
    replay = Replay(20, lanes=2)
    flags = torch.zeros(2, dtype=torch.bool)
    both = {"state": torch.tensor([[0.0], [100.0]])}
    replay.add(torch.tensor([0, 1]), both, torch.zeros(2, 1), torch.ones(2), flags, flags, both)
    play(replay, 101, 2, lane=1)  # lane 0 adds no step
    play(replay, 1, 2, lane=0)
    assert drawn(replay) == [0, 1, 10, 11]
    assert successor(window(replay, 10)) == [101]
    assert successor(window(replay, 0)) == [1]
    replay = Replay(8, lanes=2)
    play(replay, 0, 9, lane=1)  # 8 5 6 7 in slots 4-7, lane 0 is empty
    assert drawn(replay) == [5, 6, 7]
    assert successor(window(replay, 7)) == [8]


def test_chunk_starts_only_samples_decisions_with_a_record() -> None:
    replay = Replay(40)
    play(replay, 0, 4, decision=True)  # decisions without a record
    for start in (4, 7, 10):
        play(replay, start, 1, record={"noise": torch.full((1, 2), float(start))})
        play(replay, start + 1, 2, decision=False)
    assert drawn(replay, chunk_starts_only=True) == [4, 7, 10]
    batch = replay.sample(request(chunk_starts_only=True), generator())
    torch.testing.assert_close(batch.record["noise"], batch.obs["state"][:, 0].expand(8, 2))
    play(replay, 13, 3, decision=True)  # again without a record
    assert drawn(replay, chunk_starts_only=True) == [4, 7, 10]


def test_a_cut_episode_ends_without_joining_the_next() -> None:
    replay = Replay(20, gamma=0.5)
    play(replay, 0, 3)
    replay.end_episodes()
    play(replay, 50, 2)
    replay.end_episodes()
    replay.end_episodes()
    play(replay, 70, 1)
    replay.end_episodes()
    play(replay, 80, 3, "terminated")
    # 0 1 (2) 50 (51) (70) 80 81 82 (83): steps in parentheses are only successors.
    assert drawn(replay, steps=2) == [0, 1, 3, 6, 7, 8]
    batch = window(replay, 1, horizon=3, steps=3)
    assert (batch.mask.tolist(), batch.steps.tolist(), batch.discount.tolist()) == ([[1, 0, 0]], [1], [0.5])
    assert successor(batch) == [2]
    assert state(window(replay, 3, obs_horizon=2)) == [50, 50]
    assert window(replay, 6).returns.tolist() == [81 + 0.5 * (82 + 0.5 * 83)]


@pytest.mark.parametrize("horizon, steps, obs_horizon", [(1, 1, 1), (4, 2, 3), (2, 5, 2)])
def test_every_sampled_window_is_a_piece_of_one_episode(horizon: int, steps: int, obs_horizon: int) -> None:
    replay = random_replay()
    wanted = request(batch_size=500, horizon=horizon, steps=steps, obs_horizon=obs_horizon, gamma=0.9)
    batch = replay.sample(wanted, generator())
    for row in range(500):
        history = batch.obs["state"][row, :, 0]
        episode, t = divmod(int(history[-1]), 1000)
        assert history.tolist() == [1000 * episode + max(t - back, 0) for back in range(obs_horizon - 1, -1, -1)]
        alive = int(batch.mask[row].sum())
        assert batch.chunk[row, :, 0].tolist() == [-1000 * episode - min(t + j, t + alive - 1) for j in range(horizon)]
        n = int(batch.steps[row])
        assert 1 <= n <= steps
        assert batch.rewards[row].tolist() == [1000 * episode + t + j if j < n else 0 for j in range(steps)]
        after = batch.next_obs["state"][row, :, 0]
        assert after.tolist() == [1000 * episode + max(t + n - back, 0) for back in range(obs_horizon - 1, -1, -1)]
        if n < steps or batch.discount[row] == 0:  # the episode ended here
            assert alive == min(n, horizon)
        if batch.discount[row]:
            assert float(batch.discount[row]) == pytest.approx(0.9**n)
        assert float(batch.reward[row]) == pytest.approx(
            sum(0.9**j * float(batch.rewards[row, j]) for j in range(n)), rel=1e-5
        )


def test_sampling_is_uniform_over_the_usable_steps() -> None:
    replay = random_replay()
    index = replay.sample(request(batch_size=20_000), generator()).index
    counts = torch.bincount(index)[index.unique()]
    expected = 20_000 / len(counts)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < len(counts) + 5 * (2 * len(counts)) ** 0.5


def test_generator_determines_the_batch() -> None:
    replay = random_replay()
    one, two, other = (replay.sample(request(), generator(seed)).index for seed in (3, 3, 4))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_a_batch_is_split_into_its_minibatches() -> None:
    batch = random_replay().sample(request(obs_horizon=2), generator(), batches=3)
    parts = list(batch.split(8))
    assert [len(part) for part in parts] == [8, 8, 8]
    joined = Transitions.concat(parts)
    assert torch.equal(joined.index, batch.index) and torch.equal(joined.obs["state"], batch.obs["state"])
    assert next(batch.split(24)) is batch


# Ages.


def test_online_steps_are_weighted_and_sampled_by_age() -> None:
    replay = Replay(100)
    play(replay, 0, 40)
    aged = request(
        batch_size=64, age_quantile=lambda uniform: uniform / 4, weighting=lambda newer, filled: newer / filled
    )
    batch = replay.sample(aged, generator())
    position = batch.obs["state"][:, 0, 0]
    assert float(position.max()) < 11  # the oldest quarter
    torch.testing.assert_close(batch.weight, (len(replay) - 1 - batch.index) / len(replay), check_dtype=False)


def test_the_steps_of_a_dataset_have_no_age() -> None:
    replay = Replay(100, online=False)
    play(replay, 0, 40)
    aged = request(batch_size=64, age_quantile=lambda uniform: 0 * uniform, weighting=lambda newer, filled: 0 * newer)
    batch = replay.sample(aged, generator())
    assert bool((batch.weight == 1).all()) and len(batch.index.unique()) > 20


def test_rows_are_selected_in_every_column() -> None:
    replay = Replay(100)
    play(replay, 0, 10)
    batch = replay.take(torch.arange(8), request())
    for rows in (torch.tensor([1, 5]), torch.arange(8) % 4 == 1):
        part = batch.select(rows)
        assert len(part) == 2 and part.index.tolist() == [1, 5] and part.obs["state"].flatten().tolist() == [1.0, 5.0]
