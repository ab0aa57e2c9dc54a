"""Whether actions are absolute or delta: found in robomimic's files, kept by datasets, and compared with the task."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign_datasets as toys
import gymnasium
import numpy as np
import pytest

from robopolicy.cli.main import main
from robopolicy.data.compatibility import check_dataset, recorded_spec
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats import open_dataset, write_dataset
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.errors import UserError
from robopolicy.sim.backends.gymnasium import GymnasiumSim

h5py = pytest.importorskip("h5py", reason="needs robopolicy[hdf5]")
OLD = [{"control_delta": delta} for delta in (True, False)]
NEW = [{"type": "BASIC", "body_parts": {"right": {"input_type": kind}}} for kind in ("delta", "absolute")]


def write(path: Path, controller: Any) -> Path:
    """A file of robomimic with the settings of a controller of robosuite."""
    toys.write_robomimic_file(path)
    with h5py.File(path, "a") as file:
        settings = {"control_freq": toys.RATE, "controller_configs": controller}
        file["data"].attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": settings})
    return path


def read(path: Path, *actions: str) -> Episodes:
    """Episodes with the given arrays as actions."""
    features = {"action": FeatureMapping(actions)} if actions else {}
    with open_dataset(path, DatasetMapping(features=features)) as dataset:
        return dataset.read()


@pytest.mark.parametrize(
    ("controller", "expected"),
    [*zip(OLD + NEW, ["delta", "absolute"] * 2, strict=True), (None, ""), ({}, ""), ({"body_parts": 3}, "")],
)
def test_the_controller_of_robosuite_states_the_type(controller: Any, expected: str, tmp_path: Path) -> None:
    assert read(write(tmp_path / "demo.hdf5", controller)).action_type == expected


def test_the_name_of_an_array_takes_precedence_over_the_controller(tmp_path: Path) -> None:
    path = write(tmp_path / "demo.hdf5", OLD[0])
    assert read(path, "actions_abs").action_type == "absolute"
    assert read(path, "actions").action_type == "delta"


def test_datasets_keep_the_type(tmp_path: Path, refused: Callable[..., str]) -> None:
    for name, controller in zip(("delta", "absolute"), OLD, strict=True):
        path = write(tmp_path / f"{name}.hdf5", controller)
        assert main(["data", "convert", str(path), str(tmp_path / name)]) == 0
        found = read_lerobot(tmp_path / name)
        assert found.action_type == found.subset([0]).action_type == name
        assert Episodes.concat([found, replace(found, action_type="")]).action_type == name
    parts = [read_lerobot(tmp_path / name) for name in ("delta", "absolute")]
    with pytest.raises(UserError, match="absolute and with delta actions cannot be joined"):
        Episodes.concat(parts)
    line = refused("data", "merge", tmp_path / "delta", tmp_path / "absolute", "--out", tmp_path / "both")
    assert "Actions are absolute in" in line


@pytest.mark.parametrize("format", ["npz", "zarr", "robomimic", "minari"])
def test_every_format_that_is_written_keeps_the_type(format: str, tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="needs robopolicy[zarr]")
    arrays = {"state": np.zeros((3, 2)), "action": np.zeros((3, 1)), "reward": np.zeros(3)}
    episode = Episode(arrays | {"terminated": np.zeros(3, np.bool_), "closing": np.arange(3) == 2})
    path = tmp_path / {"npz": "x.npz", "zarr": "x.zarr", "robomimic": "x.hdf5", "minari": "x-v0"}[format]
    for kind in ("delta", ""):
        write_dataset(path.with_stem(f"{kind}{path.stem}"), format, [episode], 0.1, {}, kind)
        with open_dataset(path.with_stem(f"{kind}{path.stem}")) as dataset:
            assert dataset.read().action_type == kind


def test_a_simulator_of_the_other_type_is_refused(tmp_path: Path) -> None:
    for name, controller, other in (("delta", OLD[0], "absolute"), ("absolute", OLD[1], "delta")):
        episodes = read(write(tmp_path / f"{name}.hdf5", controller))
        spec = recorded_spec(episodes)
        check_dataset(episodes, spec, "demo")
        check_dataset(episodes, replace(spec, action_type=name), "demo")
        with pytest.raises(UserError, match=f"demo are {name}, .* takes {other} ones"):
            check_dataset(episodes, replace(spec, action_type=other, task="robosuite/Lift"), "demo")


def test_environments_declare_the_type() -> None:
    class Environment(gymnasium.Env[Any, Any]):
        observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
        action_type = "delta"

    assert GymnasiumSim(Environment, 1).spec.action_type == "delta"
    Environment.action_type = "discrete"
    assert GymnasiumSim(Environment, 1).spec.action_type == ""


@pytest.mark.slow
def test_robosuite_takes_delta_actions() -> None:
    pytest.importorskip("robosuite")
    from robopolicy.sim.registry import SimOptions, make_sim

    assert make_sim("robosuite/Lift", SimOptions(num_envs=1)).spec.action_type == "delta"
