"""Checkpoints of world models.

A checkpoint is a folder like that of a policy: `model.safetensors`, `manifest.json`, `training_state/`. Its manifest
says what the model achieved in the tests of `robopolicy.worldmodel.diagnostics`, and so whether it may judge policies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from robopolicy.device import usable_device
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import atomic_folder, recover, refuse_foreign, write_text
from robopolicy.schema import from_plain, to_plain
from robopolicy.training.checkpoint import MODEL, STATE
from robopolicy.training.manifest import MANIFEST, check_files, manifest_content, sha256
from robopolicy.training.statetree import portable, save_tree
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
    refuse_foreign(folder, MANIFEST, "a checkpoint")
    weights = {key: portable(value) for key, value in model.state_dict().items()}
    for key, value in weights.items():
        if not bool(value.isfinite().all()):
            raise UserError(f"The world model to save has non-finite numbers in '{key}'; lower the learning rate.")
    with atomic_folder(folder) as temporary:
        save_file(weights, temporary / MODEL)
        if training_state is not None:
            (temporary / STATE).mkdir()
            save_tree(temporary / STATE, training_state)
        names = sorted(file.relative_to(temporary).as_posix() for file in temporary.rglob("*") if file.is_file())
        complete = replace(manifest, files={name: sha256(temporary / name) for name in names})
        write_text(temporary / MANIFEST, json.dumps(to_plain(complete), indent=2) + "\n")


def read_world_manifest(folder: Path) -> WorldManifest:
    """Read `manifest.json` of a world model.

    Raises:
        UserError: Not a world model, unreadable, or written by a newer schema.
    """
    data = manifest_content(folder, SCHEMA)
    if "worldmodel" not in data:
        raise UserError(f"{folder} holds a policy, not a world model; pass e.g. runs/NAME/checkpoints/best of one.")
    return from_plain(WorldManifest, data, str(folder / MANIFEST))


def load_world(path: str | Path, device: str | torch.device = "cpu") -> tuple[AnyWorldModel, WorldManifest]:
    """Load a world model strictly, in evaluation mode.

    Raises:
        UserError: One sentence that says what is wrong with the checkpoint.
    """
    folder, device = Path(path), usable_device(device)
    recover(folder)
    manifest = read_world_manifest(folder)
    check_files(folder, manifest, MODEL)
    if manifest.worldmodel not in WORLD_MODELS:
        raise unknown_name("world model", manifest.worldmodel, WORLD_MODELS, f"in {folder}")
    config_class, model_class = WORLD_MODELS[manifest.worldmodel]
    config = from_plain(config_class, manifest.config, f"model config of {folder}")
    model = model_class(config, from_plain(WorldSpec, manifest.spec, f"spec of {folder}"))
    try:
        model.load_state_dict(load_file(folder / MODEL), strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / MODEL} does not fit its manifest; copy the checkpoint again.") from error
    return model.to(device).eval(), manifest
