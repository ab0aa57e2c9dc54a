"""Tests of the comparison of a dataset with its task: differences end every command with one line and exit code 2."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats.lerobot import read_lerobot, write_lerobot

SETTINGS = ["task=point_mass", "budget.updates=1", "evaluation.episodes=0"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of the point mass with rewards and names."""
    folder = tmp_path_factory.mktemp("logs") / "data"
    words = ["--policy", "random", "--keep-failures", "--episodes", "4", "--num-envs", "4"]
    assert main(["collect", "toy/point_mass", *words, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def policy(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of the point mass."""
    out = tmp_path_factory.mktemp("runs")
    settings = [*SETTINGS, "policy=gaussian", "policy.hidden=[8]", f"dataset={logs}", f"out={out}", "name=bc"]
    assert main(["train", *settings]) == 0
    return out / "bc" / "checkpoints" / "last"


def changed(logs: Path, path: Path, kind: str) -> Path:
    """Write the logs with one difference from their task."""
    data = read_lerobot(logs)
    arrays, names = dict(data.arrays), dict(data.names)
    if kind == "size":
        arrays["state"] = np.pad(arrays["state"], ((0, 0), (0, 1)))
        names.pop("state", None)
    elif kind == "actions":
        arrays["action"] = arrays["action"][:, :1]
        names.pop("action", None)
    elif kind == "key":
        arrays["position"] = arrays.pop("state")
        names.pop("state", None)
    elif kind == "names":
        names["action"] = ("elbow [rad]", "wrist [rad]")
    episodes = Episodes(arrays, data.ends, data.tasks, data.seeds, 0.5 if kind == "rate" else data.control_dt)
    write_lerobot(replace(episodes, names=names), path)
    return path


DIFFERENCES = {
    "size": "'state' of dataset",
    "actions": "'action' of dataset",
    "key": "lacks 'state'",
    "names": "'elbow [rad]' where toy/point_mass has",
    "rate": "was recorded every 0.5 s",
}
LEARNERS = {
    "imitation": ["policy=flow", "policy.hidden=[8]", "algorithm=bc"],
    "offline": ["policy=gaussian", "algorithm=iql", "replay.offline_updates=1"],
    "with offline data": ["policy=squashed_gaussian", "algorithm=rlpd", "replay.learning_starts=20"],
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("learner", LEARNERS)
def test_train_refuses_a_dataset_that_differs_from_its_task(kind, learner, logs, tmp_path, refused) -> None:
    """Also without an evaluation, so that nothing but the dataset needs the simulator."""
    data = changed(logs, tmp_path / "data", kind)
    settings = [*SETTINGS, *LEARNERS[learner], f"dataset={data}", f"out={tmp_path}/runs"]
    assert DIFFERENCES[kind] in refused("train", *settings)
    assert not (tmp_path / "runs").exists()


def test_train_refuses_cameras_that_the_dataset_lacks(logs, tmp_path, refused) -> None:
    settings = ["task=lift", "task.cameras=[front]", "budget.updates=1", "evaluation.episodes=0"]
    line = refused("train", *settings, f"dataset={logs}", f"out={tmp_path}/runs")
    assert "manipulation/lift" in line


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_fine_tuning_refuses_offline_data_that_differ(kind, logs, policy, tmp_path, refused) -> None:
    data = changed(logs, tmp_path / "data", kind)
    settings = [f"init_from={policy}", "algorithm=idql", "replay.offline_updates=1", "budget.updates=1"]
    settings += ["evaluation.episodes=0", f"dataset={data}", f"out={tmp_path}/runs"]
    assert DIFFERENCES[kind] in refused("train", *settings)


@pytest.mark.parametrize("kind", ["size", "actions", "key"])
def test_ope_refuses_logs_that_differ_from_the_policy(kind, logs, policy, tmp_path, refused) -> None:
    data = changed(logs, tmp_path / "data", kind)
    missing = "action" if kind == "actions" else "state"
    assert f"The policy requires '{missing}'" in refused("ope", policy, "--logs", data)


@pytest.mark.parametrize("kind", ["names", "rate"])
def test_ope_refuses_logs_that_differ_from_the_simulator(kind, logs, policy, tmp_path, refused) -> None:
    data = changed(logs, tmp_path / "data", kind)
    assert DIFFERENCES[kind] in refused("ope", policy, "--logs", data, "--play", "2")


def test_ope_warns_of_logs_of_another_task(logs, policy, tmp_path) -> None:
    data = read_lerobot(logs)
    write_lerobot(replace(data, tasks=("manipulation/lift",) * len(data.tasks)), tmp_path / "data")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert main(["ope", str(policy), "--logs", str(tmp_path / "data"), "--steps", "5"]) == 0
    assert any("was recorded on manipulation/lift" in str(warning.message) for warning in found)


def test_collect_refuses_a_policy_of_other_sizes(policy, tmp_path, refused) -> None:
    line = refused("collect", "lift", "--policy", policy, "--episodes", "1", "--out", tmp_path / "data")
    assert "The policy expects observation 'state' of shape" in line and not (tmp_path / "data").exists()
