"""Hand-written policy folders in LeRobot's format, for the checks that run before `lerobot` is imported."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

INPUTS = {
    "observation.state": {"type": "STATE", "shape": [3]},
    "observation.images.front": {"type": "VISUAL", "shape": [3, 8, 8]},
}
OUTPUTS = {"action": {"type": "ACTION", "shape": [2]}}
SCALING = {"STATE": "MIN_MAX", "VISUAL": "MEAN_STD", "ACTION": "MIN_MAX"}


def statistics() -> dict[str, Tensor]:
    """Statistics of all features, as a processor step stores them."""
    return {
        "observation.state.min": -torch.ones(3),
        "observation.state.max": torch.ones(3),
        "observation.images.front.mean": torch.full((3, 1, 1), 0.5),
        "observation.images.front.std": torch.ones(3, 1, 1),
        "action.min": torch.tensor([-1.0, -2.0]),
        "action.max": torch.tensor([1.0, 2.0]),
    }


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    stored: Mapping[str, Tensor] | None = None,
    step: Mapping[str, Any] | None = None,
) -> Path:
    """Write a policy of kind "diffusion".

    Args:
        folder: Path of the folder.
        config: Entries of config.json to replace.
        stored: Statistics in place of `statistics()`.
        step: An additional step of the preprocessor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"type": "diffusion", "n_obs_steps": 2, "horizon": 8, "n_action_steps": 4}
    settings |= {"input_features": INPUTS, "output_features": OUTPUTS, "normalization_mapping": SCALING}
    (folder / "config.json").write_text(json.dumps(settings | dict(config or {})))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    features = settings["input_features"] | settings["output_features"]
    for name, kind in (("policy_preprocessor", "normalizer"), ("policy_postprocessor", "unnormalizer")):
        state = f"{name}_{kind}.safetensors"
        save_file(dict(statistics() if stored is None else stored), folder / state)
        scaling = {"features": features, "norm_map": SCALING}
        steps = [{"registry_name": f"{kind}_processor", "config": scaling, "state_file": state}]
        steps += [dict(step)] if step and kind == "normalizer" else []
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))
    return folder
