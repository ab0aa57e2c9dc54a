import numpy as np
import pytest

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError


def make_episode(length: int, seed: int = 0, success: bool = True) -> Episode:
    rng = np.random.default_rng(seed)
    flag = np.zeros(length, np.bool_)
    flag[-1] = success
    return Episode(
        {
            "state": rng.normal(size=(length, 3)).astype(np.float32),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "reward": flag.astype(np.float32),
            "terminated": flag.copy(),
            "success": flag,
        },
        task="toy/reach",
        seed=seed,
    )


def test_episodes_round_trip() -> None:
    parts = [make_episode(length, seed) for seed, length in enumerate((4, 1, 6))]
    data = Episodes.from_list(parts, 0.1)
    assert (len(data), data.num_episodes, data.ends.tolist(), data.lengths.tolist()) == (11, 3, [4, 5, 11], [4, 1, 6])
    assert data.observation_keys == ("state",)
    for index, part in enumerate(parts):
        back = data.episode(index)
        assert back.seed == part.seed and back.success
        assert all(np.array_equal(back.arrays[key], part.arrays[key]) for key in part.arrays)


def test_subset_selects_by_success_and_by_index() -> None:
    data = Episodes.from_list([make_episode(3, seed, success=seed % 2 == 0) for seed in range(5)], 0.1)
    assert data.success.tolist() == [True, False, True, False, True]
    assert data.subset(data.success).seeds.tolist() == [0, 2, 4]
    assert data.subset(range(2)).seeds.tolist() == [0, 1]
    joined = Episodes.concat([data.subset([4]), data.subset([0])])
    assert joined.seeds.tolist() == [4, 0]


def broken(key: str, value: np.ndarray) -> Episode:
    episode = make_episode(4)
    return Episode({**episode.arrays, key: value}, "toy")


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (broken("state", np.full((4, 3), np.nan, np.float32)), "'state' is not finite in episode 1"),
        (broken("state", np.zeros((4, 2), np.float32)), "'state' of episode 1 has frames of shape"),
        (broken("state", np.zeros((3, 3), np.float32)), "'state' has 7 frames but 'action' has 8"),
        (broken("extra", np.zeros(4, np.float32)), "Episode 1 has keys"),
    ],
)
def test_bad_arrays_are_named(episode: Episode, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Episodes.from_list([make_episode(4), episode], 0.1)


def test_images_must_be_channel_first_bytes() -> None:
    with pytest.raises(UserError, match=r"'image.front' must be uint8"):
        Episodes.from_list([broken("image.front", np.zeros((4, 8, 8, 3), np.uint8))], 0.1)


def test_empty_selection_is_refused() -> None:
    data = Episodes.from_list([make_episode(3, success=False)], 0.1)
    with pytest.raises(UserError, match="at least one episode"):
        data.subset(data.success)
    with pytest.raises(UserError, match="at least one episode"):
        data.subset([])


def test_datasets_with_different_rates_cannot_be_joined() -> None:
    slow, fast = (Episodes.from_list([make_episode(3)], dt) for dt in (0.1, 0.05))
    with pytest.raises(UserError, match="different control steps"):
        Episodes.concat([slow, fast])
