"""LeRobot's own policy object and processors, loaded so that nothing is missing, left over or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.package import lerobot_module
from robopolicy.interop.lerobot.source import WEIGHTS, Source, one_line


class Original:
    """A frozen policy of LeRobot with its processors; copies of our policy share it, as it never changes."""

    def __init__(self, policy: Any, preprocessor: Any, postprocessor: Any) -> None:
        self.policy, self.preprocessor, self.postprocessor = policy, preprocessor, postprocessor

    def __deepcopy__(self, memo: dict[int, Any]) -> Original:
        return self


def load_original(source: Source, settings: dict[str, Any]) -> Original:
    """Load the policy through LeRobot's `from_pretrained`, on the CPU.

    Args:
        source: Its files.
        settings: Entries of config.json to replace.

    Raises:
        UserError: `lerobot` is missing or cannot load it, or the weights are not exactly those of the policy.
    """
    factory, configs = lerobot_module("policies.factory"), lerobot_module("configs.policies")
    with one_line(f"lerobot cannot load {source.folder}"):
        config = configs.PreTrainedConfig.from_pretrained(source.folder, cli_overrides=["--device=cpu"])
        if hasattr(config, "pretrained_backbone_weights"):
            config.pretrained_backbone_weights = None  # would be downloaded, then replaced by those in the file
        for name, value in settings.items():
            setattr(config, name, value)
        # Not strict: `check_weights` says more, and some kinds go on with random weights after an error.
        policy = factory.get_policy_class(source.kind).from_pretrained(source.folder, config=config, strict=False)
        pipelines = factory.make_pre_post_processors(config, pretrained_path=str(source.folder))
    check_weights(source.folder / WEIGHTS, policy)
    for pipeline in pipelines:  # everything is computed where the observations are
        pipeline.steps = [step for step in pipeline.steps if type(step).__name__ != "DeviceProcessorStep"]
    return Original(policy.eval().requires_grad_(False), *pipelines)


def check_weights(file: Path, policy: Any) -> None:
    """Refuse a loaded LeRobot `policy` whose weights are not exactly those in `file`.

    Raises:
        UserError: Names the first weight that is unknown, missing, of another shape, not finite or not loaded.
    """
    state: dict[str, torch.Tensor] = policy.state_dict()
    given: set[str] = set()
    with safe_open(str(file), "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            own = name if name in state else f"model.{name}"  # files from openpi lack the prefix
            if own not in state:
                raise UserError(f"{file} has weight '{name}', which LeRobot's '{policy.name}' does not know.")
            value, loaded = tensors.get_tensor(name), state[own]
            if value.shape != loaded.shape:
                raise UserError(
                    f"Weight '{name}' of {file} has shape {tuple(value.shape)}, but its config.json implies "
                    f"{tuple(loaded.shape)}."
                )
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise UserError(f"Weight '{name}' of {file} is not finite; go back to an earlier checkpoint.")
            if not torch.equal(value.to(loaded.dtype), loaded.cpu()):
                raise UserError(f"lerobot did not load weight '{name}' of {file}; load it there and see what it says.")
            given.add(own)
    shared = {state[name].data_ptr() for name in given}  # tied weights are stored once
    for name, value in state.items():
        if name not in given and value.numel() and value.data_ptr() not in shared:
            raise UserError(f"{file} lacks weight '{name}' of LeRobot's '{policy.name}'; save the policy again.")
