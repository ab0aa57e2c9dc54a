"""Tests of migration: configurations and manifests of earlier versions are read in the current format."""

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from robopolicy.schema import to_dict
from robopolicy.training import migration
from robopolicy.training.compose import compose_config, read_config
from robopolicy.training.manifest import read_manifest
from robopolicy.training.migration import Move, migrate_config

NONE = {"stock": 0.0, "descriptor": False, "message": "", "message_size": 2, "skills": 0, "skill_bonus": 0.0}
RUN = ["task=point_mass", "policy=gaussian", "algorithm=ppo", "budget.updates=1"]


def test_config_without_a_wrapper_list_is_read(tmp_path: Path) -> None:
    content = to_dict(compose_config(RUN))
    del content["task"]["wrappers"]
    content["task"] |= NONE
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert read_config(tmp_path / "config.yaml").task.wrappers == ()


@pytest.mark.parametrize(
    ("algorithm", "old", "new"),
    [
        ("ppo", {"decisions": 7, "lam": 0.5}, {"num_steps": 7, "gae_lambda": 0.5}),
        ("sac", {"decisions": 3}, {"num_steps": 3}),
        ("fpo", {"pairs": 3}, {"num_mc_samples": 3}),
        (
            "gorl",
            {"identity_start": False, "clip_later": 0.4},
            {"skip_first_decoder": False, "decoder_stage.clip": 0.4},
        ),
        ("props", {"kept": 3}, {"num_kept_batches": 3}),
        ("polychromic", {"forks": 1, "members": 3}, {"branch_points": 1, "set_size": 3}),
        ("subpo", {"place.entries": [0]}, {"place.indices": [0]}),
    ],
)
def test_renamed_algorithm_settings_are_read(
    tmp_path: Path, algorithm: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    content: Any = to_dict(compose_config([*RUN[:2], f"algorithm={algorithm}", RUN[3]]))
    for keys, present in ((new, False), (old, True)):
        for key, value in keys.items():
            *path, last = key.split(".")
            section = reduce(lambda tree, name: tree[name], path, content["algorithm"])
            section.pop(last, None)
            if present:
                section[last] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    read: Any = read_config(tmp_path / "config.yaml").algorithm
    found = {key: reduce(lambda tree, name: tree[name], key.split("."), read) for key in new}
    assert found == new


def test_current_configurations_are_unchanged() -> None:
    content = to_dict(compose_config(RUN))
    assert migrate_config(content) == content
    assert migrate_config("no mapping") == "no mapping"


def test_policy_settings_also_move_in_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = (Move(("policy.layers",), "policy.net.hidden"), Move(("seed",), "seed", lambda old: old["seed"] + 1))
    monkeypatch.setattr(migration, "MOVES", moves)
    config = {"policy": {"layers": [8], "name": "gaussian"}, "seed": 1}
    assert migrate_config(config) == {"policy": {"net": {"hidden": [8]}, "name": "gaussian"}, "seed": 2}
    assert config["policy"] == {"layers": [8], "name": "gaussian"}
    spec = {"observation": {"state": [2]}, "action_dim": 1, "horizon": 1, "action_horizon": 1, "obs_horizon": 1}
    manifest = {"schema": 1, "policy": "gaussian", "config": {"layers": [8]}, "spec": spec, "network_calls": 1}
    manifest |= {"task": "toy/point_mass", "training": {}, "versions": {}, "commit": None, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert read_manifest(tmp_path).config == {"net": {"hidden": [8]}}


@pytest.mark.parametrize(
    ("algorithm", "old", "new"),
    [
        ("rlpd", {"actor_delay": 3, "target_members": 1}, {"policy_delay": 3, "num_min_qs": 1}),
        ("pa_rl", {"critic_rule": "iql"}, {"critic_objective": "iql"}),
        ("dsrl_na", {"space": {"bound": 2.0}}, {"noise_space": {"bound": 2.0}}),
        ("expo", {"edits": 2}, {"edits": 2}),
        ("stock_ac", {"edits": 2}, {"augmentations": 2}),
        ("ailboost", {"share": 0.1}, {"mixture_rate": 0.1}),
        ("tscac", {"signals": ["energy"]}, {"aux_rewards": ["control_cost"]}),
    ],
)
def test_renamed_replay_settings_are_migrated(algorithm: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    content = {"algorithm": {"name": algorithm, **old}}
    assert migrate_config(content) == {"algorithm": {"name": algorithm, **new}}
