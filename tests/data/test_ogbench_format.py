"""Reader of OGBench's files: equal to the loader of the package; windows with masks as in the public code of QC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats import read_dataset
from robopolicy.data.formats.lerobot import read_lerobot, write_lerobot
from robopolicy.data.formats.ogbench import read_ogbench
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError

TASK = "ogbench/puzzle-3x3-singletask-task4-v0"
GOAL = np.ones(9, np.int64)  # button states of task 4


def write_play(path: Path, episodes: int = 2, steps: int = 8) -> dict[str, Any]:
    """Write play data of the puzzle in the layout of OGBench; in steps 3 and 4 the buttons reach the goal."""
    rng = np.random.default_rng(0)
    frames = episodes * steps
    states = rng.integers(0, 2, (frames, 9))
    states[:, 0] = 0
    for episode in range(episodes):
        states[episode * steps + 3 : episode * steps + 5] = GOAL
    arrays: dict[str, Any] = {
        "observations": rng.normal(size=(frames, 55)).astype(np.float32),
        "actions": rng.choice([-1.0, 0.3, 1.0], (frames, 5)).astype(np.float32),
        "terminals": np.arange(1, frames + 1) % steps == 0,
        "qpos": rng.normal(size=(frames, 23)).astype(np.float32),
        "qvel": rng.normal(size=(frames, 23)).astype(np.float32),
        "button_states": states,
    }
    np.savez_compressed(path, **arrays)
    return arrays


@pytest.fixture(name="play", scope="module")
def _play(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("ogbench")
    folder = tmp_path_factory.mktemp("ogbench")
    write_play(folder / "puzzle-3x3-play-v0-val.npz")
    return folder / "puzzle-3x3-play-v0.npz", write_play(folder / "puzzle-3x3-play-v0.npz")


def test_read_data_equal_those_of_the_package(play: tuple[Path, dict[str, Any]]) -> None:
    import ogbench

    path, _ = play
    name = "puzzle-3x3-play-singletask-task4-v0"
    found: Any = ogbench.make_env_and_datasets(name, dataset_path=str(path))
    official = found[1]
    read = read_ogbench(path, TASK, reward="shaped")
    kept = np.ones(len(read), np.bool_)
    kept[read.ends - 1] = False  # the last frame of an episode is only a successor
    assert np.array_equal(read.arrays["state"][kept], official["observations"])
    assert np.array_equal(read.arrays["action"][kept], official["actions"].clip(-1 + 1e-5, 1 - 1e-5))
    assert np.array_equal(read.arrays["reward"][kept], official["rewards"])
    assert np.array_equal(read.arrays["bootstrap"][kept], official["masks"] > 0)
    assert read.ends.tolist() == [8, 16] and read.tasks == (TASK, TASK) and read.control_dt == 0.05
    assert (official["rewards"] == 0).sum() == 4  # two solved states per episode
    sparse = read_dataset(path, task=TASK, reward="sparse").arrays["reward"][kept]
    assert np.array_equal(sparse, (official["rewards"] != 0) * -1.0)


def official_windows(episodes: Episodes, starts: list[int], length: int, discount: float) -> dict[str, Any]:
    """Discounted reward, mask and validity of windows, as in `sample_sequence` of ColinQiyangLi/qc."""
    kept = np.ones(len(episodes), np.bool_)
    kept[episodes.ends - 1] = False
    rewards, masks = episodes.arrays["reward"][kept], episodes.arrays["bootstrap"][kept]
    terminals = np.isin(np.flatnonzero(kept), episodes.ends - 2)
    found: dict[str, list[float]] = {"reward": [], "mask": [], "valid": []}
    for start in starts:
        reward, mask, valid, ended = 0.0, 1.0, 1.0, 0.0
        for i in range(length):
            valid = 1.0 - ended
            reward += rewards[start + i] * discount**i * valid
            mask = min(mask, masks[start + i]) if valid else mask
            ended = max(ended, terminals[start + i])
        for key, value in (("reward", reward), ("mask", mask), ("valid", valid)):
            found[key].append(value)
    return {key: torch.tensor(values, dtype=torch.float32) for key, values in found.items()}


def test_windows_have_rewards_and_masks_of_the_public_code(play: tuple[Path, dict[str, Any]]) -> None:
    path, _ = play
    episodes = read_ogbench(path, TASK)
    replay = Replay.from_episodes(episodes)
    spec = ReplaySampleSpec(batch_size=1, horizon=3, steps=3, gamma=0.9)
    starts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # 7 steps per episode; 5, 6 cross the end of the first one
    expected = official_windows(episodes, starts, 3, 0.9)
    slots = torch.tensor([start + start // 7 for start in starts])  # a slot per episode has no action
    batch = replay.take(slots, spec)
    assert torch.allclose(batch.reward, expected["reward"])
    assert torch.equal(batch.discount > 0, expected["mask"] > 0)
    assert torch.equal(batch.steps == 3, expected["valid"] > 0)
    whole = batch.steps == 3
    assert torch.allclose(batch.discount[whole], 0.9**3 * expected["mask"][whole])
    assert batch.mask[whole].all()  # actions after a solved state are imitated
    assert expected["mask"].tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_goals_are_the_representations_of_the_package(play: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = play
    read = read_ogbench(path, "ogbench/puzzle-3x3-oraclerep-v0")
    assert np.array_equal(read.arrays["achieved_goal"], arrays["button_states"])
    assert np.array_equal(
        read.arrays["goal"], arrays["button_states"].reshape(2, 8, 9)[:, -1:].repeat(8, 1).reshape(16, 9)
    )
    assert "reward" not in read.arrays and read.observation_keys == ("state", "achieved_goal", "goal")


def test_data_without_task_have_no_rewards(play: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = play
    read = read_ogbench(path)
    assert "reward" not in read.arrays and np.array_equal(read.arrays["state"], arrays["observations"])


def test_invalid_files_are_refused_in_one_line(play: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, arrays = play
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(UserError, match="Cannot read the OGBench dataset"):
        read_ogbench(bad)
    for change, message in (
        ({"terminals": None}, "lacks terminals"),
        ({"actions": arrays["actions"][1:]}, "differ in length"),
        ({"actions": np.float32(1)}, "differ in length"),
        ({"terminals": np.zeros(16, np.bool_)}, "does not end an episode"),
        ({"observations": np.array([object()] * 16)}, "Cannot read"),
    ):
        changed: Any = {key: value for key, value in {**arrays, **change}.items() if value is not None}
        np.savez_compressed(bad, allow_pickle=True, **changed)
        with pytest.raises(UserError, match=message):
            read_ogbench(bad)
    with pytest.raises(UserError, match=r"e\.g\. task=ogbench/puzzle-3x3-singletask-v0"):
        read_ogbench(path, "ogbench/puzzle-3x3-v0")
    with pytest.raises(UserError, match="no task 'puzzle-3x3-singletask-task9-v0'"):
        read_ogbench(path, "puzzle-3x3-singletask-task9-v0")
    with pytest.raises(UserError, match="does not fit task puzzle-4x4-singletask-v0"):
        read_ogbench(path, "ogbench/puzzle-4x4-singletask-v0")


def test_read_data_can_be_written_as_a_dataset(play: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = play
    for task in (TASK, "ogbench/puzzle-3x3-oraclerep-v0"):
        read = read_ogbench(path, task)
        folder = tmp_path / task.rpartition("/")[2]
        write_lerobot(read, folder)
        again = read_lerobot(folder)
        assert again.arrays.keys() >= read.arrays.keys() and again.tasks == read.tasks
        assert all(np.array_equal(again.arrays[key], value) for key, value in read.arrays.items())
