import numpy as np
import pytest
import torch

from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError


def counting_episodes(lengths: tuple[int, ...] = (5, 3)) -> Episodes:
    """Episode e, frame t: state = action = 100 e + t."""
    episodes = []
    for index, length in enumerate(lengths):
        value = (100 * index + np.arange(length, dtype=np.float32))[:, None]
        episodes.append(Episode({"state": value, "action": value.copy()}, "toy", index))
    return Episodes.from_list(episodes, 0.1)


def test_chunk_values_are_the_time_indices_with_repeated_padding() -> None:
    sampler = ChunkSampler(counting_episodes(), horizon=4, obs_horizon=3)
    batch = sampler.take(torch.tensor([0, 1, 4, 5, 6, 7]))
    assert batch.obs["state"][..., 0].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [2, 3, 4],
        [100, 100, 100],
        [100, 100, 101],
        [100, 101, 102],
    ]
    assert batch.chunk[..., 0].tolist() == [
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [4, 4, 4, 4],
        [100, 101, 102, 102],
        [101, 102, 102, 102],
        [102, 102, 102, 102],
    ]
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]


def test_chunks_of_a_person_have_the_history_of_the_episode() -> None:
    episodes = counting_episodes((6, 3))
    acted = np.array([0, 1, 0, 1, 1, 0, 1, 1, 0], bool)
    sampler = ChunkSampler(episodes, horizon=3, obs_horizon=3, learned=acted, lookahead_steps=1)
    assert sampler.frames.tolist() == [1, 3, 4, 6, 7] and len(sampler) == 5
    batch = sampler.take(torch.from_numpy(sampler.frames))
    histories = [[0, 0, 1], [1, 2, 3], [2, 3, 4], [100, 100, 100], [100, 100, 101]]
    assert batch.obs["state"][..., 0].tolist() == histories
    assert batch.chunk[..., 0].tolist() == [[1, 1, 1], [3, 4, 4], [4, 4, 4], [100, 101, 101], [101, 101, 101]]
    assert batch.mask.sum(1).tolist() == [1, 2, 1, 2, 1]
    assert batch.next_obs_valid is not None and batch.next_obs_valid.tolist() == [0, 1, 0, 1, 0]
    sampler = ChunkSampler(episodes, horizon=3, learned=acted, batch_size=5)
    assert sorted(next(sampler).chunk[:, 0, 0].tolist()) == [1, 3, 4, 100, 101], "every such frame once per epoch"


def test_first_action_belongs_to_the_newest_observation() -> None:
    batch = next(ChunkSampler(counting_episodes((9, 4, 6)), horizon=5, obs_horizon=2, batch_size=64))
    assert torch.equal(batch.chunk[:, 0], batch.obs["state"][:, -1])


def test_every_epoch_visits_every_frame_once_in_a_new_order() -> None:
    sampler = ChunkSampler(counting_episodes((6, 6)), horizon=1, batch_size=4)
    epochs = [torch.cat([next(sampler).chunk[:, 0, 0] for _ in range(3)]) for _ in range(2)]
    expected = list(range(6)) + list(range(100, 106))
    assert all(sorted(epoch.tolist()) == expected for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert sampler.epoch == 2


def test_batches_larger_than_the_dataset_are_full() -> None:
    assert next(ChunkSampler(counting_episodes((2,)), horizon=2, batch_size=7)).chunk.shape == (7, 2, 1)


@pytest.mark.parametrize("consumed", [0, 1, 5])
def test_saved_position_continues_the_same_stream(consumed: int) -> None:
    sampler = ChunkSampler(counting_episodes((7, 6)), horizon=2, batch_size=5, seed=3)
    for _ in range(consumed):
        next(sampler)
    state = sampler.state_dict()
    expected = [next(sampler).chunk for _ in range(6)]
    resumed = ChunkSampler(counting_episodes((7, 6)), horizon=2, batch_size=5, seed=0)
    resumed.load_state_dict(state)
    assert all(torch.equal(next(resumed).chunk, chunk) for chunk in expected)


def test_saved_position_of_another_dataset_is_refused() -> None:
    state = ChunkSampler(counting_episodes((7,)), horizon=2).state_dict()
    with pytest.raises(UserError, match="7 frames"):
        ChunkSampler(counting_episodes((8,)), horizon=2).load_state_dict(state)


def test_weights_follow_their_frames() -> None:
    data = counting_episodes((4,))
    batch = next(ChunkSampler(data, horizon=1, batch_size=4, weight=data.arrays["action"][:, 0] * 2))
    assert batch.weight is not None
    assert torch.equal(batch.weight, 2 * batch.chunk[:, 0, 0])


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        ChunkSampler(counting_episodes(), horizon=0)


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_accepted() -> None:
    data = counting_episodes((3,))
    for array in data.arrays.values():
        array.flags.writeable = False
    assert next(ChunkSampler(data, horizon=1, batch_size=2)).chunk.shape == (2, 1, 1)
