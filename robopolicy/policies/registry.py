"""Policies by name: heads, wrappers and policies of other libraries, imported on use, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import Registry

if TYPE_CHECKING:
    from robopolicy.policies.base import Policy
    from robopolicy.spec import PolicySpec

POLICIES: Registry[type[Policy]] = Registry(
    "policies",
    {
        "act": "robopolicy.policies.heads.act:ACTPolicy",
        "autoregressive": "robopolicy.policies.heads.autoregressive:AutoregressivePolicy",
        "callable": "robopolicy.policies.wrappers.black_box:CallablePolicy",
        "composed": "robopolicy.policies.wrappers.composed:ComposedPolicy",
        "consistency": "robopolicy.policies.heads.consistency:ConsistencyPolicy",
        "diffusion": "robopolicy.policies.heads.diffusion:DiffusionPolicy",
        "edited": "robopolicy.policies.wrappers.residual_edit:ResidualEditPolicy",
        "edm": "robopolicy.policies.heads.edm:EDMPolicy",
        "flow": "robopolicy.policies.heads.flow:FlowPolicy",
        "gated": "robopolicy.policies.wrappers.learned_gate:LearnedGatePolicy",
        "gaussian": "robopolicy.policies.heads.gaussian:GaussianPolicy",
        "latent": "robopolicy.policies.wrappers.latent:LatentPolicy",
        "lerobot": "robopolicy.interop.lerobot.black_box:LeRobotBlackBox",
        "lerobot_diffusion": "robopolicy.interop.lerobot.diffusion:LeRobotDiffusion",
        "lerobot_vla": "robopolicy.interop.lerobot.policy:LeRobotVLA",
        "meanflow": "robopolicy.policies.heads.average_velocity:MeanFlowPolicy",
        "mixture": "robopolicy.policies.heads.mixture:MixturePolicy",
        "module": "robopolicy.interop.sources:ModulePolicy",
        "onnx": "robopolicy.interop.onnx:OnnxPolicy",
        "openpi": "robopolicy.interop.openpi:OpenpiPolicy",
        "optimized": "robopolicy.policies.wrappers.action_optimized:ActionOptimizedPolicy",
        "relative_actions": "robopolicy.policies.wrappers.relative_actions:RelativeActionPolicy",
        "remote": "robopolicy.interop.remote:RemotePolicy",
        "selected": "robopolicy.policies.wrappers.best_of_n:BestOfNPolicy",
        "shortcut": "robopolicy.policies.heads.average_velocity:ShortcutPolicy",
        "staged_decoder": "robopolicy.policies.wrappers.staged:StagedDecoder",
        "staged_diffusion": "robopolicy.policies.wrappers.staged:StagedDiffusion",
        "text": "robopolicy.text.policy:TextPolicy",
        "zero_noise": "robopolicy.policies.wrappers.zero_noise:ZeroNoisePolicy",
    },
)
"""Classes by name, constructed as `cls(cls.config_class(...), spec)`."""


def make_policy(name: str, config: Any, spec: PolicySpec) -> Policy:
    """Build the policy `name`; `config` None uses the defaults."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    policy_class: Any = POLICIES[name]
    config = policy_class.config_class() if config is None else config
    if not isinstance(config, policy_class.config_class):
        required = policy_class.config_class.__name__
        raise UserError(f"Policy '{name}' needs a {required}, got {type(config).__name__}.")
    return policy_class(config, spec)
