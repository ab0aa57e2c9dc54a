"""Tests of old checkpoints and runs whose settings moved to parts of several themes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from old_manifests import as_of_old
from safetensors.torch import load_file, save_file

from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.schema import to_dict
from robopolicy.sim.wrappers.registry import WrapperSpec
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint
from robopolicy.training.compose import compose_config, read_config
from robopolicy.versions import sha256

SHAPES = {"state": (2,), "image.top": (3, 16, 16), "entities.others": (2, 3), "stock.0.9": (2,)}
VISION = {"widths": (16,), "keypoints": 4}
MODULAR = {"backbone": "modular", "backbone_options": {"modules": 2, "context_width": 4}, "hidden": (8,)}
ENTITIES = {"width": 8, "heads": 2, "layers": 1, "features": 5}


def old_name(name: str) -> str:
    return name.replace("encoder.stock.start", "encoder.start").replace(".augmentation.", ".noise_mask.")


@pytest.mark.parametrize("cells", [0, 4])
def test_an_old_checkpoint_computes_the_same_outputs(tmp_path: Path, cells: int) -> None:
    vision = VISION | {"augmentation": {"name": "noise_mask", "cells": cells} if cells else {}}
    config = GaussianConfig(**MODULAR, normalization="identity", encoders={"entities": ENTITIES})
    config = GaussianConfig(**{**vars(config), "vision": type(config.vision)(**vision)})
    policy = GaussianPolicy(config, PolicySpec(SHAPES, action_dim=2))
    policy.encoder.stock.start.fill_(0.7)
    policy.action_normalizer.fit({"min": -torch.ones(2), "max": torch.ones(2)})
    obs = {key: torch.rand(3, 1, *shape) for key, shape in SHAPES.items()}
    obs["image.top"] = (255 * obs["image.top"]).to(torch.uint8)
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, policy, task="toy/point_mass", obs_sample=obs)

    weights = {old_name(name): value for name, value in load_file(folder / "model.safetensors").items()}
    assert "encoder.start" in weights and any("noise_mask" in name for name in weights) == bool(cells)
    save_file(weights, folder / "model.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"] = as_of_old(manifest["config"], cells)
    manifest["files"]["model.safetensors"] = sha256(folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))

    again, _ = load_policy(folder)
    assert again.config_dict() == policy.config_dict() and verify_checkpoint(folder).max_error == 0.0


NONE = {"stock": 0.0, "descriptor": False, "message": "", "message_size": 2, "skills": 0, "skill_bonus": 0.0}
RUN = ["task=point_mass", "policy=gaussian", "algorithm=ppo", "budget.updates=1"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"stock": 0.95}, (WrapperSpec("stock", {"discount": 0.95}),)),
        (
            {"message": "random", "message_size": 3, "descriptor": True},
            (WrapperSpec("descriptor"), WrapperSpec("message", {"kind": "random", "size": 3})),
        ),
        ({"skills": 3, "skill_bonus": 0.1}, (WrapperSpec("skills", {"count": 3, "bonus": 0.1}),)),
    ],
)
def test_an_old_run_without_a_wrapper_list_is_read(tmp_path: Path, old: dict[str, Any], new: Any) -> None:
    content = to_dict(compose_config(RUN))
    del content["task"]["wrappers"]
    content["task"] |= NONE | old
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert read_config(tmp_path / "config.yaml").task.wrappers == new
