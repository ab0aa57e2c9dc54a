"""Windows of the replay memory against numbers worked out by hand, and its sampling against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.priorities import FLOOR, Priorities
from robopolicy.data.replay import MixedReplay, Replay
from robopolicy.data.transitions import Request, Transitions
from robopolicy.errors import UserError


def request(**settings: Any) -> Request:
    return Request(**{"batch_size": 8, "horizon": 1, "steps": 1, "gamma": 0.5} | settings)


def play(replay: Replay, start: int, count: int, end: str = "", lane: int = 0, **more: Any) -> None:
    """`count` steps from observation `start`; step i sees start + i, plays action -(start + i), earns start + i + 1."""
    for x in range(start, start + count):
        last = x == start + count - 1
        replay.add(
            torch.tensor([lane]),
            {"state": torch.tensor([[float(x)]])},
            torch.tensor([[-float(x)]]),
            torch.tensor([x + 1.0]),
            torch.tensor([last and end == "terminated"]),
            torch.tensor([last and end == "truncated"]),
            {"state": torch.tensor([[x + 1.0]])},
            **more,
        )


def window(replay: Replay, slot: int, **settings: Any) -> Transitions:
    return replay.take(torch.tensor([slot]), request(**settings))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(replay: Replay | MixedReplay, **settings: Any) -> list[int]:
    """The slots that 40 batches start at, each once."""
    return sorted(set(replay.sample(request(**settings), generator(), batches=40).index.tolist()))


def state(batch: Transitions) -> list[float]:
    return batch.obs["state"][0, :, 0].tolist()


def successor(batch: Transitions) -> list[float]:
    return batch.next_obs["state"][0, :, 0].tolist()


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
    with pytest.raises(UserError, match="holds no window of 9 steps"):
        running = Replay(20)
        play(running, 0, 5)
        running.sample(request(steps=9), generator())


def test_an_empty_memory_says_so() -> None:
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


def test_the_ring_overwrites_the_oldest_and_never_joins_old_with_new() -> None:
    replay = Replay(6)
    play(replay, 0, 10)  # slots hold 6 7 8 9 4 5; the head is at slot 4
    assert len(replay) == 6
    # Slot 3 (9) has no successor yet. Slot 4 (4) is the oldest.
    assert drawn(replay) == [0, 1, 2, 4, 5]
    assert successor(window(replay, 5)) == [6]
    batch = window(replay, 2, horizon=4, steps=1)
    assert batch.chunk[0, :, 0].tolist() == [-8, -9, -9, -9]
    assert batch.mask.tolist() == [[1, 1, 0, 0]]  # what lies beyond the newest step is not part of the chunk
    assert drawn(replay, steps=3) == [0, 4, 5]


def test_windows_whose_history_was_overwritten_are_not_drawn() -> None:
    replay = Replay(6)
    play(replay, 0, 10)  # oldest is 4: it lacks 2 and 3, and 5 lacks 3
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


def test_lanes_are_separate_and_may_stand_still() -> None:
    replay = Replay(20, lanes=2)
    flags = torch.zeros(2, dtype=torch.bool)
    both = {"state": torch.tensor([[0.0], [100.0]])}
    replay.add(torch.tensor([0, 1]), both, torch.zeros(2, 1), torch.ones(2), flags, flags, both)
    play(replay, 101, 2, lane=1)  # lane 0 stands still
    play(replay, 1, 2, lane=0)
    assert drawn(replay) == [0, 1, 10, 11]
    assert successor(window(replay, 10)) == [101]
    assert successor(window(replay, 0)) == [1]
    replay = Replay(8, lanes=2)
    play(replay, 0, 9, lane=1)  # 8 5 6 7 in slots 4-7, lane 0 is empty
    assert drawn(replay) == [5, 6, 7]
    assert successor(window(replay, 7)) == [8]


def test_decisions_only_starts_where_a_chunk_with_its_record_was_chosen() -> None:
    replay = Replay(40)
    play(replay, 0, 4, decision=True)  # before anything was noted
    for start in (4, 7, 10):
        play(replay, start, 1, record={"noise": torch.full((1, 2), float(start))})
        play(replay, start + 1, 2, decision=False)
    assert drawn(replay, decisions_only=True) == [4, 7, 10]
    batch = replay.sample(request(decisions_only=True), generator())
    torch.testing.assert_close(batch.record["noise"], batch.obs["state"][:, 0].expand(8, 2))
    play(replay, 13, 3, decision=True)  # notes nothing again
    assert drawn(replay, decisions_only=True) == [4, 7, 10]


def test_a_cut_episode_ends_without_joining_the_next() -> None:
    replay = Replay(20, gamma=0.5)
    play(replay, 0, 3)
    replay.cut()
    play(replay, 50, 2)
    replay.cut()
    replay.cut()
    play(replay, 70, 1)
    replay.cut()
    play(replay, 80, 3, "terminated")
    # 0 1 (2) 50 (51) (70) 80 81 82 (83): what stands in brackets is only a successor.
    assert drawn(replay, steps=2) == [0, 1, 3, 6, 7, 8]
    batch = window(replay, 1, horizon=3, steps=3)
    assert (batch.mask.tolist(), batch.steps.tolist(), batch.discount.tolist()) == ([[1, 0, 0]], [1], [0.5])
    assert successor(batch) == [2]
    assert state(window(replay, 3, obs_horizon=2)) == [50, 50]
    assert window(replay, 6).returns.tolist() == [81 + 0.5 * (82 + 0.5 * 83)]


def random_replay(seed: int = 0, **settings: Any) -> Replay:
    """Three lanes with episodes of random length, far beyond the capacity."""
    rng = np.random.default_rng(seed)
    replay = Replay(90, lanes=3, gamma=0.9, **settings)
    time, running = np.zeros(3, int), np.zeros(3, int)
    for _ in range(120):
        lanes = np.flatnonzero(rng.random(3) < 0.8)
        ends = rng.random(len(lanes)) < 0.15
        kind = rng.random(len(lanes)) < 0.5
        value = torch.tensor(1000.0 * running[lanes] + time[lanes])[:, None].float()
        replay.add(
            torch.from_numpy(lanes),
            {"state": value},
            -value,
            value[:, 0],
            torch.from_numpy(ends & kind),
            torch.from_numpy(ends & ~kind),
            {"state": value + 1},
        )
        time[lanes] += 1
        running[lanes[ends]] += 1
        time[lanes[ends]] = 0
    return replay


@pytest.mark.parametrize("horizon, steps, obs_horizon", [(1, 1, 1), (4, 2, 3), (2, 5, 2)])
def test_every_drawn_window_is_a_piece_of_one_episode(horizon: int, steps: int, obs_horizon: int) -> None:
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


def test_a_generator_decides_the_batch() -> None:
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


# Datasets.


def episodes(seed: int = 0, terminated: bool = True) -> Episodes:
    rng = np.random.default_rng(seed)
    rows = []
    for length, ends in ((3, True), (1, True), (4, False), (1, False), (2, False)):
        arrays = {
            "state": rng.normal(size=(length, 2)),
            "image.front": rng.integers(0, 255, (length, 3, 2, 2), dtype=np.uint8),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "reward": rng.normal(size=length),
        }
        if terminated:
            arrays["terminated"] = np.arange(length) == (length - 1 if ends else -1)
        rows.append(Episode(arrays))
    return Episodes.from_list(rows, 0.1)


def written(data: Episodes) -> Replay:
    """The same memory, filled step by step."""
    replay = Replay(30, gamma=0.9, online=False)
    for index in range(data.num_episodes):
        frames = data.episode(index).arrays
        ended = bool(frames["terminated"][-1]) if "terminated" in frames else False
        count = len(frames["action"]) - (not ended)
        row = {key: torch.from_numpy(value) for key, value in frames.items()}
        row["state"] = row["state"].float()
        for t in range(count):
            last, after = t == count - 1, min(t + 1, len(frames["action"]) - 1)
            replay.add(
                torch.tensor([0]),
                {key: row[key][t : t + 1] for key in ("state", "image.front")},
                row["action"][t : t + 1],
                row["reward"][t : t + 1].float(),
                torch.tensor([last and ended]),
                torch.tensor([last and not ended]),
                {key: row[key][after : after + 1] for key in ("state", "image.front")},
                decision=False,
            )
    return replay


@pytest.mark.parametrize("terminated", [True, False])
def test_a_dataset_becomes_the_memory_of_its_steps(terminated: bool) -> None:
    data = episodes(terminated=terminated)
    whole, slow = Replay.from_episodes(data, gamma=0.9), written(data)
    wanted = request(horizon=3, steps=2, obs_horizon=2)

    def rows(replay: Replay) -> Transitions:
        index = torch.tensor(drawn(replay, horizon=3, steps=2, obs_horizon=2))
        return replay.take(index, wanted)

    one, two = rows(whole), rows(slow)
    assert len(one) == (3 + 1 + 3 + 1 if terminated else 2 + 3 + 1)
    for key in ("chunk", "mask", "rewards", "steps", "discount", "reward", "returns", "online"):
        torch.testing.assert_close(getattr(one, key), getattr(two, key), equal_nan=True)
    for key in ("state", "image.front"):
        assert torch.equal(one.obs[key], two.obs[key])
        assert torch.equal(one.next_obs[key], two.next_obs[key])
    assert not one.online.any() and one.obs["state"].dtype == torch.float32


def test_datasets_without_rewards_or_successors_are_refused() -> None:
    arrays = {"state": np.zeros((1, 2)), "action": np.zeros((1, 2))}
    with pytest.raises(UserError, match="no 'reward'"):
        Replay.from_episodes(Episodes.from_list([Episode(arrays)], 0.1))
    with pytest.raises(UserError, match="no step with a successor"):
        Replay.from_episodes(Episodes.from_list([Episode(arrays | {"reward": np.zeros(1)})], 0.1))


def test_a_large_dataset_loads_fast() -> None:
    frames = 200_000
    arrays = {"state": np.zeros((frames, 4), np.float32), "action": np.zeros((frames, 2), np.float32)}
    arrays |= {"reward": np.ones(frames, np.float32), "terminated": np.arange(frames) % 200 == 199}
    data = Episodes(arrays, np.arange(200, frames + 1, 200), ("",) * 1000, np.full(1000, -1), 0.1)
    replay = Replay.from_episodes(data, gamma=0.99)
    assert len(replay) == 201_000
    batch = replay.take(torch.tensor([0, 199, 201]), request(gamma=0.99))
    full = (1 - 0.99**200) / 0.01
    torch.testing.assert_close(batch.returns, torch.tensor([full, 1.0, full]).float())


def test_mixed_batches_have_their_share_of_both_in_every_minibatch() -> None:
    offline = Replay.from_episodes(episodes(), gamma=0.9)
    online = Replay(20)
    play(online, 10, 5)
    online._arrays["obs.state"] = online._arrays["obs.state"].repeat(2, 1)  # two dimensions, as the dataset has
    online._arrays["action"] = online._arrays["action"].repeat(2, 1)
    online._arrays["obs.image.front"] = np.zeros((20, 3, 2, 2), np.uint8)
    mixed = MixedReplay(offline, online, 0.25)
    batch = mixed.sample(request(), generator(), batches=5)
    for part in batch.split(8):
        assert part.online.tolist() == [False] * 2 + [True] * 6
    assert torch.equal(
        batch.obs["state"][batch.online][:, 0], online.take(batch.index[batch.online], request()).obs["state"][:, 0]
    )
    for share, expected in ((0.0, True), (1.0, False)):
        batch = MixedReplay(offline, online, share).sample(request(), generator())
        assert batch.online.tolist() == [expected] * 8


# Priorities.


def test_the_sum_tree_draws_what_brute_force_draws() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 64, 100):
        tree = Priorities(size, 0.7)
        brute = np.zeros(size)
        tree.admit(np.arange(size))
        brute[:] = 1.0
        for _ in range(5):
            index = rng.integers(0, size, 10)
            error = rng.exponential(size=10)
            tree.update(index, error)
            for i, e in zip(index, error, strict=True):
                brute[i] = (e + FLOOR) ** 0.7
        tree.admit(np.array([0]), playable=size < 2)
        brute[0] = tree.largest if size < 2 else 0.0
        assert tree.tree[1] == pytest.approx(brute.sum())
        points = rng.random(200)
        expected = np.searchsorted(brute.cumsum() / brute.sum(), points, side="right")
        assert tree.draw(points).tolist() == expected.tolist()


def test_importance_weights_correct_the_sampling() -> None:
    tree = Priorities(4, alpha=1.0, beta=1.0)
    tree.update(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]) - FLOOR)
    weight = tree.weights(np.arange(4), 4)
    np.testing.assert_allclose(weight, np.array([1.0, 1 / 2, 1 / 3, 1 / 4]), rtol=1e-9)
    probability = np.array([1, 2, 3, 4]) / 10
    assert np.ptp(weight * probability) < 1e-9  # every slot contributes the same


def test_prioritised_sampling_follows_the_errors_and_skips_what_starts_no_window() -> None:
    replay = Replay(20, prioritized=1.0)
    play(replay, 0, 3, "truncated")
    play(replay, 50, 3)
    batch = replay.take(torch.tensor([0, 1, 2, 4, 5]), request())
    replay.update_priorities(batch, torch.tensor([0.0, 1.0, -3.0, 0.0, 0.0]))
    index = replay.sample(request(batch_size=4000), generator()).index
    assert index.unique().tolist() == [1, 2]
    assert float((index == 2).float().mean()) == pytest.approx(0.75, abs=0.03)
    first = replay.sample(request(batch_size=100), generator())
    assert first.weight.max() == 1.0
    assert float(first.weight[first.index == 2][0]) == pytest.approx(3**-0.4, rel=1e-4)


def test_prioritised_halves_get_their_own_errors() -> None:
    online = Replay(20, prioritized=1.0)
    play(online, 0, 6)
    offline = Replay.from_episodes(
        Episodes.from_list(
            [Episode({"state": np.zeros((9, 1)), "action": np.zeros((9, 1)), "reward": np.zeros(9)})], 0.1
        ),
        prioritized=1.0,
    )
    mixed = MixedReplay(offline, online)
    batch = mixed.sample(request(), generator())
    mixed.update_priorities(batch, torch.arange(8.0) + 10)
    for replay, rows in ((offline, slice(0, 4)), (online, slice(4, 8))):
        assert replay.priorities is not None
        leaves = replay.priorities.tree[replay.priorities.leaves :]
        latest = dict(zip(batch.index[rows].tolist(), (torch.arange(8.0) + 10)[rows].tolist(), strict=True))
        assert {slot: leaves[slot] for slot in latest} == pytest.approx(latest, rel=1e-6)


# State.


@pytest.mark.parametrize("prioritized", [0.0, 0.6])
def test_a_restored_memory_goes_on_identically(prioritized: float) -> None:
    replay = random_replay(prioritized=prioritized)
    saved = replay.state_dict()
    other = Replay(90, lanes=3, gamma=0.9, prioritized=prioritized)
    other.load_state_dict(saved)
    for memory in (replay, other):
        play(memory, 5000, 3, "terminated", lane=1)
    assert not np.array_equal(saved["head"], replay._head)  # the saved state is a copy
    wanted = request(batch_size=64, horizon=3, steps=2, obs_horizon=2)
    one, two = (memory.sample(wanted, generator(7)) for memory in (replay, other))
    for key in ("index", "chunk", "rewards", "returns", "weight", "discount"):
        torch.testing.assert_close(getattr(one, key), getattr(two, key), rtol=0, atol=0, equal_nan=True)


def test_a_state_holds_only_what_is_in_use() -> None:
    replay = Replay(1000, lanes=2)
    play(replay, 0, 5)
    assert replay.state_dict()["arrays"]["action"].shape == (2, 5, 1)
    assert replay.observations(2)["state"].shape == (4, 2, 1)
