"""Loading of saved LeRobot policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.act import KIND, read_act, unlike_ours
from robopolicy.interop.lerobot.black_box import LeRobotBlackBox, LeRobotBlackBoxConfig, find_horizon
from robopolicy.interop.lerobot.diffusion import LeRobotDiffusion
from robopolicy.interop.lerobot.policy import LeRobotConfig, LeRobotPolicy, LeRobotVLA
from robopolicy.interop.lerobot.source import open_source
from robopolicy.policies.base import Policy

CLASSES: tuple[type[LeRobotPolicy], ...] = (LeRobotDiffusion, LeRobotVLA)


def load_lerobot(
    source: str | Path,
    *,
    revision: str | None = None,
    instructions: Sequence[str] = (),
    keys: Mapping[str, str] | None = None,
    steps: int | None = None,
    action_horizon: int | None = None,
) -> Policy:
    """Load a policy that LeRobot saved, with its processors and statistics.

    ACT becomes a policy of this package where it has the same network. Diffusion, smolvla, pi0 and pi05 are LeRobot's
    networks with noise, and all other kinds are black boxes.

    Args:
        source: Folder with config.json, or id on the Hugging Face hub.
        revision: Commit, branch or tag on the hub; None is the newest. Checkpoints keep a hash of the content.
        instructions: Instructions of a language policy. The observation `task_index` selects one per row.
        keys: Our observation key -> LeRobot feature, where the usual translation gives another name:
            `{"image.top": "observation.image"}`.
        steps: Sampler steps per chunk; None for the value of the policy.
        action_horizon: Actions executed per chunk; None for the value of the policy.

    Raises:
        UserError: Files, statistics or weights are missing or do not fit, or `lerobot` is not installed and needed.
            One line with what was expected and what was found.
    """
    name = str(source)
    found = open_source(name, revision=revision, keys=keys)
    classes = {kind: policy_class for policy_class in CLASSES for kind in policy_class.kinds}
    if steps is not None and found.kind not in classes:
        raise UserError(f"{name} is of kind {found.kind}, which has no sampler steps; leave them out.")
    if found.kind == KIND and not unlike_ours(found):
        if instructions:
            raise UserError(f"{name} is an ACT, which takes no instruction; leave it out.")
        return read_act(found, action_horizon)
    settings = name, revision, found.sha256, tuple(instructions), dict(keys or {}), steps
    if found.kind not in classes:
        black_box = LeRobotBlackBoxConfig(*settings, horizon=find_horizon(found))
        return LeRobotBlackBox(black_box, LeRobotBlackBox.spec_of(found, black_box, action_horizon))
    config, policy_class = LeRobotConfig(*settings), classes[found.kind]
    return policy_class(config, policy_class.spec_of(found, config, action_horizon))
