"""Policies of the LeRobot package as ours and ours as theirs; its datasets are read and written by `data.lerobot`.

    policy = load_lerobot("lerobot/diffusion_pusht")  # or a folder; verbs act and decode, field where it diffuses
    theirs = as_lerobot(policy)  # select_action, predict_action_chunk

Tested with the releases that the extra `robopolicy[lerobot]` allows. Nothing here imports `lerobot` before it is used.
"""

from robopolicy.interop.lerobot.adapter import as_lerobot, identity_processors
from robopolicy.interop.lerobot.diffusion import LeRobotDiffusion
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.interop.lerobot.policy import LeRobotConfig
from robopolicy.interop.lerobot.source import provide
from robopolicy.interop.lerobot.vla import LeRobotVLA

__all__ = [
    "LeRobotConfig",
    "LeRobotDiffusion",
    "LeRobotVLA",
    "as_lerobot",
    "identity_processors",
    "load_lerobot",
    "provide",
]
