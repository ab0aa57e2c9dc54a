"""Policies and simulators of other libraries as ours, and ours as theirs.

Importing the package makes its policies known, so that checkpoints may name them; what an adapter needs beyond the
core is imported when it is used.
"""

from robopolicy.interop.lerobot import LeRobotConfig, LeRobotDiffusion, LeRobotVLA
from robopolicy.interop.onnx import OnnxConfig, OnnxPolicy
from robopolicy.interop.remote import RemoteConfig, RemotePolicy
from robopolicy.interop.torch_module import ModuleConfig, ModulePolicy
from robopolicy.policies import POLICIES

__all__ = ["POLICIES"]

POLICIES.update(
    {
        "module": (ModuleConfig, ModulePolicy),
        "onnx": (OnnxConfig, OnnxPolicy),
        "remote": (RemoteConfig, RemotePolicy),
        "lerobot_diffusion": (LeRobotConfig, LeRobotDiffusion),
        "lerobot_vla": (LeRobotConfig, LeRobotVLA),
    }
)
