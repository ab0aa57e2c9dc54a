"""Loading of saved LeRobot policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from robopolicy.errors import unknown_name
from robopolicy.interop.lerobot.diffusion import LeRobotDiffusion
from robopolicy.interop.lerobot.policy import LeRobotConfig, LeRobotPolicy, LeRobotVLA
from robopolicy.interop.lerobot.source import open_source

CLASSES: tuple[type[LeRobotPolicy], ...] = (LeRobotDiffusion, LeRobotVLA)


def load_lerobot(
    source: str | Path,
    *,
    revision: str | None = None,
    instructions: Sequence[str] = (),
    keys: Mapping[str, str] | None = None,
    steps: int | None = None,
    action_horizon: int | None = None,
) -> LeRobotPolicy:
    """Load a policy that LeRobot saved, with its processors and statistics.

    Args:
        source: Folder with config.json, or id on the Hugging Face hub.
        revision: Commit, branch or tag on the hub; None is the newest. Checkpoints keep a hash of the content.
        instructions: Instructions of a language policy. The observation `task_index` selects one per row.
        keys: Our observation key -> LeRobot feature, where the usual translation gives another name:
            `{"image.top": "observation.image"}`.
        steps: Sampler steps per chunk; None for the value of the policy.
        action_horizon: Actions executed per chunk; None for the value of the policy.

    Raises:
        UserError: Files, statistics or weights are missing or do not fit, the kind of policy takes no noise, or
            `lerobot` is not installed. One line with what was expected and what was found.
    """
    name = str(source)
    found = open_source(name, revision=revision, keys=keys)
    classes = {kind: policy_class for policy_class in CLASSES for kind in policy_class.kinds}
    if found.kind not in classes:
        raise unknown_name("kind of LeRobot policy", found.kind, classes, f"of {name}")
    config = LeRobotConfig(name, revision, found.sha256, tuple(instructions), dict(keys or {}), steps)
    policy_class = classes[found.kind]
    return policy_class(config, policy_class.spec_of(found, config, action_horizon))
