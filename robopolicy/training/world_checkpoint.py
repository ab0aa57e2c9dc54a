"""Checkpoints of world models.

A checkpoint is a folder like that of a policy: `model.safetensors`, `manifest.json`, `training_state/`. Its manifest
says what the model achieved in the tests of `robopolicy.worldmodel.diagnostics`, and so whether it may judge policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from robopolicy.errors import UserError, unknown_name
from robopolicy.schema import from_plain
from robopolicy.training.checkpoint import load_model, save_model
from robopolicy.training.manifest import MANIFEST, manifest_content
from robopolicy.worldmodel.contract import WorldSpec
from robopolicy.worldmodel.diagnostics import Verdict
from robopolicy.worldmodel.latent import LatentConfig, LatentWorldModel
from robopolicy.worldmodel.pretrained.model import PretrainedConfig, PretrainedWorldModel

SCHEMA = 1  # raise it with every change that an older reader would misunderstand
AnyWorldModel = LatentWorldModel | PretrainedWorldModel
WORLD_MODELS: dict[str, tuple[type[Any], type[AnyWorldModel]]] = {
    LatentWorldModel.name: (LatentConfig, LatentWorldModel),
    PretrainedWorldModel.name: (PretrainedConfig, PretrainedWorldModel),
}


@dataclass(frozen=True)
class WorldManifest:
    """Everything but the numbers of a world model."""

    schema: int  # version of this layout
    worldmodel: str  # key in `WORLD_MODELS`
    config: dict[str, Any]  # fields of its config
    spec: dict[str, Any]  # `WorldSpec`
    task: str  # registered task id that it was filmed in
    ends_on_success: bool  # whether the task ends when it succeeds
    gate: dict[str, Any]  # tests: `passed`, `reasons`, and what was measured; empty before the first one
    training: dict[str, Any]  # free summary
    versions: dict[str, str]
    commit: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])  # relative path -> sha256

    def require(self, folder: str | Path) -> None:
        """Refuse the world model in `folder` where it has failed its tests, or not taken them.

        Raises:
            UserError: Says which test it failed.
        """
        if not self.gate:
            raise UserError(f"World model {folder} was not tested; train it to the end or run 'worldmodel eval'.")
        Verdict(self.gate["passed"], tuple(self.gate["reasons"])).require(f"World model {folder}")


def save_world(
    folder: Path, model: AnyWorldModel, manifest: WorldManifest, training_state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint folder atomically, replacing an older one of the same name.

    Raises:
        UserError: The weights are not finite, the place holds something else, or writing failed.
    """
    save_model(folder, model, manifest, training_state, "world model")


def read_world_manifest(folder: Path) -> WorldManifest:
    """Read `manifest.json` of a world model.

    Raises:
        UserError: Not a world model, unreadable, or written by a newer schema.
    """
    data = manifest_content(folder, SCHEMA, "worldmodel")
    return from_plain(WorldManifest, data, str(folder / MANIFEST))


def load_world(path: str | Path, device: str | torch.device = "cpu") -> tuple[AnyWorldModel, WorldManifest]:
    """Load a world model strictly, in evaluation mode.

    Raises:
        UserError: One sentence that says what is wrong with the checkpoint.
    """
    return load_model(path, device, read_world_manifest, _described)


def _described(manifest: WorldManifest, folder: Path) -> AnyWorldModel:
    if manifest.worldmodel not in WORLD_MODELS:
        raise unknown_name("world model", manifest.worldmodel, WORLD_MODELS, f"in {folder}")
    config_class, model_class = WORLD_MODELS[manifest.worldmodel]
    config = from_plain(config_class, manifest.config, f"model config of {folder}")
    return model_class(config, from_plain(WorldSpec, manifest.spec, f"spec of {folder}"))
