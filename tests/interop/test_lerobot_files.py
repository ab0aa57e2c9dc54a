"""Tests of the checks of saved LeRobot policies before `lerobot` is imported, with one-line messages."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_folder import INPUTS, SCALING, statistics, write_folder

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.diffusion import LeRobotDiffusion
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.interop.lerobot.policy import LeRobotConfig, LeRobotVLA
from robopolicy.interop.lerobot.source import content_hash, open_source, register_folder


def without(prefix: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in statistics().items() if not key.startswith(prefix)}


def test_features_map_to_observation_keys_and_horizons_to_the_spec(tmp_path: Path) -> None:
    source = open_source(str(write_folder(tmp_path / "policy")))
    assert source.inputs == {"state": "observation.state", "image.front": "observation.images.front"}
    assert source.normalization["action"].mode == "MIN_MAX"
    spec = LeRobotDiffusion.spec_of(source, LeRobotConfig())
    # Eight actions start at the first of two observations: seven start at the newest.
    assert (spec.obs_horizon, spec.horizon, spec.action_horizon, spec.action_dim) == (2, 7, 4, 2)
    assert spec.observation == {"state": (3,), "image.front": (3, 8, 8)}


def test_action_horizon_can_be_overridden_within_the_chunk(tmp_path: Path) -> None:
    source = open_source(str(write_folder(tmp_path / "policy")))
    assert LeRobotDiffusion.spec_of(source, LeRobotConfig(), 7).action_horizon == 7
    with pytest.raises(UserError, match=r"action_horizon must lie in \[1, 7\], got 8\."):
        LeRobotDiffusion.spec_of(source, LeRobotConfig(), 8)


def test_keys_rename_features(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "policy"))
    source = open_source(folder, keys={"image.top": "observation.images.front"})
    assert set(source.inputs) == {"state", "image.top"}
    with pytest.raises(UserError, match=r"Unknown input 'observation.images.top'.*observation.images.front"):
        open_source(folder, keys={"image.top": "observation.images.top"})
    both = INPUTS | {"observation.environment_state": {"type": "ENV", "shape": [3]}}
    write_folder(tmp_path / "policy", config={"input_features": both})
    with pytest.raises(UserError, match=r"'observation.state' and 'observation.environment_state' .* both 'state'"):
        open_source(folder, keys={"state": "observation.environment_state"})


def test_padding_cameras_are_not_observed(tmp_path: Path) -> None:
    padding = {"observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 8, 8]}}
    source = open_source(str(write_folder(tmp_path / "policy", config={"input_features": INPUTS | padding})))
    assert set(source.inputs) == {"state", "image.front"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stored": without("action")}, "no statistics of 'action': MIN_MAX expects min and max, found none"),
        ({"stored": without("observation.state.max")}, "'observation.state': MIN_MAX expects min and max, found min"),
        (
            {"stored": statistics() | {"action.max": torch.ones(3)}},
            r"'max' of 'action' .* has shape \(3,\), expected \(2,\)",
        ),
        ({"stored": statistics() | {"action.min": torch.tensor([float("-inf"), 0.0])}}, "'min' of 'action' .* finite"),
        ({"config": {"normalization_mapping": SCALING | {"ACTION": "MEAN_STD"}}}, "scaled by MIN_MAX .* has MEAN_STD"),
        ({"config": {"n_action_steps": 8}}, r"action_horizon must lie in \[1, 7\], got 8 from its n_action_steps"),
        (
            {"config": {"output_features": {"action": {"type": "ACTION", "shape": [3]}}}},
            r"'min' of 'action' .* has shape \(2,\), expected \(3,\)",
        ),
        ({"config": {"horizon": None}}, "'horizon' .* positive number, found None"),
        ({"config": {"output_features": {}}}, "one output 'action'"),
        ({"config": {"input_features": {"observation.state": [3]}}}, "each feature a type and a shape"),
        ({"config": {"output_features": {"action": {"type": "ACTION", "shape": []}}}}, "shape of positive numbers"),
        ({"step": {"class": "subprocess.Popen", "config": {"args": "true"}}}, "'subprocess.Popen', which is not part"),
    ],
)
def test_policies_with_inconsistent_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path / "policy", **changes)
    with pytest.raises(UserError, match=message) as caught:
        load_lerobot(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "policy_postprocessor.json"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "policy")
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"expected {name}, found none"):
        load_lerobot(folder)


def test_paths_that_are_neither_folder_nor_hub_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a folder with config\.json, or an id"):
        load_lerobot(str(tmp_path / "no" / "such" / "folder"))


def test_changed_folders_are_refused_and_moved_folders_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "policy")
    digest = content_hash(folder)
    folder.rename(tmp_path / "moved")
    changed = write_folder(folder, config={"n_action_steps": 2})
    with pytest.raises(UserError, match=f"expected content {digest[:12]}, found {content_hash(changed)[:12]}"):
        open_source(str(folder), sha256=digest)
    assert register_folder(tmp_path / "moved") == digest
    assert open_source(str(folder), sha256=digest).folder == tmp_path / "moved"


def test_language_policies_need_an_instruction(tmp_path: Path) -> None:
    config = {"type": "smolvla", "chunk_size": 5, "n_action_steps": 5, "max_action_dim": 4}
    source = open_source(str(write_folder(tmp_path / "policy", config=config)))
    with pytest.raises(UserError, match=r"needs an instruction.*instructions=\["):
        LeRobotVLA.spec_of(source, LeRobotConfig())
    several = LeRobotVLA.spec_of(source, LeRobotConfig(instructions=("open", "close")))
    assert several.observation["task_index"] == (1,)


def test_relative_actions_are_refused(tmp_path: Path) -> None:
    config = {"type": "pi0", "chunk_size": 5, "n_action_steps": 5, "max_action_dim": 4, "use_relative_actions": True}
    source = open_source(str(write_folder(tmp_path / "policy", config=config)))
    with pytest.raises(UserError, match="use_relative_actions=true"):
        LeRobotVLA.spec_of(source, LeRobotConfig(instructions=("open",)))


@pytest.mark.skipif(importlib.util.find_spec("lerobot") is not None, reason="lerobot is installed")
def test_missing_lerobot_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"robopolicy\[lerobot\]"):
        load_lerobot(str(write_folder(tmp_path / "policy")))
