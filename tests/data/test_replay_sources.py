"""Tests of the sources and weights of replay steps: datasets, mixtures, priorities, saved states."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_replay import drawn, generator, play, random_replay, request

from robopolicy.data.batches import Transitions
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.priorities import FLOOR, Priorities
from robopolicy.data.replay import MixedReplay, Replay
from robopolicy.errors import UserError


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
    """The same replay buffer, filled step by step."""
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
def test_from_episodes_equals_adding_every_step(terminated: bool) -> None:
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


def test_final_observations_are_the_successors_of_last_actions() -> None:
    """The last frame of a truncated episode used to be dropped with its reward, also where its successor is known."""
    rows, plain = [], episodes()
    for index in range(plain.num_episodes):
        part = plain.episode(index)
        rows.append(part.with_closing_frame({key: part.arrays[key][0] + 1 for key in ("state", "image.front")}))
    closed = Episodes.from_list(rows, 0.1)
    order = [3, 0, 2, 4, 1]
    replay = Replay.from_episodes(closed.without_closing_frames().subset(order), gamma=0.9)
    place = 0
    for part in (closed.episode(index).arrays for index in order):
        count = len(part["action"]) - 1
        batch = replay.take(torch.arange(place, place + count), request())
        assert torch.equal(batch.next_obs["state"][:, 0], torch.from_numpy(part["state"][1:]).float())
        assert torch.equal(batch.next_obs["image.front"][:, 0], torch.from_numpy(part["image.front"][1:]))
        assert torch.equal(batch.reward, torch.from_numpy(part["reward"][:count]).float())
        assert bool(batch.discount[-1] == 0) == bool(part["terminated"][-1]) and (batch.discount[:-1] > 0).all()
        place += count + 1
    assert len(replay) == place
    found = closed.without_closing_frames()
    taken_over = {**found.arrays, "intervention": np.arange(len(found)) % 2 == 0}
    assert found.final_obs and not replace(found, arrays=taken_over).demonstrated().final_obs  # its episodes are split


def test_rewards_on_dropped_frames_are_reported() -> None:
    """A run on successes of robomimic used to learn without any reward."""

    def one(reward: list[float], terminated: bool = False) -> Episode:
        arrays = {"state": np.zeros((3, 2)), "action": np.zeros((3, 2)), "reward": np.array(reward)}
        return Episode(arrays | {"terminated": np.array([False, False, terminated])})

    lost, kept, none = one([0, 0, 1]), one([0, 1, 1]), one([0, 0, 0])
    with pytest.raises(
        UserError, match=r"^2 of 2 episodes with rewards have them only on a last frame .*closing: true"
    ):
        Replay.from_episodes(Episodes.from_list([lost, none, lost], 0.1))
    with pytest.warns(UserWarning, match=r"^1 of 2 episodes with rewards have them only on a last frame"):
        Replay.from_episodes(Episodes.from_list([lost, none, kept], 0.1))
    for parts in ([kept], [none], [one([0, 0, 1], terminated=True)]):
        Replay.from_episodes(Episodes.from_list(parts, 0.1))


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float64])
def test_rewards_and_flags_of_any_type_are_converted(dtype: type) -> None:
    """Rewards of integers used to reach the critics, and flags of integers to end every episode."""
    arrays = {"state": np.zeros((9, 1)), "action": np.zeros((9, 1)), "reward": np.ones(9, dtype)}
    flags = {"bootstrap": np.arange(9).astype(dtype) * 0 + 1, "terminated": np.arange(9) == 8}
    batch = Replay.from_episodes(Episodes.from_list([Episode(arrays | flags)], 0.1), gamma=0.9).sample(
        request(steps=2, gamma=0.9), generator()
    )
    assert batch.reward.dtype == batch.rewards.dtype == torch.float32 and (batch.reward > 0).all()
    assert (batch.discount[batch.index < 7] > 0).all()


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


def test_every_minibatch_of_a_mixture_has_the_share_of_both_sources() -> None:
    offline = Replay.from_episodes(episodes(), gamma=0.9)
    online = Replay(20)
    play(online, 10, 5)
    online._columns["obs.state"] = online._columns["obs.state"].repeat(2, 1)  # two dimensions, as the dataset has
    online._columns["action"] = online._columns["action"].repeat(2, 1)
    online._columns["obs.image.front"] = np.zeros((21, 3, 2, 2), np.uint8)
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


def test_sum_tree_samples_equal_brute_force() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 64, 100):
        tree = Priorities(size, 0.7)
        brute = np.zeros(size)
        tree.add(np.arange(size))
        brute[:] = 1.0
        for _ in range(5):
            index = rng.integers(0, size, 10)
            error = rng.exponential(size=10)
            tree.update(index, error, np.ones(10, np.bool_))
            for i, e in zip(index, error, strict=True):
                brute[i] = (e + FLOOR) ** 0.7
        tree.add(np.array([0]), is_start=size < 2)
        brute[0] = tree.largest if size < 2 else 0.0
        assert tree.tree[1] == pytest.approx(brute.sum())
        points = rng.random(200)
        expected = np.searchsorted(brute.cumsum() / brute.sum(), points, side="right")
        assert tree.draw(points).tolist() == expected.tolist()


def test_importance_weights_correct_the_sampling() -> None:
    tree = Priorities(4, alpha=1.0, beta=1.0)
    tree.update(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]) - FLOOR, np.ones(4, np.bool_))
    weight = tree.weights(np.arange(4), 4)
    np.testing.assert_allclose(weight, np.array([1.0, 1 / 2, 1 / 3, 1 / 4]), rtol=1e-9)
    probability = np.array([1, 2, 3, 4]) / 10
    assert np.ptp(weight * probability) < 1e-9  # every slot contributes the same


def test_prioritised_sampling_follows_the_errors_and_skips_slots_without_a_window() -> None:
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
def test_restored_replay_continues_identically(prioritized: float) -> None:
    replay = random_replay(prioritized=prioritized)
    saved = replay.state_dict()
    other = Replay(90, lanes=3, gamma=0.9, prioritized=prioritized)
    other.load_state_dict(saved)
    for memory in (replay, other):
        play(memory, 5000, 3, "terminated", lane=1)
    assert saved["head"].tolist() != (replay._written % replay.length).tolist()  # the saved state is a copy
    wanted = request(batch_size=64, horizon=3, steps=2, obs_horizon=2)
    one, two = (memory.sample(wanted, generator(7)) for memory in (replay, other))
    for key in ("index", "chunk", "rewards", "returns", "weight", "discount"):
        torch.testing.assert_close(getattr(one, key), getattr(two, key), rtol=0, atol=0, equal_nan=True)


def test_full_replay_is_restored_into_a_larger_one_from_its_oldest_step() -> None:
    replay = Replay(20, lanes=2)
    play(replay, 0, 14)  # the lane's ring of 10 slots begins at step 4
    play(replay, 100, 3, lane=1)
    larger = Replay(60, lanes=2)
    larger.load_state_dict(replay.state_dict())
    play(larger, 14, 3)
    play(larger, 103, 3, lane=1)
    batch = larger.sample(request(batch_size=400), generator())
    assert torch.equal(batch.next_obs["state"], batch.obs["state"] + 1)
    assert torch.equal(batch.reward, batch.obs["state"][:, 0, 0] + 1)
    seen = sorted(set(batch.obs["state"].flatten().tolist()))
    assert seen == [*range(4, 16), *range(100, 105)]


def test_states_of_another_capacity_are_refused() -> None:
    full = Replay(20, prioritized=0.6)
    play(full, 0, 30)
    for other in (Replay(40, prioritized=0.6), Replay(10)):
        with pytest.raises(UserError, match=r"needs replay.capacity=20; set it to that"):
            other.load_state_dict(full.state_dict())


def test_state_dict_holds_only_used_slots() -> None:
    replay = Replay(1000, lanes=2)
    play(replay, 0, 5)
    assert replay.state_dict()["arrays"]["action"].shape == (2, 5, 1)
    assert replay.observations(2)["state"].shape == (4, 2, 1)
