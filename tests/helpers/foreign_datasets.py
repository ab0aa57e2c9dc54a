"""The same toy episodes in the formats of other libraries, each written by its library or by its documented rules."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.data.episodes import Episode, Episodes

RATE = 20.0  # Hz
LENGTHS = (5, 9, 12)
NAMES = ("demo_0", "demo_2", "demo_10")  # HDF5 lists demo_10 before demo_2


@dataclass(frozen=True)
class ToyEpisode:
    """T steps, and T + 1 observations."""

    state: NDArray[np.float32]  # (T + 1, 6)
    image: NDArray[np.uint8]  # (T + 1, 24, 32, 3)
    action: NDArray[np.float64]  # (T, 2)
    reward: NDArray[np.float32]  # (T,)
    terminated: bool

    @property
    def last(self) -> NDArray[np.bool_]:
        """(T,) the last step."""
        return np.arange(len(self.action)) == len(self.action) - 1


def _toy(length: int, terminated: bool) -> ToyEpisode:
    rng = np.random.default_rng(length)
    return ToyEpisode(
        rng.normal(size=(length + 1, 6)).astype(np.float32),
        rng.integers(0, 256, (length + 1, 24, 32, 3), np.uint8),
        rng.uniform(-1, 1, (length, 2)),
        rng.normal(size=length).astype(np.float32),
        terminated,
    )


TOYS = [_toy(length, terminated) for length, terminated in zip(LENGTHS, (True, False, True), strict=True)]


def expected(
    *keys: str, camera: str = "image", tasks: tuple[str, ...] = ("", "", ""), closing: bool = False
) -> Episodes:
    """The toy episodes with `state`, `action`, the camera unless it is empty, and further `keys`."""
    made: list[Episode] = []
    for toy, task in zip(TOYS, tasks, strict=True):
        arrays: dict[str, Any] = {"state": toy.state[:-1], "action": toy.action}
        final: dict[str, Any] = {"state": toy.state[-1]}
        if camera:
            pixels = toy.image.transpose(0, 3, 1, 2)
            arrays[f"image.{camera}"], final[f"image.{camera}"] = pixels[:-1], pixels[-1]
        if "reward" in keys:
            arrays["reward"] = toy.reward
        if "terminated" in keys:
            arrays["terminated"] = toy.last & toy.terminated
        episode = Episode(arrays, task)
        made.append(episode.with_closing_frame(final) if closing else episode)
    return Episodes.from_list(made, 1 / RATE)


def write_robomimic_file(path: Path, *, next_obs: bool = True) -> Path:
    """A file in the documented layout of robomimic, with demonstrations in no order of the toys."""
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(LENGTHS)
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": RATE}})
        for name, toy in sorted(zip(NAMES, TOYS, strict=True), reverse=True):
            demo, steps = data.create_group(name), len(toy.action)
            demo.attrs["num_samples"] = steps
            for key, value in (("state", toy.state), ("image", toy.image)):
                demo[f"obs/{key}"] = value[:steps]
                if next_obs:
                    demo[f"next_obs/{key}"] = value[1:]
            demo["actions"], demo["rewards"], demo["dones"] = toy.action, toy.reward, toy.last.astype(np.int64)
            demo["actions_abs"], demo["states"] = toy.action + 1, np.zeros((steps, 3))
        file["mask/train"] = np.array(["demo_0", "demo_2"], "S")
        file["mask/valid"] = np.array(["demo_10"], "S")
    return path


def write_zarr_store(path: Path, compressor: Any = None, zarr_format: Any = 2, floats: bool = False) -> Path:
    """A replay buffer of Diffusion Policy; `floats` stores the image as float32, as PushT does."""
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    options = {"compressors": compressor} if compressor else {}
    images = np.concatenate([toy.image[:-1] for toy in TOYS])
    images = images.astype(np.float32) if floats else images
    group.create_array("meta/episode_ends", data=np.cumsum(LENGTHS))
    group.create_array("data/state", data=np.concatenate([toy.state[:-1] for toy in TOYS]))
    group.create_array("data/action", data=np.concatenate([toy.action for toy in TOYS]))
    group.create_array("data/image", data=images, chunks=(1, *images.shape[1:]), **options)
    return path


def write_zip(folder: Path, path: Path) -> Path:
    """The folder as a zip file without compression, as UMI ships its data."""
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            archive.write(file, file.relative_to(folder))
    return path


def write_minari_dataset(
    root: Path, monkeypatch: Any, data_format: str = "hdf5", toys: list[ToyEpisode] | None = None, **options: Any
) -> Path:
    """A dataset written by Minari's own package."""
    import gymnasium
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer

    toys = toys or TOYS
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    box = gymnasium.spaces.Box
    space = gymnasium.spaces.Dict(
        image=box(0, 255, toys[0].image.shape[1:], np.uint8), state=box(-np.inf, np.inf, (6,), np.float32)
    )
    buffers = [
        EpisodeBuffer(
            id=None,
            seed=index + 3,
            options=None,
            observations={"image": list(toy.image), "state": list(toy.state)},
            actions=list(toy.action),
            rewards=list(toy.reward),
            terminations=list(toy.last & toy.terminated),
            truncations=list(toy.last & (not toy.terminated)),
            infos={},
        )
        for index, toy in enumerate(toys)
    ]
    facts = {"algorithm_name": "a", "author": "b", "author_email": "c", "code_permalink": "d", "requirements": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari.create_dataset_from_buffers(
            "toy/set-v0",
            buffers,
            observation_space=space,
            action_space=box(-1, 1, (2,), np.float64),
            data_format=data_format,
            **facts,
            **options,
        )
    return root / "toy/set-v0"


def d4rl_arrays() -> dict[str, Any]:
    """The flat arrays of D4RL."""
    last = np.concatenate([toy.last for toy in TOYS])
    terminals = np.concatenate([toy.last & toy.terminated for toy in TOYS])
    return {
        "observations": np.concatenate([toy.state[:-1] for toy in TOYS]),
        "actions": np.concatenate([toy.action for toy in TOYS]),
        "rewards": np.concatenate([toy.reward for toy in TOYS]),
        "terminals": terminals,
        "timeouts": last & ~terminals,
        "infos/qpos": np.zeros((sum(LENGTHS), 3)),
    }


def write_d4rl_file(path: Path) -> Path:
    """A file of D4RL."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in d4rl_arrays().items():
            file[name] = array
        file["metadata/algorithm"] = "random"
    return path


def ogbench_arrays() -> dict[str, Any]:
    """The flat arrays of OGBench, with a state after the last action."""
    return {
        "observations": np.concatenate([toy.state for toy in TOYS]),
        "actions": np.concatenate([np.concatenate([toy.action, toy.action[-1:]]) for toy in TOYS]),
        "terminals": np.concatenate([np.arange(len(toy.state)) == len(toy.action) for toy in TOYS]),
        "qpos": np.zeros((sum(LENGTHS) + 3, 2), np.float32),
    }


def npz_arrays() -> dict[str, Any]:
    """The arrays of a plain npz file."""
    return {
        "episode_ends": np.cumsum(LENGTHS),
        "state": np.concatenate([toy.state[:-1] for toy in TOYS]),
        "action": np.concatenate([toy.action for toy in TOYS]),
        "image": np.concatenate([toy.image[:-1] for toy in TOYS]),
    }


def write_npz_file(path: Path, arrays: Callable[[], dict[str, Any]] = npz_arrays) -> Path:
    """An npz file written by numpy."""
    np.savez(path, **arrays())
    return path


def assert_same(found: Episodes, episodes: Episodes, *, without: tuple[str, ...] = ()) -> None:
    """Assert that both have the same keys, types and bits."""
    keys = set(episodes.arrays) - set(without)
    assert set(found.arrays) - set(without) == keys
    for key in keys:
        assert found.arrays[key].dtype == episodes.arrays[key].dtype, key
        assert np.array_equal(found.arrays[key], episodes.arrays[key]), key
    assert np.array_equal(found.ends, episodes.ends)
    assert found.tasks == episodes.tasks and found.control_dt == episodes.control_dt
