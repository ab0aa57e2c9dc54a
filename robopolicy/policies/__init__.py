"""Policies behind one contract (`base.Policy`)."""

from __future__ import annotations

from typing import Any

from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.autoregressive import AutoregressiveConfig, AutoregressivePolicy
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.edm import EDMConfig, EDMPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.meanflow import MeanFlowConfig, MeanFlowPolicy
from robopolicy.policies.heads.mixture import MixtureConfig, MixturePolicy
from robopolicy.policies.heads.sequence import SequenceConfig, SequencePolicy
from robopolicy.policies.heads.shortcut import ShortcutConfig, ShortcutPolicy
from robopolicy.policies.heads.swaddled import SwaddledConfig, SwaddledPolicy
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.wrappers.callable import CallableConfig, CallablePolicy
from robopolicy.policies.wrappers.composed import ComposedConfig, ComposedPolicy
from robopolicy.policies.wrappers.corrected import CorrectedConfig, CorrectedPolicy
from robopolicy.policies.wrappers.edited import EditedConfig, EditedPolicy
from robopolicy.policies.wrappers.gated import GatedConfig, GatedPolicy
from robopolicy.policies.wrappers.latent import LatentConfig, LatentPolicy
from robopolicy.policies.wrappers.optimized import OptimizedConfig, OptimizedPolicy
from robopolicy.policies.wrappers.selected import SelectedConfig, SelectedPolicy
from robopolicy.policies.wrappers.staged_decoder import StagedDecoder, StagedDecoderConfig
from robopolicy.policies.wrappers.staged_diffusion import StagedDiffusion, StagedDiffusionConfig
from robopolicy.policies.wrappers.tree import TreeConfig, TreePolicy
from robopolicy.policies.wrappers.zero_noise import ZeroNoiseConfig, ZeroNoisePolicy

POLICIES.update(
    {
        "autoregressive": (AutoregressiveConfig, AutoregressivePolicy),
        "callable": (CallableConfig, CallablePolicy),
        "composed": (ComposedConfig, ComposedPolicy),
        "consistency": (ConsistencyConfig, ConsistencyPolicy),
        "corrected": (CorrectedConfig, CorrectedPolicy),
        "diffusion": (DiffusionConfig, DiffusionPolicy),
        "edited": (EditedConfig, EditedPolicy),
        "edm": (EDMConfig, EDMPolicy),
        "flow": (FlowConfig, FlowPolicy),
        "gated": (GatedConfig, GatedPolicy),
        "gaussian": (GaussianConfig, GaussianPolicy),
        "latent": (LatentConfig, LatentPolicy),
        "meanflow": (MeanFlowConfig, MeanFlowPolicy),
        "mixture": (MixtureConfig, MixturePolicy),
        "optimized": (OptimizedConfig, OptimizedPolicy),
        "selected": (SelectedConfig, SelectedPolicy),
        "sequence": (SequenceConfig, SequencePolicy),
        "shortcut": (ShortcutConfig, ShortcutPolicy),
        "staged_decoder": (StagedDecoderConfig, StagedDecoder),
        "staged_diffusion": (StagedDiffusionConfig, StagedDiffusion),
        "swaddled": (SwaddledConfig, SwaddledPolicy),
        "tree": (TreeConfig, TreePolicy),
        "zero_noise": (ZeroNoiseConfig, ZeroNoisePolicy),
    }
)


def make_policy(name: str, config: Any, spec: PolicySpec) -> Policy:
    """Build the policy `name`; `config` None takes its defaults."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    config_class, policy_class = POLICIES[name]
    config = config_class() if config is None else config
    if not isinstance(config, config_class):
        raise UserError(f"Policy '{name}' needs a {config_class.__name__}, got {type(config).__name__}.")
    return policy_class(config, spec)  # type: ignore[call-arg]
