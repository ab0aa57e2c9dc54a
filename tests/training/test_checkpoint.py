"""Tests of checkpoints: they are complete or absent, load strictly, and detect every kind of damage."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from robopolicy.atomic import sibling
from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.training.checkpoint import (
    golden_observations,
    load_policy,
    load_training_state,
    save_checkpoint,
    verify_checkpoint,
)
from robopolicy.training.manifest import SCHEMA
from robopolicy.versions import sha256

OBS = {"state": torch.linspace(-1, 1, 8 * 2 * 6).reshape(8, 2, 6)}


@pytest.fixture
def saved(tmp_path, make_policy) -> Path:
    path = tmp_path / "best"
    state = {"update": 3, "weights": torch.arange(3)}
    save_checkpoint(path, make_policy(), task="toy/point_mass", obs_sample=OBS, training_state=state)
    return path


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def edit_model(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes weights and updates the hash in the manifest."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")
    edit_manifest(path, lambda data: data["files"].update({"model.safetensors": sha256(path / "model.safetensors")}))


def test_a_loaded_policy_acts_like_the_saved_one(saved, make_policy):
    policy, manifest = load_policy(saved)
    noise = torch.randn(8, 4, 2)
    assert torch.equal(policy.decode(OBS, noise), make_policy().decode(OBS, noise))
    assert not policy.training
    assert (manifest.task, manifest.network_calls, manifest.policy_spec.action_horizon) == ("toy/point_mass", 3, 2)
    assert {"robopolicy", "torch", "mujoco", "numpy", "python"} <= manifest.versions.keys()


def test_golden_chunk_is_reproduced_exactly(saved):
    report = verify_checkpoint(saved)
    assert report.ok
    assert report.max_error == 0.0


@pytest.mark.parametrize("training", [True, False])
def test_saving_keeps_the_training_mode_and_stores_four_observations(tmp_path, make_policy, training):
    policy = make_policy().train(training)
    save_checkpoint(tmp_path / "best", policy, task="toy/point_mass", obs_sample=OBS)
    assert policy.training == training
    assert torch.equal(golden_observations(tmp_path / "best")["state"], OBS["state"][:4])


def test_verify_detects_a_changed_computation(saved, monkeypatch):
    monkeypatch.setattr(FlowPolicy, "sampler_step", lambda self, features, x, k: x)
    report = verify_checkpoint(saved)
    assert not report.ok
    assert report.max_error > 0.01


def test_verify_detects_a_sampler_with_other_noise(saved, monkeypatch):
    monkeypatch.setattr(FlowPolicy, "integrate", lambda self, features, noise: self.act(OBS))
    monkeypatch.setattr(
        "robopolicy.policies.heads.generative.normal", lambda shape, generator, device: generator.normal((1, 1))
    )
    with pytest.raises(UserError, match="sampler has changed"):
        verify_checkpoint(saved)


def test_training_state_round_trips(saved):
    state = load_training_state(saved)
    assert state["update"] == 3
    assert torch.equal(state["weights"], torch.arange(3))


def test_replacing_a_checkpoint_removes_the_old_one(saved, make_policy):
    save_checkpoint(saved, make_policy(), task="toy/other", obs_sample=OBS)
    assert load_policy(saved)[1].task == "toy/other"
    assert [entry.name for entry in saved.parent.iterdir()] == ["best"]
    with pytest.raises(UserError, match="no training_state"):
        load_training_state(saved)


def test_other_folders_are_not_overwritten(tmp_path, make_policy):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="not a checkpoint"):
        save_checkpoint(tmp_path, make_policy(), task="t", obs_sample=OBS)


def test_full_disk_leaves_the_old_checkpoint_and_nothing_else(saved, make_policy):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match="Cannot write"):
            save_checkpoint(saved, make_policy(), task="toy/new", obs_sample=OBS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_policy(saved)[1].task == "toy/point_mass"
    assert [entry.name for entry in saved.parent.iterdir()] == ["best"]


def test_a_file_in_the_way_is_named(tmp_path, make_policy):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"Cannot write .*file/best"):
        save_checkpoint(tmp_path / "file" / "best", make_policy(), task="t", obs_sample=OBS)


def test_a_crash_between_the_two_renames_loses_nothing(saved):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    previous = sibling(saved, "previous")
    saved.rename(previous.with_name(previous.name.replace(f"-{os.getpid()}", f"-{dead.pid}")))
    assert load_policy(saved)[1].task == "toy/point_mass"


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def widen(weights: dict[str, torch.Tensor]) -> None:
    key = next(key for key, value in weights.items() if value.dim() == 2)
    weights[key] = torch.zeros(3, 3)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (flip_a_bit, "corrupted or truncated.*copy the checkpoint again"),
    "truncated": (truncate, "corrupted or truncated.*copy the checkpoint again"),
    "missing weights": (lambda path: (path / "model.safetensors").unlink(), "lacks model.safetensors"),
    "missing golden": (lambda path: (path / "golden.safetensors").unlink(), "lacks golden.safetensors"),
    "unlisted weights": (
        lambda path: edit_manifest(path, lambda data: data["files"].pop("model.safetensors")),
        "does not list model.safetensors",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "is not a checkpoint"),
    "broken manifest": (lambda path: (path / "manifest.json").write_text("{"), "is damaged"),
    "manifest of another kind": (lambda path: (path / "manifest.json").write_text("[]"), "no schema version"),
    "world model": (
        lambda path: edit_manifest(path, lambda data: data.update(worldmodel=data.pop("policy"))),
        "contains a world model, not a policy; pass it to 'robopolicy worldmodel'",
    ),
    "no kind": (lambda path: edit_manifest(path, lambda data: data.pop("policy")), "does not describe a policy"),
    "future schema": (
        lambda path: edit_manifest(path, lambda data: data.update(schema=SCHEMA + 1)),
        "newer than .*upgrade robopolicy",
    ),
    "unknown policy": (
        lambda path: edit_manifest(path, lambda data: data.update(policy="flwo")),
        "Unknown policy 'flwo' in .*. Did you mean 'flow'",
    ),
    "unknown manifest key": (lambda path: edit_manifest(path, lambda data: data.update(extra=1)), "Unknown .*'extra'"),
    "missing manifest key": (lambda path: edit_manifest(path, lambda data: data.pop("task")), "lacks 'task'"),
    "unknown config key": (
        lambda path: edit_manifest(path, lambda data: data["config"].update(stepz=1)),
        "Unknown setting 'stepz' in .*. Did you mean 'steps'",
    ),
    "missing config key": (lambda path: edit_manifest(path, lambda data: data["config"].pop("steps")), "lacks 'steps'"),
    "wrong config type": (
        lambda path: edit_manifest(path, lambda data: data["config"].update(steps="four")),
        "steps must be a value of type int, found 'four'",
    ),
    **{
        f"observation {value!r}": (
            lambda path, value=value: edit_manifest(path, lambda data: data["spec"].update(observation=value)),
            "does not describe a valid policy: observation must map names to shapes, found",
        )
        for value in (None, "state", 6, [6], {"state": "six"}, {"state": [None]})
    },
    "wrong spec": (
        lambda path: edit_manifest(path, lambda data: data["spec"].update(action_horizon=9)),
        "action_horizon must lie",
    ),
    "vast chunk": (lambda path: edit_manifest(path, lambda data: data["spec"].update(action_dim=10**9)), "may have"),
    "vast input": (
        lambda path: edit_manifest(path, lambda data: data["spec"].update(observation={"state": [10**9]})),
        "observation 'state' may have",
    ),
    "missing weight": (
        lambda path: edit_model(path, lambda weights: weights.pop(sorted(weights)[-1])),
        "lacks weight|no normaliser statistics",
    ),
    "extra weight": (
        lambda path: edit_model(path, lambda weights: weights.update(extra=torch.zeros(1))),
        "has weight 'extra', which policy 'flow' does not have",
    ),
    "wrong shape": (lambda path: edit_model(path, widen), r"has shape \(3, 3\), but its manifest implies"),
    "no statistics": (
        lambda path: edit_model(path, lambda weights: weights.pop("action_normalizer.offset")),
        "no normaliser statistics.*save it again",
    ),
    "unfitted statistics": (
        lambda path: edit_model(path, lambda weights: weights["action_normalizer.fitted"].fill_(False)),
        "no normaliser statistics: 'action_normalizer' is not fitted",
    ),
    "infinite statistics": (
        lambda path: edit_model(path, lambda weights: weights["action_normalizer.scale"].fill_(torch.inf)),
        "non-finite normaliser statistics in 'action_normalizer.scale'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused_in_one_line(saved, damage):
    change, message = DAMAGES[damage]
    change(saved)
    with pytest.raises(UserError, match=message) as refusal:
        load_policy(saved)
    assert "\n" not in str(refusal.value)


def test_setting_missing_in_an_older_checkpoint_takes_its_default(saved):
    edit_manifest(saved, lambda data: data["config"].pop("time_distribution"))
    policy, _ = load_policy(saved)
    assert policy.config.time_distribution == FlowConfig().time_distribution
    assert verify_checkpoint(saved).ok


@pytest.mark.parametrize("key", ["obs.state", "chunk"])
def test_a_golden_file_of_another_policy_is_refused(saved, key):
    golden = load_file(saved / "golden.safetensors")
    golden[key] = torch.zeros(1, 2, 3)
    save_file(golden, saved / "golden.safetensors")
    edit_manifest(
        saved, lambda data: data["files"].update({"golden.safetensors": sha256(saved / "golden.safetensors")})
    )
    with pytest.raises(UserError, match="does not fit the policy"):
        verify_checkpoint(saved)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_policy(tmp_path / "nowhere")


def test_damaged_training_state_is_refused(saved):
    (saved / "training_state" / "tree.json").write_text("{}")
    with pytest.raises(UserError, match="corrupted"):
        load_training_state(saved)
    with pytest.raises(UserError, match="corrupted"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("text", ["[]", "null", "nonsense", "[" * 100_000, '{"weights": {"$tensor": "none"}}'])
def test_a_training_state_that_is_none_is_refused(saved, text):
    file = saved / "training_state" / "tree.json"
    file.write_text(text)
    edit_manifest(saved, lambda data: data["files"].update({"training_state/tree.json": sha256(file)}))
    with pytest.raises(UserError, match="training_state is damaged"):
        load_training_state(saved)


def test_policies_that_cannot_be_loaded_again_are_not_saved(tmp_path, make_policy):
    broken = make_policy()
    next(broken.parameters()).data[0] = torch.nan
    with pytest.raises(UserError, match="non-finite weights"):
        save_checkpoint(tmp_path / "a", broken, task="t", obs_sample=OBS)
    unfitted = FlowPolicy(FlowConfig(), make_policy().spec)
    with pytest.raises(UserError, match="no normaliser statistics"):
        save_checkpoint(tmp_path / "b", unfitted, task="t", obs_sample=OBS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("task", "missing"), [("gymnasium/Pendulum-v1", ""), ("toy/nowhere", "Unknown task 'toy/now")])
def test_verify_reports_a_missing_task(tmp_path, make_policy, capsys, task, missing):
    save_checkpoint(tmp_path / "ckpt", make_policy(), task=task, obs_sample=OBS)
    assert main(["verify", str(tmp_path / "ckpt")]) == 0
    printed = capsys.readouterr().out
    assert missing in printed if missing else "cannot be evaluated here" not in printed


@pytest.mark.slow
def test_golden_chunk_is_reproduced_by_a_fresh_process(saved):
    command = [sys.executable, "-m", "robopolicy", "verify", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
