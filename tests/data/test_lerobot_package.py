"""Round trips in both directions with the `lerobot` package, where it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import read_lerobot, write_lerobot
from robopolicy.data.formats.lerobot.images import video_encoder

lerobot_dataset = pytest.importorskip(
    "lerobot.datasets.lerobot_dataset", reason="needs robopolicy[lerobot]: make test-lerobot"
)


def make_data() -> Episodes:
    rng = np.random.default_rng(0)
    episodes = []
    for seed in range(5):
        length = 6 + seed
        last = np.arange(length) == length - 1
        smooth = (
            np.broadcast_to(np.linspace(20, 220, 64), (length, 3, 64, 64)) + 2 * np.arange(length)[:, None, None, None]
        )
        arrays = {
            "state": rng.normal(size=(length, 4)).astype(np.float32),
            "points": rng.normal(size=(length, 5, 3)).astype(np.float32),
            "image.front": smooth.astype(np.uint8),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "reward": rng.normal(size=length).astype(np.float32),
            "terminated": last,
            "success": last,
        }
        episodes.append(Episode(arrays, "reach" if seed < 3 else "push", seed))
    return Episodes.from_list(episodes, 0.05)


@pytest.mark.parametrize("video", [False, True])
def test_lerobot_loads_our_datasets(tmp_path: Path, video: bool) -> None:
    if video and video_encoder() is None:
        pytest.skip("this PyAV has no video encoder")
    data = make_data()
    write_lerobot(data, tmp_path / "set", video=video)
    delta = {"action": [0.0, 0.05, 0.1]}
    dataset = lerobot_dataset.LeRobotDataset(
        "local/set", root=tmp_path / "set", delta_timestamps=delta, video_backend="pyav"
    )
    assert (len(dataset), dataset.num_episodes, dataset.fps) == (len(data), 5, 20)
    assert np.allclose(dataset.meta.stats["action"]["mean"], data.arrays["action"].mean(0), atol=1e-6)
    assert dataset.meta.stats["observation.images.front"]["mean"].shape == (3, 1, 1)
    for frame in (0, 5, 6, 20, len(data) - 1):
        item = dataset[frame]
        assert np.array_equal(item["observation.state"], data.arrays["state"][frame])
        assert np.array_equal(item["observation.points"], data.arrays["points"][frame])
        assert np.array_equal(item["action"][0], data.arrays["action"][frame])
        assert item["next.reward"].item() == data.arrays["reward"][frame]
        assert bool(item["next.success"]) == bool(data.arrays["success"][frame])
        episode = int(item["episode_index"])
        assert item["task"] == data.tasks[episode]
        assert item["action_is_pad"].tolist() == [frame + j >= data.ends[episode] for j in range(3)]
        error = np.abs(item["observation.images.front"].numpy() * 255 - data.arrays["image.front"][frame])
        assert error.mean() < (1.0 if video else 1e-3)  # the next frame differs by 2 everywhere


@pytest.mark.parametrize("video", [False, True])
def test_we_read_lerobot_datasets(tmp_path: Path, video: bool) -> None:
    data = make_data()
    dtype = "video" if video else "image"
    dataset = lerobot_dataset.LeRobotDataset.create(
        "local/set",
        fps=20,
        root=tmp_path / "set",
        use_videos=video,
        features={
            "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
            "action": {"dtype": "float32", "shape": (2,), "names": None},
            "observation.images.front": {
                "dtype": dtype,
                "shape": (64, 64, 3),
                "names": ["height", "width", "channels"],
            },
        },
    )
    for index in range(data.num_episodes):
        episode = data.episode(index)
        for frame in range(len(episode)):
            dataset.add_frame(
                {
                    "observation.state": episode.arrays["state"][frame],
                    "action": episode.arrays["action"][frame],
                    "observation.images.front": episode.arrays["image.front"][frame].transpose(1, 2, 0),
                    "task": episode.task,
                }
            )
        dataset.save_episode()
    dataset.finalize()
    loaded = read_lerobot(tmp_path / "set")
    assert loaded.ends.tolist() == data.ends.tolist() and loaded.tasks == data.tasks
    assert np.array_equal(loaded.arrays["state"], data.arrays["state"])
    assert np.array_equal(loaded.arrays["action"], data.arrays["action"])
    error = np.abs(loaded.arrays["image.front"].astype(int) - data.arrays["image.front"])
    assert error.mean() < (1.0 if video else 1e-9)


def copy_with_lerobot(source: Path, target: Path) -> None:
    """Copy a dataset frame by frame with lerobot's own reader and writer."""
    dataset = lerobot_dataset.LeRobotDataset("local/set", root=source, video_backend="pyav")
    made = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    features = {name: feature for name, feature in dataset.meta.features.items() if name not in made}
    copy = lerobot_dataset.LeRobotDataset.create(
        "local/copy", fps=dataset.fps, root=target, features=features, use_videos=False
    )
    for episode in range(dataset.num_episodes):
        rows = [row for row in range(len(dataset)) if int(dataset[row]["episode_index"]) == episode]
        for row in rows:
            item = dataset[row]
            frame = {name: item[name] for name in features}
            for name, feature in features.items():
                if feature["dtype"] == "image":
                    frame[name] = (item[name] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
                else:
                    frame[name] = np.asarray(item[name]).reshape(feature["shape"])
            copy.add_frame(frame | {"task": item["task"]})
        copy.save_episode()
    copy.finalize()


def test_round_trip_with_lerobot_is_lossless(tmp_path: Path) -> None:
    data = make_data()
    write_lerobot(data, tmp_path / "ours", video=False)
    copy_with_lerobot(tmp_path / "ours", tmp_path / "theirs")
    back = read_lerobot(tmp_path / "theirs")
    assert back.ends.tolist() == data.ends.tolist()
    assert back.tasks == data.tasks
    assert back.control_dt == data.control_dt
    assert set(back.arrays) == set(data.arrays)
    for key, array in data.arrays.items():
        assert back.arrays[key].dtype == array.dtype, key
        assert np.array_equal(back.arrays[key], array), key
    assert (data.seeds >= 0).all() and (back.seeds == -1).all()  # lerobot does not store simulator seeds
    first = episode_metadata(tmp_path / "theirs")[0]
    assert (first["length"], first["tasks"]) == (len(data.episode(0)), [data.tasks[0]])


def episode_metadata(root: Path) -> list[dict[str, Any]]:
    """Episode metadata as lerobot reads it."""
    return list(lerobot_dataset.LeRobotDataset("local/set", root=root, video_backend="pyav").meta.episodes)
