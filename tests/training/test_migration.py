"""Configurations and manifests of earlier versions are read as the present ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from robopolicy.schema import to_plain
from robopolicy.training import migration
from robopolicy.training.compose import compose_config, read_config
from robopolicy.training.manifest import read_manifest
from robopolicy.training.migration import Move, migrate_config

NONE = {"stock": 0.0, "descriptor": False, "message": "", "message_size": 2, "skills": 0, "skill_bonus": 0.0}
RUN = ["task=point_mass", "policy=gaussian", "algorithm=ppo", "budget.updates=1"]


def test_a_run_from_before_wrappers_had_a_list_is_read(tmp_path: Path) -> None:
    content = to_plain(compose_config(RUN))
    del content["task"]["wrappers"]
    content["task"] |= NONE
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert read_config(tmp_path / "config.yaml").task.wrappers == ()


def test_present_configurations_stay_as_they_are() -> None:
    content = to_plain(compose_config(RUN))
    assert migrate_config(content) == content
    assert migrate_config("no mapping") == "no mapping"


def test_settings_of_a_policy_move_in_its_checkpoints_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = (Move(("policy.layers",), "policy.net.hidden"), Move(("seed",), "seed", lambda old: old["seed"] + 1))
    monkeypatch.setattr(migration, "MOVES", moves)
    config = {"policy": {"layers": [8], "name": "gaussian"}, "seed": 1}
    assert migrate_config(config) == {"policy": {"net": {"hidden": [8]}, "name": "gaussian"}, "seed": 2}
    assert config["policy"] == {"layers": [8], "name": "gaussian"}
    spec = {"observation": {"state": [2]}, "action_dim": 1, "horizon": 1, "execute": 1, "obs_horizon": 1}
    manifest = {"schema": 1, "policy": "gaussian", "config": {"layers": [8]}, "spec": spec, "network_calls": 1}
    manifest |= {"task": "toy/point_mass", "training": {}, "versions": {}, "commit": None, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert read_manifest(tmp_path).config == {"net": {"hidden": [8]}}
